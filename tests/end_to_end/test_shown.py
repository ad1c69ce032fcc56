"""The output of a run about its stages: in addition to the summary of the model, and in a
profiler's report.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
from lightning.pytorch.profilers import SimpleProfiler

from lightning_pipeshift.testing.ranks import run_ranks
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
    trainer = quiet_trainer(how, devices=2, max_epochs=1, profiler=profiler)
    trainer.fit(LayersOfItsOwn(), points(8))
    timed = {
        name.removeprefix("[PipeShift] "): sum(seconds)
        for name, seconds in profiler.recorded_durations.items()
        if name.startswith("[PipeShift]") and len(seconds) > 1
    }
    assert all(seconds > 0 for seconds in timed.values())
    shown = [message for message in heard.messages if "the stages of" in message]
    return shown, sorted(timed)


@pytest.mark.parametrize("summary", [True, False])
def test_the_stages_are_shown_where_the_model_is(summary: bool) -> None:
    first, second = run_ranks(train, 2, {"partition": [1, 3]}, summary)
    assert first[1] == second[1] == PARTS
    assert second[0] == []
    assert len(first[0]) == int(summary)
    if summary:
        rows = [line.split() for line in first[0][0].splitlines()]
        assert rows[1] == ["stage", "rank", "host", "parameters", "layers"]
        assert [row[:2] for row in rows[2:]] == [["0", "0"], ["1", "1"]]
        assert rows[2][-1] == "first"
        assert rows[3][-4:] == ["second", "to", "head", "(3)"]


def test_sums_over_virtual_machines_are_timed() -> None:
    for _, timed in run_ranks(train, 2, {"virtual_machines": 2, "microbatches": 2}, False):
        assert timed == PARTS
