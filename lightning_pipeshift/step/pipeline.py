"""One rank's part of a pipeline whose stages all run the whole of the user's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_pipeshift.compat.torch_private import is_compiled_module, without_compiling
from lightning_pipeshift.compat.torchmetrics_private import last_value, set_last_value
from lightning_pipeshift.errors import PlanError, some_of
from lightning_pipeshift.model.execution.measure import Figures
from lightning_pipeshift.model.execution.microbatch import size_or_one, split
from lightning_pipeshift.model.execution.transfer import to_device, to_host
from lightning_pipeshift.model.execution.trees import leaves_of, map_leaves
from lightning_pipeshift.model.parameters.uses import parameter_uses
from lightning_pipeshift.model.saved.saved_tensors import bytes_of
from lightning_pipeshift.model.trace.trace import Trace
from lightning_pipeshift.model.user_state.logs import LoggedValue, LogRecorder, merge_logs
from lightning_pipeshift.model.user_state.metrics import BatchMetrics
from lightning_pipeshift.model.user_state.random_streams import stream_seed
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.schedule.actions import Action
from lightning_pipeshift.plan.schedule.schedules import forward_only, schedule_named
from lightning_pipeshift.runtime.comm.channels import PostedSum
from lightning_pipeshift.runtime.comm.mailbox import Mailbox
from lightning_pipeshift.runtime.comm.step_group import StepGroup
from lightning_pipeshift.runtime.liveness.stalls import purpose
from lightning_pipeshift.runtime.ownership.user_copies import kept_by_user
from lightning_pipeshift.runtime.step.checksum import checksum, require_same_end
from lightning_pipeshift.runtime.step.losses import Losses
from lightning_pipeshift.runtime.step.pipeline import Pipeline, Seen
from lightning_pipeshift.runtime.step.step_report import Report, merge_reports
from lightning_pipeshift.runtime.step.trace_cache import Key
from lightning_pipeshift.runtime.step.training_batch import TrainingBatch, UserStep
from lightning_pipeshift.step.engine import Engine
from lightning_pipeshift.step.tails import Tails
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.gathering import (
    Structure,
    gathered,
    kept,
    of_stage,
    require_same_program,
)
from lightning_pipeshift.values.microbatch import OUTSIDE, Microbatch
from lightning_pipeshift.values.value import Value, run_by, running, set_program

# What a layer is expected to cost by its parameters' bytes, before it is measured.
_SECONDS_PER_BYTE = 1e-9


class _Recorder(LogRecorder):
    """Records what each microbatch logs: their steps may run in parts, in turns."""

    def __init__(self, root: nn.Module) -> None:
        self._by_step: dict[Any, list[LoggedValue]] = {}
        super().__init__(root)

    @property
    def records(self) -> list[LoggedValue]:
        """The logs of the step that runs now."""
        return self._by_step.setdefault(running(), [])

    @records.setter
    def records(self, records: list[LoggedValue]) -> None:
        self._by_step[running()] = records

    def take(self) -> list[LoggedValue]:
        """Returns the logs of the step that runs now, and forgets them."""
        return self._by_step.pop(running(), [])


class _Recording:
    """Copies logged values: :class:`~lightning_pipeshift.model.user_state.logs.Values` for a
    step on values.
    """

    def kept_value(self, leaf: Any) -> Any:
        """A copy of a value."""
        return kept(leaf)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context for code other than the user's."""
        yield


@dataclass
class _Evaluated:
    """The result and the logs of an evaluation step, which may contain values."""

    result: Any
    logs: list[LoggedValue]
    size: int


