"""Layers are updated when their own gradients are summed: nobody sees a difference."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    WeightAveraging,
)
from torch import Tensor, nn

import lightning_pipeshift.lightning.run
from lightning_pipeshift import Communication, MemoryCompression, SwapAll
from lightning_pipeshift.runtime.gradients.aggregation import Aggregation, GradientGroup
from lightning_pipeshift.runtime.gradients.late_updates import LateUpdates
from lightning_pipeshift.runtime.gradients.rings import Rings, RingSum
from lightning_pipeshift.runtime.ownership.held_gradients import HeldGradients
from lightning_pipeshift.testing.ranks import run_ranks
from tests.end_to_end.test_virtual_machines import loader
from tests.features_models import built, differences, on_rank, plain, quiet_trainer
from tests.models import ZOO, SequentialMLP

TWO = {"virtual_machines": 2, "microbatches": 2, "partition": "uniform"}
UNLIKE = {"virtual_machines": [[0, 1], [2]], "microbatches": 2, "partition": "uniform"}


@contextmanager
def sums_complete(when: Callable[[], bool]) -> Iterator[None]:
    """Context in which a sum is not known to be complete before ``when`` says so."""
    query = RingSum.query

    def asked(self: RingSum) -> bool:
        return when() and query(self)

    RingSum.query = asked  # type: ignore[method-assign]
    try:
        yield
    finally:
        RingSum.query = query  # type: ignore[method-assign]


def never() -> bool:
    return False


def sometimes() -> bool:
    return DRAWS.random() < 0.4


DRAWS = random.Random(0)


def in_all_ways(how: Mapping[str, Any], run: Callable[[Any], Any]) -> int:
    """Requires a run to have the same result whether layers are updated late or not; returns how
    many were updated just before their own forward.
    """
    DRAWS.seed(int(os.environ["RANK"]))
    expected = run(
        {
            **how,
            "pipeshift": {
                **how["pipeshift"],
                "communication": Communication(overlap_updates=False),
            },
        }
    )
    num_late = 0
    before_layer = LateUpdates.before_layer

    def counting(self: LateUpdates, number: int) -> None:
        nonlocal num_late
        num_late += number in self.layers
        before_layer(self, number)

    LateUpdates.before_layer = counting  # type: ignore[method-assign]
    try:
        for when in (never, sometimes):
            with sums_complete(when):
                found = run(how)
            problems = differences(found, expected, 0, 0)
            assert not problems, f"{when.__name__}:\n" + "\n".join(problems[:20])
    finally:
        LateUpdates.before_layer = before_layer  # type: ignore[method-assign]
    return num_late


def state_of(trainer: L.Trainer, module: nn.Module) -> Any:
    """What a run has left behind: the parameters, buffers and the optimizer's state."""
    # Of the layers on this stage, and none of others.
    optimizer = trainer.optimizers[0].state_dict() if trainer.optimizers else {}
    return plain({"module": dict(module.state_dict()), "optimizer": optimizer["state"]})


def trained(how: Mapping[str, Any], name: str, arguments: Mapping[str, Any]) -> int:
    def run(how: Mapping[str, Any]) -> Any:
        torch.manual_seed(3)
        module = built(ZOO[name].make_module)
        # Loaders of another object's state would differ from run to run.
        given = {key: value() if callable(value) else value for key, value in arguments.items()}
        trainer = quiet_trainer(how, **{"max_epochs": 2, **given})
        trainer.fit(module, loader(name, how, 2, num_batches=5))
        return state_of(trainer, module)

    return in_all_ways(how, run)


NAMES = [
    "sequential",
    "gpt2",
    "buffers_of_its_own",
    "loose_parameters",
    "parameter_groups",
    "parametrized",
    "frozen_front",
    "masked_tokens",
    "hooks",
]


@pytest.mark.parametrize("name", NAMES)
def test_models_of_every_kind_train_the_same_bits(name: str) -> None:
    late = run_ranks(on_rank, 3, trained, UNLIKE, (name, {}), {})
    assert min(late) > 0


def swapping() -> list[Any]:
    return [MemoryCompression(policy=SwapAll(min_bytes=1))]


ARGUMENTS: list[Mapping[str, Any]] = [
    {"plugins": swapping},
    {"accumulate_grad_batches": 2},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    {"precision": "bf16-mixed"},
    {"precision": "64-true"},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda given: "-".join(given))
def test_options_of_the_trainer(arguments: Mapping[str, Any]) -> None:
    given = ("parameter_groups", arguments)
    assert min(run_ranks(on_rank, 2, trained, TWO, given, {})) > 0


