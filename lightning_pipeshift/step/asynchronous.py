"""One rank's part of an asynchronous pipeline whose stages all run the whole of the user's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_pipeshift.compat.torch_private import without_torch_function_of_subclasses
from lightning_pipeshift.compat.torchmetrics_private import last_value, set_last_value
from lightning_pipeshift.errors import LayerError, PlanError, some_of
from lightning_pipeshift.model.execution.transfer import to_device, to_host
from lightning_pipeshift.model.user_state.random_streams import stream_seed
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.schedule.actions import Action, Kind, Row
from lightning_pipeshift.runtime.comm.messages import ADVICE, Key, Place
from lightning_pipeshift.runtime.gradients.late_updates import LateUpdate
from lightning_pipeshift.runtime.ownership.weight_versions import WeightVersions
from lightning_pipeshift.step.asynchronous_base import AsynchronousPipeline
from lightning_pipeshift.step.base import Pipeline
from lightning_pipeshift.step.engine import Engine, Flight, SuspendableMicrobatch
from lightning_pipeshift.step.minibatches import Finished, Minibatch
from lightning_pipeshift.step.pipeline import ValuePipeline
from lightning_pipeshift.step.step_report import Report
from lightning_pipeshift.step.suspension import ThreadState
from lightning_pipeshift.step.tails import Tails
from lightning_pipeshift.step.training_batch import TrainingBatch
from lightning_pipeshift.values.gathering import Kept, Structure
from lightning_pipeshift.values.microbatch import Microbatch
from lightning_pipeshift.values.program import DIGEST_MASK
from lightning_pipeshift.values.value import running, versions_in


@dataclass
class _UnderWay:
    """A minibatch between its forward and its report.

    Args:
        given: the batch.
        minibatch: the minibatch.
        run: the number of its run in the core.
    """

    given: TrainingBatch
    minibatch: Minibatch
    run: int
    microbatch: SuspendableMicrobatch = field(init=False)
    results: Structure = field(init=False)
    """The step's result and logs, and the latest values of the metrics, as one structure."""
    awaited: list[tuple[list[int], Callable[[], Any]]] = field(default_factory=list)
    """On the last stage, which of its leaves others have, and what takes them."""


class AsynchronousEngine(Engine):
    """An :class:`Engine` whose microbatches are minibatches: the backward of one comes in the call
    of a later one on all stages but the last.
    """

    def _advance(
        self, microbatch: SuspendableMicrobatch, flight: Flight, tails: Tails | None
    ) -> None:
        super()._advance(microbatch, flight, tails)
        # The same step may have to wait in one run and not in another: both end with the error.
        if microbatch.is_done and microbatch.latest_wait is not None:
            self._require_no_gradient_to_later([microbatch], *microbatch.latest_wait)

    def _wait(self, flight: Flight) -> None:
        begun = {**flight.done, **flight.live}
        for waiting in self._in_turn(flight.live):
            if waiting.waits_for is not None:
                earlier = [one for number, one in begun.items() if number < waiting.order]
                self._require_no_gradient_to_later(earlier, *waiting.waits_for)
        super()._wait(flight)

    def _require_no_gradient_to_later(
        self, begun: Iterable[SuspendableMicrobatch], key: Key, place: Place
    ) -> None:
        """Raises LayerError if a forward waits for a later stage that may wait for a gradient of
        this one: in its backward of an earlier minibatch, which comes in a later call here.
        """
        stage = self._core.stage
        for one in begun:
            first, end, where = one.gradients_to_later or (0, 0, "")
            if first <= stage < min(end, key.source):
                raise LayerError(
                    f"`{place.label}` ({place.line}) at stage {stage} needs what stage"
                    f" {key.source} computes for the same batch, and stage {end} needs a gradient"
                    f" of stage {first}, since {where} uses there what a later stage has computed"
                    " or used before. With an asynchronous schedule each would wait for the other."
                    " Let values that need a gradient go to later stages only: use another"
                    " partition, compute what an earlier stage has to compute before later layers"
                    " are called, `detach()` it, or use schedule='1f1b'."
                )


