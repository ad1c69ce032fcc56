"""Makes the workload of a virtual machine from what was measured of the model and the machines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from lightning_pipeshift.plan.cost.layer_memory import momentary_bytes
from lightning_pipeshift.plan.cost.sums import Numbers
from lightning_pipeshift.plan.cost.workload import Workload
from lightning_pipeshift.plan.inputs.cluster import Cluster, Link
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.schedule.asynchronous import updates_per_backward


def workload_of(
    profile: Profile,
    cluster: Cluster,
    ranks: Sequence[int],
    schedule: str,
    microbatches: int,
    samples: float | None = None,
    allowed: frozenset[int] | None = None,
) -> Workload:
    """The workload of a virtual machine.

    Args:
        profile: of the model.
        cluster: the machines.
        ranks: the virtual machine's, in stage order.
        schedule: by name.
        microbatches: of a step.
        samples: of a microbatch, on average; those of the profile's batch if ``None``. Times and
            bytes of activations are proportional to it; the cost of an action outside its layers is
            constant.
        allowed: the boundaries to choose from, of those that may be cut; ``None``: all of them.
    """
    possible = profile.possible_cuts
    if possible is not None:
        allowed = possible if allowed is None else allowed & possible
    times = [profile.times_on(cluster.devices[rank]) for rank in ranks]
    if samples is None:
        samples = profile.batch_samples / microbatches or profile.samples
    share = samples / profile.samples
    sizes = relative_sizes(samples * microbatches, microbatches)
    layers = profile.layers
    last = len(ranks) - 1

    def extra(name: str) -> Numbers:
        return np.array(
            [
                getattr(t, f"action_{name}") + share * (s == last) * getattr(t, f"tail_{name}")
                for s, t in enumerate(times)
            ]
        )

    across = crossing_bytes(profile, share)
    crossing = np.zeros((2, last, len(layers) + 1))
    once = np.zeros((3, len(ranks)))
    once[:2] = np.transpose([(t.action_forward, t.action_backward) for t in times])
    for stage, pair in enumerate(pairwise(ranks)):
        crossing[:, stage] = crossing_seconds(across, cluster.link(*pair))
        once[2, stage] = cluster.link(*pair).latency_seconds

    updates = updates_per_backward(schedule, len(ranks), profile.num_accumulated)
    update = updates * profile.optimizer_seconds_per_byte
    gradients = np.array([layer.gradient_bytes for layer in layers], dtype=np.float64)
    speeds = np.array([cluster.devices[rank].speed for rank in ranks])
    sent = np.zeros((2, len(layers)))
    for each in profile.shared:
        for place, layer in enumerate(each.layers):
            sent[min(place, 1), layer] += each.sent_bytes

    def of_layers(name: str, factor: float = 1.0) -> Numbers:
        return np.array([factor * getattr(layer, name) for layer in layers], dtype=np.float64)

    return Workload(
        forward=share * np.array([t.forward for t in times]),
        backward=share * np.array([t.backward for t in times])
        + update * gradients / speeds[:, None],
        forward_extra=extra("forward"),
        backward_extra=extra("backward"),
        payload_seconds=crossing[0],
        gradient_seconds=crossing[1],
        static_bytes=of_layers("static_bytes") + (profile.num_gradients - 1) * gradients,
        optimizer_bytes=of_layers("optimizer_bytes"),
        waiting_bytes=of_layers("waiting_bytes"),
        # Gradients are as large as the weights that they are for.
        weight_bytes=gradients,
        sent_bytes=sent,
        saved_bytes=of_layers("saved_bytes", share),
        input_bytes=of_layers("input_bytes", share),
        outside_bytes=of_layers("outside_bytes", share),
        momentary_bytes=momentary_bytes(of_layers("working_bytes"), gradients, sizes[0] * share),
        payload_bytes=np.array([*across[0, :-1], 0.0]),
        shared_bytes=profile.shared_bytes,
        usable_bytes=np.array([cluster.devices[rank].usable_bytes for rank in ranks]),
        schedule=schedule,
        microbatches=microbatches,
        sizes=sizes,
        once_seconds=once,
        num_accumulated=profile.num_accumulated,
        batch_bytes=share * profile.batch_bytes,
        allowed=allowed,
    )


def relative_sizes(samples: float, microbatches: int) -> tuple[float, ...]:
    """The sizes of a batch's microbatches relative to their mean: the first ones have a sample
    more if the number does not divide the batch. One entry if all are equal.

    Args:
        samples: of the batch.
        microbatches: their number.
    """
    size, rest = divmod(round(samples), microbatches)
    if not rest or not size or abs(samples - round(samples)) > 1e-6:
        return (1.0,)
    counts = [size + 1] * rest + [size] * (microbatches - rest)
    return tuple(count * microbatches / round(samples) for count in counts)


def crossing_bytes(profile: Profile, share: float) -> Numbers:
    """(2, L + 1): the bytes of a payload and of its gradient that cross each boundary. Boundary b
    is before layer b, so nothing crosses the first one.

    Args:
        profile: of the model.
        share: the size of a microbatch, relative to the measured size.
    """
    sizes = np.zeros((2, len(profile.layers) + 1))
    sizes[0, 1:] = [share * layer.payload_bytes for layer in profile.layers]
    sizes[1, 1:] = [share * layer.payload_gradient_bytes for layer in profile.layers]
    return sizes


def crossing_seconds(sizes: Numbers, link: Link) -> Numbers:
    """(2, L + 1): the seconds that the bytes of :func:`crossing_bytes` take on a link."""
    seconds: Numbers = np.where(sizes, link.latency_seconds + sizes / link.bandwidth, 0.0)
    return seconds
