"""Private names of torch: tensors, dispatch and autograd. See ``compat`` for the rest.

A new version of torch may rename or change any of them without notice.
``tests/unit/compat/test_torch_private.py`` checks what the package relies on, so a change shows
there first. All were checked with torch 2.13; ``constraints-lowest.txt`` says what was run with
older versions. Names that are called for every operation or layer are plain aliases, so that they
cost no further call.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, Final

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as real_tensors
from torch._subclasses.functional_tensor import FunctionalTensor as _FunctionalTensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import _get_current_function_mode as current_function_mode
from torch.overrides import _get_current_function_mode_stack as function_mode_stack
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as dispatch_modes_disabled
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode
from torch.utils.data.dataloader import _BaseDataLoaderIter as DataLoaderIterator

# The imported names, and why no public one serves:
# - current_function_mode: the innermost TorchFunctionMode; torch only has the stack.
# - function_mode_stack, dispatch_mode_stack, and what pops from them and pushes to them: contexts
#   enter and leave modes in order, and a step that is suspended leaves its modes in the middle.
# - pytree: public packages (optree) order dicts otherwise, and lack the classes that libraries
#   register here.
# - no_dispatch: context without tensor subclasses and dispatch modes.
# - TorchDispatchMode: documented, but only under this name.
# - dispatch_modes_disabled: context without dispatch modes in which subclasses still dispatch.
# - FakeTensorMode: makes tensors without data that claim to be on a real device; torch documents
#   it, and exports it under no other name.
# - real_tensors: context without the FakeTensorMode that is in force.
# - DataLoaderIterator: the base class of the iterators that a DataLoader makes.
# - torch._C._functorch: functions of torch.func do not say from outside that they run.
__all__ = [
    "FAKE_TENSOR_LOG",
    "DataLoaderIterator",
    "FakeTensorMode",
    "OperationMode",
    "current_function_mode",
    "dispatch_mode_stack",
    "dispatch_modes_disabled",
    "function_mode_stack",
    "no_dispatch",
    "pop_dispatch_mode",
    "pop_function_mode",
    "push_dispatch_mode",
    "push_function_mode",
    "pytree",
    "real_tensors",
]

FAKE_TENSOR_LOG: Final = logging.getLogger("torch._subclasses.fake_tensor")
"""Where fake tensors report operations that fail on them, each with a trace."""

# --- function transforms ---


def transform_runs() -> bool:
    """Whether a function transform of ``torch.func`` (``vmap``, ``grad``) runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# --- dispatch modes ---


