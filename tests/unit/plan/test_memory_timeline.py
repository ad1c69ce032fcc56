"""1F1B of two stages and three microbatches, where a forward takes 1 s and a backward 2 s::

stage 0   F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
stage 1   .  F0 B0 B0 F1 B1 B1 F2 B2 B2
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lightning_pipeshift.plan.cost.memory_timeline import (
    HOST,
    HOST_LATENCY,
    Effects,
    LayerLoad,
    Links,
    Moved,
    StageTrace,
    effects,
    moments_of,
    traces,
)
from lightning_pipeshift.plan.cost.simulator import Actions, Costs, Span, TimedRow, clock, simulate
from lightning_pipeshift.plan.schedule.actions import Action, Kind

Row = tuple[Span, ...]


def spans(text: str) -> Row:
    """``"F0 0 1, B0 1 3"``: actions, and when each begins and ends."""
    words = [entry.split() for entry in text.split(",")]
    return tuple(Span(Action.parse(w[0]), float(w[1]), float(w[2])) for w in words)


FIRST = spans("F0 0 1, F1 1 2, B0 4 6, F2 6 7, B1 7 9, B2 10 12")
LAST = spans("F0 1 2, B0 2 4, F1 4 5, B1 5 7, F2 7 8, B2 8 10")
ONE = LayerLoad(0, 1.0, 2.0)
KEPT = replace(ONE, kept_bytes=10)
AGAIN = replace(ONE, again_bytes=10, input_bytes=2)

# A tensor of 10 bytes takes half a second, to the other stage and back.
TO_THE_OTHER = Links({(0, 1): (0.25, 40.0), (1, 0): (0.25, 40.0)})


def changes(trace: StageTrace) -> list[tuple[float, float]]:
    """When another amount is held, and which."""
    found = [(0.0, 0.0)]
    for moment, held in zip(trace.times.tolist(), trace.held_bytes.tolist(), strict=True):
        if held != found[-1][1]:
            found.append((moment, held))
    return found[1:]


def effects_of(stage: int, row: Row, loads: Sequence[LayerLoad], links: Links) -> Effects:
    actions = Actions(span.action for span in row)
    starts, ends = (np.array([span[place] for span in row]) for place in (1, 2))
    return effects(stage, moments_of(TimedRow(actions, starts, ends), loads), loads, links)


def alone(row: Row, loads: Sequence[LayerLoad], links: Links | None = None) -> StageTrace:
    """The trace of stage 0, for which nobody lends anything."""
    return effects_of(0, row, loads, links or Links()).trace()


def moved(*parts: tuple[int, float], num_bytes: int = 10) -> LayerLoad:
    return replace(ONE, moved=(Moved(num_bytes, parts),))


def test_the_timeline_is_that_of_the_simulator():
    timeline = simulate(clock("1f1b", 2, 3), Costs((1.0, 1.0), (2.0, 2.0), (0.0,), (0.0,)))
    assert timeline.rows == (FIRST, LAST)


# --- what stays, and what is recomputed ---


def test_what_is_kept():
    # At 6 s one goes when the next comes: what goes, goes before.
    assert changes(alone(FIRST, [KEPT])) == [(0, 10), (1, 20), (9, 10), (12, 0)]
    assert changes(alone(LAST, [KEPT])) == [(1, 10), (10, 0)]
    assert alone(FIRST, [KEPT]).peak_bytes == 20


def test_nothing_is_held_for_what_has_no_backward():
    assert changes(alone(spans("F0 0 1, F1 1 2"), [KEPT, AGAIN, moved((HOST, 1.0))])) == []
    assert alone(FIRST, []).peak_bytes == 0


def test_what_is_recomputed_in_an_action_of_its_own():
    """From the begin of the action on all of it is there again."""
    row = spans("F0 0 1, F1 1 2, R0 2 3, B0 4 6, F2 6 7, R1 7 8, B1 8 10, R2 10 11, B2 11 13")
    trace = alone(row, [AGAIN])
    # 2 bytes of input for each; of F1 and of F2, and of what comes again, there is one at a time.
    assert changes(trace) == [(0, 12), (1, 14), (10, 12), (13, 0)]


def test_what_is_recomputed_in_the_backward():
    expected = [(0, 12), (1, 14), (2, 4), (4, 14), (9, 2), (10, 12), (12, 0)]
    assert changes(alone(FIRST, [AGAIN])) == expected
    # Directly after its forward: what is let go of comes back at once.
    assert changes(alone(LAST, [AGAIN])) == [(1, 12), (10, 0)]


def test_layers_take_their_parts_of_an_action():
    """Forward the first has 1 s of 4 s, and backward the last 2 s of 8 s."""
    row = spans("F0 0 4, B0 10 18")
    loads = [LayerLoad(0, 1.0, 6.0, kept_bytes=10), LayerLoad(1, 3.0, 2.0, kept_bytes=1)]
    assert changes(alone(row, loads)) == [(0, 10), (1, 11), (12, 10), (18, 0)]
    # The first layer comes again when the last has had its backward.
    loads[0] = replace(loads[0], kept_bytes=0, again_bytes=10)
    assert changes(alone(row, loads)) == [(0, 10), (1, 1), (12, 10), (18, 0)]
    loads[1] = replace(loads[1], kept_bytes=0, again_bytes=1, input_bytes=1)
    assert changes(alone(row, loads)) == [(0, 10), (1, 2), (4, 1), (10, 2), (12, 10), (18, 0)]
    # What makes no difference in time shares it equally.
    loads = [LayerLoad(n, 0.0, 0.0, kept_bytes=10) for n in range(2)]
    assert changes(alone(row, loads)) == [(0, 10), (2, 20), (14, 10), (18, 0)]


@pytest.mark.parametrize("seed", range(20))
def test_peaks_of_the_schedules(seed):
    """In units, which are what a stage saves for a microbatch."""
    draw = np.random.default_rng(seed)
    num_stages, num_microbatches = int(draw.integers(1, 5)), int(draw.integers(4, 9))
    seconds = draw.uniform(0.1, 4.0, (2, num_stages, 2)).tolist()
    unit = [int(size) for size in draw.integers(1, 1000, 2)]
    costs = Costs(
        *(tuple(map(sum, of_kind)) for of_kind in seconds),
        *(tuple(draw.uniform(0.0, 1.0, num_stages - 1).tolist()) for _ in range(2)),
    )

    def peaks(schedule: str) -> list[float]:
        rows = simulate(clock(schedule, num_stages, num_microbatches), costs).rows
        found = []
        for stage, row in enumerate(rows):
            forward, backward = seconds[0][stage], seconds[1][stage]
            loads = [
                LayerLoad(n, forward[n], backward[n], kept_bytes=size)
                for n, size in enumerate(unit)
            ]
            found.append(alone(row, loads).peak_bytes / sum(unit))
        return found

    assert peaks("1f1b") == [num_stages - stage for stage in range(num_stages)]
    assert peaks("gpipe") == [num_microbatches] * num_stages
    assert peaks("eager_1f1b") == [
        min(2 * (num_stages - stage) - 1, num_microbatches) for stage in range(num_stages)
    ]


# --- what is moved ---


# It leaves from the end of its forward, for half a second, and comes back in half a second before
# its backward: those of F0, of F1 and of F2.
THERE_AND_BACK = [
    *[(0.0, 10), (1.0, 20), (1.5, 10), (2.5, 0), (3.5, 10), (6.5, 20), (7.5, 10), (9.0, 0)],
    *[(9.5, 10), (12.0, 0)],
]


def test_what_is_moved_to_the_host():
    links = Links(to_host=(10 / (0.5 - HOST_LATENCY), 0.0))
    trace = alone(FIRST, [moved((HOST, 1.0))], links)
    assert np.allclose(changes(trace), THERE_AND_BACK)
    # From the begin of the way out to the end of the way back: two from 2 s to 4 s.
    assert trace.host_bytes == 20
    assert trace.late_seconds == trace.lent_bytes == 0


def test_what_is_moved_to_another_stage():
    first, last = traces(
        [
            effects_of(0, FIRST, [moved((1, 1.0))], TO_THE_OTHER),
            effects_of(1, LAST, [KEPT], TO_THE_OTHER),
        ]
    )
    assert changes(first) == THERE_AND_BACK
    # Of its own it has 10 all the time; for the other from 1 s to 4 s, 2 s to 7 s, and 7 s to 10 s.
    assert changes(last) == [(1, 20), (2, 30), (4, 20), (10, 0)]
    assert last.lent_bytes == 20
    assert last.peak_bytes == 30
    assert first.lent_bytes == first.host_bytes == last.host_bytes == 0


def test_what_stays_is_counted_with_what_is_moved():
    trace = alone(FIRST, [replace(moved((1, 1.0)), kept_bytes=1)], TO_THE_OTHER)
    kept = alone(FIRST, [replace(ONE, kept_bytes=1)])
    moments = np.arange(0.25, 12.0, 0.5)
    other = alone(FIRST, [moved((1, 1.0))], TO_THE_OTHER)
    assert (held(trace, moments) == held(kept, moments) + held(other, moments)).all()


def test_parts_go_to_each_their_own_place():
    """A quarter to the next stage, in 1 s, and the rest to the one after it, in 3 s."""
    row = spans("F0 0 1, B0 10 12")
    links = Links({(0, 1): (0.0, 2.0), (0, 2): (0.0, 2.0)})
    load = moved((1, 0.25), (2, 0.75), num_bytes=8)
    first, *others = traces(
        [effects_of(0, row, [load], links), *[effects_of(1, (), [], links)] * 2]
    )
    assert changes(first) == [(0, 8), (2, 6), (4, 0), (7, 6), (9, 8), (12, 0)]
    assert [changes(other) for other in others] == [[(1, 2), (10, 0)], [(1, 6), (10, 0)]]
    assert [other.lent_bytes for other in others] == [2, 6]


TWO = [
    LayerLoad(0, 1.0, 2.0, moved=(Moved(10, ((1, 1.0),)),)),
    LayerLoad(1, 1.0, 2.0, moved=(Moved(100, ((1, 1.0),)),)),
]


def test_a_link_carries_one_after_the_other():
    """The first layer's leave in 1 s, the second's in 4 s; the second's come back first."""
    row = spans("F0 0 2, B0 14 18")
    links = Links({(0, 1): (0.0, 25.0)})
    loads = [TWO[1], TWO[0]]
    trace = alone(row, loads, links)
    # Out: 100 bytes from 1 s to 5 s, and 10 bytes, made at 2 s, from 5 s to 5.4 s. Back: 100 bytes
    # are there at 16 s, and begin at 12 s; 10 bytes are needed at 14 s, but go before those.
    assert trace.late_seconds == 0
    assert np.allclose(
        changes(trace),
        [(0, 100), (1, 110), (5, 10), (5.4, 0), (11.6, 10), (12, 110), (16, 100), (18, 0)],
    )


