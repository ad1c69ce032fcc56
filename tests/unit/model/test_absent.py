"""What stands for parameters that other stages hold."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.parameters.absent import AbsentTensor, set_in_run
from lightning_pipeshift.model.parameters.uses import hold, release


def test_a_released_parameter_stays_the_same_object_and_gets_its_values_back() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    parameter.note = "mine"  # type: ignore[attr-defined]
    values = parameter.detach().clone()
    release(parameter, "layer.weight")
    assert isinstance(parameter, AbsentTensor)
    assert isinstance(parameter, nn.Parameter)
    assert (parameter.shape, parameter.requires_grad) == ((2, 3), True)
    assert vars(parameter)["note"] == "mine"
    hold(parameter, values)
    assert torch.equal(parameter, values)
    assert type(parameter) is nn.Parameter
    assert vars(parameter)["note"] == "mine"


def test_writing_has_no_effect_and_all_else_is_an_error() -> None:
    parameter = nn.Parameter(torch.ones(2))
    release(parameter, "layer.weight")
    with torch.no_grad():
        assert parameter.mul_(2) is parameter
        parameter.copy_(torch.zeros(2))
    assert "layer.weight" in repr(parameter)
    for use in (torch.sum, torch.zeros_like, lambda x: torch.ones(2).add_(x)):
        with pytest.raises(LayerError, match=r"'layer\.weight', which another stage holds"):
            use(parameter)


def test_copies_have_no_values_either() -> None:
    layer = nn.Linear(2, 2)
    release(layer.weight, "weight")
    for copied in (layer.weight.detach(), layer.weight.clone(), copy.deepcopy(layer).weight):
        with pytest.raises(LayerError, match="'weight'"):
            copied.sum()


def test_it_is_pickled_behind_a_run_only() -> None:
    parameter = nn.Parameter(torch.ones(2))
    release(parameter, "weight")
    set_in_run(True)
    try:
        with pytest.raises(LayerError, match=r"trainer\.save_checkpoint"):
            pickle.dumps(parameter)
    finally:
        set_in_run(False)
    assert isinstance(pickle.loads(pickle.dumps(parameter)), AbsentTensor)