class OperationMode(TorchDispatchMode):
    """A dispatch mode that sees operations, in :meth:`operation`.

    Higher-order operators (``torch.cond``, ``flex_attention``) take functions and have no schema. A
    mode has to say that it allows them, or they fail; here they run unseen, with what they call.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled, and runs unseen. (Else torch runs it without compiling.)"""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        return self.operation(func, types, args, kwargs)

    def operation(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation, or something in its place, and returns its results; arguments as those
        of ``__torch_dispatch__``.
        """
        raise NotImplementedError


# --- autograd's version counters ---


@contextmanager
def preserved_version_counters(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Context whose changes in place autograd does not notice: for tensors that get their earlier
    memory back before a backward needs it, the use that torch names for this function.
    """
    everything = tuple(tensors)
    versions = tuple(tensor._version for tensor in everything)
    try:
        yield
    finally:
        torch._C._autograd._unsafe_set_version_counter(everything, versions)


def mark_as_stepped(optimizer: Optimizer) -> None:
    """Prevents a warning of learning rate schedulers, for an optimizer that steps later than they
    do. They look at an attribute that :meth:`Optimizer.step` sets.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether any function is called before or after each step of the optimizer. Torch has
    functions to register some, but none that tells of them.
    """
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


@contextmanager
def called_before_post_hooks(optimizer: Optimizer, function: Callable[[], None]) -> Iterator[None]:
    """Context in which a function is called when the optimizer has made a step, before all other
    functions that are. Torch's public function adds one behind the others.
    """
    handle = optimizer.register_step_post_hook(lambda *_: function())
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        handle.remove()


def step_without_hooks(optimizer: Optimizer) -> Callable[..., Any]:
    """The method ``step`` of the optimizer's class, without the functions that are called before
    and after it: neither its own, nor what schedulers put in its place.
    """
    step = type(optimizer).step
    return partial(getattr(step, "__wrapped__", step), optimizer)


# --- dispatch ---

without_torch_function = torch._C.DisableTorchFunction
"""Context without torch function modes and ``__torch_function__`` of subclasses. The public way to
switch off both does not exist; torch's documentation names this class."""

without_torch_function_of_subclasses = torch._C.DisableTorchFunctionSubclass
"""Context without ``__torch_function__`` of subclasses, in which modes still see functions."""

without_torch_dispatch = torch._C._DisableTorchDispatch
"""Context without dispatch modes and ``__torch_dispatch__`` of subclasses: a class of C++, which
takes a hundredth of the time of ``no_dispatch``."""

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""The schema of an operation, as ``__torch_dispatch__`` gets it: its name, and which arguments it
writes to or returns views of."""

parse_to: Callable[..., Any] = torch._C._nn._parse_to
"""``(device, dtype, non_blocking, memory_format)`` from the arguments of ``Tensor.to``, which has
many forms. ``nn.Module.to`` parses them with this, too."""

# Operations whose names are not public, as a schema or a torch function mode has them.
READ_NUMBER: Final = "aten::_local_scalar_dense"
"""Reads the value of a tensor with one element: for ``Tensor.item``, and where torch expects a
number."""
FOR_EACH: Final = "aten::_foreach_"
"""The beginning of the names of operations on lists of tensors, which optimizers use."""
FOR_EACH_FUNCTIONS: Final = tuple(
    getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_")
)
"""The functions on lists of tensors: optimizers call them, and averages of weights."""
COPY_TO: Final = torch.ops.aten._to_copy.default
"""The operation behind ``Tensor.to`` where it copies."""


# --- tensors ---

base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor that another one is a view of."""

TRUNCATED_NORMAL: Final = "_no_grad_trunc_normal_"
"""The function in ``torch.nn.init`` that draws for ``trunc_normal_``; libraries import the public
one by name, so only this one can be replaced for all."""

LOADER_ITERATOR: Final = "_iterator"
"""The attribute in which a DataLoader with persistent workers keeps its own iterator."""


def counted_writes(tensor: Tensor) -> int:
    """How often a tensor was written to in place; 0 for one of inference mode, where nobody counts
    that.
    """
    return 0 if tensor.is_inference() else tensor._version


make_subclass: Callable[..., Any] = Tensor._make_subclass
"""A tensor of a subclass with the memory of another one: ``(cls, data, requires_grad)``. Torch's
documentation of subclasses names it, and there is no other way."""

make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass
"""A tensor of a subclass without memory: ``(cls, size, strides=..., dtype=..., ...)``. Torch's
documentation of subclasses names it, and there is no other way."""

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor's memory was written to: autograd's counter for in-place writes. Torch's
public ``torch.autograd.graph.increment_version`` only raises it."""

storage_key: Callable[[Any], int] = attrgetter("_cdata")
"""The identity of a storage: equal for all tensors with the same memory, also on the meta device,
where ``data_ptr`` is 0 for all. It may be used again once the storage is gone."""


has_storage: Callable[[Tensor], bool] = torch._C._has_storage
"""Whether a tensor has one memory: not a sparse one, nor what ``torch.func`` passes to functions.
No public function tells the latter apart."""


def storage_key_of(tensor: Tensor) -> int:
    """The identity of a tensor's storage, see :data:`storage_key`; of one without a storage, a
    number that no other tensor has.
    """
    return storage_key(tensor.untyped_storage()) if has_storage(tensor) else -id(tensor)


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """How many tensors and Python objects refer to a storage; the one passed here counts as one.

    The caller has to keep the object in a variable: from some version of torch after 2.7 on it
    counts by itself, and until then a temporary one would be gone. Torch's public counts are of
    Python objects, and not of storages.
    """
    return int(torch._C._storage_Use_Count(storage._cdata))


USES_OF_ONE: Final = 2
"""The :func:`storage_use_count` of one tensor: it, and the Python object of its storage."""


def num_other_uses(tensor: Tensor) -> int:
    """How many other tensors, and other objects, refer to the memory of this one; 0 if it has no
    storage.
    """
    if not has_storage(tensor):
        return 0
    storage = tensor.untyped_storage()
    return storage_use_count(storage) - USES_OF_ONE


def swap_tensors(one: Tensor, other: Tensor) -> None:
    """``torch.utils.swap_tensors``, also where Python refers weakly to a tensor: a recurrent module
    does, and a dict with weak keys. Who follows such a reference means the object, whatever is in
    it.

    Raises:
        RuntimeError: C++ refers to one of them.
    """
    if not any(map(weakref.getweakrefs, (one, other))):
        torch.utils.swap_tensors(one, other)
        return
    counts: Any = Tensor._use_count  # type: ignore[attr-defined]
    if max(counts(one), counts(other)) > 1:
        raise RuntimeError("A tensor that C++ refers to cannot be swapped.")
    one_class, one_dict = one.__class__, one.__dict__
    one.__class__, one.__dict__ = other.__class__, other.__dict__
    other.__class__, other.__dict__ = one_class, one_dict
    torch._C._swap_tensor_impl(one, other)


def mark_as_parameter(tensor: Tensor) -> None:
    """Makes ``isinstance(tensor, nn.Parameter)`` true for a tensor of another subclass, as
    ``nn.Parameter(tensor)`` does for classes that it can make itself.
    """
    tensor._is_param = True


PARAMETER_MARK: Final = "_is_param"
"""The attribute that :func:`mark_as_parameter` sets."""


_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def has_hooks(tensor: Tensor) -> bool:
    """Whether a tensor has hooks of its own for its gradient."""
    return any(getattr(tensor, name) for name in _HOOKS_OF_TENSORS)


def renew_hooks(tensor: Tensor) -> None:
    """Puts a tensor's hooks into effect after ``torch.utils.swap_tensors``, which leaves them on
    the list, but with the other object.

    Public functions would add the hooks a second time, under other numbers, and the handles that
    users have would not remove them.
    """
    for name in _HOOKS_OF_TENSORS:
        hooks = getattr(tensor, name)
        if hooks:
            setattr(tensor, name, None)
            setattr(tensor, name, hooks)


# --- hooks on saved tensors ---


def is_without_memory(value: Any) -> bool:
    """Whether a value is a tensor that only has a shape: while a compiler traces a function."""
    return isinstance(value, FakeTensor | _FunctionalTensor)


def top_saved_hooks() -> Any:
    """The innermost hooks on saved tensors in this thread, as ``(pack, unpack)``; ``None`` for
    none. ``torch.autograd.graph.saved_tensors_hooks`` cannot be asked.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


pop_saved_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
"""Removes the innermost hooks on saved tensors, outside of the context that has set them."""

push_saved_hooks: Callable[..., None] = torch._C._autograd._push_saved_tensors_default_hooks
"""Sets hooks on saved tensors, ``(pack, unpack)``; :func:`pop_saved_hooks` removes them."""

apply_function: Callable[..., Any] = torch._C._FunctionBase.__dict__["apply"]
"""``autograd.Function.apply`` as torch has it, for a class: ``apply_function.__get__(None, cls)``.
The core takes its place, since it asks no subclass of a tensor."""


@contextmanager
def checkpointing_by(find: Callable[[], AbstractContextManager[None] | None]) -> Iterator[None]:
    """Context in which ``torch.utils.checkpoint`` without ``use_reentrant`` runs its function in
    the context that ``find`` returns, and does nothing else; ``None``: it does what it always does.
    """
    plain = torch_checkpoint._checkpoint_without_reentrant_generator

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        context = find()
        if context is None:
            yield from plain(*args, **kwargs)
            return
        with context:
            yield

    torch_checkpoint._checkpoint_without_reentrant_generator = generator
    try:
        yield
    finally:
        torch_checkpoint._checkpoint_without_reentrant_generator = plain


# --- gradient scaler ---


def scaler_state(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state that a gradient scaler has recorded for one optimizer in this step: under
    ``"found_inf_per_device"`` a flag for each device. The scaler has no public way to read or to
    change them before it decides.
    """
    return scaler._per_optimizer_states[id(optimizer)]


def scaler_device(scaler: torch.amp.GradScaler) -> torch.device:
    """The device that a gradient scaler was made for."""
    return torch.device(scaler._device)


def scale_device(scaler: torch.amp.GradScaler) -> torch.device:
    """The device of a gradient scaler's scale; the one it was made for before its first use."""
    scale = scaler._scale
    return scale.device if scale is not None else torch.device(scaler._device)
