"""Tensors that are on other stages never answer falsely: a value, a tensor of their kind, or an
error that says what to do.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.parameters.remote_tensor import RemoteTensor, set_owner_lookup, swap

DECAY = 0.9


class Known:
    """Stage 0 of three; `a` and `b` are on stage 1, `c` is on stage 2."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.held: list[Tensor] = []
        self.kept: list[Tensor] = []
        self.copies: dict[int, str] = {}

    def stages_of(self, names: Collection[str]) -> set[int]:
        stages = {"a": {1}, "b": {1}, "c": {2}, "here": {0}}
        return set.intersection({0, 1, 2}, *(stages[name] for name in names))

    def is_held(self, tensor: Tensor) -> bool:
        return any(_memory(one) == _memory(tensor) for one in self.held)

    def copied(self, tensor: Tensor) -> str | None:
        return self.copies.get(_memory(tensor))

    def aliases(self, tensor: Tensor, afresh: bool = False) -> list[Tensor]:
        return [one for one in self.kept if _memory(one) == _memory(tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.fixture(autouse=True)
def known() -> Iterator[Known]:
    knowing = Known()
    set_owner_lookup(knowing)
    yield knowing
    set_owner_lookup(None)


def elsewhere(name: str = "a", shape: tuple[int, ...] = (3, 4)) -> Any:
    """A parameter that is on another stage."""
    parameter = nn.Parameter(torch.ones(shape))
    swap(parameter, RemoteTensor.like(parameter, [name], is_the_models=True))
    return parameter


def computed_from(tensor: Tensor) -> frozenset[str]:
    assert isinstance(tensor, RemoteTensor)
    return tensor.computed_from


def test_a_parameter_stays_itself() -> None:
    parameter = nn.Parameter(torch.ones(3, 4))
    parameter.note = "the user's own"  # type: ignore[attr-defined]
    fired = []
    parameter.register_post_accumulate_grad_hook(lambda p: fired.append(p))
    module = nn.Linear(4, 3)
    module.weight = parameter
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    swap(parameter, RemoteTensor.like(parameter, ["a"], is_the_models=True))
    assert module.weight is parameter
    assert optimizer.param_groups[0]["params"][0] is parameter
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert parameter.is_meta
    # Tensors that are made for it are to have values.
    assert parameter.device.type == "cpu"
    assert (parameter.shape, parameter.dtype) == ((3, 4), torch.float32)
    assert parameter.numel() == 12
    assert torch.equal(parameter, parameter)
    assert "weight" in module.state_dict()
    module.to("cpu").double()
    assert module.weight is parameter
    assert parameter.dtype == torch.float64
    swap(parameter, nn.Parameter(torch.zeros(3, 4)))
    assert type(parameter) is nn.Parameter
    assert parameter.note == "the user's own"  # type: ignore[attr-defined]
    assert not hasattr(parameter, "computed_from")
    parameter.sum().backward()
    assert fired == [parameter]


def _lerp_at_once(average: Tensor, parameter: Tensor) -> None:
    torch._foreach_lerp_([average], [parameter], 1 - DECAY)


def _assign(average: Tensor, parameter: Tensor) -> None:
    with torch.no_grad():
        average.mul_(DECAY)
        average += (1 - DECAY) * parameter


UPDATES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda a, p: a.mul_(DECAY).add_(p, alpha=1 - DECAY),
    "sub_": lambda a, p: a.sub_((1 - DECAY) * (a - p)),
    "mul_": lambda a, p: a.mul_(p),
    "copy_": lambda a, p: a.copy_(p),
    "lerp_": lambda a, p: a.lerp_(p, 1 - DECAY),
    "addcmul_": lambda a, p: a.addcmul_(p, p),
    "foreach": _lerp_at_once,
    "+=": _assign,
    "out": lambda a, p: torch.add(p, p, out=a),
    "detach": lambda a, p: a.detach().add_(p),
    "data": lambda a, p: a.data.mul_(DECAY).add_(p),
    "slice of all": lambda a, p: a[:].copy_(p),
}


@pytest.mark.parametrize("name", UPDATES)
def test_what_is_written_with_it_is_there_too(name: str, known: Known) -> None:
    average = torch.ones(3, 4)
    known.kept = [average]
    UPDATES[name](average, elsewhere().detach())
    assert isinstance(average, RemoteTensor)
    assert average.computed_from == {"a"}
    with pytest.raises(LayerError, match=r"'a'.*stage 1"):
        average.sum().item()


@pytest.mark.parametrize("name", UPDATES)
def test_writing_to_it_does_nothing_here(name: str) -> None:
    average = elsewhere().detach().clone()
    UPDATES[name](average, torch.ones(3, 4))
    UPDATES[name](average, elsewhere("b").detach())
    assert isinstance(average, RemoteTensor)
    assert average.computed_from == {"a", "b"}


def test_lists_may_be_partly_here() -> None:
    averages = [torch.ones(2), torch.ones(3, 4)]
    parameters = [torch.full((2,), 3.0), elsewhere().detach()]
    torch._foreach_mul_(averages, 0.5)
    torch._foreach_add_(averages, parameters, alpha=2.0)
    assert averages[0].tolist() == [6.5, 6.5]
    assert isinstance(averages[1], RemoteTensor)
    first, second = torch._foreach_mul(parameters, [2.0, 3.0])
    assert first.tolist() == [6.0, 6.0]
    assert isinstance(second, RemoteTensor)


def test_results_live_where_their_inputs_live() -> None:
    p, q = elsewhere("a").detach(), elsewhere("b").detach()
    assert computed_from(0.5 * p + 0.5 * q) == {"a", "b"}
    for made in (p.clone(), p.view(-1)[2:], torch.zeros_like(p), torch.ones(3, 4) * p):
        assert computed_from(made) == {"a"}
    total = torch.zeros(())
    total += p.norm()
    assert isinstance(total, RemoteTensor)
    with pytest.raises(LayerError, match=r"'a' on stage 1; 'c' on stage 2"):
        p + elsewhere("c").detach()


def test_assigned_data() -> None:
    key, query = elsewhere("a"), elsewhere("b")
    key.data = key.data * DECAY + query.data * (1 - DECAY)
    assert isinstance(key, nn.Parameter)
    # It is what it is, whatever it was made of.
    assert computed_from(key) == {"a"}
    key.data = torch.zeros(2)
    assert isinstance(key, RemoteTensor)
    assert key.shape == (2,)
    with pytest.raises(RuntimeError):
        torch.ones(3, 4).data = query.data


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda p: p.sum().item(),
    "bool": lambda p: bool((p > 0).any()),
    "float": lambda p: float(p.norm()),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy(),
    "array": lambda p: np.asarray(p.detach()),
    "format": lambda p: f"{p.sum():.3f}",
    "equal": lambda p: torch.equal(p, p.clone()),
    "allclose": lambda p: torch.allclose(p, p.clone()),
    "nonzero": lambda p: p.nonzero(),
    "mask": lambda p: torch.ones(3, 4)[p > 0],
    "tensor": lambda p: torch.tensor([p.detach().sum()]),
    "max": lambda p: max(p.detach().flatten()),
    "save": lambda p: torch.save(p, io.BytesIO()),
    # As safetensors does.
    "data_ptr": lambda p: p.data_ptr(),
}


