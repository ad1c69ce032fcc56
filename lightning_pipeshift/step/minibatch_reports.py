"""The report of each minibatch of an asynchronous pipeline, on its way to all stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_pipeshift.compat.torchmetrics_private import last_value, set_last_value
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.tensors.transfer import to_device, to_host
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.messages import ADVICE
from lightning_pipeshift.runtime.comm.replicas import Replicas
from lightning_pipeshift.step.gathering import Gathering
from lightning_pipeshift.step.minibatches import Minibatch
from lightning_pipeshift.step.reporting import Reporting
from lightning_pipeshift.step.step_report import Report, merge_reports
from lightning_pipeshift.step.suspendable import SuspendableMicrobatch
from lightning_pipeshift.step.training_batch import WAIT, TrainingBatch
from lightning_pipeshift.timeline.recording import REPORT, What
from lightning_pipeshift.values.gathering import Kept, Structure


@dataclass
class UnderWay:
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


class MinibatchReports:
    """Makes the reports of minibatches on the last stage, and passes them on.

    Args:
        replicas: the virtual machines.
        channels: this stage's connections.
        reporting: makes a report.
        section: makes a context for the recorder: see :meth:`ActionNotes.section`.
        asks_to_end: whether a stage of this virtual machine asks for the end, on the last one.
    """

    def __init__(
        self,
        replicas: Replicas,
        channels: Channels,
        reporting: Reporting,
        section: Callable[[str, str, str], Any],
        asks_to_end: Callable[[], bool],
    ) -> None:
        self._replicas = replicas
        self._channels = channels
        self._reporting = reporting
        self._section = section
        self._asks_to_end = asks_to_end
        self.ends = False
        """Whether a report has asked for the end of the run."""

    def send_results(self, one: UnderWay, gathering: Gathering) -> None:
        """Sends the last stage those results of a step that other stages have. Every stage calls
        this, at the end of the step.

        Args:
            one: the minibatch.
            gathering: knows the metrics.
        """
        outcomes = one.minibatch.losses.outcomes
        one.results = Structure((outcomes, list(map(last_value, gathering.metrics))))
        last, leaves = self._channels.num_stages - 1, one.results.leaves
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

    def report(self, one: UnderWay) -> Report:
        """The last stage's report of a minibatch, which goes from stage to stage as its gradient
        does. Every stage calls this behind the backward.

        Raises:
            LayerError: the ranks have logged or returned different things.
        """
        channels, stage = self._channels, self._channels.stage
        digest = one.results.digest(with_numbers=False)
        if stage == channels.num_stages - 1:
            mine = self._own(one)
            mine.digest = digest
            mine.asks_to_end = self._asks_to_end()
            mine.stops = one.minibatch.stops()
            report = merge_reports(self._replicas.exchange(mine), self._replicas.vm)
        else:
            with self._section(WAIT, What.WAIT, REPORT):
                report = channels.receive_object(stage + 1)
        self.ends |= report.asks_to_end
        if stage:
            channels.send_object(report, stage - 1)
            # The earlier stage takes them in this order, each after a backward.
            channels.settle(all_but=2 * channels.num_stages)
        if report.digest != digest:
            raise LayerError(
                "The ranks have logged, returned, or put into a metric, different values in a step."
                " With an asynchronous schedule do this on every rank (without `if"
                f" trainer.is_global_zero`). {ADVICE}"
            )
        return report

    def _own(self, one: UnderWay) -> Report:
        leaves = list(one.results.leaves)
        for places, take in one.awaited:
            for at, tensor in zip(places, take(), strict=True):
                leaves[at] = tensor
        outcomes, metrics = to_host(
            one.results.rebuild([x.tensor if isinstance(x, Kept) else x for x in leaves])
        )
        minibatch = one.minibatch
        report = self._reporting.report(minibatch.losses, outcomes, minibatch.is_last_batch)
        return replace(report, metrics=metrics)

    def take_metrics(self, report: Report, gathering: Gathering) -> None:
        """Gives this stage's metrics the values that a minibatch has given them.

        Args:
            report: of the minibatch.
            gathering: knows the metrics.
        """
        values = to_device(report.metrics, self._channels.device)
        for metric, value in zip(gathering.metrics, values, strict=True):
            set_last_value(metric, value)
