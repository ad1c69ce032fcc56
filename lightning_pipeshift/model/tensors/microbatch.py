"""Splits a batch into microbatches, and merges their results into those of the whole batch."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipeshift.errors import BatchError
from lightning_pipeshift.model.tensors.trees import flatten, leaves_of, structure_of


def batch_size_of(batch: Any) -> int:
    """The number of samples: the length of the first tensor in the batch.

    Raises:
        BatchError: the batch holds no tensor with a dimension.
    """
    for leaf in flatten(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.size(0)
    raise BatchError(
        f"A batch of type {type(batch).__name__} holds no tensor with a batch dimension, so it "
        "cannot be cut into microbatches. Return tensors whose first dimension counts the "
        "samples from the DataLoader, or set `microbatches=1`."
    )


def size_or_one(batch: Any) -> int:
    """The number of samples; 1 if the batch holds no tensor with a dimension."""
    try:
        return batch_size_of(batch)
    except BatchError:
        return 1


def split(batch: Any, num_microbatches: int) -> list[tuple[Any, int]]:
    """Splits a batch along its first dimension into at most ``num_microbatches`` slices of nearly
    equal size.

    Tensors are cut; NumPy arrays of the same length, and lists and tuples of it without tensors,
    too: they have an entry for each sample. Other values go into every slice. If the size is not
    divisible, the first slices are one sample larger; no slice is empty.

    Args:
        batch: a nested structure of tensors.
        num_microbatches: the most slices; a batch of fewer samples gives as many slices as it has
            samples.

    Returns:
        The slices, and how many samples each holds.

    Raises:
        BatchError: tensors of the batch differ in their first dimension, or a list may have its
            samples in two ways.
    """
    if num_microbatches == 1:
        return [(batch, size_or_one(batch))]
    size = batch_size_of(batch)
    leaves, rebuild = flatten(batch, is_leaf=lambda node: _is_column(node, size))
    for leaf in leaves:
        is_list = size > 1 and isinstance(leaf, list | tuple) and _is_column(leaf, size)
        if is_list and all(_is_column(entry, size) for entry in leaf):
            raise BatchError(
                f"The batch holds a {type(leaf).__name__} of {size} entries that have {size}"
                f" entries each, and {size} samples: it is not clear which of them are one"
                " sample's. Return it as a tensor whose first dimension counts the samples, or set"
                " `microbatches=1`, or `drop_last=True` if only the last batch is so small."
            )
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.layout is not torch.strided:
            raise BatchError(
                f"The batch holds a tensor with the layout `{leaf.layout}`, which is not cut into"
                " microbatches. Return a dense tensor from the DataLoader, or"
                " set `microbatches=1`."
            )
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.size(0) != size:
            raise BatchError(
                f"The batch holds tensors of {size} and of {leaf.size(0)} samples (shape "
                f"{tuple(leaf.shape)}), so it is not clear how to cut it into microbatches. The "
                "first dimension of every tensor in a batch has to count the samples: move "
                "values that are common to all samples out of the batch (for example, to a "
                "buffer of the LightningModule), or set `microbatches=1`."
            )
    count = max(1, min(num_microbatches, size))
    sizes = [len(part) for part in torch.tensor_split(torch.empty(size, 0), count)]
    pieces = [_pieces(leaf, sizes) for leaf in leaves]
    return [
        (rebuild([piece[number] for piece in pieces]), sizes[number]) for number in range(count)
    ]


def _is_column(node: Any, size: int) -> bool:
    """Whether a list or an array holds one entry, of any kind but a tensor, for each sample."""
    if isinstance(node, np.ndarray):
        return node.ndim > 0 and len(node) == size
    is_list = isinstance(node, list | tuple) and not hasattr(node, "_fields")
    return (
        is_list
        and len(node) == size
        and not any(isinstance(leaf, Tensor) for leaf in leaves_of(node))
    )


def _pieces(leaf: Any, sizes: Sequence[int]) -> Sequence[Any]:
    ends = list(accumulate(sizes))
    if isinstance(leaf, Tensor) and leaf.dim():
        # Each slice has its own version counter: a step that writes to its batch in place must not
        # disturb the backward of another microbatch.
        return [
            (leaf if leaf.requires_grad else leaf.data).narrow(0, end - size, size)
            for size, end in zip(sizes, ends, strict=True)
        ]
    if _is_column(leaf, sum(sizes)):
        return [leaf[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return [leaf] * len(sizes)


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The weighted mean of scalars or equal-shaped tensors.

    A single value is returned unchanged, with the same bits.
    """
    if len(values) == 1 or not sum(weights):
        return values[0]
    # A value with weight 0 may be arbitrary, even NaN.
    counted = [(v, w) for v, w in zip(values, weights, strict=True) if w]
    values, weights = [v for v, _ in counted], [w for _, w in counted]
    total = sum(weights)
    mean = values[0] * (weights[0] / total)
    for value, weight in zip(values[1:], weights[1:], strict=True):
        mean = mean + value * (weight / total)
    return mean


def merge(results: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    """Merges the results of a batch's microbatches.

    Tensors with the samples in their first dimension are joined, and lists with one name or number
    for each sample; scalars are averaged with the microbatches' weights; anything else becomes a
    list with one entry for each microbatch. An entry of a dict is that of the microbatches that
    have it.
    """
    if len(results) == 1:
        return results[0]
    if all(type(result) in (dict, OrderedDict, defaultdict) for result in results):
        merged_dict = {}
        for key in dict.fromkeys(key for result in results for key in result):
            every = zip(results, sizes, weights, strict=True)
            have = [(result[key], *counts) for result, *counts in every if key in result]
            merged_dict[key] = merge(*zip(*have, strict=True))
        return merged_dict
    kind = type(results[0])
    if all(
        type(each) is kind and _is_column(each, n) for each, n in zip(results, sizes, strict=True)
    ):
        if kind is np.ndarray:
            is_alike = len({each.shape[1:] for each in results}) == 1
            return np.concatenate(results) if is_alike else list(results)
        # Numbers in a tuple are the size of an image, say.
        if kind is list or not all(isinstance(x, int | float) for each in results for x in each):
            return kind(entry for result in results for entry in result)
    flat = [flatten(result) for result in results]
    if len({structure_of(result) for result in results}) != 1:
        return list(results)
    merged = [
        _merge_leaf(list(column), sizes, weights)
        for column in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return flat[0][1](merged)


def _merge_leaf(leaves: list[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        if all(
            leaf.dim() and leaf.size(0) == size and leaf.shape[1:] == leaves[0].shape[1:]
            for leaf, size in zip(leaves, sizes, strict=True)
        ):
            return torch.cat(leaves)
        if all(leaf.dim() == 0 and leaf.is_floating_point() for leaf in leaves):
            return weighted_mean(leaves, weights)
    if all(
        leaf is leaves[0] or (not isinstance(leaf, Tensor) and leaf == leaves[0]) for leaf in leaves
    ):
        return leaves[0]
    return leaves
