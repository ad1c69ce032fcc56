"""Ranks for tests: results in order, a failure's traceback, a hang that costs one test only."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from lightning_pipeshift.testing import ranks, workers
from lightning_pipeshift.testing.processes import START_VARIABLE, start_method
from lightning_pipeshift.testing.ranks import (
    LaunchFailed,
    RanksFailed,
    launch_script,
    launch_torchrun,
    run_ranks,
)

forked = pytest.mark.skipif(start_method() != "forkserver", reason="with a GPU no rank is forked")


def own_rank() -> int:
    return int(os.environ["RANK"])


def describe(prefix: str, *, suffix: str) -> dict[str, Any]:
    environment = TorchElasticEnvironment()
    return {
        "text": f"{prefix}{own_rank()}{suffix}",
        "detected": environment.detect(),
        "ranks": (
            environment.global_rank(),
            environment.local_rank(),
            environment.node_rank(),
            environment.world_size(),
        ),
        "threads": torch.get_num_threads(),
        "cwd": os.getcwd(),
        "tensor": torch.full((3,), float(own_rank())),
    }


def test_results_come_back_in_the_order_of_the_ranks() -> None:
    results = run_ranks(describe, 3, "<", suffix=">")
    assert [result["text"] for result in results] == ["<0>", "<1>", "<2>"]
    assert [result["ranks"] for result in results] == [(rank, rank, 0, 3) for rank in range(3)]
    assert all(result["detected"] and result["threads"] == 1 for result in results)
    for rank, result in enumerate(results):
        assert torch.equal(result["tensor"], torch.full((3,), float(rank)))


def test_ranks_share_one_folder_which_is_gone_afterwards(tmp_path: Path) -> None:
    folders = {result["cwd"] for result in run_ranks(describe, 2, "", suffix="")}
    assert len(folders) == 1
    assert not Path(folders.pop()).exists()

    kept = run_ranks(describe, 2, "", suffix="", cwd=tmp_path)
    assert {result["cwd"] for result in kept} == {str(tmp_path)}


def parent_and_modules() -> tuple[int, bool]:
    return os.getppid(), "transformers.models.t5.modeling_t5" in sys.modules


@forked
def test_ranks_are_forked_from_one_process_that_has_imported_what_takes_long() -> None:
    found = {each for _ in range(3) for each in run_ranks(parent_and_modules, 4)}
    ((_, has_imported),) = found
    assert has_imported


def modules_and_threads() -> tuple[bool, int, int]:
    return (
        "tests.quick_start" in sys.modules,
        len(os.listdir("/proc/self/task")),
        gc.get_freeze_count(),
    )


@forked
def test_ranks_of_these_tests_start_with_filled_caches_and_one_thread() -> None:
    # A server skips what it cannot import, without a word.
    ((is_quick, num_threads, num_frozen),) = run_ranks(modules_and_threads, 1)
    assert is_quick
    assert num_threads == 1
    assert num_frozen > 100_000


def sum_of_ranks(*, destroy: bool) -> float:
    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    if destroy:
        dist.destroy_process_group()
    return total.item()


@pytest.mark.parametrize("destroy", [True, False])
def test_ranks_can_form_a_process_group(destroy: bool) -> None:
    assert run_ranks(sum_of_ranks, 3, destroy=destroy) == [3.0, 3.0, 3.0]


def environment_variable(name: str) -> str | None:
    return os.environ.get(name)


def test_ranks_see_the_environment_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_TEST", "from the test")
    monkeypatch.setenv("WORLD_SIZE", "97")
    assert run_ranks(environment_variable, 1, "HARNESS_TEST") == ["from the test"]
    assert run_ranks(environment_variable, 2, "WORLD_SIZE") == ["2", "2"]
    assert run_ranks(environment_variable, 1, "HARNESS_TEST", env={"HARNESS_TEST": "mine"}) == [
        "mine"
    ]


def fail_on_rank_one() -> str:
    print(f"rank {own_rank()} was here", flush=True)
    if own_rank() == 1:
        raise ZeroDivisionError("a stage that divides by zero")
    return "fine"


def test_a_failing_ranks_traceback_is_shown() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail_on_rank_one, 2)
    message = str(caught.value)
    assert "ZeroDivisionError: a stage that divides by zero" in message
    assert "in fail_on_rank_one" in message
    assert "rank 0 was here" in message
    assert "rank 1 was here" in message
    assert message.index("rank 1 failed") < message.index("rank 0 returned")


def test_an_expected_failure_comes_back_as_outcomes() -> None:
    zero, one = run_ranks(fail_on_rank_one, 2, expect_failure=True)
    assert (zero.rank, zero.value, zero.error_type, zero.failed) == (0, "fine", None, False)
    assert (one.rank, one.value, one.error_type) == (1, None, "ZeroDivisionError")
    assert one.message == "a stage that divides by zero"
    assert "in fail_on_rank_one" in one.traceback
    assert one.output == "rank 1 was here\n"
    assert one.seconds > 0


def wait_for_godot() -> None:
    note_pid(f"{own_rank()}", os.getpid())
    while True:
        time.sleep(0.1)


def note_pid(name: str, pid: int) -> None:
    (Path.cwd() / f"{name}.pid").write_text(str(pid))


def noted_pids(folder: Path) -> list[int]:
    texts = [file.read_text() for file in folder.glob("*.pid")]
    # One that is being written is empty.
    return [int(text) for text in texts if text]


@pytest.fixture
def clock_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], None]:
    """Lets the clock of the parent stand still until so many processes have noted themselves."""

    def wait_for(num_pids: int) -> None:
        begun, is_waiting = time.monotonic(), True

        def monotonic() -> float:
            nonlocal is_waiting
            is_waiting = is_waiting and len(noted_pids(tmp_path)) < num_pids
            return begun if is_waiting else time.monotonic()

        clock = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
        for module in (ranks, workers):
            monkeypatch.setattr(module, "time", clock)

    return wait_for


def fail_while_others_wait() -> None:
    if own_rank() == 0:
        while not noted_pids(Path.cwd()):
            time.sleep(0.01)
        raise ValueError("the first failure")
    wait_for_godot()


def test_the_others_of_a_failed_rank_are_killed_after_a_grace() -> None:
    zero, one = run_ranks(fail_while_others_wait, 2, grace=1.0, expect_failure=True)
    assert zero.error_type == "ValueError"
    assert one.error_type == "Killed"
    assert "1 s after rank 0 failed" in one.message
    assert "wait_for_godot" in one.traceback


def die_on_rank_zero() -> None:
    if own_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_is_a_failure() -> None:
    zero, one = run_ranks(die_on_rank_zero, 2, expect_failure=True)
    assert zero.error_type == "Died"
    assert "exit code -9" in zero.message
    assert not one.failed


def return_a_lambda() -> Any:
    return lambda: None


def leave_early() -> None:
    sys.exit(0)


def test_a_result_that_cannot_be_pickled_and_an_early_exit_are_failures() -> None:
    (outcome,) = run_ranks(return_a_lambda, 1, expect_failure=True)
    assert outcome.failed
    assert "pickle" in outcome.message
    (outcome,) = run_ranks(leave_early, 1, expect_failure=True)
    assert outcome.error_type == "SystemExit"


def is_running(pid: int) -> bool:
    """Whether the process is there and not merely waiting to be buried."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def still_running(pids: Iterable[int]) -> list[int]:
    """Those that do not end; a killed process is there until the system has freed what it had."""
    deadline = time.monotonic() + 60
    while (found := list(filter(is_running, pids))) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def hang_in_a_child_too() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    note_pid(f"child{own_rank()}", child.pid)
    wait_for_godot()


