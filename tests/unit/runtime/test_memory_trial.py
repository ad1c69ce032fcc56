"""Memory plans against recomputing everything, by the seconds of steps that a test makes up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipeshift.plan.arrange.measurements import Measured
from lightning_pipeshift.plan.cost.workload import Cut
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.inputs.profile_fitting import RankFigures
from lightning_pipeshift.plan.inputs.saved_tensors import SavedTensor, Swap
from lightning_pipeshift.runtime.planning.memory_trial import MARGIN, MemoryTrial, Verdict

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


def followed(
    first: Plan, *steps: float, alternative: Plan | None = AGAIN
) -> tuple[list[str], Plan]:
    """What two ranks find, of which the second only hears of it; and the plan in force then."""
    trial, other = MemoryTrial(True), MemoryTrial(True)
    now, found = first, []
    for took in steps:
        assert trial.is_due(now) == other.is_due(now)
        if not trial.is_due(now):
            found.append("not judged")
            continue
        verdict, now, message = trial.judge(now, took, lambda: alternative)
        assert bool(message) == (verdict is not Verdict.KEEP)
        trial.take(verdict, now)
        other.take(verdict, now)
        found.append(verdict.value)
    return found, now


@pytest.mark.parametrize("first", [MOVES, PARTS])
def test_a_plan_slower_than_recomputing_everything_is_replaced_by_that(first: Plan) -> None:
    slow = 3.9 * EXPECTED
    found = followed(first, slow, 1.3 * EXPECTED, slow)
    # However slow it becomes then: it has been tried once.
    assert found == (["try", "stay", "not judged"], AGAIN)


def test_the_faster_of_the_two_stays_for_good() -> None:
    slow = 2 * EXPECTED
    assert followed(MOVES, slow, 1.5 * slow, 9 * slow) == (["try", "return", "not judged"], MOVES)


def test_a_plan_that_is_fast_enough_is_kept_and_another_one_is_judged_again() -> None:
    fast = MARGIN * EXPECTED
    assert followed(MOVES, fast, 100.0) == (["keep", "not judged"], MOVES)
    trial = MemoryTrial(True)
    trial.take(Verdict.KEEP, MOVES)
    assert trial.is_due(PARTS)


def test_a_verdict_that_was_discarded_does_not_count() -> None:
    """A user's move came into force instead of the plan that recomputes everything."""
    trial = MemoryTrial(True)
    assert trial.judge(MOVES, 100 * EXPECTED, lambda: AGAIN)[0] is Verdict.TRY
    assert trial.judge(PARTS, 90 * EXPECTED, lambda: AGAIN)[:2] == (Verdict.TRY, AGAIN)


def test_what_moves_nothing_or_was_chosen_by_the_user_is_not_judged() -> None:
    assert not MemoryTrial(True).is_due(KEPT)
    assert not MemoryTrial(True).is_due(AGAIN)
    assert not MemoryTrial(False).is_due(MOVES)


@pytest.mark.parametrize("alternative", [None, replace(AGAIN, prediction=None), MOVES])
def test_without_another_plan_it_is_kept(alternative: Plan | None) -> None:
    assert followed(MOVES, 100.0, alternative=alternative) == (["keep"], MOVES)


def test_a_plan_that_never_came_into_force_is_not_judged() -> None:
    trial = MemoryTrial(True)
    trial.take(Verdict.TRY, AGAIN)
    # It was refused, or the user has moved layers meanwhile.
    assert not trial.is_due(MOVES)
    assert not trial.is_due(KEPT)


def test_the_message_says_what_was_predicted_what_came_and_what_is_expected() -> None:
    assert MOVES.prediction is not None
    _, _, message = MemoryTrial(True).judge(MOVES, 100.0, lambda: AGAIN)
    assert "a step took 100 s" in message
    assert f"{MOVES.prediction.step_seconds:.3g} s had been predicted" in message
    assert f"{EXPECTED:.3g} s are expected if all layers are recomputed" in message


def test_waits_for_copies_do_not_make_recomputing_look_slow() -> None:
    # Under a plan that moves, layer 0 was measured with waits; layer 1 was never tried alone.
    figures = RankFigures(guesses={0: (1.0, 2.0)}, times={0: (4.0, 1.5), 1: (3.0, 3.0)})
    assert figures.without_moves.times == {0: (1.0, 1.5), 1: (3.0, 3.0)}
