"""Validation, test and prediction: as on one device, the stages on successive batches at once."""

from __future__ import annotations

import gc
import random
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter, LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_pipeshift.testing.ranks import LIMIT_SECONDS, RanksFailed, run_ranks
from tests.end_to_end.test_lightning_features import Stream
from tests.features_models import (
    built,
    compare,
    fit,
    numbered_points,
    on_one_device,
    on_rank,
    parameters_of,
    plain,
    quiet_trainer,
)
from tests.models import (
    NUM_FEATURES,
    ZOO,
    BatchNorm,
    LayersOfItsOwn,
    SequentialMLP,
    points,
    uneven_points,
)

# --------------------------------------------------------------------------------------------------
# The four entry points
# --------------------------------------------------------------------------------------------------


def small_batches(how_large: int, size: int, seed: int = 5) -> DataLoader:
    """Batches of ``size``, perhaps fewer than the microbatches, the last one smaller still."""
    dataset = points(4, seed=seed).dataset
    return DataLoader(torch.utils.data.Subset(dataset, range(how_large)), batch_size=size)


def standalone(how: Any, size: int, name: str = "sequential") -> Any:
    specimen = ZOO[name]
    module = built(specimen.make_module)
    trainer = quiet_trainer(how)
    val = trainer.validate(module, small_batches(19, size), verbose=False)
    val_again = trainer.validate(module, small_batches(5, size), verbose=False)
    test = trainer.test(module, small_batches(13, size, seed=6), verbose=False)
    predicted = trainer.predict(module, small_batches(13, size, seed=7))
    metrics = plain(trainer.callback_metrics)
    return plain([val, val_again, test, predicted, metrics, parameters_of(module)])


@pytest.mark.feature("Evaluation", "`validate`, `test`, `predict`")
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_validate_test_and_predict_without_training(size: int, stages: int) -> None:
    compare(standalone, size, stages=stages)


@pytest.mark.parametrize(
    "name", ["structured_outputs", "in_place", "loose_parameters", "batch_norm"]
)
def test_evaluation_of_models_with_habits(name: str) -> None:
    compare(standalone, 8, name)


def around_training(how: Any) -> Any:
    """Every entry point before and after a fit, with one Trainer and one module."""
    module = built(SequentialMLP)
    trainer = quiet_trainer(how, max_epochs=2, num_sanity_val_steps=2)
    seen: list[Any] = [trainer.validate(module, points(2, seed=5), verbose=False)]
    seen.append(trainer.predict(module, points(2, seed=7)))
    trainer.fit(module, points(3), points(3, seed=5))
    seen.append(parameters_of(module))
    seen.append(trainer.validate(module, points(2, seed=5), verbose=False))
    seen.append(trainer.test(module, points(2, seed=6), verbose=False))
    seen.append(trainer.predict(module, points(2, seed=7)))
    with torch.no_grad():
        seen.append(module.eval()(points(1).dataset.tensors[0]))  # type: ignore[attr-defined]
    again = quiet_trainer(how, max_epochs=1)
    again.fit(module.train(), points(3), points(3, seed=5))
    seen.append(parameters_of(module))
    return plain(seen)


def test_every_entry_point_before_and_after_training() -> None:
    compare(around_training)


