from typing import Any

import pytest
import torch

from lightning_pipeshift.model.parameters.gradient_box import GradientBox


def opened(source):
    box: Any = GradientBox(source)
    return box, box.open()


def test_the_gradient_is_in_the_box():
    source = torch.tensor([1.0, 2.0])
    box, tensor = opened(source)
    assert tensor.requires_grad
    assert not tensor.is_leaf
    assert torch.equal(tensor, source)
    assert not box.gradient
    (tensor**2).sum().backward()
    assert box.gradient.tolist() == [2.0, 4.0]


def test_no_copy_is_made():
    source = torch.ones(3)
    _, tensor = opened(source)
    assert tensor.data_ptr() == source.data_ptr()


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.mul_(3),
        lambda x: x.add_(1).mul_(3),
        lambda x: x.__setitem__(0, 0.0),
        lambda x: torch.nn.functional.relu(x, inplace=True),
        lambda x: x[1:].mul_(2),
        lambda x: x.view(3, 1).add_(torch.ones(3, 1, requires_grad=True)),
    ],
)
def test_user_code_may_write_to_it_in_place(write):
    values = torch.tensor([1.0, -2.0, 3.0])
    box, tensor = opened(values.clone())
    write(tensor)
    (tensor**2).sum().backward()

    plain: Any = values.clone().requires_grad_()
    same = plain * 1
    write(same)
    (same**2).sum().backward()
    assert torch.equal(box.gradient, plain.grad)


def test_uses_in_many_places_are_summed():
    box, tensor = opened(torch.ones(2))
    (tensor * 2 + tensor.sum() + tensor.detach() * 100).sum().backward()
    assert box.gradient.tolist() == [4.0, 4.0]


def test_what_is_not_used_has_no_gradient():
    box, _ = opened(torch.ones(2))
    other, tensor = opened(torch.ones(2))
    tensor.sum().backward()
    assert box.gradient is None
    assert other.gradient is not None


def test_gradient_seeds():
    """A later stage's gradients enter where the values left."""
    box, tensor = opened(torch.tensor([1.0, 2.0]))
    out, other = tensor * 3, tensor.exp()
    edges = [torch.autograd.graph.get_gradient_edge(part) for part in (out, other)]
    del out, other
    torch.autograd.backward(edges, [torch.tensor([1.0, 10.0]), torch.zeros(2)])
    assert box.gradient.tolist() == [3.0, 30.0]


def test_a_value_that_is_only_passed_on():
    box, tensor = opened(torch.ones(2))
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    torch.autograd.backward([edge], [torch.tensor([5.0, 6.0])])
    assert box.gradient.tolist() == [5.0, 6.0]


def test_a_value_used_and_passed_on():
    box, tensor = opened(torch.ones(2))
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    tensor.mul_(2)
    torch.autograd.backward([edge, tensor.sum()], [torch.tensor([5.0, 6.0]), torch.tensor(1.0)])
    assert box.gradient.tolist() == [7.0, 8.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_types(dtype):
    box, tensor = opened(torch.ones(2, dtype=dtype))
    (tensor * 2).abs().sum().backward()
    assert box.gradient.dtype == dtype


def test_after_an_evaluation_in_inference_mode():
    with torch.inference_mode():
        GradientBox(torch.ones(2)).open()
    box, tensor = opened(torch.ones(2))
    tensor.sum().backward()
    assert box.gradient.tolist() == [1.0, 1.0]


def test_several_backwards_of_one_graph():
    box, tensor = opened(torch.ones(2))
    (first,) = torch.autograd.grad(tensor.sum() * 2, tensor, retain_graph=True)
    assert first.tolist() == [2.0, 2.0]
    assert not box.gradient
    tensor.sum().backward()
    assert box.gradient.tolist() == [1.0, 1.0]
