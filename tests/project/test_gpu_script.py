"""The script for GPUs, where there is none."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import all as gpu_script
from benchmarks.gpu.running import text_of
from lightning_pipeshift.testing.ranks import RanksFailed, launch_script, run_ranks
from tests.project.run_statements import not_run

FOLDER = gpu_script.ROOT / "benchmarks" / "gpu"

# What only a machine with a GPU, or a failure, comes to. Of a line with a `:`, the block.
NOT_REHEARSED = [
    r"sys\.exit\(",
    r"except Exception as error:",
    r"raise ",
    r"def text_of\(",
    r"def _text_of_rank\(",
]

_SCRIPT = """
import sys
import tests.project.noted_rehearsal
from lightning_pipeshift.testing.ranks import PRELOADED_MODULES

if __name__ == "__main__":
    from benchmarks.gpu import all as gpu_script

    PRELOADED_MODULES.insert(0, "tests.project.noted_rehearsal")
    sys.exit(gpu_script.main())
"""


def test_the_rehearsal_runs_every_line_of_every_part(tmp_path: Path) -> None:
    path, noted = tmp_path / "found.json", tmp_path / "noted"
    noted.mkdir()
    run = launch_script(
        _SCRIPT,
        "--device",
        "simulated",
        "--json",
        str(path),
        timeout=900,
        env={"PIPESHIFT_RUN_STATEMENTS": str(noted)},
        cwd=gpu_script.ROOT,
        check=False,
    )
    assert path.exists(), run.output
    parts = json.loads(path.read_text())["figures"]["parts"]
    assert list(parts) == list(gpu_script.PARTS), run.output
    assert {name: part["problems"] for name, part in parts.items() if part["problems"]} == {}
    assert run.returncode == 0, run.output
    rows = parts["gpt2"]["rows"]
    for name, sent in {"two stages": {"memory"}, "two stages, gloo": {"gloo"}}.items():
        # And not the other one: the ways of the payloads.
        for rank in rows[name]["ranks"]:
            found = {way for way in ("memory", "gloo") if rank["sent_a_step"].get(way)}
            assert found == sent, name
    files = sorted(FOLDER.glob("*.py"))
    missing = {file.name: not_run(file, noted, NOT_REHEARSED) for file in files}
    assert {name: lines for name, lines in missing.items() if lines} == {}
    # No reason has outlived its line.
    text = "\n".join(file.read_text() for file in files)
    assert [pattern for pattern in NOT_REHEARSED if not re.search(pattern, text)] == []


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
