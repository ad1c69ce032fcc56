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
        ranks: the virtual machine's, in stage order; those of stages with several chunks of layers
            come once for each, and so have a part of their memory for each.
        schedule: by name.
        microbatches: of a step.
        samples: of a microbatch, on average; those of the profile's batch if ``None``. Times and
            bytes of activations are proportional to it; the cost of an action outside its layers is
            constant.
        allowed: the boundaries to choose from, of those that may be cut; ``None``: all of them.
    """
    possible, last = profile.possible_cuts, len(ranks) - 1
    if possible is not None:
        allowed = possible if allowed is None else allowed & possible
    if samples is None:
        samples = profile.batch_samples / microbatches or profile.samples
    share = samples / profile.samples
    sizes = relative_sizes(samples * microbatches, microbatches)
    devices = [cluster.devices[rank] for rank in ranks]
    num_chunks = len(ranks) // len(set(ranks))
    speeds = np.array([device.speed for device in devices])
    times = [profile.kind_of(device) for device in devices]
    seconds = share * np.stack([profile.seconds[device.kind] for device in devices], axis=1)
    seconds /= speeds[:, None]
    once = np.zeros((3, len(ranks)))
    once[:2] = np.transpose([(t.action_forward, t.action_backward) for t in times]) / speeds
    extra = once[:2].copy()
    extra[:, -1] += share / speeds[-1] * np.array([times[-1].tail_forward, times[-1].tail_backward])
    across = crossing_bytes(profile, share)
    crossing = np.zeros((2, last, profile.num_layers + 1))
    for stage, pair in enumerate(pairwise(ranks)):
        crossing[:, stage] = crossing_seconds(across, cluster.link(*pair))
        once[2, stage] = cluster.link(*pair).latency_seconds
    updates = updates_per_backward(schedule, len(ranks), profile.num_accumulated)
    layers = profile.arrays
    gradients = layers["gradient_bytes"]
    seconds[1] += updates * profile.optimizer_seconds_per_byte * gradients / speeds[:, None]
    sent = np.zeros((2, profile.num_layers))
    for each in profile.shared:
        for place, layer in enumerate(each.layers):
            sent[min(place, 1), layer] += each.sent_bytes
    return Workload(
        forward=seconds[0],
        backward=seconds[1],
        forward_extra=extra[0],
        backward_extra=extra[1],
        payload_seconds=crossing[0],
        gradient_seconds=crossing[1],
        static_bytes=layers["static_bytes"] + (profile.num_gradients - 1) * gradients,
        optimizer_bytes=layers["optimizer_bytes"],
        waiting_bytes=layers["waiting_bytes"],
        # Gradients are as large as the weights that they are for.
        weight_bytes=gradients,
        sent_bytes=sent,
        saved_bytes=share * layers["saved_bytes"],
        input_bytes=share * layers["input_bytes"],
        outside_bytes=share * layers["outside_bytes"],
        momentary_bytes=momentary_bytes(layers["working_bytes"], gradients, sizes[0] * share),
        payload_bytes=np.array([*across[0, :-1], 0.0]),
        shared_bytes=profile.shared_bytes,
        usable_bytes=np.array([device.usable_bytes / num_chunks for device in devices]),
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
    sizes = np.zeros((2, profile.num_layers + 1))
    sizes[0, 1:] = share * profile.arrays["payload_bytes"]
    sizes[1, 1:] = share * profile.arrays["payload_gradient_bytes"]
    return sizes


def crossing_seconds(sizes: Numbers, link: Link) -> Numbers:
    """(2, L + 1): the seconds that the bytes of :func:`crossing_bytes` take on a link."""
    seconds: Numbers = np.where(sizes, link.latency_seconds + sizes / link.bandwidth, 0.0)
    return seconds
