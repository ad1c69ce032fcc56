"""What a stage receives has the layout that the sender's tensor has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_pipeshift.runtime.comm.messages import Key, Kind, Place
from tests.unit.step.together import Stages

KEY, PLACE = Key(0, 0, 0, Kind.GRADIENT, 0, 1), Place("x", 0, "line")


def viewed() -> Tensor:
    return torch.arange(8.0).view(4, 1, 1, 2).permute(0, 3, 1, 2)


def alone() -> Tensor:
    return torch.empty_strided((4, 2, 1, 1), (2, 1, 2, 2)).copy_(viewed())


def received(tensor: Tensor) -> Tensor:
    """What another stage gets of a tensor."""
    stages = Stages(2, seed=0)

    def work(stage: int) -> Tensor | None:
        mailbox = stages.mailboxes[stage]
        if stage == 0:
            mailbox.send(1, KEY, PLACE, tensor)
            return None
        return mailbox.take(KEY, PLACE).tensor(tensor.dtype, tensor.shape)

    _, found = stages.run(work)
    assert found is not None
    return found


@pytest.mark.parametrize("make", [viewed, alone])
def test_strides_of_dimensions_of_size_one_travel(make: Callable[[], Tensor]) -> None:
    """Torch calls such a tensor contiguous, and in both formats; its kernels look at strides. And
    autograd adds to it in place, or makes a new one in the usual format.
    """
    tensor = make()
    assert tensor.is_contiguous()
    found = received(tensor)
    assert found.equal(tensor)
    assert found.stride() == tensor.stride() == (2, 1, 2, 2)
    assert found._is_view() == tensor._is_view() == (make is viewed)


def test_the_stride_of_one_sample_travels() -> None:
    """Of a transposed result of a convolution, say: it decides which kernel a linear layer runs."""
    tensor = torch.arange(24.0).view(1, 6, 4).transpose(1, 2)
    found = received(tensor)
    assert found.equal(tensor)
    assert found.stride() == tensor.stride() == (24, 1, 4)
