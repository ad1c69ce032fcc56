from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_pipeshift.runtime.planning.update_memory import UpdateMemory, update_memory

CPU = torch.device("cpu")


def memory_of(kind: type[torch.optim.Optimizer], **options: Any) -> UpdateMemory:
    optimizer: Any = kind([nn.Parameter(torch.zeros(3))], **options)
    return update_memory([optimizer], CPU)


def test_one_parameter_after_the_other():
    # The square root of the second moment, and the denominator; the latter remains for a moment.
    memory = memory_of(torch.optim.AdamW, foreach=False)
    assert memory == UpdateMemory(2.0, 1.0)
    assert memory.num_bytes([100, 10, 50]) == 200
    assert memory.num_bytes([100, 80]) == 260
    assert memory.num_bytes([]) == 0


def test_all_at_once():
    memory = memory_of(torch.optim.AdamW, foreach=True)
    assert memory == UpdateMemory(1.0, 0.0, at_once=True)
    assert memory.num_bytes([100, 10, 50]) == 160


@pytest.mark.parametrize(
    ("kind", "options"), [(torch.optim.AdamW, {"fused": True}), (torch.optim.SGD, {"lr": 0.1})]
)
def test_nothing(kind, options):
    assert memory_of(kind, **options) == UpdateMemory()


class Strange(torch.optim.SGD):
    def __init__(self, params, wanted):
        super().__init__(params, lr=0.1)


def test_the_most_demanding_counts_and_one_that_cannot_be_tried_does_not():
    parameters = [nn.Parameter(torch.zeros(3))]
    optimizers = [
        torch.optim.SGD(parameters, lr=0.1),
        torch.optim.Adam(parameters, foreach=False),
        Strange(parameters, 3),
        torch.optim.LBFGS(parameters),
    ]
    assert update_memory(optimizers, CPU) == UpdateMemory(2.0, 1.0)


def test_nothing_of_the_run_changes():
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([parameter])
    seen: list[Any] = []
    hook = register_optimizer_step_post_hook(lambda *args: seen.append(args))
    state = torch.get_rng_state()
    try:
        update_memory([optimizer], CPU)
    finally:
        hook.remove()
    assert not optimizer.state
    assert not seen
    assert torch.equal(torch.get_rng_state(), state)
