"""Properties of an accelerator: its name, its memory, its random generator."""

from __future__ import annotations

from typing import Any, Final

import psutil  # type: ignore[import-untyped]
import torch

TRAINABLE: Final = frozenset({"cpu", "cuda"})
"""The types of devices on which PipeShift has been tested."""


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def device_name(device: torch.device) -> str:
    """An accelerator's name, as its vendor gives it."""
    name: str = _module(device).get_device_name(device)
    return name


def unique_id(device: torch.device) -> str:
    """Identifies an accelerator among those of its host: its UUID, where torch knows it."""
    return str(getattr(_module(device).get_device_properties(device), "uuid", device))


def memory_of(device: torch.device) -> tuple[int, int]:
    """The size of an accelerator's memory, and its free part, in bytes."""
    free, total = _module(device).mem_get_info(device)
    return total, free


def total_memory(device: torch.device) -> int:
    """The size of an accelerator's memory, in bytes, as torch's own messages give it."""
    return int(_module(device).get_device_properties(device).total_memory)


def used_bytes(device: torch.device) -> int:
    """The bytes of tensors on an accelerator; on a CPU, of everything that this process has in the
    host's memory. Does not wait for the device.
    """
    if device.type == "cpu":
        return int(psutil.Process().memory_info().rss)
    return int(_module(device).memory_allocated(device))


def empty_cache(device: torch.device) -> None:
    """Frees the memory that torch keeps for later tensors on an accelerator."""
    if device.type != "cpu":
        _module(device).empty_cache()


def generators_of(device: torch.device) -> list[torch.Generator]:
    """The global random generators that code on a device draws from: the CPU's, and its own."""
    generators = [torch.default_generator]
    if device.type != "cpu":
        module = _module(device)
        module.init()
        generators.append(module.default_generators[device.index or 0])
    return generators
