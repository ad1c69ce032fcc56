from collections import deque

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.execution.measure import Stopwatch
from lightning_pipeshift.model.gates.layers import find_layers
from lightning_pipeshift.model.user_state.random_streams import RandomStreams
from lightning_pipeshift.plan.inputs.flow import Value
from tests.unit.model.following import CPU, Model, follow, linears, payloads, table

X = torch.linspace(-1, 1, 12).view(3, 4)


def chain(m, x):
    return m.c(m.b(m.a(x))).sum()


def skip(m, x):
    first = m.a(x)
    return m.c(m.b(first).relu() + first).sum()


def dense(m, x):
    a = m.a(x)
    b = m.b(a)
    return m.c(torch.cat([a, b])[:3]).sum() + a.mean()


def encoder_decoder(m, x):
    memory = m.a(x)
    return m.c(m.b(x * 2) + memory).sum()


def log_in_between(m, x):
    hidden = m.a(x)
    m.log("mean", hidden.mean(), on_step=True)
    m.log_dict({"constant": 1.0})
    return m.c(m.b(hidden)).sum()


def log_a_dict(m, x):
    hidden = m.a(x)
    m.log_dict({"mean": hidden.mean(), "batch": x.mean()})
    return m.c(m.b(hidden)).sum()


def detached(m, x):
    return m.c(m.b(m.a(x).detach())).sum()


def half_detached(m, x):
    hidden = m.a(x)
    return m.c(m.b(hidden) + hidden.detach()).sum()


def frozen_front(m, x):
    with torch.no_grad():
        hidden = m.b(m.a(x))
    return m.c(hidden).sum()


def control(m, x):
    hidden = m.a(x)
    hidden = m.b(hidden) * (2 if hidden.mean().item() > 1000 else 1)
    return m.c(hidden).sum()


def condition(m, x):
    hidden = m.a(x)
    if hidden.isnan().any():
        raise ValueError
    return m.c(m.b(hidden)).sum()


def gan(m, x):
    fake = m.a(x)
    return {"loss": m.c(m.b(fake)).sum(), "fake": fake.detach(), "name": "gan"}


def no_result(m, x):
    m.c(m.b(m.a(x)))


def ends_early(m, x):
    return m.a(x).sum()


def only_the_batch(m, x):
    return (m.c(x) * m.a(x)).sum() + x.mean()


def in_place(m, x):
    hidden = m.a(x)
    other = m.b(x)
    hidden[0] += other[0]
    return m.c(hidden).sum()


def into_a_real_tensor(m, x):
    buffer = torch.zeros(3, 4)
    buffer[:1] = m.a(x)[:1]
    return m.c(m.b(x)).sum()


def twice_in_a_row(m, x):
    return m.c(m.b(m.a(x)) + m.b(x)).sum()


def comparison(m, x):
    hidden = m.a(x)
    mask = hidden.argmax(-1)
    return F.cross_entropy(m.c(m.b(hidden)), mask)


