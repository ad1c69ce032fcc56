"""Steps that take other than their plan predicted are said once, with the largest cause."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.search.measurements import Measured
from lightning_pipeshift.runtime.planning.prediction_check import PredictionCheck, difference


def measured(speed: float = 1.0, bandwidth: float = 1e12, outside: float = 0.0) -> Measured:
    """Two equal layers, the second on rank 0, of a given speed and behind a given link."""
    layers = tuple(LayerProfile(f"l{n}", 1, 1, 1000, 1000, 1000) for n in range(2))
    kinds = {"cpu": KindProfile((0.01,) * 2, (0.02,) * 2)}
    cluster = Cluster((Device("a", "cpu", speed=speed), Device("a", "cpu")), inside=Link(0, 1e12))
    cluster = replace(cluster, ranks={(0, 1): Link(0, bandwidth)})
    return Measured(Profile(layers, kinds, 1.0, 4, outside), cluster, [[1, 0]])


def planned() -> Plan:
    return replace(measured().plan("1f1b", 4, [Cut((1, 1))]), ranks=((1, 0),))


CAUSES = [
    ({"speed": 0.5}, "mostly, rank 0 computes a microbatch in 60 ms and not 30 ms."),
    (
        {"bandwidth": 2e4},
        "messages of a microbatch between ranks 1 and 0 take 100 ms and not 0 µs.",
    ),
    ({"outside": 0.1}, "on their way) takes 100 ms and not 0 µs."),
]


@pytest.mark.parametrize(("changed", "cause"), CAUSES)
def test_the_largest_cause_is_named(changed: dict[str, float], cause: str) -> None:
    plan, now = planned(), measured(**changed)
    took = now.prediction(plan).step_seconds
    said = difference(plan, took, now)
    assert plan.prediction is not None
    assert plan.prediction.step_seconds == pytest.approx(0.15)
    assert said.startswith(f"a step takes {took * 1e3:.3g} ms, and the plan predicted 150 ms: ")
    assert said.replace("2e-06 s", "0 µs").replace("0.002 µs", "0 µs").endswith(cause)


def test_a_device_that_is_faster_than_predicted_is_named() -> None:
    plan, now = planned(), measured(speed=4.0)
    said = difference(plan, 0.1, now)
    assert "rank 0 computes a microbatch in 7.5 ms and not 30 ms" in said


def test_nothing_is_said_without_a_prediction_or_of_a_good_one() -> None:
    plan = planned()
    assert difference(plan, 0.15 * 1.19, measured()) == ""
    assert difference(plan, 0.15 * 0.81, measured()) == ""
    assert difference(plan, 0.15 * 1.21, measured()) != ""
    assert difference(replace(plan, prediction=None), 9.0, measured(speed=0.1)) == ""


@dataclass
class Planning:
    """A run that measures or not."""

    measures: bool
    is_measured: bool = False
    measured: Measured | None = None


def said(planning: Any, plans: list[Plan], seconds: list[float], measured_at: int) -> list[str]:
    messages: list[str] = []
    check = PredictionCheck(planning, messages)
    check.note(None, None)
    for number, (plan, took) in enumerate(zip(plans, seconds, strict=True)):
        planning.is_measured = number >= measured_at
        check.note(plan, took)
    return messages


def test_a_fixed_plan_is_checked_once_after_its_first_steps() -> None:
    seconds = [9.0] * 3 + [0.3] * 40
    [message] = said(Planning(False), [planned()] * 43, seconds, 99)
    assert message.startswith(
        "a step takes 300 ms, and the plan predicted 150 ms: the cause is not"
    )
    assert said(Planning(False), [planned()] * 20, seconds[:20], 99) == [], "too few"
    assert said(Planning(False), [planned()] * 43, [9.0] * 3 + [0.16] * 40, 99) == []


def test_a_measured_run_is_checked_when_its_measurements_are_there() -> None:
    planning = Planning(True, measured=measured(speed=0.5))
    [message] = said(planning, [planned()] * 12, [0.3] * 12, 10)
    assert "rank 0 computes a microbatch in 60 ms and not 30 ms" in message


def test_another_plan_is_not_compared_with_the_first_one() -> None:
    moved = planned().with_placement(replace(planned().placement, counts=((2, 0),)))
    plans = [planned()] * 5 + [moved] * 30
    assert said(Planning(False), plans, [0.3] * 35, 99) == []
