from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pipeshift.errors import BatchError
from lightning_pipeshift.model.tensors.microbatch import (
    batch_size_of,
    merge,
    split,
    weighted_mean,
)


@dataclass
class Pair:
    x: Any
    names: Any


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    return a == b


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("num_microbatches", range(1, 6))
def test_every_size_and_count(size, num_microbatches):
    x = torch.arange(3 * size).view(size, 3)
    names = [f"sample {number}" for number in range(size)]
    batch = {"x": x, "y": (x[:, 0],), "names": names, "scale": torch.tensor(2.0), "flag": True}
    slices = split(batch, num_microbatches)

    sizes = [count for _, count in slices]
    assert len(slices) == min(size, num_microbatches)
    assert sum(sizes) == size
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    for part, count in slices:
        assert batch_size_of(part) == count
        assert list(part) == list(batch)
        assert len(part["names"]) == len(part["y"][0]) == count
        assert part["scale"] is batch["scale"]
        assert part["flag"] is True
    assert torch.equal(torch.cat([part["x"] for part, _ in slices]), x)
    assert torch.equal(torch.cat([part["y"][0] for part, _ in slices]), x[:, 0])
    assert [name for part, _ in slices for name in part["names"]] == names
    # The batch itself is as it was.
    assert batch["names"] is names
    assert batch["x"] is x


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(4, 2),
        [torch.ones(4, 2), ["a", "b", "c", "d"]],
        (torch.ones(4, 2), {"y": torch.ones(4)}),
        {"deep": [{"x": torch.ones(4)}]},
        UserDict({"x": torch.ones(4), "names": ["a", "b", "c", "d"]}),
        Pair(torch.ones(4), 7),
    ],
)
def test_the_slices_have_the_structure_of_the_batch(batch):
    slices = split(batch, 2)
    assert [count for _, count in slices] == [2, 2]
    assert all(type(part) is type(batch) for part, _ in slices)
    assert all(batch_size_of(part) == 2 for part, _ in slices)


NAMES = ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("batch", "find"),
    [
        ({"x": torch.ones(5), "names": NAMES}, lambda part: part["names"]),
        ({"x": torch.ones(5), "names": tuple(NAMES)}, lambda part: list(part["names"])),
        ([torch.ones(5), NAMES], lambda part: part[1]),
        (UserDict({"x": torch.ones(5), "names": NAMES}), lambda part: part["names"]),
        # What Lightning's users most often return: a tuple.
        ((torch.ones(5), NAMES), lambda part: part[1]),
        ((torch.ones(5), tuple(NAMES)), lambda part: list(part[1])),
        ({"x": torch.ones(5), "meta": {"names": NAMES}}, lambda part: part["meta"]["names"]),
        (Pair(torch.ones(5), NAMES), lambda part: part.names),
    ],
    ids=[
        "dict",
        "dict of tuple",
        "list",
        "UserDict",
        "tuple",
        "tuple of tuple",
        "nested",
        "dataclass",
    ],
)
def test_lists_of_strings_are_cut_with_the_samples(batch, find):
    assert [find(part) for part, _ in split(batch, 2)] == [["a", "b", "c"], ["d", "e"]]


def test_lists_of_another_length_go_into_every_slice():
    batch = {"x": torch.ones(5), "classes": ["cat", "dog"], "sizes": [1, 2, 3, 4, 5], "empty": []}
    for (part, _), sizes in zip(split(batch, 2), ([1, 2, 3], [4, 5]), strict=True):
        assert part["classes"] == ["cat", "dog"]
        assert part["sizes"] == sizes
        assert part["empty"] == []


def test_one_microbatch_is_the_batch_itself():
    for batch, size in (
        ({"x": torch.ones(5), "y": torch.ones(3)}, 5),
        (["a", "b"], 1),
        ([], 1),
        (None, 1),
        (torch.tensor(1.0), 1),
    ):
        ((part, count),) = split(batch, 1)
        assert part is batch
        assert count == size


