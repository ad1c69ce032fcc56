"""The values of a stage that other stages may read alone, and which of them got an answer.

Whether a read is answered must not depend on which stage is faster. The request names the
run and the phase of the read, and the owner's answer depends on these only, not on the time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_pipeshift.compat.torch_private import counted_writes
from lightning_pipeshift.runtime.comm.messages import Key

KEPT_RUNS = 1
"""A stage may read a value that only another one has by itself in the run that computes it, and in
so many runs behind that; later, only if its owner reads it in the same run."""


class Answer(NamedTuple):
    """To a stage that has asked for a value.

    Args:
        to: the stage.
        key: of the message.
        tensor: the value; ``None`` if it is not kept.
    """

    to: int
    key: Key
    tensor: Tensor | None


class Offers:
    """The values that others may read, for any thread. What is to be sent is returned.

    Args:
        stage: this one.
        num_stages: how many there are.
    """

    def __init__(self, stage: int, num_stages: int) -> None:
        self.phase = 0
        """How often :meth:`pass_phase` was called."""
        self._others = [other for other in range(num_stages) if other != stage]
        self._lock = threading.Lock()
        # With the number of writes to each.
        self._values: dict[Key, tuple[Tensor, int]] = {}
        # By read, which stages have got the value; by value, which have asked for it before it was
        # there: the stage, its run and its phase.
        self._told: dict[Key, set[int]] = {}
        self._asked: dict[Key, list[tuple[int, int, int]]] = {}

    def offer(self, key: Key, tensor: Tensor) -> list[Answer]:
        """Lets other stages ask for a value of this one.

        Args:
            key: of the value: of a message that would carry it, without the run of a read.
            tensor: the value.

        Returns:
            the answers for those that have asked before.
        """
        with self._lock:
            self._values[key] = tensor, counted_writes(tensor)
            return self._answers(key, self._asked.pop(key, []))

    def find(self, key: Key) -> Tensor | None:
        """Returns the value that other stages may read; ``None`` if it is not kept any more.

        Args:
            key: of the value; or of a read of it, which may come too late.
        """
        tensor, version = self._values.get(key._replace(read_in=0)) or (None, 0)
        is_late = key.read_in > key.step + KEPT_RUNS
        return None if is_late or tensor is None or counted_writes(tensor) != version else tensor

    def copy(self, key: Key) -> None:
        """Copies a value, if others may read it: its memory will be written to."""
        with self._lock:
            if key in self._values:
                copied = self._values[key][0].clone()
                self._values[key] = copied, counted_writes(copied)

    def take(self, other: Offers, numbers: Sequence[int]) -> None:
        """Takes the values of other offers instead of those that are here.

        Args:
            other: those that this rank had under its old stage number; no thread uses them now.
            numbers: the number that each stage has now, by the one that it had there.
        """
        self._values = {
            key._replace(source=numbers[key.source]): each for key, each in other._values.items()
        }

    def not_told(self, key: Key) -> list[int]:
        """Returns the stages that a read has to be told to; from then on they have it."""
        with self._lock:
            told = self._told.setdefault(key, set())
            todo = [to for to in self._others if to not in told]
            told.update(todo)
            return todo

    def ask(self, key: Key, stage: int, read_in: int, phase: int) -> list[Answer]:
        """Returns the answer to a stage that reads a value, if it is known by now.

        Args:
            key: of the value.
            stage: the one that asks.
            read_in: its run.
            phase: likewise.
        """
        with self._lock:
            return self._answers(key, [(stage, read_in, phase)])

    def _answers(self, value: Key, asked: Sequence[tuple[int, int, int]]) -> list[Answer]:
        """The answers to stages that have asked, but for those that have one already, and those to
        which this stage may still come to tell the value.
        """
        answers = []
        for to, read_in, phase in asked:
            key = value._replace(read_in=read_in)
            told = self._told.setdefault(key, set())
            found = self.find(key)
            if to in told:
                continue
            if found is None and phase >= self.phase:
                self._asked.setdefault(value, []).append((to, read_in, phase))
            else:
                told.add(to)
                answers.append(Answer(to, key, found))
        return answers

    def pass_phase(self) -> list[Answer]:
        """Begins the next phase: this stage reads nothing any more in those before. Returns the
        answers to those that have asked for what it could have read there.
        """
        with self._lock:
            self.phase += 1
            asked, self._asked = self._asked, {}
            return [one for key, stages in asked.items() for one in self._answers(key, stages)]

    def forget(self, oldest: int) -> None:
        """Drops what is kept for readers in runs before one.

        Args:
            oldest: the run. This stage, and all others, have passed those before it.
        """
        with self._lock:
            self._told = {key: told for key, told in self._told.items() if key.read_in >= oldest}
            kept = oldest - KEPT_RUNS
            self._values = {key: x for key, x in self._values.items() if key.step >= kept}
