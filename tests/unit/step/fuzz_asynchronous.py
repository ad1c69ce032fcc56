"""Random programs in the asynchronous schedules, against a loop with weights of the same age.

Stage ``s`` of ``N`` runs the forward of minibatch ``k`` with the weights of before the last ``N - 1
- s`` minibatches (``async``; PipeDream, SOSP 2019), or of the update before the last
(``async-2bw``; PipeDream-2BW, ICML 2021). A parameter belongs to one stage, so the loop gives each
parameter the version that its stage would use, and runs the whole program on them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeshift.plan.schedule.actions import Action, Kind
from lightning_pipeshift.plan.schedule.asynchronous import drain, turn
from lightning_pipeshift.runtime.ownership.weight_versions import WeightVersions
from lightning_pipeshift.step.asynchronous_engine import AsynchronousEngine
from lightning_pipeshift.step.engine import Engine
from lightning_pipeshift.step.suspendable import Flight, SuspendableMicrobatch
from lightning_pipeshift.step.suspension import ThreadState, seed_generators
from lightning_pipeshift.step.tails import Tails
from lightning_pipeshift.values.core import Core
from tests.unit.step.fuzz import (
    CPU,
    RATE,
    Outcome,
    Trained,
    compared,
    cores_on,
    failed,
    here,
    no_one,
    note_end,
)
from tests.unit.step.programs import Module, Program, batches_of
from tests.unit.step.together import StageError, Stages

_NUM_STEPS = 2


class Setting(NamedTuple):
    """How a program trains.

    Args:
        delays: whether the schedule is ``async-2bw``.
        num_accumulated: how many minibatches make an update.
        leaves_tails: whether the part of a step behind a read may run in a later call.
        drains: the minibatches before which the pipeline is drained.
    """

    delays: bool
    num_accumulated: int
    leaves_tails: bool
    drains: frozenset[int]

    def is_update(self, number: int, num_minibatches: int) -> bool:
        """Whether an update follows a minibatch."""
        return (number + 1) % self.num_accumulated == 0 or number + 1 == num_minibatches


def setting_of(program: Program) -> Setting:
    """The setting of a program."""
    pick = random.Random(program.seed + 3)
    delays = pick.random() < 0.3
    num_accumulated = program.num_stages + pick.randint(0, 1) if delays else pick.choice((1, 1, 2))
    count = _NUM_STEPS * len(program.rows)
    # With versions that are delayed, a drain changes which weights a forward uses.
    drains = frozenset({pick.randrange(1, count)} if pick.random() < 0.5 and not delays else ())
    return Setting(delays, num_accumulated, pick.random() < 0.7, drains)


def _minibatches(program: Program) -> list[tuple[Tensor, Tensor]]:
    return [batch for batches in batches_of(program, _NUM_STEPS) for batch in batches]


def _stages_of(program: Program, module: Module) -> dict[str, int]:
    """The stage that trains each parameter: of a tied one, the first layer's; of those outside of
    layers, the first stage.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = dict.fromkeys(names.values(), 0)
    for owner, layer in reversed(list(zip(program.owners, module.layers, strict=True))):
        found.update({names[parameter]: owner for parameter in layer.parameters()})
    return found


# --- the loop ---


def in_loop(
    program: Program, setting: Setting, module: Module, run: Callable[[int], Tensor | None]
) -> Trained:
    """Trains in a loop.

    Args:
        program: the program.
        setting: how it trains.
        module: its module.
        run: runs a minibatch, forward and backward; returns its loss.
    """
    count, num_stages = len(_minibatches(program)), program.num_stages
    parameters, stages = dict(module.named_parameters()), _stages_of(program, module)
    versions = {name: [p.data.clone()] for name, p in parameters.items()}
    ends = [number for number in range(count) if setting.is_update(number, count)]
    found = Trained([], [], {}, [], [])
    for number in range(count):
        first = max((drain for drain in setting.drains if drain <= number), default=0)
        for name, parameter in parameters.items():
            behind = max(first, number - (num_stages - 1 - stages[name]))
            update = sum(end < behind for end in ends)
            if setting.delays:
                update = max(0, sum(end < number for end in ends) - 1)
            parameter.data = versions[name][update].clone()
        loss = run(number)
        found.losses.append([None if loss is None else loss.detach().clone()])
        gradients = {name: _copy(p.grad) for name, p in parameters.items()}
        found.gradients.append(gradients if number in ends else {})
        if number in ends:
            for name, parameter in parameters.items():
                before, gradient = versions[name][-1], gradients[name]
                change = 0.0 if gradient is None else RATE * gradient.clamp(-1, 1)
                versions[name].append(before - change)
                parameter.grad = None
    _note_notes(found, module, count)
    found.lines = module.lines
    found.buffers = dict(module.named_buffers())
    return found


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


