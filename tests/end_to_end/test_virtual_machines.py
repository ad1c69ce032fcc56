"""Several virtual machines train as one device would with the whole global batch."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeshift import Communication, PipeShiftStrategy
from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.testing.ranks import RanksFailed, run_ranks
from tests.features_models import (
    OverflowingOnOneStage,
    built,
    differences,
    fit,
    on_one_device,
    on_rank,
    plain,
    quiet_trainer,
)
from tests.models import NUM_FEATURES, ZOO, SequentialMLP, points

GLOBAL_BATCH = 12


def loader(name: str, how: Mapping[str, Any], count: int, num_batches: int = 7) -> DataLoader:
    """A specimen's data, shuffled; ``count`` batches of a virtual machine make a global one."""
    own = ZOO[name].make_loader(num_batches)
    size = GLOBAL_BATCH if "pipeshift" not in how else GLOBAL_BATCH // count
    return DataLoader(own.dataset, batch_size=size, shuffle=True)


def trained(how: Mapping[str, Any], name: str, count: int, **arguments: Any) -> Any:
    """Trains a specimen of the zoo, with validation where it has one."""
    specimen = ZOO[name]
    torch.manual_seed(3)
    val = None
    if arguments.pop("validates", False):
        size = 5 if "pipeshift" not in how else 3
        val = DataLoader(specimen.make_loader(3).dataset, batch_size=size)
    record, _, _ = fit(
        how,
        specimen.make_module,
        loader(name, how, count),
        val,
        **{"max_epochs": 2, **arguments},
    )
    for moment, metrics in record["diary"]:
        for shown in metrics.values():
            if isinstance(shown, dict):
                # What a metric shows for a step is its virtual machine's own.
                shown.pop("train_accuracy_step", None)
                if moment not in ("train epoch end", "train end"):
                    shown.pop("train_accuracy", None)
    return plain(record)


def over_virtual_machines(
    scenario: Any,
    ranks: int,
    *args: Any,
    rtol: float = 1e-4,
    atol: float = 2e-6,
    arguments: Mapping[str, Any] | None = None,
    **strategy: Any,
) -> list[Any]:
    """Requires every rank to end as one device, and all with the same bits."""
    kwargs = dict(arguments or {})
    expected = on_one_device(scenario, *args, **kwargs)
    found = on_ranks(scenario, ranks, *args, arguments=arguments, **strategy)
    problems = []
    for rank, mine in enumerate(found):
        problems += [f"rank {rank}: {p}" for p in differences(mine, expected, rtol, atol)]
    assert not problems, "unlike one device:\n" + "\n".join(problems[:40])
    return found


def on_ranks(
    scenario: Any,
    ranks: int,
    *args: Any,
    arguments: Mapping[str, Any] | None = None,
    **strategy: Any,
) -> list[Any]:
    """Requires every rank to end with the same bits."""
    strategy = {"microbatches": 2, "partition": "uniform", **strategy}
    folder = Path.cwd() / f"ranks{len(list(Path.cwd().glob('ranks*')))}"
    found = run_ranks(on_rank, ranks, scenario, strategy, args, dict(arguments or {}), cwd=folder)
    for mine in found[1:]:
        assert not differences(mine, found[0], 0, 0)
    return found


SHAPES: list[tuple[int, Any]] = [(2, 2), (4, 2), (3, [[0, 1], [2]]), (4, [[3, 1], [0, 2]]), (3, 3)]


@pytest.mark.parametrize(("ranks", "virtual_machines"), SHAPES)
def test_as_one_device_with_the_global_batch(ranks: int, virtual_machines: Any) -> None:
    count = virtual_machines if isinstance(virtual_machines, int) else len(virtual_machines)
    over_virtual_machines(trained, ranks, "sequential", count, virtual_machines=virtual_machines)


NAMES = [
    "gpt2",
    "loose_parameters",
    "functional_tying",
    "masked_tokens",
    "parameter_groups",
    "frozen_front",
    "early_losses",
    "t5",
]


