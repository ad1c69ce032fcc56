"""The torch operations of the code between layers, one by one.

A :class:`TorchFunctionMode` sees every function of torch that user code calls, above autograd: the
results have their ``grad_fn``. Every stage runs the same code, so the n-th operation between two
layers is the same on every stage: its number names what it computes.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from lightning_pipeshift.compat.torch_private import (
    PRIVATE_QUESTIONS,
    PRIVATE_READS,
    BackwardHookFunction,
    current_function_mode,
    interpreter_stack,
    without_compiling,
    without_torch_function,
)
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.trace.placeholder import Placeholder

Call = Callable[..., Any]


class OperationKind(enum.Enum):
    """How a torch function uses the values of its arguments."""

    OPERATION = 0
    """Makes tensors, or writes to one."""
    READ = 1
    """Reads values into Python."""
    QUESTION = 2
    """Returns a value that does not depend on the tensor's values."""


# Attributes of a tensor that are tensors themselves.
_TENSOR_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
_READS = frozenset(
    [
        "item",
        "tolist",
        "numpy",
        "equal",
        "allclose",
        "is_nonzero",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "__complex__",
        "__contains__",
        "__array__",
        "__format__",
        *PRIVATE_READS,
    ]
)
_QUESTIONS = frozenset(
    [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "storage_offset",
        "element_size",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_inference",
        "is_pinned",
        "is_same_size",
        "is_set_to",
        "is_shared",
        "get_device",
        "type",
        "__len__",
        "__hash__",
        "__repr__",
        "__str__",
        "__dir__",
        "requires_grad_",
        "retain_grad",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "has_names",
        "data_ptr",
        "untyped_storage",
        "storage",
        "result_type",
        "can_cast",
        "broadcast_shapes",
        "promote_types",
        "__reduce_ex__",
        "__deepcopy__",
        "is_tensor",
        "is_storage",
        "get_default_dtype",
        "set_default_dtype",
        "__torch_function__",
        "__cuda_array_interface__",
        "__array_priority__",
        "is_coalesced",
        "dense_dim",
        "sparse_dim",
        "__dlpack__",
        "__dlpack_device__",
        *PRIVATE_QUESTIONS,
    ]
)

_kinds: dict[Any, tuple[OperationKind, str]] = {}


def is_transformed() -> bool:
    """Whether ``torch.func.grad`` or a similar function is active. Then tensors are wrapped, and
    operations on them do not return what user code gets, so they are not numbered.
    """
    return interpreter_stack() is not None


def kind_of(function: Any) -> tuple[OperationKind, str]:
    """The kind of a function, and its name: ``"add"``, ``"data.__set__"``."""
    found = _kinds.get(function)
    if found is None:
        found = _kinds[function] = _classified(function)
    return found


def _classified(function: Any) -> tuple[OperationKind, str]:
    name = str(getattr(function, "__name__", function))
    if name in ("__get__", "__set__", "__delete__"):
        attribute = str(getattr(getattr(function, "__self__", None), "__name__", "?"))
        is_operation = attribute in _TENSOR_ATTRIBUTES
        return (
            OperationKind.OPERATION if is_operation else OperationKind.QUESTION
        ), f"{attribute}.{name}"
    if name in _READS:
        return OperationKind.READ, name
    return (OperationKind.QUESTION if name in _QUESTIONS else OperationKind.OPERATION), name


