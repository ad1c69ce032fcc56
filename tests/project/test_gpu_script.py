"""The script for GPUs, run as a user runs it, on the simulated device: every line of every part."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import coverage
import pytest

from benchmarks.gpu import all as gpu_script
from benchmarks.gpu.all import ROOT
from benchmarks.gpu.running import text_of
from lightning_pipeshift.testing.ranks import RanksFailed, launch_script, run_ranks

FOLDER = ROOT / "benchmarks" / "gpu"

# What only a machine with a GPU, or a failure, comes to. Of a line with a `:`, the block.
NOT_REHEARSED = [
    r"sys\.exit\(",
    r"except Exception as error:",
    r"return str\(outcome",
    r"raise ",
    r"return nullcontext\(\)",
    r"def text_of\(",
    r"def _text_of_rank\(",
]

_MEASURED = f"""
[run]
source = {FOLDER}
parallel = true
concurrency = thread, multiprocessing
patch = _exit, subprocess
sigterm = true
core = ctrace
"""

_SCRIPT = """
import runpy
runpy.run_module("benchmarks.gpu.all", run_name="__main__", alter_sys=True)
"""

_START = "import coverage; coverage.process_startup()"


def test_the_rehearsal_runs_every_line_of_every_part(tmp_path: Path) -> None:
    settings = tmp_path / "coveragerc"
    settings.write_text(_MEASURED + f"data_file = {tmp_path / 'lines'}\n")
    # The server of the ranks, and with it the ranks, are started without coverage's knowledge.
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(_START)
    path = tmp_path / "found.json"
    run = launch_script(
        _SCRIPT,
        "--device",
        "simulated",
        "--json",
        str(path),
        timeout=2400,
        env={
            "COVERAGE_PROCESS_START": str(settings),
            "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)]),
        },
        cwd=ROOT,
        check=False,
    )
    assert path.exists(), run.output
    parts = json.loads(path.read_text())["figures"]["parts"]
    assert list(parts) == list(gpu_script.PARTS), run.output
    assert {name: part["problems"] for name, part in parts.items() if part["problems"]} == {}
    assert run.returncode == 0, run.output
    lines = coverage.Coverage(config_file=str(settings))
    for pattern in NOT_REHEARSED:
        lines.exclude(pattern)
    lines.combine([str(tmp_path)])
    missing = {}
    for file in sorted(FOLDER.glob("*.py")):
        _, _, _, numbers, text = lines.analysis2(str(file))
        if numbers:
            missing[file.name] = text
    assert missing == {}


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
