"""Splits a change of the plan into several, when its layers take long to transfer.

CN115454655A hides the transfer of a layer behind the compute of both stages. A step can hide only
so much as its links carry in the meantime, so the layers of a large change move in several steps.
Each of them begins while the weights travel: a layer's first use waits for its own. In an
asynchronous pipeline, whose step is a minibatch, a part begins when the one before it is over on
every stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.document.moves import in_parts
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.inputs.profile import LayerProfile
from lightning_pipeshift.plan.search.measurements import Measured

_PART_OF_STEP: Final = 0.5
"""The part of a step in which a link may be busy with layers that move: payloads need it, too."""

_UNMEASURED_BYTES: Final = float(32 << 20)
"""The bytes that move over a link in one step if its speed is not known."""


def parts_of(
    old: Plan,
    new: Plan,
    layers: Sequence[LayerProfile],
    measured: Measured | None,
    checks_memory: bool,
) -> list[Plan]:
    """Returns the plans by which one plan turns into another, each for one step or more.

    Args:
        old: the plan in force.
        new: the plan that is wanted.
        layers: the model's, in call order.
        measured: the measurements, if there are any.
        checks_memory: whether the measurements say how much memory stages take.

    Raises:
        PlanError: a device lacks the memory that the layers take in addition while they move.
    """
    borrows = any(swap.stages for swaps in (*old.swaps, *new.swaps) for swap in swaps)
    if old.ranks != new.ranks or old.placement == new.placement or borrows:
        return [new]
    most_seconds = 1.0
    if measured is not None:
        ranks = measured.ranks_of(old)
        most_seconds = _PART_OF_STEP * measured.prediction(old).step_seconds

    def seconds(vm: int, layer: int, source: int, to: int) -> float:
        """How long all that belongs to a layer takes to get to another stage."""
        num_bytes = layers[layer].static_bytes
        if measured is None:
            return num_bytes / _UNMEASURED_BYTES
        return measured.cluster.link(ranks[vm][source], ranks[vm][to]).seconds(num_bytes)

    joined = {index for index, layer in enumerate(layers) if layer.joins_next}

    def plans(most: float) -> list[Plan]:
        placements = in_parts(old.placement, new.placement, seconds, most, joined)
        return [*(_part(new, placement, measured) for placement in placements[:-1]), new]

    found = plans(most_seconds)
    if measured is not None and checks_memory:
        if any(measured.lacking_during(*pair) for pair in pairwise([old, *found])):
            # Less is held twice at a time.
            found = plans(0.0)
        for pair in pairwise([old, *found]):
            if problem := measured.lacking_during(*pair):
                raise PlanError(problem)
    return found


def _part(new: Plan, placement: Placement, measured: Measured | None) -> Plan:
    plan = new.with_placement(placement)
    if new.prediction is None or measured is None:
        return plan
    return replace(plan, prediction=measured.prediction(plan))
