"""Runs random programs on several stages, and compares them with a plain loop, bit by bit.

    python -m tests.unit.step.fuzz --count 10000 --workers 2
    python -m tests.unit.step.fuzz --first 4711 --count 1 --show

Each program trains for some steps, each under another schedule, with and without overlapping tails.
Losses, gradients (and which parameters have none), buffers, and all Python values that the program
has noted are compared. Parameters and buffers of other stages are filled with NaN: whoever uses one
gets other numbers.

A program that one stage draws random numbers for is compared with the same core on one stage.
A failing program is made smaller, as long as it fails in the same way, and printed.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.plan.schedule.actions import Kind
from lightning_pipeshift.plan.schedule.schedules import SYNCHRONOUS, schedule_named
from lightning_pipeshift.step.engine import Engine
from lightning_pipeshift.step.suspension import seed_generators
from lightning_pipeshift.step.tails import Tails
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.value import Value
from tests.unit.step.programs import Module, Program, batches_of, random_program
from tests.unit.step.together import StageError, Stages, is_refusal

CPU = torch.device("cpu")
_RATE = 0.05


@dataclass
class Trained:
    """What a run of a program gave.

    Args:
        losses: of each step, of each microbatch; ``None`` where the loss is another stage's.
        gradients: of each step, by the name of the parameter.
        buffers: at the end, by name.
        notes: of each step.
        lines: what was kept under a rank guard.
    """

    losses: list[list[Tensor | None]]
    gradients: list[dict[str, Tensor | None]]
    buffers: dict[str, Tensor]
    notes: list[list[Any]]
    lines: list[float]
    num_suspended: int = 0


@dataclass(frozen=True)
class Outcome:
    """How a program's check ended.

    Args:
        kind: ``"same"``, ``"invalid"`` (torch refuses it), ``"refused"`` (PipeShift does, with
            advice), ``"differs"``, ``"hangs"`` or ``"fails"``.
        reason: the kind of difference or error.
        text: all that is known of it.
        num_suspended: how often a step went on after it was suspended.
    """

    kind: str
    reason: str = ""
    text: str = ""
    num_suspended: int = 0

    @property
    def is_fault(self) -> bool:
        """Whether it is a fault of the core."""
        return self.kind in ("differs", "hangs", "fails")


def schedules_of(program: Program) -> list[tuple[str, bool]]:
    """The schedule of each step, and whether tails may overlap."""
    pick = random.Random(program.seed)
    overlaps = (False,) if program.by_hand else (False, True)
    found = [(name, pick.choice(overlaps)) for name in SYNCHRONOUS]
    pick.shuffle(found)
    return found


def plainly(program: Program, num_steps: int) -> Trained:
    """Trains in a plain loop."""
    module = Module(program)
    found = Trained([], [], {}, [], [])
    for step, batches in enumerate(batches_of(program, num_steps)):
        losses: list[Tensor | None] = []
        for turn, batch in enumerate(batches):
            seed_generators(CPU, "step", 0, step, turn)
            loss = module.step(batch, turn)
            if not program.by_hand and loss is not None:
                (loss / len(batches)).backward()
            losses.append(None if loss is None else loss.detach().clone())
        memories = [p.grad.data_ptr() for p in module.parameters() if p.grad is not None]
        if len(set(memories)) < len(memories):
            # Parameters of one element get the gradient of their sums so: each adds to both.
            raise RuntimeError("Torch has given two parameters one gradient.")
        _end_step(found, module, losses, dict(module.named_parameters()))
    found.buffers, found.lines = dict(module.named_buffers()), module.lines
    return found


def _end_step(
    found: Trained,
    module: Module,
    losses: list[Tensor | None],
    held: dict[str, Tensor],
) -> None:
    found.losses.append(losses)
    found.notes.append(list(module.notes))
    module.notes.clear()
    gradients: dict[str, Tensor | None] = {}
    with torch.no_grad():
        for name, parameter in held.items():
            gradients[name] = None if parameter.grad is None else parameter.grad.clone()
            if parameter.grad is not None:
                parameter -= _RATE * parameter.grad.clamp(-1, 1)
    found.gradients.append(gradients)
    for parameter in module.parameters():
        parameter.grad = None


def on_stages(program: Program, schedules: Iterable[tuple[str, bool]], order: int) -> list[Trained]:
    """Trains on the program's stages, one schedule after the other.

    Raises:
        StageError: a stage failed, or none can go on.
    """
    schedules = list(schedules)
    stages = Stages(program.num_stages, order)
    modules = [Module(program) for _ in range(program.num_stages)]
    cores = []
    for stage, module in enumerate(modules):
        module.rank = stage
        mailbox = stages.mailboxes[stage]
        core = Core(module, list(module.layers), lambda at, _: program.owners[at], mailbox, CPU)
        _spoil(core)
        cores.append(core)
    all_batches = [batches_of(program, len(schedules)) for _ in modules]

    def work(stage: int) -> Trained:
        core, module = cores[stage], modules[stage]
        found = Trained([], [], {}, [], [])
        # Where microbatches depend on each other, the first step is only watched.
        tails = Tails(core, _no_one, int(program.keeps_state))
        for step, (schedule, overlaps) in enumerate(schedules):
            batches = all_batches[stage][step]
            engine = Engine(core, tails if overlaps else None)
            row = schedule_named(schedule)(program.num_stages, len(batches))[stage]
            if program.by_hand:
                row = tuple(action for action in row if action.kind is Kind.FORWARD)
            losses = engine.run(step, batches, module.step, row)
            _end_step(found, module, [_here(loss, stage) for loss in losses], core.held())
            found.num_suspended += engine.num_suspended
        found.lines = module.lines
        found.buffers = {
            name: here
            for name, buffer in module.named_buffers()
            if (here := _here(buffer, stage)) is not None
            and (name == "ramp" or program.owners[int(name.split(".")[1])] == stage)
        }
        return found

    return stages.run_on(cores, work)


def _no_one(sentence: str) -> None:
    """Shows a sentence to no one."""


def _here(loss: Any, stage: int) -> Tensor | None:
    if not isinstance(loss, Value):
        return None if loss is None else loss.detach().clone()
    here = loss.account.tensor if loss.account.owner == stage else None
    return None if here is None else here.detach().clone()


def _spoil(core: Core) -> None:
    """Fills what other stages hold with NaN."""
    with torch.no_grad():
        for tensor, owner in core.parameter_owners.items():
            if owner != core.stage and tensor.is_floating_point():
                tensor.fill_(float("nan"))


# --- the check ---


def check(program: Program, order: int | None = None) -> Outcome:
    """Compares a program on its stages with a plain loop."""
    schedules = schedules_of(program)
    order = program.seed if order is None else order
    try:
        expected = plainly(program, len(schedules))
    except Exception as error:
        return Outcome("invalid", type(error).__name__, str(error))
    try:
        if program.draws:
            alone = replace(program, num_stages=1, owners=(0,) * len(program.owners))
            (expected,) = on_stages(alone, schedules, order)
        found = on_stages(program, schedules, order)
    except StageError as error:
        return _failed(error)
    differences = list(_differences(program, schedules, expected, found))
    if differences:
        return Outcome("differs", differences[0][0], "\n".join(text for _, text in differences))
    return Outcome("same", num_suspended=sum(each.num_suspended for each in found))


def _failed(error: StageError) -> Outcome:
    cause = error.cause
    text = "".join(traceback.format_exception(cause))
    if type(cause).__name__ == "Hang":
        return Outcome("hangs", "hang", text)
    reason = re.sub(r"\([^()]*:\d+\)|`[^`]*`|\d+", "_", str(cause))[:90]
    kind = "refused" if is_refusal(cause) else "fails"
    return Outcome(kind, f"{type(cause).__name__}: {reason}", text)


def _differences(
    program: Program,
    schedules: list[tuple[str, bool]],
    expected: Trained,
    found: list[Trained],
) -> Iterator[tuple[str, str]]:
    """The kind of each difference, and its text."""
    for step, (schedule, overlaps) in enumerate(schedules):
        where = f"step {step} ({schedule}{', overlaps' if overlaps else ''})"
        for turn, loss in enumerate(expected.losses[step]):
            losses = [each.losses[step][turn] for each in found]
            known = [each for each in losses if each is not None]
            if bool(known) != (loss is not None) or not all(_same(loss, each) for each in known):
                yield "loss", f"{where}: loss {turn} is {known} and not {loss}"
        gradients: dict[str, Tensor | None] = {}
        for each in found:
            gradients.update(each.gradients[step])
        for name, gradient in expected.gradients[step].items():
            other = gradients.get(name)
            if (gradient is None) != (other is None):
                yield "no gradient", f"{where}: {name}.grad is {other} and not {gradient}"
            elif gradient is not None and other is not None and not _same(gradient, other):
                yield "gradient", f"{where}: {name}.grad is {other} and not {gradient}"
        for stage, each in enumerate(found):
            notes, wanted = each.notes[step], expected.notes[step]
            # Tails may run later than another microbatch's begin.
            notes = sorted(notes, key=lambda one: one[0]) if overlaps else notes
            if repr(notes) != repr(wanted):
                yield "notes", f"{where}: stage {stage} noted {notes} and not {wanted}"
    for each in found:
        for name, buffer in each.buffers.items():
            if not _same(buffer, expected.buffers[name]):
                yield "buffer", f"{name} is {buffer} and not {expected.buffers[name]}"
    if sorted(found[0].lines) != sorted(expected.lines) or any(each.lines for each in found[1:]):
        yield "lines", f"{[each.lines for each in found]} and not {expected.lines}"


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()


def shrunk(
    program: Program,
    outcome: Outcome,
    seconds: float = 60,
    check: Callable[[Program], Outcome] = check,
) -> tuple[Program, Outcome]:
    """The smallest program found that fails in the same way."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for smaller in program.without():
            if time.monotonic() > end:
                break
            try:
                found = check(smaller)
            except Exception:
                continue
            if (found.kind, found.reason) == (outcome.kind, outcome.reason):
                program, outcome = smaller, found
                break
        else:
            break
    return program, outcome


