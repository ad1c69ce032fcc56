"""Each name of ``compat.lightning_private`` and ``compat.lightning_names`` exists, and does what
the package relies on.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, RandomDataset
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_pipeshift.compat import lightning_names
from lightning_pipeshift.compat import lightning_private as compat


def trainer(**kwargs: Any) -> pl.Trainer:
    return pl.Trainer(
        **{
            "accelerator": "cpu",
            "max_steps": 3,
            "limit_val_batches": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **kwargs,
        }
    )


class Seen(Callback):
    """Notes what a function says of the Trainer in some hooks."""

    def __init__(self, look: Any) -> None:
        self._look = look
        self.of: dict[str, list[Any]] = {}

    def _note(self, hook: str, trainer: pl.Trainer) -> None:
        self.of.setdefault(hook, []).append(self._look(trainer))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._note("train", trainer)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._note("validation", trainer)

    def on_test_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._note("test", trainer)

    def on_predict_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._note("predict", trainer)


# --- modules and their Trainer ---


def test_a_module_has_its_trainer_or_none() -> None:
    module = BoringModel()
    assert lightning_names.trainer_of(module) is None
    assert lightning_names.trainer_of(torch.nn.Linear(1, 1)) is None
    assert lightning_names.trainer_of(None) is None
    assert vars(module).keys() >= lightning_names.OWNERS
    assert lightning_names.TRAINER in lightning_names.OWNERS
    seen = Seen(lambda trainer: lightning_names.trainer_of(module) is trainer)
    trainer(callbacks=[seen]).fit(module)
    assert all(seen.of["train"])


def test_devices_of_nested_modules_are_set() -> None:
    outer = BoringModel()
    outer.inner = BoringModel()
    compat.update_properties(outer, device=torch.device("meta"))
    assert outer.device == outer.inner.device == torch.device("meta")
    assert outer.layer.weight.device == torch.device("cpu")


def test_what_is_public_of_strategies_and_optimizers() -> None:
    strategy = SingleDeviceStrategy("cpu")
    assert strategy.lightning_module is None
    module = BoringModel()
    strategy.connect(module)
    assert strategy.lightning_module is module
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    strategy.optimizers, strategy.lr_scheduler_configs = [optimizer], []
    assert LightningOptimizer(optimizer).optimizer is optimizer
    strategy.optimizers = []
    assert strategy.optimizers == []
    assert strategy._lightning_optimizers == []


# --- files, processes ---


def test_local_paths_are_told_from_remote_ones(tmp_path: Path) -> None:
    assert compat.is_local_path(str(tmp_path / "a.ckpt"))
    assert compat.is_local_path("a.ckpt")
    assert not compat.is_local_path("s3://bucket/a.ckpt")
    assert not compat.is_local_path("memory://a.ckpt")


def test_plugins_around_a_checkpoint_io_are_known() -> None:
    inner = TorchCheckpointIO()
    wrapper = AsyncCheckpointIO(inner)
    assert isinstance(wrapper, compat.WrappingCheckpointIO)
    assert wrapper.checkpoint_io is inner
    assert not isinstance(inner, compat.WrappingCheckpointIO)


def test_the_number_of_threads_is_set_unless_the_user_has(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    compat.set_num_threads_if_needed(2)
    assert not given
    del os.environ["OMP_NUM_THREADS"]
    compat.set_num_threads_if_needed(2)
    assert len(given) == 1
    assert os.environ["OMP_NUM_THREADS"] == str(given[0])


def test_tests_are_not_interactive() -> None:
    assert compat.IS_INTERACTIVE is False


def test_the_process_group_gets_our_store(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda backend, **kwargs: given.update(kwargs, backend=backend),
    )
    environment = LightningEnvironment()
    store = object()
    compat.init_dist_connection(
        environment, "gloo", global_rank=1, world_size=2, timeout=None, store=store
    )
    expected = {"backend": "gloo", "rank": 1, "world_size": 2, "timeout": None, "store": store}
    assert given == expected
    assert os.environ["MASTER_PORT"] == "1234"


def test_children_run_this_script_with_ranks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []

    def popen(command: list[str], env: dict[str, str], **_: Any) -> Any:
        started.append(env)
        return SimpleNamespace(command=command)

    monkeypatch.setattr(subprocess, "Popen", popen)
    # It sets these; they are restored after the test.
    for name in ("MASTER_ADDR", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("MASTER_PORT", "1234")
    launcher = compat.SubprocessScriptLauncher(LightningEnvironment(), num_processes=3, num_nodes=1)
    compat.start_children(launcher)
    assert [env["LOCAL_RANK"] for env in started] == ["1", "2"]
    assert {env["WORLD_SIZE"] for env in started} == {"3"}
    assert len(launcher.procs) == 2
    assert launcher.procs[0].command[0] == sys.executable  # type: ignore[attr-defined]


def test_the_launcher_of_notebooks_takes_a_start_method() -> None:
    strategy: Any = SimpleNamespace(cluster_environment=None)
    launcher = compat.MultiProcessingLauncher(strategy, start_method="fork")
    assert launcher.is_interactive_compatible


# --- signals ---


def test_the_handler_of_sigterm_is_replaced_and_the_run_ends() -> None:
    run = trainer()
    connector = compat.signal_connector(run)
    assert callable(getattr(connector, compat.SIGTERM_NOTIFIER))
    calls: list[int] = []
    setattr(connector, compat.SIGTERM_NOTIFIER, lambda signum, frame: calls.append(signum))
    seen: list[bool] = []

    class Ends(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            os.kill(os.getpid(), 15)
            seen.append(trainer.received_sigterm)
            compat.end_as_after_sigterm(trainer)

    run.callbacks.append(Ends())  # type: ignore[attr-defined]
    # Lightning ends the run with its SIGTERMException, which makes the process exit.
    with pytest.raises(SystemExit):
        run.fit(BoringModel())
    assert calls == [15]
    assert seen == [False]
    assert run.received_sigterm
    assert run.global_step == 1


# --- loops and data ---


def test_the_step_of_loggers_counts_batches_that_made_a_step() -> None:
    seen = Seen(lambda trainer: (compat.step_of_loggers(trainer), trainer.global_step))
    run = trainer(
        max_epochs=1,
        max_steps=-1,
        limit_train_batches=6,
        accumulate_grad_batches=2,
        callbacks=[seen],
    )
    run.fit(BoringModel())
    # In this hook, the step of a batch has been made, and is not counted for loggers yet.
    assert seen.of["train"] == [(0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3)]
    assert compat.step_of_loggers(run) == run.global_step == 3


def test_the_loop_that_evaluates_is_that_of_the_run() -> None:
    seen = Seen(compat.evaluation_loop)
    run = trainer(callbacks=[seen], val_check_interval=1)
    run.fit(BoringModel())
    assert {*seen.of["validation"]} == {run.fit_loop.epoch_loop.val_loop}
    seen.of.clear()
    run.validate(BoringModel(), verbose=False)
    assert {*seen.of["validation"]} == {run.validate_loop}
    run.test(BoringModel(), verbose=False)
    assert {*seen.of["test"]} == {run.test_loop}
    with pytest.raises(RuntimeError):
        compat.evaluation_loop(trainer())


def test_loaders_and_predictions_of_a_loop() -> None:
    def look(trainer: pl.Trainer) -> Any:
        loop = trainer.predict_loop
        return [len(of) for of in compat.predictions_of(loop)], compat.combined_loader_of(loop)

    seen = Seen(look)
    run = trainer(callbacks=[seen], limit_predict_batches=3)
    loader: Any = DataLoader(RandomDataset(32, 8), batch_size=2)
    run.predict(BoringModel(), loader)
    counts = [counts for counts, _ in seen.of["predict"]]
    assert counts == sorted(counts)
    assert counts[-1] in ([2], [3])
    combined = seen.of["predict"][0][1]
    assert [type(part) for part in combined.flattened] == [DataLoader]
    run.fit(BoringModel(), loader)
    batches = [batch for batch, *_ in iter(compat.combined_loader_of(run.fit_loop))]
    assert len(batches) == 4


def test_predictions_record_the_indices_of_a_batch_sampler() -> None:
    mine = BatchSampler(SequentialSampler(range(5)), 2, False)
    recorded = compat.RecordedBatches(mine)
    assert compat.recorded_batch_sampler(recorded) is mine
    assert list(recorded) == [[0, 1], [2, 3], [4]] == recorded.seen_batch_indices
    found: list[Any] = []

    class Looks(Callback):
        def on_predict_start(self, trainer: pl.Trainer, *_: Any) -> None:
            found.extend(compat.combined_loader_of(trainer.predict_loop).flattened)

    loader: Any = DataLoader(RandomDataset(32, 5), batch_sampler=mine)
    trainer(callbacks=[Looks()]).predict(BoringModel(), loader)
    assert isinstance(found[0].batch_sampler, compat.RecordedBatches)


def test_the_datamodule_of_a_run() -> None:
    run, data = trainer(), BoringDataModule()
    assert compat.datamodule_of(run) is None
    run.fit(BoringModel(), datamodule=data)
    assert compat.datamodule_of(run) is data
    run.fit_loop.epoch_progress.reset()
    run.validate(BoringModel(), verbose=False)
    assert compat.datamodule_of(run) is None


@pytest.mark.parametrize("is_wanted", [True, False])
def test_whether_lightning_replaces_samplers_is_read_and_set(is_wanted: bool) -> None:
    run = trainer(use_distributed_sampler=is_wanted)
    assert compat.uses_distributed_sampler(run) is is_wanted
    compat.use_distributed_sampler(run, not is_wanted)
    assert compat.uses_distributed_sampler(run) is not is_wanted


# --- the Trainer's arguments ---


def test_the_check_of_arguments_and_the_precision_plugin_are_replaced() -> None:
    known = compat.arguments_check()
    assert known is not None
    check, replace = known
    given: list[Any] = []
    made: list[Any] = []

    def checks(self: Any, *args: Any, **kwargs: Any) -> Any:
        given.append(kwargs["precision"])

        def make() -> Any:
            made.append(compat.make_precision(self))
            return made[0]

        compat.make_precision_by(self, make)
        return check(self, *args, **kwargs)

    replace(checks)
    try:
        run = trainer(precision="bf16-mixed")
    finally:
        replace(check)
    assert given == ["bf16-mixed"]
    assert run.precision_plugin is made[0]
    assert isinstance(made[0], Precision)
    assert made[0].precision == "bf16-mixed"
    again = compat.arguments_check()
    assert again is not None
    assert again[0] is check


def test_a_connector_with_other_methods_is_not_known() -> None:
    assert compat.arguments_check(object) is None