def test_links_do_not_wait_for_each_other():
    row = spans("F0 0 2, B0 14 18")
    to_host = replace(TWO[0], moved=(Moved(10, ((HOST, 1.0),)),))
    links = Links({(0, 1): (0.0, 25.0)}, (10 / (1 - HOST_LATENCY),))
    trace = alone(row, [TWO[1], to_host], links)
    assert np.allclose(
        changes(trace),
        [(0, 100), (1, 110), (3, 100), (5, 0), (12, 100), (13, 110), (16, 100), (18, 0)],
    )
    assert trace.host_bytes == 10


def test_what_is_late_stays_and_says_by_how_much():
    """Out until 3 s, but back from 2 s on; the lender has room for it until it is needed."""
    row = spans("F0 0 1, B0 4 6")
    links = Links({(0, 1): (0.0, 5.0)})
    first, last = traces(
        [effects_of(0, row, [moved((1, 1.0))], links), effects_of(1, (), [], links)]
    )
    assert changes(first) == [(0, 10), (6, 0)]
    assert first.late_seconds == 1
    assert changes(last) == [(1, 10), (4, 0)]
    # The next one waits for it on the link, and is the worst.
    row = spans("F0 0 1, F1 1 2, B0 4 6, B1 6 8")
    trace = alone(row, [moved((1, 1.0))], links)
    assert trace.late_seconds == 1
    trace = alone(spans("F0 0 1, F1 1 2, B0 4 5, B1 5 6"), [moved((1, 1.0))], links)
    # Back from 2 s, so that the second is back from 3 s on, and it is gone at 5 s only.
    assert changes(trace) == [(0, 10), (1, 20), (5, 10), (6, 0)]
    assert trace.late_seconds == 2


