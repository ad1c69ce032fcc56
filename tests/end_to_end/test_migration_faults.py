"""A move is done or not done, whatever comes in the middle of it.

The new owner has everything before the old one lets go. So a rank may die at any point of a move:
the others end and name it, and the checkpoints that are there go on on any split. What the user or
the cluster does meanwhile (checkpoints, validation, the end of an epoch, SIGTERM) sees nothing of
it; and a transfer that stalls holds nobody up who does not need what it brings.
"""

from __future__ import annotations

import enum
import functools
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.runtime.comm.lane import Lane
from lightning_pipeshift.runtime.comm.waits import complete
from lightning_pipeshift.runtime.ownership.held_gradients import HeldGradients
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.ownership.migration import Migration
from lightning_pipeshift.runtime.ownership.transfers import MessageKind
from lightning_pipeshift.step.suspendable import SuspendableMicrobatch
from lightning_pipeshift.testing.ranks import LIMIT_SECONDS, run_ranks
from tests.cases import some
from tests.end_to_end.test_changing_plans import Trains
from tests.features_models import built, differences, parameters_of, plain, quiet_trainer
from tests.models import points

NUM_MICROBATCHES = 4

# --------------------------------------------------------------------------------------------------
# The moments of a move
# --------------------------------------------------------------------------------------------------

Hears = Callable[[str], None]

# What a rank calls in a step in which layers move, and what its call is named here. Whatever the
# old and the new owner tell each other is a message: both ends call one of these for it.
_CALLS: list[tuple[Any, str, str]] = [
    (Migration, "__init__", "begin"),
    (Migration, "_begin_step", "cut"),
    (Lane, "send_tensor", "message"),
    (Lane, "receive_into", "message"),
    (Lane, "send_object", "message"),
    (Lane, "receive_object", "message"),
    (SuspendableMicrobatch, "advance", "forward"),
    (torch.autograd, "backward", "backward"),
    (Migration, "finish", "finish"),
    (Holdings, "settle", "settle"),
    (HeldGradients, "collect", "collect"),
    (L.LightningModule, "on_train_batch_end", "batch end"),
]


# Of no message.
_NEVER_SENT = 1 << 30


def is_of_the_rest(message: Any) -> bool:
    """Whether it is the first part of the first message since the new owners own."""
    return isinstance(message, tuple) and message[:1] == (MessageKind.STATE,)


def listen(before: Hears, after: Hears | None = None, waits: bool = True) -> None:
    """Calls a function in front of (and behind) every moment of every move on this rank, with its
    name and its number: ``"message 3"``; and what a rank does in the step before the new owners own
    has ``"early"`` in front. Lasts as long as the process.
    """
    counts: Counter[str] = Counter()
    is_moving = is_early = is_settled = False
    # The move's threads are faster than the step in all runs, so that messages have one number.
    all_early = threading.Event()

    def wrap(owner: Any, method: str, name: str) -> None:
        inner = getattr(owner, method)

        @functools.wraps(inner)
        def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_moving, is_early, is_settled
            if name == "begin":
                counts.clear()
                is_moving = is_early = True
                is_settled = False
                all_early.clear()
            elif name == "cut":
                if waits and self._work:
                    all_early.wait(LIMIT_SECONDS)
                is_early = False
            # The channels are a lane, too, but not that of moves.
            if not is_moving or (owner is Lane and type(self) is not Lane):
                return inner(self, *args, **kwargs)
            is_marked = not is_settled if name == "message" else is_early and name != "begin"
            full_name = f"early {name}" if is_marked else name
            moment = f"{full_name} {counts[full_name]}"
            counts[full_name] += 1
            if moment == "collect 0":
                is_moving = False
            try:
                before(moment)
                result = inner(self, *args, **kwargs)
            except BaseException:
                # What is missing will not come any more.
                all_early.set()
                raise
            if moment == "early message 3":
                all_early.set()
            if any(map(is_of_the_rest, (result, *args[:1]))):
                is_settled = True
            if after is not None:
                after(moment)
            return result

        setattr(owner, method, outer)

    for owner, method, name in _CALLS:
        wrap(owner, method, name)


