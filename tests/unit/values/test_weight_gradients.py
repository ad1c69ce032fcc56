"""Backwards in two parts: the weights' gradients have the bits of a whole backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeshift.compat.weight_products import Weights
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.step.later_gradients import LaterGradients
from lightning_pipeshift.values.weight_gradients import divided


class Product(nn.Module):
    """A product with a weight that is not transposed, or whose memory is."""

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        weight = torch.randn(5, 4).t() if is_transposed else torch.randn(4, 5)
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Attention(nn.MultiheadAttention):
    """Self-attention, in a batch."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        found: Tensor = super().forward(x, x, x)[0]
        return found


BF16 = torch.bfloat16
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "linear": (lambda: nn.Linear(4, 5), (3, 4), 1),
    "linear, three dimensions": (lambda: nn.Linear(4, 5), (2, 3, 4), 1),
    "linear without bias": (lambda: nn.Linear(4, 5, bias=False), (2, 3, 4), 1),
    "linear to one": (lambda: nn.Linear(4, 1), (1, 4), 1),
    "linear from one": (lambda: nn.Linear(1, 5), (3, 1), 1),
    "linear of one": (lambda: nn.Linear(1, 1), (1, 1), 1),
    "large linear": (lambda: nn.Linear(64, 128), (33, 64), 1),
    "linear in bf16": (lambda: nn.Linear(4, 5, dtype=BF16), (7, 4), 1),
    "linear in float64": (lambda: nn.Linear(4, 5, dtype=torch.float64), (7, 4), 1),
    "product": (lambda: Product(is_transposed=False), (3, 4), 1),
    "product, transposed": (lambda: Product(is_transposed=True), (2, 3, 4), 1),
    "attention": (lambda: Attention(8, 2), (3, 2, 8), 2),
    "convolution": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 8, 8), 1),
    "convolution in groups": (
        lambda: nn.Conv2d(4, 4, 3, bias=False, groups=2, padding=1, stride=2),
        (2, 4, 9, 9),
        1,
    ),
    "large convolution": (lambda: nn.Conv2d(16, 32, 3, padding=1), (4, 16, 16, 16), 1),
    "convolution in bf16": (lambda: nn.Conv2d(3, 8, 3, dtype=BF16), (2, 3, 8, 8), 1),
    "convolution, transposed": (
        lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1),
        (2, 3, 5, 5),
        1,
    ),
    "convolution of a frozen weight": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 8, 8), 1),
    "convolution of lines": (lambda: nn.Conv1d(3, 4, 3, dilation=2), (2, 3, 9), 1),
    "convolution of volumes": (lambda: nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4), 1),
}


def in_two_parts(loss: Tensor, token: Tensor) -> list[Weights]:
    """Runs a backward in two parts; returns what came later."""
    division = divided([loss], token)
    given: list[list[Tensor]] = [[] for _ in division.weights]
    handles = [
        each.node.register_prehook(noted.extend)
        for each, noted in zip(division.weights, given, strict=True)
    ]
    torch.autograd.backward([loss], inputs=division.others)
    assert all(leaf.grad is None for each in division.weights for leaf in each.leaves)
    for handle in handles:
        handle.remove()
    for each, (of,) in zip(division.weights, given, strict=True):
        with torch.no_grad():
            gradients = each.computing.gradients(of)
        torch.autograd.backward(each.edges, gradients)
    return division.weights


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_weights_have_the_bits_of_a_whole_backward(name: str, is_turned: bool, casts: bool) -> None:
    torch.manual_seed(0)
    make, shape, expected = LAYERS[name]
    layer = make()
    if name == "convolution of a frozen weight":
        layer.weight.requires_grad_(False)
    x = torch.randn(shape, dtype=next(layer.parameters()).dtype, requires_grad=True)
    with torch.autocast("cpu", BF16, enabled=casts):
        y = layer(x)
        if is_turned:
            # Its gradient is no contiguous tensor.
            y = y.transpose(0, -1).contiguous()
        loss = (y * torch.randn(y.shape)).float().tanh().sum()
    tensors = [*(each for each in layer.parameters() if each.requires_grad), x]
    gradients = torch.autograd.grad(loss, tensors, retain_graph=True)
    assert len(in_two_parts(loss, x)) == expected
    for tensor, gradient in zip(tensors, gradients, strict=True):
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, gradient)
        assert tensor.grad.stride() == gradient.stride()


def twice(layer: nn.Linear, x: Tensor) -> Tensor:
    """A weight that two products use."""
    result: Tensor = layer(layer(x))
    return result


def beside(layer: nn.Linear, x: Tensor) -> Tensor:
    """A weight whose product leads to nothing that came from another stage."""
    result: Tensor = layer(torch.ones(2, 4)) + x
    return result


