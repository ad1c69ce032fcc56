"""Weight stashing on one stage, without a pipeline."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeshift.plan.schedule.actions import Action, Kind
from lightning_pipeshift.runtime.ownership.weight_versions import WeightVersions


class OnItsOwn(torch.autograd.Function):
    """A product whose backward reads the parameter that it has kept by itself."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.weight, gradient


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[2.0]]))

    def forward(self, x):
        # Autograd saves a view of the weight.
        return nn.functional.linear(x, self.weight)


def stage(delays=False):
    module = Transposed()
    versions = WeightVersions(delays)
    versions.follow(module.parameters())
    return module, versions


def forward(versions, number, function, x):
    action = Action(Kind.FORWARD, number)
    versions.begin_action(action)
    result = function(x)
    versions.end_action(action)
    return result


def backward(versions, number, result):
    action = Action(Kind.BACKWARD, number)
    versions.begin_action(action)
    result.sum().backward()
    versions.end_action(action)


def update(versions, weight, gradient=1.0):
    weight.grad = torch.full_like(weight, gradient)
    with versions.updating([weight]):
        torch.optim.SGD([weight], lr=1.0).step()
    weight.grad = None


WAYS = {
    "a view that autograd saves": lambda module: module,
    "recomputation": lambda module: lambda x: checkpoint(module, x, use_reentrant=False),
    "a parameter that a function keeps": lambda module: lambda x: OnItsOwn.apply(x, module.weight),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_backward_has_the_weights_of_its_forward(way):
    module, versions = stage()
    inputs = [torch.ones(1, 1, requires_grad=True) for _ in range(3)]
    results = []
    for number, x in enumerate(inputs):
        results.append(forward(versions, number, WAYS[way](module), x))
        update(versions, module.weight)
    assert [result.item() for result in results] == [2.0, 1.0, 0.0]
    for number, (x, result) in enumerate(zip(inputs, results, strict=True)):
        backward(versions, number, result)
        assert x.grad == 2.0 - number
        # User code between the calls sees the newest.
        assert module.weight.item() == -1.0


def test_a_copy_is_made_only_where_a_minibatch_in_flight_needs_it():
    module, versions = stage()
    pointer = module.weight.data_ptr()
    update(versions, module.weight)
    assert module.weight.data_ptr() == pointer
    result = forward(versions, 0, module, torch.ones(1, 1))
    update(versions, module.weight)
    assert (versions.num_versions, module.weight.data_ptr() != pointer) == (2, True)
    pointer = module.weight.data_ptr()
    update(versions, module.weight)
    assert (versions.num_versions, module.weight.data_ptr()) == (2, pointer)
    backward(versions, 0, result)
    assert versions.num_versions == 1


def test_a_change_that_user_code_makes_in_place_is_still_noticed():
    module, versions = stage()
    result = forward(versions, 0, module, torch.ones(1, 1, requires_grad=True))
    with torch.no_grad():
        module.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(versions, 0, result)
    versions.forget()


def test_two_versions():
    """Weights before updates 0, 1, 2, ... are 2, 1, 0, ...; each update has two minibatches, and
    the one before may be made here before the first or the second of them.
    """
    for is_ahead in (False, True):
        module, versions = stage(delays=True)
        found = []
        for number in range(8):
            versions.update, second = divmod(number, 2)
            if versions.update and second == (not is_ahead):
                update(versions, module.weight)
            result = forward(versions, number, module, torch.ones(1, 1))
            backward(versions, number, result)
            found.append(result.item())
            assert versions.num_versions <= 2
        assert found == [2, 2, 2, 2, 1, 1, 0, 0]


def test_weights_that_are_being_sent_do_not_change():
    module, versions = stage()
    sent = module.weight.data
    versions.pin([sent])
    update(versions, module.weight)
    assert (sent.item(), module.weight.item()) == (2.0, 1.0)
    versions.unpin([sent])
    newest = module.weight.data
    update(versions, module.weight)
    assert newest.item() == module.weight.item() == 0.0
