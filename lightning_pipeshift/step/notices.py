"""What the first rank decides, on its way to all others in an asynchronous pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_pipeshift.plan.schedule.actions import Action, Kind
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.replicas import Replicas
from lightning_pipeshift.runtime.planning.move_decision import Decision
from lightning_pipeshift.step.checksum import checksum, different_batches, is_checked
from lightning_pipeshift.step.training_batch import WAIT
from lightning_pipeshift.timeline.recording import What


class Notice(NamedTuple):
    """A message of the first rank to all others before a minibatch.

    Args:
        plans: those that come into force one after the other, in place of those that have not
            begun; empty for no change.
        decision: by measurements, if there is one.
        refusal: why the decision's plan cannot come into force; empty if it can.
        ends: whether the run ends after the minibatch.
        asks_to_end: whether an earlier stage of the virtual machine asks for the end; the last
            stage passes it on to the first rank.
        checksum: that of stage 0's batch, if it is compared.
    """

    plans: list[str]
    decision: Decision | None
    refusal: str
    ends: bool
    asks_to_end: bool
    checksum: int = 0


class Notices:
    """Carries notices. They travel down the pipeline ahead of the minibatch's payload, so they
    cause no wait.

    Args:
        replicas: the virtual machines.
        channels: this stage's connections.
        section: makes a context for the recorder: see :meth:`ActionNotes.section`.
    """

    def __init__(
        self, replicas: Replicas, channels: Channels, section: Callable[[str, str, str], Any]
    ) -> None:
        self._replicas = replicas
        self._channels = channels
        self._section = section
        self.asks_to_end = False
        """Whether this stage or an earlier one of the virtual machine asks for the end."""

    def take(
        self, own: Notice | None, minibatch: int, batch: Any, batch_idx: int, asks_to_end: bool
    ) -> Notice:
        """Returns the notice before a minibatch, and passes it on.

        Args:
            own: the notice; on the first rank only.
            minibatch: its number.
            batch: the minibatch.
            batch_idx: its index in the epoch.
            asks_to_end: whether this rank asks for the end.

        Raises:
            BatchError: this stage has another batch than the first one.
        """
        world, channels, stage = self._replicas.world, self._channels, self._channels.stage
        if own is not None:
            notice = own
            for ranks in self._replicas.topology.ranks[1:]:
                world.send_object(notice, world.ranks.index(ranks[0]))
            world.settle(all_but=2 * world.num_stages)
        elif stage == 0:
            notice = world.receive_object(world.ranks.index(0))
        else:
            # The payload of the same minibatch follows it.
            with self._section(WAIT, What.WAIT, str(Action(Kind.FORWARD, minibatch))):
                notice = channels.receive_object(stage - 1)
        if channels.num_stages > 1 and is_checked(batch_idx):
            mine = checksum(batch)
            if not stage:
                notice = notice._replace(checksum=mine)
            elif notice.checksum != mine:
                raise different_batches(batch_idx, [stage])
        self.asks_to_end |= asks_to_end | notice.asks_to_end
        if stage < channels.num_stages - 1:
            channels.send_object(notice._replace(asks_to_end=self.asks_to_end), stage + 1)
            channels.settle(all_but=2 * channels.num_stages)
        return notice
