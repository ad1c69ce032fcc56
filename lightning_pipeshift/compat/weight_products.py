"""Nodes of autograd that multiply by a weight, and the weight's part of their backward by itself.

One node computes the gradients of both factors of a product, and torch has no public way to run it
in two parts: a node that runs twice also calls its hooks twice, and until then all nodes hold what
they have saved. So what computes a weight's gradient is here, for a few nodes, with the operations
that torch's own formulas call (``derivatives.yaml``): the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

Node = Any
"""A node of autograd."""

LEAF: Final = "AccumulateGrad"
"""The class of the nodes that add to the gradient of a leaf, their ``variable``."""

WEIGHTS_AT: Final = {
    "AddmmBackward0": (2,),
    "MmBackward0": (1,),
    "ConvolutionBackward0": (1, 2),
}
"""By the class of a node, which of its inputs are weights if they come from leaves: for a
convolution also the bias, as some kernels compute both gradients in one."""

PASSES_ON: Final = frozenset({"TBackward0", "ToCopyBackward0"})
"""Nodes between a weight and its product: a transposition, and the copy in autocast's type."""


class Weights(NamedTuple):
    """The weights of one product.

    Args:
        node: the product's.
        edges: where their gradients go to.
        leaves: the weights.
        gradients: computes their gradients, given that of the product.
    """

    node: Node
    edges: tuple[torch.autograd.graph.GradientEdge, ...]
    leaves: tuple[Tensor, ...]
    gradients: Callable[[Tensor], Sequence[Tensor]]


def computing(node: Node) -> Callable[[Tensor], Sequence[Tensor]] | None:
    """What computes the gradients of a product's weights, given that of the product; it holds the
    other factor. ``None`` for a product of a kind that is not here.

    Args:
        node: of a class in :data:`WEIGHTS_AT`.
    """
    if type(node).__name__ == "ConvolutionBackward0":
        return _of_convolution(node)
    return _of_matrices(node)


def _of_matrices(node: Node) -> Callable[[Tensor], Sequence[Tensor]] | None:
    is_sum = type(node).__name__ == "AddmmBackward0"
    name = "mat1" if is_sum else "self"
    if _has_hooks(node, name):
        return None
    factor: Tensor = getattr(node, f"_saved_{name}")
    if factor.layout is not torch.strided or factor.is_complex():
        return None
    if is_sum and node._saved_alpha != 1:
        return None
    (rows, _), strides = node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides
    by_columns = strides[0] == 1 and strides[1] == rows

    def gradients(of: Tensor) -> Sequence[Tensor]:
        return (of.t().mm(factor).t() if by_columns else factor.t().mm(of),)

    return gradients


def _of_convolution(node: Node) -> Callable[[Tensor], Sequence[Tensor]] | None:
    if _has_hooks(node, "input") or _has_hooks(node, "weight"):
        return None
    image, weight = node._saved_input, node._saved_weight
    if image.layout is not torch.strided or image.is_complex():
        return None
    bias_sizes = node._saved_bias_sym_sizes_opt
    how = (
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
    )

    def gradients(of: Tensor) -> Sequence[Tensor]:
        wanted = (False, True, bias_sizes is not None)
        found = torch.ops.aten.convolution_backward(of, image, weight, bias_sizes, *how, wanted)
        return [each for each in found[1:] if each is not None]

    return gradients


def _has_hooks(node: Node, name: str) -> bool:
    """Whether something else than autograd keeps a saved tensor; it may give it once only."""
    saved = getattr(node, f"_raw_saved_{name}")
    return getattr(saved, "unpack_hook", _has_hooks) is not None