@pytest.mark.parametrize("expect_failure", [False, True])
def test_a_hang_is_killed_in_time_with_every_ranks_stack(
    tmp_path: Path, expect_failure: bool, clock_waits: Callable[[int], None]
) -> None:
    options: dict[str, Any] = {"expect_failure": expect_failure}
    clock_waits(6)
    with pytest.raises(
        RanksFailed, match="hang_in_a_child_too was still running after 2 s"
    ) as caught:
        run_ranks(hang_in_a_child_too, 3, timeout=2.0, cwd=tmp_path, **options)
    for outcome in caught.value.outcomes:
        assert outcome.error_type == "Killed"
        assert "in wait_for_godot" in outcome.traceback
        assert "in hang_in_a_child_too" in outcome.traceback
        assert outcome.traceback in str(caught.value)
    pids = noted_pids(tmp_path)
    assert len(pids) == 6
    assert not still_running(pids)


def hang_after_a_run() -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    trainer = Trainer(
        max_steps=1, accelerator="cpu", logger=False, barebones=True, use_distributed_sampler=False
    )
    trainer.fit(BoringModel())
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
    wait_for_godot()


def test_a_hang_after_lightning_has_put_signals_back_is_shown(
    tmp_path: Path, clock_waits: Callable[[int], None]
) -> None:
    """Python knows nothing of faulthandler's handlers, and Lightning puts back what it knows."""
    clock_waits(1)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(hang_after_a_run, 1, timeout=1.0, cwd=tmp_path)
    (outcome,) = caught.value.outcomes
    assert outcome.error_type == "Killed"
    assert "in hang_after_a_run" in outcome.traceback