def checked(seed: int) -> tuple[int, Outcome]:
    """The outcome of a seed's program."""
    torch.set_num_threads(1)
    return seed, check(random_program(seed))


def main() -> int:
    """Checks many programs, and prints those that fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=10_000, help="how many programs")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--show", action="store_true", help="print the programs")
    parser.add_argument("--shrink", type=float, default=60, help="seconds for each kind of fault")
    options = parser.parse_args()
    kinds: Counter[str] = Counter()
    reasons: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], int] = {}
    num_suspended, begin = 0, time.monotonic()
    seeds = range(options.first, options.first + options.count)
    with ProcessPoolExecutor(options.workers) as pool:
        for seed, outcome in pool.map(checked, seeds, chunksize=20):
            if options.show:
                print(random_program(seed), f"\n-> {outcome.kind} {outcome.reason}\n{outcome.text}")
            kinds[outcome.kind] += 1
            num_suspended += outcome.num_suspended
            if outcome.kind != "same":
                reasons[outcome.kind, outcome.reason] += 1
                examples.setdefault((outcome.kind, outcome.reason), seed)
            if outcome.is_fault:
                print(f"seed {seed} {outcome.kind}: {outcome.reason}", flush=True)
            if sum(kinds.values()) % 500 == 0:
                print(sum(kinds.values()), dict(kinds), flush=True)
    print(f"{len(seeds)} programs in {time.monotonic() - begin:.0f} s: {dict(kinds)}")
    print(f"steps went on {num_suspended} times after they were suspended")
    for (kind, reason), count in reasons.most_common():
        print(f"{count:6} {kind:8} {reason} (seed {examples[kind, reason]})")
    for (kind, reason), seed in examples.items():
        if kind in ("differs", "hangs", "fails") and options.shrink:
            program, outcome = shrunk(random_program(seed), checked(seed)[1], options.shrink)
            print(f"\n{kind}: {reason}\n{program}\n{outcome.text[-3000:]}", flush=True)
    return int(any(outcome in kinds for outcome in ("differs", "hangs", "fails")))


if __name__ == "__main__":
    sys.exit(main())
