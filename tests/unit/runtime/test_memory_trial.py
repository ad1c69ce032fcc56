"""Memory plans against recomputing all layers, by the seconds of steps that a test makes up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device
from lightning_pipeshift.plan.inputs.policies import Planned, SwapAll
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.inputs.saved_tensors import SavedTensor, Swap
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.plan.search.measurements import Measured
from lightning_pipeshift.runtime.offload.stage_memory import MemoryRequest
from lightning_pipeshift.runtime.planning.delivered import Estimate
from lightning_pipeshift.runtime.planning.make_plan import Settings
from lightning_pipeshift.runtime.planning.move_decision import (
    FEW_STEPS,
    MIN_GAIN,
    Decider,
    Decision,
    Window,
)
from lightning_pipeshift.runtime.planning.profile_fitting import RankFigures

TENSORS = (SavedTensor(0, 1000, spares=0.5), SavedTensor(1, 1000))
LAYER = LayerProfile("layer", saved_bytes=2000, tensors=TENSORS)
MEASURED = Measured(
    Profile((LAYER, replace(LAYER, name="other")), {"gpu": KindProfile((1.0, 1.0), (2.0, 2.0))}),
    Cluster((Device("here", "gpu", host_bandwidth=1e9),)),
    ((0,),),
)


def plan(cut: Cut, *swaps: Swap) -> Plan:
    return replace(MEASURED.plan("1f1b", 2, [cut], (swaps,)), ranks=((0,),))


KEPT = plan(Cut((2,)))
MOVES = plan(Cut((2,)), Swap(0, (0, 1)))
PARTS = plan(Cut((2,), frozenset({0, 1})), Swap(0, (0,), stays=True))
AGAIN = plan(Cut((2,), frozenset({0, 1})))
assert AGAIN.prediction is not None
EXPECTED = AGAIN.prediction.step_seconds


def decider(policy: Any = None, **chosen: Any) -> Decider:
    memory = MemoryRequest(policy=policy or Planned())
    return Decider(Settings(microbatches=2, memory=memory, **chosen), Topology(((0,),)))


def decide(mind: Decider, now: Plan, took: float, without_moves: Any = MEASURED) -> Decision:
    """What follows from the first few steps."""
    measured = Estimate(took, 0.0, FEW_STEPS)
    window = Window(FEW_STEPS, measured, MEASURED, without_moves=without_moves, is_early=True)
    return mind.decide(now, window)


def followed(first: Plan, *steps: float) -> tuple[list[str], Plan]:
    """The verdicts on what each few steps changed, and the plan in force then."""
    mind, now, found = decider(), first, []
    for took in steps:
        decision = decide(mind, now, took)
        verdict = decision.judged.verdict if decision.judged is not None else "-"
        found.append(f"{verdict} new" if decision.is_new else verdict)
        # The owners of layers are decided about later.
        assert decision.is_new or decision.goes_on
        now = Plan.from_json(decision.plan)
    return found, now


@pytest.mark.parametrize("first", [MOVES, PARTS])
def test_a_plan_slower_than_recomputing_everything_is_replaced_by_that(first: Plan) -> None:
    slow = 3.9 * EXPECTED
    found, now = followed(first, slow, 1.3 * EXPECTED, slow, slow)
    # However slow it becomes then: it has been tried once.
    assert found == ["- new", "kept", "-", "-"]
    assert now.is_like(AGAIN)


def test_if_recomputing_is_slower_the_plan_before_returns_for_good() -> None:
    slow = 2 * EXPECTED
    found, now = followed(MOVES, slow, 1.5 * slow, slow, 9 * slow)
    assert found == ["- new", "undone new", "kept", "-"]
    assert now.is_like(MOVES)


def test_a_plan_that_is_fast_enough_stays() -> None:
    found, now = followed(MOVES, (1 + MIN_GAIN) * EXPECTED, EXPECTED, 1.01 * EXPECTED)
    assert found == ["-", "-", "-"]
    assert now.is_like(MOVES)


def test_once_recomputing_is_faster_later_plans_recompute() -> None:
    mind = decider()
    decide(mind, MOVES, 100.0)
    decide(mind, AGAIN, EXPECTED)
    # Without room for more than that, or with it.
    assert not mind.decide(AGAIN, Window(20, Estimate(EXPECTED), MEASURED)).is_new
    assert decider().decide(AGAIN, Window(20, Estimate(EXPECTED), MEASURED)).is_new


def test_what_did_not_come_into_force_is_not_judged() -> None:
    """A user's move came first."""
    mind = decider()
    assert decide(mind, MOVES, 100 * EXPECTED).is_new
    again = decide(mind, PARTS, 90 * EXPECTED)
    assert (again.is_new, again.judged) == (True, None)


def test_what_moves_nothing_or_was_chosen_by_the_user_is_not_judged() -> None:
    for now in (KEPT, AGAIN):
        assert not decide(decider(), now, 100.0).is_new
    assert decider().judges_memory
    for mind in (decider(SwapAll()), decider(recompute="none"), decider(only_measures=True)):
        assert not mind.judges_memory
        assert not decide(mind, MOVES, 100.0).is_new


def test_without_room_or_layer_times_the_plan_stays() -> None:
    small = replace(MEASURED.cluster.devices[0], memory_bytes=1)
    unknown = replace(MEASURED.profile, kinds={"gpu": KindProfile((0.0, 0.0), (0.0, 0.0))})
    for other in (
        replace(MEASURED, cluster=Cluster((small,))),
        replace(MEASURED, profile=unknown),
    ):
        assert not decide(decider(), MOVES, 100.0, other).is_new


def test_the_change_says_what_came_and_what_is_expected() -> None:
    decision = decide(decider(), MOVES, 100.0)
    expected = f"all layers are recomputed: a step took 100 s, and {EXPECTED:.3g} s is expected"
    assert str(decision.change) == expected
    assert expected in decision.message


def test_waits_for_copies_do_not_make_recomputing_look_slow() -> None:
    # Under a plan that moves, layer 0 was measured with waits; layer 1 was never tried alone.
    figures = RankFigures(estimates={0: (1.0, 2.0)}, times={0: (4.0, 1.5), 1: (3.0, 3.0)})
    assert figures.without_moves.times == {0: (1.0, 1.5), 1: (3.0, 3.0)}