def test_slices_share_the_memory_of_the_batch():
    x = torch.zeros(4)
    (first, _), _ = split([x], 2)
    first[0][0] = 1
    assert x[0] == 1


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(5), "y": torch.ones(3, 2)},
        [torch.ones(5), (torch.ones(3, 2),)],
        Pair(torch.ones(5), torch.ones(3, 2)),
    ],
)
def test_mixed_sizes(batch):
    words = r"5 and of 3 samples \(shape \(3, 2\)\).*first dimension.*`microbatches=1`"
    with pytest.raises(BatchError, match=f"(?s){words}"):
        split(batch, 2)


@pytest.mark.parametrize("batch", [["a", "b"], torch.tensor(1.0), {}, None, {"x": 3}])
def test_nothing_to_cut(batch):
    with pytest.raises(BatchError, match=f"type {type(batch).__name__} holds no tensor"):
        split(batch, 2)
    with pytest.raises(BatchError, match="`microbatches=1`"):
        batch_size_of(batch)


def test_a_batch_without_samples():
    ((part, count),) = split({"x": torch.ones(0, 3)}, 4)
    assert part["x"].shape == (0, 3)
    assert count == 0


def test_a_weighted_mean():
    assert weighted_mean([1.0, 4.0], [2, 1]) == pytest.approx(2.0)
    assert torch.allclose(
        weighted_mean([torch.tensor([1.0, 0.0]), torch.tensor([4.0, 3.0])], [2, 1]),
        torch.tensor([2.0, 1.0]),
    )
    # Where nothing counts, the first is shown.
    assert weighted_mean([1.0, 4.0], [0, 0]) == 1.0


def test_a_single_value_keeps_its_bits():
    value = torch.tensor(0.1)
    assert weighted_mean([value], [3]) is value
    result = {"loss": value, "names": ["a"]}
    assert merge([result], [3], [1.0]) is result


def test_results_are_put_together():
    results = [
        {
            "loss": torch.tensor(1.0),
            "logits": torch.zeros(2, 3),
            "count": torch.tensor(2),
            "name": "x",
            "step": 5,
            "text": "first",
            "none": None,
        },
        {
            "loss": torch.tensor(4.0),
            "logits": torch.ones(1, 3),
            "count": torch.tensor(1),
            "name": "x",
            "step": 5,
            "text": "second",
            "none": None,
        },
    ]
    merged = merge(results, [2, 1], [2.0, 1.0])
    assert torch.allclose(merged.pop("loss"), torch.tensor(2.0))
    assert torch.equal(merged.pop("logits"), torch.tensor([[0.0] * 3, [0.0] * 3, [1.0] * 3]))
    assert [int(count) for count in merged.pop("count")] == [2, 1]
    assert merged == {"name": "x", "step": 5, "text": ["first", "second"], "none": None}


def test_results_of_different_structure_stay_apart():
    results = [{"loss": torch.tensor(1.0)}, None]
    assert merge(results, [2, 1], [2.0, 0.0]) == results
    longer = [[torch.ones(2)], [torch.ones(2), torch.ones(2)]]
    assert equal(merge(longer, [2, 2], [1.0, 1.0]), longer)


def test_entries_of_dicts_are_those_of_the_microbatches_that_have_them():
    results = [
        {"loss": torch.tensor(1.0), "hard": ["a", "b"], "seen": ["x"], "logits": torch.ones(2, 1)},
        {"loss": torch.tensor(3.0), "hard": ["c"], "seen": ["y", "z"], "only": torch.tensor(5.0)},
        {"loss": torch.tensor(5.0), "hard": ["d"], "seen": [], "logits": torch.zeros(1, 1)},
    ]
    merged = merge(results, [2, 1, 1], [1.0, 1.0, 1.0])
    assert torch.allclose(merged.pop("loss"), torch.tensor(3.0))
    assert torch.equal(merged.pop("logits"), torch.tensor([[1.0], [1.0], [0.0]]))
    assert merged.pop("only") == 5.0
    # One name for each sample, or not.
    assert merged == {"hard": ["a", "b", "c", "d"], "seen": [["x"], ["y", "z"], []]}


