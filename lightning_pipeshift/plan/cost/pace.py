"""The pace of an asynchronous pipeline (PipeDream, Narayanan et al., SOSP 2019), which fills and
drains once in an epoch: the time from one minibatch to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def steady_pace(costs: Sequence[Any]) -> NDArray[np.float64]:
    """The seconds between two minibatches in a full pipeline of 1F1B rows, exactly.

    It is the largest mean of a cycle of actions that wait for each other: the cycle's seconds over
    the minibatches that pass meanwhile (Baccelli et al., Synchronization and Linearity, 1992). A
    link alone is a cycle: one transfer waits for the one before it. The others follow from the
    rows. In call ``k`` a stage runs ``F``, perhaps ``R``, and ``B``; its ``F`` waits for that of
    the stage before it in the same call, its ``B`` for that of the stage after it in the call
    before. So a cycle goes down with payloads from stage a to stage b and back up with gradients,
    in ``b - a + 1`` calls::

        pace = max over a <= b of:  (forwards + backwards + payloads + gradients from a to b
                                     + recomputation on b) / (b - a + 1)

    With free links this is the slowest stage. A link counts where both of its stages are slow.

    Args:
        costs: the fields of :class:`~lightning_pipeshift.plan.cost.simulator.Costs`, per stage or
            boundary: numbers, or vectors with one entry for each of many costs.
    """
    forward, backward, payload, gradient, again = (np.asarray(c, np.float64) for c in costs)
    slots, trips = forward + backward, payload + gradient
    pace: NDArray[np.float64] = (slots + again).max(axis=0)
    if len(trips):
        pace = np.maximum(pace, np.maximum(payload, gradient).max(axis=0))
    around = slots
    for further in range(1, len(slots)):
        around = around[:-1] + trips[further - 1 :] + slots[further:]
        pace = np.maximum(pace, ((around + again[further:]) / (further + 1)).max(axis=0))
    return pace