def normed(layer: nn.Linear, x: Tensor) -> Tensor:
    """A weight that is computed."""
    return F.linear(x, layer.weight / layer.weight.norm())


def checkpointed(layer: nn.Linear, x: Tensor) -> Tensor:
    """A layer that the backward runs again: it gives what it has saved once."""
    result: Tensor = checkpoint(layer, x, use_reentrant=False)
    return result


def on_host(layer: nn.Linear, x: Tensor) -> Tensor:
    """A layer whose saved tensors somebody else keeps."""
    with torch.autograd.graph.save_on_cpu():
        result: Tensor = layer(x)
    return result


@pytest.mark.parametrize("run", [twice, beside, normed, checkpointed, on_host])
def test_other_weights_are_not_left_for_later(run: Callable[[nn.Linear, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    loss = run(layer, x).tanh().sum()
    assert in_two_parts(loss, x) == []
    found = [layer.weight.grad, x.grad]
    expected = torch.autograd.grad(run(layer, x).tanh().sum(), [layer.weight, x])
    assert all(
        torch.equal(one, other)
        for one, other in zip(found, expected, strict=True)
        if one is not None
    )
    assert layer.weight.grad is not None


def test_a_backward_with_a_frozen_leaf_or_from_a_leaf_stays_whole() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    loss = layer(x).sum()
    layer.bias.requires_grad_(False)
    assert divided([loss], x).weights == []
    layer.bias.requires_grad_(True)
    assert divided([loss, torch.ones((), requires_grad=True)], x).weights == []
    assert len(divided([loss], x).weights) == 1


def test_a_weight_that_is_also_a_root_is_not_left_for_later() -> None:
    layer, x = nn.Linear(1, 1, bias=False), torch.randn(2, 1, requires_grad=True)
    turned = layer.weight.t()
    loss = (x @ turned).sum()
    assert divided([loss, turned], x).weights == []
    assert len(divided([loss], x).weights) == 1


def test_hooks_run_once() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    seen = []
    y = layer(x)
    y.register_hook(lambda gradient: seen.append("result") or 2 * gradient)  # type: ignore[func-returns-value]
    layer.weight.register_hook(lambda gradient: seen.append("weight") or 3 * gradient)  # type: ignore[func-returns-value]
    layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append("sum"))
    y.retain_grad()
    gradient = torch.randn(2, 4)
    in_two_parts((y * gradient).sum(), x)
    assert seen == ["result", "weight", "sum"]
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, 3 * (2 * gradient).t().mm(x.detach()))
    assert y.grad is not None
    assert torch.equal(y.grad, 2 * gradient)


def test_what_was_written_to_is_an_error_as_in_torch() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    product = x * 1.0
    loss = layer(product).sum()
    product.data.add_(1)
    product.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        divided([loss], x)


def microbatch_of(token: Tensor) -> Any:
    """What the later gradients ask of a microbatch."""
    core = SimpleNamespace(device_kind="cpu", gates=(), trained_as=lambda _: nullcontext())
    looks = {"saves": None, "timer": None, "finite": None}
    graphs = SimpleNamespace(token=token)
    found = SimpleNamespace(core=core, flags={}, graphs=graphs, turn=0, **looks)
    return type("Microbatch", (), vars(found))()


def test_gradients_left_for_later_are_added_in_the_order_of_the_microbatches() -> None:
    torch.manual_seed(0)
    layer, later, parts = nn.Linear(4, 4), LaterGradients(), []
    for _ in range(3):
        x = torch.randn(2, 4, requires_grad=True)
        loss = layer(x).tanh().sum()
        parts.append(torch.autograd.grad(loss, layer.weight, retain_graph=True)[0])
        later.backward(microbatch_of(x), [loss], [None])
    assert layer.weight.grad is None
    # The weight of this one has a second use: it has to come behind the others.
    x = torch.randn(2, 4, requires_grad=True)
    loss = layer(layer(x)).tanh().sum()
    parts.append(torch.autograd.grad(loss, layer.weight, retain_graph=True)[0])
    later.backward(microbatch_of(x), [loss], [None])
    assert later.first is None
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, ((parts[0] + parts[1]) + parts[2]) + parts[3])


@pytest.mark.parametrize("writes_to_factor", [True, False])
def test_what_has_been_written_to_since_is_an_error(writes_to_factor: bool) -> None:
    layer, later = nn.Linear(4, 4), LaterGradients()
    x, seen = torch.randn(2, 4, requires_grad=True), list[Tensor]()
    factor = x * 1.0
    y = layer(factor)
    y.register_hook(seen.append)
    later.backward(microbatch_of(x), [(y * torch.ones(2, 4)).sum()], [None])
    with torch.no_grad():
        (factor.detach() if writes_to_factor else seen[0]).mul_(2)
    with pytest.raises(LayerError, match="has been written to in place since"):
        later.compute_all()
