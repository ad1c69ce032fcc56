"""Layers change their owners with ``core="values"``: no bit of what is trained changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_pipeshift.testing.ranks import run_ranks
from tests.end_to_end import test_changing_plans as changing
from tests.features_models import differences


@pytest.fixture(autouse=True)
def on_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPESHIFT_CORE", "values")


CASES = [
    # optimizer, virtual machines, accumulation, schedule
    ("adam", [[0, 1, 2]], 1, "1f1b"),
    ("sgd", [[0, 1]], 2, "gpipe"),
    ("adam", [[0, 2], [3, 1]], 3, "eager_1f1b"),
]


@pytest.mark.parametrize(("optimizer", "machines", "accumulate", "schedule"), CASES)
def test_moves_change_no_bit(
    optimizer: str, machines: list[list[int]], accumulate: int, schedule: str, tmp_path: Path
) -> None:
    """A tied and a loose parameter, dropout, running statistics, clipping, checkpoints."""
    stages = [len(ranks) for ranks in machines]
    first = [
        changing.drawn(107 + vm, [depth])[min(changing.drawn(107 + vm, [depth]))][0]
        for vm, depth in enumerate(stages)
    ]
    cuts = changing.drawn(3, stages)
    runs = []
    for name, wanted in (("stays", {}), ("moves", cuts)):
        given = (wanted, optimizer, first, "none", machines, accumulate, str(tmp_path / name))
        runs.append(run_ranks(changing.train, sum(stages), *given, False, (0,), schedule))
    stays, moves = runs
    assert len(set(moves[0]["seen"])) > 1
    for one, other in zip(stays, moves, strict=True):
        for key in ("parameters", "loss"):
            assert not differences(one[key], other[key], 0, 0)
    names = sorted(path.name for path in (tmp_path / "stays").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "moves").iterdir())
    for name in names:
        saved = [torch.load(tmp_path / of / name) for of in ("stays", "moves")]
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "pipeshift"):
            assert not differences(saved[0][key], saved[1][key], 0, 0), (name, key)
