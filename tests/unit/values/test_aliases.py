import gc

import pytest
import torch
from torch import Tensor

from lightning_pipeshift.values.aliases import Aliases


@pytest.mark.parametrize("is_young", [True, False])
def test_finds_the_other_tensors_with_a_memory(is_young: bool):
    tensor = torch.ones(3)
    alias, view, other = tensor.detach(), tensor[1:], torch.ones(3)
    if not is_young:
        gc.collect()
    (found,) = (x for x in Aliases().of(tensor) if x is not view)
    assert found is alias
    assert Aliases().of(other) == []


def test_tensors_without_a_storage_are_passed_over():
    tensor, sparse = torch.ones(3), torch.eye(3).to_sparse()
    alias = tensor.detach()
    found: list[list[Tensor]] = []

    def look(each: Tensor) -> Tensor:
        # What `vmap` passes has no storage either.
        found.append(Aliases().of(tensor))
        return each

    torch.vmap(look)(torch.ones(2, 3))
    assert [x is alias for x in found[0]] == [True]
    assert Aliases().of(sparse) == []
