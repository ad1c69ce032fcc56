"""Tries whether an optimizer updates each parameter by its own gradient and state only.

A stage has the gradients of its own layers. An optimizer that computes one number of all gradients
(SAM's norm, Prodigy's distance, a norm to clip by) would compute another one on each stage, and
nothing would say so. What an optimizer is made of does not tell, so a copy of it makes a few steps
on small parameters, twice: with other gradients for every second parameter. The rest has to end up
the same.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeshift.compat.torch_private import step_without_hooks
from lightning_pipeshift.errors import ConfigurationError

# Those that update each parameter by its own gradient and state only.
BY_PARAMETER: Final = frozenset(
    found
    for name in (
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
    if (found := getattr(torch.optim, name, None)) is not None
)
_NUM_STEPS: Final = 3
_MOST_IN_A_GROUP: Final = 4
# Far enough from 1 for whatever depends on the size of all gradients.
_FACTOR: Final = 1000.0
# Attributes that belong to one optimizer: its state, and what schedulers put in place of its step.
_OWN: Final = ("state", "step")


def check_updates(optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Raises ConfigurationError for an optimizer whose update of a parameter depends on the
    gradients of others. One that cannot be tried is let be.

    Args:
        optimizers: those of a run on several stages.
        device: where the parameters of the trial are.
    """
    for optimizer in optimizers:
        if type(optimizer) not in BY_PARAMETER and _mixes(optimizer, device):
            raise ConfigurationError(
                f"The optimizer `{type(optimizer).__name__}` updates a parameter by the gradients"
                " of other parameters, too (a norm of all gradients, or one step size for all"
                " parameters), and each stage has the gradients of its own layers only. Use an"
                " optimizer that updates each parameter by its own gradient and state (SGD, Adam,"
                " AdamW, LAMB, ...), and `Trainer(gradient_clip_val=...)` to clip by the norm of"
                " all gradients; or train with one device for each replica of the model."
            )


def _mixes(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether the gradients of some parameters change the updates of others."""
    try:
        usual, *changed = (_updated(optimizer, device, parity) for parity in (None, 0, 1))
    except Exception:
        # It needs what a trial lacks: the model, larger parameters, another device.
        return False
    return any(
        number % 2 != parity and not torch.equal(as_usual, found)
        for parity, parameters in enumerate(changed)
        for number, (as_usual, found) in enumerate(zip(usual, parameters, strict=True))
    )


def _updated(optimizer: Optimizer, device: torch.device, parity: int | None) -> list[Tensor]:
    """Small parameters after some steps of a copy of the optimizer.

    Args:
        optimizer: the optimizer.
        device: of the parameters.
        parity: those of even (0) or odd (1) number have other gradients than usual; ``None``: none.
    """
    small = {
        id(parameter): _small(parameter, number, device)
        for number, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])
    }
    tried = _copy(optimizer, dict(small))
    for group in tried.param_groups:
        del group["params"][_MOST_IN_A_GROUP:]
    kept = [parameter for group in tried.param_groups for parameter in group["params"]]

    def closure() -> Tensor:
        for number, parameter in enumerate(kept):
            if parameter.requires_grad:
                # It depends on the parameter, for optimizers that take it at several places.
                gradient = _values(parameter.shape, number + 1).to(parameter) + parameter.detach()
                parameter.grad = gradient * (_FACTOR if number % 2 == parity else 1.0)
        return torch.ones((), device=device)

    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type):
        torch.manual_seed(0)
        for _ in range(_NUM_STEPS):
            step_without_hooks(tried)(closure=closure)
    return [parameter.detach() for parameter in kept]


def _small(parameter: nn.Parameter, number: int, device: torch.device) -> nn.Parameter:
    shape = [min(size, 2) for size in parameter.shape]
    values = _values(shape, number).to(device, parameter.dtype)
    small = nn.Parameter(values, requires_grad=parameter.requires_grad)
    # Marks for the optimizer.
    vars(small).update({k: v for k, v in vars(parameter).items() if not k.startswith("_")})
    return small


def _values(shape: Sequence[int], number: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(1, count + 1) + 3 * number).reshape(shape)


def _copy(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """A copy of an optimizer that has not made a step, with those inside of it.

    Args:
        optimizer: the optimizer. ``copy.deepcopy`` would leave out what its class adds.
        memo: as for ``copy.deepcopy``, with the copy's parameters.
    """
    copied: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = copied
    state = memo.setdefault(id(optimizer.state), defaultdict(dict))
    # The hooks of a step are the user's, and belong to the model.
    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _OWN and not name.endswith("_hooks")
    }
    if any(isinstance(value, nn.Module) for value in attributes.values()):
        raise ValueError("the optimizer refers to a model")
    for inner in attributes.values():
        if isinstance(inner, Optimizer) and id(inner) not in memo:
            _copy(inner, memo)
    # It makes what a new optimizer has, and no hooks.
    copied.__setstate__({**copy.deepcopy(attributes, memo), "state": state})
    return copied
