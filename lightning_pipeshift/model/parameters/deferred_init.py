"""Builds a model without its values, and later computes the values that a stage owns.

Inside :meth:`DeferredInit.recording` every new tensor is created on the meta device, and the
operations on it are recorded: creation, initialisation, copies, loading.
:meth:`DeferredInit.values` repeats only the operations that one tensor needs, so that a rank builds
its own layers one tensor at a time, and no others. The model's code runs unchanged: initialisation
by ``reset_parameters``, by ``self.apply(...)``, by hand, from a checkpoint. (The idea of recording
a model's construction is from torchdistX, for fully sharded models: pytorch.org/torchdistx,
"Deferred Module Initialization".)

Each random operation has its own stream, by its index in the record, so a tensor gets the same
values on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.module_private import MODULE_TABLES
from lightning_pipeshift.compat.torch_private import pytree, storage_key_of, version_of
from lightning_pipeshift.devices.host_memory import let_go
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.parameters.recorded_code import (
    META,
    Promised,
    recorded_by,
    unrecorded,
)
from lightning_pipeshift.model.random.random_streams import stream_seed
from lightning_pipeshift.model.tensors.trees import flatten


class _View(NamedTuple):
    """Describes a tensor on the meta device: a part of a storage created in the record."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return cls(storage_key_of(tensor), tensor.dtype, *place)


class _Real(NamedTuple):
    """A tensor with values, and its version at the time of its use."""

    tensor: Tensor
    version: int


class _Entry(NamedTuple):
    """One operation of the record.

    Args:
        run: computes its results from its arguments.
        arguments: ``(args, kwargs)``, with :class:`_View` and :class:`_Real` for tensors.
        results: the new tensors among its results, by position.
        needs: the entries that have to run before, by their indices; these need others in turn.
        draws: whether it draws random numbers.
    """

    run: Callable[..., Any]
    arguments: tuple[Any, Any]
    results: dict[int, _View]
    needs: set[int]
    draws: bool