class Point(enum.Enum):
    """Points of a move of one block, in front of a call.

    Early go its weight and its bias, each behind a message that says so. Then the new owners own:
    one more early message says that what it keeps besides comes, and one message has it (nothing).
    Two say that the weight and the bias that were sent still hold. Two say that the
    optimizer's state comes last, and what it has: for the weight and the bias the optimizer's step
    and three averages, in a message each. Back goes the receipt.
    """

    BEFORE_ANYTHING_IS_SENT = "early message 0"
    BETWEEN_TWO_PARCELS = "early message 2"
    BEFORE_IT_IS_SETTLED = "early message 4"
    BEFORE_THE_STATE = "message 3"
    IN_THE_STATE = "message 6"
    AT_THE_RECEIPT = "message 13"
    BEFORE_IT_BEGINS = "begin 0"
    BEFORE_ANYBODY_OWNS = "cut 0"
    IN_A_FORWARD = "forward 1"
    IN_A_BACKWARD = "backward 1"
    BEFORE_LETTING_GO = "settle 0"
    AFTER_THE_MOVE = "collect 0"


# These come at the end of the step before, or after it: whether it has been saved is open.
EARLY = (
    Point.BEFORE_ANYTHING_IS_SENT,
    Point.BETWEEN_TWO_PARCELS,
    # The new owner begins to wait for it.
    Point.BEFORE_IT_IS_SETTLED,
)
# In these a move is under way only if its transfer takes long enough.
IN_THE_COMPUTE = (Point.IN_A_FORWARD, Point.IN_A_BACKWARD)


class Strike(enum.Enum):
    """A kind of fault in a rank."""

    DIES = "dies"
    RAISES = "raises"
    TERMINATED = "terminated"


class Failure(Exception):
    """An error that no part of the package raises."""


@dataclass(frozen=True)
class Fault:
    """A fault that happens to one rank, once."""

    point: Point
    rank: int
    strike: Strike = Strike.DIES


def expect(fault: Fault, old_owner: int) -> None:
    """Lets a fault come when it is time. The old owner of what moves may have to take its time for
    that.
    """
    mine = int(os.environ["RANK"])
    has_come = False

    def before(moment: str) -> None:
        nonlocal has_come
        lasts = fault.point in IN_THE_COMPUTE and fault.strike is Strike.DIES
        if lasts and mine == old_owner and moment == Point.BEFORE_THE_STATE.value:
            # As on a slow link: what waits for it ends with the run, and says why.
            peer = fault.rank if fault.rank != mine else (mine + 1) % dist.get_world_size()
            with suppress(RuntimeError):
                complete(dist.irecv(torch.empty(1), peer, tag=_NEVER_SENT))
        if mine != fault.rank or moment != fault.point.value or has_come:
            return
        has_come = True
        if fault.strike is Strike.RAISES:
            raise Failure("the coffee is cold")
        signals = {Strike.DIES: signal.SIGKILL, Strike.TERMINATED: signal.SIGTERM}
        os.kill(os.getpid(), signals[fault.strike])

    listen(before)


@dataclass(frozen=True)
class Hold:
    """A rank waits with a call until a moment has come on a rank."""

    rank: int
    call: str
    until: str
    on: int


def record(hold: Hold, module: Validates) -> list[str]:
    """Lets a rank wait where it is to; returns what will happen on this one, in order."""
    mine = int(os.environ["RANK"])
    found: list[str] = []

    def store() -> Any:
        # One that waits does not answer anybody else: hence clones.
        default: Any = dist.distributed_c10d._get_default_store()
        return default.clone()

    def note(moment: str) -> None:
        found.append(moment)
        if (mine, moment) == (hold.on, hold.until) and found.count(moment) == 1:
            store().set("go on", "")

    def before(moment: str) -> None:
        note(f"{moment} begins")
        if (mine, moment) == (hold.rank, hold.call):
            store().wait(["go on"], timedelta(seconds=LIMIT_SECONDS))

    # What was not sent early is one message more.
    waits = not hold.call.startswith("early message")
    listen(before, lambda moment: note(f"{moment} ends"), waits)

    def has_run(*_: Any) -> None:
        if "cut 0 begins" in found:
            note("block 0 ends")

    module.blocks[0].register_forward_hook(has_run)
    return found


# --------------------------------------------------------------------------------------------------
# A run with moves
# --------------------------------------------------------------------------------------------------


class Validates(Trains):
    """With Adam; and with a validation that uses the running statistics."""

    def __init__(self) -> None:
        super().__init__("adam")

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.tied(self.norm(x) * self.scale))

    def validation_step(self, batch: Any) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))


