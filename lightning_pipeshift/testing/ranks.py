"""Runs a test's function as the ranks of one job, or a script as a user would, with a time limit.

Distributed code that goes wrong often hangs: one rank waits for what another will never send. So
every run here ends: a rank that raises ends the others after a short grace period, a run that
exceeds its limit is killed, and the error shows what every rank was doing: its traceback, its
stack, the last lines it printed. One test fails and the suite goes on.

Where there is no GPU, ``run_ranks`` forks its ranks from a server that has imported torch and
Lightning already, so that a rank starts in milliseconds rather than in ten seconds. What this
cannot show is what differs between freshly started interpreters (the order of a set of strings,
say): ``launch_script`` and ``launch_torchrun`` start real ones, and so does ``run_ranks`` where
there is a GPU (see :func:`.processes.start_method`).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_pipeshift.testing.processes import (
    environment_without_ranks,
    free_port,
    own_paths,
    start_server,
)
from lightning_pipeshift.testing.workers import Outcome, Workers, sections

# What a run may take before it counts as hung. No test goes by it: it is there so that a hang ends,
# however busy the machine is.
TIMEOUT_SECONDS = 240.0
# Likewise for what a rank does at once, unless it hangs.
LIMIT_SECONDS = 60.0

# What every rank imports before it is forked. Missing ones are skipped (transformers is only a test
# extra).
PRELOADED_MODULES = [
    "pytest",
    "numpy",
    "torch",
    "torch.distributed",
    "lightning.pytorch",
    "lightning.pytorch.demos.boring_classes",
    "torchmetrics",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.t5.modeling_t5",
    "transformers.models.vit.modeling_vit",
    "lightning_pipeshift.testing.training",
]


class RanksFailed(Exception):
    """A rank raised, died or hung. The message tells all; ``outcomes`` holds it in parts."""

    def __init__(self, headline: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        first_failures_first = sorted(outcomes, key=lambda o: (not o.failed, o.seconds, o.rank))
        super().__init__("\n".join([headline, *map(str, first_failures_first)]))


class LaunchFailed(Exception):
    """A launched script ended with an error, or had to be killed."""

    def __init__(self, headline: str, launched: Launched) -> None:
        self.launched = launched
        super().__init__(sections(headline, "", launched.output, hangs=True))


# --------------------------------------------------------------------------------------------------
# A function as the ranks of one job
# --------------------------------------------------------------------------------------------------


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = TIMEOUT_SECONDS,
    grace: float = LIMIT_SECONDS,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    expect_failure: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` as ``world_size`` ranks of one job, as torchrun would.

    Args:
        function: A function of a module (it is pickled by name), as are its arguments' and its
            result's types.
        world_size: How many ranks.
        timeout: Seconds after which the run counts as hung. Every rank is killed then, and its
            stack shown.
        grace: Seconds that the other ranks have to end by themselves, once one has failed.
        cwd: The folder that all ranks run in. By default a temporary one, which is deleted
            afterwards.
        env: Environment variables for the ranks, on top of the caller's.
        expect_failure: Return every rank's :class:`Outcome` instead of raising when some fail. A
            run that hangs raises even so.

    Returns:
        What each rank returned, in the order of the ranks (or the outcomes, with
        ``expect_failure``).

    Raises:
        RanksFailed: A rank raised, died or hung.
    """
    call = pickle.dumps((function, args, kwargs))
    with Workers(PRELOADED_MODULES, cwd, is_quiet=False) as workers:
        outcomes = workers.outcomes(call, world_size, timeout, grace, dict(env or {}))
    name = getattr(function, "__qualname__", repr(function))
    kinds = {outcome.error_type for outcome in outcomes if outcome.failed}
    if kinds == {"Killed"}:
        raise RanksFailed(f"{name} was still running after {timeout:g} s: killed", outcomes)
    if kinds == {"Stuck"}:
        raise RanksFailed(f"{name} returned on every rank, but not all could leave", outcomes)
    if expect_failure:
        return outcomes
    if kinds:
        raise RanksFailed(f"{name} failed on {world_size} ranks", outcomes)
    return [outcome.value for outcome in outcomes]


def warm_server() -> None:
    """Starts the server that ranks are forked from, if they are, with ``PRELOADED_MODULES``."""
    start_server(tuple(PRELOADED_MODULES))


# --------------------------------------------------------------------------------------------------
# A script, as a user starts it
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launched:
    """A script's run that has ended."""

    command: list[str]
    returncode: int
    #: stdout and stderr of the script and of all that it started, as they came.
    output: str
    seconds: float


