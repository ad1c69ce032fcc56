"""The random state of a run outside of its steps: shuffling, data sets, the user's own code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from lightning_pipeshift.lightning.connection import Connection
from lightning_pipeshift.model.random.random_streams import (
    SharedRandomStream,
    global_state,
    set_global_state,
)


class RandomState:
    """The seed and the random state of a run. After a checkpoint was loaded, both are the
    checkpoint's.

    Args:
        connection: to the other ranks.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._seed: int | None = None
        self._loaded: Mapping[str, Any] = {}
        self.stream: SharedRandomStream | None = None
        """Switches between the state that all virtual machines share, and this one's own; ``None``
        before the first run."""

    def share(self) -> None:
        """Makes the global random state that of the first rank: as on one device, with or without a
        seed. Every rank calls this.
        """
        set_global_state(self._connection.replicas.world.share_object(global_state(), source=0))

    def continue_from(self, saved: Mapping[str, Any]) -> None:
        """Makes the next run continue from a result of :meth:`state`; ``{}``: from nothing."""
        self._loaded = saved

    def seed(self) -> int:
        """The seed of the next run's random streams; the same on every rank. Every rank calls
        this.
        """
        if self._loaded.get("seed") is not None:
            return int(self._loaded["seed"])
        seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() & (2**62 - 1)))
        return int(self._connection.replicas.world.share_object(seed, source=0))

    def begin_run(self) -> int:
        """Starts a run; returns its seed. Every rank calls this."""
        self._seed = self.seed()
        # Code that draws outside of a step (shuffling, workers' seeds) draws the same numbers on
        # every stage.
        self.share()
        self.stream = SharedRandomStream(self._connection.replicas.vm)
        return self._seed

    def restore(self) -> None:
        """Continues with the random state of the loaded checkpoint, if there is one."""
        state = self._loaded.get("random")
        if self.stream is None or state is None or state["shared"] is None:
            return
        replicas, own = self._connection.replicas, state["own"]
        self.stream.set_state(
            state["shared"], own[replicas.vm] if len(own) == replicas.count else None
        )

    def to_shared(self) -> None:
        """Makes later draws come from the state that all virtual machines share."""
        if self.stream is not None:
            self.stream.to_shared()

    def state(self) -> dict[str, Any]:
        """The random state that a checkpoint needs for the run to continue; empty before the first
        run. Every rank calls this.
        """
        if self.stream is None:
            return {}
        shared, own = self.stream.state()
        # Without connections, the states of the other virtual machines are not known.
        gathered = self._connection.replicas.gather(own) if self._connection.is_open else []
        return {"seed": self._seed, "random": {"shared": shared, "own": gathered}}
