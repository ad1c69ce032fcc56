"""Finetuning callbacks over several stages.

``BaseFinetuning`` adds parameters to an optimizer in the middle of a run, except those that it
already has: it compares them by their values, and a stage has only the values of its own layers.
The stages exchange a digest of each parameter, so that all of them get the same result as on one
device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeshift.lightning.patches import FilterOnOptimizer
from lightning_pipeshift.model.parameters.deferred_init import DeferredInit
from lightning_pipeshift.runtime.comm.channels import Channels


class SharedComparison:
    """Finds the parameters that an optimizer already has, over all stages.

    Args:
        root: the LightningModule.
        channels: connections to the other stages.
        deferred: computes values that no stage has computed yet.
        plain: Lightning's own comparison.
    """

    def __init__(
        self, root: nn.Module, channels: Channels, deferred: DeferredInit, plain: FilterOnOptimizer
    ) -> None:
        self._root = root
        self._channels = channels
        self._deferred = deferred
        self._plain = plain

    def __call__(self, optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters that the optimizer does not have. Every stage calls this.

        As on one device, a parameter that equals another in every value counts as present.
        """
        params = list(params)
        known: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        names = {id(p): name for name, p in self._root.named_parameters()}
        if self._channels.num_stages == 1 or any(id(p) not in names for p in [*params, *known]):
            return self._plain(optimizer, params)
        identical = set(map(id, known))
        # Only parameters of the same kind can be equal. This depends on no value, so that every
        # stage requests the same digests.
        kinds = {_kind_of(p) for p in params} & {_kind_of(p) for p in known}
        compared = [p for p in [*params, *known] if _kind_of(p) in kinds]
        digests = self._digests({names[id(p)]: p for p in compared}) if kinds else {}

        def value_of(parameter: nn.Parameter) -> Any:
            # A parameter without values on any stage is equal only to itself.
            name = names[id(parameter)]
            return _kind_of(parameter), digests.get(name, name)

        taken = set(map(value_of, known))
        new: list[nn.Parameter] = []
        found: list[nn.Parameter] = []
        for p in params:
            (found if id(p) in identical or value_of(p) in taken else new).append(p)
        if found:
            listed = ", ".join(names[id(p)] for p in found[:4])
            rank_zero_warn(
                f"{len(found)} of the parameters to be added are in a group of this "
                f"{type(optimizer).__name__} already, or equal one that is, and are omitted "
                f"({listed}). Give the optimizer in `configure_optimizers` only parameters that "
                "are trained from the start: filter(lambda p: p.requires_grad, "
                "self.parameters())."
            )
        return new

    def _digests(self, parameters: dict[str, nn.Parameter]) -> dict[str, str]:
        mine = {}
        for name, parameter in parameters.items():
            if self._deferred.knows(parameter):
                mine[name] = _digest_of(self._deferred.values(parameter))
            elif not parameter.is_meta:
                mine[name] = _digest_of(parameter)
        of_all: list[dict[str, str]] = self._channels.gather(mine)
        return {name: digest for digests in of_all for name, digest in digests.items()}


def _kind_of(parameter: Tensor) -> Any:
    return tuple(parameter.shape), parameter.dtype


def _digest_of(parameter: Tensor) -> str:
    """Equal if ``torch.equal`` is true for the tensors."""
    # Zero has two signs, which are equal.
    values = (parameter.detach().cpu() + 0.0).contiguous().reshape(-1)
    return hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()
