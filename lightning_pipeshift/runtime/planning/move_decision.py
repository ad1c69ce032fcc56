"""Decides whether layers should change their owners, from measurements."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from lightning_pipeshift.errors import BudgetError, PlanError
from lightning_pipeshift.plan.arrange.measurements import Measured
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.plan.offload.policy_choices import follows
from lightning_pipeshift.runtime.comm.link_meter import LinkChange
from lightning_pipeshift.runtime.planning.make_plan import Settings, best_topology, make_plan
from lightning_pipeshift.runtime.planning.memory_trial import Verdict
from lightning_pipeshift.runtime.planning.waits import waits_of, waits_text

MIN_GAIN: Final = 0.05
"""The fraction by which a step has to get shorter for layers to change their owners."""

_NOTICEABLE: Final = 1.1
"""Speeds that differ by less count as equal when orders of the ranks are searched for."""


@dataclass(frozen=True)
class Decision:
    """A decision of the first rank, for all ranks.

    Args:
        plan: as a document.
        is_new: whether it differs from the plan in force.
        message: a message to the user; empty for none.
        expected_gain: the expected speedup of a step.
        took: seconds of a step at the time of the decision.
        working_bytes: what each layer takes for a moment, by all ranks' measurements.
        verdict: that on a memory plan, if it is one.
    """

    plan: str
    is_new: bool
    message: str
    expected_gain: float = 1.0
    took: float | None = None
    working_bytes: Mapping[int, int] = field(default_factory=dict)
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Window:
    """The measurements of some consecutive steps.

    Args:
        num_steps: the number of steps.
        took: seconds of the median step.
        middle: the medians of all measurements.
        extremes: their low quantiles, and their high ones. A short disturbance is not in both.
        steps_left: over how many steps a change can pay off.
        links: those that carry other than they did.
    """

    num_steps: int
    took: float
    middle: Measured
    extremes: Sequence[Measured]
    steps_left: float
    links: Sequence[LinkChange] = ()


class Decider:
    """Decides on the first rank whether the plan changes.

    Args:
        settings: the user's settings.
        topology: the virtual machines, for plans without ranks of their own.
    """

    def __init__(self, settings: Settings, topology: Topology) -> None:
        self._settings = settings
        self._topology = topology
        # By virtual machine and layer, the ranks from which decisions have moved it away.
        self._left: dict[tuple[int, int], set[int]] = {}
        # How many decisions reversed an earlier one, and how often in a row another plan was
        # better: layers must not move back and forth with a device whose speed varies.
        self._num_reversals = 0
        self._insistence = 0
        # The best order of the ranks, and what it was found for.
        self._searched: tuple[Hashable, Topology] | None = None
        # Whether the user's policy has been called with the measurements.
        self._has_asked = False

    def recompute_everything(self) -> None:
        """Plans with recomputation of all layers from now on, as that has been faster."""
        self._settings = replace(self._settings, recompute="full")

    def decide(self, plan: Plan, window: Window) -> Decision:
        """Decides whether to change to a better plan.

        Args:
            plan: the plan in force.
            window: the measurements made under it.
        """
        ranks = plan.ranks or self._topology.ranks
        kept = replace(plan, ranks=ranks, prediction=window.middle.prediction(plan))
        stays = Decision(kept.to_json(), False, "")
        try:
            best = self._best(kept, window)
        except (PlanError, BudgetError) as error:
            # The run continues with its plan: that has fitted so far.
            return replace(stays, message=f"the plan stays: {error}")
        self._insistence = self._insistence + 1 if best is not None else 0
        if best is None:
            return stays
        takes_back = any(
            new in self._left.get((vm, layer), ()) for vm, layer, _, new in changes(kept, best)
        )
        # Each reversal of an earlier decision doubles the patience.
        if self._insistence < 2 ** (self._num_reversals + takes_back):
            return stays
        self._insistence = 0
        self._num_reversals += takes_back
        for vm, layer, before, _ in changes(kept, best):
            self._left.setdefault((vm, layer), set()).add(before)
        return _changed(kept, best, window)

    def _best(self, plan: Plan, window: Window) -> Plan | None:
        """Returns a better plan, or ``None``. Where another order of the ranks is not worth the
        moves, the present one may have a better plan.
        """
        plans = (self._better(plan, window, topology) for topology in self._orders(plan, window))
        return next((best for best in plans if best is not None), None)

    def _orders(self, plan: Plan, window: Window) -> Iterator[Topology]:
        """The orders of the ranks to plan for, the most promising first."""
        now, measured = Topology(plan.ranks), window.middle
        # What ranks lend to each other, and minibatches in flight, know them by their stages.
        if self._settings.may_reorder and self._settings.memory is None:
            best = self._best_order(self._settings.let_free(plan), measured, now)
            if best != now:
                yield best
        yield now

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

    def _better(self, plan: Plan, window: Window, topology: Topology) -> Plan | None:
        """Returns a better plan for an order of the ranks, or ``None``."""
        settings, measured = self._settings, window.middle
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
            return best
        if not self._has_asked and not follows_policy(settings, measured, plan):
            # Only once: the policy's answer may depend on measured figures, which fluctuate.
            self._has_asked = True
            return best
        # Over the remaining steps of the run, the cost of the move included.
        left = window.steps_left
        cost = measured.move_seconds(plan, best) / left if left else math.inf
        promised = now.step_seconds / (then.step_seconds + cost) - 1
        is_worth_it = promised >= (watch.min_gain if watch is not None else MIN_GAIN)
        return best if is_worth_it and _always(plan, best, window) else None


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


def _always(old: Plan, new: Plan, window: Window) -> bool:
    """Whether a plan was better by the low quantiles and by the high ones."""
    return all(
        measured.prediction(new).step_seconds < measured.prediction(old).step_seconds
        for measured in window.extremes
    )


def _changed(old: Plan, new: Plan, window: Window) -> Decision:
    assert old.prediction is not None
    assert new.prediction is not None
    moved = [one for plan in (old, new) for one in (*plan.swaps, *plan.optimizer_on_host)]
    moved += [one for plan in (old, new) for one in plan.weights_on_host]
    if old.placement == new.placement and any(moved):
        message = (
            f"{window.num_steps} steps have been measured, and other tensors move or are made again"
            f" than before: {new.prediction.step_seconds:.3g} s a step are expected."
        )
        return Decision(new.to_json(), True, message)
    now, then = old.prediction.step_seconds, new.prediction.step_seconds
    before, after = _counts(old), _counts(new)
    if old.ranks != new.ranks:
        before += f" on the ranks {ranks_text(old.ranks)}"
        after += f" on the ranks {ranks_text(new.ranks)}"
    message = (
        f"{window.num_steps} steps have been measured, and the layers change their"
        f" owners: {before} becomes {after}. A step took {window.took:.3g} s"
        f" ({now:.3g} s by the simulator); {then:.3g} s are expected,"
        f" {now / then:.2f} times as fast."
    )
    message += "".join(f" {link}." for link in window.links)
    waited = waits_text(waits_of(old, window.middle))
    message += f" Before the change: {waited[0].lower()}{waited[1:]}" if waited else ""
    return Decision(new.to_json(), True, message, now / then, window.took)


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


def ranks_text(rows: Sequence[Sequence[int]]) -> str:
    """The ranks, or numbers of layers, of each virtual machine; without a list around a single
    one.
    """
    shown = [list(row) for row in rows]
    return str(shown[0]) if len(shown) == 1 else str(shown)
