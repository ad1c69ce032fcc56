"""How tensors look to the code that builds a model while their values are not computed yet.

While a :class:`~.deferred_init.DeferredInit` records, each new tensor is on the meta device, and
looks as if it were on the CPU. Operations on it are recorded. An operation that reads values gets
them: they are computed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pipeshift.compat.schema import written_arguments
from lightning_pipeshift.compat.torch_private import (
    TRUNCATED_NORMAL,
    OperationMode,
    dispatch_modes_disabled,
    make_subclass,
    no_dispatch,
    parse_to,
    pytree,
    schema_of,
    without_torch_function,
    without_torch_function_of_subclasses,
)

if TYPE_CHECKING:
    from lightning_pipeshift.model.parameters.deferred_init import DeferredInit

META = torch.device("meta")
_CPU = torch.device("cpu")
# Operations that overwrite all values of a tensor they write to.
_OVERWRITING = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "exponential_", "bernoulli_"}
    | {"cauchy_", "geometric_", "log_normal_"}
)
# The active records, innermost last.
_RECORDING: list[DeferredInit] = []


def current_record() -> DeferredInit | None:
    """Returns the active record: in ``configure_model`` there is one."""
    return _RECORDING[-1] if _RECORDING else None


@contextmanager
def recorded_by(deferred: DeferredInit) -> Iterator[None]:
    """Context in which operations on new tensors are recorded."""
    _RECORDING.append(deferred)
    try:
        with _Operations(deferred), _Appearance(deferred), _truncated_normals_whole(deferred):
            yield
    finally:
        _RECORDING.pop()


# Functions that read a tensor's values without an operation.
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


class Promised(Tensor):
    """A tensor on the meta device that is loaded when it is used outside of the record, for example
    by a callback that reads a checkpoint.
    """

    _deferred: DeferredInit

    @staticmethod
    def __new__(cls, data: Tensor, deferred: DeferredInit) -> Promised:
        self: Promised = make_subclass(cls, data)
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
            Promised, lambda x: x._deferred.values(x), (args, kwargs)
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
    if device == META:
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
                arguments = deferred.recorded(((tensor, *args), {}))
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
            kwargs["device"] = META
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
        recorded = deferred.recorded((args, kwargs))
        on_meta = pytree.tree_map_only(Tensor, lambda x: x.to(META), (args, kwargs))
        if "device" in kwargs:
            recorded[1]["device"] = _CPU
            on_meta[1]["device"] = META
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


def _covers(tensor: Tensor) -> bool:
    """Whether a tensor covers its whole storage."""
    size = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and size == tensor.untyped_storage().nbytes()
