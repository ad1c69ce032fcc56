"""One device by itself does what plain Lightning does: there, the steps are the user's own."""

from __future__ import annotations

import copy
import os
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeshift import ConfigurationError
from lightning_pipeshift.testing.ranks import RanksFailed, run_ranks
from tests.features_models import built, compare, fit, on_rank, parameters_of, quiet_trainer
from tests.models import NUM_CLASSES, NUM_FEATURES, LayersOfItsOwn, points

ALONE = {"microbatches": 1}
KEPT: list[Tensor] = []


class LooksAtWhatItLogs(LayersOfItsOwn):
    """Reads in the step what Lightning has of the values that the step logs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("count", float(batch_idx), on_step=True, on_epoch=True)
        self.seen.append(float(self.trainer.fit_loop._results["training_step.count"].value))
        return loss


class DoublesInBackward(LayersOfItsOwn):
    """Its gradients are twice what the loss says."""

    def backward(self, loss: Tensor) -> None:
        (2 * loss).backward()


class FetchesItself(LayersOfItsOwn):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        (features, classes), _, _ = next(dataloader_iter)
        return F.cross_entropy(self(features), classes)


class WithLBFGS(LayersOfItsOwn):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class TiedToTheHead(L.LightningModule):
    """One parameter in two layers and in the code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.second = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.second.weight = self.first.weight
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, classes = batch
        hidden = self.second(torch.relu(self.first(features)))
        hidden = hidden + 0.1 * self.first.weight.sum()
        return F.cross_entropy(self.head(hidden), classes)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OnlyAParameter(L.LightningModule):
    """No module at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM_FEATURES, NUM_CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(batch[0] @ self.weight, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(LayersOfItsOwn):
    """What a step of manual optimization may do on one device only."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.unused = nn.Parameter(torch.ones(2))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        features, classes = batch
        loss = F.cross_entropy(self(features), classes)
        loss.register_hook(lambda gradient: 2 * gradient)
        unused, *gradients = torch.autograd.grad(
            loss, list(self.parameters()), retain_graph=True, allow_unused=True
        )
        assert unused is None
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)
        optimizer.step()
        copied = copy.deepcopy(self)
        copied.head.weight.data.mul_(2.0)
        again = copied(features)
        self.seen.append([float(x.sum()) for x in (*gradients, again)])
        return loss


class PenalisesSlopes(LayersOfItsOwn):
    """A gradient penalty, whose backward goes through a gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, classes = batch
        features = features.clone().requires_grad_()
        logits = self(features)
        (slopes,) = torch.autograd.grad(logits.sum(), features, create_graph=True)
        return F.cross_entropy(logits, classes) + slopes.norm(dim=1).sub(1).square().mean()


class Keeps(LayersOfItsOwn):
    """Code that the run knows nothing of keeps a tensor and uses it when the run is over."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        KEPT.append(self.head(torch.ones(1, 16)))
        return loss


def training(how: Any, kind: type, accumulate: int = 1) -> Any:
    KEPT.clear()
    record, trainer, module = fit(
        how, kind, points(6), max_epochs=2, accumulate_grad_batches=accumulate
    )
    return {
        "record": record,
        "seen": getattr(module, "seen", None),
        "kept": [(type(x).__name__, float((x * x).sum())) for x in KEPT],
        "steps": trainer.global_step,
    }


@pytest.mark.feature(
    "Training", "an overridden `backward`, LBFGS and `dataloader_iter`, on one device"
)
@pytest.mark.parametrize(
    "kind",
    [
        LooksAtWhatItLogs,
        DoublesInBackward,
        FetchesItself,
        WithLBFGS,
        TiedToTheHead,
        OnlyAParameter,
        ByHand,
        PenalisesSlopes,
        Keeps,
    ],
)
def test_a_step_is_the_users_own(kind: type) -> None:
    compare(training, kind, stages=1, strategy=ALONE)


def test_a_gradient_penalty_is_that_of_the_microbatches_as_batches() -> None:
    whole = list(points(6))
    halves = [half for each in whole for half in zip(*(x.chunk(2) for x in each), strict=True)]
    runs = []
    for how, batches, accumulated in (
        ({"pipeshift": {"microbatches": 2}}, whole, 1),
        ({}, halves, 2),
    ):
        module = built(PenalisesSlopes)
        trainer = quiet_trainer(how, max_epochs=2, accumulate_grad_batches=accumulated)
        trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        runs.append(dict(module.named_parameters()))
    one, other = runs
    assert all(torch.equal(x, other[name]) for name, x in one.items())


@pytest.mark.parametrize("kind", [LayersOfItsOwn, DoublesInBackward, TiedToTheHead])
def test_gradients_are_added_up_over_batches(kind: type) -> None:
    compare(training, kind, accumulate=3, stages=1, strategy=ALONE)


def copying_callbacks(how: Any) -> Any:
    class Copies(L.Callback):
        def on_fit_start(self, trainer: Any, *_: Any) -> None:
            # The progress bar refers to the Trainer.
            self.copies = copy.deepcopy(trainer.callbacks)

    callback = Copies()
    fit(how, LayersOfItsOwn, points(2), None, [callback], max_epochs=1, enable_progress_bar=True)
    return [type(each).__name__ for each in callback.copies]


def test_callbacks_can_be_copied_in_a_run() -> None:
    compare(copying_callbacks, stages=1, strategy=ALONE)


def one_more_step(how: Any) -> Any:
    """Runs a step of the Trainer's loop when the run is over."""
    _, trainer, module = fit(how, LayersOfItsOwn, points(2), max_epochs=1)
    trainer.state.stage = RunningStage.TRAINING
    optimization = trainer.fit_loop.epoch_loop.automatic_optimization
    batch = next(iter(points(1)))
    given = OrderedDict({"batch": batch, "batch_idx": 0})
    result = optimization.run(trainer.optimizers[0], 0, given)
    return float(result["loss"]), parameters_of(module)


