import copy

import pytest
import torch
from torch import nn

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.gates.gate import CurrentPass, Gate, StageDone, install, remove

X = torch.ones(2, 3)


class Doubles:
    """A pass that doubles what the layer returns, and notes who was called."""

    def __init__(self):
        self.visits = []

    def visit(self, gate, args, kwargs):
        self.visits.append((gate.name, len(args), dict(kwargs)))
        return gate.original(*args, **kwargs) * 2


class Scales(nn.Module):
    def forward(self, x, *, by=1):
        """Multiplies."""
        return x * by


@pytest.fixture
def layer():
    return Scales()


def test_a_copy_of_a_layer_is_a_layer_of_its_own():
    current_pass = CurrentPass()
    linear = nn.Linear(2, 2)
    net = nn.Sequential(linear, Scales())
    gates = [Gate(str(place), part, place, current_pass) for place, part in enumerate(net)]
    install(gates)
    copied = copy.deepcopy(net)
    with torch.no_grad():
        for parameter, value in zip(copied.parameters(), (0.0, 3.0), strict=True):
            parameter.fill_(value)
    assert torch.equal(copied(X[:, :2]), torch.full((2, 2), 3.0))
    assert not torch.equal(net(X[:, :2]), torch.full((2, 2), 3.0))
    current_pass.value = Doubles()
    assert torch.equal(copied(X[:, :2]), torch.full((2, 2), 3.0))


def test_outside_of_a_pass_the_layer_is_the_users_own(layer):
    gate = Gate("scales", layer, 0, CurrentPass())
    gate.install()
    assert torch.equal(layer(X, by=3), X * 3)
    assert layer.forward.__doc__ == "Multiplies."


def test_a_pass_answers_for_the_layer(layer):
    current_pass, doubles = CurrentPass(), Doubles()
    gate = Gate("scales", layer, 0, current_pass)
    gate.install()
    current_pass.value = doubles
    assert torch.equal(layer(X, by=3), X * 6)
    assert doubles.visits == [("scales", 1, {"by": 3})]
    current_pass.value = None
    assert torch.equal(layer(X), X)


def test_the_users_hooks_run_around_the_gate(layer):
    current_pass, seen = CurrentPass(), []
    layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    Gate("scales", layer, 0, current_pass).install()
    current_pass.value = Doubles()
    assert torch.equal(layer(X), X * 4)
    assert torch.equal(seen[0], X * 4)


def test_removing_leaves_no_trace(layer):
    before = dict(layer.__dict__)
    gate = Gate("scales", layer, 0, CurrentPass())
    gate.remove()  # before it was installed
    gate.install()
    assert layer.__dict__ != before
    gate.remove()
    gate.remove()
    assert layer.__dict__ == before
    assert torch.equal(layer(X, by=2), X * 2)


def test_a_forward_of_the_layers_own_comes_back(layer):
    def own(x):
        return x + 10

    layer.forward = own
    current_pass = CurrentPass()
    gate = Gate("scales", layer, 0, current_pass)
    gate.install()
    current_pass.value = Doubles()
    assert torch.equal(layer(X), X * 22)
    gate.remove()
    assert layer.forward is own


def test_a_gate_before_a_gate(layer):
    Gate("scales", layer, 0, CurrentPass()).install()
    with pytest.raises(LayerError, match="'scales' already has a gate: an earlier run"):
        Gate("scales", layer, 0, CurrentPass()).install()


def test_gates_may_come_again_after_they_were_removed(layer):
    for _ in range(3):
        current_pass = CurrentPass()
        gates = [Gate("scales", layer, 0, current_pass)]
        install(gates)
        current_pass.value = Doubles()
        assert torch.equal(layer(X), X * 2)
        remove(gates)
    assert torch.equal(layer(X), X)


def test_gates_are_no_part_of_the_model(layer):
    net = nn.Sequential(nn.Linear(3, 3), layer)
    names, state = [name for name, _ in net.named_modules()], list(net.state_dict())
    install(
        Gate(name, part, i, CurrentPass()) for i, (name, part) in enumerate(net.named_children())
    )
    assert [name for name, _ in net.named_modules()] == names
    assert list(net.state_dict()) == state


def test_user_code_that_handles_errors_lets_the_end_of_a_stage_through():
    def user_code():
        try:
            raise StageDone
        except Exception:
            return "swallowed"

    with pytest.raises(StageDone):
        user_code()
