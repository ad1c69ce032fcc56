"""The output of a run about its stages: in addition to the summary of the model, and in a
profiler's report.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler

from lightning_pipeshift import LayerMigration
from lightning_pipeshift.plan.cost.prediction import Prediction
from lightning_pipeshift.plan.cost.simulator import Costs
from lightning_pipeshift.testing.ranks import run_ranks
from tests.cases import some
from tests.features_models import quiet_trainer
from tests.models import LayersOfItsOwn, points

PARTS = ["backward", "forward", "sum gradients", "wait for other stages"]


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def train(strategy: dict[str, Any], summary: bool) -> tuple[list[str], list[str]]:
    """The messages about stages, and the parts of steps that were timed more than once."""
    heard = Heard()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(heard)
    profiler = SimpleProfiler()
    how = {"pipeshift": strategy, "enable_model_summary": summary}
    # It says how to ask for moves, before the first step.
    how["callbacks"] = [LayerMigration(watches=False)]
    trainer = quiet_trainer(how, devices=2, max_epochs=1, profiler=profiler)
    trainer.fit(LayersOfItsOwn(), points(8), points(1))
    timed = {
        name.removeprefix("[PipeShift] "): sum(seconds)
        for name, seconds in profiler.recorded_durations.items()
        if name.startswith("[PipeShift]") and len(seconds) > 1
    }
    assert all(seconds > 0 for seconds in timed.values())
    told = ("the stages of", "number of stages")
    ours = [message for message in heard.messages if message.startswith("PipeShift: ")]
    shown = [message for message in ours if any(words in message for words in told)]
    assert shown[:1] == ours[:1] or strategy.get("microbatches"), "the default is said first"
    return shown, sorted(timed)


@pytest.mark.feature("Callbacks", "`ModelSummary`")
@pytest.mark.feature("Profilers", "`SimpleProfiler`")
@pytest.mark.parametrize("summary", [True, False])
def test_the_stages_are_shown_where_the_model_is(summary: bool) -> None:
    first, second = run_ranks(train, 2, {"partition": [1, 3]}, summary)
    assert first[1] == second[1] == PARTS
    assert second[0] == []
    number, *tables = first[0]
    assert "cut into 8 microbatches: the default, which depends on the number" in number
    assert "PipeShiftStrategy(microbatches=8)" in number
    assert len(tables) == int(summary)
    if summary:
        lines = tables[0].removeprefix("PipeShift: ").splitlines()
        assert lines[0] == "the stages of virtual machine 0 (one replica of the pipeline)"
        rows = [line.split() for line in lines]
        assert rows[1] == ["stage", "rank", "host", "parameters", "layers"]
        assert [row[:2] for row in rows[2:]] == [["0", "0"], ["1", "1"]]
        assert rows[2][-1] == "first"
        assert rows[3][-4:] == ["second", "to", "head", "(3)"]


def test_sums_over_virtual_machines_are_timed() -> None:
    for _, timed in run_ranks(train, 2, {"virtual_machines": 2, "microbatches": 2}, False):
        assert timed == PARTS


def report(kind: type, rows: dict[str, int]) -> str:
    """What a profiler writes on this rank."""
    profiler = kind("reports", "report", **rows)
    how = {"pipeshift": {"microbatches": 2}}
    trainer = quiet_trainer(how, devices=2, max_epochs=1, profiler=profiler)
    trainer.fit(LayersOfItsOwn(), points(8))
    return Path("reports", f"fit-report-{trainer.global_rank}.txt").read_text()


@pytest.mark.feature("Profilers", "`AdvancedProfiler`, `PyTorchProfiler`")
@pytest.mark.parametrize(
    ("kind", "rows"),
    # All rows: by default, the report has those that took longest, whichever they are.
    [(AdvancedProfiler, {}), (PyTorchProfiler, {"row_limit": -1})],
    ids=["AdvancedProfiler", "PyTorchProfiler"],
)
def test_every_rank_writes_its_profilers_report(
    kind: type, rows: dict[str, int], tmp_path: Path
) -> None:
    for text in run_ranks(report, 2, kind, rows, cwd=tmp_path):
        assert "[PipeShift] wait for other stages" in text
        assert "PipeShiftStrategy.training_st" in text


def told_of_predictions(schedule: str, watched: bool) -> list[str]:
    """What a run of a plan says that predicts a step of a nanosecond; twice as many steps are run
    as are compared.
    """
    how: dict[str, Any] = {"partition": [2, 2], "schedule": schedule}
    how |= {} if schedule == "async" else {"microbatches": 2}
    first = quiet_trainer({"pipeshift": how}, devices=2, max_epochs=1)
    first.fit(LayersOfItsOwn(), points(8))
    costs = Costs((1e-10, 1e-10), (2e-10, 2e-10), (0.0,), (0.0,))
    strategy: Any = first.strategy
    plan = replace(strategy.plan, prediction=Prediction((costs,), 1e-9))
    heard = Heard()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(heard)
    callbacks: list[Any] = [LayerMigration(patience=5)] if watched else []
    second = quiet_trainer(
        {"pipeshift": {"plan": plan}}, devices=2, max_epochs=46, callbacks=callbacks
    )
    second.fit(LayersOfItsOwn(), points(8))
    return [message for message in heard.messages if "and the plan predicted" in message]


@pytest.mark.parametrize(
    ("schedule", "watched"), some(product(["1f1b", "async"], [False, True]), 2)
)
def test_a_plan_that_predicted_other_steps_is_told_once(schedule: str, watched: bool) -> None:
    [message], nothing = run_ranks(told_of_predictions, 2, schedule, watched)
    assert nothing == []
    assert "and the plan predicted 0.001 µs: " in message
    assert ("mostly, " in message) is watched
