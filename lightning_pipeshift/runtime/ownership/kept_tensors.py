"""Tensors that user code keeps outside the model: averages and copies of parameters, and tensors
that share memory with parameters. Each is held by the stages that hold the parameters that it is
computed from, and moves with them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import storage_key, storage_key_of
from lightning_pipeshift.model.parameters.remote_tensor import RemoteTensor, swap
from lightning_pipeshift.model.parameters.uses import flat_weights_forgotten, hold
from lightning_pipeshift.runtime.ownership.owner_table import OwnerTable
from lightning_pipeshift.runtime.ownership.user_copies import (
    CopyFinder,
    Node,
    exchange,
    kept_by_user,
    nowhere,
)

log = logging.getLogger(__name__)


class KeptTensors:
    """The tensors that user code keeps on one stage: an
    :class:`~lightning_pipeshift.model.parameters.remote_tensor.OwnerLookup`.

    Args:
        table: the holders of the model's own tensors.
        in_steps: the paths of the tensors of user code that every stage keeps, since steps use
            them.
    """

    def __init__(self, table: OwnerTable, in_steps: Collection[str]) -> None:
        self._table = table
        self._in_steps = in_steps
        self._has_let_go = False
        self._aliases: dict[int, list[Tensor]] | None = None
        # By memory: the original's name.
        self._copies: dict[int, str] | None = None
        self.stages_of = table.stages_of
        # The smallest number of elements of a parameter or buffer, by whether it is of a floating
        # type.
        tensors = [*table.root.parameters(), *table.root.buffers()]
        self._smallest = {
            is_float: min(
                (x.numel() for x in tensors if x.is_floating_point() is is_float),
                default=sys.maxsize,
            )
            for is_float in (True, False)
        }

    @property
    def device(self) -> torch.device:
        """The device of this stage."""
        return self._table.device

    def search_anew(self) -> None:
        """Called in each step: user code may have made other tensors since."""
        self._aliases = self._copies = None

    @property
    def copied_layers(self) -> dict[int, str]:
        """The layers of which user code keeps copies outside the model, each with the name of a
        parameter or buffer that it has copied. The same on every stage.
        """
        found: dict[int, str] = {}
        for _, name in self._found_copies():
            for layer in self._table.layers_of(name):
                found.setdefault(layer, name)
        return found

    def is_held(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is that of a parameter, gradient or layer's buffer of this
        stage.
        """
        memory = storage_key_of(tensor)
        gradients = [use.parameter.grad for use in self._table.uses]
        return any(
            own is not None and storage_key_of(own) == memory
            for own in (*self._table.own_tensors(), *gradients)
        )

    def aliases(self, tensor: Tensor, afresh: bool = False) -> list[Tensor]:
        """The tensors kept by user code that have the same memory.

        Args:
            tensor: its memory is compared.
            afresh: whether to search again, instead of once in a step.
        """
        if self._aliases is None or afresh:
            self._aliases = {}
            for kept in self._kept().values():
                memory = storage_key_of(kept)
                self._aliases.setdefault(memory, []).append(kept)
        return self._aliases.get(storage_key_of(tensor), [])

    def copied(self, tensor: Tensor) -> str | None:
        """The name of the parameter or buffer of which user code keeps a copy in this tensor's
        memory, or ``None``.
        """
        storage = tensor.untyped_storage()
        # Averages of all kinds mix in counters and weights in every step: these are too small to be
        # copies.
        num_elements = storage.nbytes() // tensor.element_size()
        if num_elements < self._smallest[tensor.is_floating_point()]:
            return None
        memory = storage_key(storage)
        if self._copies is not None and memory not in self._copies:
            return None
        # Searched once in a step, and again for memory that may have been reused for another
        # tensor.
        self._copies = {
            storage_key_of(copy): name for copy, name in self._found_copies() if not copy.is_meta
        }
        return self._copies.get(memory)

    def _found_copies(self) -> Iterator[tuple[Tensor, str]]:
        originals = CopyFinder(self._table.root)
        for node in self._nodes():
            yield from originals.of(node.value)

    def _nodes(self) -> Iterator[Node]:
        """Yields the objects that user code keeps, except the model's own tensors."""
        return kept_by_user(self._table.root, set(map(id, self._table.own_tensors())))

    def _kept(self) -> dict[str, Tensor]:
        """The tensors that user code keeps, by path."""
        return {node.path: node.value for node in self._nodes() if isinstance(node.value, Tensor)}

    def _changing(self) -> AbstractContextManager[None]:
        """Context in which tensors kept by user code may change their memory."""
        return flat_weights_forgotten(
            *(node.value for node in self._nodes() if isinstance(node.value, nn.RNNBase))
        )

    def let_go_of_copies(self) -> None:
        """Drops, once, the copies that user code made while the whole model was here, except copies
        of tensors that this stage holds: values computed from copies are computed on the stages of
        the originals.
        """
        table = self._table
        if table.channels.num_stages == 1 or self._has_let_go:
            return
        self._has_let_go = True
        kept = self._kept()
        in_steps = {id(x) for path, x in kept.items() if path in self._in_steps}
        with torch.no_grad(), self._changing():
            for tensor, name in self._found_copies():
                if (
                    id(tensor) in in_steps
                    or tensor.is_meta
                    or table.stage in table.stages_of([name])
                    or self.is_held(tensor)
                ):
                    continue
                try:
                    swap(tensor, RemoteTensor.like(tensor, [name]))
                except RuntimeError as error:
                    log.warning("PipeShift: a copy of %s remains on this stage: %s", name, error)

    def pass_on(self, stage_of: Sequence[int]) -> bool:
        """Sends the copies of parameters that user code keeps to the stages that will hold these
        parameters, and drops them on all others. Every stage calls this.

        Args:
            stage_of: the new stage of each layer.

        Returns:
            whether there are any; the same on every stage.
        """
        kept, table = self._kept(), self._table
        found = exchange(table.channels, kept, lambda names: table.stages_of(names, stage_of))
        if not found.asked:
            return False
        with torch.no_grad(), self._changing():
            for path, what in found.asked.items():
                tensor = kept.get(path)
                if tensor is None:
                    continue
                stages = table.stages_of(what.computed_from, stage_of)
                is_elsewhere = what.computed_from and stages and table.stage not in stages
                if path in found.received:
                    hold(tensor, found.received[path])
                elif is_elsewhere and not tensor.is_meta:
                    swap(tensor, RemoteTensor.like(tensor, what.computed_from))
        return True

    def make_whole(self) -> None:
        """Gives every stage the values of all of them. Every stage calls this."""
        kept, channels = self._kept(), self._table.channels
        found = exchange(channels, kept, lambda _: range(channels.num_stages))
        with torch.no_grad(), self._changing():
            for path, values in found.received.items():
                hold(kept[path], values)
        if found.nowhere and channels.stage == 0:
            log.warning("PipeShift: %s", nowhere(found.nowhere))
