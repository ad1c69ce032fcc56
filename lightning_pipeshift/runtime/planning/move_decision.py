"""Decides whether the plan should change, from measurements: layers change their owners, or a
memory plan that is slower than recomputing all layers is replaced by that.

Memory plans are chosen by predictions, and these do not know all that moving tensors costs on a
device: host time between kernels, links that others use, memory that is allocated again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from lightning_pipeshift.errors import BudgetError, PlanError
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.policies import Planned
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.plan.search.measurements import Measured
from lightning_pipeshift.plan.search.policy_choices import follows
from lightning_pipeshift.runtime.comm.link_meter import LinkChange
from lightning_pipeshift.runtime.planning.delivered import Estimate
from lightning_pipeshift.runtime.planning.first_plan import FirstOrder, ranks_text
from lightning_pipeshift.runtime.planning.make_plan import Settings, best_topology, make_plan
from lightning_pipeshift.runtime.planning.waits import waits_of, waits_text
from lightning_pipeshift.text import seconds_text
from lightning_pipeshift.timeline.outcomes import KEPT, UNDONE, Change

MIN_GAIN: Final = 0.05
"""The fraction by which a step has to get shorter for layers to change their owners."""

FEW_STEPS: Final = 3
"""After so many measured steps a memory plan is compared with recomputing all layers, and that with
the plan before.
"""

_LEAST_PART: Final = 0.25
"""The part of the expected saving that has to be measured for a change to be kept."""

_MOST_WINDOWS: Final = 4
"""A change is judged after so many windows at the latest, however much steps differ."""

_DOUBT: Final = 3.0
"""By so many standard errors the measurements of a rank may be wrong."""

_OTHER_SPEED: Final = 1.5
"""A device that is so many times as fast or slow is another one for a change that failed."""

_NOTICEABLE: Final = 1.1
"""Speeds that differ by less count as equal when orders of the ranks are searched for."""


@dataclass(frozen=True)
class Decision:
    """A decision of the first rank, for all ranks.

    Args:
        plan: as a document.
        is_new: whether it differs from the plan in force.
        message: a message to the user; empty for none.
        change: what the new plan changes and is expected to gain.
        judged: the last change, if enough steps have been measured since to judge it.
        goes_on: whether more steps of this plan have to be measured.
        is_soon: whether the next decision is to be made after :data:`FEW_STEPS`.
        working_bytes: what each layer takes for a moment, by all ranks' measurements.
    """

    plan: str
    is_new: bool
    message: str
    change: Change | None = None
    judged: Change | None = None
    goes_on: bool = False
    is_soon: bool = False
    working_bytes: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Window:
    """The measurements of some consecutive steps.

    Args:
        num_steps: the number of steps in the window.
        took: seconds of a step, the mean over these and perhaps earlier steps under the same plan.
        measured: the measurements of devices, links and layers.
        errors: the relative standard error of each rank's times; empty if they are exact.
        steps_left: over how many steps a change can pay off.
        links: those that carry other than they did.
        without_moves: the measurements without what moving tensors adds to them; ``None`` if no
            memory plan is compared with recomputing.
        is_early: whether these are the :data:`FEW_STEPS` that say no more than that.
    """

    num_steps: int
    took: Estimate
    measured: Measured
    errors: Sequence[float] = ()
    steps_left: float = math.inf
    links: Sequence[LinkChange] = ()
    without_moves: Measured | None = None
    is_early: bool = False


@dataclass(frozen=True)
class _Pending:
    """A change that is to be judged by the steps under its plan.

    Args:
        change: what it expects.
        old: the plan before.
        new: the plan that it puts in force.
        cluster: the devices' speeds, and the links, by which it was decided.
        error: the standard error of the seconds before.
        is_needed: whether the old plan is no choice, as it does not fit.
        undoes: the change that it undoes.
        recomputes: whether it replaces a memory plan by recomputing all layers.
    """

    change: Change
    old: Plan
    new: Plan
    cluster: Cluster
    error: float
    is_needed: bool = False
    undoes: Change | None = None
    recomputes: bool = False

    def judged(self, window: Window) -> Change | None:
        """The change with its verdict; ``None`` if more steps have to be measured."""
        change, took = self.change, window.took
        saving = change.before_seconds - change.expected_seconds
        limit = change.before_seconds - _LEAST_PART * saving
        is_clear = abs(took.mean - limit) > math.hypot(took.error, self.error)
        judged = replace(change, after_seconds=took.mean, verdict=KEPT)
        if self.is_needed:
            return replace(judged, reason="the plan before does not fit or follow the policy")
        if self.undoes is not None or (took.mean < limit and is_clear):
            return judged
        if not is_clear and took.num_steps < _MOST_WINDOWS * window.num_steps:
            return None
        return judged if took.mean < limit else replace(judged, verdict=UNDONE)


class Decider:
    """Decides on the first rank whether the plan changes, and whether a change is undone: a pure
    function of the plans and windows so far.

    Args:
        settings: the user's settings.
        topology: the virtual machines, for plans without ranks of their own.
    """

    def __init__(self, settings: Settings, topology: Topology) -> None:
        self._settings = settings
        self._topology = topology
        self._pending: _Pending | None = None
        self.first: FirstOrder | None = None
        """``None`` if the run begins with the ranks in their own order, or if the order has been
        judged.
        """
        # Changes that were undone: in the same circumstances no plan is tried for its speed.
        self._failed: list[_Pending] = []
        # By virtual machine and layer, the ranks from which decisions have moved it away.
        self._left: dict[tuple[int, int], set[int]] = {}
        # How many decisions reversed an earlier one or were undone, and how often in a row another
        # plan was better: layers must not move back and forth with a device whose speed varies.
        self._num_reversals = 0
        self._insistence = 0
        # The best order of the ranks, and what it was found for.
        self._searched: tuple[Hashable, Topology] | None = None
        # Whether the user's policy has been called with the measurements.
        self._has_asked = False
        # Whether no plan is looked for any more.
        self._is_over = False
        memory = settings.memory
        self.judges_memory = (
            memory is not None
            and isinstance(memory.policy, Planned)
            and settings.plan is None
            and settings.recompute == "auto"
            and not settings.only_measures
        )
        """Whether a memory plan may be replaced by recomputing all layers: not what a user has
        chosen, and once in a run.
        """

    def decide(self, plan: Plan, window: Window) -> Decision:
        """Judges the last change, and decides whether to change to a better plan.

        Args:
            plan: the plan in force.
            window: the measurements made under it.
        """
        ranks = plan.ranks or self._topology.ranks
        kept = replace(plan, ranks=ranks, prediction=window.measured.prediction(plan))
        stays = Decision(kept.to_json(), False, "")
        pending, self._pending = self._pending, None
        # If another plan is in force, the change was refused, or layers have moved on request.
        if pending is not None and kept.is_like(pending.new):
            judged = pending.judged(window)
            if judged is None:
                self._pending = pending
                return replace(stays, goes_on=True, is_soon=pending.recomputes)
            stays = replace(stays, judged=judged)
            self.judges_memory &= not pending.recomputes
            self._is_over |= self._settings.watch is None and not pending.recomputes
            if pending.recomputes and pending.undoes is None and judged.verdict == KEPT:
                self._settings = replace(self._settings, recompute="full")
            if judged.verdict == UNDONE:
                return self._undo(pending, stays, window)
            undone = pending.undoes
            least = window.took.mean - window.took.error
            if undone is not None and least > (1 + MIN_GAIN) * (undone.after_seconds or math.inf):
                # Without it steps are clearly slower: it was not the change that made them slow.
                failed, new = self._failed, pending.old
                self._failed = [each for each in failed if not each.new.is_like(new)]
        if window.is_early or self._is_over:
            return self._recomputing(kept, stays, window)
        try:
            best = self._best(kept, window)
        except (PlanError, BudgetError) as error:
            # The run continues with its plan: that has fitted so far.
            return replace(stays, message=f"the plan stays: {error}")
        stays = replace(stays, judged=stays.judged or self._first_judged(kept, best, window))
        self._insistence = self._insistence + 1 if best is not None else 0
        if best is None:
            return self._recomputing(kept, stays, window)
        new, is_needed = best
        moves = list(changes(kept, new))
        takes_back = any(to in self._left.get((vm, layer), ()) for vm, layer, _, to in moves)
        # Each reversal of an earlier decision, and each failure, doubles the patience.
        if self._insistence < 2 ** (self._num_reversals + takes_back):
            return stays
        self._num_reversals += takes_back
        for vm, layer, before, _ in moves:
            self._left.setdefault((vm, layer), set()).add(before)
        assert kept.prediction is not None
        assert new.prediction is not None
        took, part = window.took.mean, new.prediction.step_seconds / kept.prediction.step_seconds
        change = Change(_what(kept, new), took, took * part)
        cluster, doubt = window.measured.cluster, window.took.error
        pending = _Pending(change, kept, new, cluster, doubt, is_needed)
        return self._change(pending, stays, window)

    def _first_judged(
        self, kept: Plan, best: tuple[Plan, bool] | None, window: Window
    ) -> Change | None:
        """The first order with its verdict, by what its steps say of the ranks' own order."""
        first, self.first = self.first, None
        if first is None or not kept.is_like(first.plan):
            return None
        seconds = window.measured.prediction(first.own).step_seconds
        return replace(
            first.change,
            after_seconds=window.took.mean,
            verdict=KEPT if best is None or best[0].ranks == kept.ranks else UNDONE,
            reason=f"by what these steps measured, the other order takes {seconds_text(seconds)}",
        )

    def _change(self, pending: _Pending, stays: Decision, window: Window) -> Decision:
        self._pending, self.first, self._insistence = pending, None, 0
        message = f"{window.num_steps} steps have been measured. {pending.change}."
        message += "".join(f" {link}." for link in window.links)
        waited = waits_text(waits_of(pending.old, window.measured))
        message += f" Before the change: {waited[0].lower()}{waited[1:]}" if waited else ""
        new = replace(pending.new, step_samples=pending.old.step_samples).to_json()
        return replace(stays, plan=new, is_new=True, message=message, change=pending.change)

    def _undo(self, failed: _Pending, stays: Decision, window: Window) -> Decision:
        if not failed.recomputes:
            self._failed.append(failed)
            self._num_reversals += 1
        measured, old = window.measured, failed.old
        back = Change(_what(failed.new, old), window.took.mean, failed.change.before_seconds)
        old = replace(old, prediction=measured.prediction(old))
        undo = replace(failed, change=back, old=failed.new, new=old, error=0.0, undoes=stays.judged)
        return self._change(undo, stays, window)

    def _recomputing(self, plan: Plan, stays: Decision, window: Window) -> Decision:
        """Replaces a memory plan that takes longer than recomputing all layers is expected to."""
        measured, stays = window.without_moves, replace(stays, goes_on=window.is_early)
        moves = any(map(any, (plan.swaps, plan.optimizer_on_host, plan.weights_on_host)))
        if measured is None or not self.judges_memory or not moves:
            return stays
        settings = replace(
            self._settings.let_free(plan),
            partition=[list(counts) for counts in plan.placement.counts],
            recompute="full",
        )
        profile, cluster, ranks = measured.profile, measured.cluster, Topology(plan.ranks)
        try:
            new = make_plan(settings, profile, cluster, ranks, plan)
        except (PlanError, BudgetError):
            return stays  # there is no room for it
        took, then = window.took.mean, new.prediction
        if then is None or new.is_like(plan) or took <= (1 + MIN_GAIN) * then.step_seconds:
            return stays
        change = Change(_what(plan, new), took, then.step_seconds)
        found = _Pending(change, plan, new, cluster, window.took.error, recomputes=True)
        return replace(self._change(found, stays, window), is_soon=True)

    def _best(self, plan: Plan, window: Window) -> tuple[Plan, bool] | None:
        """Returns a better plan, and whether the present one is no choice; ``None`` if there is
        none. Where another order of the ranks is not worth the moves, the present one may have a
        better plan.
        """
        now = Topology(plan.ranks)
        # What ranks lend to each other, and minibatches in flight, know them by their stages.
        if self._settings.may_reorder and self._settings.memory is None:
            order = self._best_order(self._settings.let_free(plan), window.measured, now)
            if order != now and (best := self._better(plan, window, order)) is not None:
                return best
        return self._better(plan, window, now)

    def _best_order(self, settings: Settings, measured: Measured, now: Topology) -> Topology:
        """The best order of the ranks. It is searched for again when devices or links have become
        noticeably faster or slower: a search may take a second of the first rank's time.
        """
        cluster = measured.cluster
        speeds = tuple(round(math.log(device.speed, _NOTICEABLE)) for device in cluster.devices)
        key = speeds, tuple(sorted(cluster.ranks.items()))
        if self._searched is None or self._searched[0] != key:
            found = now
            with suppress(PlanError, BudgetError):  # none that fits: then the present one decides
                found = best_topology(settings, measured.profile, cluster, now)
            self._searched = key, found
        return self._searched[1]

    def _better(self, plan: Plan, window: Window, topology: Topology) -> tuple[Plan, bool] | None:
        """As :meth:`_best`, for an order of the ranks."""
        settings, measured = self._settings, window.measured
        watch = settings.watch
        if watch is not None:
            settings = settings.let_free(plan)
        start = plan if topology.ranks == plan.ranks else None
        best = make_plan(settings, measured.profile, measured.cluster, topology, start)
        now, then = plan.prediction, best.prediction
        if best.is_like(plan):
            return None
        if now is None or then is None:
            return None
        if not measured.fits(plan, now.memory_bytes):
            return best, True
        if not self._has_asked and not follows_policy(settings, measured, plan):
            # Only once: the policy's answer may depend on measured figures, which fluctuate.
            self._has_asked = True
            return best, True
        self._failed = [each for each in self._failed if _alike(each.cluster, measured.cluster)]
        if self._failed:
            # By these measurements another plan was faster, and by its steps it was not.
            return None
        # Over the remaining steps of the run, the cost of the move included.
        left = window.steps_left
        cost = measured.move_seconds(plan, best) / left if left else math.inf
        promised = now.step_seconds / (then.step_seconds + cost) - 1
        is_worth_it = promised >= (watch.min_gain if watch is not None else MIN_GAIN)
        return (best, False) if is_worth_it and _surely(plan, best, window) else None


