"""Which functions of torch ask about a tensor, and which read it into Python."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def _methods(names: str) -> Iterable[Any]:
    return (getattr(Tensor, name) for name in names.split() if hasattr(Tensor, name))


def _getters(names: str) -> Iterable[Any]:
    return (attribute.__get__ for attribute in _methods(names))


def _overloads(names: str) -> Iterable[Any]:
    packets = (getattr(torch.ops.aten, name) for name in names.split())
    return (getattr(packet, overload) for packet in packets for overload in packet.overloads())


QUESTIONS: frozenset[Any] = frozenset(
    {
        *_getters(
            "shape dtype device ndim requires_grad is_leaf layout is_cuda is_xpu is_mps is_cpu"
            " is_sparse is_quantized is_meta is_nested grad_fn itemsize nbytes names"
        ),
        *_methods(
            "size dim stride numel nelement is_floating_point is_complex is_contiguous element_size"
            " __len__ __hash__ ndimension is_signed get_device is_inference"
        ),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
"""Functions whose results do not depend on values: a placeholder answers them by itself."""

OF_PARAMETERS: frozenset[Any] = frozenset(
    {
        Tensor.register_hook,
        Tensor.register_post_accumulate_grad_hook,
        *_methods("data_ptr untyped_storage storage_offset"),
    }
)
"""Functions of a parameter that concern the stage that holds it, and no step."""

READS: frozenset[Any] = frozenset(
    {
        *_methods(
            "item tolist __bool__ __float__ __int__ __index__ __complex__ __contains__ __repr__"
            " __format__ __array__ numpy is_nonzero equal allclose"
        ),
        torch.equal,
        torch.allclose,
        torch.is_nonzero,
    }
)
"""Functions that read values into Python."""

NUMBERS: frozenset[Any] = frozenset(
    {
        *_methods("item tolist __bool__ __float__ __int__ __index__ __complex__ is_nonzero"),
        torch.is_nonzero,
    }
)
"""Those of :data:`READS` that give the same, whatever device their argument is on."""

OF_SHAPE: frozenset[Any] = frozenset(
    _overloads(
        "zeros_like ones_like empty_like full_like rand_like randn_like randint_like"
        " new_zeros new_ones new_empty new_full new_empty_strided"
    )
)
"""Operations that use only the shape and the type of their argument."""

DRAW_BY_VALUES: frozenset[str] = frozenset(
    {"poisson", "binomial", "_standard_gamma", "_sample_dirichlet"}
)
"""The names of functions that draw more random numbers for some values than for others."""