class Decodes(LayersOfItsOwn):
    """Prediction calls fewer layers than training; test has some code of its own."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"embedding": self.second(self.first(batch[0]).relu()), "index": batch_idx}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0]).softmax(dim=1)
        self.log("confident", (scores.max(dim=1).values > 0.3).float().mean())
        return scores


def fewer_layers(how: Any) -> Any:
    module = built(Decodes)
    trainer = quiet_trainer(how)
    predicted = trainer.predict(module, uneven_points(3))
    tested = trainer.test(module, uneven_points(3), verbose=False)
    return plain([predicted, tested])


@pytest.mark.parametrize("stages", [2, 3])
def test_a_step_that_calls_fewer_layers(stages: int) -> None:
    compare(fewer_layers, stages=stages)


class ValidatesOnPart(LayersOfItsOwn):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("norm", self.first(batch[0]).norm())


def validating_on_part(how: Any) -> Any:
    return fit(how, ValidatesOnPart, points(3), points(2), max_epochs=2, num_sanity_val_steps=1)[0]


def test_validation_that_calls_fewer_layers_than_training() -> None:
    compare(validating_on_part)


# --------------------------------------------------------------------------------------------------
# Predictions
# --------------------------------------------------------------------------------------------------


class Predicts(SequentialMLP):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        features, _, numbers = batch
        scores = self(features)
        if self.kind == "tensor":
            return scores
        if self.kind == "nothing":
            return None
        if self.kind == "numbers alone":
            return numbers
        return {"scores": scores, "numbers": numbers, "which": (batch_idx, dataloader_idx, "text")}


def predicting(how: Any, kind: str, num_loaders: int) -> Any:
    loaders = [numbered_points(5, batch_size=3), numbered_points(2, batch_size=7)][:num_loaders]
    trainer = quiet_trainer(how)
    predicted = trainer.predict(
        built(lambda: Predicts(kind)), loaders if num_loaders > 1 else loaders[0]
    )
    return plain(predicted)


@pytest.mark.feature("Evaluation", "predictions, complete and in order")
@pytest.mark.parametrize("num_loaders", [1, 2])
@pytest.mark.parametrize("kind", ["tensor", "dict", "nothing", "numbers alone"])
def test_predictions_are_complete_and_in_order(kind: str, num_loaders: int) -> None:
    predicted = compare(predicting, kind, num_loaders, stages=3)
    if kind == "dict" and num_loaders == 1:
        assert torch.cat([entry["numbers"] for entry in predicted]).tolist() == list(range(15))


class Writer(BasePredictionWriter):
    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.written: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *rest: Any) -> None:
        indices, _, batch_idx, dataloader_idx = rest
        self.written.append(plain(["batch", prediction, indices, batch_idx, dataloader_idx]))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.written.append(plain(["epoch", predictions, indices]))


def writing(how: Any, interval: str, kind: str, return_predictions: bool) -> Any:
    writer = Writer(interval)
    trainer = quiet_trainer(how, callbacks=[writer])
    predicted = trainer.predict(
        built(lambda: Predicts(kind)),
        numbered_points(4, batch_size=3),
        return_predictions=return_predictions,
    )
    return plain(predicted), writer.written


@pytest.mark.feature("Callbacks", "`BasePredictionWriter`")
@pytest.mark.parametrize("return_predictions", [True, False])
@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
def test_a_prediction_writer_gets_every_prediction(interval: str, return_predictions: bool) -> None:
    _, written = compare(writing, interval, "dict", return_predictions)
    assert len(written) == {"batch": 4, "epoch": 1, "batch_and_epoch": 5}[interval]


def predicting_a_stream(how: Any) -> Any:
    trainer = quiet_trainer(how)
    loader = DataLoader(Stream(29, seed=5), batch_size=4)
    return plain(trainer.predict(built(SequentialMLP), loader))


def test_predictions_of_iterable_data() -> None:
    assert len(compare(predicting_a_stream)) == 8


def limited_predictions(how: Any) -> Any:
    trainer = quiet_trainer(how, limit_predict_batches=3, limit_test_batches=2)
    module = built(SequentialMLP)
    predicted = trainer.predict(module, points(6))
    return plain(predicted), plain(trainer.test(module, points(6), verbose=False))


@pytest.mark.feature("Evaluation", "limits of evaluation batches")
def test_limited_evaluation() -> None:
    predicted, _ = compare(limited_predictions)
    assert len(predicted) == 3


class UsesOutputs(L.Callback):
    """Reads what the step returned, batch by batch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(plain(outputs))

    def on_test_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(plain(outputs))


class ReturnsOutputs(SequentialMLP):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"scores": self(batch[0]), "loss": F.cross_entropy(self.last, batch[1])}

    def forward(self, features: Tensor) -> Tensor:
        self.last = super().forward(features)
        return self.last

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


def using_outputs(how: Any) -> Any:
    callback = UsesOutputs()
    trainer = quiet_trainer(how, callbacks=[callback])
    module = built(ReturnsOutputs)
    trainer.validate(module, points(3), verbose=False)
    trainer.test(module, points(3), verbose=False)
    return callback.seen


def test_callbacks_get_every_batchs_outputs() -> None:
    assert len(compare(using_outputs)) == 6