class Scheduled(SequentialMLP):
    """Changes its learning rate and its weight decay after each step."""

    kind: str = "SGD"

    def configure_optimizers(self) -> Any:
        options = {"SGD": {"momentum": 0.9}}.get(self.kind, {})
        optimizer = getattr(torch.optim, self.kind)(self.parameters(), lr=0.02, **options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


KINDS = (
    "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()  # noqa: SIM905
)


def every_optimizer(how: Mapping[str, Any]) -> dict[str, int]:
    late = {}
    for kind in KINDS:

        def run(how: Mapping[str, Any], kind: str = kind) -> Any:
            torch.manual_seed(3)
            module = built(Scheduled)
            module.kind = kind
            trainer = quiet_trainer(how, max_epochs=2)
            trainer.fit(module, loader("sequential", how, 2, num_batches=4))
            return state_of(trainer, module)

        late[kind] = in_all_ways(how, run)
    return late


def test_an_update_has_the_options_of_its_own_step_with_every_optimizer() -> None:
    for late in run_ranks(on_rank, 2, every_optimizer, TWO, (), {}):
        assert min(late.values()) > 0


# --------------------------------------------------------------------------------------------------
# Who looks at parameters between two steps
# --------------------------------------------------------------------------------------------------


class Looks(L.Callback):
    """Notes what it sees of the parameters in one hook."""

    def __init__(self, look: str, hook: str) -> None:
        self.seen: list[Any] = []
        self._look = getattr(self, look)
        self._aliases: list[Tensor] = []
        setattr(self, hook, self._note)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        # The first batch gives the layers to their stages.
        self._aliases = []

    def _note(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step:
            held = {use.name for use in trainer.strategy.pipeline.holdings.held}
            own = {name: p for name, p in module.named_parameters() if name in held}
            self.seen.append(plain(self._look(module, own)))

    def values(self, module: Any, own: Any) -> Any:
        return {name: p.detach().clone() for name, p in own.items()}

    def data(self, module: Any, own: Any) -> Any:
        return [p.data.clone() for p in own.values()]

    def gradients(self, module: Any, own: Any) -> Any:
        return {name: p.grad for name, p in own.items()}

    def items(self, module: Any, own: Any) -> Any:
        return [p.sum().item() for p in own.values()]

    def numpy(self, module: Any, own: Any) -> Any:
        return [p.detach().numpy().tolist() for p in own.values()]

    def foreach(self, module: Any, own: Any) -> Any:
        return torch._foreach_norm([p.detach() for p in own.values()])

    def aliases(self, module: Any, own: Any) -> Any:
        """Views that it took two steps ago."""
        if not self._aliases:
            self._aliases = [p.detach().view(-1) for p in own.values()]
        return [alias.sum() for alias in self._aliases]

    def one(self, module: Any, own: Any) -> Any:
        return next(iter(own.values()), torch.zeros(())).sum()

    def fork(self, module: Any, own: Any) -> Any:
        """What another process sees that is a copy of this one."""
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.write(writing, repr([p.sum().item() for p in own.values()]).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            return pipe.read()

    def writes(self, module: Any, own: Any) -> Any:
        with torch.no_grad():
            for p in own.values():
                p.clamp_(-0.2, 0.2)
        return 0

    def writes_data(self, module: Any, own: Any) -> Any:
        for p in own.values():
            p.data = p.data * 0.99
        return 0


LOOKS = [
    ("values", "on_train_batch_end"),
    ("values", "on_train_batch_start"),
    ("data", "on_train_batch_end"),
    ("gradients", "on_train_batch_end"),
    ("items", "on_train_batch_end"),
    ("numpy", "on_train_batch_end"),
    ("foreach", "on_train_batch_end"),
    ("aliases", "on_train_batch_end"),
    ("fork", "on_train_batch_end"),
    ("one", "on_train_batch_end"),
    ("writes", "on_train_batch_end"),
    ("writes", "on_train_batch_start"),
    ("writes_data", "on_train_batch_end"),
]


def looked_at(how: Mapping[str, Any]) -> int:
    late = 0
    for look, hook in LOOKS:

        def run(how: Mapping[str, Any], look: str = look, hook: str = hook) -> Any:
            torch.manual_seed(3)
            module = built(Scheduled)
            callback = Looks(look, hook)
            trainer = quiet_trainer(how, max_epochs=1, callbacks=[callback])
            trainer.fit(module, loader("sequential", how, 2, num_batches=5))
            assert callback.seen
            return plain({"seen": callback.seen}), state_of(trainer, module)

        late += in_all_ways(how, run)
    return late


def test_hooks_between_two_steps_see_and_change_updated_parameters() -> None:
    assert min(run_ranks(on_rank, 2, looked_at, TWO, (), {})) > 0


class LooksItself(SequentialMLP):
    """Looks at a parameter in some steps, at other places than the layer's."""

    model: Any

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.__dict__["seen"].append(float(self.model[0].weight.sum()))
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2:
            self.__dict__["seen"].append(float(self.model[-1].weight.data.sum()))
        return super().training_step(batch, batch_idx)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.__dict__["seen"].append(float(self.model[-1].weight.detach().sum()))
        scheduler.step()


def looks_itself(how: Mapping[str, Any]) -> int:
    def run(how: Mapping[str, Any]) -> Any:
        torch.manual_seed(3)
        module = built(LooksItself)
        module.__dict__["seen"] = []
        trainer = quiet_trainer(how, max_epochs=1)
        trainer.fit(module, loader("sequential", how, 2, num_batches=5))
        return module.__dict__["seen"], state_of(trainer, module)

    return in_all_ways(how, run)


def test_the_modules_own_code_sees_updated_parameters() -> None:
    assert min(run_ranks(on_rank, 2, looks_itself, TWO, (), {})) > 0


def with_lightnings_callbacks(how: Mapping[str, Any], folder: str) -> int:
    number = 0

    def run(how: Mapping[str, Any]) -> Any:
        nonlocal number
        number += 1
        torch.manual_seed(3)
        module = built(Scheduled)
        saves = ModelCheckpoint(Path(folder) / str(number), every_n_train_steps=2, save_top_k=-1)
        averages = WeightAveraging()
        trainer = quiet_trainer(
            how,
            max_epochs=2,
            val_check_interval=2,
            enable_checkpointing=True,
            callbacks=[saves, averages, LearningRateMonitor("step")],
            logger=True,
            default_root_dir=folder,
        )
        data = loader("sequential", how, 2, num_batches=5)
        trainer.fit(module, data, loader("sequential", how, 2, num_batches=2))
        files = sorted((Path(folder) / str(number)).glob("*.ckpt"))
        saved = [torch.load(file, weights_only=False) for file in files]
        states = [(one["state_dict"], one["optimizer_states"][0]["state"]) for one in saved]
        assert states
        return plain(states), state_of(trainer, module)

    return in_all_ways(how, run)


def test_lightnings_callbacks_see_updated_parameters(tmp_path: Path) -> None:
    # The average of the weights is taken after each step, so no update is late.
    run_ranks(on_rank, 2, with_lightnings_callbacks, TWO, (str(tmp_path),), {})


class Moves(L.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        cuts = {1: [[2, 3], [3, 2]], 6: [[4, 1], [2, 3]]}
        if index in cuts and trainer.strategy.pipeline.planned.has_plan:
            plan = trainer.strategy.plan
            counts = tuple(map(tuple, cuts[index]))
            trainer.strategy.adopt(plan.with_placement(type(plan.placement)(counts)))


def moving(how: Mapping[str, Any]) -> int:
    def run(how: Mapping[str, Any]) -> Any:
        torch.manual_seed(3)
        module = built(Scheduled)
        trainer = quiet_trainer(how, max_epochs=2, callbacks=[Moves()])
        trainer.fit(module, loader("sequential", how, 2, num_batches=12))
        return state_of(trainer, module)

    return in_all_ways(how, run)


def test_layers_move_between_late_updates() -> None:
    """From when a move is asked for until it is done, a few steps, no update is late."""
    late = run_ranks(on_rank, 4, moving, TWO, (), {})
    assert min(late) > 0


# --------------------------------------------------------------------------------------------------
# Where all gradients are needed
# --------------------------------------------------------------------------------------------------


class WithHook(L.Callback):
    def on_before_optimizer_step(self, *_: Any) -> None: ...


class OwnOptimizer(torch.optim.SGD):
    pass


class Owns(SequentialMLP):
    def configure_optimizers(self) -> Any:
        return OwnOptimizer(self.parameters(), lr=0.1)


class Hooked(SequentialMLP):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer


class Steps(SequentialMLP):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().optimizer_step(*args, **kwargs)


NEEDS_ALL: list[tuple[Any, Mapping[str, Any], str]] = [
    (SequentialMLP, {"gradient_clip_val": 1.0}, "clipping by norm"),
    (SequentialMLP, {"callbacks": WithHook}, "`on_before_optimizer_step`"),
    (Owns, {}, "OwnOptimizer is none of torch.optim's"),
    (Hooked, {}, "before or after each step of the optimizer"),
    (Steps, {}, "`optimizer_step` of the LightningModule"),
]


def needing_all(how: Mapping[str, Any]) -> list[list[str]]:
    said = []
    for make, arguments, _ in NEEDS_ALL:
        given = {key: value() if callable(value) else value for key, value in arguments.items()}
        messages: list[str] = []
        with sums_complete(never), pytest.MonkeyPatch.context() as patch:
            patch.setattr(lightning_pipeshift.lightning.run, "_say", messages.append)
            trainer = quiet_trainer(how, max_epochs=1, **given)
            trainer.fit(built(make), loader("sequential", how, 2, num_batches=3))
        strategy: Any = trainer.strategy
        assert not strategy.pipeline.late_updates.num_made
        said.append(messages)
    return said


def test_a_step_that_needs_all_gradients_waits_and_says_why() -> None:
    said, _ = run_ranks(on_rank, 2, needing_all, TWO, (), {})
    for messages, (_, _, reason) in zip(said, NEEDS_ALL, strict=True):
        assert any(reason in message for message in messages), messages


# --------------------------------------------------------------------------------------------------
# A rank that dies while some layers have been updated
# --------------------------------------------------------------------------------------------------

LAST_WHOLE = 3
"""The number of steps after which a rank dies."""


class SavesAtTheEnd(L.Callback):
    def __init__(self, folder: str) -> None:
        self._folder = folder

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(Path(self._folder) / "own.ckpt")


def torn(how: Mapping[str, Any], folder: str, layer: int, dies: int, saves_every: int) -> None:
    """Trains until a rank dies, when each rank has updated the layers of the fourth step that come
    before ``layer``, and the sum of ``layer`` is missing: in the forward of the fifth step, or
    while the state after the fourth is being saved.
    """
    rank, number, seen = int(os.environ["RANK"]), 0, Path(folder) / "waits"
    ring, finish, take = Rings._sum, Aggregation.finish_late, LateUpdates.take
    is_dead, num_rings = threading.Event(), Counter[int]()

    def withheld(self: Rings, piece: int, *rest: Any) -> None:
        # By its own number: the thread may begin when the step is over, or the next one under way.
        num_rings[piece] += 1
        if num_rings[piece] > LAST_WHOLE and piece // 8 // 8 == layer and rank == dies:
            is_dead.wait()
        ring(self, piece, *rest)

    def counted(self: LateUpdates, *rest: Any) -> None:
        nonlocal number
        number += 1
        take(self, *rest)

    def until(self: Aggregation, group: GradientGroup) -> None:
        if number == LAST_WHOLE + 1 and group.number == layer:
            if rank != dies:
                seen.with_name(f"waits{rank}").touch()
            else:
                others = int(os.environ["WORLD_SIZE"]) - 1
                while len(list(Path(folder).glob("waits*"))) < others:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
        finish(self, group)

    with sums_complete(never), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rings, "_sum", withheld)
        patch.setattr(LateUpdates, "take", counted)
        patch.setattr(Aggregation, "finish_late", until)
        torch.manual_seed(3)
        callbacks = [
            ModelCheckpoint(
                folder,
                "{step}",
                every_n_train_steps=saves_every,
                save_top_k=-1,
                save_on_exception=True,
            ),
            OnExceptionCheckpoint(folder, "exception"),
            SavesAtTheEnd(folder),
        ]
        trainer = quiet_trainer(how, max_epochs=1, enable_checkpointing=True, callbacks=callbacks)
        trainer.fit(built(Scheduled), loader("sequential", how, 2, num_batches=6))


@pytest.mark.parametrize(("layer", "saves_every"), [(0, 3), (1, 3), (2, 3), (1, 1)])
def test_nothing_saves_a_model_of_which_some_layers_are_updated(
    tmp_path: Path, layer: int, saves_every: int
) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    given = (str(folder), layer, 1, saves_every)
    outcomes = run_ranks(on_rank, 2, torn, TWO, given, {}, expect_failure=True, cwd=tmp_path)
    assert "rank 1" in outcomes[0].message
    assert "is not saved" in outcomes[0].output
    assert sorted(file.name for file in folder.glob("*.ckpt")) == [
        f"step={step}.ckpt" for step in range(saves_every, LAST_WHOLE + 1, saves_every)
    ]


# --------------------------------------------------------------------------------------------------
# What the lanes have carried
# --------------------------------------------------------------------------------------------------


def carried(how: Mapping[str, Any]) -> tuple[dict[str, int], int, list[str]]:
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lightning_pipeshift.lightning.run, "_say", messages.append)
        trainer = quiet_trainer(how, max_epochs=1)
        module = built(SequentialMLP)
        trainer.fit(module, loader("sequential", how, 2, num_batches=4))
    strategy: Any = trainer.strategy
    lanes = {name: one.num_bytes for name, one in strategy.pipeline.channels.traffic.items()}
    num_gradients = sum(p.numel() + 1 for p in module.parameters() if p.requires_grad)
    return lanes, num_gradients * 4 * trainer.global_step, messages


def test_every_byte_of_the_gradients_is_counted_with_its_lane() -> None:
    for lanes, num_bytes, messages in run_ranks(on_rank, 2, carried, TWO, (), {}):
        # Two members: each sends every gradient, and a count for each parameter, once.
        assert set(lanes) <= {f"gradients-{number}" for number in range(5)}
        assert len(lanes) > 2
        assert sum(lanes.values()) == num_bytes
        assert any("gradient lanes carried" in message for message in messages)


class Wide(SequentialMLP):
    """Its gradients are large enough to be summed in two pieces each."""

    def __init__(self) -> None:
        super().__init__(width=1100)


def on_lanes(how: Mapping[str, Any], shares: tuple[float, ...]) -> tuple[Any, dict[str, int], Any]:
    """The end of a run with a plan with these shares, the bytes of each lane, and the shares that
    are in force at the end.
    """
    torch.manual_seed(3)
    start = quiet_trainer(how, max_steps=1)
    start.fit(built(Wide), loader("sequential", how, 2, num_batches=1))
    plan = replace(cast(Any, start.strategy).plan, lane_shares=shares, prediction=None)
    given = {**how, "pipeshift": {"virtual_machines": 2, "plan": plan, "profile_steps": 0}}
    torch.manual_seed(3)
    module = built(Wide)
    trainer = quiet_trainer(given, max_epochs=1)
    trainer.fit(module, loader("sequential", how, 2, num_batches=4))
    strategy: Any = trainer.strategy
    lanes = {name: one.num_bytes for name, one in strategy.pipeline.channels.traffic.items()}
    return state_of(trainer, module), lanes, strategy.plan.lane_shares


def same_on_all_lanes(how: Mapping[str, Any]) -> list[dict[str, int]]:
    expected, *_ = on_lanes(
        {
            **how,
            "pipeshift": {
                **how["pipeshift"],
                "communication": Communication(overlap_updates=False),
            },
        },
        (),
    )
    found = []
    for shares in ((1.0,), (0.25, 0.75), (0.1, 0.2, 0.3, 0.4)):
        state, lanes, in_force = on_lanes(how, shares)
        assert in_force == shares
        assert not differences(state, expected, 0, 0)
        found.append(lanes)
    return found


def test_lanes_of_a_plan_change_no_bit() -> None:
    for one, two, four in run_ranks(on_rank, 2, same_on_all_lanes, TWO, (), {}):
        total = sum(one.values())
        assert len(one) == 1
        assert [round(size / total, 1) for size in two.values()] == [0.2, 0.8]
        assert len(four) == 4
        assert sum(two.values()) == sum(four.values()) == total


class Doubles(L.Callback):
    """Changes gradients in a way that torch does not notice."""

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.data.mul_(2.0)


def clipped(how: Mapping[str, Any]) -> list[tuple[Any, int]]:
    """The end of runs that clip by norm, with a callback that changes gradients and without, and
    how many norms were computed while other gradients were being summed; then the same without.
    """
    found = []
    for callbacks in ([], [Doubles()]):
        for measures in (True, False):
            num_measured = 0
            measure = HeldGradients.measure_norms

            def counting(self: HeldGradients, places: Any, parameters: Any) -> None:
                nonlocal num_measured
                if measures:  # noqa: B023
                    num_measured += len(places)
                    measure(self, places, parameters)  # noqa: B023

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(HeldGradients, "measure_norms", counting)
                torch.manual_seed(3)
                module = built(SequentialMLP)
                trainer = quiet_trainer(
                    how, max_epochs=1, gradient_clip_val=0.05, callbacks=list(callbacks)
                )
                trainer.fit(module, loader("sequential", how, 2, num_batches=4))
            found.append((state_of(trainer, module), num_measured))
    return found


def test_norms_are_computed_while_other_gradients_are_summed() -> None:
    for plain_run, without, doubled, doubled_without in run_ranks(on_rank, 2, clipped, TWO, (), {}):
        assert plain_run[1] > 0
        assert not differences(plain_run[0], without[0], 0, 0)
        # Where code may change gradients before they are clipped, their norms are computed then.
        assert doubled[1] == 0
        assert not differences(doubled[0], doubled_without[0], 0, 0)