def test_the_loop_makes_a_step_when_the_run_is_over() -> None:
    compare(one_more_step, stages=1, strategy=ALONE)


def pruning(how: Any) -> Any:
    """The weight is made by a hook, and is a parameter again when the training ends."""
    callback = ModelPruning("l1_unstructured", amount=0.5)
    data = points(3), points(2)
    record, trainer, module = fit(how, LayersOfItsOwn, *data, [callback], max_epochs=2)
    return record["parameters"], trainer.validate(module, points(2), verbose=False)


def test_weights_are_pruned() -> None:
    compare(pruning, stages=1, strategy=ALONE)


@pytest.mark.parametrize(
    "strategy", [{"microbatches": 2}, {"microbatches": 1, "recompute": "full"}]
)
def test_a_backward_that_would_not_be_called_is_refused(strategy: Any) -> None:
    with pytest.raises(RanksFailed, match="overrides `backward`"):
        run_ranks(on_rank, 1, training, strategy, (DoublesInBackward,), {})


def evaluating_without_parameters(how: Any) -> Any:
    class Mean(L.LightningModule):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("mean", batch[0].mean())

    return quiet_trainer(how).test(Mean(), points(3), verbose=False)


def test_a_model_without_parameters_is_evaluated() -> None:
    compare(evaluating_without_parameters, stages=1, strategy=ALONE)


def hooks_of_checkpoints(how: Any, path: str) -> Any:
    """The arguments of the hooks: the names of the entries, when the file has been written."""
    given: list[Any] = []

    class Listens(LayersOfItsOwn):
        def on_save_checkpoint(self, checkpoint: Any) -> None:
            given.append(checkpoint)

        on_load_checkpoint = on_save_checkpoint

    trainer = quiet_trainer(how, max_epochs=1)
    trainer.fit(built(Listens), points(2))
    trainer.save_checkpoint(path)
    quiet_trainer(how, max_epochs=2).fit(built(Listens), points(2), ckpt_path=path)
    return [sorted(checkpoint) for checkpoint in given]


def test_hooks_are_given_the_checkpoint_of_plain_lightning(tmp_path: Path) -> None:
    compare(hooks_of_checkpoints, str(tmp_path / "a.ckpt"), stages=1, strategy=ALONE)


def asking_before_a_run(how: Any) -> Any:
    trainer = quiet_trainer(how, max_epochs=3)
    module = built(LayersOfItsOwn)
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, train_dataloaders=points(5))
    return trainer.estimated_stepping_batches


def test_the_trainer_answers_before_a_run() -> None:
    compare(asking_before_a_run, stages=1, strategy=ALONE)


def training_with_own_threads(how: Any) -> Any:
    os.environ.pop("OMP_NUM_THREADS", None)
    torch.set_num_threads(3)
    quiet_trainer(how, max_epochs=1).fit(built(LayersOfItsOwn), points(1))
    return torch.get_num_threads()


def test_the_number_of_threads_stays_what_the_user_set() -> None:
    assert run_ranks(on_rank, 1, training_with_own_threads, ALONE, (), {}) == [3]


def without_a_closure(how: Any) -> None:
    class Forgets(LayersOfItsOwn):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            """Calls nothing."""

    quiet_trainer(how, max_epochs=1).fit(built(Forgets), points(1))


def test_lightnings_own_error_comes_through() -> None:
    with pytest.raises(RanksFailed, match="The closure hasn't been executed"):
        run_ranks(on_rank, 1, without_a_closure, ALONE, (), {})


def in_a_slurm_job(how: Any) -> Any:
    """With only what says that there is a job."""
    os.environ.update(SLURM_NTASKS="1", SLURM_JOB_NAME="job", SLURM_JOB_ID="1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    module = built(LayersOfItsOwn)
    plugins = [SLURMEnvironment(auto_requeue=False)]
    trainer = quiet_trainer({**how, "devices": 1}, max_epochs=1, plugins=plugins)
    trainer.fit(module, points(2))
    return parameters_of(module)


def test_one_process_of_a_slurm_job_needs_no_rank() -> None:
    [trained] = run_ranks(on_rank, 1, in_a_slurm_job, ALONE, (), {})
    assert trained


def test_what_needs_one_device_is_said() -> None:
    with pytest.raises(RanksFailed, match="One device takes it") as caught:
        run_ranks(on_rank, 2, training, {"microbatches": 2}, (WithLBFGS,), {})
    assert ConfigurationError.__name__ in str(caught.value)


class TakesLists(LayersOfItsOwn):
    """Its batches are lists of samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].reshape(1, -1)
        return self(F.pad(x, (0, NUM_FEATURES - x.numel()))).mean()


def samples_in_a_list(how: Any) -> list[str]:
    """The warnings of a run whose batches are lists of samples, as long as each other."""
    samples: Any = [torch.randn(NUM_FEATURES) for _ in range(8)]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer = quiet_trainer(how, max_epochs=1)
        trainer.fit(built(TakesLists), DataLoader(samples, 4, collate_fn=list))
    return [str(each.message) for each in found]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_list_of_samples_that_is_cut_otherwise_is_told(microbatches: int) -> None:
    how = {"devices": 1, "pipeshift": {"microbatches": microbatches}}
    (said,) = run_ranks(samples_in_a_list, 1, how)
    is_told = any("makes batches of 4 samples" in each for each in said)
    # Of each sample, a microbatch has half of its features.
    assert is_told == (microbatches > 1)
