"""A layer that runs again: the same bits, less memory, and an error where it cannot be the same."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.model.saved.recompute import RecomputedRegion
from lightning_pipeshift.model.saved.saved_tensors import SavedTable


def seeded(gate, seed):
    """Runs a layer with the random numbers of a seed of its own."""

    def forward(*args, **kwargs):
        torch.manual_seed(seed)
        return gate.run(*args, **kwargs)

    return forward


def region_of(layer, *args, seed=7, **kwargs):
    """A region around one call."""
    gate = NamedLayer("layer", layer, 0)
    region = RecomputedRegion(gate, seeded(gate, seed), SavedTable())
    return region, region.run(args, kwargs)


def gradients(layer, x, recomputes, ahead=False, **kwargs):
    """The gradients of the input and the parameters, with or without running the layer twice."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    inside = x * 1.0
    if recomputes:
        region, y = region_of(layer, inside, **kwargs)
        assert region.let_go()
        # What others draw in the meantime must not matter.
        torch.manual_seed(99)
        if ahead:
            region.run_again()
    else:
        torch.manual_seed(7)
        y = layer(inside, **kwargs)
    y.square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in layer.parameters())]


class InPlace(nn.Module):
    """Writes to what it made itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x)
        y += x
        return F.relu(y, inplace=True)


class Squares(torch.autograd.Function):
    """Saves tensors as users do."""

    @staticmethod
    def forward(ctx, x):
        y = x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * (2 * x + 0 * y)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(Squares.apply(x))


class Scaled(nn.Module):
    """Its output depends on a buffer that it changes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.linear(x * x) * float(self.calls)


LAYERS = {
    "linear": lambda: nn.Linear(6, 6),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 6)),
    "in_place": InPlace,
    "own_function": Own,
    "encoder": lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.3, batch_first=True),
}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_the_same_bits(name, ahead):
    torch.manual_seed(0)
    layer, x = LAYERS[name](), torch.randn(3, 5, 6)
    expected = gradients(layer, x, recomputes=False)
    found = gradients(layer, x, recomputes=True, ahead=ahead)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_was_saved_is_freed_until_it_is_made_again():
    before = []

    class Watched(nn.Module):
        """Keeps a view that lives as long as the memory of what was saved."""

        def forward(self, x):
            y = torch.sin(x)
            before.append(weakref.ref(y.untyped_storage()))
            return torch.cos(y)

    def is_freed(storage):
        return storage() is None or storage().nbytes() == 0

    def bytes_saved(region):
        held = [ref() for ref in region._saved]
        return sum(s.tensor.nbytes for s in held if s is not None and s.tensor is not None)

    region, y = region_of(Watched(), torch.ones(1000, requires_grad=True) * 1)
    assert bytes_saved(region) == 2 * 4000
    assert region.let_go()
    assert bytes_saved(region) == 0
    assert is_freed(before[0])
    region.run_again()
    assert bytes_saved(region) == 2 * 4000
    y.sum().backward()
    assert bytes_saved(region) == 0


def test_an_input_that_user_code_writes_to_afterwards_keeps_what_was_saved():
    layer = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6))
    x = torch.randn(3, 6, requires_grad=True) * 1
    region, y = region_of(layer, x)
    x += 1
    assert not region.let_go()
    (y.sum()).backward()


def test_one_tensor_given_twice_is_one_tensor_again():
    class Same(nn.Module):
        def forward(self, a, b):
            return torch.sin(a) if a is b else torch.sin(a) * torch.cos(b)

    x = torch.randn(4, requires_grad=True) * 1
    region, y = region_of(Same(), x, x)
    assert region.let_go()
    y.sum().backward()


def test_a_layer_that_writes_to_its_buffers_runs_again_on_what_they_held():
    torch.manual_seed(0)
    layer = Scaled()
    x = torch.randn(3, 6)
    gate = NamedLayer("layer", layer, 0)
    results = []
    for number in range(3):
        inside = x.clone().requires_grad_() * 1
        region = RecomputedRegion(gate, gate.run, SavedTable())
        y = region.run((inside,), {})
        # The first call finds out that the layer does; from the next on it is prepared.
        assert region.let_go() is (number > 0)
        results.append((inside, y, float(layer.calls)))
    for inside, y, calls in results:
        (gradient,) = torch.autograd.grad(y.sum(), inside)
        expected = inside.detach().requires_grad_()
        (wanted,) = torch.autograd.grad((layer.linear(expected * expected) * calls).sum(), expected)
        assert torch.equal(gradient, wanted)
    assert layer.calls == 3, "running again is no call"


def test_running_statistics_are_updated_once():
    torch.manual_seed(0)
    layers = [nn.BatchNorm1d(6), nn.BatchNorm1d(6)]
    x = torch.randn(8, 6)
    layers[0](x)
    region, y = region_of(layers[1], x.clone().requires_grad_() * 1)
    assert region.let_go()
    y.square().sum().backward()
    for name, value in layers[0].state_dict().items():
        assert torch.equal(value, layers[1].state_dict()[name]), name


def test_the_precision_around_the_layer_is_there_again():
    layer, x = nn.Linear(6, 6), torch.randn(3, 6)
    found: list[Tensor] = []
    for recomputes in (False, True):
        layer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if recomputes:
                region, y = region_of(layer, x.clone().requires_grad_() * 1)
                assert region.let_go()
            else:
                y = layer(x)
        y.float().square().sum().backward()
        assert layer.weight.grad is not None
        found.append(layer.weight.grad.clone())
    assert torch.equal(*found)


class Cache:
    """Keys of earlier tokens, in the way of a language model's cache."""

    def __init__(self, *keys):
        self.keys = list(keys)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, cache):
        cache.keys.append(self.linear(x))
        return torch.softmax(x @ torch.cat(cache.keys).T, -1) @ torch.cat(cache.keys)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_a_layer_adds_to_an_argument_it_adds_once(ahead):
    torch.manual_seed(0)
    layer, x, old = Attends(), torch.randn(3, 6), torch.randn(2, 6)
    caches = Cache(old), Cache(old)
    expected = gradients(layer, x, False, cache=caches[0])
    found = gradients(layer, x, True, ahead, cache=caches[1])
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert [key.shape for key in caches[1].keys] == [(2, 6), (3, 6)]


def test_a_layer_that_does_something_else_the_second_time():
    class Fickle(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return torch.sin(x) if self.calls == 1 else torch.sin(torch.cos(x))

    region, y = region_of(Fickle(), torch.randn(4, requires_grad=True) * 1)
    assert region.let_go()
    with pytest.raises(
        LayerError, match=r"'layer' saved 2 tensors .* and 1 the first time.*'none'"
    ):
        region.run_again()
    assert y is not None


def test_what_is_modified_after_it_was_saved_is_still_torchs_error():
    class Saves(nn.Module):
        def forward(self, x, w):
            return x * w

    w = torch.ones(3)
    x = torch.ones(3, requires_grad=True) * 1
    region, y = region_of(Saves(), x, w)
    w += 1
    assert not region.let_go()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_sparse_tensor_is_kept():
    class Mixes(nn.Module):
        def forward(self, x):
            return torch.sparse.mm(torch.eye(3).to_sparse() * 2, x.sin()).cos()

    x = torch.randn(3, 6, requires_grad=True)
    region, y = region_of(Mixes(), x * 1)
    assert region.let_go()
    (found,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(Mixes()(x).sum(), x)
    assert torch.equal(found, expected)