@pytest.mark.parametrize("name", READS)
def test_reading_is_an_error(name: str) -> None:
    with pytest.raises(LayerError, match=r"'a'.*stage 1"):
        READS[name](elsewhere())


def test_a_parameter_of_this_stage_cannot_follow(known: Known) -> None:
    mine = nn.Parameter(torch.ones(3, 4))
    known.held = [mine]
    for target in (mine, mine.data, mine.detach().view(-1)):
        with (
            pytest.raises(LayerError, match=r"`add_` writes a value computed from 'a'"),
            torch.no_grad(),
        ):
            target.add_(elsewhere().detach().view(target.shape))
    assert torch.equal(mine.detach(), torch.ones(3, 4))


def test_nobody_goes_on_with_old_values() -> None:
    whole = torch.ones(3, 4)
    part = whole[0]
    with pytest.raises(LayerError, match="a part of a larger"):
        part.copy_(elsewhere(shape=(4,)).detach())
    with pytest.raises(LayerError, match="a part of a larger"):
        whole.detach().add_(elsewhere().detach())
    array = np.ones((3, 4), dtype=np.float32)
    with pytest.raises(LayerError, match="a part of a larger"):
        torch.from_numpy(array)[:].add_(elsewhere().detach())
    assert torch.equal(whole, torch.ones(3, 4))


def test_random_numbers_are_drawn_as_where_it_is() -> None:
    torch.manual_seed(1)
    noise = torch.randn(3, 4)
    noise.normal_()
    torch.nn.functional.dropout(noise, 0.5)
    expected = torch.rand(2)
    torch.manual_seed(1)
    absent = torch.randn_like(elsewhere())
    absent.normal_()
    torch.nn.functional.dropout(absent, 0.5)
    assert isinstance(absent, RemoteTensor)
    assert torch.equal(torch.rand(2), expected)


def test_copies_and_averaged_models() -> None:
    module = nn.Linear(4, 3)
    swap(module.weight, RemoteTensor.like(module.weight, ["a"], is_the_models=True))
    swap(module.bias, RemoteTensor.like(module.bias, ["b"], is_the_models=True))
    copied = copy.deepcopy(module)
    assert isinstance(copied.weight, nn.Parameter)
    assert copied.weight.requires_grad
    assert copied.weight is not module.weight
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for _ in range(3):
        average.update_parameters(module)
    assert int(average.n_averaged) == 3
    assert isinstance(average.module.weight, RemoteTensor)
    assert average.module.weight.computed_from == {"a"}
    module.load_state_dict({"weight": torch.ones(3, 4), "bias": torch.ones(3)})
    nn.init.kaiming_uniform_(module.weight)
    assert isinstance(module.weight, RemoteTensor)


def test_gradients() -> None:
    parameter = elsewhere()
    parameter.grad = torch.empty_like(parameter)
    assert isinstance(parameter.grad, RemoteTensor)
    with pytest.raises(LayerError, match=r"lightning_pipeshift\.grad_norm"):
        torch.nn.utils.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)


def test_after_a_run_it_may_be_sent() -> None:
    parameter = elsewhere()
    set_owner_lookup(None)
    sent = pickle.loads(pickle.dumps(parameter))
    assert isinstance(sent, nn.Parameter)
    assert sent.shape == (3, 4)
    assert computed_from(sent) == {"a"}


def test_a_copy_of_this_stage_does_not_meet_what_is_elsewhere(known: Known) -> None:
    """The stage of ``a`` has no values of the copy: no stage could compute this."""
    copied, other = torch.ones(3, 4), torch.ones(3, 4)
    known.copies[_memory(copied)] = "here"
    for compute in (
        lambda: elsewhere() + copied,
        lambda: copied.add_(elsewhere()),
        lambda: elsewhere() @ copied.t(),
        lambda: torch._foreach_add_([other, copied], [elsewhere(), elsewhere()]),
    ):
        with pytest.raises(
            LayerError, match="takes a copy of 'here', and a value computed from 'a'"
        ):
            compute()
    known.copies[_memory(copied)] = "b"
    assert computed_from(elsewhere() + copied) == {"a"}
