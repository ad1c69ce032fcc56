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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pipeshift.compat.schema import written_arguments
from lightning_pipeshift.compat.torch_private import (
    COPY_TO,
    MODULE_TABLES,
    TRUNCATED_NORMAL,
    OperationMode,
    dispatch_modes_disabled,
    make_subclass,
    no_dispatch,
    no_torch_function,
    parse_to,
    pytree,
    schema_of,
    storage_key_of,
    version_of,
    without_torch_function,
)
from lightning_pipeshift.devices.host_memory import let_go
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.execution.trees import flatten
from lightning_pipeshift.model.user_state.random_streams import stream_seed

_META = torch.device("meta")
_CPU = torch.device("cpu")
# Operations that overwrite all values of a tensor they write to.
_OVERWRITING = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "exponential_", "bernoulli_"}
    | {"cauchy_", "geometric_", "log_normal_"}
)


class _View(NamedTuple):
    """Describes a tensor on the meta device: a part of a storage created in the record."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Real(NamedTuple):
    """A tensor with values, and its version at the time of its use."""

    tensor: Tensor
    version: int


@dataclass
class _Entry:
    """One operation of the record.

    Args:
        run: computes its results from its arguments.
        arguments: ``(args, kwargs)``, with :class:`_View` and :class:`_Real` for tensors.
        results: the new tensors among its results, by position.
        writes: the storages that it creates or changes, and whether it overwrites each of them
            completely.
        reads: the storages whose values it needs.
        draws: whether it draws random numbers.
    """

    run: Callable[..., Any]
    arguments: tuple[Any, Any]
    results: dict[int, _View]
    writes: dict[int, bool]
    reads: frozenset[int]
    draws: bool


class DeferredInit:
    """A record of how the tensors of a model are initialised.

    Args:
        seed: random numbers depend on it, and on their index in the record.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._entries: list[_Entry] = []
        # By storage: the entries that write to it, in order. Storages are kept alive, so that their
        # addresses are not reused.
        self._writers: dict[int, list[int]] = {}
        self._alive: list[Any] = []
        # By storage: the version of the tensor when :meth:`lend` was called.
        self._lent: dict[int | None, int] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which tensors are created without values. A second context continues the
        record.
        """
        _RECORDING.append(self)
        try:
            with _Operations(self), _Appearance(self), _truncated_normals_whole(self):
                yield
        finally:
            _RECORDING.pop()

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor is on the meta device, and its values can be computed."""
        return _storage_of(tensor) in self._writers if tensor.is_meta else False

    def promise(self, like: Tensor, load: Callable[[], Tensor]) -> Tensor:
        """Returns a tensor on the meta device whose values are loaded on demand.

        Args:
            like: has its shape and type.
            load: returns the values, on the CPU.
        """
        with unrecorded():
            tensor = torch.empty(like.shape, dtype=like.dtype, device=_META)
            self._write(_Entry(load, ((), {}), *self._made_by([tensor]), frozenset(), False))
            return _Promised(tensor, self)

    def lend(self, tensor: Tensor) -> None:
        """Marks a tensor's memory as a private mapping of a file, so that its pages can be freed
        after their use: otherwise they would be in memory twice.
        """
        storage = _storage_of(tensor)
        if storage is not None:
            self._lent[storage] = version_of(tensor)

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
        view = _view_of(tensor)
        storages: dict[int, torch.UntypedStorage] = {}
        with unrecorded(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            needed = self._needed(view.storage)
            for number in needed:
                if not self._is_handed_on(number, needed, storages):
                    self._run(number, storages)
            found = _part(view, storages)
            if found.untyped_storage().nbytes() != found.numel() * found.element_size():
                found = found.clone()
        return found

    def forget(self) -> None:
        """Discards the record, and the tensors that were not loaded yet."""
        self._entries, self._writers, self._alive, self._lent = [], {}, [], {}

    # --- the record ---

    def _write(self, entry: _Entry) -> None:
        for storage in entry.writes:
            self._writers.setdefault(storage, []).append(len(self._entries))
        self._entries.append(entry)

    def _made_by(self, results: list[Any]) -> tuple[dict[int, _View], dict[int, bool]]:
        made, writes = {}, {}
        for position, result in enumerate(results):
            if isinstance(result, Tensor) and result.is_meta:
                storage = _storage_of(result)
                if storage is not None and storage not in self._writers:
                    made[position] = _view_of(result)
                    writes[storage] = True
                    self._alive.append(result.untyped_storage())
        return made, writes

    def _needed(self, storage: int) -> list[int]:
        """The entries that a storage's values depend on, in order."""
        needed: set[int] = set()
        asked = [(storage, len(self._entries))]
        while asked:
            storage, before = asked.pop()
            for number in reversed(self._writers.get(storage, ())):
                if number >= before:
                    continue
                entry = self._entries[number]
                # The entry that creates the storage is needed for its memory, even if a later one
                # overwrites it.
                if number not in needed:
                    needed.add(number)
                    asked += [(other, number) for other in entry.reads]
                if entry.writes[storage]:
                    first = self._writers[storage][0]
                    if first not in needed:
                        needed.add(first)
                        asked += [(other, first) for other in self._entries[first].reads]
                    break
        return sorted(needed)

    def _is_handed_on(
        self, number: int, needed: list[int], storages: dict[int, torch.UntypedStorage]
    ) -> bool:
        """Whether an entry only copies a whole loaded tensor that has no other use, so that the
        target can take over its memory without a copy.
        """
        entry = self._entries[number]
        if entry.run is not torch.ops.aten.copy_.default or not all(entry.writes.values()):
            return False
        target, source = entry.arguments[0][:2]
        if not isinstance(source, _View) or target[1:] != source[1:] or source.offset:
            return False
        readers = [other for other in needed if source.storage in self._entries[other].reads]
        if readers != [number] or self._entries[self._writers[source.storage][0]].reads:
            return False
        storages[target.storage] = storages[source.storage]
        return True

    def _run(self, number: int, storages: dict[int, torch.UntypedStorage]) -> None:
        entry = self._entries[number]
        if entry.draws:
            torch.manual_seed(stream_seed(self.seed, "init", number))
        arguments = pytree.tree_map(
            lambda leaf: _real_again(leaf, storages),
            entry.arguments,
            is_leaf=lambda leaf: isinstance(leaf, _View | _Real),
        )
        results = pytree.tree_leaves(entry.run(*arguments[0], **arguments[1]))
        for leaf in pytree.tree_leaves(arguments) if self._lent else ():
            # Changed values exist in memory only, and must not be released.
            if isinstance(leaf, Tensor) and self._lent.get(_storage_of(leaf)) == version_of(leaf):
                let_go(leaf)
        for position, view in entry.results.items():
            result = results[position]
            if result.stride() != view.stride or result.storage_offset() != view.offset:
                # Later entries expect the layout of the record.
                laid_out = torch.empty_strided(view.size, view.stride, dtype=view.dtype)
                result = laid_out.copy_(result)
            storages[view.storage] = result.untyped_storage()


class _Promised(Tensor):
    """A tensor on the meta device that is loaded when it is used outside of the record, for example
    by a callback that reads a checkpoint.
    """

    _deferred: DeferredInit

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, data: Tensor, deferred: DeferredInit) -> _Promised:
        self: _Promised = make_subclass(cls, data)
        self._deferred = deferred
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if current_record() is not None:
            with no_dispatch():
                return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(_Promised, _Promised.loaded, (args, kwargs))
        return func(*args, **kwargs)

    def loaded(self) -> Tensor:
        """The values, on the CPU."""
        return self._deferred.values(self)

    def tolist(self) -> Any:
        return self.loaded().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.loaded().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self.loaded().numpy().astype(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        copied: Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.loaded().__reduce_ex__(protocol)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Context, inside of a record, in which tensors are made with values as usual."""
    with dispatch_modes_disabled(), without_torch_function():
        yield


class _Appearance(TorchFunctionMode):
    """Makes a tensor of the record look as without deferring: it reports the CPU as its device."""

    def __init__(self, deferred: DeferredInit) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args else None
        if not isinstance(tensor, Tensor) or func not in _APPEARANCES:
            return func(*args, **kwargs)
        with without_torch_function():
            if not self._deferred.knows(tensor):
                return func(*args, **kwargs)
            return _APPEARANCES[func](self._deferred, tensor, *args[1:], **kwargs)


def _moved(deferred: DeferredInit, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # Each stage moves its tensors to its own device later.
    copies = kwargs.pop("copy", False)
    device, dtype, _, memory_format = parse_to(*args, **kwargs)
    if device == _META:
        return tensor.to(device)
    return tensor.to(
        dtype=dtype or tensor.dtype, copy=copies, memory_format=memory_format or _PRESERVED
    )


def _stays(deferred: DeferredInit, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor


_PRESERVED = torch.preserve_format
_APPEARANCES: dict[Any, Callable[..., Any]] = {
    Tensor.is_meta.__get__: lambda *_: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda *_: True,  # type: ignore[attr-defined]
    Tensor.device.__get__: lambda *_: _CPU,
    Tensor.to: _moved,
    Tensor.cpu: _stays,
    Tensor.cuda: _stays,
    Tensor.tolist: lambda deferred, tensor: deferred.values(tensor).tolist(),
    Tensor.numpy: lambda deferred, tensor, **how: deferred.values(tensor).numpy(**how),
    Tensor.__array__: lambda deferred, tensor, *how: deferred.values(tensor).__array__(*how),
}


@contextmanager
def _truncated_normals_whole(deferred: DeferredInit) -> Iterator[None]:
    """Context in which ``nn.init.trunc_normal_`` is one entry.

    The function draws until all numbers are inside the bounds, and reads values each time to check
    that: without this context, every rank would have to compute every such tensor.
    """
    name = TRUNCATED_NORMAL
    original = getattr(nn.init, name, None)
    if original is None:
        yield
        return

    def truncated_normal(tensor: Tensor, *args: Any, generator: Any = None) -> Tensor:
        with without_torch_function():
            if not deferred.knows(tensor):
                made: Tensor = original(tensor, *args, generator=generator)
                return made
            view = _view_of(tensor)
            covers = {view.storage: _covers(tensor)}
            deferred._write(_Entry(original, ((view, *args), {}), {}, covers, frozenset(), True))
        return tensor

    setattr(nn.init, name, truncated_normal)
    try:
        yield
    finally:
        setattr(nn.init, name, original)


class _Operations(OperationMode):
    def __init__(self, deferred: DeferredInit) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._deferred = deferred

    def operation(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        deferred, kwargs = self._deferred, dict(kwargs)
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not tensors and any(x.name == "device" for x in schema_of(func).arguments):
            kwargs["device"] = _META
            kwargs.pop("pin_memory", None)
        elif not any(map(deferred.knows, tensors)):
            return func(*args, **kwargs)
        changed = written_arguments(func, args, kwargs)
        # Torch itself copies to the CPU in this way to read values, for a list of them; the user's
        # own `to` and `cpu` are handled before they get here.
        wants_values = func is COPY_TO and kwargs.get("device") == _CPU
        if (
            wants_values
            or torch.Tag.data_dependent_output in func.tags
            or torch.Tag.dynamic_output_shape in func.tags
            or any(not tensor.is_meta for tensor in changed)
        ):
            args, kwargs = pytree.tree_map_only(Tensor, self._with_values, (args, kwargs))
            return func(*args, **kwargs)
        # The state of a generator other than the global one would depend on which tensors are
        # initialised.
        if kwargs.get("generator") is not None:
            kwargs["generator"] = None
        recorded = pytree.tree_map_only(Tensor, self._recorded, (args, kwargs))
        on_meta = pytree.tree_map_only(Tensor, lambda x: x.to(_META), (args, kwargs))
        if "device" in kwargs:
            recorded[1]["device"] = _CPU
            on_meta[1]["device"] = _META
        # The operation has to write to the tensor itself.
        results = func(*on_meta[0], **on_meta[1])
        leaves = pytree.tree_leaves(results)
        made, writes = deferred._made_by(leaves)
        whole = func.overloadpacket.__name__ in _OVERWRITING
        overwritten = set()
        for tensor in changed:
            storage = _storage_of(tensor)
            if storage is None:
                continue
            writes[storage] = whole and _covers(tensor)
            if writes[storage]:
                overwritten.add(id(tensor))
        if writes:
            reads = frozenset(
                storage
                for tensor in tensors
                if id(tensor) not in overwritten and (storage := _storage_of(tensor)) is not None
            )
            draws = torch.Tag.nondeterministic_seeded in func.tags
            deferred._write(_Entry(func, recorded, made, writes, reads, draws))
        return results

    def _with_values(self, tensor: Tensor) -> Tensor:
        return self._deferred.values(tensor) if self._deferred.knows(tensor) else tensor

    def _recorded(self, tensor: Tensor) -> Any:
        return _view_of(tensor) if tensor.is_meta else _Real(tensor, version_of(tensor))


def _covers(tensor: Tensor) -> bool:
    """Whether a tensor covers its whole storage."""
    size = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and size == tensor.untyped_storage().nbytes()


def _storage_of(tensor: Tensor) -> int | None:
    if tensor.layout != torch.strided:
        return None
    return storage_key_of(tensor)


def _view_of(tensor: Tensor) -> _View:
    storage = _storage_of(tensor)
    assert storage is not None
    return _View(
        storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    )


def _part(view: _View, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    part = torch.empty(0, dtype=view.dtype)
    return part.set_(storages[view.storage], view.offset, view.size, view.stride)


def _real_again(leaf: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(leaf, _View):
        return _part(leaf, storages)
    if isinstance(leaf, _Real):
        if version_of(leaf.tensor) != leaf.version:
            raise LayerError(
                f"A tensor of shape {tuple(leaf.tensor.shape)} went into the model's initial values"
                " in `configure_model` and was changed in place afterwards. Give the model a copy."
            )
        return leaf.tensor
    return leaf


# The active records, innermost last.
_RECORDING: list[DeferredInit] = []


def current_record() -> DeferredInit | None:
    """Returns the active record: in ``configure_model`` there is one."""
    return _RECORDING[-1] if _RECORDING else None


def is_whole(module: nn.Module) -> bool:
    """Whether no parameter or buffer of the module is on the meta device."""
    return not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


def give_attributes_values(root: nn.Module, deferred: DeferredInit) -> None:
    """Computes the values of tensors that modules keep as plain attributes (the states of a metric,
    a table), which belong to no stage.
    """
    for module in root.modules():
        for name, value in list(vars(module).items()):
            if name in MODULE_TABLES:
                continue
            leaves, rebuild = flatten(value)
            known = [isinstance(leaf, Tensor) and deferred.knows(leaf) for leaf in leaves]
            if any(known):
                vars(module)[name] = rebuild(
                    [
                        deferred.values(leaf) if is_known else leaf
                        for leaf, is_known in zip(leaves, known, strict=True)
                    ]
                )