class OperationHandler(Protocol):
    """Handles operations."""

    def operation(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the function's result, or a placeholder for it."""


class Operations(TorchFunctionMode):
    """Context in which a handler computes the result of every function of torch. Compiled code runs
    as it was written, so that its operations are seen.

    Args:
        told: the handler. The context does not keep it alive: usually the handler refers to the
            context.
    """

    def __init__(self, told: OperationHandler) -> None:
        super().__init__()
        self._reference = weakref.ref(told)
        self._is_paused = False
        self._eager: AbstractContextManager[Any] | None = None
        self._num_eager = 0

    @property
    def _told(self) -> OperationHandler:
        told = None if self._is_paused else self._reference()
        return _DIRECT if told is None else told

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        stack = _applied.stack
        stack.append(None)
        try:
            return self._told.operation(func, args, kwargs or {})
        finally:
            stack.pop()

    def __enter__(self) -> Operations:
        super().__enter__()  # type: ignore[no-untyped-call]
        _applied.stack.append(self._told)
        self._forbid_compiling()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._allow_compiling()
        stack = _applied.stack
        if stack:
            stack.pop()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def _forbid_compiling(self) -> None:
        self._num_eager += 1
        if self._eager is None:
            self._eager = without_compiling()
        else:
            # The same one again: every layer runs in between, so it has to be cheap.
            self._eager.__enter__()

    def _allow_compiling(self) -> bool:
        """Returns whether compiling was forbidden."""
        # A region of a graph that outlives the context may be recomputed behind its end.
        if not self._num_eager:
            return False
        self._num_eager -= 1
        assert self._eager is not None
        self._eager.__exit__(None, None, None)
        return True

    def is_innermost(self) -> bool:
        """Whether this is the innermost of all modes."""
        return current_function_mode() is self

    def paused(self) -> AbstractContextManager[None]:
        """Context without the handler: for a layer, or internal code."""
        # User code may have put a mode of its own (`with torch.device(...)`) around the layer.
        return _Without(self) if self.is_innermost() else self._bypassed()

    @contextmanager
    def _bypassed(self) -> Iterator[None]:
        stack = _applied.stack
        stack.append(None)
        before, self._is_paused = self._is_paused, True
        was_forbidden = self._allow_compiling()
        try:
            yield
        finally:
            if was_forbidden:
                self._forbid_compiling()
            self._is_paused = before
            stack.pop()

    def begin_in_backward(self) -> None:
        """Enters the context in the middle of a backward, when a checkpointed region is recomputed.
        Autograd restores for each node the modes from the start of the backward, so this lasts
        until the region has run.
        """
        if not self.is_innermost():
            self.__enter__()

    def end_backward(self) -> None:
        """Leaves the context if :meth:`begin_in_backward` has entered it."""
        while self.is_innermost():
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        _applied.stack.clear()
        # Autograd leaves modes by itself, but not this.
        while self._allow_compiling():
            pass


class _Without:
    """Context without the innermost mode. Every layer runs in one, so it has to be cheap."""

    __slots__ = ("_mode",)

    def __init__(self, mode: Operations) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._mode.__exit__(None, None, None)

    def __exit__(self, *exception: object) -> None:
        self._mode.__enter__()


class _Direct:
    """Calls functions directly."""

    def operation(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)


_DIRECT = _Direct()


class _Applied(threading.local):
    """Makes :class:`Operations` handle ``torch.autograd.Function.apply`` as one function. Without
    this, the mode would see the operations of its ``forward``, but not the differentiable result.

    Attributes:
        stack: the active handlers in this thread, innermost last; ``None``: functions are called
            directly.
    """

    def __init__(self) -> None:
        self.stack: list[OperationHandler | None] = []


_applied = _Applied()
# A class method of Python's in some versions of torch (to 2.13), and one of C's in others.
_own_apply = Function.__dict__["apply"]


def _plain_apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    return _own_apply.__get__(None, cls)(*args, **kwargs)


def _apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    stack = _applied.stack
    told = stack[-1] if stack else None
    if told is None:
        return _plain_apply(cls, *args, **kwargs)
    if cls is CheckpointFunction:
        # Reentrant checkpointing hides its graph until the backward. The non-reentrant variant
        # computes the same.
        run, preserve, *rest = args
        return checkpoint(run, *rest, use_reentrant=False, preserve_rng_state=preserve)
    if cls is BackwardHookFunction and any(isinstance(x, Placeholder) for x in args):
        # Inside of a layer that is traced it is no fault: the layer then runs on made-up values.
        fault = LayerError if getattr(told, "inside", None) is None else RuntimeError
        raise fault(
            "A hook on the backward of a module (`register_full_backward_hook`) needs the module's"
            " input and result on one stage. Register it on layers, not on a module that contains"
            " layers, and before `fit` begins; or register hooks on tensors"
            " (`tensor.register_hook`)."
        )
    applied = _AppliedFunction.of(cls)
    # Handled like any function: no other handler is called while this one computes the result.
    stack.append(None)
    try:
        with without_torch_function():
            return told.operation(applied, args, kwargs)
    finally:
        stack.pop()


class _AppliedFunction:
    """``apply`` of one class, with a name."""

    _known: dict[type[Function], _AppliedFunction] = {}  # noqa: RUF012

    def __init__(self, function: type[Function]) -> None:
        self.function = function
        self.__name__ = f"{function.__name__}.apply"

    @classmethod
    def of(cls, function: type[Function]) -> _AppliedFunction:
        return cls._known.setdefault(function, cls(function))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _plain_apply(self.function, *args, **kwargs)


@contextmanager
def applied_functions_seen() -> Iterator[None]:
    """Context in which :class:`Operations` sees custom autograd functions as one operation each."""
    before = Function.__dict__["apply"]
    Function.apply = classmethod(_apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Function.apply = before  # type: ignore[method-assign]


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """The tensors in the arguments of a function, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for entry in tree:
            yield from tensors_of(entry)
    elif isinstance(tree, dict):
        for entry in tree.values():
            yield from tensors_of(entry)
    elif isinstance(tree, slice):
        yield from tensors_of((tree.start, tree.stop, tree.step))


def with_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """An equal structure with every tensor changed, in the order of :func:`tensors_of`."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        entries = [with_tensors(entry, change) for entry in tree]
        return type(tree)(*entries) if hasattr(tree, "_fields") else tuple(entries)
    if isinstance(tree, list):
        return [with_tensors(entry, change) for entry in tree]
    if isinstance(tree, dict):
        return {key: with_tensors(entry, change) for key, entry in tree.items()}
    if isinstance(tree, slice):
        return slice(*with_tensors((tree.start, tree.stop, tree.step), change))
    return tree


# A parameter's name, shape and type are known on every stage.
_KNOWN_EVERYWHERE = frozenset(
    [
        "shape.__get__",
        "dtype.__get__",
        "ndim.__get__",
        "requires_grad.__get__",
        "layout.__get__",
        "is_leaf.__get__",
        "is_sparse.__get__",
        "names.__get__",
        "itemsize.__get__",
        "size",
        "dim",
        "numel",
        "__len__",
        "element_size",
        "is_floating_point",
        "is_complex",
        "__repr__",
    ]
)


def is_known_everywhere(name: str) -> bool:
    """Whether a function of a parameter has the same result on stages that do not hold it."""
    return name in _KNOWN_EVERYWHERE
