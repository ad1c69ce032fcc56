"""Makes the last stage's report of a training step, and gives it to every stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from lightning_pipeshift.model.tensors.microbatch import merge, weighted_mean
from lightning_pipeshift.model.user_state.logs import merge_logs
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.replicas import Replicas
from lightning_pipeshift.step.losses import Denominators, Losses, MicrobatchOutcome
from lightning_pipeshift.step.step_report import Report


class Reporting:
    """The reports of training steps on one rank.

    Args:
        replicas: the virtual machines.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._denominators: Denominators | None = None
        self._has_agreed = False

    def losses(
        self,
        sizes: Sequence[int],
        loss_scale: float | Tensor,
        num_microbatches: int,
    ) -> Losses:
        """The losses of a step, before any is known.

        Args:
            sizes: the number of samples of each microbatch.
            loss_scale: a factor of every loss.
            num_microbatches: of a step under the plan.
        """
        several = self._replicas.count > 1
        if several and self._denominators is None:
            everything = sum(self._replicas.gather(sum(sizes)))
            self._denominators = Denominators(*[_power_of_two(everything)] * 2)
        return Losses(
            sizes=sizes,
            loss_scale=loss_scale,
            denominators=self._denominators,
            agree=(
                partial(self._agree, num_microbatches) if several and not self._has_agreed else None
            ),
        )

    def pass_on(self, channels: Channels) -> None:
        """Gives every stage what the last one has agreed on with other virtual machines, before
        another rank becomes the last stage. Every stage calls this.

        Args:
            channels: connect the stages.
        """
        mine = self._denominators, self._has_agreed
        found = channels.share_object(mine, channels.num_stages - 1)
        self._denominators, self._has_agreed = found

    def _agree(self, num_microbatches: int, outcome: MicrobatchOutcome) -> Denominators:
        """Agrees with the other virtual machines on denominators: once in a run."""
        assert self._denominators is not None
        weight = None if outcome.weight is None else float(outcome.weight)
        weights = [w for w in self._replicas.gather(weight) if w]
        if weights:
            mean = sum(weights) / len(weights)
            weight = _power_of_two(mean * num_microbatches * self._replicas.count)
            self._denominators = self._denominators._replace(weights=weight)
        self._has_agreed = True
        return self._denominators

    def report(
        self,
        losses: Losses,
        outcomes: Sequence[MicrobatchOutcome],
        is_last_batch: bool,
    ) -> Report:
        """The report of a step of this virtual machine.

        Args:
            losses: those of the step.
            outcomes: of all microbatches, in host memory.
            is_last_batch: whether this stage's data ends with the batch.
        """
        self._has_agreed = True
        weights, sizes = losses.weights(outcomes), list(losses.sizes)
        found = [(o.loss, w) for o, w in zip(outcomes, weights, strict=True) if o.loss is not None]
        loss = None
        if found and sum(weights):
            loss = weighted_mean([x for x, _ in found], [w for _, w in found])
        # A microbatch that is left out may return nothing.
        every = zip((outcome.result for outcome in outcomes), sizes, weights, strict=True)
        results = [each for each in every if each[0] is not None]
        return Report(
            merge(*zip(*results, strict=True)) if results else None,
            merge_logs([outcome.logs for outcome in outcomes], sizes, weights),
            is_last_batch,
            loss,
            *losses.counted(outcomes),
            size=sum(sizes),
        )


def _power_of_two(number: float) -> float:
    return 2.0 ** round(math.log2(number)) if number > 0 else 1.0
