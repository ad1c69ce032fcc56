"""Sees each operation of torch, and whatever asks where a tensor is, for a simulated device."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_pipeshift.compat.torch_private import (
    READ_NUMBER,
    OperationMode,
    parse_to,
    pytree,
    schema_of,
    storage_key_of,
)

if TYPE_CHECKING:
    from tests.simulated.device import SimulatedDevice

CPU: Final = torch.device("cpu")

# What reads values to go on with them: it waits for the device.
_READS = frozenset(
    {
        READ_NUMBER,
        "aten::equal",
        "aten::is_nonzero",
        "aten::masked_select",
        "aten::nonzero",
        "aten::repeat_interleave",
        "aten::unique_consecutive",
        "aten::unique_dim",
        "aten::_unique2",
    }
)
# What does not touch the values of the tensors that it is given, and of those that it makes.
_READS_NOTHING = re.compile("aten::(new_.*|.*_like|set_|resize_)")
# What takes numbers or indices of the host for tensors of the device: vectors, and numbers alone.
_TAKES_VECTORS = frozenset({"aten::index", "aten::index_put", "aten::index_put_"})
_TAKES_NUMBERS = re.compile("aten::(fill_|masked_fill_?|_foreach_.*|_fused_.*)")
_NO_COLLECTIONS = (bool, int, float, str, torch.dtype, torch.device, type(None))
_CALLS_HOOKS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_WRITES_NOTHING = re.compile("aten::(set_|resize_)")


class MemoryPlace(NamedTuple):
    """Where an operation is to put its results.

    Args:
        is_there: on the device.
        is_pinned: in pinned memory.
        waits: for a copy: whether it is to be complete when the call returns.
    """

    is_there: bool
    is_pinned: bool = False
    waits: bool = True


def _tensors(tree: Any) -> list[Tensor]:
    # Most arguments are no collections.
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, _NO_COLLECTIONS):
        return []
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Facts(NamedTuple):
    """An operation.

    Args:
        name: without that of the overload.
        kinds: for each of its arguments, by name, whether it reads it (0), writes to it (1), or
            returns a view of it (2).
        reads_nothing: whether it does not touch the values of what it is given.
        writes_nothing: nor of what it makes.
    """

    name: str
    kinds: dict[str, int]
    reads_nothing: bool
    writes_nothing: bool


@cache
def _facts_of(function: Any) -> _Facts:
    name: str = function.name().partition(".")[0]
    aliases = {one.name: one.alias_info for one in schema_of(function).arguments}
    kinds = {
        argument: 0 if alias is None else 1 if alias.is_write else 2
        for argument, alias in aliases.items()
    }
    reads_nothing, writes_nothing = _READS_NOTHING.fullmatch(name), _WRITES_NOTHING.fullmatch(name)
    return _Facts(name, kinds, bool(reads_nothing), bool(writes_nothing))


class Operations(OperationMode):
    """Sees what torch's kernels are given, the backward's too."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def operation(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        device = self._device
        name, kinds, reads_nothing, writes_nothing = _facts_of(function)
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        others: list[Tensor] = []
        parts = reads, writes, others
        for kind, value in zip(kinds.values(), args, strict=False):
            parts[kind].extend(_tensors(value))
        for argument, value in kwargs.items():
            parts[kinds[argument]].extend(_tensors(value))
        if reads_nothing:
            others += reads + writes
            reads, writes = [], []
        place = device.place
        is_there = any(map(device.has, reads + writes + others))
        if name == "aten::copy_" and device.has(args[0]) != device.has(args[1]):
            waits = not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking")
            device.copy(name, [args[0]], [args[1]], waits)
            device.num_done += 1
            return function(*args, **kwargs)
        if place is not None and name == "aten::clone" and place.is_there != is_there:
            result = function(*args, **kwargs)
            device.put(result, place)
            device.copy(name, [result], [args[0]], place.waits)
            device.num_done += 1
            return result
        goes_there = place.is_there if place is not None and not (reads or writes) else is_there
        device.num_done += goes_there
        device.access(name, reads, writes, goes_there)
        if is_there:
            self._refuse(name, function, reads, writes, [*args, *kwargs.values()])
            self._wait_for_read(name, args)
        results = function(*args, **kwargs)
        made = [x for x in _tensors(results) if not _is_among(x, reads + writes + others)]
        for tensor in made:
            if place is not None or goes_there:
                device.put(tensor, place if place is not None else MemoryPlace(True))
        if made and not writes_nothing:
            device.access(name, [], made, goes_there)
        return results

    def _refuse(
        self, name: str, function: Any, reads: list[Tensor], writes: list[Tensor], given: list[Any]
    ) -> None:
        """Raises torch's errors for what an accelerator does not take.

        Not where function modes are off, as in the hooks of a backward: there tensors say that they
        are the host's, and code that moves them does nothing.

        Raises:
            RuntimeError: a tensor, or a random generator, of the host's.
        """
        device = self._device.device
        if not getattr(self._device.local, "is_followed", False):
            return
        takes_numbers = torch.Tag.pointwise in function.tags or _TAKES_NUMBERS.fullmatch(name)
        read = [x for x in reads if x.dim() or not takes_numbers]
        if name not in _TAKES_VECTORS and any(map(self._is_on_host, read + writes)):
            self._device.refuse_mixed(name)
        for generator in given:
            if isinstance(generator, torch.Generator) and generator.device.type != device.type:
                raise RuntimeError(
                    f"Expected a '{device.type}' device type for generator but found "
                    f"'{generator.device.type}'"
                )

    def _is_on_host(self, tensor: Tensor) -> bool:
        # Subclasses that see operations stand for other tensors: fake ones, and placeholders.
        is_plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        return is_plain and not (tensor.is_meta or self._device.has(tensor))

    def _wait_for_read(self, name: str, args: Any) -> None:
        by_mask = name == "aten::index" and any(
            isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        if name in _READS or by_mask:
            self._device.wait_for_value(name)


def _is_among(tensor: Tensor, others: list[Tensor]) -> bool:
    """Whether a tensor has the memory of one of some others."""
    try:
        return storage_key_of(tensor) in {storage_key_of(other) for other in others}
    except NotImplementedError:
        return False


class Functions(TorchFunctionMode):
    """Sees what asks where a tensor is, and what moves one."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        local = self._device.local
        before = getattr(local, "is_followed", False)
        local.is_followed = function not in _CALLS_HOOKS
        try:
            return self._call(function, args, dict(kwargs or {}))
        finally:
            local.is_followed = before

    def _call(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device = self._device
        own: Any = args[0] if args else None
        if function in _QUESTIONS:
            is_there = device.has(own)
            return _QUESTIONS[function](device, own) if is_there else function(*args, **kwargs)
        if function is Tensor.pin_memory:
            if device.has(own):
                kind = f"{device.device.type}.{own.type().removeprefix('torch.')}"
                raise RuntimeError(
                    f"cannot pin 'torch.{kind}' only dense CPU tensors can be pinned"
                )
            with device.placing(MemoryPlace(False, is_pinned=True)):
                return own.clone()
        if function is Tensor.is_pinned:
            return device.is_pinned(own)
        if function in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            # No kernel runs for these.
            if device.has(own) and function is not Tensor.tolist:
                raise TypeError(
                    f"can't convert {device.device} device type tensor to numpy. Use Tensor.cpu() "
                    "to copy the tensor to host memory first."
                )
            device.access(function.__name__, [own], [], device.has(own))
            if device.has(own):
                device.wait_for_value(function.__name__)
        if function is Tensor.cpu:
            return self._moved(own, CPU, waits=True)
        if function in (parse_to, torch.device):
            return function(*args, **kwargs)
        if function is Tensor.to:
            return self._to(*args, **kwargs)
        named = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.device)]
        named += [torch.device(kwargs["device"])] if isinstance(kwargs.get("device"), str) else []
        is_pinned = kwargs.pop("pin_memory", False)
        # This mode may be active twice, in a hook: then the outer one has said where.
        if (not named and not is_pinned) or device.place is not None:
            return function(*args, **kwargs)
        args = [CPU if isinstance(x, torch.device) else x for x in args]
        if kwargs.get("device") is not None:
            kwargs["device"] = CPU if named[0].type != "meta" else named[0]
        place = MemoryPlace(bool(named) and device.is_named(named[0]), is_pinned)
        if is_pinned and place.is_there:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        with device.placing(place):
            result = function(*args, **kwargs)
        if function in (torch.tensor, torch.as_tensor) and place.is_there:
            device.wait_for_value("a tensor of numbers")
            device.take(result)
        return result

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device: torch.device | None = None
        others: list[Any] = []
        for value in args:
            if isinstance(value, str | torch.device):
                device = torch.device(value)
            elif isinstance(value, Tensor):
                device = self._device.device if self._device.has(value) else CPU
                others.append(value.dtype)
            else:
                others.append(value)
        if kwargs.get("device") is not None:
            device = torch.device(kwargs.pop("device"))
        waits = not (kwargs.pop("non_blocking", False) or True in others)
        moved = tensor if device is None else self._moved(tensor, device, waits)
        kwargs.pop("device", None)
        others = [value for value in others if not isinstance(value, bool)]
        to: Any = Tensor.to
        return to(moved, *others, **kwargs) if others or kwargs else moved

    def _moved(self, tensor: Tensor, device: torch.device, waits: bool) -> Tensor:
        if device.type == "meta":
            return Tensor.to(tensor, device)
        goes_there = self._device.is_named(device)
        if tensor.is_meta or self._device.has(tensor) == goes_there:
            return tensor
        with self._device.placing(MemoryPlace(goes_there, waits=waits)):
            return tensor.clone()


_QUESTIONS: dict[Any, Callable[[SimulatedDevice, Tensor], Any]] = {
    Tensor.device.__get__: lambda device, _: device.device,
    Tensor.is_cuda.__get__: lambda device, _: device.device.type == "cuda",  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda *_: False,  # type: ignore[attr-defined]
    Tensor.get_device: lambda device, _: device.device.index,
}