class AsynchronousValuePipeline(ValuePipeline, AsynchronousPipeline):
    """An :class:`AsynchronousPipeline` on values.

    A stage's call for minibatch ``k`` depends on calls for ``k`` and earlier ones of other stages
    only, so any stage may wait in a call for all others to come to it, and nothing deadlocks.

    A parameter that several stages hold is trained by the first of them, which sends it to the
    others in each minibatch, in its own version; they get the trained bytes in an empty pipeline.
    """

    _engine_class = AsynchronousEngine

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._flight = Flight()
        self._under_way: dict[int, _UnderWay] = {}
        """By the minibatch's number."""
        self.leaves_tails = False
        """Whether the part of a step behind a read may run in a later call. Not where code of the
        user's runs between the calls, which has to find what each step has done."""
        self.in_call: Callable[[Any], AbstractContextManager[Any]] = nullcontext
        """Context of a part of a step in a later call, given the tag of its minibatch; ``None`` for
        steps in no call."""
        self._begins: _UnderWay | None = None
        """The minibatch whose call this is."""
        self._versions: WeightVersions | None = None
        """While minibatches run."""
        # Of the steps since the pipeline was empty. All stages add it to their program's digest at
        # the same time.
        self._digest = 0

    def _number_of(self, key: Key) -> int | None:
        return next((n for n, one in self._under_way.items() if one.run == key.step), None)

    def _connect_core(self) -> None:
        super()._connect_core()
        core, holdings = self.core, self.holdings
        assert core is not None
        assert holdings is not None
        # The core sums their gradients.
        holdings.sums_shared, holdings.shared = False, []
        self._place_shared()

    def _place_shared(self) -> None:
        """Makes the first stage that holds a trained parameter its owner."""
        core, holdings = self.core, self.holdings
        assert core is not None
        assert holdings is not None
        for use in holdings.uses:
            holders = holdings.holders_of(use.parameter)
            if len(holders) > 1 and use.parameter.requires_grad:
                core.parameter_owners[use.parameter] = holders[0]
                core.written.add(use.parameter)

    # --- moves ---

    def _require_movable(self, parts: Sequence[Plan]) -> None:
        super()._require_movable(parts)
        for part in parts:
            self._require_one_holder(part)

    def _require_one_holder(self, plan: Plan) -> None:
        """Raises PlanError if a layer moves with a tensor of which another stage may have the
        newest values: that one is not asked while minibatches are in flight.
        """
        core = self.core
        assert core is not None
        now, then = (each.placement.stages(self.vm) for each in (self.plan, plan))
        elsewhere = {*core.shared_state(), *(x for x in core.written if not x.requires_grad)}
        for layer, name in zip(core.layers, core.names, strict=True) if elsewhere else ():
            number = core.number[layer]
            for inner, tensor in (*layer.named_buffers(), *layer.named_parameters()):
                if now[number] != then[number] and tensor in elsewhere:
                    raise PlanError(
                        f"schedule={self.settings.schedule!r}: steps write to `{name}.{inner}`, or"
                        " several layers have it, and no optimizer trains it. So the layer"
                        f" `{name}` cannot change its owner while minibatches are in flight. Leave"
                        " it where it is, or use schedule='1f1b'."
                    )

    def before_minibatch(self, batch: Any, batch_idx: int, ends_update: bool) -> list[LateUpdate]:
        """See :class:`AsynchronousPipeline`."""
        if self._live.last is not None or self._live.layers:
            # This stage may wait for layers whose old owner waits for a suspended step of this one.
            self._end_steps()
        return super().before_minibatch(batch, batch_idx, ends_update)

    def _come_into_force(self, plan: Plan) -> None:
        """See :class:`AsynchronousPipeline`. Minibatches in flight have their values and gradients
        where these are: only backwards are left of them.
        """
        self._require_one_holder(plan)
        super()._come_into_force(plan)
        core, between = self.core, self._between
        assert core is not None
        assert between is not None
        core.place(self._owners())
        self._place_shared()
        core.note(between)
        self._leave_tails()
        self._begin_outside()
        self._begin_engine()

    def _note_begin(self) -> None:
        Pipeline._note_begin(self)

    def meets(self) -> None:
        """See :class:`Pipeline`. Other stages may wait for what a suspended step does."""
        self._end_steps()
        super().meets()

    def _end_steps(self) -> None:
        """Runs the rest of the steps that are suspended."""
        if self._flight.live and self._versions is None:
            with self.in_call(None):
                self._go_on(leaves_some=False)

    # --- minibatches ---

    def begin_minibatch(self, given: TrainingBatch, tag: Any = None) -> list[Finished]:
        """See :class:`AsynchronousPipeline`."""
        self._note_begin()
        if self._minibatches is None:
            # Later batches are compared by :meth:`before_minibatch`.
            self.meets()
            self._check_batch(given.batch, given.batch_idx)
        part, size, minibatches = self._prepared(given)
        core, holdings, outside = self.core, self.holdings, running()
        assert core is not None
        assert holdings is not None
        assert isinstance(outside, Microbatch)
        losses = self._reporting.losses([size], given.loss_scale, 1)
        core.note(outside)
        core.begin(0 if minibatches.are_over else self.channels.num_stages - 1)
        minibatch = self._minibatch(given, minibatches.next, part, losses, tag)
        self._begins = self._under_way[minibatches.next] = _UnderWay(
            given, minibatch, core.num_steps
        )
        if minibatches.turn_has_backward:
            self._make_place_for_gradients(minibatches.oldest or minibatch)
        self._begin_timing(minibatches.next)
        finished = minibatches.begin(minibatch)
        self._begins = None
        self._begin_outside()
        return self._end_minibatch(given, finished)

    def run(self, row: Row, ahead: Row) -> None:
        """Runs a stage's turn: see :class:`Minibatches`."""
        assert self._minibatches is not None
        self._begin_row((*row, *ahead))
        self._flight.todo.extend(row)
        self._go_on(self.leaves_tails and row[0].kind is Kind.FORWARD)

    def _go_on(self, leaves_some: bool) -> None:
        """Runs what is to be run, and the steps that have begun."""
        assert self._minibatches is not None
        flight, tails = self._flight, self._tails
        backward = next((one for one in flight.todo if one.kind is Kind.BACKWARD), None)
        arm = None if backward is None else self._sums_armed_by(backward)
        newest = self._under_way[max(self._under_way)]
        seed = stream_seed("train", newest.given.step_number)
        versions = self._versions = self._minibatches.versions
        watching = nullcontext() if tails is None else tails.watching(bool(flight.live), stays=True)
        try:
            with self._running_steps(), watching:
                self._engine.go_on(flight, seed, self._begin_step_of, arm, tails, leaves_some)
        except BaseException as error:
            # What is suspended must not go on.
            self._flight = Flight()
            self._leave_tails()
            found = versions.explained(error) if isinstance(error, RuntimeError) else None
            if found is None:
                raise
            raise found from error
        finally:
            self._versions = None

    def _leave_tails(self) -> None:
        if self._tails is not None:
            self._tails.leave()

    def _sums_armed_by(self, action: Action) -> Callable[[], object] | None:
        """Returns the function that begins to sum gradients over the virtual machines (replicas of
        the pipeline), to be called before a backward; ``None`` if there is nothing to begin.
        """
        one = self._under_way[action.microbatch]
        sums = one.minibatch.sums
        return sums.arm if sums is not None and not one.given.accumulation.has_begun else None

    @contextmanager
    def _around(self, action: Action) -> Iterator[None]:
        versions = self._versions
        if versions is None:
            with super()._around(action):
                yield
            return
        one, moves = self._under_way[action.microbatch], self.live_migration
        is_later = action.kind is Kind.FORWARD and one is not self._begins
        with (
            self.in_call(one.minibatch.tag) if is_later else nullcontext(),
            super()._around(action),
        ):
            versions.begin_action(action)
            before = self._writes_to_weights()
            try:
                yield
                if action.kind is Kind.FORWARD and (now := self._writes_to_weights()) != before:
                    changed = [name for name, writes in now.items() if writes != before[name]]
                    raise LayerError(
                        f"The step writes to {some_of(list(map(repr, changed)))}, which is trained."
                        " With an asynchronous schedule earlier minibatches in flight need its old"
                        " values, and updates of them follow. Write to it in the `step` of a"
                        ' subclass of your optimizer, or pass `schedule="1f1b"`.'
                    )
            finally:
                versions.end_action(action)
            if moves is not None and one.microbatch.is_done:
                moves.end_action(action)

    def _writes_to_weights(self) -> dict[str, int]:
        """How often each trained parameter of this stage has been written to."""
        assert self.holdings is not None
        held = [use for use in self.holdings.held if use.parameter.requires_grad]
        with without_torch_function_of_subclasses():
            writes = versions_in(use.parameter for use in held)
        return {use.name: count for use, count in zip(held, writes, strict=True)}

    def _begin_step_of(self, number: int, outside: ThreadState) -> SuspendableMicrobatch:
        """The microbatch of a minibatch."""
        one, core = self._under_way[number], self.core
        given, batch = one.given, one.minibatch.batch
        assert core is not None

        def body(microbatch: SuspendableMicrobatch) -> None:
            result, logs = self._logged(given.step, batch, 0)
            if microbatch.is_ahead():
                microbatch.stall("")
            losses = one.minibatch.losses
            losses.add(result, logs, self.channels.device)
            (outcome,) = losses.outcomes
            if not given.wants_result:
                outcome.result = None
            one.results = Structure((losses.outcomes, list(map(last_value, self._metrics))))
            self._tell_results(one)
            loss = outcome.loss
            if loss is not None and loss.requires_grad:
                microbatch.root = self._weighed(loss, losses, 0, given)
            else:
                # No backward follows, and so no gradient comes.
                microbatch.first_gradient = None

        seed, live = stream_seed("train", given.step_number), self._flight.live
        core.step_number = given.step_number
        microbatch = one.microbatch = SuspendableMicrobatch(
            core, one.run, seed, 0, body, outside, self._tails, live, number
        )
        microbatch.has_later_backward = True
        microbatch.timer = self._timers.get(number)
        microbatch.saves = self._saves(number, batch, is_first=True)
        return microbatch

    def _tell_results(self, one: _UnderWay) -> None:
        """Sends the last stage those results that others have."""
        last, leaves = self.channels.num_stages - 1, one.results.leaves
        sources = {leaf.key.source for leaf in leaves if isinstance(leaf, Kept)}
        for source in sorted(sources - {last}):
            places = [
                at
                for at, leaf in enumerate(leaves)
                if isinstance(leaf, Kept) and leaf.key.source == source
            ]
            mine = to_host([leaves[at].tensor for at in places])
            take = one.microbatch.tell_later(mine, source, last, "the results of the step")
            one.awaited.append((places, take))

    # --- the report ---

    def _own_report(self, minibatch: Minibatch) -> Report:
        one = self._under_way[minibatch.number]
        leaves = list(one.results.leaves)
        for places, take in one.awaited:
            for at, tensor in zip(places, take(), strict=True):
                leaves[at] = tensor
        outcomes, metrics = to_host(
            one.results.rebuild([x.tensor if isinstance(x, Kept) else x for x in leaves])
        )
        report = self._reporting.report(minibatch.losses, outcomes, minibatch.is_last_batch)
        digest = one.results.digest(with_numbers=False)
        return replace(report, metrics=metrics, digest=digest)

    def _report_along(self, minibatch: Minibatch) -> Report:
        report = super()._report_along(minibatch)
        results = self._under_way[minibatch.number].results
        if report.digest != results.digest(with_numbers=False):
            raise LayerError(
                "The ranks have logged, returned, or put into a metric, different values in a step."
                " With an asynchronous schedule do this on every rank (without `if"
                f" trainer.is_global_zero`). {ADVICE}"
            )
        return report

    def take_metrics(self, report: Report) -> None:
        """Gives this stage's metrics the values that a minibatch has given them."""
        values = to_device(report.metrics, self.channels.device)
        for metric, value in zip(self._metrics, values, strict=True):
            set_last_value(metric, value)

    def _finish(self, minibatch: Minibatch) -> Finished:
        found, core = super()._finish(minibatch), self.core
        assert core is not None
        one = self._under_way.pop(minibatch.number)
        # What a stage sends it does not change before the backward, when the others have got it.
        core.mailbox.finish(one.run, all_but=8 * self.channels.num_stages)
        self._digest = (self._digest * 31 + one.microbatch.digest) & DIGEST_MASK
        one.microbatch.release()
        return found

    def _end_drain(self) -> None:
        assert self.core is not None
        self._leave_tails()
        self._end_row()
        self.core.digest, self._digest = (self.core.digest * 31 + self._digest) & DIGEST_MASK, 0
        self._gathered(*self._begin_gathering(None))
