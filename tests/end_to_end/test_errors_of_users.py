"""The output that a user sees of an error: one message, and no traceback where the message says it
all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from lightning_pipeshift.commands.brief_errors import without_traceback
from lightning_pipeshift.commands.cli import main
from lightning_pipeshift.errors import StageFailedError
from lightning_pipeshift.testing.ranks import launch_script, run_ranks
from tests import ROOT

COMMAND = "from lightning_pipeshift.commands.cli import main; main()"
KILLED = """
import os, signal
import lightning.pytorch as L
import lightning_pipeshift
from tests.models import LayersOfItsOwn, points

class Killed(LayersOfItsOwn):
    def on_train_batch_end(self, *_):
        if self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

trainer = L.Trainer(
    accelerator="cpu", devices=2, strategy="pipeshift", max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Killed(), points(8))
"""
BEFORE = """
import os, time
if os.environ.get("LOCAL_RANK"):
    raise SystemExit(3)
import lightning.pytorch as L
import lightning_pipeshift.lightning.launcher as launching
launching._GRACE_SECONDS = 1.0
from tests.models import LayersOfItsOwn, points
trainer = L.Trainer(accelerator="cpu", devices=2, strategy="pipeshift", max_epochs=1)
trainer.fit(LayersOfItsOwn(), points(8))
"""


def run_command(arguments: Sequence[str]) -> None:
    """Runs the command on one rank."""
    sys.argv = ["pipeshift", *arguments]
    main()


def test_the_help_shows_the_strategys_arguments_and_they_can_be_given() -> None:
    given = ["--model=lightning.pytorch.demos.boring_classes.BoringModel", "--print_config"]
    given.append("--trainer.strategy.microbatches=6")
    shown, configured = (
        run_ranks(run_command, 1, ["fit", *options], expect_failure=True)[0]
        for options in (["--help"], given)
    )
    assert (shown.error_type, shown.message) == ("SystemExit", "0")
    assert "--trainer.strategy.microbatches" in shown.output
    assert "the number of slices of a batch" in shown.output
    assert (configured.error_type, configured.message) == ("SystemExit", "0")
    assert "microbatches: 6" in configured.output


WRONG = [
    *("fit", "--config", str(ROOT / "examples" / "gpt.yaml"), "--trainer.max_steps=1"),
    "--trainer.strategy.init_args.partition=[1, 2, 3]",
]


def test_an_error_of_the_command_is_one_message() -> None:
    """Though every process has it that Lightning launches."""
    launched = launch_script(COMMAND, *WRONG, check=False)
    assert launched.returncode == 2
    assert launched.output.count("pipeshift: error: ") == 1
    assert "the partition [1, 2, 3] of virtual machine 0 (one replica" in launched.output
    assert "Traceback" not in launched.output


@pytest.mark.parametrize("mistake", ["--modle=x", "--trainer.devcies=2"])
def test_a_mistyped_option_is_a_line(mistake: str) -> None:
    (outcome,) = run_ranks(run_command, 1, ["fit", mistake], expect_failure=True)
    assert (outcome.error_type, outcome.message) == ("SystemExit", "2")
    tip, error = outcome.output.strip().splitlines()[-2:]
    assert "pipeshift fit --help" in tip
    assert mistake.partition("=")[0] in error
    assert "usage:" not in outcome.output
    assert "Traceback" not in outcome.output


class Wide(BoringModel):
    """Has an argument, which its checkpoints keep."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_test_end(self) -> None:
        print("tested with the width", self.hparams["width"])


def save_with_own_command_and_test(path: str) -> None:
    """The script's LightningCLI names the class itself, and `pipeshift` has it as an option."""
    common = {"accelerator": "cpu", "devices": 1, "logger": False, "barebones": False}
    common |= {"enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 1}
    own = LightningCLI(
        Wide,
        BoringDataModule,
        run=False,
        trainer_defaults=common,
        save_config_callback=None,
        args=["--model.width=5"],
    )
    own.trainer.fit(own.model, own.datamodule)
    own.trainer.save_checkpoint(path)
    model, data = (
        f"--model={__name__}.Wide",
        f"--data={BoringDataModule.__module__}.BoringDataModule",
    )
    run_command(
        [
            "test",
            model,
            data,
            f"--ckpt_path={path}",
            "--trainer.accelerator=cpu",
            "--trainer.devices=1",
            "--trainer.logger=false",
        ]
    )


def test_a_checkpoint_of_ones_own_command(tmp_path: Path) -> None:
    code = (
        f"from {__name__} import save_with_own_command_and_test as run\n"
        f"run({str(tmp_path / 'own.ckpt')!r})"
    )
    launched = launch_script(code, env={"PYTHONPATH": str(ROOT)})
    assert "tested with the width 5" in launched.output


def test_debug_shows_all_of_it() -> None:
    for outcome in run_ranks(run_command, 2, [*WRONG, "--debug"], expect_failure=True):
        assert outcome.error_type == "PartitionError"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("it is wrong", "it is wrong"),
        (
            "Stage 1 (rank 1 on b) failed first: BudgetError: 3 MB would do\n\nTraceback (most",
            "Stage 1 (rank 1 on b) failed first: BudgetError: 3 MB would do",
        ),
        (
            "Stage 1 (rank 1 on b) failed first: KeyError: 'x'\n\nTraceback (most",
            "Stage 1 (rank 1 on b) failed first: KeyError: 'x'\n\nTraceback (most",
        ),
    ],
)
def test_the_users_own_error_keeps_its_traceback(text: str, shown: str) -> None:
    assert without_traceback(StageFailedError(text)) == shown


def test_a_rank_that_is_killed_under_lightnings_launcher_is_named() -> None:
    launched = launch_script(KILLED, env={"PYTHONPATH": str(ROOT)}, check=False)
    assert launched.returncode == 1
    assert "(rank 1 on " in launched.output
    assert "ended without an error message" in launched.output
    traceback = [line for line in launched.output.splitlines() if line.startswith("[rank0]")]
    assert traceback
    assert len(traceback) <= 10, "\n".join(traceback)


def test_a_rank_that_ends_before_the_ranks_are_connected() -> None:
    """Nobody waits for half an hour."""
    launched = launch_script(BEFORE, env={"PYTHONPATH": str(ROOT)}, check=False)
    assert launched.returncode == 1
    assert "The process of rank 1 ended with exit code 3" in launched.output
