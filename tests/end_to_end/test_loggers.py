"""Lightning's loggers side by side in one run: each has the values that one device would have
shown.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_pipeshift import PipelineTimeline
from lightning_pipeshift.testing.ranks import run_ranks
from tests.end_to_end.test_lightning_features import LogsAllKinds
from tests.features_models import built, on_one_device, on_rank, plain, quiet_trainer, read_csv
from tests.models import points

NAMES = ("loss_epoch", "val_loss", "a", "python number")


def logged(how: Any, folder: str) -> tuple[dict[str, float], dict[str, float]]:
    """The values that the Trainer has at the end, and what W&B keeps on the first rank."""
    os.chdir(folder)
    os.environ.update(WANDB_SILENT="true", MLFLOW_ALLOW_FILE_STORE="true")
    wandb = WandbLogger(save_dir=".", offline=True)
    trainer = quiet_trainer(
        how,
        logger=[
            CSVLogger("csv", name=None, version=""),
            TensorBoardLogger("tensorboard", name=None, version=""),
            MLFlowLogger(tracking_uri="file:./mlflow"),
            wandb,
        ],
        callbacks=[LearningRateMonitor()]
        + ([PipelineTimeline(every_n_steps=4)] if "pipeshift" in how else []),
        max_epochs=2,
    )
    module = built(LogsAllKinds)
    module.save_hyperparameters({"width": 3})
    trainer.fit(module, points(4), points(2, seed=3))
    kept = {}
    if trainer.is_global_zero:
        kept = {name: float(wandb.experiment.summary[name]) for name in NAMES}
        wandb.experiment.finish()
    return {name: float(plain(trainer.callback_metrics)[name]) for name in NAMES}, kept


@pytest.mark.feature("Loggers", "`TensorBoardLogger`, `WandbLogger` (offline), `MLFlowLogger`")
def test_every_logger_has_the_values_of_one_device(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    there = Path.cwd()
    try:
        expected, _ = on_one_device(logged, str(alone))
    finally:
        os.chdir(there)
    strategy = {"microbatches": 2, "partition": "uniform"}
    first, other = run_ranks(on_rank, 2, logged, strategy, (str(together),), {})
    assert first[0] == other[0] == pytest.approx(expected, rel=1e-4)

    rows = read_csv(together / "csv" / "metrics.csv")
    events = EventAccumulator(str(together / "tensorboard"))
    events.Reload()
    (run,) = (path.parent for path in (together / "mlflow").glob("*/*/metrics"))
    for name, value in first[0].items():
        approximately = pytest.approx(value, rel=1e-6)
        assert [row[name] for row in rows if row.get(name) is not None][-1] == approximately
        assert events.Scalars(name)[-1].value == approximately
        assert float((run / "metrics" / name).read_text().split("\n")[-2].split()[1]) == (
            approximately
        )
        assert first[1][name] == approximately
    assert (run / "params" / "width").read_text() == "3"
