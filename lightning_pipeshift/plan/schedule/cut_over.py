"""When layers change their owners in an asynchronous pipeline.

CN115454655A: minibatches enter one after another, and the pipeline never drains. Stage ``s`` of
``N`` runs ``F[j]`` and then ``B[j - (N - 1 - s)]``, and steps after each backward. A move has a
*cut-over*, a minibatch ``c``: earlier ones run on the old owner, forward and backward, and from
``c`` on all run on the new one. Nobody waits for an agreement, so a stage has to know of the move
before it begins with minibatch ``c``. The announcement travels downstream with payloads and
upstream with gradients, one stage for each.

The source document has numbers for neighbours: announced after the forward of minibatch ``k``, a
move downstream begins with minibatch ``k + 1``, a move upstream with ``k + 2``. Over a longer
distance upstream, ``k + 2`` is too early: the announcement arrives with a gradient, and a stage
that is ``d`` stages further upstream begins ``d`` forwards more before that.
"""

from __future__ import annotations

from lightning_pipeshift.errors import PlanError


def cut_over(current: int, announcer: int, first_affected: int) -> int:
    """The first minibatch that runs under another placement.

    Args:
        current: the minibatch of the announcer's last forward, ``k``. It tells the stages after it
            before its next forward, and those before it before its next backward.
        announcer: the stage that announces the change; for a single move, the old owner.
        first_affected: the lowest stage whose layers change; for a single move, the lower one of
            the old and the new owner.

    Raises:
        PlanError: there is no such minibatch or stage.
    """
    if min(current, announcer, first_affected) < 0:
        raise PlanError(
            f"a change announced after minibatch {current} by stage {announcer}, from stage "
            f"{first_affected} on; all of them are counted from 0"
        )
    return current + 1 + max(0, announcer - first_affected)


def backward_before(minibatch: int, stage: int, num_stages: int) -> int:
    """The backward that a stage runs between the forwards of two minibatches, the given one and the
    one before it; negative while the pipeline fills.

    A stage has the layers that it gets with a cut-over before this backward (the source document's
    ``k - N + t + 1`` and ``k - N + t + 2``).
    """
    return minibatch - num_stages + stage


def newest_update(minibatch: int, stage: int, num_stages: int) -> int:
    """The last minibatch whose update is in the weights of a forward, on a stage that has owned its
    layers for long; negative for the first weights. The same backward as that of
    :func:`backward_before`: the weights of stage ``s`` are ``N - s`` minibatches old.
    """
    return backward_before(minibatch, stage, num_stages)
