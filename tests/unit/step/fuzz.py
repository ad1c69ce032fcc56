"""Runs random programs on several stages, and compares them with a plain loop, bit by bit.

    python -m tests.unit.step.fuzz --count 10000 --workers 2
    python -m tests.unit.step.fuzz --first 4711 --count 1 --show
    python -m tests.unit.step.fuzz --asynchronous --count 10000 --workers 2

Each program trains for some steps, each under another schedule, with and without overlapping tails;
in every second program layers change their owners between the steps. Losses, gradients (and which
parameters have none), buffers, and all Python values that the program has noted are compared.
Parameters and buffers of other stages are filled with NaN: whoever uses one gets other numbers.

With ``--asynchronous`` each microbatch is a minibatch of an asynchronous schedule, and the loop
uses weights as old as the schedule's: see :mod:`tests.unit.step.fuzz_asynchronous`.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeshift.plan.schedule.actions import Kind
from lightning_pipeshift.plan.schedule.schedules import SYNCHRONOUS, schedule_named
from lightning_pipeshift.step.engine import Engine
from lightning_pipeshift.step.suspension import seed_generators
from lightning_pipeshift.step.tails import Tails
from lightning_pipeshift.values.core import Core, Owners
from lightning_pipeshift.values.value import Value
from tests.unit.step.programs import Module, Program, batches_of, random_program
from tests.unit.step.together import StageError, Stages, is_refusal

CPU = torch.device("cpu")
RATE = 0.05


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
        end_step(found, module, losses, dict(module.named_parameters()))
    found.buffers, found.lines = dict(module.named_buffers()), module.lines
    return found


def end_step(
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
                parameter -= RATE * parameter.grad.clamp(-1, 1)
    found.gradients.append(gradients)
    for parameter in module.parameters():
        parameter.grad = None


def owners_of(program: Program, num_steps: int) -> list[tuple[int, ...]]:
    """The owners of the layers in each step."""
    pick, found = random.Random(~program.seed), [program.owners]
    for _ in range(num_steps - 1):
        owners = found[-1]
        if program.seed % 2 and pick.random() < 0.7:
            moves = pick.random()
            owners = tuple(
                pick.randrange(program.num_stages) if pick.random() < moves else owner
                for owner in owners
            )
        found.append(owners)
    return found


def cores_on(
    stages: Stages, program: Program, modules: Sequence[Module], owners: Owners
) -> list[Core]:
    """The cores of the stages. What other stages own is NaN on each."""
    cores = []
    for stage, module in enumerate(modules):
        module.rank = stage
        cores.append(Core(module, list(module.layers), owners, stages.mailboxes[stage], CPU))
        spoil(cores[-1])
    return cores


def on_stages(program: Program, schedules: Iterable[tuple[str, bool]], order: int) -> list[Trained]:
    """Trains on the program's stages, one schedule after the other.

    Raises:
        StageError: a stage failed, or none can go on.
    """
    schedules = list(schedules)
    all_owners = owners_of(program, len(schedules))
    stages = Stages(program.num_stages, order)
    modules = [Module(program) for _ in range(program.num_stages)]
    cores = cores_on(stages, program, modules, lambda at, _: program.owners[at])
    all_batches = [batches_of(program, len(schedules)) for _ in modules]
    all_found = [Trained([], [], {}, [], []) for _ in modules]

    def work(steps: Sequence[int], stage: int) -> None:
        core, module, found = cores[stage], modules[stage], all_found[stage]
        # Where microbatches depend on each other, the first step is only watched.
        tails = Tails(core, no_one, int(program.keeps_state))
        num_ahead = 1 + program.seed % 3
        for step in steps:
            stages.begin(stage, num_ahead)
            schedule, overlaps = schedules[step]
            batches = all_batches[stage][step]
            engine = Engine(core, tails if overlaps else None)
            row = schedule_named(schedule)(program.num_stages, len(batches))[stage]
            if program.by_hand:
                row = tuple(action for action in row if action.kind is Kind.FORWARD)
            losses = engine.run(step, batches, module.step, row, num_ahead=num_ahead)
            end_step(found, module, [here(loss, stage) for loss in losses], core.held())
            found.num_suspended += engine.num_suspended

    for owners, steps in groupby(range(len(schedules)), key=all_owners.__getitem__):
        move(cores, owners)
        stages.run_on(cores, partial(work, list(steps)))
    for stage, found in enumerate(all_found):
        note_end(found, modules[stage], stage, all_owners[-1])
    return all_found


def move(cores: Sequence[Core], owners: Sequence[int]) -> None:
    """Gives each stage the layers that it owns from now on, and takes them from their old owners.
    What a layer has put into the place of a buffer is a value, and stays where it is.
    """
    tensors = [dict(_named_tensors(core.module)) for core in cores]
    before = _owners_by_name(cores[0])
    for core in cores:
        core.place(lambda at, _: owners[at])
    after = _owners_by_name(cores[0])
    with torch.no_grad():
        for name, source in before.items():
            if after[name] != source:
                old = tensors[source][name]
                tensors[after[name]][name].copy_(old)
                if old.is_floating_point():
                    old.fill_(float("nan"))


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _owners_by_name(core: Core) -> dict[str, int]:
    owners = core.parameter_owners
    return {name: owners[x] for name, x in _named_tensors(core.module) if x in owners}


def note_end(found: Trained, module: Module, stage: int, owners: Sequence[int]) -> None:
    """Notes what a module has at the end."""
    found.lines = module.lines
    found.buffers = {
        name: own
        for name, buffer in module.named_buffers()
        if (own := here(buffer, stage)) is not None
        and (name == "ramp" or owners[int(name.split(".")[1])] == stage)
    }


def no_one(sentence: str) -> None:
    """Shows a sentence to no one."""


def here(loss: Any, stage: int) -> Tensor | None:
    """The tensor of a value, where this stage has it."""
    if not isinstance(loss, Value):
        return None if loss is None else loss.detach().clone()
    here = loss.account.tensor if loss.account.owner == stage else None
    return None if here is None else here.detach().clone()


def spoil(core: Core) -> None:
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
        return failed(error)
    where = [
        f"step {step} ({schedule}{', overlaps' if overlaps else ''})"
        for step, (schedule, overlaps) in enumerate(schedules)
    ]
    return compared(where, expected, found, [overlaps for _, overlaps in schedules])


def compared(
    where: Sequence[str], expected: Trained, found: list[Trained], in_turns: Sequence[bool]
) -> Outcome:
    """The outcome of a program.

    Args:
        where: the name of each step.
        expected: what the loop gave.
        found: what each stage gave.
        in_turns: of each step, whether tails may have run later than another microbatch's begin.
    """
    differences = list(_differences(where, expected, found, in_turns))
    if differences:
        return Outcome("differs", differences[0][0], "\n".join(text for _, text in differences))
    return Outcome("same", num_suspended=sum(each.num_suspended for each in found))


def failed(error: StageError) -> Outcome:
    """The outcome of a program that ends with an error."""
    cause = error.cause
    text = "".join(traceback.format_exception(cause))
    if type(cause).__name__ == "Hang":
        return Outcome("hangs", "hang", text)
    reason = re.sub(r"\([^()]*:\d+\)|`[^`]*`|\d+", "_", str(cause))[:90]
    kind = "refused" if is_refusal(cause) else "fails"
    return Outcome(kind, f"{type(cause).__name__}: {reason}", text)


def _differences(
    names: Sequence[str], expected: Trained, found: list[Trained], in_turns: Sequence[bool]
) -> Iterator[tuple[str, str]]:
    """The kind of each difference, and its text."""
    for step, where in enumerate(names):
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
            notes = sorted(notes, key=lambda one: one[0]) if in_turns[step] else notes
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


def checked(seed: int, check: Callable[[Program], Outcome] = check) -> tuple[int, Outcome]:
    """The outcome of a seed's program."""
    torch.set_num_threads(1)
    return seed, check(random_program(seed))


def main() -> int:
    """Checks many programs, and prints those that fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=10_000, help="how many programs")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--asynchronous", action="store_true", help="with these schedules")
    parser.add_argument("--show", action="store_true", help="print the programs")
    parser.add_argument("--shrink", type=float, default=60, help="seconds for each kind of fault")
    options = parser.parse_args()
    check_one = check
    if options.asynchronous:
        from tests.unit.step.fuzz_asynchronous import check as check_one
    kinds: Counter[str] = Counter()
    reasons: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], int] = {}
    num_suspended, begin = 0, time.monotonic()
    seeds = range(options.first, options.first + options.count)
    with ProcessPoolExecutor(options.workers) as pool:
        for seed, outcome in pool.map(partial(checked, check=check_one), seeds, chunksize=20):
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
            program, outcome = shrunk(
                random_program(seed), checked(seed, check_one)[1], options.shrink, check_one
            )
            print(f"\n{kind}: {reason}\n{program}\n{outcome.text[-3000:]}", flush=True)
    return int(any(outcome in kinds for outcome in ("differs", "hangs", "fails")))


if __name__ == "__main__":
    sys.exit(main())
