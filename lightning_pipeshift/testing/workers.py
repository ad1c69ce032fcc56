"""Rank processes that do one job after another, with a time limit for each.

With new processes for every run, training many models, or one model many times, would mostly
consist of importing torch. These processes are started once (:func:`.processes.start_method` says
how), and reused. ``run_ranks`` uses them for one job only.

Distributed code that goes wrong often hangs: one rank waits for what another will never send. So
every job here ends: a rank that raises ends the others after a grace period, and ranks that exceed
the limit are killed. Each rank's outcome shows what it was doing.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection as mp_connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from lightning_pipeshift.errors import PipeShiftError
from lightning_pipeshift.testing.processes import (
    added_environment,
    environment_without_ranks,
    free_port,
    kill_with_group,
    lead_own_group_and_die_with_parent,
    rank_variables,
    start_method,
    start_server,
    state_of,
    text_of,
    write_output_to,
    write_stacks_to,
    written_stacks,
)

# For what a process does at once, unless it hangs, however busy the machine is.
_LIMIT_SECONDS = 60.0

# How long the other ranks of `Workers.run` may continue, after one has failed.
_GRACE_SECONDS = 8.0

_OUTPUT_TAIL_LINES = 40
_HANG_TAIL_LINES = 400


class JobFailedError(Exception):
    """A job's failure.

    Args:
        kind: the name of the exception's class; ``"hang"`` for a job that exceeded its time limit,
            ``"crash"`` for a rank that died without an exception.
        message: of the exception.
        details: the traceback, or the stacks of all ranks.
        is_refusal: whether it is one of PipeShift's own errors, for something it does not support.
    """

    def __init__(self, kind: str, message: str, details: str, is_refusal: bool = False) -> None:
        self.kind = kind
        self.message = message
        self.details = details
        self.is_refusal = is_refusal
        super().__init__(f"{kind}: {message}")

    @property
    def first_line(self) -> str:
        """The first line of the message, for a table."""
        lines = self.message.strip().splitlines() or [""]
        return f"{self.kind}: {lines[0][:300]}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank ended."""

    rank: int
    value: Any = None
    #: The name of the exception's class; ``"Died"`` for a process that ended without one,
    #: ``"Killed"`` for a rank that was still running when its grace or the limit was over,
    #: ``"Stuck"`` if all ranks returned and this one could not destroy its process group; None for
    #: a rank that returned.
    error_type: str | None = None
    message: str = ""
    #: The exception's traceback; for a rank that was killed, the stack of each of its threads.
    traceback: str = ""
    #: What the rank wrote to stdout and stderr.
    output: str = ""
    seconds: float = 0.0
    #: Whether it is one of PipeShift's own errors, for something it does not support.
    is_refusal: bool = False

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
        return sections(headline, self.traceback, self.output, self.error_type == "Killed")


def sections(headline: str, trace: str, output: str, hangs: bool) -> str:
    """A part of an error message: a headline, a traceback, and the last lines of the output.

    Args:
        headline: what happened.
        trace: the traceback, or the stacks; may be empty.
        output: the whole output.
        hangs: whether more of it is shown, as for a process that hangs.
    """
    text = f"==== {headline}\n"
    if trace:
        text += trace.rstrip() + "\n"
    if output.strip():
        lines = output.rstrip().splitlines()[-(_HANG_TAIL_LINES if hangs else _OUTPUT_TAIL_LINES) :]
        text += f"---- its output (the last {len(lines)} lines)\n" + "\n".join(lines) + "\n"
    return text