def test_joined_results_have_their_class_and_other_shapes_stay_apart():
    words = [("a", "b"), ("c",)]
    assert merge(words, [2, 1], [2.0, 1.0]) == ("a", "b", "c")
    # It is the size of an image, whatever the number of samples.
    for sizes in ([2, 2], [3, 3], [1, 2]):
        assert merge([(224, 224), (224, 224)], sizes, [1.0, 1.0]) == (224, 224)
    arrays = [np.ones((2, 3)), np.ones((2, 4))]
    assert [each.shape for each in merge(arrays, [2, 2], [1.0, 1.0])] == [(2, 3), (2, 4)]
    tensors = [torch.ones(2, 3), torch.ones(2, 4)]
    assert [each.shape for each in merge(tensors, [2, 2], [1.0, 1.0])] == [(2, 3), (2, 4)]


class WithAttributes(dict):
    """A dict whose items are its attributes, too."""

    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


class CopiesItems(dict):
    """A dict that has its items as attributes."""

    def __init__(self, **items):
        super().__init__(**items)
        for name, value in items.items():
            setattr(self, name, value)


@pytest.mark.parametrize("kind", [WithAttributes, CopiesItems])
def test_attributes_of_a_dict_are_cut_with_its_items(kind):
    (first, _), _ = split(kind(x=torch.arange(4.0)), 2)
    assert type(first) is kind
    assert first.x.tolist() == first["x"].tolist() == [0.0, 1.0]


class Words(dict):
    """A dict of a class of its own."""


@pytest.mark.parametrize(
    "column",
    [
        ["a", None, "b", "c"],
        [[1, 2], [3], [], [4]],
        [{"id": 1}, {"id": 2}, {"id": 3}, {"id": 4}],
        [{1}, {2, 3}, set(), {4}],
        [np.int64(1), np.int64(2), np.int64(3), np.int64(4)],
        (("a", 1), ("b", 2), ("c", 3), ("d", 4)),
        np.arange(8).reshape(4, 2),
        np.eye(4),
    ],
)
def test_what_has_an_entry_for_each_sample_is_cut(column):
    batch = Words(x=torch.arange(4.0), column=column)
    parts = split(batch, 2)
    assert [type(part) for part, _ in parts] == [Words, Words]
    assert [size for _, size in parts] == [2, 2]
    for number, (part, _) in enumerate(parts):
        assert torch.equal(part["x"], torch.arange(4.0)[2 * number : 2 * number + 2])
        expected = column[2 * number : 2 * number + 2]
        assert type(part["column"]) is type(column)
        if isinstance(column, np.ndarray):
            assert np.array_equal(part["column"], expected)
        else:
            assert part["column"] == expected
    merged = merge([part["column"] for part, _ in parts], [2, 2], [1.0, 1.0])
    assert np.array_equal(merged, column) if isinstance(column, np.ndarray) else merged == column


def test_a_sparse_tensor_is_an_error():
    with pytest.raises(BatchError, match=r"layout `torch\.sparse_coo`"):
        split((torch.zeros(2, 2), torch.eye(2).to_sparse()), 2)


def test_a_list_whose_samples_may_be_its_entries_or_in_them_is_an_error():
    with pytest.raises(BatchError, match="not clear which of them are one sample's"):
        split((torch.zeros(2), [["a", "b"], ["c", "d"]]), 2)
    # A list of columns is none of samples.
    parts = split((torch.zeros(2), [["a", "b"], ["c", "d"], ["e", "f"]]), 2)
    assert [part[1] for part, _ in parts] == [[["a"], ["c"], ["e"]], [["b"], ["d"], ["f"]]]


def test_losses_alone():
    losses = [torch.tensor(1.0), torch.tensor(3.0)]
    assert merge(losses, [1, 1], [1.0, 1.0]) == torch.tensor(2.0)
    assert merge([None, None], [1, 1], [0.0, 0.0]) is None


def test_tensors_without_samples_are_listed():
    matrices = [torch.ones(3, 3), torch.zeros(3, 3)]
    assert equal(merge(matrices, [2, 2], [1.0, 1.0]), matrices)


@pytest.mark.parametrize("size", range(1, 7))
@pytest.mark.parametrize("num_microbatches", range(1, 5))
def test_what_is_cut_comes_together_again(size, num_microbatches):
    batch = {"x": torch.rand(size, 2), "deep": [torch.rand(size)]}
    slices = split(batch, num_microbatches)
    sizes = [count for _, count in slices]
    merged = merge([part for part, _ in slices], sizes, [float(count) for count in sizes])
    assert equal(merged, batch)
