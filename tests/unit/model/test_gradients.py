from typing import Any

import pytest
import torch

from lightning_pipeshift.compat.torch_private import USES_OF_ONE, storage_use_count
from lightning_pipeshift.model.parameters.gradients import like_a_result


def test_no_copy_is_made_and_the_tensor_is_no_leaf():
    source = torch.tensor([1.0, 2.0])
    result = like_a_result(source)
    assert result.requires_grad
    assert not result.is_leaf
    assert torch.equal(result, source)
    assert result.data_ptr() == source.data_ptr()
    assert not source.requires_grad


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
    result = like_a_result(values.clone())
    edge = torch.autograd.graph.get_gradient_edge(result)
    write(result)
    (gradient,) = torch.autograd.grad((result**2).sum(), [edge])

    plain: Any = values.clone().requires_grad_()
    same = plain * 1
    write(same)
    (same**2).sum().backward()
    assert torch.equal(gradient, plain.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_a_backward_ends_there(dtype):
    result = like_a_result(torch.ones(2, dtype=dtype))
    seen: list[Any] = []
    result.register_hook(seen.append)
    (result * 2).abs().sum().backward()
    assert seen[0].dtype == dtype


def test_the_graph_does_not_keep_its_memory():
    source = torch.ones(3)
    end = like_a_result(source) * 2
    memory = source.untyped_storage()
    assert storage_use_count(memory) == USES_OF_ONE
    end.sum().backward()
