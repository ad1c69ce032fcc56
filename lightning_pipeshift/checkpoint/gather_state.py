"""Collects the state of all stages for a checkpoint: all of it on one rank, or a part on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeshift.errors import CheckpointError, some_of
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.ownership.kept_tensors import walk, with_values
from lightning_pipeshift.values.value import Value

# How deep to search a checkpoint for values that have to be fetched from other stages.
_DEPTH = 12
# Their parameters have been gathered already; a callback may have put averages in.
_GATHERED = "checkpoint['state_dict']", "checkpoint['optimizer_states']"


def gather_state(holdings: Holdings, state_dict: dict[str, Any], home: int) -> dict[str, Any]:
    """Collects the state of the whole model on one stage. Every stage calls this.

    Args:
        holdings: the tensors of this stage.
        home: the stage that gets the state.
        state_dict: the LightningModule's own, made with ``keep_vars=True``. The stages may have
            different names in it: a layer may create a buffer when it first runs.
    """
    source_of = _sources(holdings, home)
    there = {}
    for name, value in state_dict.items():
        source = source_of(name, value)
        if (home if source is None else source) == holdings.stage:
            there[name] = _plain(value)
    if holdings.stage != home:
        holdings.channels.send_values(there, home)
        return state_dict
    for source in range(holdings.channels.num_stages):
        if source != home:
            there.update(holdings.channels.receive_values(source))
    # In the model's order; entries that a layer created later are last, and deleted ones are
    # omitted.
    for name in list(state_dict):
        if name in there:
            state_dict[name] = there.pop(name)
        else:
            del state_dict[name]
    state_dict.update(there)
    return state_dict


def _source_of(holdings: Holdings, parameter: Tensor, home: int) -> int:
    holders = holdings.holders_of(parameter)
    return home if home in holders else holders[0]


def _sources(holdings: Holdings, home: int) -> Callable[[str, Any], int | None]:
    """Returns a function that returns the stage from which an entry of the model's state dict is
    taken: ``home`` if that has the entry, and ``None`` for entries of no layer or of user code.
    """
    stage_of = {id(layer): stage for layer, stage in holdings.layers}
    prefixes = {
        f"{name}.": stage_of[id(module)]
        for name, module in holdings.root.named_modules(remove_duplicate=False)
        if id(module) in stage_of
    }

    def source_of(name: str, value: Any) -> int | None:
        if isinstance(value, Value):
            return value.account.owner
        if holdings.knows(value):
            return _source_of(holdings, value, home)
        return next((s for prefix, s in prefixes.items() if name.startswith(prefix)), None)

    return source_of


def part_of_state(
    holdings: Holdings, state_dict: dict[str, Any], vm: int, num_virtual_machines: int
) -> dict[str, Any]:
    """The part of the model's state that this rank saves: one rank saves each entry. The virtual
    machines take turns with the parameters, which are the same in all of them.

    Args:
        state_dict: see :meth:`gather_state`.
        vm: this rank's virtual machine.
        num_virtual_machines: how many there are.

    Returns:
        The dict itself, with meta tensors for entries that other ranks save; one meta tensor for
        all names of a parameter.
    """
    source_of = _sources(holdings, home=0)
    of_others: dict[int, Tensor] = {}
    for number, (name, value) in enumerate(state_dict.items()):
        source = source_of(name, value)
        turn = number % num_virtual_machines if holdings.knows(value) else 0
        if source is None and isinstance(value, Tensor):
            # An entry of user code, which may be on any stage; if several have it, one is written.
            source = holdings.stage
        if (vm, holdings.stage) != (turn, source or 0):
            state_dict[name] = of_others.setdefault(id(value), _on_meta(value))
        elif isinstance(value, Value):
            state_dict[name] = _plain(value)
    return state_dict


def _plain(value: Any) -> Any:
    """A tensor of this stage without its history, for one that may be a value."""
    tensor = value.account.tensor if isinstance(value, Value) else value
    return tensor.detach() if isinstance(tensor, Tensor) else tensor


def _on_meta(value: Any) -> Tensor:
    like = value if isinstance(value, Tensor) else torch.empty(0)
    return torch.empty(like.shape, dtype=like.dtype, device="meta")


def complete(holdings: Holdings, checkpoint: dict[str, Any], home: int | None) -> None:
    """Fills in what one stage has in a checkpoint: averages and other values of parameters that
    callbacks and the LightningModule have added to it. Every stage calls this.

    Args:
        holdings: the tensors of this stage.
        checkpoint: this stage's own; the entries of the dict itself are replaced.
        home: the stage whose checkpoint has to be complete; ``None``: each saves what it has, and
            others have meta tensors.

    Raises:
        CheckpointError: the stages keep different values.
    """
    placed: dict[Any, tuple[str, Tensor, int]] = {}
    keys: dict[int, Any] = {}
    for path, value in walk("checkpoint", checkpoint, set(), depth=_DEPTH):
        if isinstance(value, Value):
            value.account.refresh()
            keys[id(value)] = value.account.name
            placed[value.account.name] = path, value, value.account.owner
        elif holdings.knows(value) and not path.startswith(_GATHERED):
            keys[id(value)] = path
            placed[path] = path, value, _source_of(holdings, value, home or 0)
    stage, channels = holdings.stage, holdings.channels
    mine = {key: _plain(x) for key, (_, x, owner) in placed.items() if owner == stage}
    found: dict[Any, Any] = mine
    if home is None:
        found = {key: mine.get(key, _on_meta(x)) for key, (_, x, _) in placed.items()}
    elif stage != home:
        channels.send_values(mine, home)
        return
    else:
        for source in range(channels.num_stages):
            if source != home:
                found.update(channels.receive_values(source))
    lost = [path for key, (path, _, _) in placed.items() if key not in found]
    if lost:
        raise CheckpointError(
            f"The checkpoint has {some_of(lost)}, which another stage computes, and does not have"
            " at this place: ranks have put different things into it. Do so on every rank."
        )
    value_of = {number: found[key] for number, key in keys.items()}
    for name, entry in checkpoint.items():
        checkpoint[name] = with_values(entry, value_of)


def part_of_optimizer_state(
    holdings: Holdings, optimizer: Optimizer, vm: int, num_virtual_machines: int
) -> dict[str, Any]:
    """``optimizer.state_dict()`` with the state of those parameters that this rank saves."""
    state_dict: dict[str, Any] = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state_dict["state"] = {
        index: entry
        for index, entry in state_dict["state"].items()
        if vm == index % num_virtual_machines
        and holdings.stage == holdings.holders_of(parameters[index])[0]
    }
    return state_dict


def gather_optimizer_state(holdings: Holdings, optimizer: Optimizer, home: int) -> dict[str, Any]:
    """``optimizer.state_dict()`` with the state of all parameters, on the stage ``home``. Every
    stage calls this.
    """
    state_dict: dict[str, Any] = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, Any] = {}
    for index, parameter in enumerate(parameters):
        source = _source_of(holdings, parameter, home)
        entry = state_dict["state"].get(index)
        if source != home and holdings.stage == source:
            holdings.channels.send_object(entry is not None, home)
            if entry is not None:
                holdings.channels.send_values(entry, home)
        elif source != home and holdings.stage == home and holdings.channels.receive_object(source):
            entry = dict(holdings.channels.receive_values(source))
        if entry is not None:
            state[index] = entry
    state_dict["state"] = state
    return state_dict