def _note_notes(found: Trained, module: Module, count: int) -> None:
    for number in range(count):
        found.notes.append([note for note in module.notes if note[0] == number])


def plainly(program: Program, setting: Setting) -> Trained:
    """Trains in plain PyTorch."""
    module, minibatches = Module(program), _minibatches(program)

    def run(number: int) -> Tensor | None:
        seed_generators(CPU, "step", 0, number, 0)
        loss = module.step(minibatches[number], number)
        if loss is not None:
            loss.backward()
        return loss

    return in_loop(program, setting, module, run)


def on_one_stage(program: Program, setting: Setting) -> Trained:
    """Trains on one stage, which draws the numbers of several ones."""
    stages, module, minibatches = Stages(1, 0), Module(program), _minibatches(program)
    cores = cores_on(stages, program, [module], lambda *_: 0)
    row = (Action(Kind.FORWARD, 0), Action(Kind.BACKWARD, 0))

    def run(number: int) -> Tensor | None:
        engine = Engine(cores[0])
        (loss,) = engine.run(
            number, [minibatches[number]], lambda batch, _: module.step(batch, number), row
        )
        return here(loss, 0)

    (found,) = stages.run_on(cores, lambda _: in_loop(program, setting, module, run))
    found.buffers = {name: x for name, x in found.buffers.items() if type(x) is Tensor}
    return found


# --- the stages ---


class _Run:
    """One stage's part of an asynchronous pipeline.

    Args:
        program: the program.
        setting: how it trains.
        core: the stage's.
        module: the stage's.
        stages: all of them.
    """

    def __init__(
        self, program: Program, setting: Setting, core: Core, module: Module, stages: Stages
    ) -> None:
        self._setting, self._core, self._module, self._all = setting, core, module, stages
        self._stage, self._num_stages = core.stage, program.num_stages
        self._minibatches = _minibatches(program)
        self._flight, self._first = Flight(is_asynchronous=True), 0
        self._runs: dict[int, int] = {}
        self._losses: dict[int, Any] = {}
        self._reports: dict[int, list[Callable[[], Any]]] = {}
        self._begun: dict[int, SuspendableMicrobatch] = {}
        self._versions = WeightVersions(setting.delays)
        trained_at = _stages_of(program, module)
        self._held = {n: p for n, p in module.named_parameters() if trained_at[n] == self._stage}
        self._versions.follow(self._held.values())
        self._tails = Tails(core, no_one, int(program.keeps_state))
        self._engine = AsynchronousEngine(core, self._tails, self._around)
        self._found = Trained([], [], {}, [], [])
        self._owners = program.owners

    def train(self) -> Trained:
        """Trains."""
        count, setting = len(self._minibatches), self._setting
        for number in range(count):
            if number in setting.drains:
                self._drain(number)
            is_empty = self._first == number
            # A pipeline's notices see to that: no stage begins a minibatch long before the first.
            self._all.begin(self._stage, self._num_stages)
            self._core.begin(0 if is_empty else self._num_stages - 1)
            self._runs[number] = self._core.num_steps
            row = turn(number, self._stage, self._num_stages, self._first)
            self._go_on(row, number, setting.leaves_tails)
            self._versions.update += setting.is_update(number, count)
            self._finish(row)
        self._drain(count)
        _note_notes(self._found, self._module, count)
        self._found.num_suspended = self._engine.num_suspended
        note_end(self._found, self._module, self._stage, self._owners)
        return self._found

    def _drain(self, following: int) -> None:
        for action in drain(following - 1, self._stage, self._num_stages, self._first):
            self._go_on([action], following, False)
            self._finish([action])
        if self._flight.live:
            self._go_on([], following, False)
        self._first = following
        self._tails.leave()

    @contextmanager
    def _around(self, action: Action) -> Iterator[None]:
        self._versions.begin_action(action)
        try:
            yield
        finally:
            self._versions.end_action(action)

    def _go_on(self, row: Sequence[Action], number: int, leaves_some: bool) -> None:
        flight, tails = self._flight, self._tails
        flight.todo.extend(row)
        with tails.watching(bool(flight.live), stays=True):
            self._engine.go_on(flight, number, self._begin, None, tails, leaves_some)

    def _begin(self, number: int, outside: ThreadState) -> SuspendableMicrobatch:
        def body(microbatch: SuspendableMicrobatch) -> None:
            loss = self._losses[number] = self._module.step(self._minibatches[number], number)
            if microbatch.is_ahead():
                microbatch.stall("")
            self._reports[number] = [
                microbatch.tell_later(None, stage + 1, stage, "the report")
                for stage in range(self._num_stages - 1)
            ]
            microbatch.root = loss

        microbatch = self._begun[number] = SuspendableMicrobatch(
            self._core,
            self._runs[number],
            number,
            0,
            body,
            outside,
            self._tails,
            self._flight,
            number,
        )
        microbatch.has_later_backward = True
        return microbatch

    def _finish(self, row: Sequence[Action]) -> None:
        for action in row:
            if action.kind is not Kind.BACKWARD:
                continue
            number, found = action.microbatch, self._found
            found.losses.append([here(self._losses.pop(number), self._stage)])
            reports = self._reports.pop(number)
            if self._stage < len(reports):
                # So no stage is further ahead than the schedule says.
                reports[self._stage]()
            self._core.mailbox.finish(self._runs.pop(number), all_but=8 * self._num_stages)
            self._begun.pop(number).release()
            ends = self._setting.is_update(number, len(self._minibatches))
            gradients = {name: _copy(p.grad) for name, p in self._held.items()}
            found.gradients.append(gradients if ends else {})
            if ends:
                self._update()

    def _update(self) -> None:
        with self._versions.updating(self._held.values()), torch.no_grad():
            for parameter in self._held.values():
                if parameter.grad is not None:
                    parameter.sub_(RATE * parameter.grad.clamp(-1, 1))
        for parameter in self._held.values():
            parameter.grad = None


