"""Runs a test's function as the ranks of one job, or a script as a user would, with a time limit.

Distributed code that goes wrong often hangs: one rank waits for what another will never send. So
every run here ends: a rank that raises ends the others after a short grace period, a run that
exceeds its limit is killed, and the error shows what every rank was doing: its traceback, its
stack, the last lines it printed. One test fails and the suite goes on.

Where there is no GPU, ``run_ranks`` forks its ranks from a server that has imported torch and
Lightning already, so that a rank starts in milliseconds rather than in ten seconds. What this
cannot show is what differs between freshly started interpreters (the order of a set of strings,
say): ``launch_script`` and ``launch_torchrun`` start real ones, and so does ``run_ranks`` where
there is a GPU (see :func:`.workers.start_method`).
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection as mp_connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from lightning_pipeshift.devices.cuda import FORKED_LATER
from lightning_pipeshift.testing.workers import (
    added_environment,
    environment_without_ranks,
    free_port,
    kill_with_group,
    lead_own_group_and_die_with_parent,
    rank_variables,
    start_method,
    write_stacks_to,
    written_stacks,
)

OUTPUT_TAIL_LINES = 40
HANG_TAIL_LINES = 400

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


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank ended."""

    rank: int
    value: Any = None
    #: The name of the exception's class; ``"Died"`` for a process that ended without one,
    #: ``"Killed"`` for a rank that was still running when its grace or the limit was over; None for
    #: a rank that returned.
    error_type: str | None = None
    message: str = ""
    #: The exception's traceback; for a rank that was killed, the stack of each of its threads.
    traceback: str = ""
    #: What the rank wrote to stdout and stderr.
    output: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.error_type is not None

    def __str__(self) -> str:
        if not self.failed:
            headline = f"rank {self.rank} returned after {self.seconds:.1f} s"
        else:
            headline = f"rank {self.rank} failed after {self.seconds:.1f} s with {self.error_type}"
            headline += f": {self.message}"
        # The stacks of a rank that hangs may be among its output.
        hangs = self.error_type == "Killed"
        lines = HANG_TAIL_LINES if hangs else OUTPUT_TAIL_LINES
        return _sections(headline, self.traceback, self.output, lines)


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
        super().__init__(_sections(headline, "", launched.output, HANG_TAIL_LINES))


def _sections(headline: str, trace: str, output: str, max_lines: int) -> str:
    text = f"==== {headline}\n"
    if trace:
        text += trace.rstrip() + "\n"
    if output.strip():
        lines = output.rstrip().splitlines()
        text += f"---- its output (the last {min(max_lines, len(lines))} lines)\n"
        text += "\n".join(lines[-max_lines:]) + "\n"
    return text


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
    warm_server()
    scratch = Path(tempfile.mkdtemp(prefix="ranks-"))
    job = _Job(call=call, world_size=world_size, scratch=scratch, cwd=cwd, env=dict(env or {}))
    try:
        with _running(job) as ranks:
            hung = not _await_outcomes(ranks, timeout, grace)
            outcomes = [rank.outcome for rank in ranks if rank.outcome is not None]
            if hung:
                headline = f"{_name(function)} was still running after {timeout:g} s: killed"
                raise RanksFailed(headline, outcomes)
            if not expect_failure and any(outcome.failed for outcome in outcomes):
                raise RanksFailed(f"{_name(function)} failed on {world_size} ranks", outcomes)
            _await_exits(ranks, LIMIT_SECONDS)
            return outcomes if expect_failure else [outcome.value for outcome in outcomes]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


class _Job(NamedTuple):
    """The description of a rank's work; it is pickled and sent to the rank."""

    call: bytes
    world_size: int
    scratch: Path
    cwd: Path | None
    env: dict[str, str]

    def output_path(self, rank: int) -> Path:
        return self.scratch / f"rank{rank}.output"

    def stack_path(self, rank: int) -> Path:
        return self.scratch / f"rank{rank}.stack"