class ValuePipeline(Pipeline):
    """A pipeline on values: see :mod:`lightning_pipeshift.values`."""

    _engine_class = Engine
    """The class of the engine that carries out this pipeline's schedule."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._recorder = _Recorder(self.root)
        self._recorder.current = _Recording()
        self.core: Core | None = None
        self._placed: AbstractContextManager[None] | None = None
        self._between: Microbatch | None = None
        self._evaluated: list[_Evaluated] = []
        self.find_optimizers: Callable[[], Sequence[Optimizer]] = list
        """Those of the run."""

    def _install(self) -> None:
        """Layers run at their owners in steps only: nothing is installed."""

    def _look(self, key: Key, step: UserStep, batch: Any, trains: bool) -> Seen:
        layers = [gate.layer for gate in self._trace_cache.gates]
        uses = parameter_uses(self.root, layers, {}, None)
        figures = {
            at: Figures(_SECONDS_PER_BYTE * bytes_of(layer.parameters()))
            for at, layer in enumerate(layers)
        }
        return Seen(Trace.empty(), figures, {}, None, frozenset(), uses)

    @property
    def _traces_steps(self) -> bool:
        return False

    @property
    def is_by_itself(self) -> bool:
        """Whether this is the only device: its steps end with plain tensors, and their backward is
        Lightning's.
        """
        return self.replicas.topology.num_ranks == 1

    def _plain_forward(self, key: Key, step: UserStep, batch: Any) -> Any:
        if self.core is None:
            # The run is over, and user code asks the Trainer's loop for one more step.
            return step(self.root, batch)
        _, kind, number, *_ = key
        (row,) = forward_only(1, 1)

        def run(part: Any, _: int) -> Any:
            return step(self.root, part)

        (result,) = self._in_step(str(kind), int(number), [batch], run, row)
        return result

    def plain_backward(self) -> AbstractContextManager[None]:
        """See :class:`Pipeline`."""
        return run_by(None)

    def _prepare(
        self,
        key: Key,
        step: UserStep,
        batch: Any,
        optimizers: Iterable[Optimizer],
        final: bool,
        trains: bool = False,
    ) -> None:
        if self._plan is not None:
            return
        # Nothing has to be known of a step before it runs: the first plan is final.
        optimizers = list(self.find_optimizers())
        super()._prepare(key, step, batch, optimizers, True, trains=bool(optimizers))
        if any(self.plan.recompute):
            raise PlanError(
                "The plan recomputes layers, which `core='values'` does not do yet. Use"
                " `core='trace'`, a plan without 'recompute', or `recompute='none'`."
            )
        if self.settings.plan is None:
            # The layers' seconds were for the cut by bytes only: they predict nothing.
            layers = tuple(replace(layer, forward_seconds=0.0) for layer in self.plan.layers)
            self._plan = replace(self.plan, layers=layers, prediction=None)
        self._connect_core()

    def _connect_core(self) -> None:
        channels, holdings = self.channels, self.holdings
        assert holdings is not None
        members = [sorted(channels.ranks).index(rank) for rank in channels.ranks]
        mailbox = Mailbox(
            channels.control, members, channels.ranks, channels.stage, channels.watched
        )
        self.core = Core(
            self.root,
            [gate.layer for gate in self._trace_cache.gates],
            self._owners(),
            mailbox,
            channels.device,
            stream_seed(self.settings.seed, self.vm),
            lambda tensor: holdings.holders_of(tensor) if holdings.knows(tensor) else (),
        )
        self.core.compares_floats = len(set(channels.gather_int(_arithmetic()))) == 1
        if not getattr(self.root, "automatic_optimization", True):
            # Optimizers step in the middle of a step: one stage has the state of each parameter.
            for use in holdings.uses:
                self.core.parameter_owners.setdefault(use.parameter, 0)
                if len(holdings.holders_of(use.parameter)) > 1:
                    self.core.written.add(use.parameter)
        if compiled := [n for n, x in self.root.named_modules() if is_compiled_module(x)]:
            names = some_of([repr(name) for name in compiled])
            self.messages.append(f"`core='values'` runs {names} without compiling yet.")
        self._placed = self.core.placed()
        self._placed.__enter__()
        parameter_owners = self.core.parameter_owners
        holdings.is_common = lambda buffer: buffer not in parameter_owners
        self._begin_engine()
        self._metrics = [each for each in self.root.modules() if isinstance(each, Metric)]
        self._batch_metrics = BatchMetrics(self.root)
        self._begin_outside()

    def _owners(self) -> Callable[[int, int], int]:
        stage_of = self.plan.placement.stages(self.vm)
        return lambda number, _: stage_of[number]

    def _begin_engine(self) -> None:
        """Begins to learn what steps use behind their reads, which depends on who owns what."""
        assert self.core is not None
        is_alone = self.channels.num_stages == 1
        self._tails = None if is_alone else Tails(self.core, self.messages.append)
        self._engine = self._engine_class(self.core, self._tails, self._around)

    def _begin_outside(self) -> None:
        """Runs operations on values between two steps, from now on."""
        assert self.core is not None
        if self._between is not None:
            self._between.release()
        self._between = Microbatch(self.core, self.core.num_steps, self.core.num_steps, OUTSIDE)
        set_program(self._between, self.channels.device)

    def meets(self) -> None:
        """See :class:`Pipeline`."""
        if self.core is not None:
            self.core.mailbox.pass_phase()

    def _note_begin(self) -> None:
        self.meets()
        super()._note_begin()

    def _share(self, mine: Any, source: int) -> Any:
        self.meets()
        return self.channels.share_object(mine, source)

    def _begin_gathering(self, tree: Any) -> tuple[Structure, PostedSum]:
        """Begins to compare a structure over the stages."""
        structure = Structure(tree)
        digests = torch.zeros(self.channels.num_stages, dtype=torch.int64)
        digests[self.channels.stage] = structure.digest()
        return structure, self.channels.post_sum(digests)

    def _gathered(self, structure: Structure, posted: PostedSum) -> Any:
        """A structure with host tensors in the place of values, and metrics with common tensors, as
        Lightning computes them, perhaps on one rank. Every stage calls this. If ranks have logged
        different things, what counts is what the first rank has, as on one device.

        Args:
            structure: what :meth:`_begin_gathering` returned.
            posted: likewise.
        """
        channels, core = self.channels, self.core
        assert core is not None
        self.meets()
        if len(set(posted.wait().tolist())) > 1:
            # Values of different programs have different names.
            require_same_program(core, self._share)
            first = channels.ranks.index(min(channels.ranks))
            offered = core.mailbox.offered
            structure = of_stage(first, structure, channels.stage, self._share, offered)
        held = [(metric.metric_state, last_value(metric)) for metric in self._metrics]
        more, num_leaves = Structure(held), len(structure.leaves)
        leaves = gathered([*structure.leaves, *more.leaves], core, self._share)
        found = more.rebuild(leaves[num_leaves:])
        for metric, (state, value), (before, last) in zip(self._metrics, found, held, strict=True):
            changed = {name: x for name, x in state.items() if _has_values(before[name])}
            for name, x in to_device(changed, self.channels.device).items():
                setattr(metric, name, map_leaves(_of_its_own, x))
            if _has_values(last):
                set_last_value(metric, to_device(value, self.channels.device))
        return structure.rebuild(leaves[:num_leaves])

    def _logged(self, step: UserStep, batch: Any, _: int) -> tuple[Any, list[LoggedValue]]:
        """Runs a user's step; returns its result, and what it has logged."""
        return step(self.root, batch), self._recorder.take()

    def _in_step(self, number: str, step: int, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs microbatches.

        Args:
            number: the kind of the step.
            step: its number.
            args: as for :meth:`Engine.run`, from the microbatches on.
            kwargs: likewise.
        """
        core, outside = self.core, running()
        assert core is not None
        assert isinstance(outside, Microbatch)
        settings = [
            (name, x)
            for optimizer in self.find_optimizers()
            for group in optimizer.param_groups
            for name, x in group.items()
            if isinstance(x, int | float | tuple)
        ]
        outside.note("the optimizers", settings)
        core.note(outside)
        with self._running_steps():
            results = self._engine.run(stream_seed(number, step), *args, **kwargs)
        self._begin_outside()
        return results

    @contextmanager
    def _running_steps(self) -> Iterator[None]:
        assert self.core is not None
        in_step = StepGroup(self.vm, self.replicas.count).in_force()
        # A compiler follows neither values nor the parameters' class.
        with run_by(None), self.core.seeing_parameters(), in_step, without_compiling():
            yield

    @contextmanager
    def _around(self, action: Action) -> Iterator[None]:
        recorder = self.recorder_of_actions
        with self._profile(f"[PipeShift] {action.kind.name.lower()}"):
            if recorder is not None:
                recorder.begin_action(0, action)
            yield
            if recorder is not None:
                recorder.end_action(action)
        self.channels.num_done += 1

    # --- training ---

    def _request(self, plan: Plan, from_microbatch: int | None) -> None:
        found = [
            what
            for what, is_found in (
                ("another order of the ranks", plan.ranks != self.coming_plan.ranks),
                ("recomputation", any(plan.recompute)),
                ("new owners from the middle of a step on", bool(from_microbatch)),
                (
                    "moves of weights that several layers share, with manual optimization",
                    self._moves_shared(plan),
                ),
            )
            if is_found
        ]
        if found:
            raise PlanError(
                f"With `core='values'` a plan with {some_of(found)} cannot come into force while"
                " training runs yet. Use `core='trace'`, or start a run with the new plan."
            )
        super()._request(plan, from_microbatch)

    def _moves_shared(self, plan: Plan) -> bool:
        """Whether layers move that have a parameter in common whose optimizer's state one stage
        only has.
        """
        assert self.holdings is not None
        old, new = (each.placement.stages(self.vm) for each in (self.plan, plan))
        return not getattr(self.root, "automatic_optimization", True) and any(
            use.is_shared and any(old[layer] != new[layer] for layer in use.layers)
            for use in self.holdings.uses
        )

    def _change_owners(self, given: TrainingBatch) -> None:
        """Puts the plan in force whose layers have been prepared for it, between two steps."""
        if self.changes.next is not None:
            self._match_holders()
        self.changes.before_step(given, [])
        self._finish_change()

    def _finish_change(self) -> None:
        super()._finish_change()
        assert self.holdings is not None
        self.holdings.return_gradients_aside()

    def _put_in_force(self, plan: Plan, first: int) -> None:
        super()._put_in_force(plan, first)
        core, between = self.core, self._between
        assert core is not None
        assert between is not None
        core.place(self._owners())
        core.note(between)
        self._begin_outside()
        self._begin_engine()

    def _begin_step(self, given: TrainingBatch, part: Any) -> None:
        """Begins a training step.

        Args:
            given: the batch.
            part: its first microbatch.
        """
        self._note_begin()
        self.channels.settle()
        self._check_batch(given.batch, given.batch_idx)
        key = self._key("train", given.step_number, 0)
        self._prepare(key, given.step, part, given.optimizers, final=True, trains=True)
        self._votes.before_step(given, [])
        self._change_owners(given)

    def _end_step(self, given: TrainingBatch, report: Report, num_microbatches: int) -> None:
        self._num_microbatches_done += num_microbatches
        self._votes.after_step(given, [], report)
        self.changes.after_step(given, [], report)
        self.is_to_end = self._votes.are_for_end
        assert self.core is not None
        if self.core.result_bytes:
            self.planning.note_results(self.core.result_bytes, self.core.kinds)
            self.core.result_bytes.clear()
        self._replan(given.optimizers)
        if self._votes.are_for_requests:
            self._open_mail()
        self.num_steps_done = self.planning.decisions.step = given.step_number + 1

    @purpose("a training step")
    def training_step(self, given: TrainingBatch) -> Report:
        """Runs a whole training step: see :class:`Pipeline`."""
        given = replace(given, leaves_late=False)
        number = self.settings.num_microbatches(self.replicas.topology.stages_per_vm)
        slices = split(given.batch, number)
        self.planning.note_samples(sum(size for _, size in slices))
        self._begin_step(given, slices[0][0])
        report = self._run_microbatches(given, slices)
        self._collect_gradients(given, report)
        self._end_step(given, report, len(slices))
        return report

    def _run_microbatches(self, given: TrainingBatch, slices: Sequence[tuple[Any, int]]) -> Report:
        assert self.holdings is not None
        sizes = [size for _, size in slices]
        losses = self._reporting.losses(
            sizes, given.loss_scale, self.plan.microbatches, self.replicas.gather
        )
        losses.counts_all = True
        sums = self._sums(given.accumulation)
        arms = sums is not None and not given.accumulation.has_begun
        row = schedule_named(self.plan.schedule)(self.channels.num_stages, len(slices))
        has_begun = False

        def begin_gradients(adds: bool) -> None:
            nonlocal has_begun
            if not has_begun:
                self._begin_gradients(given, adds)
            has_begun = True

        begun: list[tuple[Structure, PostedSum]] = []

        def run(part: Any, turn: int) -> Any:
            return self._logged(given.step, part, turn)

        def root_of(found: tuple[Any, list[LoggedValue]], turn: int) -> Any:
            losses.add(*found, self.channels.device)
            if not given.wants_result:
                losses.outcomes[-1].result = None
            if losses.is_complete:
                # They travel while the backwards run.
                everything = list(losses.outcomes), given.is_last_batch
                begun.append(self._begin_gathering(everything))
            loss = losses.outcomes[turn].loss
            if loss is None or not loss.requires_grad:
                return None
            begin_gradients(losses.outcomes[turn].weight is None)
            return self._weighed(loss, losses, turn, given)

        profiler = self.planning.profiler
        is_measured = self.planning.measures and not profiler.is_over
        if len(slices) > 1:
            self._batch_metrics.begin()
        profiler.begin_step()
        self._in_step(
            "train",
            given.step_number,
            [part for part, _ in slices],
            run,
            row[self.channels.stage],
            root_of,
            sums.arm if arms and sums is not None else None,
            profiler.timers(sizes) if is_measured else {},
        )
        profiler.end_step()
        begin_gradients(True)
        if len(slices) > 1:
            self._batch_metrics.end()
        with self.section("[PipeShift] sum gradients"):
            self.holdings.sum_shared()
        return self._report(losses, given, *begun[0])

    def _begin_gradients(self, given: TrainingBatch, adds: bool) -> None:
        """Called before the first backward of a step.

        Args:
            given: its batch.
            adds: whether its gradients need no factor when the step is over. Then the backwards add
                to the gradients of earlier batches: other sums have other bits.
        """
        core, holdings = self.core, self.holdings
        assert core is not None
        assert holdings is not None
        adds = adds and given.accumulation.has_begun and self.replicas.count == 1
        stage = self.channels.stage
        with run_by(None):
            holdings.set_gradients_aside(given.keeps_gradients, adds)
            for use in holdings.shared.uses if adds else ():
                # All stages that hold it have the sum: one goes on with it.
                if core.parameter_owners.get(use.parameter, stage) != stage:
                    use.parameter.grad = None

    @purpose("a training step")
    def manual_step(self, given: TrainingBatch) -> Report:
        """Runs a training step that calls ``backward`` and the optimizers itself: with the whole
        batch, as one microbatch.
        """
        self._begin_step(replace(given, keeps_gradients=True), given.batch)
        row = forward_only(self.channels.num_stages, 1)[self.channels.stage]
        function = partial(self._logged, given.step)
        ((result, logged),) = self._in_step(
            "train", given.step_number, [given.batch], function, row
        )
        size = size_or_one(given.batch)
        logs = merge_logs([logged], [size], [float(size)])
        everything = result, logs, given.is_last_batch
        result, logs, is_last_batch = self._gathered(*self._begin_gathering(everything))
        require_same_end(given.is_last_batch, is_last_batch, given.batch_idx)
        report = Report(result, logs, [], is_last_batch, size=size, stops=given.stops())
        self._end_step(given, report, 1)
        return report

    def _weighed(self, loss: Tensor, losses: Losses, turn: int, given: TrainingBatch) -> Tensor:
        """A microbatch's part of the loss of the step."""
        first = losses.sizes[0]
        has_weight = losses.outcomes[turn].weight is not None
        if self.replicas.count == 1 and not has_weight and set(losses.sizes) == {first}:
            # As Lightning does, with the microbatches as its batches: a factor gives other bits.
            loss = loss / (len(losses.sizes) * given.num_accumulated)
            return loss if given.scale == 1.0 else loss * given.scale
        return loss * losses.factor(turn)

    def _report(
        self, losses: Losses, given: TrainingBatch, everything: Structure, posted: PostedSum
    ) -> Report:
        """The report of a step, on every stage."""
        found, is_last_batch = self._gathered(everything, posted)
        require_same_end(given.is_last_batch, is_last_batch, given.batch_idx)
        report = self._reporting.report(losses, found, [], is_last_batch)
        report.stops = given.stops()
        self.meets()
        return merge_reports(self.replicas.gather(report), self.vm)

    # --- evaluation ---

    @purpose("a step of an evaluation")
    def evaluation_step(
        self,
        batch: Any,
        batch_idx: int,
        step: UserStep,
        purpose: str,
        step_number: int,
        final: bool,
        wants_result: bool,
    ) -> Any:
        """See :class:`Pipeline`."""
        self.meets()
        self._check_batch(batch, batch_idx)
        key = self._key(purpose, step_number, 0)
        self._prepare(key, step, batch, (), final)
        row = forward_only(self.channels.num_stages, 1)[self.channels.stage]
        function = partial(self._logged, step)
        ((result, logs),) = self._in_step(purpose, step_number, [batch], function, row)
        evaluated = _Evaluated(result if wants_result else None, logs, size_or_one(batch))
        self._evaluated.append(evaluated)
        each_step = any(log.options.get("on_step") for log in logs)
        return replace(Trace.empty(), logs_each_step=each_step)

    def fetch_reports(self) -> list[Report]:
        """See :class:`Pipeline`."""
        evaluated, self._evaluated = self._evaluated, []
        logs = [merge_logs([one.logs], [one.size], [float(one.size)]) for one in evaluated]
        found = self._gathered(
            *self._begin_gathering(
                [(one.result, each) for one, each in zip(evaluated, logs, strict=True)]
            )
        )
        return [Report(result, logged, []) for result, logged in found]

    @property
    def num_pending(self) -> int:
        """See :class:`Pipeline`."""
        return len(self._evaluated)

    # --- the end ---

    def _match_holders(self) -> None:
        """Gives parameters that steps have written to, and such buffers, to all stages that hold
        them.
        """
        core, holdings, stage = self.core, self.holdings, self.channels.stage
        assert core is not None
        assert holdings is not None
        written = [use.parameter for use in holdings.uses if use.parameter in core.written]
        with run_by(None), torch.no_grad():
            for tensor in (*written, *core.shared_state()):
                owner = core.parameter_owners[tensor]
                found = self._share(to_host(tensor) if owner == stage else None, owner)
                if not tensor.is_meta:
                    tensor.copy_(found)

    def settle_values(self) -> None:
        """Makes values that user code keeps common tensors, and gives parameters that steps have
        written to, to all stages that hold them. Every stage calls this, between two steps.
        """
        core, stage = self.core, self.channels.stage
        if core is None:
            return
        self._match_holders()
        with run_by(None), torch.no_grad():
            mine = {
                node.value.account.name: node.value
                for node in kept_by_user(self.root, set(map(id, self.root.parameters())))
                if isinstance(node.value, Value)
            }
            here = {
                name: value.account.tensor
                for name, value in mine.items()
                if value.account.owner == stage
            }
            for owner in range(self.channels.num_stages):
                found = self._share(to_host(here) if owner == stage else None, owner)
                for name, tensor in found.items():
                    if name in mine:
                        common = to_device(tensor, self.channels.device)
                        torch.utils.swap_tensors(mine[name], _of_its_own(common))

    def match_replicas(self, parameters_too: bool) -> None:
        """See :class:`Pipeline`."""
        core = self.core
        if self.replicas.count > 1:
            # A layer may have put values into its buffers.
            self.settle_values()
        super().match_replicas(parameters_too)
        for number, layer in enumerate(core.layers if core is not None and self.vm else ()):
            # Every stage has the buffers that a layer replaces, and only its owner got them.
            assert core is not None
            owner = core.owners(number, 0)
            mine = {each: each.get(layer) for each in core.states[number] if each.is_buffer}
            if mine:
                found = self._share(to_host(mine) if owner == self.channels.stage else None, owner)
                for attribute, buffer in to_device(found, self.channels.device).items():
                    attribute.set(layer, buffer)

    def release_gates(self) -> None:
        """See :class:`Pipeline`."""
        super().release_gates()
        if self._placed is not None:
            self._placed.__exit__(None, None, None)
            self._placed = None
        if self._between is not None:
            self._between.release()
            self._between = None
        set_program(None, self.channels.device)

    def make_whole(self) -> None:
        """See :class:`Pipeline`."""
        self.settle_values()
        if self.core is not None:
            self.core.mailbox.close()
            self.core = None
        super().make_whole()


def _of_its_own(leaf: Any) -> Any:
    """A tensor in memory that nothing else refers to: a step may write to it at one stage."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _arithmetic() -> int:
    """A number that differs where two CPUs compute other bits: by their kernels, say."""
    x = torch.rand(64, 64, generator=torch.Generator().manual_seed(0))
    found = x @ x, x.exp(), x.sin(), x.tanh(), x.softmax(0), x.norm()
    return checksum([*found, torch.__version__, torch.get_num_threads()])


def _has_values(tree: Any) -> bool:
    return any(isinstance(leaf, Value) for leaf in leaves_of(tree))
