from queue import SimpleQueue
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_pipeshift.model.measuring import measure
from lightning_pipeshift.model.measuring.measure import Stopwatch
from lightning_pipeshift.model.parameters.layers import find_layers
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.model.saved.observer import Observer
from lightning_pipeshift.model.saved.recompute import LayerCall
from lightning_pipeshift.model.saved.saved_tensors import SavedTable
from lightning_pipeshift.model.user_state.preserve import preserved
from lightning_pipeshift.step.fake_run import run_without_values

CPU = torch.device("cpu")
X = torch.ones(3, 4)
# Which modules ran on numbers. No list, and not on the modules: those are put back as they were.
RUNS: SimpleQueue[int] = SimpleQueue()
# Likewise what they have taken: the clock goes on by what layers say, and by nothing else.
SPENT: SimpleQueue[float] = SimpleQueue()


class Model(nn.Module):
    """A LightningModule as far as layers are measured: parts, and a step that uses them."""

    def __init__(self, step, **parts):
        super().__init__()
        self.user_step = step
        for name, part in parts.items():
            setattr(self, name, part)


def linears(names):
    return {name: nn.Linear(4, 4) for name in names.split()}


def measured(model, stopwatch, *batch):
    """Measures the layers that a step calls, as a pipeline does before the first step."""
    layers = [NamedLayer(*each, at) for at, each in enumerate(find_layers(model).items())]

    def step(given):
        return model.user_step(model, *given)

    found = run_without_values(model, [each.layer for each in layers], CPU, step, batch)
    assert not found.end
    for call in found.calls:
        with preserved(layers[call.layer].layer.modules()), call.as_called():
            stopwatch.observe_call(layers[call.layer], call.leaves, call.rebuild)
    return stopwatch.figures


