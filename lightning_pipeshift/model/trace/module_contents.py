"""The tensors that modules have, and what user code leaves on them during a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import (
    MODULE_TABLES,
    buffers_of,
    parameters_of,
    storage_key_of,
)
from lightning_pipeshift.model.gates.gate import Gate
from lightning_pipeshift.model.trace.placeholder import Placeholder
from lightning_pipeshift.model.trace.trace import Place


def left_behind(root: nn.Module, gates: Sequence[Gate]) -> list[Any]:
    """The values of the step that user code keeps on its modules."""
    inside = {id(part) for gate in gates for part in gate.layer.modules()}
    found: list[Any] = []
    for module in root.modules():
        if id(module) not in inside:
            for name, value in module.__dict__.items():
                if name not in MODULE_TABLES:
                    found.extend(_placeholders_in(value, 3))
            found.extend(_placeholders_in(buffers_of(module), 1))
    return found


def _placeholders_in(value: Any, depth: int) -> list[Placeholder]:
    if isinstance(value, Placeholder):
        return [value]
    if depth and isinstance(value, list | tuple | deque | set):
        return [found for entry in value for found in _placeholders_in(entry, depth - 1)]
    if depth and isinstance(value, dict):
        return [found for entry in value.values() for found in _placeholders_in(entry, depth - 1)]
    return []


def parameters_by_storage(root: nn.Module) -> dict[int, Place]:
    """By identity of a storage, the parameter that uses it."""
    return {
        storage_key_of(parameter): (module_name, name)
        for module_name, module in root.named_modules()
        for name, parameter in parameters_of(module).items()
        if parameter is not None and not parameter.is_meta
    }


def state_by_storage(root: nn.Module, gates: Sequence[Gate]) -> dict[int, Place]:
    """By identity of a storage, the buffer or attribute outside of layers that uses it."""
    inside = {id(part) for gate in gates for part in gate.layer.modules()}
    found: dict[int, Place] = {}
    for module_name, module in root.named_modules():
        if id(module) not in inside:
            for table in (module.__dict__, buffers_of(module)):
                for name, value in table.items():
                    if isinstance(value, Tensor) and value.layout == torch.strided:
                        found[storage_key_of(value)] = (module_name, name)
    return found