class Batches:
    """Batches in order; goes on where a checkpoint left it."""

    def __init__(self, num_batches: int) -> None:
        self.batches = list(points(num_batches))
        self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        if self.position == len(self):
            self.position = 0
        while self.position < len(self):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Asks(L.Callback):
    """Asks for one placement after another, at every call of a hook; or for one, at one call."""

    def __init__(self, hook: str, placements: Sequence[Sequence[int]], call: int | None) -> None:
        self.placements = [Placement((tuple(counts),)) for counts in placements]
        self.call = call
        self.num_calls = 0
        self.seen: list[tuple[int, ...]] = []
        setattr(self, hook, self._ask)

    def _ask(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 0 or trainer.state.fn != "fit":
            # There is no plan yet, or none to change.
            return
        strategy, number = trainer.strategy, self.num_calls
        self.num_calls += 1
        self.seen.append(strategy.plan.placement.counts[0])
        if self.placements and self.call in (number, None):
            wanted = self.placements[number % len(self.placements)]
            strategy.adopt(strategy.plan.with_placement(wanted), at_once=True)


class Saves(L.Callback):
    """Saves wherever a user might, in every step."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def _save(self, trainer: Any, name: str) -> None:
        trainer.save_checkpoint(self.folder / f"{name} {trainer.global_step}.ckpt")

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._save(trainer, "start")

    def on_before_zero_grad(self, trainer: Any, *_: Any) -> None:
        self._save(trainer, "zero grad")

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        self._save(trainer, "optimizer")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._save(trainer, "end")


class Notes(L.Callback):
    """The state at the end of validations and epochs."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.entries.append((trainer.global_step, plain(trainer.callback_metrics)))

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.entries.append((trainer.current_epoch, plain(trainer.callback_metrics)))


@dataclass(frozen=True)
class Run:
    """The settings of a run.

    Args:
        partition: its placement at the start.
        placements: the placements that are requested.
        hook: the hook in which they are requested.
        call: at which call of the hook, once; ``None``: at every one.
        folder: of its checkpoints: one after every step.
        saves: whether other checkpoints are saved too.
        fault: what happens to it, and who gives layers away then.
        hold: which rank waits for which moment.
        num_batches: those of an epoch.
        num_epochs: how many.
        validates: whether it does so after every step.
        ckpt_path: the checkpoint from which it resumes.
    """

    partition: tuple[int, ...] = (3, 2, 2)
    placements: tuple[tuple[int, ...], ...] = ()
    hook: str = "on_train_batch_end"
    call: int | None = None
    folder: Path | None = None
    saves: bool = False
    fault: tuple[Fault, int] | None = None
    hold: Hold | None = None
    num_batches: int = 5
    num_epochs: int = 1
    validates: bool = False
    ckpt_path: Path | None = None


def train(run: Run) -> dict[str, Any]:
    """A rank's part in a run; what is left behind."""
    L.seed_everything(5, verbose=False)
    if run.fault is not None:
        expect(*run.fault)
    module = built(Validates)
    moments = record(run.hold, module) if run.hold is not None else []
    asks, notes = Asks(run.hook, run.placements, run.call), Notes()
    callbacks: list[L.Callback] = [asks, notes]
    if run.saves:
        callbacks.append(Saves(f"{run.folder}"))
    if run.folder is not None:
        kept = ModelCheckpoint(run.folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        callbacks.append(kept)
    trainer = quiet_trainer(
        {
            "devices": int(os.environ["WORLD_SIZE"]),
            "pipeshift": {"partition": list(run.partition), "microbatches": NUM_MICROBATCHES},
        },
        max_epochs=run.num_epochs,
        callbacks=callbacks,
        gradient_clip_val=0.5,
        enable_checkpointing=run.folder is not None,
        val_check_interval=1 if run.validates else None,
        limit_val_batches=2 if run.validates else 0,
    )
    code = None
    try:
        trainer.fit(
            module,
            Batches(run.num_batches),
            points(2, seed=3),
            ckpt_path=run.ckpt_path,
        )
    except SIGTERMException as error:
        code = error.code
    if run.validates:
        trainer.validate(module, points(2, seed=4), verbose=False)
    return plain(
        {
            "parameters": parameters_of(module),
            "metrics": dict(trainer.callback_metrics),
            "notes": notes.entries,
            "step": trainer.global_step,
            "code": code,
            "seen": asks.seen,
            "moments": moments,
        }
    )


def saved(folder: Path) -> dict[str, Any]:
    """The training state in every checkpoint of a folder, by its name."""
    keys = ("state_dict", "optimizer_states", "lr_schedulers", "pipeshift", "global_step", "loops")
    found = {}
    for path in sorted(folder.iterdir()):
        checkpoint = torch.load(path, weights_only=True)
        found[path.name] = {key: checkpoint[key] for key in keys}
    return found


def require_same(found: Any, expected: Any) -> None:
    problems = differences(found, expected, 0, 0)
    assert not problems, "\n".join(problems[:10])


class Undisturbed(NamedTuple):
    """A run without moves."""

    parameters: dict[str, Tensor]
    checkpoints: dict[str, Any]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    first, *others = run_ranks(train, 3, Run(folder=folder))
    for other in others:
        require_same(other["parameters"], first["parameters"])
    return Undisturbed(first["parameters"], saved(folder))


# --------------------------------------------------------------------------------------------------
# A rank that dies
# --------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """A move of one block, with who gives it, who gets it, and who has no part in it."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    old: int
    new: int
    third: int


WAYS = {
    "0 to 1": Way((3, 2, 2), (2, 3, 2), old=0, new=1, third=2),
    "1 to 0": Way((2, 3, 2), (3, 2, 2), old=1, new=0, third=2),
    "1 to 2": Way((2, 2, 3), (2, 1, 4), old=1, new=2, third=0),
}

OF_OWNERS = [p for p in Point if p is not Point.BEFORE_IT_BEGINS]
OF_THE_THIRD = [p for p in Point if "message" not in p.value]

DEATHS = [
    *((point, who) for who in ("old", "new") for point in OF_OWNERS),
    *((point, "third") for point in OF_THE_THIRD),
]

# Where a run goes on after a fault.
SPLITS = ((4, 3), (7,), (1, 6))


# How many checkpoints there may be.
EXPECTED = {**dict.fromkeys(EARLY, (1, 2)), Point.BEFORE_IT_BEGINS: (1,)}


def struck(way: Way, fault: Fault, folder: Path) -> Run:
    """A run in whose second step the move of a block is prepared; in the third it has moved."""
    return Run(way.before, (way.after,), call=0, folder=folder, fault=(fault, way.old))


def require_named(outcomes: Sequence[Any], dead: int) -> None:
    """All ranks but the dead one say which rank has died."""
    for outcome in outcomes:
        if outcome.rank == dead:
            assert outcome.error_type == "Died", str(outcome)
        else:
            assert outcome.error_type == "StageFailedError", str(outcome)
            who = f"tage {dead} (rank {dead} on {socket.gethostname()})"
            assert f"{who} ended without an error message" in outcome.message


def require_whole(
    folder: Path, undisturbed: Undisturbed, point: Point, split: tuple[int, ...]
) -> None:
    """All checkpoints are those of the undisturbed run, and from the last one on it ends as that
    one did.
    """
    found = saved(folder)
    num_saved = len(found)
    assert num_saved in EXPECTED.get(point, (2,))
    assert sorted(found) == [f"step={step + 1}.ckpt" for step in range(num_saved)]
    require_same(found, {name: undisturbed.checkpoints[name] for name in found})
    last = folder / f"step={num_saved}.ckpt"
    for rank in run_ranks(train, len(split), Run(split, ckpt_path=last)):
        assert rank["step"] == 5
        require_same(rank["parameters"], undisturbed.parameters)


@pytest.mark.parametrize(
    ("number", "point", "who"),
    [
        pytest.param(number, point, who, id=f"{who}, {point.name.lower()}")
        for number, (point, who) in some(enumerate(DEATHS), 12)
    ],
)
def test_a_rank_that_dies(
    number: int, point: Point, who: str, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Somewhere in a move; in turns on another way, and resumed on another split."""
    way = list(WAYS.values())[number % len(WAYS)]
    dead = getattr(way, who)
    outcomes = run_ranks(
        train,
        3,
        struck(way, Fault(point, dead), tmp_path),
        expect_failure=True,
    )
    require_named(outcomes, dead)
    require_whole(tmp_path, undisturbed, point, SPLITS[number % len(SPLITS)])


# --------------------------------------------------------------------------------------------------
# A rank that raises
# --------------------------------------------------------------------------------------------------


RAISES = [
    ("1 to 0", "old", Point.BETWEEN_TWO_PARCELS),
    ("1 to 2", "old", Point.IN_THE_STATE),
    ("0 to 1", "old", Point.AT_THE_RECEIPT),
    ("1 to 0", "new", Point.BEFORE_ANYTHING_IS_SENT),
    ("0 to 1", "new", Point.IN_THE_STATE),
    ("1 to 0", "new", Point.AT_THE_RECEIPT),
]


RAISES += [
    ("1 to 0", "old", Point.IN_A_FORWARD),
    ("0 to 1", "old", Point.IN_A_BACKWARD),
    ("1 to 2", "old", Point.BEFORE_THE_STATE),
    ("1 to 0", "new", Point.IN_A_FORWARD),
    ("1 to 2", "new", Point.IN_A_BACKWARD),
    ("0 to 1", "new", Point.IN_THE_STATE),
    ("0 to 1", "third", Point.IN_A_FORWARD),
]


@pytest.mark.parametrize(
    ("way", "who", "point"),
    [
        pytest.param(*case, id=f"{case[0]}, {case[1]}, {case[2].name.lower()}")
        for case in some(dict.fromkeys(RAISES), 6)
    ],
)
def test_a_rank_that_raises(
    way: str, who: str, point: Point, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Most of a move is in threads, beside a step that knows nothing of it."""
    failed = getattr(WAYS[way], who)
    fault = Fault(point, failed, Strike.RAISES)
    run = struck(WAYS[way], fault, tmp_path)
    outcomes = run_ranks(train, 3, run, expect_failure=True)
    for outcome in outcomes:
        if outcome.rank == failed:
            assert (outcome.error_type, outcome.message) == ("Failure", "the coffee is cold")
        else:
            assert outcome.error_type == "StageFailedError", str(outcome)
            who = f"tage {failed} (rank {failed} on {socket.gethostname()})"
            reason = f"{who} failed first: Failure: the coffee is cold"
            assert reason in outcome.message
    require_whole(tmp_path, undisturbed, point, (4, 3))


# --------------------------------------------------------------------------------------------------
# What comes in the middle of a move
# --------------------------------------------------------------------------------------------------

# With a stage that is drained, and with every layer that keeps something on the move.
SWINGING = ((2, 4, 1), (1, 2, 4), (4, 0, 3))

EVERYTHING = Run(saves=True, validates=True, num_batches=2, num_epochs=3)


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[str, Any]]:
    """A run with everything but moves: its ranks, and its checkpoints."""
    folder = tmp_path_factory.mktemp("still")
    return run_ranks(train, 3, replace(EVERYTHING, folder=folder)), saved(folder)


@pytest.mark.parametrize(
    "hook",
    [
        "on_train_batch_start",
        "on_train_batch_end",
        "on_validation_batch_end",
        "on_train_epoch_end",
    ],
)
def test_checkpoints_validation_and_epochs_see_nothing_of_moves(
    hook: str, still: tuple[list[Any], dict[str, Any]], tmp_path: Path
) -> None:
    """Layers move in every step (with the last hook: in an epoch's first), and are asked to move
    again when it is all over.
    """
    ranks, checkpoints = still
    run = replace(EVERYTHING, folder=tmp_path, hook=hook, placements=SWINGING)
    for moved, stayed in zip(run_ranks(train, 3, run), ranks, strict=True):
        seen = moved.pop("seen")
        assert len(set(seen)) > 1, "something moves"
        require_same(moved, {key: value for key, value in stayed.items() if key != "seen"})
    found = saved(tmp_path)
    # In each of six steps one by ModelCheckpoint and four by hand.
    assert len(found) == 30
    require_same(found, checkpoints)


@pytest.mark.parametrize(
    ("way", "who", "point"),
    [
        ("0 to 1", "old", Point.BEFORE_IT_IS_SETTLED),
        ("1 to 2", "new", Point.IN_THE_STATE),
        ("1 to 2", "third", Point.IN_A_BACKWARD),
        ("1 to 0", "new", Point.BEFORE_LETTING_GO),
    ],
    ids=lambda value: value.name.lower() if isinstance(value, Point) else value,
)
def test_a_machine_that_is_taken_away(
    way: str, who: str, point: Point, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """In the third step, or in front of it where another rank is ahead. The run ends after the step
    behind, in which all know.
    """
    given = WAYS[way]
    fault = Fault(point, getattr(given, who), Strike.TERMINATED)
    ranks = run_ranks(train, 3, struck(given, fault, tmp_path))
    (step,) = {rank["step"] for rank in ranks}
    assert step in (3, 4)
    for rank in ranks:
        assert rank["code"] == 143
        assert rank["seen"][:3] == [given.before, given.before, given.after]
    last = tmp_path / "last.ckpt"
    for key in ("state_dict", "optimizer_states", "pipeshift"):
        found, expected = saved(tmp_path)[last.name], undisturbed.checkpoints[f"step={step}.ckpt"]
        require_same(found[key], expected[key])
    for rank in run_ranks(train, 2, Run((4, 3), ckpt_path=last)):
        require_same(rank["parameters"], undisturbed.parameters)


# --------------------------------------------------------------------------------------------------
# A transfer that stalls
# --------------------------------------------------------------------------------------------------


def held_up(way: Way, hold: Hold, undisturbed: Undisturbed) -> list[list[str]]:
    """The events on each rank in a step whose move is delayed. It ends only if no rank waits
    without need, and the results are equal.
    """
    run = Run(way.before, (way.after,), call=0, hold=hold)
    ranks = run_ranks(train, 3, run)
    for rank in ranks:
        require_same(rank["parameters"], undisturbed.parameters)
    return [rank["moments"] for rank in ranks]


def require_order(moments: list[str], *expected: str) -> None:
    assert sorted(expected, key=moments.index) == list(expected), moments


LAST_BACKWARD = f"backward {NUM_MICROBATCHES - 1} ends"


def test_the_step_does_not_wait_for_the_optimizers_state(undisturbed: Undisturbed) -> None:
    """The first stage has nothing left to compute when it begins to send it. So nobody has."""
    way = WAYS["0 to 1"]
    hold = Hold(way.old, Point.BEFORE_THE_STATE.value, LAST_BACKWARD, way.old)
    old, new, third = held_up(way, hold, undisturbed)
    require_order(old, "message 3 begins", LAST_BACKWARD, "message 3 ends", "settle 0 begins")
    require_order(new, LAST_BACKWARD, "message 3 ends", "message 13 ends", "collect 0 begins")
    assert LAST_BACKWARD in third


def test_the_old_owner_computes_while_weights_leave(undisturbed: Undisturbed) -> None:
    way = WAYS["0 to 1"]
    hold = Hold(way.old, Point.BEFORE_ANYTHING_IS_SENT.value, "forward 1 ends", way.old)
    old, new, _ = held_up(way, hold, undisturbed)
    require_order(old, "forward 1 ends", "early message 0 ends")
    require_order(new, "message 3 ends", "forward 0 ends")


def test_weights_leave_before_the_step_that_needs_them(undisturbed: Undisturbed) -> None:
    """The old owner has ended its step, when a move begins; the first stage has not, and goes on
    only when they are there.
    """
    way = WAYS["1 to 2"]
    hold = Hold(way.third, "early batch end 0", "early message 3 ends", way.old)
    third, old, _ = held_up(way, hold, undisturbed)
    require_order(old, "begin 0 ends", "early message 3 ends")
    require_order(third, "early batch end 0 ends", "cut 0 begins")


def test_a_layer_waits_for_its_own_weights_alone(undisturbed: Undisturbed) -> None:
    """The new owner runs what it has before any of the new is there."""
    way = WAYS["1 to 0"]
    hold = Hold(way.old, Point.BEFORE_ANYTHING_IS_SENT.value, "block 0 ends", way.new)
    new, _, _ = held_up(way, hold, undisturbed)
    require_order(new, "block 0 ends", "early message 0 ends", "message 3 ends", "forward 0 ends")


def test_the_old_owner_lets_go_when_the_new_one_has_said_that_it_has_everything(
    undisturbed: Undisturbed,
) -> None:
    """The new owner says so when the old one has nothing left to do but to let go."""
    way = WAYS["0 to 1"]
    hold = Hold(way.new, Point.AT_THE_RECEIPT.value, "finish 0 begins", way.old)
    old, new, _ = held_up(way, hold, undisturbed)
    messages = [f"message {number} ends" for number in range(14)]
    require_order(old, *messages[:13], "message 13 begins", "message 13 ends", "settle 0 begins")
    require_order(new, *messages, "settle 0 begins")
    for moments in (old, new):
        assert "message 14 begins" not in moments, "the points are what they are said to be"
