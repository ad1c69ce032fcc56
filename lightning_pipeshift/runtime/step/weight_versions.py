"""Weight stashing: a minibatch's backward uses the weights that its forward used.

PipeDream (Narayanan et al., SOSP 2019, section 3.3) keeps a copy of the weights for each minibatch
in flight. Here a parameter keeps its identity, and what changes is its memory: before an optimizer
changes weights that a minibatch in flight has used, they are copied, and the copy is the one that
changes. So there are no more versions than minibatches in flight, and no copy where none is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import preserved_version_counters
from lightning_pipeshift.plan.schedule.actions import Action, Kind
from lightning_pipeshift.runtime.step.listeners import ActionListener


class WeightVersions(ActionListener):
    """The weights of one stage that its minibatches in flight use.

    While a forward or a backward runs, the parameters have the memory of its version. Whatever way
    user code takes to a weight (recomputation in the backward, an autograd function that keeps the
    parameter itself), it finds the right values.

    Args:
        delays: whether a forward uses the weights from before the last update, as in PipeDream-2BW
            (Narayanan et al., ICML 2021, section 3.1), instead of the newest.
    """

    def __init__(self, delays: bool) -> None:
        self._delays = delays
        self._parameters: list[nn.Parameter] = []
        self._newest: list[Tensor] | None = None
        """The newest weights, while the parameters have others."""
        self._before: list[Tensor] | None = None
        """The weights before the last update, if forwards may need them."""
        self._num_updates = 0
        self.update = 0
        """The number of the update that the next forward's gradient is part of."""
        self._used: dict[int, list[Tensor]] = {}
        """The weights of the minibatches in flight, by number."""

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sets the parameters that the optimizer may change here. No minibatch is in flight."""
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._before = None

    # --- as an ActionListener ---

    def begin_action(self, place: int, action: Action) -> None:
        """See :class:`ActionListener`."""
        if action.kind is Kind.FORWARD:
            newest = [parameter.data for parameter in self._parameters]
            used = newest
            # The update before its own may be made here already, or not yet.
            if self._before is not None and self._num_updates == self.update > 0:
                used = self._before
            self._used[action.microbatch] = used
            self._use(used, newest)
        elif action.kind in (Kind.RECOMPUTE, Kind.BACKWARD):
            newest = [parameter.data for parameter in self._parameters]
            self._use(self._used[action.microbatch], newest)

    def end_action(self, action: Action) -> None:
        """See :class:`ActionListener`."""
        self.restore()
        if action.kind is Kind.BACKWARD:
            del self._used[action.microbatch]

    def _use(self, weights: list[Tensor], newest: list[Tensor]) -> None:
        self._newest = newest
        self._give(weights)

    def restore(self) -> None:
        """Gives the parameters the newest weights."""
        if self._newest is not None:
            self._give(self._newest)
            self._newest = None

    def _give(self, weights: list[Tensor]) -> None:
        for parameter, values in zip(self._parameters, weights, strict=True):
            if parameter.data_ptr() != values.data_ptr():
                parameter.data = values

    # --- updates ---

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Context of an optimizer's step, which changes the parameters that have a gradient."""
        if self._delays:
            self._before = [parameter.data for parameter in self._parameters]
        self._num_updates += 1
        needed = {
            weight.data_ptr()
            for weights in (*self._used.values(), self._before or ())
            for weight in weights
        }
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.data_ptr() in needed:
                parameter.data = parameter.data.clone()
        # Autograd compares version counters, which tell it that a tensor has changed that a
        # backward needs. These backwards get the weights of their forward instead.
        with preserved_version_counters(self._parameters):
            yield

    def forget(self) -> None:
        """Forgets the minibatches in flight, after an error."""
        self.restore()
        self._used.clear()

    @property
    def num_versions(self) -> int:
        """How many versions there are of the weight that has most."""
        kept = [*self._used.values(), [parameter.data for parameter in self._parameters]]
        if self._before is not None:
            kept.append(self._before)
        of_each = zip(*kept, strict=True)
        return max((len({one.data_ptr() for one in versions}) for versions in of_each), default=1)
