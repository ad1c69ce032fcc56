"""Starts the other ranks of a host, as Lightning does, and kills those that remain at the end."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies.parallel import ParallelStrategy

from lightning_pipeshift.compat.lightning_private import (
    IS_INTERACTIVE,
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    start_children,
)
from lightning_pipeshift.runtime.comm.meeting import LAUNCHER
from lightning_pipeshift.text import print_at_once

_POLL_SECONDS: Final = 0.5
# How long the ranks may take to end each other by themselves, and to print the reason.
_GRACE_SECONDS: Final = 20.0


class Launcher(SubprocessScriptLauncher):
    """Lightning's launcher, except for what happens when a process ends with an error.

    Lightning then kills all others within 5 seconds, before they have printed the reason. Here the
    ranks notice by themselves, once they are connected; a rank that has not ended some seconds
    later is killed. A process that ends before is noticed here, and the others are killed at once.

    Args:
        cluster_environment: as for Lightning's launcher.
        num_processes: likewise.
        num_nodes: likewise.
        has_met: returns whether this rank is connected to the others.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        has_met: Callable[[], bool],
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._has_met = has_met

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Starts the processes, calls a function in this one, and returns its result. The Trainer
        is not used.
        """
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        if not self.cluster_environment.creates_processes_externally:
            os.environ[LAUNCHER] = str(os.getpid())
            start_children(self)
            del os.environ[LAUNCHER]
            first = self.cluster_environment.node_rank() * self.num_processes + 1
            watching = threading.Thread(
                target=_watch,
                args=(self.procs, first, self._has_met),
                name="launcher",
                daemon=True,
            )
            watching.start()
        try:
            return function(*args, **kwargs)
        except BaseException:
            if not self._has_met():
                _kill(self.procs)
            raise


class NotebookLauncher(MultiProcessingLauncher):
    """Starts the ranks as copies of this process, as a notebook is no script that could be run
    again. What they have trained is copied back.
    """

    def __init__(self, strategy: ParallelStrategy) -> None:
        super().__init__(strategy, start_method="fork")

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        """Starts the processes, and calls a function in them; takes the arguments of Lightning's
        launcher.
        """
        if dist.is_initialized():
            # The state of a run in this process alone; the forks would take it for theirs.
            dist.destroy_process_group()
        return super().launch(*args, **kwargs)


def launcher_of(strategy: Any, has_met: Callable[[], bool]) -> Launcher | NotebookLauncher | None:
    """Returns what starts the other ranks of a strategy, given what tells whether this rank is
    connected to them; ``None`` if there are none, or something else starts them.
    """
    environment = strategy.cluster_environment
    if strategy.num_processes * strategy.num_nodes == 1:
        return None  # this process is all there is
    if environment.creates_processes_externally:
        return None
    if IS_INTERACTIVE and strategy.num_nodes == 1:
        # A notebook is no script that could be run again: the other ranks are copies of it.
        return NotebookLauncher(strategy)
    return Launcher(environment, strategy.num_processes, strategy.num_nodes, has_met)


def _watch(
    children: Sequence[subprocess.Popen[Any]], first_rank: int, has_met: Callable[[], bool]
) -> None:
    """Ends this process and its children, if one has ended with an error and the others do not.

    Args:
        children: the processes.
        first_rank: that of the first of them.
        has_met: returns whether the ranks are connected.
    """
    failed = None
    while failed is None:
        time.sleep(_POLL_SECONDS)
        codes = [child.poll() for child in children]
        if all(code == 0 for code in codes) and has_met():
            return
        # Before the ranks are connected, none may end, whatever its code.
        ends = (n for n, code in enumerate(codes) if code or (code == 0 and not has_met()))
        failed = next(ends, None)
    grace = _GRACE_SECONDS if has_met() else _POLL_SECONDS
    # If this process ends meanwhile, so does this thread.
    time.sleep(grace)
    _kill(children)
    print_at_once(
        f"The process of rank {first_rank + failed} ended with exit code {codes[failed]}, and"
        f" {grace:g} s later the other ranks of this host had not ended by themselves: they are"
        " killed. See the output of that rank."
    )
    os._exit(1)


def _kill(children: Sequence[subprocess.Popen[Any]]) -> None:
    for child in children:
        with suppress(OSError):
            child.kill()
