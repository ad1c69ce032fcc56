"""One rank's part of an asynchronous pipeline whose stages all run the whole of the user's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from lightning_pipeshift.compat.torch_private import without_torch_function_of_subclasses
from lightning_pipeshift.compat.torchmetrics_private import last_value, set_last_value
from lightning_pipeshift.errors import LayerError, PlanError, some_of
from lightning_pipeshift.model.execution.transfer import to_device, to_host
from lightning_pipeshift.model.parameters.gradient_box import SharedParameters
from lightning_pipeshift.model.user_state.random_streams import stream_seed
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.schedule.actions import Action, Kind, Row
from lightning_pipeshift.runtime.comm.messages import ADVICE, Key, Place
from lightning_pipeshift.runtime.step.asynchronous_pipeline import AsynchronousPipeline
from lightning_pipeshift.runtime.step.minibatches import Finished, Minibatch
from lightning_pipeshift.runtime.step.pipeline import Pipeline
from lightning_pipeshift.runtime.step.stage import Microbatch as Slice
from lightning_pipeshift.runtime.step.stage import Step
from lightning_pipeshift.runtime.step.step_report import Report
from lightning_pipeshift.runtime.step.training_batch import TrainingBatch
from lightning_pipeshift.runtime.step.weight_versions import WeightVersions
from lightning_pipeshift.step.engine import Engine, Flight, SuspendableMicrobatch
from lightning_pipeshift.step.pipeline import ValuePipeline
from lightning_pipeshift.step.suspension import ThreadState
from lightning_pipeshift.step.tails import Tails
from lightning_pipeshift.values.gathering import Kept, Structure
from lightning_pipeshift.values.microbatch import Microbatch
from lightning_pipeshift.values.program import DIGEST_MASK
from lightning_pipeshift.values.value import running, versions_in

# Under which a report has the values of metrics, and a digest of what the step has logged.
_METRICS, _DIGEST = ("", "metrics"), ("", "digest")


@dataclass
class _UnderWay:
    """A minibatch between its forward and its report.

    Args:
        given: the batch.
        step: its losses.
        run: the number of its run in the core.
        tag: what belongs to it for the caller.
    """

    given: TrainingBatch
    step: Step
    run: int
    tag: Any
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

    def _connect_core(self) -> None:
        super()._connect_core()
        core, holdings = self.core, self.holdings
        assert core is not None
        assert holdings is not None
        for use in holdings.uses:
            holders = holdings.holders_of(use.parameter)
            if len(holders) > 1 and use.parameter.requires_grad:
                core.parameter_owners[use.parameter] = holders[0]
                core.written.add(use.parameter)
        # The core sums their gradients.
        holdings.shared = SharedParameters([])

    def _request(self, plan: Plan, from_microbatch: int | None) -> None:
        raise PlanError(
            "With `core='values'` layers do not change their owners in an asynchronous schedule"
            " yet. Use `core='trace'`, or start a run with the new plan."
        )

    def _note_begin(self) -> None:
        Pipeline._note_begin(self)

    def meets(self) -> None:
        """See :class:`Pipeline`. Other stages may wait for what a suspended step does."""
        if self._flight.live and self._versions is None:
            with self.in_call(None):
                self._go_on(leaves_some=False)
        super().meets()

    @property
    def _runner(self) -> AsynchronousValuePipeline:
        return self

    # --- minibatches ---

    def begin_minibatch(self, given: TrainingBatch, tag: Any = None) -> list[Finished]:
        """See :class:`AsynchronousPipeline`."""
        self._note_begin()
        if self._minibatches is None:
            # Later batches are compared by :meth:`before_minibatch`.
            self.meets()
            self._check_batch(given.batch, given.batch_idx)
        part, size, key, minibatches = self._prepared(given)
        core, holdings, outside = self.core, self.holdings, running()
        assert core is not None
        assert holdings is not None
        assert isinstance(outside, Microbatch)
        losses = self._reporting.losses([size], given.loss_scale, 1, self.replicas.gather)
        losses.counts_all = True
        core.note(outside)
        core.begin(0 if minibatches.are_over else self.channels.num_stages - 1)
        minibatch = self._minibatch(
            given,
            Step(
                function=given.step,
                microbatches=[Slice(part, size, None, range(0), key)],
                shared=holdings.shared,
                losses=losses,
                first=minibatches.next,
            ),
            tag,
        )
        self._begins = self._under_way[minibatches.next] = _UnderWay(
            given, minibatch.step, core.num_steps, tag
        )
        if minibatches.turn_has_backward:
            self._make_place_for_gradients(minibatches.oldest or minibatch)
        finished = minibatches.begin(minibatch)
        self._begins = None
        self._begin_outside()
        self._num_microbatches_done += 1
        self.num_steps_done = self.planning.decisions.step = given.step_number + 1
        return [] if finished is None else [self._finish(finished)]

    def run(self, row: Row, step: Step, ahead: Row = ()) -> None:
        """Runs a stage's turn: see :class:`Minibatches`."""
        assert self._minibatches is not None
        todo = [one for one in row if one.kind in (Kind.FORWARD, Kind.BACKWARD)]
        self._flight.todo.extend(todo)
        self._go_on(self.leaves_tails and todo[0].kind is Kind.FORWARD)

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
        accumulation = self._under_way[action.microbatch].given.accumulation
        sums = self._sums(accumulation)
        return sums.arm if sums is not None and not accumulation.has_begun else None

    @contextmanager
    def _around(self, action: Action) -> Iterator[None]:
        versions = self._versions
        if versions is None:
            with super()._around(action):
                yield
            return
        one = self._under_way[action.microbatch]
        is_later = action.kind is Kind.FORWARD and one is not self._begins
        with self.in_call(one.tag) if is_later else nullcontext(), super()._around(action):
            versions.begin_action(0, action)
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
        given, (part,) = one.given, one.step.microbatches
        assert core is not None

        def body(microbatch: SuspendableMicrobatch) -> None:
            result, logs = self._logged(given.step, part.batch, 0)
            if microbatch.is_ahead():
                microbatch.stall("")
            losses = one.step.losses
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
        microbatch = one.microbatch = SuspendableMicrobatch(
            core, one.run, seed, 0, body, outside, self._tails, live, number
        )
        microbatch.has_later_backward = True
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
        one = self._under_way[minibatch.step.first]
        leaves = list(one.results.leaves)
        for places, take in one.awaited:
            for at, tensor in zip(places, take(), strict=True):
                leaves[at] = tensor
        outcomes, metrics = to_host(
            one.results.rebuild([x.tensor if isinstance(x, Kept) else x for x in leaves])
        )
        more = {_METRICS: metrics, _DIGEST: one.results.digest(with_numbers=False)}
        return self._reporting.report(
            minibatch.step.losses, outcomes, [more], minibatch.is_last_batch
        )

    def _report_along(self, minibatch: Minibatch) -> Report:
        report = super()._report_along(minibatch)
        results = self._under_way[minibatch.step.first].results
        if report.changes[0][_DIGEST] != results.digest(with_numbers=False):
            raise LayerError(
                "The ranks have logged, returned, or put into a metric, different values in a step."
                " With an asynchronous schedule do this on every rank (without `if"
                f" trainer.is_global_zero`). {ADVICE}"
            )
        return report

    def take_metrics(self, report: Report) -> None:
        """Gives this stage's metrics the values that a minibatch has given them."""
        values = to_device(report.changes[0][_METRICS], self.channels.device)
        for metric, value in zip(self._metrics, values, strict=True):
            set_last_value(metric, value)

    def _finish(self, minibatch: Minibatch) -> Finished:
        found, core = super()._finish(minibatch), self.core
        assert core is not None
        one = self._under_way.pop(minibatch.step.first)
        # What a stage sends it does not change before the backward, when the others have got it.
        core.mailbox.finish(one.run, all_but=8 * self.channels.num_stages)
        self._digest = (self._digest * 31 + one.microbatch.digest) & DIGEST_MASK
        one.microbatch.release()
        return found

    def _end_drain(self) -> None:
        assert self.core is not None
        self._leave_tails()
        self.core.digest, self._digest = (self.core.digest * 31 + self._digest) & DIGEST_MASK, 0
        self._gathered(*self._begin_gathering(None))
