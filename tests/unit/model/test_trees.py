import gc
import weakref
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from lightning_pipeshift.model.tensors.trees import flatten, leaves_of, map_leaves


@dataclass
class Plain:
    first: Any
    second: Any = None


@dataclass(frozen=True)
class Frozen:
    first: Any
    second: Any = 2


@dataclass(slots=True)
class Slotted:
    first: Any


@dataclass
class OwnInit:
    first: Any = field(init=False)

    def __init__(self, first: Any, doubled: bool) -> None:
        self.first = (first, doubled)


@dataclass
class WithoutFields:
    pass


class Named(NamedTuple):
    first: Any
    second: Any


Old = namedtuple("Old", "first second")


class Encoding(UserDict):
    def __init__(self, data: Any, language: str) -> None:
        super().__init__(data)
        self.language = language


TREES: list[tuple[Any, list[Any]]] = [
    (1, [1]),
    (None, [None]),
    ([], []),
    ([1, [2, (3,)], {"x": 4}], [1, 2, 3, 4]),
    ((1, 2), [1, 2]),
    ({"b": 1, "a": 2}, [1, 2]),
    (OrderedDict(b=1, a=2), [1, 2]),
    (Named(1, [2, 3]), [1, 2, 3]),
    (Old(1, 2), [1, 2]),
    (Plain(1, {"x": Plain(2, 3)}), [1, 2, 3]),
    (Frozen(1, (2, Frozen(3, 4))), [1, 2, 3, 4]),
    (Slotted([1, 2]), [1, 2]),
    (OwnInit(1, True), [1, True]),
    (UserDict({"x": 1, "y": [2]}), [1, 2]),
    ([Plain(1, 2), 3, UserDict({"x": Frozen(4, 5)})], [1, 2, 3, 4, 5]),
    ("text", ["text"]),
    ({1, 2}, [{1, 2}]),
]


@pytest.mark.parametrize(("tree", "leaves"), TREES)
def test_leaves_and_back(tree, leaves):
    found, rebuild = flatten(tree)
    assert found == leaves == leaves_of(tree)
    assert rebuild(found) == tree
    assert type(rebuild(found)) is type(tree)
    assert map_leaves(lambda leaf: leaf, tree) == tree


@pytest.mark.parametrize(("tree", "leaves"), TREES)
def test_other_leaves_in_an_equal_structure(tree, leaves):
    fresh, _ = flatten(map_leaves(lambda leaf: ("new", [leaf]), tree))
    assert fresh == [part for leaf in leaves for part in ("new", leaf)]
    # What was taken apart is as it was.
    assert leaves_of(tree) == leaves


def test_what_is_no_field_is_kept():
    encoding = map_leaves(lambda leaf: leaf + 1, Encoding({"x": 1}, "de"))
    assert (encoding.data, encoding.language) == ({"x": 2}, "de")
    plain = Plain(1)
    plain.extra = "kept"  # type: ignore[attr-defined]
    assert map_leaves(lambda leaf: 0, plain).extra == "kept"
    assert plain.first == 1


def test_an_empty_dataclass_and_a_class_of_dataclasses():
    assert leaves_of(WithoutFields()) == []
    assert leaves_of(Plain) == [Plain]


def test_the_outputs_of_a_library():
    hidden = torch.ones(2, 3)
    output = BaseModelOutput(last_hidden_state=hidden, hidden_states=(hidden, hidden + 1))
    doubled = map_leaves(lambda leaf: leaf * 2, output)
    assert isinstance(doubled, BaseModelOutput)
    assert torch.equal(doubled.last_hidden_state, hidden * 2)
    assert torch.equal(doubled["hidden_states"][1], hidden * 2 + 2)
    assert doubled.attentions is None

    encoding = BatchEncoding({"input_ids": hidden, "mask": hidden})
    cut = map_leaves(lambda leaf: leaf[:1], encoding)
    assert isinstance(cut, BatchEncoding)
    assert cut["input_ids"].shape == cut.mask.shape == (1, 3)
    assert encoding["input_ids"].shape == (2, 3)


@pytest.mark.parametrize("holder", [Plain, lambda x: BaseModelOutput(last_hidden_state=x)])
def test_what_an_opened_object_holds_is_freed_with_it(holder):
    tensor = torch.ones(2)
    memory = weakref.ref(tensor.untyped_storage())
    gc.disable()
    try:
        held = holder(tensor)
        leaves, rebuild = flatten(held)
        del tensor, held, leaves, rebuild
        assert memory() is None
    finally:
        gc.enable()


def test_tensors_keep_their_identity():
    tensor = torch.ones(2)
    (leaf,), rebuild = flatten(Frozen([tensor], []))
    assert leaf is tensor
    assert rebuild([leaf]).first[0] is tensor
