"""The sweep over other people's models: its processes outlive a model that hangs or dies, and its
comparison is one of bits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from benchmarks.workers import JobFailedError, Workers
from benchmarks.zoo import random_cut, summary, verdict
from benchmarks.zoo_models import loss_of, turn_drops_off
from benchmarks.zoo_training import differences, digest_of

LIMIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(2, ["torch"]) as started:
        yield started


def place() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def process() -> int:
    return os.getpid()


def fails_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        raise ValueError(f"rank {rank} cannot\nand says more")


def dies_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os._exit(7)


def waits_on(rank: int) -> None:
    while int(os.environ["RANK"]) == rank:
        time.sleep(0.1)


def test_the_same_processes_do_one_job_after_another(workers: Workers) -> None:
    assert workers.run(place, world_size=2, limit_seconds=LIMIT_SECONDS) == [(0, 2), (1, 2)]
    assert workers.run(place, world_size=1, limit_seconds=LIMIT_SECONDS) == [(0, 1)]
    before = workers.run(process, world_size=2, limit_seconds=LIMIT_SECONDS)
    assert workers.run(process, world_size=2, limit_seconds=LIMIT_SECONDS) == before


@pytest.mark.parametrize(
    ("job", "limit_seconds", "kind", "line"),
    [
        (fails_on, LIMIT_SECONDS, "ValueError", "ValueError: rank 1 cannot"),
        (dies_on, LIMIT_SECONDS, "crash", "crash: rank 1 died, exit code 7"),
        (waits_on, 1.0, "hang", "hang: still running after 1 s"),
    ],
)
def test_a_job_that_fails_is_told_and_the_next_one_runs(
    workers: Workers, job: object, limit_seconds: float, kind: str, line: str
) -> None:
    with pytest.raises(JobFailedError) as caught:
        workers.run(job, 1, world_size=2, limit_seconds=limit_seconds)  # type: ignore[arg-type]
    assert (caught.value.kind, caught.value.first_line) == (kind, line)
    if kind == "hang":
        assert "waits_on" in caught.value.details
    assert workers.run(place, world_size=2, limit_seconds=LIMIT_SECONDS) == [(0, 2), (1, 2)]


def test_a_difference_is_one_of_bits() -> None:
    state = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([0.0, float("nan")])}
    same = {name: value.clone() for name, value in state.items()}
    assert differences(state, same) == {}
    assert digest_of(state) == digest_of(same)
    same["a"][1] = torch.nextafter(same["a"][1], torch.tensor(0.0))
    same["b"][0] = -0.0
    found = differences(state, same)
    assert 0 < found["a"] < 1e-6
    assert "b" in found
    assert digest_of(state) != digest_of(same)
    assert differences(state, {"a": state["a"]}) == {"b": float("inf")}


@pytest.mark.parametrize(("layers", "stages"), [(2, 3), (3, 3), (9, 2), (40, 3)])
def test_a_random_cut_is_the_same_each_time_and_fits(layers: int, stages: int) -> None:
    cut = random_cut("model", layers, stages)
    assert cut == random_cut("model", layers, stages)
    assert (len(cut), sum(cut)) == (stages, layers)
    assert all(cut) == (layers >= stages)


def test_what_is_counted() -> None:
    good = {"stages": 2, "cut": "random", "trains": True, "ranks_agree": True}
    same = good | {"same_bits": True, "same_losses": True, "differing": {}}
    off = good | {"same_bits": False, "same_losses": True, "differing": {"w": 2e-7}}
    hung = {"stages": 3, "cut": "random", "trains": False, "error": "hang: still running"}
    one = {"stages": 1, "cut": "all", "trains": True, "ranks_agree": True}
    assert [verdict(run) for run in (one, same, off, hung)] == [
        "trains",
        "same bits",
        "off by 2e-07",
        "hang!",
    ]
    counts = summary(
        [
            {"built": True, "runs": [one, same, same]},
            {"built": True, "runs": [one, same, off]},
            {"built": True, "runs": [one, same, hung]},
            {"built": False, "error": "no"},
        ]
    )
    assert counts["models"] == 3
    assert counts["train on one stage"] == 3
    assert counts["train on all splits"] == 2
    assert counts["same bits on all splits"] == 1
    assert counts["hang or die somewhere"] == 1


def test_drops_are_turned_off_wherever_a_rate_is() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.attn_dropout = 0.5
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.5)

    layer = Layer()
    turn_drops_off(layer)
    assert (layer.drop.p, layer.attn_dropout, layer.attention.dropout) == (0.0, 0.0, 0.0)


def test_a_loss_depends_on_all_that_a_model_returns() -> None:
    a, b = (torch.full((2, 3), 2.0, requires_grad=True) for _ in range(2))
    loss = loss_of({"first": a, "rest": [b, torch.ones(2, dtype=torch.int64)]})
    assert loss.item() == 8.0
    loss.backward()
    assert a.grad is not None
    assert b.grad is not None
    with pytest.raises(ValueError, match="gradient"):
        loss_of(torch.ones(3))
