import functools
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from lightning_pipeshift.errors import BudgetError
from lightning_pipeshift.plan.compression import (
    SMALLEST_BYTES,
    Compressed,
    Compression,
    Room,
    mappings,
)
from lightning_pipeshift.plan.footprint import Footprint, Footprints
from lightning_pipeshift.plan.memory_trace import HOST, Links
from lightning_pipeshift.plan.policies import (
    KeepAll,
    Planned,
    Policy,
    RecomputeAll,
    SwapAll,
    TensorRecord,
)
from lightning_pipeshift.plan.profile import LayerProfile, Profile
from lightning_pipeshift.plan.saved_tensors import Choice, SavedTensor, Swap
from lightning_pipeshift.plan.workload import Cut, Workload
from tests.plan.workloads import workload

MB = 1 << 20
BOUNDLESS = Room(math.inf, math.inf)


@dataclass(frozen=True)
class Case:
    """A small virtual machine, cut already."""

    profile: Profile
    workload: Workload
    links: Links
    counts: tuple[int, ...]

    def compressed(
        self, rooms: Sequence[Room], policy: Policy | None = None, recompute: str = "auto"
    ) -> Compressed:
        problem = Compression(
            self.profile, self.workload, self.links, rooms, policy or Planned(), recompute
        )
        return problem.compressed(self.counts)

    def footprint(self, recompute: Sequence[int] = (), swaps: Sequence[Swap] = ()) -> Footprint:
        cut = Cut(self.counts, frozenset(recompute))
        return Footprints(self.profile, self.workload, self.links).of(cut, swaps)

    @property
    def owners(self) -> list[int]:
        return [stage for stage, count in enumerate(self.counts) for _ in range(count)]


def case(
    tensors: Sequence[Sequence[float]],
    counts: Sequence[int],
    *,
    forward: float | Sequence[float] = 1.0,
    link: float = 1e12,
    host: float = 0.0,
    microbatches: int = 8,
    schedule: str = "1f1b",
    static: float = 0.0,
) -> Case:
    """Layers whose tensors have so many MB; links and ways to the host carry so many MB/s."""
    num_stages, num_layers = len(counts), len(tensors)
    sizes = [[round(MB * size) for size in row] for row in tensors]
    return Case(
        _profile(sizes),
        workload(
            np.broadcast_to(np.asarray(forward, float), num_layers),
            (1,) * num_stages,
            saved=[sum(row) for row in sizes],
            static=MB * static,
            microbatches=microbatches,
            schedule=schedule,
        ),
        Links(
            {pair: (0.0, MB * link) for pair in itertools.permutations(range(num_stages), 2)},
            (MB * host,) * num_stages,
        ),
        tuple(counts),
    )


def random_case(
    seed: int, num_stages: int, num_layers: int, most_tensors: int, schedule: str | None = None
) -> Case:
    """Unlike layers, devices and links; some devices have no way to the host."""
    draw = np.random.default_rng(seed)
    num_tensors = draw.integers(1, most_tensors + 1, num_layers)
    sizes = [[MB * int(size) for size in draw.integers(1, 9, num)] for num in num_tensors]
    saved = [sum(row) for row in sizes]
    unit = sum(saved) / num_layers

    def rate() -> float:
        return unit / float(draw.choice([0.05, 0.3, 1, 3]))

    ends = sorted(draw.choice(np.arange(1, num_layers), num_stages - 1, replace=False))
    bounds = [0, *map(int, ends), num_layers]
    return Case(
        _profile(sizes),
        workload(
            np.exp(0.5 * draw.normal(size=num_layers)),
            draw.choice([1, 0.5], num_stages),
            saved=saved,
            inputs=[min(size, MB * int(draw.integers(0, 3))) for size in saved],
            static=MB * draw.integers(0, 5, num_layers),
            microbatches=int(draw.integers(1, 7)),
            schedule=schedule or str(draw.choice(["1f1b", "gpipe", "eager_1f1b"])),
            payload=float(draw.choice([0, 0.1])),
        ),
        Links(
            {pair: (0.0, rate()) for pair in itertools.permutations(range(num_stages), 2)},
            tuple(rate() if draw.random() < 0.8 else 0.0 for _ in range(num_stages)),
        ),
        tuple(end - begin for begin, end in itertools.pairwise(bounds)),
    )


def _profile(sizes: Sequence[Sequence[int]]) -> Profile:
    return Profile(
        tuple(
            LayerProfile(
                f"l{index}",
                saved_bytes=sum(row),
                tensors=tuple(SavedTensor(number, size) for number, size in enumerate(row)),
            )
            for index, row in enumerate(sizes)
        )
    )


def fits(found: Footprint, rooms: Sequence[Room]) -> bool:
    return all(
        peak <= room.budget_bytes and trace.host_bytes <= room.host_bytes
        for peak, trace, room in zip(found.peak_bytes, found.traces, rooms, strict=True)
    )


def seconds(found: Footprint) -> float:
    return found.timeline.step_seconds + found.late_seconds


def ways(found: Compressed) -> dict[tuple[int, int], tuple[int, ...]]:
    """Where each swapped tensor goes; every one goes to one place."""
    moved = [((swap.layer, n), swap.stages) for swap in found.swaps for n in swap.tensors]
    assert len(dict(moved)) == len(moved)
    return dict(moved)


# --- without need ---


@pytest.mark.parametrize("seed", range(10))
def test_with_boundless_budgets_everything_stays(seed):
    given = random_case(seed, 2 + seed % 3, 6, 3)
    found = given.compressed([BOUNDLESS] * len(given.counts))
    assert not found.swaps
    assert found.cut == Cut(given.counts)
    assert found.seconds == found.uncompressed.timeline.step_seconds


