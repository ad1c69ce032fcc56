"""The tensors that stand for values of other stages, and the parameters that are used as values."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import (
    READ_NUMBER,
    counted_writes,
    make_wrapper_subclass,
    mark_as_parameter,
    schema_of,
    version_of,
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.devices.properties import TRAINABLE
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.tensors.trees import WithoutMemory
from lightning_pipeshift.values.account import Account
from lightning_pipeshift.values.functions import OF_PARAMETERS, QUESTIONS


class Spec(NamedTuple):
    """What is known of a tensor without its values.

    Args:
        shape: its sizes.
        stride: its strides, in elements. They travel with values, since kernels may add up in
            another order for another layout.
        dtype: the type of its elements.
        requires_grad: whether it needs a gradient.
        shares: whose memory it shares: a non-negative number is that of an argument of the call
            that returned it, a negative number ``-1 - n`` that of the call's new tensor ``n``;
            ``None`` for memory of its own.
        is_leaf: whether no operation has a part in its gradient.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    shares: int | None = None
    is_leaf: bool = True


class Program(Protocol):
    """What runs operations on values: a microbatch's step."""

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function of torch, one of whose arguments is a value or a parameter."""

    def read_number(self, value: Tensor) -> Any:
        """The only element of a value, where the step cannot be suspended."""

    def read_whole(self, value: Tensor) -> Tensor:
        """A value's tensor, without its gradient, on every stage that asks for it."""


class _Thread(threading.local):
    """What one thread runs. Others, which send weights or save a checkpoint, run no step."""

    program: Program | None = None


_thread = _Thread()
# Where this stage computes.
_device = [torch.device("cpu")]
_OF_DEVICE: Any = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in ("device", "is_meta", *(f"is_{kind}" for kind in TRAINABLE))
        ),
        Tensor.get_device,
    }
)


def running() -> Program | None:
    """The microbatch whose step runs now in this thread; ``None`` inside of an owned layer or
    operation, and outside of steps.
    """
    return _thread.program


class run_by:
    """Context in which a microbatch runs the operations on values; with ``None`` no microbatch is
    running, and tensors are plain.
    """

    __slots__ = ("_before", "_program")

    def __init__(self, program: Program | None) -> None:
        self._program = program

    def __enter__(self) -> None:
        self._before = _thread.program
        _thread.program = self._program

    def __exit__(self, *_: object) -> None:
        _thread.program = self._before


def set_program(program: Program | None, device: torch.device) -> None:
    """Sets what runs operations on values outside of steps.

    Args:
        program: ``None`` where no run is in progress.
        device: this stage's.
    """
    _thread.program, _device[0] = program, device


_NO_STEP = (
    "inside of a layer that did not get it as an argument (but by `functional_call`, say), in"
    " another thread, or after the step. Pass it to the layer as an argument, use the step's own"
    " thread, or keep `value.item()`."
)


class _Node:
    """Stands for a node of autograd."""

    def __getattr__(self, name: str) -> Any:
        raise LayerError(
            f"`grad_fn.{name}` ({user_line()}) needs a node of autograd that one stage has: use"
            " `value.register_hook`, or `module.register_full_backward_hook` on a layer, or look at"
            " it inside of the layer."
        )


