"""Rank processes that do one job after another, with a time limit for each.

With new processes for every run, training many models, or one model many times, would mostly
consist of importing torch. These processes are started once (:func:`start_method` says how), and
reused. A job that raises, dies or hangs ends all of them; the next job gets new ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import itertools
import logging
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection as mp_connection
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from lightning_pipeshift.devices.cuda import FORKED_LATER
from lightning_pipeshift.errors import PipeShiftError

STACK_SIGNAL = signal.SIGUSR2
"""Makes a rank print the stacks of its threads."""

RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "NODE_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)
"""Variables that a launcher sets. The process that starts ranks may itself run under a launcher,
with other ranks."""

# How long the other ranks may continue, after one has failed.
_GRACE_SECONDS = 8.0

# How long to wait for a rank's stacks: it is busy, otherwise they would not be requested.
_STACKS_SECONDS = 20.0

# The range of ports, and the number of ports for one process.
_FIRST_PORT, _LAST_PORT, _BLOCK = 20_000, 32_000, 100


START_VARIABLE = "PIPESHIFT_TEST_START"
"""The environment variable that says how to start ranks: see :func:`start_method`."""


def start_method() -> str:
    """How to start ranks, as ``multiprocessing`` calls it; the environment may say it.

    ``"forkserver"`` where there is no accelerator: ranks are forked from a server that has imported
    what they need, and start in milliseconds. ``"spawn"`` where there is one: fresh interpreters,
    which take seconds. In a process that sees a GPU, libraries may start threads when they are
    imported, and autograd starts one for each device; what a thread has locked when its process is
    forked stays locked in the rank.
    """
    with added_environment(FORKED_LATER):
        default = "spawn" if torch.accelerator.is_available() else "forkserver"
    return os.environ.get(START_VARIABLE, default)


@contextlib.contextmanager
def added_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Context in which environment variables are set, for processes that start in it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


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


class _Answer(NamedTuple):
    """The result of one rank's part in a job."""

    value: Any = None
    kind: str | None = None
    message: str = ""
    details: str = ""
    is_refusal: bool = False

    @classmethod
    def of_failure(cls, error: BaseException) -> _Answer:
        kind, is_refusal = type(error).__name__, isinstance(error, PipeShiftError)
        return cls(None, kind, str(error), traceback.format_exc(), is_refusal)


