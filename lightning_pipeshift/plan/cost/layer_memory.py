"""The memory of stages in closed form: what each holds with a range of layers.

Saved tensors are not told apart here: see :mod:`~lightning_pipeshift.plan.cost.memory_model`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.sums import Numbers, sums_of_ranges
from lightning_pipeshift.plan.schedule.asynchronous import shared_copies, weight_versions
from lightning_pipeshift.plan.schedule.schedules import ASYNCHRONOUS

if TYPE_CHECKING:  # A workload has its memory, so this module can't import it when it runs.
    from lightning_pipeshift.plan.cost.workload import Workload

SENDS_UNDER_WAY: Final = 2
"""How many large values, and how many gradients, a stage with a memory plan may be sending at a
time: one more waits. See ``runtime.comm.mailbox.Mailbox.most_large``."""


@dataclass(frozen=True, eq=False)
class LayerMemory:
    """The memory of each of S stages for each of L layers. It does not depend on the cut: a cut
    only says which layers count.

    Args:
        fixed_bytes: (S, L): held for each layer on each stage regardless of the microbatches in
            flight.
        kept_bytes: (S, L): held for layer l by stage s, if it is not recomputed.
        freed_bytes: (S, L): by how much recomputing layer l lowers the peak of stage s; negative if
            it raises it. A recomputed layer holds its inputs for every microbatch in flight, and
            its saved tensors for the one whose backward is next.
        batches_bytes: (S,): the parts of batches on each stage's device.
        sizes_in_flight: (S,): the sizes of the microbatches of which a stage holds activations
            together, relative to the mean size.
        largest: the size of the largest microbatch, relative to the mean size.
        momentary_bytes, payload_bytes, shared_bytes: those of the
            :class:`~lightning_pipeshift.plan.cost.workload.Workload`.
    """

    fixed_bytes: Numbers
    kept_bytes: Numbers
    freed_bytes: Numbers
    batches_bytes: Numbers
    sizes_in_flight: Numbers
    largest: float
    momentary_bytes: Numbers
    payload_bytes: Numbers
    shared_bytes: Numbers

    @classmethod
    def of(cls, workload: Workload) -> LayerMemory:
        """Returns the memory of a workload's layers."""
        pipeline = workload.schedule, workload.num_stages, workload.num_accumulated
        stashed = np.array(weight_versions(*pipeline))[:, None] - 1
        copies = np.array(shared_copies(*pipeline)) @ workload.sent_bytes
        fixed = workload.static_bytes + stashed * workload.weight_bytes + copies
        sizes = np.array(workload.in_flight, dtype=np.float64)
        if len(workload.sizes) > 1:
            # The first ones are the largest.
            sizes = np.array([math.fsum(workload.sizes[:count]) for count in workload.in_flight])
        in_flight, largest = sizes[:, None], workload.sizes[0]
        freed = (in_flight - largest) * workload.saved_bytes - in_flight * workload.input_bytes
        recomputes = np.array([[s in workload.recomputing] for s in range(workload.num_stages)])
        held = batches_held(workload.schedule, workload.num_stages, workload.microbatches)
        return cls(
            fixed_bytes=fixed,
            kept_bytes=fixed + in_flight * workload.saved_bytes,
            freed_bytes=(freed + largest * workload.outside_bytes) * recomputes,
            batches_bytes=workload.batch_bytes * np.array(held, dtype=np.float64),
            sizes_in_flight=sizes,
            largest=largest,
            momentary_bytes=workload.momentary_bytes,
            payload_bytes=workload.payload_bytes,
            shared_bytes=workload.shared_bytes,
        )

    def peak_bytes(self, cut: Cut) -> tuple[float, ...]:
        """The peak memory of each stage: that of its layers, the activations in flight, messages,
        the batch, and what runs.

        This is what :class:`~lightning_pipeshift.plan.cost.memory_model.Footprints` finds in the
        timeline, if no tensor is swapped, all optimizer state is on the device, and every stage
        that recomputes does so in actions of its own.
        """
        held = self.kept_bytes.copy()
        again = sorted(cut.recompute)
        held[:, again] -= self.freed_bytes[:, again]
        return tuple(
            float(self.besides_bytes[s, begin, end] + held[s, begin:end].sum())
            for s, (begin, end) in enumerate(pairwise(cut.bounds))
        )

    @cached_property
    def kept_ranges(self) -> Numbers:
        """(S, L + 1, L + 1): the bytes that stage s holds with the layers from b to e, at ``[s, b,
        e]``, if it keeps all that they save.
        """
        held: Numbers = sums_of_ranges(self.kept_bytes) + self.besides_bytes
        return held

    @cached_property
    def least_ranges(self) -> Numbers:
        """Likewise, if it recomputes every layer for which that frees memory."""
        held: Numbers = self.kept_ranges - sums_of_ranges(np.maximum(self.freed_bytes, 0.0))
        return held

    @cached_property
    def full_ranges(self) -> Numbers:
        """Likewise, if it recomputes every layer, where recomputation can free memory."""
        held: Numbers = self.kept_ranges - sums_of_ranges(self.freed_bytes)
        return held

    @cached_property
    def most_momentary_bytes(self) -> Numbers:
        """(L + 1, L + 1): the most that one of the layers from b to e takes for a moment, at ``[b,
        e]``.
        """
        num_layers = len(self.momentary_bytes)
        most = np.zeros((num_layers + 1, num_layers + 1))
        each = np.triu(np.tile(self.momentary_bytes, (num_layers, 1)))
        np.maximum.accumulate(each, axis=1, out=most[:-1, 1:])
        return most

    @cached_property
    def besides_bytes(self) -> Numbers:
        """(S, L + 1, L + 1): held by stage s in addition to what its layers from b to e hold, at
        ``[s, b, e]``: for messages, its batches, shared weights, and the layer that runs.

        For messages that is memory that is reserved, and for each microbatch in flight the payload
        that was sent, until the stage's backward begins.
        """
        received, sent = self.payload_bytes[:, None], self.payload_bytes
        reserved: Numbers = self.largest * passing_bytes(received, sent)
        messages = reserved + self.sizes_in_flight[:, None, None] * sent
        held: Numbers = self.batches_bytes[:, None, None] + self.most_momentary_bytes
        return messages + held + self.shared_bytes


