"""Gathers what a step has logged and returned, and the states of metrics, behind the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pipeshift.compat.torchmetrics_private import last_value, set_last_value
from lightning_pipeshift.model.tensors.transfer import to_device
from lightning_pipeshift.model.tensors.trees import leaves_of, map_leaves
from lightning_pipeshift.runtime.comm.channels import Channels, PostedSum
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.gathering import (
    Prefetch,
    Structure,
    gathered,
    of_stage,
    require_same_program,
)
from lightning_pipeshift.values.value import Value


class Gathering:
    """Gathers structures with values in them on one rank.

    Args:
        root: the LightningModule, whose metrics are gathered, too.
        core: has the values.
        channels: this stage's connections.
        share: gives all stages what one of them has.
        meets: tells that this stage comes to where all wait for each other.
    """

    def __init__(
        self,
        root: nn.Module,
        core: Core,
        channels: Channels,
        share: Callable[[Any, int], Any],
        meets: Callable[[], None],
    ) -> None:
        self._core = core
        self._channels = channels
        self._share = share
        self._meets = meets
        self.metrics = [each for each in root.modules() if isinstance(each, Metric)]
        """Those of the module."""

    def _held_by_metrics(self) -> list[Any]:
        return [(metric.metric_state, last_value(metric)) for metric in self.metrics]

    def begin(self, tree: Any) -> tuple[Structure, PostedSum, Prefetch]:
        """Begins to compare a structure over the stages, and to copy it and the metrics to the
        host.
        """
        structure = Structure(tree)
        digests = torch.zeros(self._channels.num_stages, dtype=torch.int64)
        digests[self._channels.stage] = structure.digest()
        prefetch = Prefetch([*structure.leaves, *Structure(self._held_by_metrics()).leaves])
        return structure, self._channels.post_sum(digests), prefetch

    def end(self, structure: Structure, posted: PostedSum, prefetch: Prefetch) -> Any:
        """A structure with host tensors in the place of values, and metrics with common tensors, as
        Lightning computes them, perhaps on one rank. Every stage calls this. If ranks have logged
        different things, what counts is what the first rank has, as on one device.

        Args:
            structure: what :meth:`begin` returned.
            posted: likewise.
            prefetch: likewise.
        """
        channels, core = self._channels, self._core
        self._meets()
        if len(set(posted.wait().tolist())) > 1:
            # Values of different programs have different names.
            require_same_program(core, self._share)
            first = channels.ranks.index(min(channels.ranks))
            offered = core.mailbox.offered
            structure = of_stage(first, structure, channels.stage, self._share, offered)
        held = self._held_by_metrics()
        more, num_leaves = Structure(held), len(structure.leaves)
        leaves = gathered([*structure.leaves, *more.leaves], core, self._share, prefetch)
        found = more.rebuild(leaves[num_leaves:])
        for metric, (state, value), (before, last) in zip(self.metrics, found, held, strict=True):
            changed = {name: x for name, x in state.items() if _has_values(before[name])}
            for name, x in to_device(changed, self._channels.device).items():
                setattr(metric, name, map_leaves(of_its_own, x))
            if _has_values(last):
                set_last_value(metric, to_device(value, self._channels.device))
        return structure.rebuild(leaves[:num_leaves])


def of_its_own(leaf: Any) -> Any:
    """A tensor in memory that nothing else refers to: a step may write to it at one stage."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _has_values(tree: Any) -> bool:
    return any(isinstance(leaf, Value) for leaf in leaves_of(tree))
