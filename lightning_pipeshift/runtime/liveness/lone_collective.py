"""Finds a function of ``torch.distributed`` that user code has called on some ranks only.

It needs all ranks, and those that have not called it wait for what this rank would do next.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from lightning_pipeshift.runtime.liveness.stalls import standstill_text
from lightning_pipeshift.text import capitalised

# How often in a row, about every second, all ranks are found waiting before that counts as an end.
_LONE_LOOKS: Final = 5


class LoneCollective:
    """Detects that this rank waits in a collective for ranks which do not call it.

    Args:
        rank: this one.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # What was seen the last time, and how often in a row.
        self._sign: Any = None
        self._num_seen = 0

    def look(
        self,
        mine: Mapping[str, Any],
        answers: Mapping[int, str],
        counts: Mapping[int, int],
        name_of: Callable[[int], str],
    ) -> str | None:
        """Returns why the run ends, or ``None``. Called about every second.

        Args:
            mine: this rank's activity, see :meth:`FailureBoard.activity`.
            answers: those of the other ranks, as JSON.
            counts: how many actions each other rank has completed.
            name_of: a rank's name in words.
        """
        if not mine["collective"]:
            self._sign, self._num_seen = None, 0
            return None
        found = {rank: text for rank, text in answers.items() if text}
        sign = mine, found, counts
        others = {rank: json.loads(text) for rank, text in found.items()}
        are_late = any(
            each["num_collectives"] < mine["num_collectives"] and each["waits"] in (-1, self._rank)
            for each in others.values()
        )
        all_wait = all(x["waits"] is not None or x["collective"] for x in others.values())
        is_lone = are_late and all_wait and len(others) == len(counts)
        self._num_seen = self._num_seen + 1 if is_lone and sign == self._sign else 0
        self._sign = sign
        if self._num_seen < _LONE_LOOKS:
            return None
        return (
            f"{capitalised(name_of(self._rank))} waits in `torch.distributed.{mine['collective']}`"
            f" ({mine['at']}) for all ranks, and others do not call it."
            f" {standstill_text(others, name_of)} Call it on every rank: not only behind `if"
            " trainer.is_global_zero`."
        )