class LeavesOnTheModule(SequentialMLP):
    """Its validation step returns nothing, and a hook looks at what it left on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.heard: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self(batch[0]).detach())

    def on_validation_batch_start(self, *_: Any) -> None:
        self.heard.append(len(self.seen))


class Ends(L.Callback):
    def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.heard.append(len(module.seen))


def looking_at_the_module(how: Any, with_callback: str) -> Any:
    module = built(LeavesOnTheModule)
    listener = lambda trainer, module, *_: module.heard.append(10 * len(module.seen))  # noqa: E731
    callbacks = {
        "none": [],
        "class": [Ends()],
        "lambda": [LambdaCallback(on_validation_batch_end=listener)],
    }
    trainer = quiet_trainer(how, callbacks=callbacks[with_callback])
    trainer.validate(module, points(4), verbose=False)
    return module.heard, plain(module.seen)


@pytest.mark.parametrize("with_callback", ["none", "class", "lambda"])
def test_hooks_see_what_the_step_left_on_the_module(with_callback: str) -> None:
    heard, _ = compare(looking_at_the_module, with_callback)
    assert len(heard) == 4 if with_callback == "none" else 8


class WithSeveral(SequentialMLP):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))


def several_streams(how: Any, limit: int) -> Any:
    record, trainer, _ = fit(
        how,
        WithSeveral,
        points(2),
        [DataLoader(Stream(size), batch_size=4) for size in (7, 12)],
        max_epochs=1,
        limit_val_batches=limit,
    )
    return record, plain(trainer.callback_metrics)


@pytest.mark.parametrize("limit", [2, 5])
def test_several_streams_in_validation_with_a_limit(limit: int) -> None:
    compare(several_streams, limit)


class Boastful(torch.utils.data.SequentialSampler):
    def __len__(self) -> int:
        return 40


def boasting(how: Any) -> Any:
    data: Any = points(2).dataset
    loader = DataLoader(data, batch_size=8, sampler=Boastful(data))
    quiet_trainer(how).validate(built(SequentialMLP), loader, verbose=False)


def test_data_that_end_before_their_length_says_so() -> None:
    with pytest.raises(RanksFailed, match="ended early"):
        run_ranks(on_rank, 2, boasting, {"microbatches": 2}, (), {})


class ReturnsLargeResults(SequentialMLP):
    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self(batch[0][:, :NUM_FEATURES])
        self.log("val_loss", scores.square().mean())
        return batch[0].repeat(2, 1)


class Wide(Dataset):
    """Batches that are large enough to be told from everything else."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return torch.full((4, 10_000), float(index)), torch.zeros(4, dtype=torch.long)


class CountsLargeTensors(L.Callback):
    def __init__(self) -> None:
        self.count = 0

    def on_validation_epoch_start(self, *_: Any) -> None:
        # What only the collector would find stays.
        gc.collect()
        gc.disable()

    def on_validation_epoch_end(self, *_: Any) -> None:
        # Bytes are the buffers of messages.
        tensors = [o for o in gc.get_objects() if type(o) is Tensor and o.dtype is torch.float32]
        large = [tensor for tensor in tensors if tensor.numel() >= 40_000]
        self.count = len(large)
        gc.enable()


def large_tensors_at_the_end() -> int:
    counter = CountsLargeTensors()
    how = {"pipeshift": {"partition": "uniform"}, "devices": 2}
    trainer = quiet_trainer(how, callbacks=[counter])
    data = DataLoader(Wide(), batch_size=None)
    trainer.validate(built(ReturnsLargeResults), data, verbose=False)
    return counter.count


def test_an_evaluation_keeps_no_batches_and_no_results_that_nobody_needs() -> None:
    assert all(count <= 3 for count in run_ranks(large_tensors_at_the_end, 2))


# --------------------------------------------------------------------------------------------------
# Side by side
# --------------------------------------------------------------------------------------------------

NUM_BATCHES = 10


class MeetsTheOneBefore(nn.Module):
    """Ends its work on a batch when the layer before has begun on the next one, and not earlier."""

    def __init__(self, number: int, folder: Path) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.number = number
        self.folder = folder

    def forward(self, hidden: Tensor) -> Tensor:
        if type(hidden) is Tensor and not self.training:
            num_begun = self.num_begun
            self._begun(self.number, num_begun).touch()
            # The stages compare the first two batches, and wait for each other to do so.
            if self.number > 0 and 1 <= num_begun < NUM_BATCHES - 1:
                self._meet(self._begun(self.number - 1, num_begun + 1))
        return self.linear(hidden)

    @property
    def num_begun(self) -> int:
        return len(list(self.folder.glob(f"layer {self.number} *")))

    def _begun(self, layer: int, batch: int) -> Path:
        return self.folder / f"layer {layer} has begun batch {batch}"

    def _meet(self, other: Path) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not other.exists():
            assert time.monotonic() < deadline, f"should be at the same time: {other.name}"
            time.sleep(0.001)