@dataclass(slots=True)
class _Rank:
    """One rank as its parent sees it."""

    rank: int
    process: multiprocessing.process.BaseProcess
    connection: mp_connection.Connection
    job: _Job
    started: float = field(default_factory=time.monotonic)
    outcome: Outcome | None = None

    def pump(self) -> None:
        """Take in the outcome, if the rank has sent one or has died without."""
        died = not self.process.is_alive()
        try:
            if self.connection.poll():
                self.finish(**pickle.loads(self.connection.recv_bytes()))
                return
        except EOFError:
            self.process.join(timeout=LIMIT_SECONDS)
            died = True
        if died:
            code = self.process.exitcode
            self.finish(
                error_type="Died",
                message=f"the process ended by itself, exit code {code}",
                traceback=self.stack(),
                seconds=time.monotonic() - self.started,
            )

    def finish(self, **fields: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            fields["output"] = self.job.output_path(self.rank).read_text(errors="replace")
        self.outcome = Outcome(self.rank, **fields)

    def stack(self) -> str:
        try:
            return self.job.stack_path(self.rank).read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def kill(self) -> None:
        """End the rank and what it started."""
        if self.process.pid is not None and not self.connection.closed:
            kill_with_group(self.process, LIMIT_SECONDS)
        self.connection.close()


@contextlib.contextmanager
def _running(job: _Job) -> Iterator[list[_Rank]]:
    """The started ranks; on leaving, however it comes to that, none is left."""
    context: Any = multiprocessing.get_context(start_method())
    port = free_port()
    ranks: list[_Rank] = []
    try:
        for rank in range(job.world_size):
            ours, theirs = context.Pipe()
            variables = environment_without_ranks() | rank_variables(rank, job.world_size, port)
            variables |= job.env
            process = context.Process(target=_rank_main, args=(theirs, rank, variables, job))
            ranks.append(_Rank(rank, process, ours, job))
            # Libraries of a fresh interpreter read some of them when they are imported.
            with added_environment(variables):
                process.start()
            theirs.close()
        yield ranks
    finally:
        for each in ranks:
            each.kill()


def _await_outcomes(ranks: Sequence[_Rank], timeout: float, grace: float) -> bool:
    """Wait until every rank has an outcome, or is killed as too late. False if the run hung."""
    started = time.monotonic()
    deadline = started + timeout
    first_failure: Outcome | None = None
    while True:
        waiting = [rank for rank in ranks if rank.outcome is None]
        if not waiting:
            return True
        now = time.monotonic()
        if now >= deadline:
            break
        handles: list[Any] = []
        for rank in waiting:
            handles += [rank.connection, rank.process.sentinel]
        mp_connection.wait(handles, timeout=deadline - now)
        for rank in waiting:
            rank.pump()
            if first_failure is None and rank.outcome is not None and rank.outcome.failed:
                first_failure = rank.outcome
                deadline = min(deadline, time.monotonic() + grace)

    _request_stacks(waiting)
    seconds = time.monotonic() - started
    for rank in waiting:
        if first_failure is None:
            message = f"still running at the limit of {timeout:g} s"
        else:
            message = f"still running {grace:g} s after rank {first_failure.rank} failed"
        trace = rank.stack() or f"(it gave no stack: {_state_of(rank.process.pid)})"
        rank.finish(error_type="Killed", message=message, traceback=trace, seconds=seconds)
        rank.kill()
    return first_failure is not None


def _state_of(pid: int | None) -> str:
    """The system's information about a process that does not answer."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        state = next(line for line in status.splitlines() if line.startswith("State:"))
        threads = [
            f"{(task / 'comm').read_text().strip()} in {(task / 'wchan').read_text()}"
            for task in Path(f"/proc/{pid}/task").iterdir()
        ]
    except (OSError, StopIteration) as error:
        return f"nothing is known of process {pid}, {error}"
    return f"process {pid}, {state.split(':')[1].strip()}; {', '.join(threads)}"


def _request_stacks(ranks: Sequence[_Rank]) -> None:
    """Have every rank write the stacks of its threads, and wait until they have."""
    pids = [rank.process.pid for rank in ranks if rank.process.pid is not None]
    written_stacks(pids, [rank.job.stack_path(rank.rank) for rank in ranks], LIMIT_SECONDS)


def _await_exits(ranks: Sequence[_Rank], limit: float) -> None:
    """Let the ranks, which have all reported, take down their process groups and leave."""
    for rank in ranks:
        with contextlib.suppress(OSError):  # a rank that died, or was killed, hears nothing
            rank.connection.send_bytes(b"leave")
    deadline = time.monotonic() + limit
    for rank in ranks:
        rank.process.join(timeout=max(0.0, deadline - time.monotonic()))
    stuck = [rank for rank in ranks if rank.process.is_alive()]
    if stuck and not any(rank.outcome is not None and rank.outcome.failed for rank in ranks):
        _request_stacks(stuck)
        message = "it could not destroy its process group"
        raise RanksFailed(
            "the function returned on every rank, but not every rank could leave",
            [
                Outcome(rank.rank, error_type="Stuck", message=message, traceback=rank.stack())
                for rank in stuck
            ],
        )


@functools.cache
def warm_server() -> None:
    """Start the server that ranks are forked from, if they are, and wait until it has imported what
    they need.

    It must not initialise CUDA, nor start threads: neither survives a fork.
    """
    if start_method() != "forkserver":
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_MODULES)
    with added_environment({**FORKED_LATER, "PYTHONPATH": _own_paths(), "OMP_NUM_THREADS": "1"}):
        process = context.Process()
        process.start()
        process.join()


def _own_paths() -> str:
    """The folders that this process imports from, other than Python's own and those of installed
    packages, as in ``PYTHONPATH``: tests are often not installed.
    """
    installed = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)]
    folders = dict.fromkeys(Path(entry).resolve() for entry in sys.path)
    return os.pathsep.join(
        str(folder)
        for folder in folders
        if not any(folder.is_relative_to(prefix) for prefix in installed)
    )


def _rank_main(
    connection: mp_connection.Connection, rank: int, variables: dict[str, str], job: _Job
) -> NoReturn:
    """The life of a rank: set the stage, call the function, report, wait for the others, leave."""
    started = time.monotonic()
    lead_own_group_and_die_with_parent()
    _write_output_to(job.output_path(rank))
    with job.stack_path(rank).open("w") as stack_file:
        write_stacks_to(stack_file)
        os.environ.clear()
        os.environ.update(variables)

        report: dict[str, Any]
        try:
            value = _call_in_place(job)
            report = {"value": value, "seconds": time.monotonic() - started}
            pickled = pickle.dumps(report)
        except BaseException as error:  # SystemExit is a failure of a rank as well
            report = {
                "error_type": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
                "seconds": time.monotonic() - started,
            }
            pickled = pickle.dumps(report)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        connection.send_bytes(pickled)

        # Rank 0 serves the store of the process group: it may not go before the others are done.
        with contextlib.suppress(EOFError, OSError):
            connection.recv_bytes()
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        # Whatever the function left behind (threads, loader workers) must not hold up the exit.
        os._exit(1 if "error_type" in report else 0)


def _call_in_place(job: _Job) -> Any:
    import numpy as np
    import torch

    cwd = job.cwd or job.scratch / "cwd"
    cwd.mkdir(parents=True, exist_ok=True)
    os.chdir(cwd)
    torch.set_num_threads(1)
    # A fork inherits NumPy's state; fresh processes would each have drawn one of their own.
    np.random.seed()
    function, args, kwargs = pickle.loads(job.call)
    return function(*args, **kwargs)


def _write_output_to(path: Path) -> None:
    """Send stdout and stderr to a file, those of libraries and child processes included."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115


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
        "PYTHONPATH": _own_paths(),
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
