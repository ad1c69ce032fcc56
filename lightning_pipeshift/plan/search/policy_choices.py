"""The choices of the user's policy for the saved tensors of a cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.memory_model import tensors_of
from lightning_pipeshift.plan.cost.memory_timeline import HOST
from lightning_pipeshift.plan.inputs.policies import TensorRecord
from lightning_pipeshift.plan.inputs.saved_tensors import Choice, Swap
from lightning_pipeshift.plan.schedule.actions import Kind
from lightning_pipeshift.plan.search.assignment import Assignments, Tensor, Way
from lightning_pipeshift.plan.search.problem import Problem


def records(problem: Problem, counts: Sequence[int]) -> Iterator[TensorRecord]:
    """Every saved tensor of a cut, as policies see it."""
    return _records(Assignments(problem, Cut(tuple(counts))))


def follows(problem: Problem, cut: Cut, swaps: Sequence[Swap]) -> bool:
    """Whether all tensors are handled as the policy chooses.

    Args:
        problem: the virtual machine's.
        cut: the owners of the layers, and the recomputed layers.
        swaps: the swapped tensors.
    """
    fixed, kept = chosen(Assignments(problem, Cut(cut.counts)))
    ways = {key: Choice.RECOMPUTE for key in problem.sizes if key[0] in cut.recompute}
    ways |= {(swap.layer, number): swap.choice for swap in swaps for number in swap.tensors}
    asked = dict.fromkeys(kept, Choice.KEEP) | {key: _choice(way) for key, way in fixed.items()}
    return all(ways.get(key, Choice.KEEP) is choice for key, choice in asked.items())


def chosen(assignments: Assignments) -> tuple[dict[Tensor, Way], frozenset[Tensor]]:
    """The targets that are fixed before the search, and the tensors that are to be kept.

    Raises:
        PlanError: the policy chooses a target that cannot be reached.
    """
    problem = assignments.problem
    if problem.recompute == "full":
        again = assignments.cut.recompute
        return {key: None for key in assignments.sizes if key[0] in again}, frozenset()
    fixed: dict[Tensor, Way] = {}
    kept: set[Tensor] = set()
    dropped: set[int] = set()
    for record in _records(assignments) if problem.policy is not None else ():
        key = record.index, record.number
        choice = problem.policy.choose(record) if problem.policy is not None else None
        if choice is Choice.KEEP:
            kept.add(key)
        elif choice is Choice.RECOMPUTE:
            dropped.add(record.index)
        elif choice is Choice.HOST:
            _require_way(problem, record, choice, record.host_seconds)
            fixed[key] = ()
        elif choice is Choice.DEVICE:
            _require_way(problem, record, choice, record.device_seconds)
            fixed[key] = _lender(assignments, record.stage)
    for key in assignments.sizes:
        if key[0] in dropped and key not in fixed and key not in kept:
            fixed[key] = None
    return fixed, frozenset(kept)


def _choice(way: Way) -> Choice:
    if way is None:
        return Choice.RECOMPUTE
    return Choice.DEVICE if way else Choice.HOST


def _require_way(problem: Problem, record: TensorRecord, choice: Choice, seconds: float) -> None:
    if not math.isfinite(seconds):
        name = type(problem.policy).__name__
        raise PlanError(
            f"the policy {name} moves tensor {record.number} of layer {record.layer!r} with "
            f"{choice}, but it has no connection to stage {record.stage}. If "
            f"record.{choice.value}_seconds is infinite, return None or Choice.KEEP"
        )


def _lender(assignments: Assignments, stage: int) -> tuple[int]:
    """The default lender for a stage: the one with the most free memory."""
    problem, found = assignments.problem, assignments.uncompressed
    spare = problem.spare_bytes(found)
    others = [other for other in assignments.stages if problem.links.rate(stage, other)]
    return (max(others, key=lambda other: (spare[other], -found.peak_bytes[other])),)


def _records(assignments: Assignments) -> Iterator[TensorRecord]:
    workload, links = assignments.problem.workload, assignments.problem.links
    in_flight = workload.in_flight
    for (layer, number), size in assignments.sizes.items():
        stage = assignments.owner[layer]
        profile = assignments.problem.profile.layers[layer]
        tensor = next(t for t in tensors_of(profile) if t.number == number)
        others = [other for other in assignments.stages if other != stage]
        yield TensorRecord(
            layer=profile.name,
            index=layer,
            number=number,
            num_bytes=round(size),
            shape=tensor.shape,
            dtype=tensor.dtype,
            maker=tensor.maker,
            stage=stage,
            in_flight=in_flight[stage],
            interval_seconds=_interval(assignments, layer),
            recompute_seconds=float(workload.forward[stage, layer]),
            host_seconds=links.seconds(stage, HOST, size),
            device_seconds=min(
                (links.seconds(stage, other, size) for other in others), default=math.inf
            ),
        )


def _interval(assignments: Assignments, layer: int) -> float:
    """From the end of a layer's forward to the start of its backward, at least."""
    stage, workload = assignments.owner[layer], assignments.problem.workload
    row = assignments.uncompressed.timeline.rows[stage]
    forwards = {span.action.microbatch: span for span in row if span.action.kind is Kind.FORWARD}
    backwards = [span for span in row if span.action.kind is Kind.BACKWARD]
    # The layers of the stage that run between its forward and its backward.
    later = list(range(layer + 1, assignments.cut.bounds[stage + 1]))
    between = float(workload.forward[stage, later].sum() + workload.backward[stage, later].sum())
    gap = min((b.start - forwards[b.action.microbatch].end for b in backwards), default=0.0)
    return max(0.0, gap) + between