FLOWS = [
    (
        chain,
        "a: / b: a / c: b / tail: c/3.1 / c/3.1: c / grad: a b c c/3.1",
        " | a | b | c/3.1",
    ),
    (
        skip,
        (
            "a: / "
            "b: a / "
            "c: b/2.2 / "
            "tail: c/3.1 / "
            "b/2.1: b / "
            "b/2.2: a b/2.1 / "
            "c/3.1: c / "
            "grad: a b b/2.1 b/2.2 c c/3.1"
        ),
        " | a | b/2.2 | c/3.1",
    ),
    (
        dense,
        (
            "a: / "
            "b: a / "
            "c: b/2.2 / "
            "tail: c/3.3 / "
            "b/2.1: a b / "
            "b/2.2: b/2.1 / "
            "c/3.1: c / "
            "c/3.2: a / "
            "c/3.3: c/3.1 c/3.2 / "
            "grad: a b b/2.1 b/2.2 c c/3.1 c/3.2 c/3.3"
        ),
        " | a | a b/2.2 | c/3.3",
    ),
    (
        encoder_decoder,
        "a: / b: / c: b/2.1 / tail: c/3.1 / b/2.1: a b / c/3.1: c / grad: a b b/2.1 c c/3.1",
        " | a | b/2.1 | c/3.1",
    ),
    (
        log_in_between,
        "a: / b: a / c: b / tail: a/1.1 c/3.1 / a/1.1: a / c/3.1: c / grad: a b c c/3.1",
        " | a a/1.1 | a/1.1 b | a/1.1 c/3.1",
    ),
    (
        log_a_dict,
        "a: / b: a / c: b / tail: a/1.1 c/3.1 / a/1.1: a / c/3.1: c / grad: a b c c/3.1",
        " | a a/1.1 | a/1.1 b | a/1.1 c/3.1",
    ),
    (
        detached,
        "a: / b: a/1.1 / c: b / tail: c/3.1 / a/1.1: a / c/3.1: c / grad: b c c/3.1",
        " | a/1.1 | b | c/3.1",
    ),
    (
        half_detached,
        (
            "a: / "
            "b: a / "
            "c: b/2.2 / "
            "tail: c/3.1 / "
            "b/2.1: a / "
            "b/2.2: b b/2.1 / "
            "c/3.1: c / "
            "grad: a b b/2.2 c c/3.1"
        ),
        " | a | b/2.2 | c/3.1",
    ),
    (
        frozen_front,
        "a: / b: a / c: b / tail: c/3.1 / c/3.1: c / grad: c c/3.1",
        " | a | b | c/3.1",
    ),
    (
        control,
        "a: / b: a / c: b / tail: c/3.1 / b/2.1: a / c/3.1: c / control: b/2.1 / grad: a b c c/3.1",
        " | a | b b/2.1 | b/2.1 c/3.1",
    ),
    (
        condition,
        (
            "a: / "
            "b: a / "
            "c: b / "
            "tail: c/3.1 / "
            "a/1.1: a / "
            "a/1.2: a/1.1 / "
            "c/3.1: c / "
            "control: a/1.2 / "
            "grad: a b c c/3.1"
        ),
        " | a a/1.2 | a/1.2 b | a/1.2 c/3.1",
    ),
    (
        gan,
        "a: / b: a / c: b / tail: c/3.1 c/3.2 / c/3.1: c / c/3.2: a / grad: a b c c/3.1",
        " | a | a b | c/3.1 c/3.2",
    ),
    (
        no_result,
        "a: / b: a / c: b / tail: / grad:",
        " | a | b | ",
    ),
    (
        ends_early,
        "a: / tail: a/1.1 / a/1.1: a / grad: a a/1.1",
        " | a/1.1 | a/1.1 | a/1.1",
    ),
    (
        in_place,
        (
            "a: / "
            "b: / "
            "c: b/2.4.2000 / "
            "tail: c/3.1 / "
            "b/2.2: b / "
            "b/2.3.2000 b/2.3.2001: a b/2.2 / "
            "b/2.4.2000 b/2.4.2001: b/2.3.2000 / "
            "c/3.1: c / "
            "grad: a b b/2.2 b/2.3.2000 b/2.4.2000 b/2.3.2001 c c/3.1"
        ),
        " | a | b/2.4.2000 | c/3.1",
    ),
    (
        into_a_real_tensor,
        "a: / b: / c: b / tail: c/3.1 / a/1.1: a / a/1.2.1000: a/1.1 / c/3.1: c / grad: b c c/3.1",
        " |  | b | c/3.1",
    ),
    (
        twice_in_a_row,
        (
            "a: / "
            "b: a / "
            "b#1: / "
            "c: b/3.1 / "
            "tail: c/4.1 / "
            "b/3.1: b b#1 / "
            "c/4.1: c / "
            "grad: a b b#1 b/3.1 c c/4.1"
        ),
        " | a | b/3.1 | c/4.1",
    ),
    (
        comparison,
        "a: / b: a / c: b / tail: c/3.1 / a/1.1: a / c/3.1: a/1.1 c / grad: a b c c/3.1",
        " | a a/1.1 | a/1.1 b | c/3.1",
    ),
]


@pytest.mark.parametrize(
    ("step", "flow", "crossing"), FLOWS, ids=[step.__name__ for step, _, _ in FLOWS]
)
def test_the_flow_of_a_small_network(step, flow, crossing):
    model = Model(step, **linears("a b c"))
    trace = follow(model, X)
    assert table(trace, model) == flow.split(" / ")
    assert payloads(trace, model) == [part.strip() for part in crossing.split("|")]
    assert trace.logs_each_step == (step is log_in_between)
    # Without a loss, a flow says nothing of the gradients in other batches.
    assert trace.is_shaped_by_batch == (step is no_result)
    assert not trace.touched


