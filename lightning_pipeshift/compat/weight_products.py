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

RUNS_AGAIN: Final = "CheckpointFunctionBackward"
"""The class of the nodes of ``torch.utils.checkpoint`` with ``use_reentrant=True``."""

PASSES_ON: Final = frozenset({"TBackward0", "ToCopyBackward0"})
"""Nodes between a weight and its product: a transposition, and the copy in autocast's type."""


class Computing(NamedTuple):
    """A function that computes the gradients of a product's weights, and the tensors that it needs.

    Args:
        gradients: given the gradient of the product.
        uses: the tensors.
    """

    gradients: Callable[[Tensor], Sequence[Tensor]]
    uses: tuple[Tensor, ...]


class Weights(NamedTuple):
    """The weights of one product.

    Args:
        node: the product's.
        edges: where their gradients go to.
        leaves: the weights.
        computing: computes their gradients.
        versions: of the tensors that it uses: how often they had been written to.
    """

    node: Node
    edges: tuple[torch.autograd.graph.GradientEdge, ...]
    leaves: tuple[Tensor, ...]
    computing: Computing
    versions: tuple[int, ...]


def computing(node: Node) -> Computing | None:
    """Returns how to compute the gradients of a product's weights; ``None`` if this module does not
    know how.

    Args:
        node: of a class in :data:`WEIGHTS_AT`.
    """
    if type(node).__name__ == "ConvolutionBackward0":
        return _of_convolution(node)
    return _of_matrices(node)


def _of_matrices(node: Node) -> Computing | None:
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

    return Computing(gradients, (factor,))


def _of_convolution(node: Node) -> Computing | None:
    if _has_hooks(node, "input") or _has_hooks(node, "weight"):
        return None
    image, weight = node._saved_input, node._saved_weight
    if image.layout is not torch.strided or image.is_complex():
        return None
    bias_sizes = node._saved_bias_sym_sizes_opt
    wanted = (False, *(place is not None for place, _ in node.next_functions[1:]))
    how = (
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
    )

    def gradients(of: Tensor) -> Sequence[Tensor]:
        found = torch.ops.aten.convolution_backward(of, image, weight, bias_sizes, *how, wanted)
        # Some kernels compute more than what is wanted.
        return [each for each, is_wanted in zip(found, wanted, strict=True) if is_wanted]

    return Computing(gradients, (image, weight))


def _has_hooks(node: Node, name: str) -> bool:
    """Whether something else than autograd keeps a saved tensor; it may give it once only."""
    saved = getattr(node, f"_raw_saved_{name}")
    return getattr(saved, "unpack_hook", _has_hooks) is not None
