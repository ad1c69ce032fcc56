"""Optimizer state in host memory: the numbers of the optimizer by itself, a few layers' state on
the device at a time, and true values for whoever reads it in between.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from lightning_pipeshift.devices.buffers import BufferPool
from lightning_pipeshift.errors import BudgetError, ConfigurationError
from lightning_pipeshift.runtime.offload import copying
from lightning_pipeshift.runtime.offload.copying import copier_of
from lightning_pipeshift.runtime.offload.optimizer_state import OptimizerStates
from tests.simulated.device import DataRaceError, SimulatedDevice
from tests.unit.runtime.forgotten_waits import forget

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
WIDTH, NUM_LAYERS = 8, 6
STATE_BYTES = 2 * 4 * (WIDTH * WIDTH + WIDTH)
"""Of a layer, with Adam."""


class Trained:
    """Layers with made-up gradients, and their optimizer."""

    def __init__(self, make: Callable[..., Optimizer], device: torch.device = CPU) -> None:
        generator = torch.Generator().manual_seed(1)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator).to(device))

        self.layers = [[parameter(WIDTH, WIDTH), parameter(WIDTH)] for _ in range(NUM_LAYERS)]
        self.parameters = [p for layer in self.layers for p in layer]
        self.optimizer = make(self.parameters)
        self._generator = generator

    def step(self, without: tuple[int, ...] = (), by_closure: bool = False) -> Any:
        """Makes a step in which some layers have no gradient."""

        def closure() -> Any:
            for number, layer in enumerate(self.layers):
                for p in layer:
                    gradient = torch.randn(p.shape, generator=self._generator).to(p.device)
                    p.grad = None if number in without else gradient
            return torch.ones(())

        if by_closure:
            return self.optimizer.step(closure)
        closure()
        return self.optimizer.step()

    def state(self) -> list[Tensor]:
        entries = [self.optimizer.state[p] for p in self.parameters if p in self.optimizer.state]
        found = [value for entry in entries for value in entry.values()]
        return [torch.as_tensor(value).cpu().clone() for value in found if value is not None]


def moved(
    trained: Trained, which: Any = range(NUM_LAYERS), room: float = 3 * STATE_BYTES
) -> tuple[OptimizerStates, BufferPool]:
    """The state of these layers in host memory."""
    device = trained.parameters[0].device
    pool = BufferPool(CPU, float("inf"), None if device == CPU else device)
    states = OptimizerStates(pool, copier_of(device), device, lambda: room)
    states.take_steps_of(trained.optimizer)
    own = dict(enumerate(trained.layers))
    expected = dict.fromkeys(own, STATE_BYTES)
    states.follow([trained.optimizer], own, list(which), expected, ["a layer"])
    return states, pool


def same(one: Trained, other: Trained) -> bool:
    return all(
        len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))
        for mine, theirs in (
            ([p.detach().cpu() for p in one.parameters], [p.detach() for p in other.parameters]),
            (one.state(), other.state()),
        )
    )


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameter groups that go across layers."""
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "lr": 0.02},
    ]


MAKERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(groups(p), lr=0.1),
    "AdamW, foreach": lambda p: torch.optim.AdamW(groups(p), lr=0.1, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_numbers_are_those_of_the_optimizer_by_itself(name: str) -> None:
    """With layers that a step leaves out, a scheduler, and a state that is loaded."""
    found = []
    for moves in (False, True):
        trained = Trained(MAKERS[name])
        if moves:
            states, _ = moved(trained, which=(0, 1, 3, 4, 5))
        scheduler = StepLR(trained.optimizer, 2, 0.5)
        for number in range(4):
            trained.step(without=(1, 2) if number == 1 else (), by_closure=number > 1)
            scheduler.step()
            if number == 2:
                state = copy.deepcopy(trained.optimizer.state_dict())
                trained.optimizer.load_state_dict(state)
        found.append(trained)
    assert same(*found)
    if name != "Adafactor":  # its state is a row and a column
        assert states.traffic.moved_bytes
    assert states.traffic.peak_bytes <= 3 * 2 * STATE_BYTES
    assert all(len(g["params"]) for g in found[1].optimizer.param_groups)


@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_no_more_is_on_the_device_than_there_is_room_for(num_layers: int) -> None:
    trained = Trained(MAKERS["AdamW"])
    states, pool = moved(trained, room=num_layers * STATE_BYTES)
    for number in range(3):
        trained.step()
        assert states.traffic.device_bytes == 0
        assert states.homes.num_bytes == pool.used_bytes == NUM_LAYERS * STATE_BYTES
        assert states.traffic.moved_bytes == (number + 1) * NUM_LAYERS * STATE_BYTES
    assert 0 < states.traffic.peak_bytes <= num_layers * STATE_BYTES


def test_a_layer_that_does_not_fit_is_an_error_and_its_state_remains_true() -> None:
    trained, plain = Trained(MAKERS["Adam, fused"]), Trained(MAKERS["Adam, fused"])
    room = 3 * STATE_BYTES
    states, _ = moved(trained)
    states._room = lambda: room
    for each in (trained, plain):
        each.step()
    room = STATE_BYTES - 1
    with pytest.raises(BudgetError, match=r"'a layer'.* have .* and the memory budget leaves"):
        trained.step()
    assert same(trained, plain)
    room = STATE_BYTES
    plain.step()
    trained.optimizer.step()
    assert same(trained, plain)


def test_a_full_host_is_an_error() -> None:
    trained = Trained(MAKERS["AdamW"])
    _, pool = moved(trained)
    pool.limit_bytes = 2.5 * STATE_BYTES
    with pytest.raises(BudgetError, match="Raise `host_budget`"):
        trained.step()


def test_who_reads_and_writes_state_between_two_steps_does_so_in_earnest() -> None:
    found = []
    for moves in (False, True):
        trained = Trained(MAKERS["AdamW"])
        if moves:
            moved(trained)
        trained.step()
        entry = trained.optimizer.state[trained.parameters[0]]
        kept = entry["exp_avg"]
        before = kept.clone()
        kept.mul_(0.5)
        entry["exp_avg_sq"] = entry["exp_avg_sq"] + 1
        trained.step()
        # Kept since before the step, as a hook or a logger does.
        assert kept is trained.optimizer.state[trained.parameters[0]]["exp_avg"]
        assert not torch.equal(kept, before)
        found.append((trained, kept.clone()))
    (plain, expected), (trained, values) = found
    assert same(trained, plain)
    assert torch.equal(values, expected)


def test_a_plan_may_change_and_the_optimizer_is_as_it_was_at_the_end() -> None:
    trained, plain = Trained(MAKERS["AdamW"]), Trained(MAKERS["AdamW"])
    plain_step = trained.optimizer.step.__func__  # type: ignore[attr-defined]
    states, pool = moved(trained)
    own = dict(enumerate(trained.layers))
    for which in ([0, 1, 2], [2, 3], [], [5]):
        states.follow([trained.optimizer], own, which, {}, [])
        for each in (trained, plain):
            each.step()
        assert states.homes.num_bytes == pool.used_bytes == len(which) * STATE_BYTES
    states.close()
    assert trained.optimizer.step.__func__ is plain_step  # type: ignore[attr-defined]
    for each in (trained, plain):
        each.step()
    assert same(trained, plain)


def test_memory_of_state_that_is_gone_is_free_again() -> None:
    trained = Trained(MAKERS["AdamW"])
    states, pool = moved(trained)
    trained.step()
    alias = trained.optimizer.state[trained.parameters[0]]["exp_avg"].detach()
    values = alias.clone()
    for parameter in trained.layers[0]:
        del trained.optimizer.state[parameter]
    assert states.homes.num_bytes == pool.used_bytes == (NUM_LAYERS - 1) * STATE_BYTES
    trained.step()
    assert torch.equal(alias, values)


def test_a_hook_that_is_registered_late_is_an_error() -> None:
    trained = Trained(MAKERS["AdamW"])
    moved(trained)
    trained.step()
    trained.optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigurationError, match="once for each layer"):
        trained.step()


# --- beside the compute ---


def on_a_simulated_device(room: float = 3 * STATE_BYTES) -> Trained:
    trained = Trained(MAKERS["AdamW"], GPU)
    moved(trained, room=room)
    for _ in range(3):
        trained.step()
        # The host reads.
        trained.state()
    return trained


def test_a_device_computes_the_same_and_waits_for_the_copies() -> None:
    plain = Trained(MAKERS["AdamW"])
    for _ in range(3):
        plain.step()
    for seed in range(3):
        with SimulatedDevice(seed):
            assert same(on_a_simulated_device(), plain)


@pytest.mark.parametrize(
    ("function", "number", "method"),
    [("_submit", 0, "wait"), ("_submit", 1, "wait"), ("finish", 0, "synchronize")],
)
def test_each_wait_matters(
    monkeypatch: pytest.MonkeyPatch, function: str, number: int, method: str
) -> None:
    forget(monkeypatch, copying, function, method, number)
    with pytest.raises(DataRaceError), SimulatedDevice():
        # Without layers ahead: the host asks earlier copies' events when it submits later ones.
        on_a_simulated_device(room=STATE_BYTES)