def test_a_flow_holds_in_any_order_of_calls():
    model = Model(lambda m, x: m.a(m.b(m.c(x))).sum(), **linears("a b c"))
    trace = follow(model, X)
    assert [call.layer for call in trace.flow.calls] == [2, 1, 0]
    assert table(trace, model)[:3] == ["c:", "b: c", "a: b"]


def test_shapes_and_types_of_what_crosses():
    def step(m, x):
        hidden = m.a(x).transpose(0, 1)
        with torch.autocast("cpu", torch.bfloat16):
            return m.b(hidden.T).float().sum()

    model = Model(step, a=nn.Linear(4, 6), b=nn.Linear(6, 2))
    trace = follow(model, X)
    ((value, spec),) = trace.payload(1)
    assert (value.layer, spec.shape, spec.dtype) == (0, (3, 6), "torch.float32")
    returned = trace.flow.calls[1].leaves[0]
    assert returned is not None
    spec = returned
    assert (spec.shape, spec.dtype, spec.num_bytes) == ((3, 2), "torch.bfloat16", 12)
    assert trace.gradients(1) == trace.payload(1)


def test_what_needs_no_gradient_has_none_coming_back():
    trace = follow(Model(comparison, **linears("a b c")), X)
    frozen = Model(frozen_front, **linears("a b c"))
    assert [len(trace.gradients(b)) for b in range(4)] == [0, 1, 1, 1]
    assert [len(follow(frozen, X).gradients(b)) for b in range(4)] == [0, 0, 0, 1]


def test_frozen_parameters_cut_the_gradients_in_front_of_them():
    model = Model(chain, **linears("a b c"))
    model.a.requires_grad_(False)
    assert table(follow(model, X), model)[-1] == "grad: b c c/3.1"
    model.requires_grad_(False)
    assert table(follow(model, X), model)[-1] == "grad:"


def test_without_gradients():
    model = Model(chain, **linears("a b c"))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            lines = table(follow(model, X), model)
        assert lines == ["a:", "b: a", "c: b", "tail: c/3.1", "c/3.1: c", "grad:"]


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, scale=1.0):
        hidden = self.inner(x) * scale
        return {"one": hidden, "none": None, "two": (hidden + 1, "text"), "count": 3}


def test_leaves_of_a_returned_structure():
    def step(m, x):
        made = m.a(x, scale=2.0)
        assert made["none"] is None
        assert made["two"][1] == "text"
        return m.b(made["two"][0]).sum() * made["count"]

    model = Model(step, a=Structured(), b=nn.Linear(4, 4))
    trace = follow(model, X)
    leaves = trace.flow.calls[0].leaves
    assert [leaf is not None for leaf in leaves] == [True, False, True, False, False]
    assert table(trace, model) == [
        "a:",
        "b: a.2",
        "tail: b/2.2",
        "b/2.1: b",
        "b/2.2: b/2.1",
        "grad: a.2 b b/2.1 b/2.2",
    ]


class PassesThrough(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x, other):
        return x * self.weight, other


def test_what_a_layer_passes_through_is_its_output():
    def step(m, x):
        hidden = m.a(x)
        new, same = m.b(hidden, hidden)
        return m.c(new + same).sum()

    model = Model(step, a=nn.Linear(4, 4), b=PassesThrough(), c=nn.Linear(4, 4))
    trace = follow(model, X)
    assert table(trace, model)[:2] == ["a:", "b: a"]
    assert "b/2.1: b b.1" in table(trace, model)
    assert table(trace, model)[-1] == "grad: a b b.1 b/2.1 c c/3.1"