def test_just_in_time_is_not_late():
    links = Links({(0, 1): (0.0, 10.0)})
    trace = alone(spans("F0 0 1, B0 3 5"), [moved((1, 1.0))], links)
    assert trace.late_seconds == 0
    assert changes(trace) == [(0, 10), (5, 0)]


@pytest.mark.parametrize("place", [HOST, 1])
def test_without_a_way_it_never_leaves(place):
    trace = alone(FIRST, [moved((place, 1.0))])
    assert trace.late_seconds == math.inf
    assert changes(trace) == changes(alone(FIRST, [KEPT]))


def test_rates_and_seconds_of_links():
    links = Links({(0, 1): (0.5, 10.0)}, (4.0,))
    assert (links.rate(0, 1), links.rate(1, 0), links.rate(0, HOST)) == (10, 0, 4)
    assert links.rate(1, HOST) == 0
    assert links.seconds(0, 1, 20) == 2.5
    assert links.seconds(0, HOST, 20) == 5 + HOST_LATENCY
    assert links.seconds(1, 0, 20) == links.seconds(1, HOST, 20) == math.inf


# --- against a slow reference ---


def held(trace: StageTrace, moments: np.ndarray) -> np.ndarray:
    """The bytes held at each moment."""
    steps = np.append(0.0, trace.held_bytes)
    return steps[np.searchsorted(trace.times, moments, side="right")]


