"""The ranks' measurements are fitted to a profile, and speeds."""

import pytest

from lightning_pipeshift.plan.inputs.cluster import Cluster, Device
from lightning_pipeshift.plan.inputs.profile import LayerProfile, Profile
from lightning_pipeshift.runtime.planning.profile_fitting import (
    RankFigures,
    estimates_by_kind,
    profile_of,
)

SIZES = {"a": 1, "b": 1, "c": 2, "d": 4}
LAYERS = tuple(LayerProfile(name, parameter_bytes=size) for name, size in SIZES.items())
MODEL = Profile(LAYERS, samples=2.0, microbatches=4)


def cluster(kinds):
    return Cluster(tuple(Device("host", kind) for kind in kinds))


def found(kinds, *figures):
    return profile_of(MODEL, cluster(kinds), figures)


def times(**of_layers):
    return {"abcd".index(name): seconds for name, seconds in of_layers.items()}


EQUAL = times(a=(1.0, 2.0), b=(1.0, 2.0), c=(2.0, 4.0), d=(3.0, 6.0))


def slower(factor, of_layers):
    return {layer: (factor * f, factor * b) for layer, (f, b) in of_layers.items()}


def test_guesses_alone():
    profile, machines = found("XX", RankFigures(estimates=EQUAL), RankFigures(estimates=EQUAL))
    assert profile.kinds["X"].forward == (1.0, 1.0, 2.0, 3.0)
    assert profile.kinds["X"].backward == (2.0, 2.0, 4.0, 6.0)
    assert [device.speed for device in machines.devices] == [1.0, 1.0]
    assert (profile.samples, profile.microbatches, profile.step_seconds) == (2.0, 4, 0.0)


def test_a_slow_device_of_a_kind_has_a_speed():
    figures = [RankFigures(estimates=slower(factor, EQUAL)) for factor in (1, 1, 4)]
    profile, machines = found("XXX", *figures)
    assert [device.speed for device in machines.devices] == [1.0, 1.0, 0.25]
    assert profile.times_on(machines.devices[2]).forward == (4.0, 4.0, 8.0, 12.0)


def test_speeds_that_are_noise_are_equal():
    figures = [RankFigures(estimates=slower(factor, EQUAL)) for factor in (1.0, 1.02, 0.98)]
    assert [d.speed for d in found("XXX", *figures)[1].devices] == [1.0, 1.0, 1.0]


def test_each_kind_has_times_of_its_own():
    figures = [RankFigures(estimates=EQUAL), RankFigures(estimates=slower(3, EQUAL))]
    profile, machines = found("XY", *figures)
    assert profile.kinds["Y"].forward == (3.0, 3.0, 6.0, 9.0)
    assert [device.speed for device in machines.devices] == [1.0, 1.0]


def test_what_training_measured_goes_before_guesses():
    first = RankFigures(estimates=EQUAL, times=times(a=(2.0, 3.0), b=(1.0, 3.0)))
    last = RankFigures(estimates=EQUAL, times=times(c=(2.0, 4.0), d=(3.0, 6.0)))
    # The first takes 9 where 6 were estimated, the last what was estimated: 1.5 and 1, the middle
    # 1.25.
    profile, machines = found("XX", first, last)
    speeds = [device.speed for device in machines.devices]
    assert speeds == pytest.approx([1.25 / 1.5, 1.25])
    for rank, layer, forward in ((0, 0, 2.0), (0, 1, 1.0), (1, 2, 2.0), (1, 3, 3.0)):
        assert profile.times_on(machines.devices[rank]).forward[layer] == pytest.approx(forward)
    # On the other device: as it was tried there, times what that device takes more.
    assert profile.times_on(machines.devices[0]).forward[3] == pytest.approx(3.0 * 1.5)


def test_a_layer_that_nobody_could_try_goes_by_its_parameters():
    tried = times(a=(1.0, 2.0), b=(1.0, 2.0))
    profile, _ = found("X", RankFigures(estimates=tried))
    assert profile.kinds["X"].forward == (1.0, 1.0, 2.0, 4.0)
    nothing, _ = found("X", RankFigures())
    assert nothing.kinds["X"].forward == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("estimates", [EQUAL, slower(2, EQUAL)])
def test_a_stage_without_layers_keeps_the_speed_that_it_had(estimates):
    own = RankFigures(estimates=estimates, times=EQUAL)
    # It was as fast as the other when it was tried, and half as fast when it had layers.
    drained = RankFigures(estimates=estimates, earlier=slower(2, times(d=EQUAL[3])))
    _, machines = found("XX", own, drained)
    one, two = (device.speed for device in machines.devices)
    assert one / two == pytest.approx(2.0)


@pytest.mark.parametrize(("slowdown", "speed"), [(1.0, 1.0), (4.0, 0.25)])
def test_a_stage_without_layers_that_is_measured_again(slowdown, speed):
    # In training, everything takes a quarter more than before it.
    there = RankFigures(estimates=EQUAL, times=slower(1.25, EQUAL))
    again = RankFigures(estimates=EQUAL, slowdown=slowdown)
    profile, machines = found("XXX", there, there, again)
    assert profile.kinds["X"].forward == (1.25, 1.25, 2.5, 3.75)
    assert [device.speed for device in machines.devices] == [1.0, 1.0, speed]


