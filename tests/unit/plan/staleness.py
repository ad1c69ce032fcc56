"""The age of weights across a move, as it is to be: what the runtime is tested against."""

from lightning_pipeshift.plan.schedule.cut_over import newest_update


def newest_update_after_move(
    minibatch: int, begin: int, source: int, target: int, num_stages: int
) -> int:
    """As :func:`newest_update`, for a layer that has moved, and a minibatch from the cut-over on.

    A layer that moves upstream has the new owner's age of weights at once: the old owner's last
    updates are there in time. Downstream, the new owner is ahead of the old one with its backwards.
    It uses the weights that the old owner would have used, until the last update of the old owner
    is among them; only then it makes its own updates, those that were due before included. So
    neither waits for the other, and which weights a forward uses does not depend on their speed.

    Args:
        minibatch: that of the forward, ``begin`` or later.
        begin: the cut-over.
        source: the old owner.
        target: the new owner.
        num_stages: of the pipeline.
    """
    old = newest_update(minibatch, source, num_stages)
    if source < target and old < begin - 1:
        return old
    return newest_update(minibatch, target, num_stages)