class DeferredInit:
    """A record of how the tensors of a model are initialised.

    Args:
        seed: random numbers depend on it, and on their index in the record.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.forget()

    def forget(self) -> None:
        """Discards the record, and the tensors that were not loaded yet."""
        self._entries: list[_Entry] = []
        # By storage: the index of the last entry that writes to it, and the storage itself, so that
        # its address is not reused.
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        # By storage: the version of the tensor when :meth:`lend` was called.
        self._lent: dict[int, int] = {}

    def recording(self) -> AbstractContextManager[None]:
        """Context in which tensors are created without values. A second context continues the
        record.
        """
        return recorded_by(self)

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor is on the meta device, and its values can be computed."""
        is_strided = tensor.is_meta and tensor.layout is torch.strided
        return is_strided and storage_key_of(tensor) in self._storages

    def promise(self, like: Tensor, load: Callable[[], Tensor]) -> Tensor:
        """Returns a tensor on the meta device whose values are loaded on demand.

        Args:
            like: has its shape and type.
            load: returns the values, on the CPU.
        """
        with unrecorded():
            tensor = torch.empty(like.shape, dtype=like.dtype, device=META)
            self.add(load, ((), {}), [tensor])
            return Promised(tensor, self)

    def lend(self, tensor: Tensor) -> None:
        """Marks a tensor's memory as a private mapping of a file, so that its pages can be freed
        after their use: otherwise they would be in memory twice.
        """
        if tensor.layout is torch.strided:
            self._lent[storage_key_of(tensor)] = version_of(tensor)

    def values(self, tensor: Tensor) -> Tensor:
        """The values that a tensor would have without deferring: on the CPU, in memory of its own.

        Raises:
            LayerError: the tensor is not in the record, or an input of its values has changed
                since.
        """
        if not self.knows(tensor):
            raise LayerError(
                f"A tensor of shape {tuple(tensor.shape)} is on the meta device, and it is not "
                "known how to initialise it. Create it in `configure_model`, without "
                "`device='meta'`, or give it values there."
            )
        view = _View.of(tensor)
        needed: set[int] = set()
        asked = {self._storages[view.storage][0]}
        while asked:
            needed |= asked
            asked = set().union(*(self._entries[number].needs for number in asked)) - needed
        memory: dict[int, torch.UntypedStorage] = {}
        num_uses = Counter(
            storage
            for number in needed
            for storage in {
                argument.storage
                for argument in pytree.tree_leaves(self._entries[number].arguments, _is_tensor)
                if isinstance(argument, _View)
            }
        )
        with unrecorded(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            for number in sorted(needed):
                copied = self._copied(self._entries[number])
                if copied is not None and num_uses[copied[1]] == 1:
                    # The target takes the memory.
                    memory[copied[0]] = memory[copied[1]]
                else:
                    self._run(number, memory)
            found: Tensor = self._real(view, memory)
            if found.untyped_storage().nbytes() != found.nbytes:
                found = found.clone()
        return found

    # --- the record ---

    def recorded(self, arguments: Any) -> Any:
        """A structure of arguments, as an entry keeps it: before the operation runs."""
        return pytree.tree_map_only(Tensor, _recorded, arguments)

    def add(
        self,
        run: Callable[..., Any],
        arguments: tuple[Any, Any],
        results: Sequence[Any],
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
        draws: bool = False,
    ) -> None:
        """Records an operation, if it makes or changes tensors of the record.

        Args:
            run: computes its results from its arguments.
            arguments: as :meth:`recorded` returns them.
            results: what it has returned on the meta device.
            reads: the tensors whose values before matter.
            writes: the tensors that it writes to.
            draws: whether it draws random numbers.
        """
        needs = {self._storages[storage_key_of(x)][0] for x in filter(self.knows, reads)}
        made = {
            place: _View.of(x)
            for place, x in enumerate(results)
            if isinstance(x, Tensor) and x.is_meta and x.layout is torch.strided
            if not self.knows(x)
        }
        changed = [*(results[place] for place in made), *filter(self.knows, writes)]
        for tensor in changed:
            storage = tensor.untyped_storage()
            self._storages[storage_key_of(tensor)] = len(self._entries), storage
        if changed:
            self._entries.append(_Entry(run, arguments, made, needs, draws))

    def _copied(self, entry: _Entry) -> tuple[int, int] | None:
        """The storages of the target and the source of an operation that only copies a tensor, as
        it was loaded, to a whole other one; ``None`` for other operations.
        """
        if entry.run is not torch.ops.aten.copy_.default or len(entry.needs) != 1:
            return None
        target, source = entry.arguments[0][:2]
        (loaded,) = entry.needs
        is_whole = isinstance(source, _View) and target[1:] == source[1:] and not source.offset
        if not is_whole or self._entries[loaded].needs:
            return None
        sizes = {self._storages[x.storage][1].nbytes() for x in (target, source)}
        return (target.storage, source.storage) if len(sizes) == 1 else None

    def _run(self, number: int, memory: dict[int, torch.UntypedStorage]) -> None:
        entry = self._entries[number]
        if entry.draws:
            torch.manual_seed(stream_seed(self.seed, "init", number))
        args, kwargs = pytree.tree_map(
            lambda leaf: self._real(leaf, memory), entry.arguments, is_leaf=_is_tensor
        )
        results = pytree.tree_leaves(entry.run(*args, **kwargs))
        for leaf in pytree.tree_leaves((args, kwargs)) if self._lent else ():
            is_strided = isinstance(leaf, Tensor) and leaf.layout is torch.strided
            version = self._lent.get(storage_key_of(leaf)) if is_strided else None
            # Changed values exist in memory only, and must not be released.
            if version is not None and version == version_of(leaf):
                let_go(leaf)
        for place, view in entry.results.items():
            result = results[place]
            if result.stride() != view.stride or result.storage_offset() != view.offset:
                # Later entries expect the layout of the record.
                laid_out = torch.empty_strided(view.size, view.stride, dtype=view.dtype)
                result = laid_out.copy_(result)
            memory[view.storage] = result.untyped_storage()

    def _real(self, leaf: Any, memory: dict[int, torch.UntypedStorage]) -> Any:
        """An argument of an operation, with values if it is a tensor.

        Args:
            leaf: the argument, as it was recorded.
            memory: that of the storages that have values so far.
        """
        if isinstance(leaf, _Real):
            if version_of(leaf.tensor) != leaf.version:
                raise LayerError(
                    f"A tensor of shape {tuple(leaf.tensor.shape)} went into the model's initial"
                    " values in `configure_model` and was changed in place afterwards. Give the"
                    " model a copy."
                )
            return leaf.tensor
        if not isinstance(leaf, _View):
            return leaf
        if leaf.storage not in memory:
            # The operation overwrites it.
            _, storage = self._storages[leaf.storage]
            memory[leaf.storage] = torch.UntypedStorage(storage.nbytes())
        part = torch.empty(0, dtype=leaf.dtype)
        return part.set_(memory[leaf.storage], leaf.offset, leaf.size, leaf.stride)


def _is_tensor(argument: Any) -> bool:
    """Whether an operation's recorded argument is a tensor."""
    return isinstance(argument, _View | _Real)


def _recorded(tensor: Tensor) -> Any:
    return _View.of(tensor) if tensor.is_meta else _Real(tensor, version_of(tensor))


def is_whole(module: nn.Module) -> bool:
    """Whether no parameter or buffer of the module is on the meta device."""
    return not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


def give_attributes_values(root: nn.Module, deferred: DeferredInit) -> None:
    """Computes the values of tensors that modules keep as plain attributes (the states of a metric,
    a table), which belong to no stage.
    """
    for module in root.modules():
        for name, value in list(vars(module).items()):
            leaves, rebuild = flatten(value) if name not in MODULE_TABLES else ([], None)
            known = {id(x) for x in leaves if isinstance(x, Tensor) and deferred.knows(x)}
            if known and rebuild is not None:
                vars(module)[name] = rebuild(
                    [deferred.values(x) if id(x) in known else x for x in leaves]
                )
