"""How the parts of the GPU script run their ranks: side by side, within a time, findings kept."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.rehearsal import VARIABLE, gpu
from lightning_pipeshift.testing import Outcome, RanksFailed, run_ranks

Findings = dict[str, Any]

_SHOWN_CHARACTERS = 3000
# How long the others of a run have to end, once one has failed.
_GRACE_SECONDS = 20.0


@dataclass(frozen=True)
class Sizes:
    """How large the models are, and how long they train.

    Args:
        patience: time limits are multiplied by this.
        has_all_cases: whether all cases of a part run, or the fewest with all their properties.
        has_quiet_parts: whether parts that time something have the machine for themselves.
        decoder: blocks, batches of an epoch and epochs of the models whose bits are compared.
        tower: layers, width, rows of a microbatch and steps of the models that fill the GPU.
        small_steps: of the model whose layers are tiny.
        steps: of a model on one rank, and how many of them nothing is counted in.
        test_workers: processes that run the tests marked ``cuda``; 0: none beside pytest itself.
        most_test_files: of how many files; ``None``: of all.
        transformer: blocks, width, length and batch size of the memory benchmark.
        transformer_turns: rounds, and steps of each plan's turn.
        most_blocks: up to how many blocks the largest model that trains is searched for; 0: not.
        gpt2: blocks, width, heads, length and vocabulary.
        gpt2_batch: samples of a step.
        gpt2_profile: steps that PipeShift measures before it plans.
        gpt2_partition: how the strategy cuts the model into stages.
        gpt2_steps: of a turn; each row's first turn has as many before them as ``gpt2_warmup``.
        gpt2_warmup: likewise.
        gpt2_rounds: how often each row has its turn.
    """

    patience: float = 1.0
    has_all_cases: bool = True
    has_quiet_parts: bool = True
    decoder: tuple[int, int, int] = (4, 4, 2)
    tower: tuple[int, int, int, int] = (24, 4096, 2048, 6)
    small_steps: int = 30
    steps: tuple[int, int] = (6, 3)
    test_workers: int = 4
    most_test_files: int | None = None
    transformer: tuple[int, int, int, int] = (24, 2048, 2048, 8)
    transformer_turns: tuple[int, int] = (5, 4)
    most_blocks: int = 0
    gpt2: tuple[int, int, int, int, int] = (12, 768, 12, 1024, 50_257)
    gpt2_batch: int = 16
    gpt2_profile: int = 20
    gpt2_partition: Literal["auto", "uniform"] = "auto"
    gpt2_warmup: int = 40
    gpt2_steps: int = 8
    gpt2_rounds: int = 3


REAL = Sizes()
REHEARSED = Sizes(
    patience=8.0,
    has_all_cases=False,
    has_quiet_parts=False,
    decoder=(2, 3, 1),
    tower=(2, 16, 8, 2),
    small_steps=2,
    steps=(3, 1),
    test_workers=0,
    most_test_files=1,
    transformer=(2, 64, 8, 2),
    transformer_turns=(1, 1),
    most_blocks=1,
    gpt2=(2, 16, 2, 32, 64),
    gpt2_batch=16,
    gpt2_profile=2,
    # By its measurements of a simulated device, PipeShift leaves one of the two stages empty.
    gpt2_partition="uniform",
    gpt2_warmup=4,
    gpt2_steps=2,
    gpt2_rounds=1,
)


def sizes() -> Sizes:
    """Those of this run."""
    return REHEARSED if VARIABLE in os.environ else REAL


class Slots:
    """Lets as many ranks run at once as the processor's cores bear.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self._free = self._count = count
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, count: int) -> Iterator[None]:
        """Context in which so many are taken; waits until they are free."""
        count = min(count, self._count)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            with self._changed:
                self._free += count
                self._changed.notify_all()


# A rank waits for others, or for the GPU, about as long as it computes.
SLOTS = Slots(2 * len(os.sched_getaffinity(0)))


class Run:
    """One part's run.

    Args:
        ends_at: when it has to be over, by ``time.monotonic``.
        folder: for files beside the findings.
        save: called when there are new findings.
        found: takes them.
        changing: a lock for all findings, which ``save`` takes, too.
    """

    def __init__(
        self,
        ends_at: float,
        folder: Path,
        save: Callable[[], None],
        found: Findings,
        changing: threading.Lock,
    ) -> None:
        self.sizes = sizes()
        self.folder = folder
        self._ends_at = ends_at
        self._save = save
        self._found = found
        self._changing = changing

    @property
    def seconds_left(self) -> float:
        """How long it may still take."""
        return self._ends_at - time.monotonic()

    def add(self, found: Findings, problems: Iterable[str] = ()) -> None:
        """Adds findings, and problems in words."""
        with self._changing:
            self._found.update(found)
            self._found["problems"] += problems
        self._save()

    def ranks(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        limit: float = 90,
        **how: Any,
    ) -> list[Any]:
        """:func:`run_ranks` on the GPU, when there is room for so many ranks.

        Args:
            function: what each rank does.
            world_size: how many ranks.
            args: the function's.
            limit: in seconds; no run takes longer than its part may.
            how: for :func:`run_ranks`.
        """
        with SLOTS.taken(world_size):
            return self.ranks_at_once(function, world_size, *args, limit=limit, **how)

    def ranks_at_once(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        limit: float = 90,
        **how: Any,
    ) -> list[Any]:
        """Likewise, however many ranks run already."""
        left = self.seconds_left
        if left < 1:
            raise TimeoutError("no time was left")
        how = {"timeout": min(left, self.sizes.patience * limit), "grace": _GRACE_SECONDS, **how}
        return run_ranks(on_gpu, world_size, function, *args, **how)

    def each(self, names: Iterable[str], run: Callable[[str], Findings]) -> None:
        """Adds the findings of each, side by side. One that raises counts as a problem, and does
        not end the others.
        """
        names = list(names)
        with ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(lambda name: self._one(name, run), names))

    def _one(self, name: str, run: Callable[[str], Findings]) -> None:
        try:
            found = run(name)
        except Exception as error:
            found = {"problems": [text_of(error)]}
        problems = found.pop("problems", [])
        found["is_well"] = not problems
        self.add({name: found}, [f"{name}: {problem}" for problem in problems])


def on_gpu(function: Callable[..., Any], *args: Any) -> Any:
    """What a rank does."""
    with gpu():
        return function(*args)


def text_of(error: BaseException) -> str:
    """An error for the list of problems: how it ended; the beginning is what called what."""
    if not isinstance(error, RanksFailed):
        return "".join(traceback.format_exception(error))[-_SHOWN_CHARACTERS:]
    failed = sorted((one for one in error.outcomes if one.failed), key=lambda one: one.seconds)
    return "\n".join([str(error).partition("\n")[0], *map(_text_of_rank, failed)])


def _text_of_rank(outcome: Outcome) -> str:
    # A process that died has left no traceback.
    trace = outcome.traceback or outcome.output
    return f"rank {outcome.rank}: {outcome.error_type}\n{trace[-_SHOWN_CHARACTERS:]}"
