"""The losses of a step's microbatches on the last stage, and what each counts for in the sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeshift.errors import BatchError, LayerError
from lightning_pipeshift.model.user_state.logs import LoggedValue
from lightning_pipeshift.step.training_batch import TrainingBatch


class Denominators(NamedTuple):
    """The denominators of the losses of all virtual machines: powers of two, so that the division
    is exact, and their choice has no effect on the result.

    Args:
        sizes: for microbatches weighted by their number of samples.
        weights: for microbatches weighted by the weight that ``training_step`` returns.
    """

    sizes: float
    weights: float


@dataclass
class MicrobatchOutcome:
    """The last stage's result of one microbatch.

    Args:
        result: what the user's step returned.
        logs: what it logged.
        loss: a tensor of one element; ``None`` for a microbatch that is left out.
        weight: what the user's step gave as its weight. On a GPU it is a float64 tensor: to read
            it, the program would have to wait for the forward.
    """

    result: Any
    logs: list[LoggedValue]
    loss: Tensor | None = None
    weight: float | Tensor | None = None


@dataclass(kw_only=True)
class Losses:
    """The losses of one step, in the order of the microbatches.

    The weights that ``training_step`` returns are known only after each forward, and the first
    backward runs before the last forward. So each loss is divided by the sum that the weights would
    have if all equalled the first, which is exact for equal weights. The quotient of the two values
    of :meth:`counted` corrects the rest, also for microbatches without a loss.

    Args:
        sizes: the number of samples of each microbatch.
        loss_scale: a factor of every loss, applied before its backward.
        denominators: divide the losses while their total weight is not known yet; ``None`` to
            derive them from this step's own numbers.
        agree: called with the first outcome; returns the denominators.
    """

    sizes: Sequence[int]
    loss_scale: float | Tensor = 1.0
    denominators: Denominators | None = None
    agree: Callable[[MicrobatchOutcome], Denominators] | None = None
    outcomes: list[MicrobatchOutcome] = field(default_factory=list, init=False)
    _expected_weight: float | Tensor | None = field(default=None, init=False)
    """The expected sum of the user's weights, which divides the losses meanwhile."""

    @property
    def is_complete(self) -> bool:
        """Whether every microbatch has an outcome."""
        return len(self.outcomes) == len(self.sizes)

    def add(self, result: Any, logs: list[LoggedValue], device: torch.device) -> None:
        """Adds the next microbatch.

        Args:
            result: what the user's step returned.
            logs: what it logged.
            device: the stage's device.

        Raises:
            LayerError: a training step returned no loss that can be used.
            BatchError: some microbatches have a weight, and others have none.
        """
        outcome = _outcome(result, logs, device)
        if outcome.loss is not None:
            first = next((one for one in self.outcomes if one.loss is not None), outcome)
            if (first.weight is None) != (outcome.weight is None):
                raise BatchError(
                    "`training_step` returned a 'weight' for some microbatches of a batch and none"
                    " for others. Return it for every microbatch, or never."
                )
        self.outcomes.append(outcome)
        if self.agree is not None and len(self.outcomes) == 1:
            self.denominators = self.agree(outcome)

    def weighed(self, number: int, given: TrainingBatch, num_replicas: int) -> Tensor:
        """A microbatch's part of the loss of the step: the root of its backward.

        Args:
            number: of the microbatch; it has a loss.
            given: the batch.
            num_replicas: how many virtual machines there are.
        """
        loss, weight = self.outcomes[number].loss, self.outcomes[number].weight
        assert loss is not None
        if num_replicas == 1 and weight is None and len(set(self.sizes)) == 1:
            # As Lightning does, with the microbatches as its batches: a factor gives other bits.
            loss = loss / (len(self.sizes) * given.num_accumulated)
            # To compare a tensor would wait for the device, and the bits are the same.
            is_plain = not isinstance(given.scale, Tensor) and given.scale == 1.0
            return loss if is_plain else loss * given.scale
        return loss * self.factor(number)

    def factor(self, number: int) -> float | Tensor:
        """The factor of a microbatch's loss: a float64 tensor if it depends on values that are on
        the device, and then the same number. (Torch divides by a plain number otherwise on a GPU
        than on a CPU: those below are powers of two, or have been made tensors.)
        """
        weight, scale = self.outcomes[number].weight, self.loss_scale
        if self.denominators is not None:
            if weight is None:
                return self.sizes[number] / self.denominators.sizes * scale
            return weight / self.denominators.weights * scale
        if weight is None:
            total = sum(self.sizes)
            return (self.sizes[number] / total if total else 0.0) * scale
        expected = self._expected_weight
        if isinstance(weight, Tensor):
            before = expected if isinstance(expected, Tensor) else torch.zeros_like(weight)
            expected = torch.where(before == 0, weight * len(self.sizes), before)
            self._expected_weight = expected
            return torch.where(weight == 0, 0.0, weight / expected) * scale
        if not weight:
            return 0.0
        if expected is None:
            self._expected_weight = expected = weight * len(self.sizes)
        return weight / expected * scale

    def weights(self, outcomes: Sequence[MicrobatchOutcome]) -> list[float]:
        """The weight of each microbatch. Without weights of the user's, one without a loss counts
        by its samples, as in plain Lightning; else its weight is 0.

        Args:
            outcomes: of all microbatches, in host memory.
        """
        if all(outcome.weight is None for outcome in outcomes):
            return list(map(float, self.sizes))
        return [
            0.0
            if outcome.loss is None
            else float(size)
            if outcome.weight is None
            else float(outcome.weight)
            for outcome, size in zip(outcomes, self.sizes, strict=True)
        ]

    def counted(self, outcomes: Sequence[MicrobatchOutcome]) -> tuple[float, float]:
        """The total weight of the losses, and the denominator by which they have been divided.

        Args:
            outcomes: of all microbatches, in host memory.
        """
        weights = self.weights(outcomes)
        counted = sum(weights)
        is_weighted = any(outcome.weight is not None for outcome in outcomes)
        if self.denominators is not None:
            divided = self.denominators.weights if is_weighted else self.denominators.sizes
            return counted, divided
        first = next((weight for weight in weights if weight), None)
        if is_weighted and first is not None:
            return counted, first * len(weights)
        return counted, float(sum(self.sizes))


def _outcome(result: Any, logs: list[LoggedValue], device: torch.device) -> MicrobatchOutcome:
    if not torch.is_grad_enabled():
        return MicrobatchOutcome(result, logs)
    loss, weight = result, None
    if isinstance(result, Mapping):
        if "loss" not in result:
            raise LayerError(
                "`training_step` returned a dict without a 'loss' (it has"
                f" {sorted(map(str, result))}). Return the loss itself, a dict with the key"
                " 'loss', or None to leave the microbatch out."
            )
        loss, weight = result["loss"], result.get("weight")
    if loss is not None and (not isinstance(loss, Tensor) or loss.numel() != 1):
        raise LayerError(
            f"`training_step` returned {type(loss).__name__} as its loss; it has to be a tensor"
            " with one element, or None to leave the microbatch out."
        )
    return MicrobatchOutcome(
        result, logs, loss, None if weight is None else _number(weight, device)
    )


def _number(value: Any, device: torch.device) -> float | Tensor:
    if device.type == "cpu":
        return float(value)
    if isinstance(value, Tensor):
        there: Tensor = value.detach().to(device, torch.float64, non_blocking=True)
        return there.reshape(())
    return torch.full((), float(value), dtype=torch.float64, device=device)