class Workers:
    """Rank processes, as many as the largest job needs.

    Args:
        size: how many.
        preloaded: names of modules that the server imports before it forks, if there is one. Its
            imports for earlier workers of this process remain.
        folder: the working directory of jobs; by default :attr:`scratch`.
    """

    def __init__(self, size: int, preloaded: Sequence[str], folder: Path | None = None) -> None:
        self._size = size
        self._folder = tempfile.TemporaryDirectory(prefix="pipeshift-workers-")
        self._runs_in = folder or self.scratch
        self._context: Any = multiprocessing.get_context(start_method())
        self._context.set_forkserver_preload(list(preloaded))
        self._processes: list[Any] = []
        self._connections: list[mp_connection.Connection] = []

    @property
    def scratch(self) -> Path:
        """A folder that all jobs may write to; it is deleted at the end."""
        return Path(self._folder.name)

    def run(
        self, function: Callable[..., Any], *args: Any, world_size: int, limit_seconds: float
    ) -> list[Any]:
        """Calls a function on the first ranks, as one job under torchrun, with this process's
        environment variables and one thread for each rank.

        Args:
            function: of a module; it is pickled by name.
            args: its arguments; they are pickled.
            world_size: the number of ranks.
            limit_seconds: a longer job counts as hung.

        Returns:
            what each rank returned.

        Raises:
            JobFailedError: a rank raised, died or hung.
        """
        call = pickle.dumps((function, args))
        if not self._processes:
            self._start()
        port = free_port()
        for rank in range(world_size):
            environment = environment_without_ranks() | rank_variables(rank, world_size, port)
            self._connections[rank].send((environment, call))
        try:
            return self._await(world_size, limit_seconds)
        except JobFailedError:
            self.stop()
            raise

    def stop(self) -> None:
        """Kills all processes; the next job starts new ones."""
        for process in self._processes:
            kill_with_group(process, 10.0)
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()
        self._folder.cleanup()

    def _start(self) -> None:
        for rank in range(self._size):
            ours, theirs = self._context.Pipe()
            process: Any = self._context.Process(
                target=_work, args=(theirs, rank, self.scratch, self._runs_in)
            )
            # The server, and a fresh interpreter, find the same modules as this process.
            path = os.pathsep.join(filter(None, sys.path))
            with added_environment({**FORKED_LATER, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}):
                process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _await(self, world_size: int, limit_seconds: float) -> list[Any]:
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + limit_seconds
        while len(answers) < world_size and time.monotonic() < deadline:
            waiting = [rank for rank in range(world_size) if rank not in answers]
            handles: list[Any] = [self._connections[rank] for rank in waiting]
            mp_connection.wait(handles, timeout=max(0.0, deadline - time.monotonic()))
            for rank in waiting:
                answer = self._answer_of(rank)
                if answer is not None:
                    answers[rank] = answer
                    if answer.kind is not None:
                        deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        failed = [answer for answer in answers.values() if answer.kind is not None]
        if failed:
            # A rank that only reports another one's failure is not the cause.
            failed.sort(key=lambda answer: answer.kind in ("StageFailedError", "crash"))
            first = failed[0]
            raise JobFailedError(first.kind or "", first.message, first.details, first.is_refusal)
        if len(answers) < world_size:
            raise JobFailedError(
                "hang", f"still running after {limit_seconds:g} s", self._stacks(world_size)
            )
        return [answers[rank].value for rank in range(world_size)]

    def _answer_of(self, rank: int) -> _Answer | None:
        connection = self._connections[rank]
        try:
            if connection.poll():
                answer: _Answer = pickle.loads(connection.recv_bytes())
                return answer
        except (EOFError, ConnectionError):
            self._processes[rank].join(5.0)
        else:
            return None
        stack = self.scratch / f"rank{rank}.stack"
        return _Answer(
            kind="crash",
            message=f"rank {rank} died, exit code {self._processes[rank].exitcode}",
            details=stack.read_text(errors="replace") if stack.exists() else "",
        )

    def _stacks(self, world_size: int) -> str:
        paths = [self.scratch / f"rank{rank}.stack" for rank in range(world_size)]
        pids = [process.pid for process in self._processes[:world_size]]
        texts = written_stacks(pids, paths, _STACKS_SECONDS)
        return "\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(texts))


def written_stacks(pids: Sequence[int], paths: Sequence[Path], limit: float) -> list[str]:
    """Makes processes write the stacks of their threads.

    Args:
        pids: the processes.
        paths: the file of each of them.
        limit: how many seconds to wait for them.

    Returns:
        the stacks that were written in time.
    """
    # A thread that answers blocks the signal meanwhile; some threads always block it.
    always = [_threads_with_stack_signal(pid, "SigBlk") for pid in pids]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
    deadline = time.monotonic() + limit
    for pid, before in zip(pids, always, strict=True):
        while time.monotonic() < deadline and (
            _threads_with_stack_signal(pid, "ShdPnd")
            or _threads_with_stack_signal(pid, "SigBlk") - before
        ):
            time.sleep(0.02)
    return [path.read_text(errors="replace") if path.exists() else "" for path in paths]


def _threads_with_stack_signal(pid: int, field: str) -> set[str]:
    """The threads of a process that have the stack signal in a field of their status, which is a
    set of signals: those that they block, or those that are pending for the process.
    """
    found = set()
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):
            signals = re.search(rf"^{field}:\s*(\w+)$", path.read_text(), re.MULTILINE)
            if signals is not None and int(signals[1], 16) >> (STACK_SIGNAL - 1) & 1:
                found.add(path.parent.name)
    return found