Interval = tuple[float, float, float]
"""From when until when how many bytes are held."""


def queue(ready: Sequence[float], lengths: Sequence[float]) -> list[float]:
    """When each is done that is ready then, of which one goes after the other."""
    ends, free = [0.0] * len(ready), -math.inf
    for one in sorted(range(len(ready)), key=lambda one: ready[one]):
        free = ends[one] = max(free, ready[one]) + lengths[one]
    return ends


def slow_reference(
    stage: int, row: Row, loads: Sequence[LayerLoad], links: Links
) -> tuple[dict[int | str, list[Interval]], float]:
    """All that is held: here, on the host and by stages; and by how much it is late."""
    found: dict[int | str, list[Interval]] = {"here": [], HOST: []}
    when = {(span.action.kind, span.action.microbatch): span for span in row}
    out: dict[int, list[tuple[float, float, float, float, float]]] = {}
    totals = [sum(load.forward_seconds for load in loads), sum(x.backward_seconds for x in loads)]
    for span in row:
        if span.action.kind is not Kind.FORWARD:
            continue
        backward = when[Kind.BACKWARD, span.action.microbatch]
        again = when.get((Kind.RECOMPUTE, span.action.microbatch))
        now, later = span.start, backward.end
        for load in loads:
            begun = now
            now += load.forward_seconds / totals[0] * (span.end - span.start)
            freed = later
            later -= load.backward_seconds / totals[1] * (backward.end - backward.start)
            found["here"] += [
                (begun, freed, load.kept_bytes),
                (begun, freed, load.input_bytes),
                (begun, now, load.again_bytes),
                (again.start if again else later, freed, load.again_bytes),
            ]
            # Recomputing the rest of a layer takes the tensors that were moved.
            needed = again.start if again and load.again_bytes else later
            for group in load.moved:
                for place, part in group.parts:
                    entry = (begun, now, needed, freed, group.num_bytes * part)
                    out.setdefault(place, []).append(entry)
    late = 0.0
    for place, group_of in out.items():
        lengths = [links.seconds(stage, place, entry[-1]) for entry in group_of]
        gone = queue([made for _, made, _, _, _ in group_of], lengths)
        # The way back is the way out, if time ran backwards.
        back = [-end for end in queue([-needed for _, _, needed, _, _ in group_of], lengths)]
        for entry, left, begins, length in zip(group_of, gone, back, lengths, strict=True):
            begun, _, needed, freed, size = entry
            late = max(late, left - begins)
            if left < begins:
                found["here"] += [(begun, left, size), (begins, freed, size)]
            else:
                found["here"].append((begun, freed, size))
            found.setdefault(place, []).append((left - length, max(needed, left - length), size))
    return found, late


