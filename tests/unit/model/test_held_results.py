"""A layer that drops some of its saved tensors, and computes only what these need when it runs
again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.saved import held_results
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.model.saved.recompute import RecomputedRegion
from lightning_pipeshift.model.saved.saved_tensors import SavedTable
from tests.unit.model.test_recompute import LAYERS, seeded

aten = torch.ops.aten


class Counted(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def step(
    gate: NamedLayer, x: Tensor, held: set[int] | None
) -> tuple[list[Tensor], Counter[Any], int]:
    """The gradients of the input and the parameters, the operations of the second run, and how many
    tensors were saved; ``None``: without a second run.
    """
    gate.layer.zero_grad()
    x = x.detach().requires_grad_()
    region = RecomputedRegion(gate, seeded(gate, 7), SavedTable(), held=held or set())
    output = region.run((x * 1.0,), {})
    counted = Counted()
    if held is not None:
        assert region.let_go()
        torch.manual_seed(99)
        with counted:
            region.run_again()
    output.square().sum().backward()
    parameters = gate.layer.parameters()
    return (
        [x.grad, *(p.grad.clone() for p in parameters)],  # type: ignore[list-item, union-attr]
        counted.counts,
        len(region._saved),
    )


def gate_of(layer: nn.Module) -> NamedLayer:
    return NamedLayer("layer", layer, 0)


@pytest.mark.parametrize("name", LAYERS)
def test_any_held_tensors_give_the_same_bits(name: str) -> None:
    """Each alone, all of them, and every second one; twice, as the first time all is computed."""
    torch.manual_seed(0)
    gate, x = gate_of(LAYERS[name]()), torch.randn(3, 5, 6)
    expected, _, count = step(gate, x, None)
    every = set(range(count))
    for held in [*({number} for number in every), every, set(range(0, count, 2))]:
        for _ in range(2):
            found, _, _ = step(gate, x, held)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), held


class Block(nn.Module):
    """Saves the result of its first product for GELU, that of GELU for the second, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 24), nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.dropout(nn.functional.gelu(self.first(x)), 0.5))


def test_a_product_whose_result_is_held_is_not_computed_again() -> None:
    torch.manual_seed(0)
    gate, x = gate_of(Block()), torch.randn(4, 6)
    expected, _, count = step(gate, x, None)
    products = {}
    for number in range(count):
        step(gate, x, {number})
        found, counts, _ = step(gate, x, {number})
        products[number] = counts[aten.addmm.default]
        assert counts[aten.bernoulli_.float] == 1, "the mask is drawn in any case"
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert Counter(products.values()) == {2: count - 1, 1: 1}


def test_after_the_first_call_only_the_operations_of_held_tensors_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at = []
    look = held_results.is_skippable

    def noted(operation: Any, *args: Any) -> bool:
        looked_at.append(operation)
        return look(operation, *args)

    monkeypatch.setattr(held_results, "is_skippable", noted)

    class Changing(Block):
        extra = 0

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.extra):
                x = x + self.second(self.first(x))
            return super().forward(x)

    torch.manual_seed(0)
    layer = Changing()
    gate, x = gate_of(layer), torch.randn(4, 6)
    numbers = []
    for extra in (0, 0, 1, 1, 0, 0):
        layer.extra = extra
        expected, _, _ = step(gate, x, None)
        looked_at.clear()
        found, _, _ = step(gate, x, {1, 2})
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        numbers.append(len(looked_at))
    assert numbers[1] < numbers[0] / 4, "the layer's operations are known"
    assert numbers[5] == numbers[1], "and again, after it has run others"


def test_what_was_written_to_is_computed_again() -> None:
    """A kernel that torch does not see has changed the product's result: here NumPy."""

    class Hidden(Block):
        def forward(self, x: Tensor) -> Tensor:
            product = self.first(x)
            product.detach().numpy()[...] *= 2
            return self.second(nn.functional.gelu(product))

    torch.manual_seed(0)
    gate, x = gate_of(Hidden()), torch.randn(4, 6)
    expected, _, count = step(gate, x, None)
    for _ in range(3):
        found, counts, _ = step(gate, x, set(range(count)))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert counts[aten.addmm.default] == 2


def test_other_operations_in_the_second_run_are_an_error() -> None:
    class Changing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.times = 0

        def forward(self, x: Tensor) -> Tensor:
            self.times += 1
            if self.times > 1:
                with torch.no_grad():
                    self.first(x)
            return super().forward(x)

    gate, x = gate_of(Changing()), torch.randn(4, 6)
    count = step(gate_of(Block()), x, None)[2]
    with pytest.raises(LayerError, match="other operations"):
        step(gate, x, set(range(count)))
