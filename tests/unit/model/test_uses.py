import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_pipeshift.model.parameters.uses import (
    copies_in,
    flat_weights_forgotten,
    hold,
    parameter_uses,
    release,
    slots_of,
    substituted,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.ones(3))
        self.b.weight = self.a.weight

    @property
    def layers(self):
        return [self.a, self.b, self.norm]


def test_every_place_that_refers_to_a_tensor():
    net = Net()
    found = {(slot.name, slot.is_buffer, id(slot.get())) for slot in slots_of(net)}
    tensors = [net.a.weight, net.a.bias, net.norm.running_mean, net.scale]
    names = ["weight", "bias", "running_mean", "scale"]
    for name, tensor in zip(names, tensors, strict=True):
        assert (name, name == "running_mean", id(tensor)) in found
    assert sum(slot.get() is net.a.weight for slot in slots_of(net)) == 2


def test_substitution_is_undone_even_after_an_error():
    net = Net()
    before = {name: id(tensor) for name, tensor in net.state_dict(keep_vars=True).items()}
    other = torch.zeros(3, 3)

    def fail_inside():
        with substituted(slots_of(net), {id(net.a.weight): other}):
            assert net.a.weight is other
            assert net.b.weight is other
            assert isinstance(net.scale, nn.Parameter)
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail_inside()
    assert {n: id(t) for n, t in net.state_dict(keep_vars=True).items()} == before


def test_who_uses_which_parameter():
    net = Net()
    uses = {use.name: use for use in parameter_uses(net, net.layers)}
    assert list(uses) == [name for name, _ in net.named_parameters()]

    own = uses["a.bias"]
    assert (own.layers, own.everywhere, own.is_shared) == ((0,), False, False)
    tied = uses["a.weight"]
    assert (tied.layers, tied.everywhere, tied.is_shared) == ((0, 1), False, True)
    assert tied.is_tied
    loose = uses["scale"]
    assert loose.layers == ()
    assert loose.everywhere
    assert loose.is_shared


@pytest.mark.parametrize(
    ("stage_of", "num_stages", "expected"),
    [
        ([0, 0, 1], 2, {"a.weight": [0], "a.bias": [0], "norm.bias": [1], "scale": [0, 1]}),
        ([0, 1, 1], 2, {"a.weight": [0, 1], "a.bias": [0], "norm.bias": [1], "scale": [0, 1]}),
        ([0, 2, 2], 3, {"a.weight": [0, 2], "norm.bias": [2], "scale": [0, 1, 2]}),
        ([1, 1, 1], 3, {"a.weight": [1], "norm.weight": [1]}),
    ],
)
def test_who_holds_a_parameter(stage_of, num_stages, expected):
    net = Net()
    uses = {use.name: use for use in parameter_uses(net, net.layers)}
    assert {name: uses[name].holders(stage_of, num_stages) for name in expected} == expected


def test_releasing_and_holding_keeps_the_object():
    net, spare = Net(), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    values = net.a.weight.detach().clone()
    parameter: Any = net.a.weight
    parameter.grad = torch.ones(3, 3)
    parameter.mark = "the user's own"
    parameter.register_hook(lambda gradient: 2 * gradient)
    accumulated: list[Tensor] = []
    parameter.register_post_accumulate_grad_hook(lambda one: accumulated.append(one.grad))
    reference = parameter
    release(parameter, "it")
    assert net.a.weight is net.b.weight is reference is parameter
    assert isinstance(parameter, nn.Parameter)
    assert (parameter.is_meta, parameter.shape, parameter.grad) == (True, (3, 3), None)
    assert parameter.requires_grad
    release(parameter, "it")  # again: nothing happens
    assert list(net.state_dict()) == list(spare.state_dict())

    hold(parameter, values.clone())
    assert net.a.weight is reference
    assert optimizer.param_groups[0]["params"][1] is parameter
    assert parameter.mark == "the user's own"
    assert torch.equal(parameter, values)
    net.b(torch.ones(1, 3)).sum().backward()
    assert parameter.grad is not None
    optimizer.step()
    assert torch.allclose(net.b.weight, values - 0.2)
    assert len(accumulated) == 1