class Meeting(L.LightningModule):
    def __init__(self, num_layers: int, folder: Path) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MeetsTheOneBefore(n, folder) for n in range(num_layers))

    def configure_layers(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("mean", self(batch[0]).mean())

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        self.log("mean", scores.mean())
        return scores

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def meeting(how: Any, entry_point: str, stages: int, folder: Path) -> int:
    module = built(lambda: Meeting(stages, folder))
    trainer = quiet_trainer(how, max_epochs=1, limit_train_batches=1, num_sanity_val_steps=0)
    if entry_point == "fit":
        trainer.fit(module, points(1), points(NUM_BATCHES))
    elif entry_point == "predict":
        predictions = trainer.predict(module, points(NUM_BATCHES))
        assert predictions is not None
        assert len(predictions) == NUM_BATCHES
    else:
        getattr(trainer, entry_point)(module, points(NUM_BATCHES), verbose=False)
    return module.layers[trainer.local_rank].num_begun


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("entry_point", ["validate", "test", "predict", "fit"])
def test_stages_work_on_successive_batches_at_once(
    entry_point: str, stages: int, tmp_path: Path
) -> None:
    """Every stage holds each batch back until the one before it is at work on the next: where a
    stage waited for the others' results, this would never end, on however slow a machine.
    """
    how = {"partition": "uniform"}
    found = run_ranks(on_rank, stages, meeting, how, (entry_point, stages, tmp_path), {})
    assert found == [NUM_BATCHES] * stages


# --------------------------------------------------------------------------------------------------
# Random numbers
# --------------------------------------------------------------------------------------------------


class DrawsInEvaluation(SequentialMLP):
    """Drops out in training; draws from every generator in validation."""

    def __init__(self, draws: bool, dropout: float) -> None:
        super().__init__(dropout=dropout)
        self.draws = draws
        self.order: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.order.append(batch[1].tolist())

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        features, classes = batch
        if self.draws:
            noise = torch.rand(()) + np.random.rand() + random.random()
            features = features + noise.float()
            self.log("noise", noise)
        self.log("val_loss", F.cross_entropy(self(features), classes))


def drawing(how: Any, draws: bool, validates: int, shuffle: bool) -> Any:
    L.seed_everything(3)
    train = DataLoader(points(4).dataset, batch_size=8, shuffle=shuffle)
    record, _, module = fit(
        how,
        # No dropout where a shuffle is compared: in plain Lightning both draw from one stream.
        lambda: DrawsInEvaluation(draws, 0.0 if shuffle else 0.3),
        train,
        points(3, seed=5),
        limit_val_batches=validates,
        num_sanity_val_steps=1,
        max_epochs=2,
    )
    noises = [float(m["callback"]["noise"]) for _, m in record["diary"] if "noise" in m["callback"]]
    return (
        record["parameters"],
        module.order,
        noises,
        random.random(),
        np.random.rand(),
        torch.rand(1),
    )


def test_evaluation_leaves_the_random_numbers_of_training_alone() -> None:
    """Dropout masks, and (with the loaders drawing as in plain Lightning) the shuffles."""
    how = {"microbatches": 4}
    without = run_ranks(on_rank, 2, drawing, how, (True, 0, False), {})
    with_it = run_ranks(on_rank, 2, drawing, how, (True, 3, False), {})
    on_three = run_ranks(on_rank, 3, drawing, how, (True, 3, False), {})
    for found in [*without, *with_it, *on_three]:
        for name, value in without[0][0].items():
            assert torch.equal(found[0][name], value), name
    for found in [*with_it, *on_three]:
        assert found[2] == with_it[0][2]
    assert len(set(with_it[0][2])) > 1, "each epoch's draws should differ"


def test_draws_in_validation_do_not_change_the_shuffle() -> None:
    _, expected_order, *_ = on_one_device(drawing, False, 3, True)
    for _, order, *_ in run_ranks(on_rank, 2, drawing, {"microbatches": 4}, (True, 3, True), {}):
        assert order == expected_order


def batch_norm_in_evaluation(how: Any) -> Any:
    """Running statistics move in training, with one microbatch as on one device, and only there."""
    record, trainer, module = fit(how, BatchNorm, points(3), points(2, seed=5), max_epochs=2)
    trainer.test(module, points(2, seed=6), verbose=False)
    return record, parameters_of(module), plain(trainer.callback_metrics)


def test_running_statistics_are_left_alone() -> None:
    compare(batch_norm_in_evaluation, strategy={"microbatches": 1})