def launch_script(
    script: Path | str,
    *argv: str,
    timeout: float = TIMEOUT_SECONDS,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
) -> Launched:
    """Run ``python script argv...`` in a fresh interpreter; Lightning may launch further ranks.

    Args:
        script: The path of a script, or (as a string) its code.
        argv: The script's arguments.
        timeout: Seconds after which every process that the script started prints its stack and is
            killed.
        env: Environment variables on top of the caller's.
        cwd: Where it runs. By default a temporary folder, which is deleted afterwards.
        check: Raise when the script ends with an error.

    Raises:
        LaunchFailed: The script hung, or, with ``check``, ended with an error. The message holds
            its output.
    """
    return _launch([sys.executable], script, argv, timeout, env, cwd, check)


def launch_torchrun(
    script: Path | str,
    nproc_per_node: int,
    *argv: str,
    options: Sequence[str] = (),
    timeout: float = TIMEOUT_SECONDS,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
) -> Launched:
    """Run ``torchrun --nproc-per-node N options... script argv...``; otherwise as
    :func:`launch_script`.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1"]
    launcher += ["--master-port", str(free_port()), "--nproc-per-node", str(nproc_per_node)]
    launcher += options
    return _launch(launcher, script, argv, timeout, env, cwd, check)


def _launch(
    launcher: list[str],
    script: Path | str,
    argv: Sequence[str],
    timeout: float,
    env: Mapping[str, str] | None,
    cwd: Path | None,
    check: bool,
) -> Launched:
    scratch = Path(tempfile.mkdtemp(prefix="launch-"))
    try:
        if isinstance(script, str):
            (scratch / "script.py").write_text(script)
            script = scratch / "script.py"
        if cwd is None:
            cwd = scratch / "cwd"
            cwd.mkdir()
        command = [*launcher, str(script), *argv]
        launched = _run_to_the_end(command, scratch / "output", timeout, env or {}, cwd)
        if launched.returncode != 0 and check:
            seconds = f"{launched.seconds:.1f} s"
            headline = f"exit code {launched.returncode} after {seconds}: {' '.join(command)}"
            raise LaunchFailed(headline, launched)
        return launched
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run_to_the_end(
    command: list[str], output_path: Path, timeout: float, env: Mapping[str, str], cwd: Path
) -> Launched:
    mark = f"PIPESHIFT_TEST_LAUNCH_{uuid.uuid4().hex}"
    environment = environment_without_ranks() | {
        mark: "1",
        # For those whose ranks Lightning launches; by itself it takes one of the kernel's, which
        # somebody else may have taken when it is needed.
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": own_paths(),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # SIGABRT then prints the stack of every thread
        "OMP_NUM_THREADS": "1",
        **env,
    }
    started = time.monotonic()
    with output_path.open("wb") as output_file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output_file,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=environment,
            start_new_session=True,
        )
    hung = False
    try:
        with contextlib.suppress(AttributeError, ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
        deadline = time.monotonic() + timeout
        while process.poll() is None and not hung:
            time.sleep(0.02)
            hung = time.monotonic() > deadline
        if hung:
            # One after another: each writes its stacks in many small pieces into the same file.
            for pid in _marked(process, mark):
                _abort(process, mark, pid)
    finally:
        # torchrun gives its workers sessions of their own: look for the mark, not only for the
        # group.
        deadline = time.monotonic() + LIMIT_SECONDS
        while (pids := _marked(process, mark)) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        process.wait()
    launched = Launched(
        command=command,
        returncode=process.returncode,
        output=output_path.read_text(errors="replace"),
        seconds=time.monotonic() - started,
    )
    if hung:
        raise LaunchFailed(
            f"still running after {timeout:g} s, killed: {' '.join(command)}", launched
        )
    return launched


def _marked(process: subprocess.Popen[bytes], mark: str) -> list[int]:
    """The process, if it runs, and all others that inherited the mark and run."""
    needle = mark.encode() + b"="
    found = [process.pid] if process.poll() is None else []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            # Of what has ended and waits to be buried the environment is empty.
            pid = int(environ.parent.name)
            if needle in environ.read_bytes() and pid != process.pid:
                found.append(pid)
    return found


def _abort(process: subprocess.Popen[bytes], mark: str, pid: int) -> None:
    """End one of the launched processes, and wait until it has written its stacks and is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGABRT)
    deadline = time.monotonic() + LIMIT_SECONDS
    while pid in _marked(process, mark) and time.monotonic() < deadline:
        time.sleep(0.02)