@pytest.mark.parametrize(
    "optimizer_class", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop]
)
def test_an_optimizer_steps_what_is_held_and_leaves_the_rest(optimizer_class):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain = copy.deepcopy(net)
    x = torch.ones(1, 2)
    optimizer = optimizer_class(net.parameters(), lr=0.1)
    for tensor in net[0].parameters():
        release(tensor, "it")
    plain_optimizer = optimizer_class(plain[1].parameters(), lr=0.1)
    for _ in range(2):
        for step, module in ((optimizer, net[1]), (plain_optimizer, plain[1])):
            step.zero_grad()
            module(x).sum().backward()
            step.step()
    for ours, theirs in zip(net[1].parameters(), plain[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert all(parameter.is_meta for parameter in net[0].parameters())


def test_strides_types_and_freezing_survive():
    parameter = nn.Parameter(torch.rand(4, 3).T.to(torch.bfloat16), requires_grad=False)
    release(parameter, "it")
    assert (parameter.stride(), parameter.dtype) == ((1, 3), torch.bfloat16)
    assert not parameter.requires_grad
    hold(parameter, torch.ones(3, 4, dtype=torch.bfloat16))
    assert not parameter.requires_grad
    assert parameter.sum() == 12


def test_buffers_too():
    norm: Any = nn.BatchNorm1d(3)
    buffer: Any = norm.running_mean
    release(buffer, "it")
    assert norm.running_mean is buffer
    assert buffer.is_meta
    hold(buffer, torch.full((3,), 2.0))
    assert norm.running_mean is buffer
    assert norm.running_mean.tolist() == [2.0] * 3
    assert not isinstance(buffer, nn.Parameter)


def test_tied_parameters_stay_tied():
    net = Net()
    release(net.b.weight, "b.weight")
    hold(net.a.weight, torch.eye(3))
    assert net.a.weight is net.b.weight
    assert torch.equal(net.b(torch.ones(1, 3)), torch.ones(1, 3))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_keep_weak_references(kind):
    net: Any = nn.Sequential(kind(3, 4, num_layers=2, bidirectional=True))
    x = torch.rand(2, 5, 3)
    expected = net[0](x)[0].detach()
    values = {name: p.detach().clone() for name, p in net.named_parameters()}
    with flat_weights_forgotten(net):
        for parameter in net.parameters():
            release(parameter, "it")
    assert all(parameter.is_meta for parameter in net.parameters())
    with flat_weights_forgotten(net):
        for name, parameter in net.named_parameters():
            hold(parameter, values[name])
    assert torch.equal(net[0](x)[0], expected)
    net[0](x)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
    with torch.no_grad():
        net[0].weight_ih_l0.zero_()
    assert not torch.equal(net[0](x)[0], expected), "the module does not see its new weights"


def test_a_weak_reference_of_the_users_own_goes_on_to_mean_the_parameter():
    parameter = nn.Parameter(torch.ones(2))
    reference = weakref.ref(parameter)
    release(parameter, "it")
    assert parameter.is_meta
    assert reference() is parameter
    hold(parameter, torch.ones(2))
    assert torch.equal(parameter, torch.ones(2))
    assert reference() is parameter


def test_a_parameter_that_is_part_of_a_graph():
    """A loss that somebody keeps still refers to the parameter's node."""
    parameter = nn.Parameter(torch.ones(2))
    kept = (parameter * 2).sum()
    release(parameter, "it")
    assert parameter.is_meta
    assert kept.item() == 4


def copied_pairs(root: nn.Module, called: list[str]) -> set[tuple[str, str]]:
    layers = [module for module in root.children() if list(module.parameters())]
    names = [name for name, module in root.named_children() if list(module.parameters())]
    indices = {names.index(name) for name in called}
    name_of = {id(module): name for name, module in root.named_modules()}
    uses = parameter_uses(root, layers, indices)
    return {(name_of[id(a)], name_of[id(b)]) for a, b in copies_in(root, uses, indices)}


def test_copies_are_known_by_their_structure():
    def encoder():
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))

    root = nn.Module()
    root.student, root.teacher, root.head = encoder(), encoder(), nn.Linear(2, 2)
    assert copied_pairs(root, ["student", "teacher", "head"]) == set()
    root.teacher.requires_grad_(False)
    assert copied_pairs(root, ["student", "teacher", "head"]) == {("teacher", "student")}
    root.teacher.requires_grad_(True)
    assert copied_pairs(root, ["student", "head"]) == {("teacher", "student")}
    student: Any = root.student
    root.teacher = AveragedModel(student)
    assert copied_pairs(root, ["student", "head"]) == {("teacher.module", "student")}
    layers: Any = [root.student, root.teacher]
    use = parameter_uses(root, layers, {0})[0]
    assert (use.name, use.layers) == ("student.0.weight", (0, 1))
    assert use.holders([0, 1], 3) == [0, 1]


def test_parts_of_frozen_blocks_are_no_copies():
    root = nn.Module()
    root.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)])
    root.head = nn.Linear(4, 2)
    root.blocks[:3].requires_grad_(False)
    assert copied_pairs(root, ["blocks", "head"]) == set()


def test_frozen_blocks_are_no_copies():
    root = nn.Module()
    root.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])
    root.head = nn.Linear(4, 2)
    root.blocks[:3].requires_grad_(False)
    assert copied_pairs(root, ["blocks", "head"]) == set()
    # An adapter that trains beside many frozen modules like it.
    root.blocks.requires_grad_(False)
    root.adapter = nn.Linear(4, 4)
    assert copied_pairs(root, ["blocks", "head", "adapter"]) == set()