class Value(Tensor, WithoutMemory):
    """A tensor of the step that one stage owns. Every stage, the owner too, has this object in the
    tensor's place; :attr:`account` says where the tensor is.

    Args:
        spec: of the tensor.
        device: this stage's device, which the value claims to be on.
        account: of the value.
    """

    account: Account
    stays = False
    """Whether the stage of a value's memory must not change: a parameter has it as its gradient."""
    has_history: bool
    """Whether it is no leaf if it needs a gradient."""
    geometry: tuple[torch.Size, tuple[int, ...], torch.dtype]
    """Its shape, strides and dtype."""

    @staticmethod
    def __new__(cls, spec: Spec, device: torch.device, account: Account) -> Value:
        value: Value = make_wrapper_subclass(
            cls,
            spec.shape,
            strides=spec.stride,
            dtype=spec.dtype,
            device=device,
            requires_grad=spec.requires_grad,
        )
        value.account, value.has_history = account, not spec.is_leaf
        value.geometry = spec[:3]
        return value

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """As of the tensor."""
        return not (self.requires_grad and self.has_history)

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """Something if the tensor has one: only the owner has that."""
        return None if self.is_leaf else _Node()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in QUESTIONS:
            with without_torch_function_of_subclasses():
                return func(*args, **(kwargs or {}))
        program = _thread.program
        if program is None:
            if func is Tensor.to:
                # When a run has failed, Lightning moves metrics to the CPU, and its error counts.
                return args[0]
            raise LayerError(
                f"`{name_of(func)}` needs a value of a step where no step runs: {_NO_STEP}"
            )
        return program.operation(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        program = _thread.program
        if program is not None and schema_of(func).name == READ_NUMBER:
            # Torch asks no subclass where a number is expected: `torch.arange(lengths.max())`.
            return program.read_number(args[0])
        raise LayerError(
            f"`{func}` needs a value of a step where PipeShift does not see it: {_NO_STEP} Or"
            " compiled code, an extension in C++, or a function of `torch.func` (`vmap`) uses it:"
            " call that inside of a layer."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _deep_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _pickled(self, protocol)


def _pickled(tensor: Tensor, protocol: Any) -> Any:
    """For `torch.save` of a value or a parameter: a read."""
    program: Any = _thread.program
    if program is None:
        if type(tensor) is Value:
            raise LayerError(f"Pickling needs a value of a step where no step runs: {_NO_STEP}")
        return _plain_pickled(tensor, protocol)
    plain: Any = program.read_whole(tensor)
    if isinstance(tensor, nn.Parameter):
        plain = nn.Parameter(plain, tensor.requires_grad)
    return plain.__reduce_ex__(protocol)


_plain_pickled: Any = Tensor.__reduce_ex__


def _deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """A copy of a value, a parameter or a buffer, for a copy of what has it: a leaf, a parameter if
    it is one, and a value where a program runs.
    """
    found: Tensor | None = memo.get(id(tensor))
    if found is None:
        copied: Tensor = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            if type(copied) is Value:
                mark_as_parameter(copied)
            else:
                copied = nn.Parameter(copied, requires_grad=False)
        found = copied.requires_grad_(tensor.requires_grad and tensor.is_leaf)
        memo[id(tensor)] = found
    return found


class StepParameter(nn.Parameter):
    """The class of a module's parameters while the core runs the module's steps: functions between
    layers see that they use a parameter, which one stage owns. Everywhere else it is a plain one.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        program = _thread.program
        if program is None or func in QUESTIONS or func in OF_PARAMETERS:
            with without_torch_function_of_subclasses():
                found = func(*args, **(kwargs or {}))
                if func in _OF_DEVICE and args[0].is_meta:
                    # Another stage has its memory. Here it claims to be on this stage's device.
                    found = func(torch.empty(0, device=_device[0]))
                return found
        return program.operation(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise LayerError(
            f"`{func}` needs a parameter of another stage where PipeShift does not see it:"
            f" {_NO_STEP}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _deep_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _pickled(self, protocol)


class StepBuffer(Tensor):
    """As :class:`StepParameter`, for the buffers of layers."""

    __torch_function__ = StepParameter.__torch_function__
    __torch_dispatch__ = StepParameter.__torch_dispatch__  # type: ignore[assignment]
    __deepcopy__ = StepParameter.__deepcopy__
    __reduce_ex__ = StepParameter.__reduce_ex__


PLACED: frozenset[type] = frozenset({Value, StepParameter, StepBuffer})
"""The classes of tensors that one stage owns. They have no subclasses."""

DATA: Any = Tensor.data
"""The attribute ``data`` of tensors."""


class SeenData:
    """The attribute ``data`` of tensors during a run: torch asks no subclass where a value is
    assigned to it of a tensor that every stage has, and takes the value's memory, which is nowhere.
    """

    def __get__(self, tensor: Tensor | None, cls: type | None = None) -> Any:
        return DATA if tensor is None else DATA.__get__(tensor, cls)

    def __set__(self, tensor: Tensor, data: Tensor) -> None:
        program = _thread.program
        if program is None and type(data) is Value:
            raise LayerError(f"`x.data = y` needs a value of a step where no step runs: {_NO_STEP}")
        if program is None or type(data) not in PLACED or type(tensor) in PLACED:
            DATA.__set__(tensor, data)
        else:
            program.operation(DATA.__set__, (tensor, data), {})


def version_in(tensor: Tensor) -> int:
    """How often a plain tensor's memory was written to, where that is counted."""
    with without_torch_function_of_subclasses():
        return versions_in([tensor])[0]


def versions_in(tensors: Iterable[Tensor]) -> list[int]:
    """:func:`version_in` of each, inside of :data:`without_torch_function_of_subclasses`."""
    tensors = list(tensors)
    if not torch.is_inference_mode_enabled():
        # An error costs more than to ask each.
        with suppress(RuntimeError):
            return list(map(version_of, tensors))
    # Torch does not count writes to tensors of inference mode.
    return list(map(counted_writes, tensors))


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function of torch for a message; that of an attribute for its getter."""
    name: str = getattr(function, "__name__", "") or repr(function)
    if name in ("__get__", "__set__"):
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    return name


# Code of these folders is not the user's.
_OURS = (f"{__name__.partition('.')[0]}.", "torch.", "lightning.", "pytorch_lightning.")


_IS_OURS: dict[str, bool] = {}
NO_LINE = "no line of Python"


def user_line() -> str:
    """The file and line of the user's code that runs now."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        try:
            is_ours = _IS_OURS[frame.f_globals["__name__"]]
        except KeyError:
            module = frame.f_globals.get("__name__", "")
            is_ours = _IS_OURS[module] = module.startswith(_OURS)
        if not is_ours:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return NO_LINE