def follows_policy(settings: Settings, measured: Measured, plan: Plan) -> bool:
    """Whether all saved tensors go where a user's policy wants them. More of them may be known than
    when the plan was made: those saved by code between the layers."""
    if settings.memory is None:
        return True
    policy, recompute = settings.memory.policy, settings.recompute
    problems = replace(measured, ranks=measured.ranks_of(plan)).problems(
        plan.schedule, plan.microbatches, policy, recompute
    )
    return all(
        follows(problem, plan.cut(vm), plan.swapped(vm)) for vm, problem in enumerate(problems)
    )


def _alike(before: Cluster, now: Cluster) -> bool:
    """Whether nothing has changed so much that a change that failed may be tried again."""
    ratios = [
        one.speed / other.speed for one, other in zip(before.devices, now.devices, strict=True)
    ]
    is_same = all(1 / _OTHER_SPEED < ratio < _OTHER_SPEED for ratio in ratios)
    return is_same and before.ranks == now.ranks


def _surely(old: Plan, new: Plan, window: Window) -> bool:
    """Whether a plan is better even if the ranks that get layers are slower than measured, and
    those that give some away are faster, by as much as their measurements leave open.
    """
    if not any(window.errors):
        return True
    more: Counter[int] = Counter()
    for _, _, before, after in changes(old, new):
        more[before] -= 1
        more[after] += 1
    devices = []
    for rank, device in enumerate(window.measured.cluster.devices):
        doubt = 1 + _DOUBT * window.errors[rank]
        speed = device.speed / doubt if more[rank] > 0 else device.speed * doubt
        devices.append(replace(device, speed=speed))
    cluster = replace(window.measured.cluster, devices=tuple(devices))
    measured = replace(window.measured, cluster=cluster)
    return measured.prediction(new).step_seconds < measured.prediction(old).step_seconds


def _what(old: Plan, new: Plan) -> str:
    if old.placement == new.placement and old.ranks == new.ranks:
        is_full = all(len(again) == len(new.layers) for again in new.recompute or [()])
        return "all layers are recomputed" if is_full else "other tensors move or are made again"
    before, after = _counts(old), _counts(new)
    if old.ranks != new.ranks:
        before += f" on the ranks {ranks_text(old.ranks)}"
        after += f" on the ranks {ranks_text(new.ranks)}"
    return f"layers move, {before} becomes {after}"


def changes(old: Plan, new: Plan) -> Iterator[tuple[int, int, int, int]]:
    """Virtual machine, layer, old and new rank of each layer that changes its owner."""
    for vm, (ranks, others) in enumerate(zip(old.ranks, new.ranks, strict=True)):
        for layer in range(len(old.layers)):
            before = ranks[old.placement.stage_of(vm, layer)]
            after = others[new.placement.stage_of(vm, layer)]
            if before != after:
                yield vm, layer, before, after


def _counts(plan: Plan) -> str:
    text = ranks_text(list(dict.fromkeys(plan.placement.counts)))
    return text + (" (with recomputation)" if any(plan.recompute) else "")