def test_an_input_that_reaches_a_layer_by_an_attribute():
    class Peeks(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.seen = []

        def forward(self, x):
            return self.inner(x) + self.seen[-1]

    def step(m, x):
        m.c.seen.append(m.a(x))
        return m.c(m.b(x)).sum()

    model = Model(step, a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=Peeks())
    trace = follow(model, X)
    assert table(trace, model)[:3] == ["a:", "b:", "c: a b"]
    assert table(trace, model)[-1] == "grad: a b c c/3.1"
    # It is not among the arguments, so a stage that has it hands it out at once.
    assert {value.layer for value in trace.eager} == {0}


def test_t5_whose_position_bias_every_block_shares():
    config = transformers.T5Config(
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_layers=3,
        num_heads=2,
        vocab_size=11,
        decoder_start_token_id=0,
    )
    net = transformers.T5ForConditionalGeneration(config)
    model = Model(lambda m, x: m.net(input_ids=x, labels=x).loss, net=net)
    tokens = torch.arange(6).view(2, 3)
    trace = follow(model, tokens)
    names = list(find_layers(model))

    def crossing(layer):
        return sorted(spec.shape for _, spec in trace.payload(names.index(layer)))

    hidden, bias = (2, 3, 8), (1, 2, 3, 3)
    assert crossing("net.encoder.block.1") == crossing("net.encoder.block.2") == [bias, hidden]
    # The encoder's states, the decoder's own, and a bias for each of its two attentions.
    shapes = crossing("net.decoder.block.1")
    assert shapes == crossing("net.decoder.block.2")
    assert shapes.count(hidden) == 2
    assert bias in shapes


# --- what the step does besides ---


def test_what_the_step_leaves_behind_is_lost():
    def step(m, x):
        m.outputs.append(x)
        m.seen["x"] = x
        m.last.append(1)
        m.names.add("new")
        m.count += 1
        m.new = 1
        m.accuracy(m.a(x).argmax(-1), torch.zeros(3, dtype=torch.long))
        m.metrics["mean"].update(m.a.weight.sum())
        return m.a(x).sum()

    model = Model(
        step,
        a=nn.Linear(4, 4),
        outputs=[],
        seen={},
        last=deque(),
        names=set(),
        count=0,
        accuracy=torchmetrics.classification.MulticlassAccuracy(4),
        metrics=nn.ModuleDict({"mean": torchmetrics.MeanMetric()}),
    )
    # Called twice, each on its own input: the metrics are what is in between.
    follow(model, X)
    assert (model.outputs, model.seen, list(model.last), model.names) == ([], {}, [], set())
    assert model.count == 0
    assert not hasattr(model, "new")
    assert model.accuracy.update_count == 0
    assert model.metrics["mean"].update_count == 0


def test_what_a_layer_writes_to_its_own_tensors_is_lost():
    model = Model(lambda m, x: m.b(m.norm(m.a(x))).sum(), **linears("a b"), norm=nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    follow(model, X)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_user_code_writes_to_buffers_is_lost():
    def step(m, x):
        m.steps += 1
        m.average.mul_(0.9).add_(m.a(x).detach().mean())
        return m.b(x).sum()

    model = Model(step, **linears("a b"))
    model.register_buffer("steps", torch.zeros(()))
    model.register_buffer("average", torch.zeros(()))
    follow(model, X)
    assert model.steps.item() == 0
    assert model.average.item() == 0


def test_the_layers_are_the_users_own_again_after_an_error():
    def step(m, x):
        m.a(x)
        raise ValueError("the user's own")

    model = Model(step, **linears("a b"))
    with pytest.raises(ValueError, match="the user's own"):
        follow(model, X)
    assert torch.equal(model.a(X), F.linear(X, model.a.weight, model.a.bias))
    assert type(model.a(X)) is torch.Tensor


# --- what cannot be followed ---


def again_with_others_between(m, x):
    return m.a(m.b(m.a(x)))


def twice_from_the_start(m, x):
    first = m.b(m.a(x).relu())
    return m.b(m.a(x + 1).relu() + 2) * first


def after_a_look(m, x):
    if m.b(m.a(x)).sum() > 0:
        return None
    return m.b(m.a(x + 1))


def again_on_its_own_output(m, x):
    return m.b(m.a(m.a(x)))


def again_on_its_own_output_by_user_code(m, x):
    return m.b(m.a(torch.cat([x, x])[:3] + m.a(x).relu()))


def leaks_by_a_hook(m, x):
    seen = []
    handle = m.block.inner.register_forward_hook(lambda module, args, output: seen.append(output))
    try:
        hidden = m.block(x)
        return m.b(hidden).sum() + seen[0].mean()
    finally:
        handle.remove()


def leaks_by_a_list(m, x):
    hidden = m.block(x)
    return m.b(hidden).sum() + m.block.losses.pop().mean()


def leaks_into_another_layer(m, x):
    hidden = m.block(x)
    return m.b(hidden + m.block.losses.pop()).sum()


def leaks_into_a_log(m, x):
    hidden = m.block(x)
    m.log("inner", m.block.losses.pop())
    return m.b(hidden).sum()


def leaks_into_the_result(m, x):
    hidden = m.block(x)
    return {"loss": m.b(hidden).sum(), "inner": m.block.losses.pop()}


def input_changed_in_place(m, x):
    hidden = m.a(x)
    out = m.changes(hidden)
    return (m.b(out) + hidden).sum()


def view_of_an_input_changed_in_place(m, x):
    hidden = m.a(x)
    part = hidden[0]
    out = m.changes(hidden)
    return (m.b(out) + part).sum()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.losses = []

    def forward(self, x):
        hidden = self.inner(x)
        self.losses.append(hidden.square().mean())
        return hidden + x


class ChangesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        x.mul_(2)
        return self.inner(x)


ERRORS = [
    (leaks_by_a_list, "inside of the layer 'block' is used outside.*Return it from the layer"),
    (leaks_into_another_layer, "inside of the layer 'block' is used outside"),
    (leaks_into_a_log, "inside of the layer 'block' is used outside"),
    (leaks_into_the_result, "inside of the layer 'block' is used outside"),
    (input_changed_in_place, "The layer 'changes' changes its input in place.*Clone it"),
    (view_of_an_input_changed_in_place, "The layer 'changes' changes its input in place"),
]


@pytest.mark.parametrize(("step", "words"), ERRORS, ids=[step.__name__ for step, _ in ERRORS])
def test_what_cannot_be_followed(step, words):
    model = Model(step, **linears("a b"), block=Block(), changes=ChangesItsInput())
    with pytest.raises(LayerError, match=f"(?s){words}"):
        follow(model, X)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (again_with_others_between, ["a:", "b: a", "a#1: b", "tail: a#1"]),
        (
            twice_from_the_start,
            [
                *("a:", "b: a/1.1", "a#1:", "b#1: a/3.2", "tail: b/4.1"),
                *("a/1.1: a", "a/3.1: a#1", "a/3.2: a/3.1", "b/4.1: b b#1"),
            ],
        ),
        # What the step looks at, every stage has to know that goes on with it.
        (
            after_a_look,
            [
                *("a:", "b: a", "a#1: b/2.2", "b#1: a#1", "tail: b#1"),
                *("b/2.1: b", "b/2.2: b/2.1", "control: b/2.2"),
            ],
        ),
    ],
)
def test_a_layer_may_be_called_again_behind_others(step, expected):
    model = Model(step, **linears("a b"))
    assert table(follow(model, X), model)[:-1] == expected