class Workers:
    """Rank processes, as many as the largest job so far has needed.

    Args:
        preloaded: names of modules that the server imports before it forks, if there is one. Its
            imports for earlier workers of this process remain.
        folder: the working directory of jobs; by default one in :attr:`scratch`.
        is_quiet: whether the ranks drop warnings and all that is logged.
    """

    def __init__(
        self, preloaded: Sequence[str], folder: Path | None = None, is_quiet: bool = True
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        self._runs_in = folder or self.scratch / "cwd"
        self._runs_in.mkdir(parents=True, exist_ok=True)
        self._runs_in = self._runs_in.resolve()
        self._is_quiet = is_quiet
        self._preloaded = preloaded
        self._ranks: list[_Rank] = []

    @property
    def scratch(self) -> Path:
        """A folder that all jobs may write to; it is deleted at the end."""
        return Path(self._folder.name)

    def run(
        self, function: Callable[..., Any], *args: Any, world_size: int, limit_seconds: float
    ) -> list[Any]:
        """Calls a function on the first ranks, as one job; see :meth:`outcomes`.

        Args:
            function: of a module; it is pickled by name.
            args: its arguments; they are pickled.
            world_size: the number of ranks.
            limit_seconds: a longer job counts as hung.

        Returns:
            what each rank returned.

        Raises:
            JobFailedError: a rank raised, died or hung. The next job gets new processes.
        """
        call = pickle.dumps((function, args, {}))
        outcomes = self.outcomes(call, world_size, limit_seconds, _GRACE_SECONDS)
        failed = [outcome for outcome in outcomes if outcome.failed]
        if not failed:
            return [outcome.value for outcome in outcomes]
        self.stop()
        # A rank that only reports another one's failure is not the cause.
        last = ["Died", "StageFailedError", "Killed", "Stuck"]
        first = min(
            failed,
            key=lambda each: (
                last.index(each.error_type) if each.error_type in last else -1,
                each.seconds,
            ),
        )
        kind = str(first.error_type)
        kind = {"Died": "crash", "Killed": "hang", "Stuck": "hang"}.get(kind, kind)
        details = first.traceback
        if kind == "hang":
            details = "\n".join(f"rank {each.rank}:\n{each.traceback}" for each in failed)
        raise JobFailedError(kind, first.message, details, first.is_refusal)

    def outcomes(
        self,
        call: bytes,
        world_size: int,
        limit_seconds: float,
        grace_seconds: float,
        variables: dict[str, str] | None = None,
    ) -> list[Outcome]:
        """Makes a call on the first ranks, as one job under torchrun, with this process's
        environment variables and one thread for each rank. If a rank has failed, the processes are
        of no further use.

        Args:
            call: the function, its arguments, and those by name, pickled.
            world_size: the number of ranks.
            limit_seconds: after this time the ranks that still run are killed.
            grace_seconds: likewise, once a rank has failed.
            variables: further environment variables.

        Returns:
            how each rank ended.
        """
        port, common = free_port(), environment_without_ranks()
        environments = [
            common | rank_variables(rank, world_size, port) | (variables or {})
            for rank in range(world_size)
        ]
        if not self._ranks:
            start_server(tuple(self._preloaded))
        for rank in range(len(self._ranks), world_size):
            self._ranks.append(_Rank(rank, self.scratch, self._runs_in, self._is_quiet))
            # Libraries of a fresh interpreter read some of it when they are imported.
            with added_environment(environments[rank]):
                self._ranks[rank].process.start()
        ranks = self._ranks[:world_size]
        for each, environment in zip(ranks, environments, strict=True):
            each.begin((environment, call))
        outcomes = _outcomes_of(ranks, limit_seconds, grace_seconds)
        if any(each.failed for each in outcomes):
            return outcomes
        # Rank 0 serves the store of the process group: it may not leave before all have reported.
        for each in ranks:
            each.begin(({}, pickle.dumps((_leave_group, (), {}))))
        left = _outcomes_of(ranks, _LIMIT_SECONDS, _LIMIT_SECONDS)
        if not any(each.error_type == "Killed" for each in left):
            return outcomes
        return [replace(each, error_type="Stuck") if each.failed else each for each in left]

    def stop(self) -> None:
        """Kills all processes; the next job starts new ones."""
        for rank in self._ranks:
            rank.kill()
        self._ranks = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()
        self._folder.cleanup()


class _Rank:
    """One rank as its parent sees it.

    Args:
        rank: its number.
        scratch: the folder for its output and its stacks.
        folder: see :class:`Workers`.
        is_quiet: likewise.
    """

    def __init__(self, rank: int, scratch: Path, folder: Path, is_quiet: bool) -> None:
        self.rank = rank
        self.outcome: Outcome | None = None
        self.stack_path = scratch / f"rank{rank}.stack"
        self._output_path = scratch / f"rank{rank}.output"
        self._begun = 0.0
        context: Any = multiprocessing.get_context(start_method())
        self.connection, self._theirs = context.Pipe()
        arguments = (self._theirs, self._output_path, self.stack_path, folder, is_quiet)
        self.process = context.Process(target=_work, args=arguments)

    def begin(self, job: tuple[dict[str, str], bytes]) -> None:
        """Sends a job: further environment variables, and a call."""
        # Only the rank has this end: then it is closed when the rank dies.
        self._theirs.close()
        self.outcome, self._begun = None, time.monotonic()
        # A rank that has died is noticed by `pump`.
        with contextlib.suppress(OSError):
            self.connection.send(job)

    def pump(self) -> None:
        """Takes in the outcome, if the rank has sent one or has died without."""
        died = not self.process.is_alive()
        try:
            if self.connection.poll():
                self._finish(**pickle.loads(self.connection.recv_bytes()))
                return
        except (EOFError, ConnectionError):
            self.process.join(timeout=_LIMIT_SECONDS)
            died = True
        if died:
            message = f"rank {self.rank} died, exit code {self.process.exitcode}"
            self.fail("Died", message, text_of(self.stack_path))

    def fail(self, error_type: str, message: str, trace: str) -> None:
        """Notes a failure that the rank did not report itself."""
        seconds = time.monotonic() - self._begun
        self._finish(error_type=error_type, message=message, traceback=trace, seconds=seconds)

    def _finish(self, **fields: Any) -> None:
        self.outcome = Outcome(self.rank, output=text_of(self._output_path), **fields)

    def kill(self) -> None:
        """Ends the process and what it has started."""
        if self.process.pid is not None and not self.connection.closed:
            kill_with_group(self.process, _LIMIT_SECONDS)
        self.connection.close()


def _outcomes_of(
    ranks: Sequence[_Rank], limit_seconds: float, grace_seconds: float
) -> list[Outcome]:
    """Waits until every rank has an outcome, or is killed as too late."""
    deadline = time.monotonic() + limit_seconds
    first_failure: Outcome | None = None
    while waiting := [rank for rank in ranks if rank.outcome is None]:
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
                deadline = min(deadline, time.monotonic() + grace_seconds)
    message = f"still running after {limit_seconds:g} s"
    if first_failure is not None:
        message = f"still running {grace_seconds:g} s after rank {first_failure.rank} failed"
    for rank, trace in zip(waiting, _stacks_of(waiting), strict=True):
        rank.fail("Killed", message, trace)
        rank.kill()
    return [rank.outcome for rank in ranks if rank.outcome is not None]


def _stacks_of(ranks: Sequence[_Rank]) -> list[str]:
    """The stacks of the threads of each rank, which are requested now."""
    pids = [rank.process.pid for rank in ranks]
    texts = written_stacks(pids, [rank.stack_path for rank in ranks], _LIMIT_SECONDS)
    return [
        text or f"(it gave no stack: {state_of(pid)})"
        for pid, text in zip(pids, texts, strict=True)
    ]


# --- in a rank ---


def _work(
    connection: mp_connection.Connection,
    output_path: Path,
    stack_path: Path,
    folder: Path,
    is_quiet: bool,
) -> NoReturn:
    """The main loop of a rank: receive a job, run it, report."""
    lead_own_group_and_die_with_parent()
    write_output_to(output_path)
    stacks = stack_path.open("w")
    write_stacks_to(stacks)
    torch.set_num_threads(1)
    # A fork inherits NumPy's state; fresh processes would each have drawn one of their own.
    np.random.seed()
    if is_quiet:
        warnings.filterwarnings("ignore")
        # Libraries' warnings about tiny models (a size that divides badly, a cache that is off).
        logging.disable(logging.ERROR)
    # Whatever a job left behind (threads, loader workers) must not hold up the exit.
    with contextlib.suppress(EOFError, OSError):
        while True:
            environment, call = connection.recv()
            if environment:
                os.environ.clear()
                os.environ.update(environment)
                os.chdir(folder)
                os.ftruncate(1, 0)
            connection.send_bytes(_report_of(call))
    os._exit(0)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _report_of(call: bytes) -> bytes:
    """Makes a call; returns the fields of its :class:`Outcome`, pickled."""
    begun = time.monotonic()
    try:
        function, args, kwargs = pickle.loads(call)
        value = function(*args, **kwargs)
        report = pickle.dumps({"value": value, "seconds": time.monotonic() - begun})
    except BaseException as error:  # SystemExit is a failure of a rank as well
        report = pickle.dumps(
            {
                "error_type": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
                "seconds": time.monotonic() - begun,
                "is_refusal": isinstance(error, PipeShiftError),
            }
        )
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return report