def at(intervals: Sequence[Interval], moment: float) -> float:
    return sum(size for begin, end, size in intervals if begin <= moment < end)


@pytest.mark.parametrize("seed", range(24))
def test_traces_are_those_of_a_slow_reference(seed):
    draw = np.random.default_rng(seed)
    num_stages = int(draw.integers(1, 4))
    num_layers = draw.integers(1, 4, num_stages).tolist()
    seconds = [draw.uniform(0.2, 2.0, (2, num)).tolist() for num in num_layers]
    recomputing = frozenset(s for s in range(num_stages) if draw.random() < 0.5)
    payload, gradient = draw.uniform(0.0, 1.0, (2, num_stages - 1)).tolist()
    costs = Costs(
        tuple(sum(forward) for forward, _ in seconds),
        tuple(sum(backward) for _, backward in seconds),
        tuple(payload),
        tuple(gradient),
        tuple(float(stage in recomputing) for stage in range(num_stages)),
    )
    schedule = ("1f1b", "gpipe", "eager_1f1b")[seed % 3]
    rows = simulate(clock(schedule, num_stages, int(draw.integers(1, 7)), recomputing), costs).rows
    rates = draw.choice([2.0, 8.0, 64.0], (num_stages, num_stages)).tolist()
    pairs = itertools.permutations(range(num_stages), 2)
    links = Links({(a, b): (0.01, rates[a][b]) for a, b in pairs}, tuple(rates[0]))

    def load(stage: int, layer: int) -> LayerLoad:
        kept, again, inputs = draw.integers(0, 10, 3).tolist()
        sizes = (kept, again, inputs if again else 0)
        places = [HOST, *(other for other in range(num_stages) if other != stage)]
        groups = []
        for _ in range(int(draw.integers(0, 3))):
            chosen = draw.permutation(places)[: int(draw.integers(1, 3))].tolist()
            parts = [(0.25, 0.75), (1.0,)][len(chosen) == 1]
            groups.append(Moved(int(draw.integers(1, 9)), tuple(zip(chosen, parts, strict=True))))
        forward, backward = seconds[stage]
        return LayerLoad(layer, forward[layer], backward[layer], *sizes, moved=tuple(groups))

    loads = [[load(s, n) for n in range(num)] for s, num in enumerate(num_layers)]
    found = traces([effects_of(s, rows[s], loads[s], links) for s in range(num_stages)])
    expected = [slow_reference(s, rows[s], loads[s], links) for s in range(num_stages)]
    end = max(row[-1].end for row in rows)
    for stage, trace in enumerate(found):
        own, late = expected[stage]
        lent = [interval for places, _ in expected for interval in places.get(stage, ())]
        moments = draw.uniform(0.0, 1.05 * end, 200)
        there = [at([*own["here"], *lent], moment) for moment in moments]
        assert held(trace, moments) == pytest.approx(there, abs=1e-6)
        assert trace.late_seconds == pytest.approx(late, abs=1e-9)
        # Between two changes nothing changes: that is where the peaks are.
        for intervals, peak in (
            ([*own["here"], *lent], trace.peak_bytes),
            (lent, trace.lent_bytes),
            (own[HOST], trace.host_bytes),
        ):
            ends = sorted({time for begin, end, _ in intervals for time in (begin, end)})
            middles = [(a + b) / 2 for a, b in itertools.pairwise(ends) if b - a > 1e-9]
            most = max((at(intervals, middle) for middle in middles), default=0.0)
            assert peak == pytest.approx(most, abs=1e-6)