def test_with_just_enough_everything_stays():
    given = case([[1, 2], [3]], [1, 1], static=5)
    peaks = [5 + 2 * 3, 5 + 3]
    assert given.footprint().peak_bytes == tuple(MB * peak for peak in peaks)
    found = given.compressed([Room(MB * peak, 0) for peak in peaks])
    assert not found.swaps
    assert not found.cut.recompute
    found = given.compressed([Room(MB * peak - 1, 0) for peak in peaks])
    assert found.swaps or found.cut.recompute


# --- random cases ---


@pytest.mark.parametrize("seed", range(40))
def test_what_is_found_fits_or_the_error_says_what_would(seed):
    draw = np.random.default_rng(10_000 + seed)
    num_stages = int(draw.integers(2, 5))
    given = random_case(seed, num_stages, int(draw.integers(num_stages, 7)), 3)
    most = given.footprint().peak_bytes
    least = draw.uniform(0.2, 0.8)
    unit = sum(layer.saved_bytes for layer in given.profile.layers) / given.profile.num_layers
    hosts = unit * draw.choice([0, 2, 8, math.inf]) if seed % 2 else draw.choice([0, math.inf])
    rooms = [Room(peak * draw.uniform(least, 1.0), hosts) for peak in most]
    try:
        found = given.compressed(rooms)
    except BudgetError as error:
        said = re.search(r"a budget of ([\d.]+) (MB|GB) would do", str(error))
        assert said is not None
        budget = float(said[1]) * {"MB": 1e6, "GB": 1e9}[said[2]]
        # With a host that is nearly full, see the report: more of the device need not do.
        if hosts in (0, math.inf):
            enough = [Room(budget, hosts)] * num_stages
            assert fits(given.compressed(enough).footprint, enough)
    else:
        # Worked out anew: nothing is left of what the search remembers.
        anew = given.footprint(sorted(found.cut.recompute), found.swaps)
        assert fits(anew, rooms)
        assert anew.peak_bytes == found.footprint.peak_bytes
        assert found.seconds == seconds(anew)
        assert found.cut.counts == given.counts
        assert not found.cut.recompute & {swap.layer for swap in found.swaps}
        for (layer, _), stages in ways(found).items():
            assert given.owners[layer] not in stages
            assert stages or given.links.rate(given.owners[layer], HOST)


# --- against brute force ---


@dataclass(frozen=True)
class Everything:
    """All assignments of a case. Arrays: one row for each.

    Args:
        peak_bytes: of each stage.
        host_bytes: of each stage.
        seconds: of the step.
    """

    peak_bytes: np.ndarray
    host_bytes: np.ndarray
    seconds: np.ndarray

    def best(self, rooms: Sequence[Room]) -> float:
        """The shortest step that fits; infinite where none does."""
        budgets, hosts = np.array(rooms).T
        fit = (self.peak_bytes <= budgets).all(axis=1) & (self.host_bytes <= hosts).all(axis=1)
        return float(np.min(self.seconds, where=fit, initial=math.inf))


def everything(given: Case) -> Everything:
    """Two stages: each tensor stays, or goes to the host or the other stage, or its layer is
    recomputed.
    """
    footprints = Footprints(given.profile, given.workload, given.links)
    peaks, hosts, taken = [], [], []
    layers = [_of_layer(given, layer) for layer in range(given.profile.num_layers)]
    for chosen in itertools.product(*layers):
        again = frozenset(layer for layer, swaps in enumerate(chosen) if swaps is None)
        swaps = [swap for of_layer in chosen if of_layer for swap in of_layer]
        found = footprints.of(Cut(given.counts, again), swaps)
        peaks.append(found.peak_bytes)
        hosts.append([trace.host_bytes for trace in found.traces])
        taken.append(seconds(found))
    return Everything(np.array(peaks), np.array(hosts), np.array(taken))


def _of_layer(given: Case, layer: int) -> Iterator[list[Swap] | None]:
    yield None
    stage = given.owners[layer]
    places: list[tuple[int, ...] | None] = [None, (1 - stage,)]
    if given.links.rate(stage, HOST):
        places.append(())
    numbers = range(len(given.profile.layers[layer].tensors))
    for chosen in itertools.product(places, repeat=len(numbers)):
        by_place: dict[tuple[int, ...], list[int]] = {}
        for number, place in zip(numbers, chosen, strict=True):
            if place is not None:
                by_place.setdefault(place, []).append(number)
        yield [Swap(layer, tuple(found), place) for place, found in by_place.items()]


def tiny_cases(schedule: str, seeds: Sequence[int]) -> Iterator[tuple[int, Case, Everything]]:
    for seed in seeds:
        num_layers = 2 + seed % 2
        given = random_case(seed, 2, num_layers, 4 - num_layers, schedule)
        yield seed, given, everything(given)


def budgets_for(seed: int, every: Everything) -> list[list[Room]]:
    """Budgets between the least that each stage can hold and the most that it ever does."""
    draw = np.random.default_rng(20_000 + seed)
    low, high = every.peak_bytes.min(axis=0), every.peak_bytes[-1]
    most = every.host_bytes.max(initial=0.0)
    return [
        [
            Room(float(budget), float(on_host))
            for budget, on_host in zip(
                draw.uniform(low, high), most * draw.choice([0, 0.5, 1], 2), strict=True
            )
        ]
        for _ in range(3)
    ]