@pytest.mark.parametrize("name", NAMES)
def test_models_of_every_kind(name: str) -> None:
    over_virtual_machines(trained, 3, name, 2, virtual_machines=[[0, 1], [2]], rtol=1e-3)


@pytest.mark.parametrize("virtual_machines", [[[0, 1], [2]], [[0], [1, 2]]])
@pytest.mark.parametrize("name", ["batch_norm", "buffers_of_its_own"])
def test_running_statistics_are_those_of_the_first_virtual_machine(
    name: str, virtual_machines: list[list[int]]
) -> None:
    found = on_ranks(
        trained,
        3,
        name,
        2,
        virtual_machines=virtual_machines,
        arguments={"validates": True},
    )
    assert found[0]["parameters"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "max_epochs": 3},
        {"precision": "bf16-true"},
        {"limit_train_batches": 3, "validates": True},
    ],
    ids=["accumulation", "norm", "value", "both", "bf16", "limited"],
)
def test_what_the_trainer_does_with_gradients(arguments: dict[str, Any]) -> None:
    tolerance = {"rtol": 0.1, "atol": 0.02} if "precision" in arguments else {}
    over_virtual_machines(
        trained, 3, "gpt2", 2, virtual_machines=[[0, 1], [2]], arguments=arguments, **tolerance
    )


def test_weights_of_microbatches_with_accumulation() -> None:
    over_virtual_machines(
        trained,
        4,
        "masked_tokens",
        2,
        virtual_machines=2,
        arguments={"accumulate_grad_batches": 2, "validates": True},
    )


@pytest.mark.parametrize(("ranks", "virtual_machines"), [(4, 2), (3, [[0, 1], [2]])])
def test_logs_and_metrics_are_those_of_one_device(ranks: int, virtual_machines: Any) -> None:
    found = over_virtual_machines(
        trained,
        ranks,
        "accuracy",
        2,
        virtual_machines=virtual_machines,
        arguments={"validates": True},
    )
    assert any("val_accuracy" in metrics["callback"] for _, metrics in found[0]["diary"])


@pytest.mark.parametrize(
    ("shares", "name"), [([3, 1], "sequential"), ([1, 5], "masked_tokens"), ([2.5, 1.5], "gpt2")]
)
def test_shares_of_the_batch_make_no_difference(shares: list[float], name: str) -> None:
    over_virtual_machines(trained, 4, name, 2, virtual_machines=2, batch_shares=shares)


@pytest.mark.parametrize("partition", [[[5, 0], [2, 3]], [[1, 4], [4, 1]]])
def test_cuts_that_differ(partition: Any) -> None:
    over_virtual_machines(trained, 4, "sequential", 2, virtual_machines=2, partition=partition)


@pytest.mark.parametrize("name", ["sequential", "gpt2", "masked_tokens"])
def test_allreduce_instead_of_rings(name: str) -> None:
    over_virtual_machines(
        trained,
        3,
        name,
        2,
        virtual_machines=[[0, 1], [2]],
        communication=Communication(gradient_aggregation="allreduce"),
        rtol=1e-3,
    )


@pytest.mark.parametrize("name", ["gpt2_dropout", "random_mask"])
def test_the_same_bits_wherever_layers_live(name: str) -> None:
    runs = [
        on_ranks(trained, ranks, name, 2, virtual_machines=vms, partition=partition)
        for ranks, vms, partition in [
            (2, 2, "uniform"),
            (4, 2, "uniform"),
            (3, [[0, 1], [2]], "uniform"),
            (3, [[2], [1, 0]], "uniform"),
        ]
    ]
    # Every run again: what depends on timing would show.
    runs.append(on_ranks(trained, 4, name, 2, virtual_machines=2, partition="uniform"))
    for run in runs[1:]:
        assert not differences(run[0], runs[0][0], 0, 0)


