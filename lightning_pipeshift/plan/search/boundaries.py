"""Finds the boundaries that may be cut, and those that are worth it.

Inside a residual block more values cross a boundary (the block's input, and values computed from
it) than between blocks. A cut there costs more on every microbatch, while one before or after the
block balances nearly as well.
"""

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import NamedTuple

from lightning_pipeshift.plan.inputs.profile import Profile


class Crossing(NamedTuple):
    """What crosses the boundary behind a layer, for a microbatch.

    Args:
        payload_bytes: of the values.
        gradient_bytes: of the gradients that come back.
        may_be_cut: whether no value is sent backwards.
    """

    payload_bytes: int = 0
    gradient_bytes: int = 0
    may_be_cut: bool = True


def cuts_to_try(profile: Profile, num_stages: int) -> frozenset[int]:
    """The boundaries of a model that are worth a cut."""
    return worthwhile_cuts(profile.payload_bytes, num_stages, profile.possible_cuts)


def is_between_blocks(profile: Profile, counts: Sequence[int]) -> bool:
    """Whether all cuts are at boundaries that are worth it.

    Args:
        profile: of the model.
        counts: the layers per stage.
    """
    ends = set(accumulate(counts)) - {0, profile.num_layers}
    return ends <= cuts_to_try(profile, len(counts))


def worthwhile_cuts(
    payload_bytes: Sequence[int], num_stages: int, possible: Collection[int] | None = None
) -> frozenset[int]:
    """The boundaries to choose the cuts from, out of those that may be cut (``None``: all).

    ``payload_bytes[b]`` crosses boundary b, before layer b. A boundary is on a *hill* if there are
    boundaries that carry less on both its sides. The nearest two of these are the hill's feet: all
    boundaries between them carry at least as much. A hill is not worth cutting: cut at a foot
    instead::

        payload      1  2  3  2  1  2  2  1        two residual blocks:
        worthwhile   ^           ^        ^        cut around them, not inside

    There are two exceptions:

    - The hill is wider than a stage's even share of the layers. Then it is no block inside of a
      stage, but the shape of the model: the skip connections of a U-Net make one hill of the whole
      model, and cutting at its feet alone would leave one stage with everything. The blocks on such
      a hill are separate hills, and are kept whole.
    - The remaining boundaries are too few for the stages. Then all that may be cut are allowed.

    A payload that only falls (a convnet's) or only grows has no hills. The two ends of the model
    are no boundaries between stages, and do not count as feet; otherwise every model would be a
    hill, as inputs and outputs are small.
    """
    num_layers = len(payload_bytes) - 1
    inner = range(1, num_layers) if possible is None else possible
    worthwhile = frozenset(b for b in inner if not _on_narrow_hill(b, payload_bytes, num_stages))
    return worthwhile if len(worthwhile) >= num_stages - 1 else frozenset(inner)


def _on_narrow_hill(boundary: int, payload_bytes: Sequence[int], num_stages: int) -> bool:
    num_layers = len(payload_bytes) - 1
    before = range(boundary - 1, 0, -1)
    behind = range(boundary + 1, num_layers)
    feet = [
        next((b for b in side if payload_bytes[b] < payload_bytes[boundary]), None)
        for side in (before, behind)
    ]
    if feet[0] is None or feet[1] is None:
        return False
    return (feet[1] - feet[0]) * num_stages <= num_layers
