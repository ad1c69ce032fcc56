"""The script for GPUs, where there is none."""

from __future__ import annotations

import sys

import pytest

from benchmarks.gpu import all as gpu_script
from benchmarks.gpu.running import text_of
from lightning_pipeshift.testing.ranks import RanksFailed, run_ranks


def test_without_a_gpu_the_script_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="--device simulated"):
        gpu_script.main([])


def _fails_deep(depth: int) -> None:
    if not depth:
        raise ValueError("the reason")
    _fails_deep(depth - 1)


def test_a_problem_is_reported_with_the_end_of_its_traceback() -> None:
    with pytest.raises(RecursionError) as caught:
        _fails_deep(sys.getrecursionlimit())
    assert "RecursionError" in text_of(caught.value)[-200:]
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_fails_deep, 2, 60)
    assert text_of(failed.value).rstrip().endswith("ValueError: the reason")
