"""Notes of a stage's actions and messages, for the profiler and the timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from lightning_pipeshift.plan.schedule.actions import Action, Kind
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.mailbox import Mailbox
from lightning_pipeshift.runtime.comm.messages import Key
from lightning_pipeshift.runtime.comm.messages import Kind as Carries
from lightning_pipeshift.runtime.recording.recorder import Recorder
from lightning_pipeshift.step.training_batch import WAIT, Profile
from lightning_pipeshift.timeline.recording import What
from lightning_pipeshift.values.core import Core

_SENDS: Final = {
    (Carries.VALUE, 1): Kind.SEND_PAYLOAD,
    (Carries.GRADIENT, -1): Kind.SEND_GRADIENT,
}


class ActionNotes:
    """Takes notes of what one stage does.

    Args:
        profile: makes a context for the profiler, given the name of an action.
        channels: this stage's connections.
        number_of: the number of a message's microbatch; ``None`` if it is of no microbatch.
    """

    def __init__(
        self, profile: Profile, channels: Channels, number_of: Callable[[Key], int | None]
    ) -> None:
        self.profile = profile
        self._channels = channels
        self._number_of = number_of
        self.recorder: Recorder | None = None
        """Takes notes of the current step, if it is recorded."""
        self.core: Core | None = None
        """Runs the steps; ``None`` while there is none."""
        self.waits_for: Callable[[], Action | None] = lambda: None
        """The action for which all others wait; ``None`` while one runs."""

    def record(self, recorder: Recorder | None, parts: Sequence[Any]) -> None:
        """Sets what takes notes of the coming steps; ``None``: nothing does.

        Args:
            recorder: it.
            parts: others that take notes with it; ``None`` for one that there is not.
        """
        self.recorder = recorder
        for part in parts:
            if part is not None:
                part.recorder = recorder
        if self.core is not None:
            self.record_messages(self.core.mailbox)

    def section(self, profiled: str, what: str = What.SECTION, name: str = "") -> Any:
        """A context for the profiler, and for the recorder if there is one."""
        inner = self.profile(profiled)
        if self.recorder is None:
            return inner
        return self.recorder.section(what, name or profiled.removeprefix("[PipeShift] "), inner)

    def record_messages(self, mailbox: Mailbox) -> None:
        """Takes notes of a mailbox's messages if the step is recorded, and otherwise not."""
        mailbox.on_send = self._note_send if self.recorder is not None else None
        mailbox.on_take = self._note_taken if self.recorder is not None else None

    def _note_taken(self) -> None:
        if self.recorder is not None and self.core is not None and not self.core.computes:
            self.recorder.begin_work()

    def _note_send(self, to: int, key: Key, num_bytes: int) -> None:
        """Notes a value on its way to the next stage, or a gradient to the one before."""
        kind = _SENDS.get((key.kind, to - self._channels.stage))
        number = self._number_of(key)
        if self.recorder is not None and kind is not None and number is not None:
            now, rank, running = self.recorder.now(), self._channels.ranks[to], self.recorder.action
            action = Action(kind, number, running.chunk if running is not None else 0)
            self.recorder.add(What.ACTION, str(action), now, now, rank, num_bytes)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of a wait for a message."""
        recorder, core, waits_for = self.recorder, self.core, self.waits_for()
        profiled = self.profile(WAIT)
        if recorder is None or core is None or (recorder.action or waits_for) is None:
            with profiled:
                yield
            return
        with recorder.waiting(str(waits_for), core.computes, profiled):
            yield
        core.computes = False
