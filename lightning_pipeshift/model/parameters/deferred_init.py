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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pipeshift.compat.schema import written_arguments
from lightning_pipeshift.compat.torch_private import (
    MODULE_TABLES,
    TRUNCATED_NORMAL,
    OperationMode,
    dispatch_modes_disabled,
    make_subclass,
    no_dispatch,
    parse_to,
    pytree,
    schema_of,
    storage_key_of,
    version_of,
    without_torch_function,
    without_torch_function_of_subclasses,
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
        is_strided = tensor.is_meta and tensor.layout is torch.strided
        return is_strided and storage_key_of(tensor) in self._storages

    def promise(self, like: Tensor, load: Callable[[], Tensor]) -> Tensor:
        """Returns a tensor on the meta device whose values are loaded on demand.

        Args:
            like: has its shape and type.
            load: returns the values, on the CPU.
        """
        with unrecorded():
            tensor = torch.empty(like.shape, dtype=like.dtype, device=_META)
            self.add(load, ((), {}), [tensor])
            return _Promised(tensor, self)

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
            arguments: see :class:`_Entry`.
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


def _covers(tensor: Tensor) -> bool:
    """Whether a tensor covers its whole storage."""
    size = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and size == tensor.untyped_storage().nbytes()


# --- what the user's code sees of it ---

# Functions that read a tensor's values without an operation.
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


class _Promised(Tensor):
    """A tensor on the meta device that is loaded when it is used outside of the record, for example
    by a callback that reads a checkpoint.
    """

    _deferred: DeferredInit

    @staticmethod
    def __new__(cls, data: Tensor, deferred: DeferredInit) -> _Promised:
        self: _Promised = make_subclass(cls, data)
        self._deferred = deferred
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with without_torch_function_of_subclasses():
            if func == Tensor.__deepcopy__:
                return args[0].clone()
            if func in _READS or func == Tensor.__reduce_ex__:
                args = (args[0]._deferred.values(args[0]), *args[1:])
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if current_record() is not None:
            with no_dispatch():
                return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(
            _Promised, lambda x: x._deferred.values(x), (args, kwargs)
        )
        return func(*args, **kwargs)


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
        if func not in _READS and func not in _APPEARANCES:
            return func(*args, **kwargs)
        tensor, *others = args
        with without_torch_function():
            if not self._deferred.knows(tensor):
                return func(*args, **kwargs)
            if func in _APPEARANCES:
                return _APPEARANCES[func](tensor, *others, **kwargs)
            return func(self._deferred.values(tensor), *others, **kwargs)


def _moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # Each stage moves its tensors to its own device later.
    copies = kwargs.pop("copy", False)
    device, dtype, _, memory_format = parse_to(*args, **kwargs)
    if device == _META:
        return tensor.to(device)
    layout = memory_format or torch.preserve_format
    return tensor.to(dtype=dtype or tensor.dtype, copy=copies, memory_format=layout)


_APPEARANCES: dict[Any, Callable[..., Any]] = {
    Tensor.is_meta.__get__: lambda *_: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda *_: True,  # type: ignore[attr-defined]
    Tensor.device.__get__: lambda *_: _CPU,
    Tensor.to: _moved,
    Tensor.cpu: lambda tensor, **_: tensor,
    Tensor.cuda: lambda tensor, *_, **__: tensor,
}


@contextmanager
def _truncated_normals_whole(deferred: DeferredInit) -> Iterator[None]:
    """Context in which ``nn.init.trunc_normal_`` is one entry.

    The function draws until all numbers are inside the bounds, and reads values each time to check
    that: without this context, every rank would have to compute every such tensor.
    """
    original = getattr(nn.init, TRUNCATED_NORMAL, None)

    def truncated_normal(tensor: Tensor, *args: Any, generator: Any = None) -> Tensor:
        assert original is not None
        with without_torch_function():
            if deferred.knows(tensor):
                arguments: Any = (_View.of(tensor), *args), {}
                reads = [] if _covers(tensor) else [tensor]
                deferred.add(original, arguments, [], reads, [tensor], draws=True)
            else:
                original(tensor, *args, generator=generator)
        return tensor

    if original is not None:
        setattr(nn.init, TRUNCATED_NORMAL, truncated_normal)
    try:
        yield
    finally:
        if original is not None:
            setattr(nn.init, TRUNCATED_NORMAL, original)


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
        if (
            torch.Tag.data_dependent_output in func.tags
            or torch.Tag.dynamic_output_shape in func.tags
            or any(not tensor.is_meta for tensor in changed)
        ):
            args, kwargs = pytree.tree_map_only(Tensor, self._with_values, (args, kwargs))
            return func(*args, **kwargs)
        # The state of a generator other than the global one would depend on which tensors are
        # initialised.
        if kwargs.get("generator") is not None:
            kwargs["generator"] = None
        recorded = pytree.tree_map_only(Tensor, _recorded, (args, kwargs))
        on_meta = pytree.tree_map_only(Tensor, lambda x: x.to(_META), (args, kwargs))
        if "device" in kwargs:
            recorded[1]["device"] = _CPU
            on_meta[1]["device"] = _META
        # The operation has to write to the tensor itself.
        results = func(*on_meta[0], **on_meta[1])
        overwritten = set()
        if func.overloadpacket.__name__ in _OVERWRITING:
            overwritten = {id(tensor) for tensor in changed if _covers(tensor)}
        reads = [tensor for tensor in tensors if id(tensor) not in overwritten]
        draws = torch.Tag.nondeterministic_seeded in func.tags
        deferred.add(func, recorded, pytree.tree_leaves(results), reads, changed, draws)
        return results

    def _with_values(self, tensor: Tensor) -> Tensor:
        return self._deferred.values(tensor) if self._deferred.knows(tensor) else tensor


def _recorded(tensor: Tensor) -> Any:
    return _View.of(tensor) if tensor.is_meta else _Real(tensor, version_of(tensor))


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
            leaves, rebuild = flatten(value) if name not in MODULE_TABLES else ([], None)
            known = {id(x) for x in leaves if isinstance(x, Tensor) and deferred.knows(x)}
            if known and rebuild is not None:
                vars(module)[name] = rebuild(
                    [deferred.values(x) if id(x) in known else x for x in leaves]
                )