def saved(how: Any, name: str, folder: str) -> Any:
    torch.manual_seed(3)
    specimen = ZOO[name]
    saver = ModelCheckpoint(folder, save_last=True)
    record, _, _ = fit(
        how,
        specimen.make_module,
        loader(name, how, 2),
        callbacks=[saver],
        enable_checkpointing=True,
        max_epochs=1,
    )
    return plain(record)


@pytest.mark.parametrize("virtual_machines", [[[0, 1], [2]], [[2], [1, 0]]])
def test_a_checkpoint_is_whole(virtual_machines: Any, tmp_path: Path) -> None:
    for name in ("parameter_groups", "gpt2"):
        over_virtual_machines(
            saved, 3, name, str(tmp_path / name), virtual_machines=virtual_machines, rtol=1e-3
        )
        # The ranks wrote after the one device did, under another name.
        paths = sorted((tmp_path / name).glob("last*.ckpt"), key=lambda p: p.stat().st_mtime)
        expected, found = (torch.load(path, weights_only=True) for path in (paths[0], paths[-1]))
        assert len(paths) == 2
        for part in ("state_dict", "optimizer_states", "lr_schedulers"):
            assert not differences(found[part], expected[part], 1e-2, 1e-4)


class WithoutSeed(SequentialMLP):
    """Every rank begins with other weights, as nobody set a seed."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)


def without_seed(how: Any) -> Any:
    record, _, _ = fit(how, WithoutSeed, points(3), max_epochs=1)
    return plain(record["parameters"])


def test_replicas_begin_with_the_same_weights() -> None:
    on_ranks(without_seed, 3, virtual_machines=[[0, 1], [2]])


class SplitsAtRandom(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        dataset: Any = points(6).dataset
        self.train, self.val = torch.utils.data.random_split(dataset, [32, 16])

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=4)


def splitting_without_seed(how: Any) -> Any:
    torch.manual_seed(7 + int(os.environ["RANK"]))
    trainer = quiet_trainer(how, max_epochs=2)
    module = built(SequentialMLP)
    trainer.fit(module, datamodule=SplitsAtRandom())
    return plain([trainer.callback_metrics, module.state_dict()])


@pytest.mark.parametrize("virtual_machines", [1, [[0, 1], [2]]])
def test_data_split_at_random_without_a_seed(virtual_machines: Any) -> None:
    on_ranks(splitting_without_seed, 3, virtual_machines=virtual_machines)


def with_scaler(how: Any, where: int) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    data: Any = points(8).dataset
    data.tensors[0][29, 0] = 1000.0
    record, _, _ = fit(
        how,
        lambda: OverflowingOnOneStage(where),
        DataLoader(data, batch_size=8 if "pipeshift" not in how else 4),
        plugins=MixedPrecision("16-mixed", "cpu", scaler),
        max_epochs=1,
    )
    return plain([record["parameters"], scaler.state_dict()])


@pytest.mark.parametrize("where", [1, 2])
def test_one_overflow_decision_for_all(where: int) -> None:
    over_virtual_machines(
        with_scaler, 4, where, virtual_machines=2, partition=[2, 2], rtol=2e-2, atol=2e-3
    )


class StopsEarly(SequentialMLP):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("worse", float(self.current_epoch))


def stopping(how: Any) -> Any:
    val = DataLoader(points(2).dataset, batch_size=8 if "pipeshift" not in how else 4)
    record, trainer, _ = fit(
        how,
        StopsEarly,
        DataLoader(points(2).dataset, batch_size=8 if "pipeshift" not in how else 4),
        val,
        callbacks=[EarlyStopping("worse", patience=1)],
        max_epochs=9,
    )
    return record["epoch"], plain(trainer.callback_metrics)


def test_everybody_stops_at_the_same_time() -> None:
    found = over_virtual_machines(stopping, 3, virtual_machines=[[0, 1], [2]])
    assert found[0][0] < 8


class Asks(SequentialMLP):
    """Asks the strategy for sums and for what others have."""

    def on_train_epoch_end(self) -> None:
        strategy: Any = self.trainer.strategy
        vm = float(strategy.virtual_machine)
        self.answers = plain(
            [
                self.all_gather(torch.tensor([vm, 1.0])),
                strategy.reduce(torch.tensor(vm + 1), reduce_op="sum"),
                strategy.reduce(torch.tensor(vm + 1), reduce_op="mean"),
                strategy.reduce(torch.tensor(vm), reduce_op=torch.distributed.ReduceOp.MAX),
                strategy.broadcast([vm, "word"], src=2),
                strategy.reduce_boolean_decision(vm == 0, all=True),
                strategy.reduce_boolean_decision(vm == 0, all=False),
                strategy.distributed_sampler_kwargs["num_replicas"],
                strategy.topology.ranks,
            ]
        )


def asking(how: Any) -> Any:
    _, _, module = fit(how, Asks, points(2), max_epochs=1)
    return module.answers


def test_reductions_count_virtual_machines() -> None:
    found = on_ranks(asking, 3, virtual_machines=[[0, 1], [2]])
    expected = [
        torch.tensor([[0.0, 1.0], [1.0, 1.0]]),
        torch.tensor(3.0),
        torch.tensor(1.5),
        torch.tensor(1.0),
        [1.0, "word"],
        False,
        True,
        2,
        ((0, 1), (2,)),
    ]
    assert not differences(found[0], expected, 0, 0)


def evaluated(how: Any, name: str) -> Any:
    specimen = ZOO[name]
    trainer = quiet_trainer(how)
    module = built(specimen.make_module)
    size = 7 if "pipeshift" not in how else 3
    data = DataLoader(specimen.make_loader(3).dataset, batch_size=size)
    found = [trainer.validate(module, data, verbose=False)]
    found.append(plain(trainer.callback_metrics))
    found.append(trainer.test(module, data, verbose=False))
    return plain(found)


@pytest.mark.parametrize(("ranks", "virtual_machines"), [(4, 2), (3, [[0, 1], [2]]), (3, 3)])
def test_evaluation_counts_every_sample_once(ranks: int, virtual_machines: Any) -> None:
    over_virtual_machines(evaluated, ranks, "accuracy", virtual_machines=virtual_machines)


# What happened on this rank, in order.
EVENTS: list[str] = []


class _NotesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, name: str) -> Tensor:
        ctx.name = name
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        EVENTS.append(f"backward {ctx.name}")
        return gradients[0], None


class Noting(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.name = name

    def forward(self, hidden: Tensor) -> Tensor:
        # What is noted in the backward comes before the linear layer's own.
        noted: Tensor = _NotesBackward.apply(self.linear(hidden), self.name)
        return noted


class NotingModel(SequentialMLP):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Noting(name) for name in "abc"))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()


def events(how: Any) -> list[str]:
    class Listens(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if index == 1:
                EVENTS.clear()
                aggregation = trainer.strategy.pipeline._aggregation
                begin = aggregation._start_sum

                def listening(number: int, *rest: Any) -> Any:
                    EVENTS.append(f"ring {'abc'[number // 8]}")
                    return begin(number, *rest)

                aggregation._start_sum = listening

    data = DataLoader(points(2).dataset, batch_size=4)
    trainer = quiet_trainer(how, callbacks=[Listens()], max_epochs=1, limit_train_batches=2)
    trainer.fit(built(NotingModel), data)
    return EVENTS


def test_a_layers_ring_begins_when_the_last_backward_has_passed_it() -> None:
    strategy = {"virtual_machines": 2, "microbatches": 2}
    for happened in run_ranks(on_rank, 2, events, strategy, (), {}):
        first, last = happened[:3], happened[3:]
        assert first == ["backward c", "backward b", "backward a"]
        assert last == [
            "backward c",
            "ring c",
            "backward b",
            "ring b",
            "backward a",
            "ring a",
        ]


# --------------------------------------------------------------------------------------------------
# What is not allowed, and what fails
# --------------------------------------------------------------------------------------------------


def failing(how: Any, num_samples: int = 32, dies: int | None = None) -> Any:
    class Dies(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_rank == dies and trainer.global_step == 2:
                aggregation = trainer.strategy.pipeline._aggregation
                begin = aggregation._start_sum

                def die_in_the_middle(*arguments: Any) -> Any:
                    begin(*arguments)
                    os.kill(os.getpid(), signal.SIGKILL)

                aggregation._start_sum = die_in_the_middle

    class Counts(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            print("steps taken:", trainer.global_step, flush=True)

    data = torch.utils.data.Subset(points(8).dataset, range(num_samples))
    loaders = DataLoader(data, batch_size=4), DataLoader(data, batch_size=4)
    trainer = quiet_trainer(how, callbacks=[Dies(), Counts()], max_epochs=1)
    trainer.fit(built(SequentialMLP), *loaders)


BAD: list[tuple[int, dict[str, Any], str]] = [
    (3, {"virtual_machines": 2}, "3 ranks cannot be shared out evenly"),
    (3, {"virtual_machines": [[0, 1]]}, "names 2 ranks; this run has 3"),
    (2, {"virtual_machines": 2, "batch_shares": [1, 2, 3]}, "has 3 entries; there are 2"),
    (2, {"virtual_machines": 2, "partition": [[5], [4]]}, "adds up to 4 layers"),
    (2, {"virtual_machines": 2, "partition": [[5], [5], [5]]}, "there are 2"),
]


@pytest.mark.parametrize(("ranks", "strategy", "message"), BAD)
def test_arguments_that_do_not_fit_the_run(
    ranks: int, strategy: dict[str, Any], message: str
) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(on_rank, ranks, failing, strategy, (), {})
    for outcome in caught.value.outcomes:
        assert message in outcome.message, str(outcome)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"virtual_machines": [[0, 1], [1, 2]]}, "names rank 1 more than once"),
        ({"virtual_machines": [[0, 1], [3]]}, "not rank 2"),
        ({"virtual_machines": [[0, 1], []]}, r"virtual machine 1 \(.*\) has no device"),
        ({"virtual_machines": 0}, "1 or more"),
        ({"virtual_machines": "two"}, "allowed are 'auto'"),
        ({"virtual_machines": [0, 1]}, "one list of ranks for each"),
        ({"batch_shares": [1, 0]}, r"gives virtual machine 1 \(.*\) the share 0"),
        ({"batch_shares": [1, -2.0]}, "above 0"),
        ({"batch_shares": 3}, "one number for each"),
    ],
)
def test_arguments_that_nobody_could_take(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PipeShiftStrategy(**arguments)


def test_too_few_samples_to_evaluate() -> None:
    with pytest.raises(RanksFailed, match="zero length"):
        run_ranks(on_rank, 2, failing, {"virtual_machines": 2}, (1,), {})


@pytest.mark.parametrize("dies", [1, 2])
def test_a_member_that_dies_in_the_middle_of_a_sum(dies: int) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(
            on_rank,
            3,
            failing,
            {"virtual_machines": [[0, 1], [2]], "microbatches": 2, "partition": "uniform"},
            (),
            {"dies": dies},
        )
    name = "Stage 1 of virtual machine 0" if dies == 1 else "Stage 0 of virtual machine 1"
    for outcome in caught.value.outcomes:
        # Nobody took the step that it died in; others may have been a step behind.
        assert ("steps taken: 2" if outcome.rank == dies else "steps taken: 1") in outcome.output
        assert "steps taken: 3" not in outcome.output
        if outcome.rank != dies:
            who = f"{name} (one replica of the pipeline) (rank {dies} on {socket.gethostname()})"
            assert f"{who} ended without an error message" in outcome.message, str(outcome)