@pytest.mark.parametrize(
    ("evidence", "speed"),
    [
        # It looks as fast as the others now: with half its layers it is within its quota.
        ({"earlier": slower(2, EQUAL)}, 0.5),
        ({"earlier": slower(2, EQUAL), "times": times(a=(5.0, 10.0))}, 0.2),
        ({"slowdown": 1.0}, 1.0),
        ({"slowdown": 2.0}, 0.5),
        ({}, 1.0),
    ],
)
def test_a_stage_that_gave_layers_away_is_as_slow_as_the_evidence_says(evidence, speed):
    others = RankFigures(estimates=EQUAL, times=EQUAL)
    held = RankFigures(estimates=EQUAL, **{"times": times(a=(1.0, 2.0)), **evidence})
    _, machines = found("XXX", others, others, held)
    assert [device.speed for device in machines.devices] == pytest.approx([1.0, 1.0, speed])


def test_layers_of_a_rank_that_counts_as_slow_are_no_cheaper_than_others():
    """It ran its own at full speed, as with little to do it is within its quota."""
    others = RankFigures(estimates=EQUAL, times=EQUAL)
    held = RankFigures(estimates=EQUAL, times=times(d=EQUAL[3]), earlier=slower(4, EQUAL))
    profile, machines = found("XXX", others, others, held)
    assert [device.speed for device in machines.devices] == pytest.approx([1.0, 1.0, 0.25])
    assert profile.kinds["X"].forward == pytest.approx([EQUAL[n][0] for n in range(4)])
    alone = RankFigures(estimates=EQUAL, times=times(a=EQUAL[0], b=EQUAL[1], c=EQUAL[2]))
    profile, _ = found("XX", alone, held)
    first, *_, last = profile.kinds["X"].forward
    assert last / first == pytest.approx(EQUAL[3][0] / EQUAL[0][0])


def test_a_slowness_that_a_probe_and_the_layers_show_counts_once():
    others = RankFigures(estimates=EQUAL, times=EQUAL)
    held = RankFigures(estimates=EQUAL, times=slower(3, times(d=EQUAL[3])), slowdown=4.0)
    _, machines = found("XX", others, held)
    one, two = (device.speed for device in machines.devices)
    assert one / two == pytest.approx(4.0)


def test_what_an_action_takes_besides_layers():
    common = {"estimates": EQUAL, "times": EQUAL}
    figures = [
        RankFigures(**common, extra=(0.1, 0.2)),
        RankFigures(**common, extra=(0.3, 0.4)),
        RankFigures(**common, extra=(1.2, 1.0), is_last=True),
    ]
    profile, _ = found("XXX", *figures)
    times_on = profile.kinds["X"]
    assert (times_on.action_forward, times_on.action_backward) == pytest.approx((0.2, 0.3))
    assert (times_on.tail_forward, times_on.tail_backward) == pytest.approx((1.0, 0.7))


def test_the_stage_that_waits_least_says_what_lies_between_steps():
    figures = [RankFigures(outside_seconds=seconds) for seconds in (0.5, 0.1, None)]
    assert found("XXX", *figures)[0].step_seconds == 0.1


def test_what_the_model_takes_already_is_room_for_it():
    machines = Cluster((Device("h", "X", free_bytes=10, memory_bytes=30), Device("h", "X")))
    figures = [RankFigures(held_bytes=5), RankFigures(held_bytes=5)]
    _, after = profile_of(MODEL, machines, figures)
    assert [device.free_bytes for device in after.devices] == [15, 0], "not known stays not known"


def test_bytes_are_those_of_whoever_knows():
    figures = [
        RankFigures(saved_bytes={0: 10, 1: 20}, optimizer_bytes={0: 8}),
        RankFigures(saved_bytes={1: 30}, input_bytes={1: 5}),
    ]
    profile, _ = found("XX", *figures)
    assert [layer.saved_bytes for layer in profile.layers] == [10, 30, 0, 0]
    assert [layer.optimizer_bytes for layer in profile.layers] == [8, 0, 0, 0]
    assert [layer.input_bytes for layer in profile.layers] == [0, 5, 0, 0]


def test_what_layers_take_for_a_moment_is_the_most_that_any_rank_has_seen():
    figures = [RankFigures(estimates=EQUAL, working_bytes={0: n, 2: 5}) for n in (3, 4)]
    profile, _ = found("XX", *figures)
    assert [layer.working_bytes for layer in profile.layers] == [4, 0, 5, 0]


def test_estimates_of_layers_of_one_kind_tell_how_fast_ranks_are() -> None:
    """Layers 0, 1, 3 and 4 are of one kind. Rank 1 is three times as slow, and has a layer of its
    own kind, which must not look three times as large.
    """
    figures = [
        RankFigures({}, {0: (1.0, 2.0), 1: (1.0, 2.0), 2: (5.0, 5.0)}),
        RankFigures({}, {3: (3.0, 6.0), 4: (3.0, 6.0), 5: (6.0, 9.0)}),
    ]
    estimates = estimates_by_kind(figures, [7, 7, 8, 7, 7, 9])
    assert estimates == {
        **dict.fromkeys((0, 1, 3, 4), (2.0, 4.0)),
        2: (10.0, 10.0),
        5: (4.0, 6.0),
    }
    ratios = [
        sum(map(sum, mine.times.values())) / sum(sum(estimates[n]) for n in mine.times)
        for mine in figures
    ]
    assert ratios == [0.5, 1.5]
