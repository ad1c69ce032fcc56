from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipeshift.checkpoint.gather_state import gather_optimizer_state, gather_state
from lightning_pipeshift.model.parameters.deferred_init import DeferredInit
from lightning_pipeshift.model.parameters.uses import parameter_uses
from lightning_pipeshift.runtime.comm import mailbox
from lightning_pipeshift.runtime.comm.frames import packed_for_host
from lightning_pipeshift.runtime.ownership.holdings import Holdings, optimizer_to_device
from lightning_pipeshift.testing.ranks import run_ranks
from tests.unit.runtime.stages import connect


class Net(nn.Module):
    """Four layers, the first and the last tied; a loose parameter; a buffer in no layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a = nn.Linear(3, 3)
        self.lstm = nn.LSTM(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.c = nn.Linear(3, 3)
        self.c.weight = self.a.weight
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("steps", torch.zeros(()))


STAGE_OF = [0, 1, 1, 2]


def make(settled: bool = True, shares_memory: bool = False) -> tuple[Net, Holdings, int]:
    channels, _ = connect(shares_memory)
    net = Net()
    layers = [net.a, net.lstm, net.norm, net.c]
    holdings = Holdings(net, parameter_uses(net, layers), layers, STAGE_OF, channels)
    if settled:
        holdings.settle([])
    return net, holdings, channels.stage


HELD = [
    {"a.weight", "a.bias", "scale", "steps", "c.weight"},
    {name for name in Net().state_dict() if name.startswith(("lstm", "norm"))} | {"scale", "steps"},
    {"a.weight", "c.weight", "c.bias", "scale", "steps"},
]


def what_is_here() -> tuple[set[str], set[str]]:
    net, holdings, _ = make()
    here = {n for n, t in net.state_dict(keep_vars=True).items() if not t.is_meta}
    return here, {use.name for use in holdings.held}


def test_a_stage_holds_its_own_and_the_shared() -> None:
    names = [name for name, _ in Net().named_parameters()]
    for stage, (here, held) in enumerate(run_ranks(what_is_here, 3)):
        assert here == HELD[stage]
        assert held == set(names) & HELD[stage]


def optimizer_state() -> list[str]:
    net, holdings, _ = make(settled=False)
    optimizer = torch.optim.Adam(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert len(optimizer.state) == len(list(net.parameters()))
    holdings.settle([optimizer])
    return [name for name, parameter in net.named_parameters() if parameter in optimizer.state]


def test_the_optimizer_forgets_what_is_not_held() -> None:
    names = [name for name, _ in Net().named_parameters()]
    for stage, kept in enumerate(run_ranks(optimizer_state, 3)):
        assert kept == [name for name in names if name in HELD[stage]]


def make_whole() -> tuple[dict[str, torch.Tensor], bool]:
    net, holdings, stage = make()
    before = [id(parameter) for parameter in net.parameters()]
    with torch.no_grad():
        for use in holdings.held:
            use.parameter.fill_(10 if use.is_shared else stage + 1)
        if stage == 1:
            net.norm.get_buffer("running_mean").fill_(7)
    holdings.make_whole()
    net.lstm(torch.ones(2, 1, 3))
    same = [id(parameter) for parameter in net.parameters()] == before
    return {name: value.clone() for name, value in net.state_dict().items()}, same


def test_every_stage_gets_the_whole_model() -> None:
    for values, same_objects in run_ranks(make_whole, 3):
        assert same_objects
        for name, value in values.items():
            expected = {"a.bias": 1, "c.bias": 3, "steps": 0, "norm.running_var": 1}.get(name)
            if name == "norm.running_mean":
                expected = 7
            elif name == "norm.num_batches_tracked":
                expected = 0
            elif expected is None:
                expected = 2 if name.startswith(("lstm", "norm")) else 10
            assert value.device.type == "cpu"
            assert torch.all(value == expected), name


def match() -> dict[str, float]:
    _, holdings, stage = make()
    with torch.no_grad():
        for use in holdings.held:
            use.parameter.fill_(stage + 1)
    holdings.match_shared()
    return {use.name: float(use.parameter.detach().flatten()[0]) for use in holdings.held}


def test_shared_parameters_are_the_lowest_holders() -> None:
    first, second, third = run_ranks(match, 3)
    assert first["scale"] == second["scale"] == third["scale"] == 1
    assert first["a.weight"] == third["a.weight"] == 1
    assert second["lstm.weight_ih_l0"] == 2
    assert third["c.bias"] == 3


def gradients(correction: float, shares_memory: bool = False) -> dict[str, Any]:
    net, holdings, stage = make(shares_memory=shares_memory)
    box = holdings.gradients.mailbox = holdings.channels.mailbox()
    if shares_memory:

        def refuse(content: Any, room_bytes: int) -> Any:
            assert not isinstance(content, Tensor), "a gradient travels by way of the host"
            return packed_for_host(content, room_bytes)

        vars(mailbox)["packed_for_host"] = refuse
    if stage != 1:
        net.a.weight.grad = torch.ones(3, 3)  # being accumulated
    holdings.gradients.set_aside(keep=True)
    # What the backwards would leave.
    if stage == 0:
        net.a.weight.grad = torch.full((3, 3), 2.0)
        net.scale.grad = torch.full((3,), 0.1)
        net.a.bias.grad = torch.full((3,), 4.0)
    if stage == 2:
        net.a.weight.grad = torch.full((3, 3), 3.0)
        net.scale.grad = torch.full((3,), 0.2)
    holdings.gradients.collect(correction, None, joins=False)
    kept = None if net.a.weight.grad is None else float(net.a.weight.grad[0, 0])
    holdings.gradients.hand_over()
    norms = holdings.gradients.norms(net.parameters(), 2.0)
    found = {n: None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()}
    box.close()
    return {"kept": kept, "norms": norms, **found}


@pytest.mark.parametrize("shares_memory", [False, True])
def test_gradients_of_shared_parameters_are_summed(shares_memory: bool) -> None:
    results = run_ranks(gradients, 3, 2.0, shares_memory)
    for stage in (0, 2):
        assert results[stage]["kept"] == 1
        assert torch.equal(results[stage]["a.weight"], torch.full((3, 3), 1 + 2 * 5.0))
    expected = (torch.full((3,), 0.1) + torch.full((3,), 0.2)) * 2
    for result in results:
        assert torch.equal(result["scale"], expected)
    assert torch.equal(results[0]["a.bias"], torch.full((3,), 8.0))
    assert results[2]["c.bias"] is None

    # Each parameter counts once, with the same bits everywhere.
    whole = {"a.weight": results[0]["a.weight"], "scale": expected, "a.bias": torch.full((3,), 8.0)}
    names = [name for name, _ in Net().named_parameters()]
    norms = torch.tensor([float(whole[n].norm()) if n in whole else 0.0 for n in names])
    assert torch.allclose(results[0]["norms"].float(), norms)
    assert all(torch.equal(result["norms"], results[0]["norms"]) for result in results)


def test_a_step_that_counts_nothing_leaves_no_gradient() -> None:
    results = run_ranks(gradients, 3, 0.0)
    assert torch.equal(results[0]["a.weight"], torch.ones(3, 3))
    assert all(result["scale"] is None for result in results)
    assert results[0]["a.bias"] is None


def checkpoint() -> Any:
    net, holdings, stage = make()
    optimizer = torch.optim.Adam(net.parameters())
    for use in holdings.held:
        use.parameter.grad = torch.full_like(use.parameter, float(stage + 1))
    optimizer.step()
    state = dict(gather_state(holdings, net.state_dict(keep_vars=True), 0))
    # The state of shared parameters is the lowest holder's.
    optimizer_state = gather_optimizer_state(holdings, optimizer, 0)
    return (state, optimizer_state) if stage == 0 else None


def test_a_checkpoint_is_whole_and_loads_in_plain_torch() -> None:
    (state, optimizer_state), _, _ = run_ranks(checkpoint, 3)
    net = Net()
    assert list(state) == list(net.state_dict())
    net.load_state_dict(state)
    optimizer = torch.optim.Adam(net.parameters())
    optimizer.load_state_dict(optimizer_state)
    gradient = {"a": 1, "l": 2, "n": 2, "c": 3, "s": 1}
    for name, parameter in net.named_parameters():
        average = optimizer.state[parameter]["exp_avg"]
        assert torch.allclose(average, torch.full_like(average, gradient[name[0]] * 0.1)), name


@pytest.mark.parametrize("option", ["", "fused", "capturable"])
def test_counters_of_steps_are_where_the_optimizer_reads_them(option: str) -> None:
    """The meta device stands for one that a kernel runs on."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[0][option or "lr"] = True
    optimizer_to_device(optimizer, torch.device("meta"), DeferredInit())
    found = {name: value.device.type for name, value in optimizer.state[weight].items()}
    assert found == {"exp_avg": "meta", "exp_avg_sq": "meta", "step": "meta" if option else "cpu"}