def window_bytes(sizes: Sequence[float]) -> float:
    """The device's memory for the weights of a stage's layers that wait in host memory: those of
    the layer that runs, and of the one that is prefetched meanwhile.

    Args:
        sizes: of the weights of these layers, in call order.
    """
    return float(max(map(sum, pairwise(sizes)), default=sum(sizes)))


def passing_bytes(received: Any, sent: Any) -> Any:
    """The memory that a stage reserves for messages between stages: a payload and a gradient whose
    receives are posted during the compute on earlier ones, the gradient with which a backward
    began, which autograd holds until it ends, and gradients that it sends.

    Args:
        received: the payload that it receives, per microbatch; its gradient is at most as large.
        sent: the payload that it sends.
    """
    return (1 + SENDS_UNDER_WAY) * received + 2 * sent


def batches_held(schedule: str, num_stages: int, microbatches: int) -> tuple[int, ...]:
    """How many microbatches' parts of batches are on each stage's device: those of a step, or those
    of the minibatches in flight.
    """
    if schedule in ASYNCHRONOUS:
        return tuple(range(num_stages, 0, -1))
    return (microbatches,) * num_stages


def momentary_bytes(measured: Numbers, gradients: Numbers, share: float) -> Numbers:
    """(L,): what layers take for a moment with microbatches of another size, at most: the gradient
    of a parameter, which may be a part of it, is as large with any.

    Args:
        measured: (L,) with microbatches of the measured size.
        gradients: (L,) of all parameters of a layer.
        share: the size of a microbatch, relative to the measured size.
    """
    return np.minimum(max(1.0, share) * measured, share * measured + gradients)
