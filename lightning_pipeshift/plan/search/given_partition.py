"""Turns the ``partition`` argument into a placement."""

from collections.abc import Collection, Sequence
from typing import Any

from lightning_pipeshift.errors import PartitionError
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.search.equal_counts import uniform

PartitionSpec = str | Sequence[int] | Sequence[Sequence[int]]
"""``"auto"``, ``"uniform"``, layers per stage, or layers per stage for each virtual machine."""


def resolve(
    spec: PartitionSpec,
    *,
    num_layers: int,
    stages_per_vm: tuple[int, ...],
    idle: Collection[int] = (),
    possible: Collection[int] | None = None,
    names: Sequence[str] = (),
) -> Placement:
    """The placement for a user's ``partition``.

    Here, ``"auto"`` means ``"uniform"``: measurements are used later, when a run is planned.

    Args:
        spec: the user's argument.
        num_layers: how many layers the model has.
        stages_per_vm: how many stages each virtual machine has.
        idle: the layers that no step calls; ``"uniform"`` does not count them.
        possible: the boundaries that may be cut; ``None``: all. A user's own list may cut others.
        names: those of the layers, for messages.

    Raises:
        PartitionError: with the value found, the allowed values and the remedy.
    """
    if isinstance(spec, str):
        if spec not in ("auto", "uniform"):
            raise PartitionError(
                f"partition={spec!r}; allowed are 'auto', 'uniform', a list of layers per stage"
                " such as [5, 4], or such a list for each virtual machine"
            )
        return Placement(
            tuple(uniform(num_layers, num_stages, possible, idle) for num_stages in stages_per_vm)
        )
    counts = _per_virtual_machine(spec, len(stages_per_vm))
    for vm, (stage_counts, num_stages) in enumerate(zip(counts, stages_per_vm, strict=True)):
        _require_fit(vm, stage_counts, num_layers, num_stages, names)
    return Placement(counts)


def num_layers_in(spec: PartitionSpec) -> int | None:
    """How many layers a user's own list places; ``None`` if it does not say."""
    items: Any = spec
    while isinstance(items, list | tuple) and items and isinstance(items[0], list | tuple):
        items = items[0]
    is_list = isinstance(items, list | tuple) and all(type(x) is int for x in items)
    return sum(items) if is_list else None


def _per_virtual_machine(
    spec: Sequence[int] | Sequence[Sequence[int]], num_virtual_machines: int
) -> tuple[tuple[int, ...], ...]:
    """The counts for every virtual machine; one flat list applies to all of them."""
    if not isinstance(spec, Sequence):
        raise PartitionError(
            f"partition={spec!r}, a {type(spec).__name__}; allowed are 'auto', 'uniform' or a list"
        )
    # A user's list may hold anything, whatever its annotation says.
    items: list[Any] = list(spec)
    nested = [isinstance(item, Sequence) and not isinstance(item, str) for item in items]
    if not items or (any(nested) and not all(nested)):
        raise PartitionError(
            f"partition={spec!r}; give either one number per stage, such as [5, 4], "
            "or one list per virtual machine, such as [[5, 4], [6, 3]]"
        )
    if not any(nested):
        return (tuple(items),) * num_virtual_machines
    if len(items) != num_virtual_machines:
        raise PartitionError(
            f"partition={spec!r} has lists for {len(items)} virtual machines; there are "
            f"{num_virtual_machines}: give a list for each of them, or one list for all"
        )
    return tuple(map(tuple, items))


def _require_fit(
    vm: int, counts: tuple[int, ...], num_layers: int, num_stages: int, names: Sequence[str]
) -> None:
    found = f"the partition {list(counts)} of virtual machine {vm}"
    layers = f"{num_layers} layers" + (f" ({', '.join(names)})" if names else "")
    for count in counts:
        if type(count) is not int or count < 0:
            raise PartitionError(f"{found} has a {count!r}; a count is a whole number, 0 or more")
    if len(counts) != num_stages:
        raise PartitionError(
            f"{found} has {len(counts)} counts; the virtual machine has {num_stages} stages for"
            f" {layers}: give a count for each stage, 0 for one without layers (and a list for each"
            " virtual machine where they differ); with schedule='interleaved_1f1b' each stage has"
            " two ranges of layers, and counts twice"
        )
    if sum(counts) != num_layers:
        raise PartitionError(
            f"{found} adds up to {sum(counts)} layers; the model has {layers}: "
            "change the counts until they add up, or use 'auto' or 'uniform'"
        )
