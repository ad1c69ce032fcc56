"""One weight's memory on the device and on the host, of which it uses one at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import num_other_uses, version_of
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.runtime.offload.host_copies import is_dense

SAMPLED: Final = 32
"""Into how many parts a weight is divided for comparisons that take next to no time."""

_LINE_BYTES: Final = 64
"""Of a line of a processor's cache: less is not read any faster."""


def may_wait(parameter: Tensor) -> bool:
    """Whether a parameter's memory can be freed and come back: it is a dense tensor with memory of
    its own, whose size nothing else has fixed (NumPy arrays and other processes do).
    """
    if type(parameter) is not nn.Parameter or not parameter.numel() or not is_dense(parameter):
        return False
    storage = parameter.untyped_storage()
    return storage.nbytes() == parameter.nbytes and storage.resizable()


@dataclass(eq=False)
class Weight:
    """A parameter that comes and goes.

    Args:
        parameter: the parameter.
        device: an alias of its memory on the device, whose storage is empty while it waits.
        host: its memory on the host.
        version: the parameter's count of writes when it was last equal to the host's values.
        is_of_step: whether it came to the device within a step.
        is_shared: whether its memory on the device has its values while it waits, as something else
            refers to it.
    """

    parameter: nn.Parameter
    device: Tensor
    host: Tensor
    version: int = -1
    is_of_step: bool = False
    is_shared: bool = False

    def begin_to_come(self, is_in_step: bool) -> None:
        """Allocates its memory on the device."""
        if self.parameter.data_ptr() != self.host.data_ptr():
            # User code has given it other memory.
            self.copy_to_host()
            self.parameter.data = self.host
        self._require_equal_aliases()
        self.is_shared = False
        self.version, self.is_of_step = version_of(self.parameter), is_in_step
        self.device.untyped_storage().resize_(self.host.nbytes)

    def copy_to_device(self) -> None:
        """Copies the values, on whatever stream is current."""
        self.device.copy_(self.host, non_blocking=True)

    def come(self) -> None:
        """Makes the device's memory the parameter's own."""
        if version_of(self.parameter) != self.version:
            # Written to while it was copied.
            self.version = version_of(self.parameter)
            self.device.copy_(self.host)
        self.parameter.data = self.device

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing is known to have written to it since it came."""
        return (
            self.is_of_step
            and version_of(self.parameter) == self.version
            and self.parameter.data_ptr() == self.device.data_ptr()
        )

    def is_equal(self, number: int | None = None) -> bool:
        """Whether the host has the same bits.

        Args:
            number: of one of ``SAMPLED`` parts of the memory, which is spread evenly, and the only
                one to be compared; those beyond begin again. ``None`` for all of them.
        """
        pairs = zip(_sampled(self.device, number), _sampled(self.host, number), strict=True)
        return all(torch.equal(one.cpu(), other) for one, other in pairs)

    def copy_to_host(self) -> None:
        """Copies the values, on whatever stream is current."""
        values = self.parameter.data
        if (values.shape, values.dtype) != (self.host.shape, self.host.dtype):
            raise LayerError(
                f"A weight of shape {tuple(self.host.shape)} and type {self.host.dtype} was given"
                f" `data` of shape {tuple(values.shape)} and type {values.dtype}, while this plan"
                " of `MemoryCompression` has it in host memory between two uses. Change weights'"
                " shapes before `fit`, or use a budget with which weights stay on the device."
            )
        self.host.copy_(values, non_blocking=values.device != self.host.device)

    def leave(self) -> None:
        """Makes the host's memory the parameter's own, and frees the device's."""
        self.parameter.data = self.host
        self.device.untyped_storage().resize_(0)

    def keep_for_aliases(self) -> None:
        """Gives the device's memory its values again, if something else refers to it: reading
        memory that was freed would end the process. Called when no backward is to come, whose saved
        tensors may be views of the weight.
        """
        self._require_equal_aliases()
        has_values, self.is_shared = self.is_shared, num_other_uses(self.device) > 0
        if self.is_shared and not has_values:
            self.device.untyped_storage().resize_(self.host.nbytes)
            self.device.copy_(self.host)
        elif has_values and not self.is_shared:
            self.device.untyped_storage().resize_(0)

    def _require_equal_aliases(self) -> None:
        if self.is_shared and not self.is_equal():
            raise LayerError(
                f"A weight of shape {tuple(self.host.shape)} and an alias of it"
                " (`weight.detach()`, `weight.data`) have different values: one of them was written"
                " to between two steps, while this plan of `MemoryCompression` has the weight in"
                " host memory. Keep a copy (`.clone()`) instead of an alias, or use a budget with"
                " which weights stay on the device."
            )


def _sampled(tensor: Tensor, number: int | None) -> list[Tensor]:
    """The bytes of one line of each row of memory, and those behind the last whole row; without a
    number, all bytes.
    """
    vector = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    everything = vector.set_(tensor.untyped_storage(), 0, (tensor.nbytes,), (1,))
    if number is None:
        return [everything]
    begin, length = _LINE_BYTES * (number % SAMPLED), SAMPLED * _LINE_BYTES
    num_rows = everything.numel() // length
    rows = everything[: num_rows * length].view(num_rows, length)
    return [rows[:, begin : begin + _LINE_BYTES], everything[num_rows * length :]]
