"""What the code around layers takes, as a trace tells before training."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from lightning_pipeshift.model.execution.measure import Stopwatch
from lightning_pipeshift.model.user_state.random_streams import RandomStreams
from lightning_pipeshift.plan.inputs.saved_tensors import BEHIND, FRONT
from tests.unit.model.following import CPU, Model, follow, linears

X = torch.ones(3, 4)
ONE = X.nbytes


def figures_of(step, *batch):
    model = Model(step, **linears("a b"))
    stopwatch = Stopwatch(CPU, RandomStreams(CPU), trains=True, held=batch)
    follow(model, *batch, stopwatch=stopwatch)
    return [stopwatch.figures[layer] for layer in range(2)]


def outside(figures):
    return [(t.number, t.num_bytes) for t in figures.tensors if t.is_outside]


def test_code_in_front_of_a_layer_and_behind_the_last_one():
    def step(m, x):
        # The result is saved; a gradient of it makes one of what it is computed from.
        hidden = torch.exp(m.a(x))
        return torch.tanh(m.b(hidden)).sum()

    a, b = figures_of(step, X)
    assert outside(a) == []
    assert a.code_bytes == 0
    assert outside(b) == [(FRONT, ONE), (BEHIND, ONE)]
    assert b.code_bytes == 2 * ONE
    # They are kept when the layer is recomputed.
    assert b.input_bytes - figures_of(lambda m, x: m.b(m.a(x)).sum(), X)[1].input_bytes == 2 * ONE


def test_the_batch_views_and_what_layers_return_are_counted_once():
    def step(m, x):
        hidden = m.a(x * 1).view(4, 3).t().reshape(-1).view(3, 4)
        # Saves the batch, which is there anyway, and one tensor twice.
        return (m.b(hidden * x) * hidden * hidden).sum()

    _, b = figures_of(step, X)
    found = dict(outside(b))
    assert found[FRONT] == 0
    assert sum(size for number, size in found.items() if number >= BEHIND) == 3 * ONE


def test_memory_for_a_moment_in_the_forward():
    def step(m, x):
        with torch.no_grad():
            mask = torch.stack([m.a(x)] * 5).sum(0)
        return m.b(mask).sum()

    _, b = figures_of(step, X)
    assert outside(b) == []
    # Five copies, with the layer's result first, and then with the sum.
    assert b.code_bytes == 6 * ONE


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_code(reentrant):
    def step(m, x):
        hidden = checkpoint(lambda x: torch.exp(m.a(x)), x * m.scale, use_reentrant=reentrant)
        return m.b(hidden).exp().sum()

    def plain(m, x):
        return m.b(torch.exp(m.a(x * m.scale))).exp().sum()

    found = []
    for each in (plain, step):
        model = Model(each, **linears("a b"))
        model.scale = torch.nn.Parameter(torch.ones(4))
        stopwatch = Stopwatch(CPU, RandomStreams(CPU), trains=True, held=[X])
        follow(model, X, stopwatch=stopwatch)
        found.append(stopwatch.figures[1])
    plain_figures, figures = found
    assert (BEHIND, ONE) in outside(figures)
    assert sum(size for _, size in outside(figures)) < sum(s for _, s in outside(plain_figures))


def test_a_gradient_of_a_gradient_is_followed_as_ever():
    def step(m, x):
        hidden = m.a(x)
        (slope,) = torch.autograd.grad(hidden.tanh().sum(), hidden, create_graph=True)
        return m.b(slope).sum()

    model = Model(step, **linears("a b"))
    plain = follow(model, X)
    trace = follow(model, X, stopwatch=Stopwatch(CPU, RandomStreams(CPU), trains=True))
    assert trace.flow == plain.flow
    assert trace.flow.differentiable


def test_nothing_remains_of_the_graph():
    seen = []

    def step(m, x):
        hidden = F.softmax(m.a(x), 1)
        seen.append(weakref.ref(hidden))
        return m.b(hidden).sum()

    gc.disable()
    try:
        figures_of(step, X)
        assert all(reference() is None for reference in seen)
    finally:
        gc.enable()


def test_a_step_that_is_traced_twice_is_counted_once():
    def step(m, x):
        hidden = m.a(x)
        if not bool((hidden > 0).all()):
            raise ValueError("such values are not allowed")
        return m.b(hidden).exp().sum()

    plain = figures_of(lambda m, x: m.b(m.a(x)).exp().sum(), X)
    figures = figures_of(step, X)
    assert [f.input_bytes for f in figures] == [f.input_bytes for f in plain]
    assert outside(figures[1]) == outside(plain[1])