def test_nothing_is_left_after_an_interrupt(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        if len(noted_pids(tmp_path)) == 2:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(wait_for_godot, 2, cwd=tmp_path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    pids = noted_pids(tmp_path)
    assert len(pids) == 2
    assert not still_running(pids)


SCRIPT = """
import os, sys
rank, of = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
# One write: `print` writes the end of the line by itself, and another rank may come between.
os.write(1, f"rank {rank} of {of} with {sys.argv[1:]}\\n".encode())
"""

HANGING_SCRIPT = """
import os, time
from pathlib import Path

def hang_for_ever():
    Path(f"{os.getpid()}.pid").write_text(str(os.getpid()))
    time.sleep(1000)

hang_for_ever()
"""


def test_a_script_runs_in_a_fresh_interpreter(tmp_path: Path) -> None:
    launched = launch_script(SCRIPT, "--depth", "3")
    assert launched.returncode == 0
    assert launched.output == "rank None of None with ['--depth', '3']\n"

    (tmp_path / "named.py").write_text(SCRIPT)
    assert launch_script(tmp_path / "named.py").output == "rank None of None with []\n"


def test_a_script_runs_under_torchrun() -> None:
    lines = launch_torchrun(SCRIPT, 2, "x").output.splitlines()
    assert sorted(line for line in lines if line.startswith("rank")) == [
        "rank 0 of 2 with ['x']",
        "rank 1 of 2 with ['x']",
    ]


def test_a_failing_scripts_output_is_shown() -> None:
    with pytest.raises(LaunchFailed, match="ValueError: the reason"):
        launch_script("raise ValueError('the reason')")
    launched = launch_script("raise SystemExit(3)", check=False)
    assert launched.returncode == 3


def test_a_script_that_hangs_is_killed_with_its_stack(
    tmp_path: Path, clock_waits: Callable[[int], None]
) -> None:
    clock_waits(1)
    with pytest.raises(LaunchFailed, match="still running after 1 s") as caught:
        launch_script(HANGING_SCRIPT, timeout=1.0, cwd=tmp_path)
    (pid,) = noted_pids(tmp_path)
    assert "in hang_for_ever" in str(caught.value)
    assert not still_running([pid])


def test_the_workers_of_a_hanging_torchrun_are_killed_with_their_stacks(
    tmp_path: Path, clock_waits: Callable[[int], None]
) -> None:
    clock_waits(2)
    with pytest.raises(LaunchFailed, match="still running after 1 s") as caught:
        launch_torchrun(HANGING_SCRIPT, 2, timeout=1.0, cwd=tmp_path)
    pids = noted_pids(tmp_path)
    assert len(pids) == 2
    assert str(caught.value).count("in hang_for_ever") == 2
    assert not still_running(pids)


# --- in fresh interpreters, as where there is a GPU ---


def unlike_ends() -> tuple[int, bool, str, str]:
    """Rank 0 returns, rank 1 raises, and rank 2 hangs."""
    print(f"rank {own_rank()} was here", flush=True)
    note_pid(f"{own_rank()}", os.getpid())
    while len(noted_pids(Path.cwd())) < 3:
        time.sleep(0.01)
    if own_rank() == 1:
        raise ZeroDivisionError("a stage that divides by zero")
    if own_rank() == 2:
        wait_for_godot()
    is_quick, num_threads = "tests.quick_start" in sys.modules, os.environ["OMP_NUM_THREADS"]
    return os.getppid(), is_quick, num_threads, os.environ["HARNESS_TEST"]


def test_fresh_interpreters_end_as_forked_ranks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_VARIABLE, "spawn")
    monkeypatch.setenv("HARNESS_TEST", "from the test")
    with pytest.raises((AttributeError, pickle.PicklingError)):
        run_ranks(lambda: None, 1)
    zero, one, two = run_ranks(unlike_ends, 3, grace=5.0, expect_failure=True)
    assert zero.value == (os.getpid(), False, "1", "from the test")
    assert zero.output == "rank 0 was here\n"
    assert (one.error_type, one.message) == ("ZeroDivisionError", "a stage that divides by zero")
    assert "in unlike_ends" in one.traceback
    assert two.error_type == "Killed"
    assert "in wait_for_godot" in two.traceback


WITH_A_GPU = """
import os
import torch
from lightning_pipeshift.testing import ranks
from lightning_pipeshift.testing.workers import Workers

if __name__ == "__main__":
    torch.accelerator.is_available = lambda: True
    ranks.PRELOADED_MODULES[:] = ["starts_a_thread", "tests.quick_start"]
    found = set(ranks.run_ranks(os.getppid, 1))
    with Workers(["starts_a_thread"]) as workers:
        found.update(workers.run(os.getppid, world_size=1, limit_seconds=200.0))
    print("their parents:", found == {os.getpid()})
"""


def test_where_there_is_a_gpu_no_rank_is_forked(tmp_path: Path) -> None:
    """A library that starts a thread when it is imported, as autograd does for each device: a
    server with such a thread is refused by ``tests/quick_start.py``.
    """
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    script = tmp_path / "script.py"
    script.write_text(WITH_A_GPU)
    assert "their parents: True" in launch_script(script).output
