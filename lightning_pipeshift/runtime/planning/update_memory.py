"""Finds what optimizers take for a moment while they update parameters.

An optimizer that updates parameter by parameter takes temporary results of one of them at a time
(Adam's on CPUs: two of its size), one that updates them in groups (``foreach``, usual on GPUs)
those of all at once, and a fused one none. This depends on the optimizer's class and options only,
so another one of the same class and options tells, with small parameters of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeshift.compat.torch_private import step_without_hooks
from lightning_pipeshift.model.measuring.live_bytes import LiveBytes
from lightning_pipeshift.model.tensors.trees import leaves_of

_NUM_ELEMENTS = 4096


class UpdateMemory(NamedTuple):
    """The temporary results of an optimizer's step.

    Args:
        own: their size, relative to the parameter that is updated.
        earlier: what is left of the parameter before it, relative to that.
        at_once: whether those of all parameters live at once, and not of one after the other.
    """

    own: float = 0.0
    earlier: float = 0.0
    at_once: bool = False

    def num_bytes(self, sizes: Sequence[int]) -> int:
        """The bytes of temporary results, while some parameters are updated.

        Args:
            sizes: the bytes of the parameters.
        """
        if self.at_once:
            return round(self.own * sum(sizes))
        pairs = pairwise([0, *sizes])
        return round(max((self.own * size + self.earlier * one for one, size in pairs), default=0))


def update_memory(optimizers: Iterable[Optimizer], device: torch.device) -> UpdateMemory:
    """The temporary results of the most demanding of these optimizers.

    Args:
        optimizers: those of the run. One that cannot be tried like this counts as if it took
            nothing: it needs a closure, or arguments of its own.
        device: of the parameters.
    """
    found = [UpdateMemory()]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            try:
                one, two, four = (_tried(optimizer, group, count, device) for count in (1, 2, 4))
            except Exception:
                # Any error only means that this class has another interface.
                continue
            at_once = four > 1.5 * two
            rest = 0.0 if at_once else two - one
            found.append(UpdateMemory(four / 4 if at_once else one, rest, at_once))
    return max(found, key=lambda each: (each.at_once, each.own + each.earlier))


def _tried(
    optimizer: Optimizer, group: Mapping[str, Any], count: int, device: torch.device
) -> float:
    """The size of the temporary results of an update, relative to that of one parameter."""
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind).parameters
    options = {name: group[name] for name in optimizer.defaults if name in accepted}
    parameters = [nn.Parameter(torch.zeros(_NUM_ELEMENTS, device=device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    other = kind(parameters, **options)
    there: list[Any] = [x for parameter in parameters for x in (parameter, parameter.grad)]
    there += leaves_of(dict(other.state))
    known = [x for x in there if isinstance(x, Tensor)]
    with torch.no_grad(), LiveBytes(device, known) as live:
        step_without_hooks(other)()
    # Of the state, a few numbers are as large as those of any parameter.
    taken: int = live.peak_bytes - live.num_bytes
    return round(taken / parameters[0].nbytes, 2)