def on_stages(program: Program, setting: Setting, order: int) -> list[Trained]:
    """Trains on the program's stages.

    Raises:
        StageError: a stage failed, or none can go on.
    """
    stages = Stages(program.num_stages, order)
    modules = [Module(program) for _ in range(program.num_stages)]
    cores = cores_on(stages, program, modules, lambda at, _: program.owners[at])
    for core, module in zip(cores, modules, strict=True):
        _train_shared_at_one_stage(program, core, module)

    def work(stage: int) -> Trained:
        return _Run(program, setting, cores[stage], modules[stage], stages).train()

    return stages.run_on(cores, work)


def _train_shared_at_one_stage(program: Program, core: Core, module: Module) -> None:
    """Makes parameters that several stages use those of the first of them, which sends them to the
    others in each minibatch.
    """
    used = {core.owners(at, 0) for at in range(len(program.owners))}
    holders: dict[nn.Parameter, set[int]] = {p: set() for p in module.parameters()}
    for owner, layer in zip(program.owners, module.layers, strict=True):
        for parameter in layer.parameters():
            holders[parameter].add(owner)
    for name, parameter in module.named_parameters():
        if len(holders[parameter] or used) > 1:
            core.parameter_owners[parameter] = _stages_of(program, module)[name]
            core.written.add(parameter)


def check(program: Program, order: int | None = None) -> Outcome:
    """Compares a program on its stages with the loop."""
    if program.by_hand:
        return Outcome("invalid", "it calls backward itself")
    setting = setting_of(program)
    order = program.seed if order is None else order
    try:
        expected = plainly(program, setting)
    except Exception as error:
        return Outcome("invalid", type(error).__name__, str(error))
    try:
        if program.draws:
            expected = on_one_stage(program, setting)
        found = on_stages(program, setting, order)
    except StageError as error:
        return failed(error)
    where = [f"minibatch {number} ({setting})" for number in range(len(expected.losses))]
    return compared(where, expected, found, [True] * len(where))
