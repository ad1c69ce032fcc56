"""Moves: each of one layer, from its stage to another; the placement after several of them, and
those in between if they are made one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from lightning_pipeshift.errors import PlanError, some_of
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A change of a layer's owner.

    Args:
        layer: its name in the model.
        stage: its new stage.
        step: the batch of the run from which it applies, counted from 0; ``None``: as soon as
            possible. The first two steps run as planned.
        virtual_machine: the virtual machine to change; ``None``: all.
    """

    layer: str
    stage: int
    step: int | None = None
    virtual_machine: int | None = None


def check_moves(moves: Iterable[Move], names: Sequence[str], depths: Sequence[int]) -> None:
    """Raises PlanError if a move has an unknown layer, stage or virtual machine.

    Args:
        moves: to be carried out at any time.
        names: of all layers.
        depths: the number of stages of each virtual machine.
    """
    for move in moves:
        if move.layer not in names:
            near = get_close_matches(move.layer, names, n=3)
            meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
            raise PlanError(
                f"a move of the layer {move.layer!r}; {meant}the layers are"
                f" {some_of([*map(repr, names)])}"
            )
        vms = range(len(depths)) if move.virtual_machine is None else [move.virtual_machine]
        for vm in vms:
            if not 0 <= vm < len(depths):
                raise PlanError(
                    f"a move of the layer {move.layer!r} in virtual machine {vm}; there are"
                    f" {len(depths)}, counted from 0"
                )
            if not 0 <= move.stage < depths[vm]:
                raise PlanError(
                    f"a move of the layer {move.layer!r} to stage {move.stage}; virtual machine"
                    f" {vm} has the stages 0 to {depths[vm] - 1}"
                )


def placement_after(plan: Plan, moves: Iterable[Move]) -> Placement:
    """The owners of all layers after all of the moves.

    Args:
        plan: the plan before.
        moves: the moves.

    Raises:
        PlanError: an unknown layer, stage or virtual machine; or two moves of one layer.
    """
    moves = list(moves)
    names = [layer.name for layer in plan.layers]
    count = plan.placement.num_virtual_machines
    check_moves(moves, names, [plan.placement.num_stages(vm) for vm in range(count)])
    owners = [plan.placement.stages(vm) for vm in range(count)]
    moved: Counter[tuple[int, str]] = Counter()
    for move in moves:
        machines = range(count) if move.virtual_machine is None else [move.virtual_machine]
        for vm in machines:
            moved[vm, move.layer] += 1
            if moved[vm, move.layer] > 1:
                raise PlanError(f"two moves of the layer {move.layer!r} in one step; give one")
            owners[vm][names.index(move.layer)] = move.stage
    return Placement.of(owners, [plan.placement.num_stages(vm) for vm in range(count)])


def in_parts(
    old: Placement,
    new: Placement,
    seconds: Callable[[int, int, int, int], float],
    most_seconds: float,
    joined: Collection[int] = (),
) -> list[Placement]:
    """Splits a change of owners into several that follow one another, so that in each of them no
    link is busy for too long. Every layer moves once, from its old stage to its new one, and the
    layers of each stage are contiguous after every part.

    Args:
        old: the owners now.
        new: the owners after the last part.
        seconds: returns the time of a layer's transfer, given its virtual machine, itself, its old
            and its new stage.
        most_seconds: of all transfers over one link in one direction, in one part. A layer that
            takes longer moves without others.
        joined: layers that have to be on the stage of the next one.

    Returns:
        the owners after each part; the last ones are ``new``.
    """
    owners = [old.stages(vm) for vm in range(old.num_virtual_machines)]
    waiting = [
        order
        for vm, stages in enumerate(owners)
        for order in _orders(vm, stages, new.stages(vm), joined)
    ]
    depths = [old.num_stages(vm) for vm in range(old.num_virtual_machines)]
    found = []
    while any(waiting):
        busy: dict[tuple[int, int, int], float] = {}
        for order in waiting:
            while order:
                vm, layers, stage = order[0]
                link = vm, owners[vm][layers[0]], stage
                takes = sum(seconds(vm, layer, link[1], stage) for layer in layers)
                if link in busy and busy[link] + takes > most_seconds:
                    break
                busy[link] = busy.get(link, 0.0) + takes
                for layer in layers:
                    owners[vm][layer] = stage
                order.pop(0)
        found.append(Placement.of(owners, depths))
    return found or [new]


_Run = tuple[int, list[int], int]
"""A virtual machine, layers of it that move together, and their new stage."""


def _orders(
    vm: int, old: Sequence[int], new: Sequence[int], joined: Collection[int]
) -> tuple[list[_Run], list[_Run]]:
    """The layers that move to later stages, from the last to the first, and those that move to
    earlier stages, from the first to the last: in these orders, stages remain contiguous however
    far either has got.
    """
    later: list[_Run] = []
    earlier: list[_Run] = []
    for layer, (before, after) in enumerate(zip(old, new, strict=True)):
        if before == after:
            continue
        runs = later if after > before else earlier
        if runs and layer - 1 in joined and runs[-1][1][-1] == layer - 1:
            runs[-1][1].append(layer)
        else:
            runs.append((vm, [layer], after))
    return later[::-1], earlier