class Takes(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seconds: torch.Tensor
        self.register_buffer("seconds", torch.tensor(seconds))

    def forward(self, x):
        if type(x) is torch.Tensor:
            SPENT.put(float(self.seconds))
            RUNS.put(id(self))
        return self.inner(x)


class Square(nn.Module):
    """Saves its weight too where its input needs a gradient."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.inner(x).square()


def timed(model, *batch):
    stopwatch = Stopwatch(CPU)
    now = 0.0

    def perf_counter():
        nonlocal now
        while not SPENT.empty():
            now += SPENT.get()
        return now

    with mock.patch.object(measure, "time", SimpleNamespace(perf_counter=perf_counter)):
        figures = measured(model, stopwatch, *batch)
    return {layer: f.forward_seconds for layer, f in figures.items()}


def in_a_row(m, x):
    return m.c(m.b(m.a(x))).sum()


def test_each_layers_own_time():
    model = Model(
        in_a_row, a=Takes(0.05), b=nn.Linear(4, 4), c=nn.Sequential(nn.Linear(4, 4)), d=Takes(1)
    )
    seconds = timed(model, X)
    # A layer that is not called is not timed.
    assert seconds == {0: pytest.approx(0.05), 1: 0, 2: 0}


def test_like_layers_are_timed_once():
    model = Model(in_a_row, a=Takes(0.5), b=Takes(0.5), c=Takes(0.5))
    while not RUNS.empty():
        RUNS.get()
    seconds = timed(model, X)
    assert seconds[1] == seconds[2]
    # The first is given the batch, of which it needs no gradient.
    assert {RUNS.get() for _ in range(RUNS.qsize())} == {id(model.a), id(model.b)}


def test_what_like_layers_save_differs_with_what_they_are_given():
    """The numbers of saved tensors are those that autograd gives them when the model trains."""
    model = Model(in_a_row, a=Square(), b=Square(), c=Square())
    figures = measured(model, Stopwatch(CPU, trains=True), X)
    observer = Observer()
    x = X
    for index, layer in enumerate(model.children()):
        x = LayerCall(NamedLayer("", layer, index), layer, SavedTable(), observer).run((x,), {})
    for index in range(3):
        found = [t.number for t in figures[index].tensors if t.num_bytes]
        real = [t.number for t in observer.of_layers[index] if t.num_bytes]
        # What it is given belongs to the layer before, where that has saved it.
        assert found[-1] == real[-1]
    (first, second) = (figures[index].tensors for index in (0, 1))
    assert len(second) == len(first) + 1


class Widens(nn.Module):
    """Saves nothing, and makes much of its input for a moment."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x.repeat(1, 100).mean(dim=1, keepdim=True).expand(3, 4) + self.weight


def working_bytes(model, *batch, held=()):
    stopwatch = Stopwatch(CPU, trains=True, held=held)
    figures = measured(model, stopwatch, *batch)
    return [figures[index].working_bytes for index in range(3)]


def test_what_a_layer_takes_for_a_moment():
    model = Model(in_a_row, a=nn.Linear(4, 4), b=Widens(), c=nn.Linear(4, 4, bias=False))
    linear, widens, last = working_bytes(model, X, held=[X])
    row = 3 * 4 * 4
    # Its input, which it does not save, the wide one, and the means.
    assert widens == row + 100 * row + 3 * 4
    # The gradient of its output, that of its input, and that of its weight.
    assert last == row + row + 4 * 4 * 4
    # The batch is there anyway, and needs no gradient.
    assert linear == row + (4 * 4 + 4) * 4
    # Otherwise it is what the layer saves.
    assert working_bytes(model, X)[0] == linear


def test_every_call_counts():
    model = Model(lambda m, x: (m.a(x) + m.a(x)).sum() + m.b(x).sum(), a=Takes(0.5), b=Takes(0.5))
    seconds = timed(model, X)
    assert seconds[0] == pytest.approx(2 * seconds[1])
    assert seconds[1] > 0


class Refuses(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        if type(x) is torch.Tensor:
            raise ValueError("random numbers")
        return self.inner(x)


def test_a_layer_that_refuses_random_inputs_is_left_out():
    model = Model(in_a_row, **linears("a c"), b=Refuses())
    names = [name for name, _ in model.named_children()]
    assert set(timed(model, X)) == {names.index("a"), names.index("c")}


def test_nothing_in_the_model_changes():
    model = Model(
        lambda m, x: m.c(m.d(m.b(m.a(x)))).sum(),
        **linears("a c"),
        b=nn.BatchNorm1d(4),
        d=nn.Dropout(0.5),
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    batch = X.clone()
    timed(model, batch)
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(batch, X)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


# How many entries a cache had in each measured call.
FOUND: SimpleQueue[int] = SimpleQueue()


class AddsToAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, cache):
        if type(x) is torch.Tensor:
            FOUND.put(len(cache.found))
        cache.found.append(x)
        return self.inner(x)


class Cache:
    def __init__(self):
        self.found: list[torch.Tensor] = []


def calls_with_a_cache():
    """The lengths of a cache that a layer adds to, in the layer's measured calls."""

    def step(m, x):
        return m.c(m.b(m.a(x), Cache())).sum()

    while not FOUND.empty():
        FOUND.get()
    model = Model(step, **linears("a c"), b=AddsToAList())
    assert set(timed(model, X)) == {0, 1, 2}
    return [FOUND.get() for _ in range(FOUND.qsize())]


def test_what_a_measured_layer_adds_to_its_arguments_is_taken_back():
    assert len(set(calls_with_a_cache())) == 1


def test_a_layer_is_measured_with_the_objects_that_its_call_is_given():
    assert set(calls_with_a_cache()) == {0}


def test_tokens_and_structures_as_inputs():
    def step(m, tokens):
        hidden = m.embed(tokens)
        return m.block(src=hidden, src_key_padding_mask=tokens == 0).sum()

    block = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = Model(step, embed=nn.Embedding(5, 4), block=block)
    assert set(timed(model, torch.tensor([[1, 2, 0]]))) == {0, 1}