def test_what_a_hook_is_called_with_is_as_if_the_layer_returned_it():
    model = Model(leaks_by_a_hook, **linears("a b"), block=Block())
    assert table(follow(model, X), model) == [
        "block:",
        "b: block",
        "tail: b/2.3",
        "b/2.1: b",
        "b/2.2: block.4",
        "b/2.3: b/2.1 b/2.2",
        "grad: b b/2.1 b/2.2 b/2.3 block block.4",
    ]


def test_an_input_changed_in_place_and_not_used_again_is_fine():
    def step(m, x):
        hidden = m.a(x)
        kept = hidden.clone()
        return (m.b(m.changes(hidden)) + kept).sum()

    model = Model(step, a=nn.Linear(4, 4), changes=ChangesItsInput(), b=nn.Linear(4, 4))
    assert table(follow(model, X), model) == [
        "a:",
        "changes: a",
        "b: changes",
        "tail: b/3.2",
        "a/1.1: a",
        "b/3.1: a/1.1 b",
        "b/3.2: b/3.1",
        "grad: a a/1.1 changes b b/3.1 b/3.2",
    ]


def test_a_layer_that_returns_its_changed_input_is_fine():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x.add_(self.weight)

    model = Model(
        lambda m, x: m.b(m.adds(m.a(x))).sum(), a=nn.Linear(4, 4), adds=Adds(), b=nn.Linear(4, 4)
    )
    trace = follow(model, X)
    assert table(trace, model)[:3] == ["a:", "adds: a", "b: adds"]


