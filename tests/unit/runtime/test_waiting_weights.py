"""Weights in host memory while their layer waits: the numbers of the layers by themselves, a few
layers' weights on the device at a time, and true values for whoever reads or writes them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeshift.devices.buffers import BufferPool
from lightning_pipeshift.errors import BudgetError, LayerError
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.runtime.offload import copying
from lightning_pipeshift.runtime.offload.copying import copier_of
from lightning_pipeshift.runtime.offload.optimizer_state import OptimizerStates
from lightning_pipeshift.runtime.offload.waiting_weights import WaitingWeights
from tests.simulated.device import DataRaceError, SimulatedDevice
from tests.unit.runtime.forgotten_waits import forget

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
WIDTH, NUM_LAYERS = 8, 6
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


class Model:
    """Layers with gates, whose weights come and go, and their optimizer.

    Args:
        moved: the layers whose weights come and go; empty for a plain model.
        device: of the layers.
        window: how many layers there is room for.
        layer: makes a layer.
        width: of the layers.
    """

    def __init__(
        self,
        moved: Any = (),
        device: torch.device = CPU,
        window: float = 2,
        layer: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH),
        width: int = WIDTH,
    ) -> None:
        torch.manual_seed(1)
        self.width = width
        self.layer_bytes = 4 * (width * width + width)
        self.device = device
        self.layers: list[Any] = [layer().to(device) for _ in range(NUM_LAYERS)]
        self.parameters = [p for one in self.layers for p in one.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.1)
        pool = BufferPool(CPU, float("inf"), None if device == CPU else device)
        self.pool, copier = pool, copier_of(device)
        self.weights = WaitingWeights(pool, copier)
        self.states = OptimizerStates(
            pool, copier, device, lambda: 6 * self.layer_bytes, self.weights
        )
        self.own = {n: list(one.parameters()) for n, one in enumerate(self.layers)}
        self.window = window
        self.gates = [NamedLayer(f"{n}", one, n) for n, one in enumerate(self.layers)]
        if moved:
            self.states.take_steps_of(self.optimizer)
            self.follow(moved)
        self.inputs = torch.Generator().manual_seed(2)

    def follow(self, moved: Any) -> None:
        self.weights.follow(self.own, list(moved), self.window * self.layer_bytes)
        expected = dict.fromkeys(self.own, 2 * self.layer_bytes)
        self.states.follow([self.optimizer], self.own, list(moved), expected)
        for gate in self.gates:
            gate.weights = self.weights

    def call(self, number: int, x: Tensor) -> Tensor:
        found: Tensor = self.gates[number].run_by(self.layers[number], x)
        return found

    def in_a_row(self, numbers: Any, x: Tensor) -> Tensor:
        for number in numbers:
            x = self.call(number, x)
        return x

    def forward(self, checkpointed: bool = False) -> Tensor:
        x = torch.randn(3, self.width, generator=self.inputs).to(self.device)
        if checkpointed:
            for begin in (0, 3):
                part = partial(self.in_a_row, range(begin, begin + 3))
                x = checkpoint(part, x.requires_grad_(), use_reentrant=begin > 0)
        else:
            for number in range(NUM_LAYERS):
                x = torch.tanh(self.call(number, x))
        return x.square().mean()

    def step(self, num_microbatches: int = 2, checkpointed: bool = False) -> None:
        self.optimizer.zero_grad()
        with self.weights.in_step():
            losses = [self.forward(checkpointed) for _ in range(num_microbatches)]
            for loss in losses:
                loss.backward()
        assert self.weights.traffic.device_bytes == 0
        self.optimizer.step()

    def values(self) -> list[Tensor]:
        return [p.detach().cpu().clone() for p in self.parameters]

    def is_like(self, other: Model) -> bool:
        return all(map(torch.equal, self.values(), other.values()))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("moved", [range(NUM_LAYERS), (1, 2, 4)])
def test_the_numbers_are_those_of_layers_that_stay(moved: Any, checkpointed: bool) -> None:
    plain, model = Model(), Model(moved)
    for number in range(4):
        for each in (plain, model):
            each.step(1 + number % 2, checkpointed)
    assert model.is_like(plain)
    assert 0 < model.weights.traffic.peak_bytes <= 2 * LAYER_BYTES
    # Into host memory, and out again after each update: forwards and backwards copy nothing out.
    assert model.weights.traffic.moved_bytes == (1 + 4) * len(moved) * LAYER_BYTES
    # With the state of one layer, which is twice as large, and of those ahead.
    assert model.states.traffic.peak_bytes <= 6 * LAYER_BYTES


def test_memory_that_waits_is_free_and_views_have_their_values_when_they_are_needed() -> None:
    model = Model(range(NUM_LAYERS))
    storages = [weight.device.untyped_storage() for weight in _weights(model)]
    sizes = []

    def watch(*_: Any) -> None:
        sizes.append(sum(storage.nbytes() for storage in storages))

    for layer in model.layers:
        layer.register_forward_hook(watch)
        layer.weight.register_hook(watch)
    model.step()
    assert len(sizes) == 4 * NUM_LAYERS
    assert max(sizes) <= 2 * LAYER_BYTES
    assert not any(storage.nbytes() for storage in storages)


def _weights(model: Model) -> list[Any]:
    return [weight for layer in model.weights._layers.values() for weight in layer.weights]


def test_the_next_layers_are_prefetched_in_the_order_of_the_last_step() -> None:
    model = Model(range(NUM_LAYERS), window=3)
    order: list[int] = []
    begin = model.weights._begin_to_come

    def noted(layer: Any, traffic: Any) -> None:
        if not layer.is_here:
            order.append(int(layer.name))
        begin(layer, traffic)

    model.weights._begin_to_come = noted  # type: ignore[method-assign]
    model.step(1)
    order.clear()
    with model.weights.in_step():
        loss = model.forward()
        assert order == list(range(NUM_LAYERS))
        loss.backward()
    # The last layers of the forward are those that the backward begins with.
    assert order[NUM_LAYERS:] == [2, 1, 0]


def test_who_reads_and_writes_weights_between_two_steps_does_so_in_earnest() -> None:
    plain, model = Model(), Model(range(NUM_LAYERS))
    for each in (plain, model):
        each.step()
        with torch.no_grad():
            first, second, third = (layer.weight for layer in each.layers[:3])
            first.mul_(0.5)
            second.data.clamp_(-0.1, 0.1)
            third.data = third.data + 1
            each.layers[3].load_state_dict(each.layers[4].state_dict())
            # A layer that is called by itself, and changed through `data` afterwards.
            each.call(5, torch.ones(1, WIDTH))
            each.layers[5].weight.data.mul_(0.9)
    assert model.is_like(plain)
    for each in (plain, model):
        each.step()
    assert model.is_like(plain)


class Writes(nn.Linear):
    """Writes to its weight when it runs.

    Args:
        data: whether through ``data``, which autograd does not see.
    """

    def __init__(self, data: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self._data = data

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            (self.weight.data if self._data else self.weight).clamp_(-0.05, 0.05)
        return super().forward(x)


def test_a_layer_that_writes_to_its_weights_when_it_runs_keeps_the_change_or_is_an_error() -> None:
    plain, model = (Model(moved, layer=lambda: Writes(False)) for moved in ((), range(NUM_LAYERS)))
    for each in (plain, model):
        for _ in range(3):
            each.step(1)
    assert model.is_like(plain)
    model = Model(range(NUM_LAYERS), layer=lambda: Writes(True))
    with pytest.raises(LayerError, match=r"layer '.' was written to .* through its `data`"):
        model.step(1)


def test_a_write_to_data_long_after_the_first_steps_is_noticed_at_once() -> None:
    """A few kilobytes are enough, wherever they are: a part of each weight is always compared."""
    for begin in range(0, 4 * 96 * 96 - 2048, 4096):
        model = Model(range(NUM_LAYERS), layer=lambda: nn.Linear(96, 96), width=96)
        for _ in range(3):
            model.step(1)
        layer = model.layers[2]

        def write(one: Any, _: Any, begin: int = begin) -> None:
            one.weight.data.view(-1)[begin // 4 : begin // 4 + 512] += 1

        layer.register_forward_pre_hook(write)
        with pytest.raises(LayerError, match=r"layer '2' was written to .* through its `data`"):
            model.step(1)


def test_hooks_that_run_before_a_layer_see_its_weights_on_the_device() -> None:
    """Also while they are being prefetched."""
    model = Model(range(NUM_LAYERS), window=3)
    places: list[bool] = []
    for layer, weight in zip(model.layers, _weights(model)[::2], strict=True):
        layer.register_forward_pre_hook(
            lambda layer, _, weight=weight: places.append(
                layer.weight.data_ptr() == weight.device.data_ptr()
            )
        )
    for _ in range(2):
        model.step()
    assert places == 4 * NUM_LAYERS * [True]
    copied = copy.deepcopy(model.layers[0])
    for gate in model.gates:
        gate.weights = None
    copied(torch.ones(1, WIDTH))
    assert all(len(layer._forward_pre_hooks) == 1 for layer in model.layers)


def test_an_alias_that_outlives_its_step_has_true_values_or_is_an_error() -> None:
    plain, model = Model(), Model(range(NUM_LAYERS))
    aliases: dict[Model, list[Tensor]] = {plain: [], model: []}
    for each in (plain, model):
        hook = each.layers[1].register_forward_hook(
            lambda layer, _, __, each=each: aliases[each].append(layer.weight.detach())
        )
        for _ in range(2):
            each.step()
        hook.remove()
    assert model.is_like(plain)
    for _ in range(2):
        assert all(map(torch.equal, aliases[model], aliases[plain]))
        for each in (plain, model):
            each.step()
    assert model.is_like(plain)
    kept = _weights(model)[2].device.untyped_storage()
    assert kept.nbytes() == 4 * WIDTH * WIDTH, "it is read at any time"
    # Neither of the two knows that the other was written to.
    with torch.no_grad():
        aliases[model][0].mul_(2)
    with pytest.raises(LayerError, match=r"an alias of it .* have different values.*clone"):
        model.step()
    model, alias = Model(range(NUM_LAYERS)), []
    hook = model.layers[1].register_forward_hook(
        lambda layer, _, __: alias.append(layer.weight.data)
    )
    model.step()
    hook.remove()
    alias.clear()
    model.step()
    assert not any(weight.device.untyped_storage().nbytes() for weight in _weights(model))


def test_a_plan_may_change_and_memory_that_others_use_stays() -> None:
    plain, model = Model(), Model((0, 1, 2))
    alias = model.layers[3].weight.detach()
    array = model.layers[4].weight.detach().numpy()
    for moved in ((2, 3, 4), (), (0, 5)):
        for each in (plain, model):
            each.step()
        model.follow(moved)
        assert model.weights.host_bytes == sum(weight.host.nbytes for weight in _weights(model))
        waiting = {id(weight.parameter) for weight in _weights(model)}
        assert id(model.layers[3].weight) not in waiting
        assert id(model.layers[4].weight) not in waiting
    for each in (plain, model):
        each.step()
    assert model.is_like(plain)
    assert torch.equal(alias, plain.layers[3].weight)
    assert torch.equal(torch.from_numpy(array), plain.layers[4].weight)
    model.weights.leave_all()
    assert model.is_like(plain)


def test_nothing_refers_weakly_to_weights_that_wait() -> None:
    """Torch would not swap them when their layer moves to another stage."""
    model = Model(range(NUM_LAYERS))
    model.step()
    assert not any(map(weakref.getweakrefs, model.parameters))


def test_other_data_of_another_shape_is_an_error() -> None:
    model = Model(range(NUM_LAYERS))
    model.step()
    model.layers[1].bias.data = torch.zeros(1)
    with pytest.raises(LayerError, match=r"was given `data` of shape \(1,\)"):
        model.step()


def test_a_full_host_is_an_error() -> None:
    model = Model()
    model.pool.limit_bytes = 2.5 * LAYER_BYTES
    with pytest.raises(BudgetError, match=r"more of the weights.*Raise `host_budget`"):
        model.follow(range(NUM_LAYERS))


def _fail(*_: Any) -> None:
    raise KeyError


def test_layers_that_an_error_has_left_on_the_device_are_put_away() -> None:
    plain, model = Model(), Model(range(NUM_LAYERS))
    model.layers[4].register_forward_pre_hook(_fail)
    with pytest.raises(KeyError), model.weights.in_step():
        model.forward()
    model.layers[4]._forward_pre_hooks.clear()
    plain.forward()
    for each in (plain, model):
        each.step()
    assert model.is_like(plain)


# --- beside the compute ---


def on_a_simulated_device(window: float = 2) -> Model:
    model = Model(range(NUM_LAYERS), GPU, window)
    for _ in range(3):
        model.step()
        # The host reads.
        model.values()
    return model


def test_a_device_computes_the_same_and_waits_for_the_copies() -> None:
    plain = Model()
    for _ in range(3):
        plain.step()
    for seed in range(3):
        with SimulatedDevice(seed):
            assert on_a_simulated_device().is_like(plain)


@pytest.mark.parametrize(
    ("function", "number", "method"),
    [("_submit", 0, "wait"), ("_submit", 1, "wait"), ("finish", 0, "synchronize")],
)
def test_each_wait_matters(
    monkeypatch: pytest.MonkeyPatch, function: str, number: int, method: str
) -> None:
    forget(monkeypatch, copying, function, method, number)
    with pytest.raises(DataRaceError), SimulatedDevice():
        on_a_simulated_device(window=1)
