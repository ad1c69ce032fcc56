"""Compares tensors bitwise: ``0.0`` differs from ``-0.0``, and NaN equals itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

Name = TypeVar("Name", str, tuple[str, str])


def differences(state: Mapping[Name, Tensor], others: Mapping[Name, Tensor]) -> dict[Name, float]:
    """The differences between tensors and others of the same names, for those that are not bitwise
    equal.

    Returns:
        By name, the largest difference, as a fraction of the largest value; infinite if the two
        cannot be compared: one is missing, has another shape, or contains NaN.
    """
    found: dict[Name, float] = {}
    for name in sorted(state.keys() | others.keys()):
        if name not in state or name not in others or state[name].shape != others[name].shape:
            found[name] = math.inf
            continue
        one, other = state[name], others[name]
        if torch.equal(_bits(one), _bits(other)):
            continue
        scale = max(float(other.double().abs().max()), 1e-3)
        distance = float((one.double() - other.double()).abs().max()) / scale
        found[name] = distance if distance == distance else math.inf
    return found


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
