"""Records which tensors layers, and the code around them, save for their backward: what each takes,
and what computed it. The planner decides on it what to keep, to move and to compute again.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import OperationMode
from lightning_pipeshift.devices.streams import synchronize
from lightning_pipeshift.model.saved.held_results import is_skippable, seconds_seen
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.model.saved.saved_tensors import SavedTable, bytes_of
from lightning_pipeshift.model.tensors.trees import address_of, leaves_of, tensors_here
from lightning_pipeshift.plan.inputs.saved_tensors import SavedTensor


class Observer:
    """Records the tensors that the layers of one microbatch, and the code around them, save; each
    tensor's memory once.

    Parameters, buffers and the batch are in use anyway and are omitted, and so are a layer's inputs
    that the layer before it saved: they are counted there.

    Args:
        timed: the device, to time the operation that computes each of a layer's tensors, which
            waits for the device; ``None``: not.
    """

    def __init__(self, timed: torch.device | None = None) -> None:
        self._timed = timed
        self.of_layers: dict[int, list[SavedTensor]] = {}
        self.of_inputs: dict[int, int] = {}
        self.of_code: dict[int, int] = {}
        """The most bytes that the code around each layer takes for a moment, beyond what it saves:
        in all microbatches."""
        self.known: dict[int, Any] = {}
        """A weak reference to each tensor's memory by its address, until it is freed (the tensor
        was swapped): then others may get the address."""
        self.num_bytes = 0
        """Of all tensors that have been recorded."""

    @contextmanager
    def around(
        self, gate: NamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any], table: SavedTable
    ) -> Iterator[Origins]:
        """Context of a layer's call, in which the maker of each tensor is recorded."""
        given = tensors_here((args, kwargs))
        self.of_inputs[gate.index] = bytes_of(x for x in given if not table.is_there_anyway(x))
        self.of_layers[gate.index] = [
            tensor for tensor in self.of_layers.get(gate.index, ()) if tensor.is_outside
        ]
        with Origins(gate.layer, self._timed) as origins:
            for tensor in given:
                origins.note(tensor, "input")
            # Here none of them is kept.
            del given
            yield origins
        self.of_layers[gate.index] = origins.with_parts(self.of_layers[gate.index])

    def note(
        self,
        tensor: Tensor,
        layer: int,
        number: int,
        origin: str,
        is_resident: bool,
        seconds: float = 0.0,
    ) -> None:
        """Records a tensor saved by a layer, or by the code around it; ``seconds`` of computing it,
        if they are known.
        """
        address = address_of(tensor)
        num_bytes = 0
        if not is_resident and address not in self.known:
            memory: Any = tensor
            num_bytes = tensor.numel() * tensor.element_size()
            if tensor.layout is torch.strided:
                memory = tensor.untyped_storage()
                num_bytes = memory.nbytes()
            self.num_bytes += num_bytes
            forget = partial(self.known.pop, address)
            self.known[address] = weakref.ref(memory, lambda _: forget(None))
        self.of_layers.setdefault(layer, []).append(
            SavedTensor(
                number=number,
                num_bytes=num_bytes,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                maker="parameter" if is_resident else origin,
                spares=min(1.0, seconds) if num_bytes else 0.0,
            )
        )

    def note_code(self, layer: int, num_bytes: int) -> None:
        """Records what the code around a layer takes for a moment."""
        self.of_code[layer] = max(num_bytes, self.of_code.get(layer, 0))

    def begin(self) -> None:
        """Called when a microbatch begins: discards the records of an earlier one."""
        self.of_layers.clear()

    def end(self) -> None:
        """Called when the microbatch has ended."""
        self.known.clear()


class Origins(OperationMode):
    """Records the operation, and its module, that computed each tensor.

    Args:
        layer: has the modules.
        timed: see :class:`Observer`.
    """

    def __init__(self, layer: nn.Module, timed: torch.device | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._timed = timed
        self._seconds: dict[int, float] = {}
        self.seconds = 0.0
        """Those of all operations."""
        self._num_operations = 0
        self._names = {id(module): name for name, module in layer.named_modules()}
        self._inside: list[str] = []
        self._hooks: list[Any] = []
        self._made: dict[int, str] = {}

    def __enter__(self) -> Origins:
        register = torch.nn.modules.module
        self._hooks = [
            register.register_module_forward_pre_hook(self._enter_module),
            register.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def operation(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        results = self._run(func, args, kwargs)
        given = {address_of(x) for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)}
        name = func.overloadpacket.__name__
        maker = f"{self._inside[-1]}: {name}" if self._inside and self._inside[-1] else name
        for result in leaves_of(results):
            # A view of an argument, and an argument written to, were computed by another operation.
            if isinstance(result, Tensor) and address_of(result) not in given:
                self.note(result, maker)
        return results

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._timed is None:
            return func(*args, **kwargs)
        synchronize(self._timed)
        begun = time.perf_counter()
        results = func(*args, **kwargs)
        synchronize(self._timed)
        taken = time.perf_counter() - begun
        self.seconds += taken
        self._num_operations += 1
        if is_skippable(func, args, kwargs, results):
            # Only with all of its results the operation is spared.
            found = [leaf for leaf in leaves_of(results) if isinstance(leaf, Tensor)]
            total = sum(leaf.nbytes for leaf in found)
            for leaf in found:
                self._seconds[address_of(leaf)] = taken * leaf.nbytes / total if total else 0.0
        return results

    def with_parts(self, tensors: Sequence[SavedTensor]) -> list[SavedTensor]:
        """The layer's tensors, whose seconds become parts of the layer: less what it takes to leave
        operations out, as if all of them were left out. Both runs look at every operation then.
        """
        lost = 2 * self._num_operations * seconds_seen() if self.seconds else 0.0
        gained = math.fsum(tensor.spares for tensor in tensors)
        part = max(0.0, 1 - lost / gained) / self.seconds if gained else 0.0
        return [replace(each, spares=min(1.0, part * each.spares)) for each in tensors]

    def seconds_of(self, tensor: Tensor) -> float:
        """The seconds that a recomputation spares if it has this tensor."""
        return self._seconds.get(address_of(tensor), 0.0)

    def note(self, tensor: Tensor, maker: str) -> None:
        """Records the maker of a tensor."""
        self._made[address_of(tensor)] = maker

    def maker_of(self, tensor: Tensor) -> str:
        """The maker of a tensor's memory, in words."""
        return self._made.get(address_of(tensor), "unknown")

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        # A compiler that traces the module cannot trace this; compiled operations are not seen.
        if torch.compiler.is_compiling():
            return
        self._inside.append(self._names.get(id(module), type(module).__name__))

    def _leave_module(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._inside.pop()