class Calls(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.other = [other]  # hidden from the module tree

    def forward(self, x):
        return self.other[0](self.inner(x))


def test_a_layer_inside_a_layer():
    b = nn.Linear(4, 4)
    model = Model(lambda m, x: m.a(x).sum(), a=Calls(b), b=b)
    with pytest.raises(LayerError, match="The layer 'a' calls the layer 'b'"):
        follow(model, X)


def test_a_step_that_calls_no_layer():
    model = Model(lambda m, x: x.sum(), **linears("a b"))
    assert table(follow(model, X), model) == ["tail:", "grad:"]


def test_a_layer_is_called_again_on_what_it_returned():
    model = Model(lambda m, x: m.b(m.a(m.a(x).relu() + x)).sum(), **linears("a b"))
    trace = follow(model, X)
    assert table(trace, model)[:3] == ["a:", "a#1: a/1.2", "b: a#1"]
    # All of that is on one stage.
    assert payloads(trace, model)[1] == "a#1"


# --- parameters used directly, draws, shapes ---


def touched(step, **parts):
    model = Model(step, **(linears("a b c") | parts))
    trace = follow(model, X)
    of = {id(parameter): name for name, parameter in model.named_parameters()}
    return {of[identity]: layers for identity, layers in trace.touched.items()}


def test_tying_by_a_function():
    found = touched(lambda m, x: F.linear(m.b(m.a(x)), m.a.weight).sum())
    assert found == {"a.weight": set()}


def test_parameters_used_between_layers():
    def step(m, x):
        hidden = m.a(x * m.scale)
        hidden = m.b(hidden * m.scale)
        return m.c(hidden).sum() + m.b.bias.norm()

    assert touched(step, scale=nn.Parameter(torch.ones(4))) == {
        "scale": set(),
        "b.bias": set(),
    }


def test_a_parameter_of_another_layer_or_of_none_used_inside_a_layer():
    class Uses(nn.Module):
        def __init__(self, foreign):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.foreign = [foreign]

        def forward(self, x):
            return F.linear(self.inner(x), self.foreign[0])

    a = nn.Linear(4, 4)
    scale = nn.Parameter(torch.ones(4, 4))
    found = touched(lambda m, x: m.c(m.b(m.a(x))).sum(), a=a, b=Uses(a.weight), c=Uses(scale))
    assert found == {"a.weight": {1}}
    found = touched(
        lambda m, x: m.c(m.b(m.a(x))).sum(), a=a, b=Uses(a.weight), c=Uses(scale), scale=scale
    )
    assert found == {"a.weight": {1}, "scale": {2}}


@pytest.mark.parametrize(
    "ask",
    [
        lambda p: p.dtype,
        lambda p: p.shape,
        lambda p: p.ndim,
        lambda p: p.size(0),
        lambda p: p.dim(),
        lambda p: p.numel(),
        lambda p: p.requires_grad,
        lambda p: p.is_floating_point(),
        lambda p: len(p),
    ],
)
def test_what_every_stage_knows_of_a_parameter(ask):
    def step(m, x):
        ask(m.c.weight)
        return m.c(m.b(m.a(x))).sum()

    assert touched(step) == {}


@pytest.mark.parametrize("ask", [lambda p: p.device, lambda p: p.sum(), lambda p: p.is_cuda])
def test_what_only_its_holder_knows_of_a_parameter(ask):
    def step(m, x):
        ask(m.c.weight)
        return m.c(m.b(m.a(x))).sum()

    assert touched(step) == {"c.weight": set()}


def draws_for_placeholders_once(m, x):
    return m.c(F.dropout(m.b(m.a(x)))).sum()


def draws_for_placeholders_twice(m, x):
    hidden = m.b(m.a(x))
    return m.c(F.dropout(hidden) + F.dropout(hidden)).sum()


def draws_for_the_batch(m, x):
    return m.c(m.b(m.a(x) * torch.rand(4)) * torch.rand(4)).sum()


def draws_for_placeholders_then_for_the_batch(m, x):
    hidden = F.dropout(m.a(x))
    return m.c(m.b(hidden + torch.rand(4))).sum()


def draws_for_the_batch_then_for_placeholders(m, x):
    noise = torch.rand(4)
    return m.c(m.b(F.dropout(m.a(x)) + noise)).sum()


def draws_for_the_batch_and_for_placeholders_in_one_gap(m, x):
    hidden = m.a(x)
    noise = torch.rand(4)
    return m.c(m.b(F.dropout(hidden) + noise)).sum()


def drawing_intervals(trace):
    return {interval for (interval, _), entry in trace.entries.items() if entry.draws}


DRAWS = [
    (chain, set()),
    (draws_for_placeholders_once, set()),
    (draws_for_placeholders_twice, {2}),
    (draws_for_the_batch, set()),
    (draws_for_placeholders_then_for_the_batch, {1}),
    (draws_for_the_batch_then_for_placeholders, set()),
    # What is drawn last upsets nothing behind it.
    (draws_for_the_batch_and_for_placeholders_in_one_gap, set()),
]


@pytest.mark.parametrize(("step", "intervals"), DRAWS, ids=[step.__name__ for step, _ in DRAWS])
def test_where_placeholders_have_to_use_up_draws(step, intervals):
    model = Model(step, **linears("a b c"))
    assert drawing_intervals(follow(model, X)) == intervals


class OnADevice:
    """Streams of a device with a generator of its own, as a GPU has."""

    generator = torch.Generator()

    def go_to(self, event):
        pass

    def torch_states(self):
        return [torch.default_generator.get_state(), self.generator.get_state()]


def draws_on_the_device(m, x):
    hidden = F.dropout(m.a(x))
    return m.c(m.b(hidden + torch.rand(4, generator=OnADevice.generator))).sum()


def test_draws_on_the_device_are_noticed():
    model = Model(draws_on_the_device, **linears("a b c"))
    assert drawing_intervals(follow(model, X, streams=OnADevice())) == {1}


def test_dropout_inside_a_layer_is_not_the_users_draw():
    block = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = Model(lambda m, x: m.b(m.a(x[None])).sum(), a=block, b=nn.Linear(4, 4))
    assert drawing_intervals(follow(model, X)) == set()


SHAPES = [
    (lambda m, x: m.a(x[x[:, 0] > 0]), True),
    (lambda m, x: m.a(x)[x[:, 0] > 0], True),
    (lambda m, x: m.a(x)[x > 0], True),
    (lambda m, x: m.a(x)[:, : int(x.long().abs().max())], True),
    (lambda m, x: m.a(x[x.nonzero()[0]]), True),
    (lambda m, x: m.a(x) * len(x[:, 0].unique()), True),
    (lambda m, x: m.a(x) * torch.where(x > 0, 1.0, 2.0), False),
    (lambda m, x: m.a(x) * (x.mean().item() + 1.0), False),
    (lambda m, x: m.a(x) if (x < 100).all() else m.a(-x), False),
    (lambda m, x: m.a(x)[torch.tensor([0, 2])], False),
    (lambda m, x: m.a(x[:, : x.shape[1]]), False),
    (lambda m, x: F.cross_entropy(m.a(x), x.argmax(1)), False),
]


@pytest.mark.filterwarnings("error::DeprecationWarning")
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_whether_shapes_are_made_of_the_batchs_values(number):
    step, shaped = SHAPES[number]
    model = Model(lambda m, x: step(m, x).sum(), **linears("a"))
    assert follow(model, X).is_shaped_by_batch == shaped


def test_a_batch_that_requires_a_gradient_is_computed_on_every_stage():
    def step(m, x):
        penalty = m.b.weight.square().mean()
        return m.b(m.a(x.clone().requires_grad_() + 1)).sum() + penalty

    entries = follow(Model(step, **linears("a b")), X).entries
    assert [(key, entry.name) for key, entry in entries.items()] == [
        ((0, 1), "square"),
        ((0, 2), "mean"),
        ((2, 1), "sum"),
        ((2, 2), "add"),
    ]


def test_a_reentrant_checkpoint():
    def step(m, x):
        return m.c(checkpoint(m.b, m.a(x), use_reentrant=True)).sum()

    model = Model(step, **linears("a b c"))
    assert table(follow(model, X), model)[-1] == "grad: a b c c/3.1"


def test_the_stopwatch_times_each_layer_and_nothing_changes():
    streams = RandomStreams(CPU)
    stopwatch = Stopwatch(CPU, streams)
    model = Model(chain, **linears("a b c"))
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    trace = follow(model, X, stopwatch=stopwatch)
    assert table(trace, model)[-1] == "grad: a b c c/3.1"
    assert sorted(stopwatch.figures) == [0, 1, 2]
    assert torch.equal(torch.rand(3), expected)


def test_what_a_stage_takes_part_in():
    def step(m, x):
        one = m.b(m.a(x))
        two = m.b(m.a(x + 1).relu())
        return m.c(one + two)

    model = Model(step, **linears("a b c"))
    trace = follow(model, X)
    first, second, third = (trace.part(range(at, at + 1)) for at in range(3))
    assert [set(part.calls) for part in (first, second, third)] == [{0, 2}, {1, 3}, {4}]
    assert [set(part.intervals) for part in (first, second, third)] == [{3}, {4}, set()]
    assert [interval for interval in range(6) if not first.is_over(interval)] == [0, 1, 2]
    assert [interval for interval in range(6) if not second.is_over(interval)] == [0, 1, 2, 3]
    # Without layers, it goes as far as there are calls of earlier ones.
    assert trace.part(range(1, 1)).last_call == 0
    assert trace.part(range(3, 3)).last_call == 4


def waits(m, x):
    hidden = m.a(x)
    while hidden.norm() > 1:
        hidden = hidden * 0.5
    return m.c(m.b(hidden)).sum()


def waits_for_a_flag(m, x):
    hidden, is_done = m.a(x), False
    while not is_done:
        hidden = hidden * 0.5
        is_done = hidden.norm() < 1
    return m.c(m.b(hidden)).sum()


def repeats_layers(m, x):
    is_done = False
    while not is_done:
        x = m.b(m.a(x))
        is_done = x.norm() < 1
    return m.c(x).sum()


def asks_often(m, x):
    hidden = m.a(x)
    for _ in range(200):
        if hidden.norm() > 1:
            hidden = hidden * 0.5
    return m.c(m.b(hidden)).sum()


@pytest.mark.parametrize("step", [waits, waits_for_a_flag, repeats_layers, asks_often])
def test_loops_that_wait_for_a_value_end(step):
    trace = follow(Model(step, **linears("a b c")), X)
    assert [call.layer for call in trace.flow.calls] == [0, 1, 2]


def test_a_line_that_is_often_asked_may_be_asked_in_several_traces():
    """Its reads do not add up: a step is traced again to find out with what it can go on."""

    def step(m, x):
        hidden = m.a(x)
        for _ in range(40):
            if hidden.isnan().any():
                hidden = hidden * 0
        if hidden.sum() > 3:
            hidden = hidden + 1
        return m.b(hidden).sum()

    trace = follow(Model(step, **linears("a b")), X)
    assert [call.layer for call in trace.flow.calls] == [0, 1]


class Chooses(nn.Module):
    """Needs real tensors, as extensions in C++ do: the trace runs it on made-up ones."""

    def __init__(self, is_trained):
        super().__init__()
        self.router = nn.Linear(4, 2).requires_grad_(False)
        self.expert = nn.Linear(4, 4).requires_grad_(is_trained)

    def forward(self, x):
        if type(x) is not torch.Tensor:
            raise TypeError(f"a {type(x).__name__} has no memory")
        return x + self.expert(x), self.router(x)


@pytest.mark.parametrize("is_trained", [False, True])
def test_gradients_flow_through_frozen_parts_of_a_layer_that_needs_values(is_trained):
    def step(m, x):
        hidden, scores = m.b(m.a(x))
        return m.c(hidden).sum() + scores.square().sum()

    parts: dict[str, nn.Module] = {**linears("a c"), "b": Chooses(is_trained)}
    trace = follow(Model(step, a=parts["a"], b=parts["b"], c=parts["c"]), X)
    (index,) = {call.layer for call in trace.flow.calls if len(call.leaves) == 2}
    both = {Value(index, 0, 0), Value(index, 0, 1)}
    assert both <= trace.tracked
    assert both <= trace.flow.differentiable


def test_what_a_frozen_layer_makes_of_the_batch_needs_no_gradient():
    def step(m, x):
        hidden, scores = m.b(x)
        return m.c(hidden).sum() + scores.square().sum()

    trace = follow(Model(step, b=Chooses(False), c=linears("c")["c"]), X)
    assert not {value for value in trace.tracked if len(trace.flow.calls[value.layer].leaves) == 2}
