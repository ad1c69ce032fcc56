"""Processes for ranks: how they start and end, their environment, ports, output and stacks."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import itertools
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from lightning_pipeshift.devices.cuda import FORKED_LATER

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


@functools.cache
def start_server(modules: tuple[str, ...]) -> None:
    """Starts the server that ranks are forked from, if they are, and waits until it has imported
    what they need. A process has one server: it keeps what it has imported first.

    It must not initialise CUDA, nor start threads: neither survives a fork.
    """
    if start_method() != "forkserver":
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    with added_environment({**FORKED_LATER, "PYTHONPATH": own_paths(), "OMP_NUM_THREADS": "1"}):
        process = context.Process()
        process.start()
        process.join()


def own_paths() -> str:
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


def text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


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
    return list(map(text_of, paths))


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


def state_of(pid: int | None) -> str:
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


def write_output_to(path: Path) -> None:
    """Sends stdout and stderr to a file, those of libraries and child processes included."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