def free_port() -> int:
    """A port that no other process takes before it is bound.

    It is below those that the kernel uses for outgoing connections, and from a block that is
    reserved for this process until it ends; the block's ports are used in turn.
    """
    _, ports = _own_ports(os.getpid())
    for _ in range(_BLOCK - 1):
        port = next(ports)
        # Connections of an earlier store that have ended and wait for stray packets do not prevent
        # the next one.
        held = _bound(port, beside_ended=True)
        if held is not None:
            held.close()
            return port
    raise OSError(f"all ports around {port} are taken")


@functools.cache
def _own_ports(process: int) -> tuple[socket.socket, Iterator[int]]:
    """The first port of a block, bound, which reserves the block; and the rest of it.

    Args:
        process: its owner; a forked process has a block of its own.
    """
    blocks = list(range(_FIRST_PORT, _LAST_PORT, _BLOCK))
    random.SystemRandom().shuffle(blocks)
    for first in blocks:
        held = _bound(first)
        if held is not None:
            return held, itertools.cycle(range(first + 1, first + _BLOCK))
    raise OSError(f"all blocks of ports from {_FIRST_PORT} to {_LAST_PORT} are taken")


def _bound(port: int, beside_ended: bool = False) -> socket.socket | None:
    """A socket bound to a port; ``None`` if another process has it.

    Args:
        port: the port.
        beside_ended: whether connections that have ended (TIME_WAIT) may still use it.
    """
    found = socket.socket()
    if beside_ended:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("", port))
    except OSError:
        found.close()
        return None
    return found


def lead_own_group_and_die_with_parent() -> None:
    """Makes this process lead a process group, and end together with its parent: the process that
    starts ranks, or the server that forks them, which ends with that process.
    """
    os.setsid()
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_with_group(process: Any, limit: float) -> None:
    """Kills a process and what it has started, and waits for its end: ``limit`` seconds at most."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # it may not lead its group yet
    process.join(limit)


def environment_without_ranks() -> dict[str, str]:
    """This process's environment variables, without those that a launcher has set for it."""
    return {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment variables that torchrun sets for a worker, on one host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "ROLE_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"ranks-{port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": "1",
    }


def write_stacks_to(file: IO[str]) -> None:
    """Makes this process write the stacks of its threads when it gets ``STACK_SIGNAL``, or crashes.

    Lightning puts every signal's handler back when a run ends, and Python knows nothing of those of
    faulthandler: they would become the default, and the request for stacks would be deadly.
    """
    faulthandler.enable(file=file, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
    set_handler = signal.signal
    ours = {STACK_SIGNAL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE}

    def signal_of_others(number: int, handler: Any) -> Any:
        if number in ours and handler == signal.SIG_DFL:
            return handler
        return set_handler(number, handler)

    signal.signal = signal_of_others  # type: ignore[assignment]


def _work(connection: mp_connection.Connection, rank: int, scratch: Path, folder: Path) -> NoReturn:
    """The main loop of a rank: receive a job, run it, answer."""
    lead_own_group_and_die_with_parent()
    os.chdir(folder)
    output = os.open(scratch / f"rank{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    stacks = (scratch / f"rank{rank}.stack").open("w")
    write_stacks_to(stacks)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    # Libraries' warnings about tiny models (a size that divides badly, a cache that is off).
    logging.disable(logging.ERROR)
    while True:
        try:
            environment, call = connection.recv()
        except (EOFError, ConnectionError):
            os._exit(0)
        os.environ.clear()
        os.environ.update(environment)
        try:
            function, args = pickle.loads(call)
            answer = _Answer(function(*args))
        except BaseException as error:
            answer = _Answer.of_failure(error)
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
        except Exception as error:
            if answer.kind is None:
                answer = _Answer.of_failure(error)
        sys.stdout.flush()
        connection.send_bytes(pickle.dumps(answer))
