"""Weight stashing: a minibatch's backward uses the weights that its forward used.

PipeDream (Narayanan et al., SOSP 2019, section 3.3) keeps a copy of the weights for each minibatch
in flight. Here a parameter keeps its identity, and what changes is its memory: before an optimizer
changes weights that a minibatch in flight has used, they are copied, and the copy is the one that
changes. So there are no more versions than minibatches in flight, and no copy where none is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import preserved_version_counters
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.plan.schedule.actions import Action, Kind

Weights = list[tuple[nn.Parameter, Tensor]]


class WeightVersions:
    """The weights of one stage that its minibatches in flight use.

    While a forward or a backward runs, the parameters have the memory of its version. Whatever way
    user code takes to a weight (recomputation in the backward, an autograd function that keeps the
    parameter itself), it finds the right values.

    Args:
        delays: whether a forward uses the weights from before the last update, as in PipeDream-2BW
            (Narayanan et al., ICML 2021, section 3.1), instead of the newest.
    """

    def __init__(self, delays: bool) -> None:
        self.delays = delays
        self.num_updates = 0
        """How many updates the stage has made."""
        self.update = 0
        """The number of the update that the next forward's gradient is part of."""
        self.began_anew_with = 0
        """The number of the update that was under way when :meth:`begin_anew` was last called."""
        self._parameters: list[nn.Parameter] = []
        self._newest: Weights = []
        """The newest weights, while the parameters have others."""
        self._before: dict[int, Tensor] = {}
        """By a parameter's identity, its weights before the last update, if forwards may need them.
        """
        self._used: dict[int, Weights] = {}
        """The weights of the minibatches in flight, by number."""
        self._pinned: dict[int, Tensor] = {}
        """By identity, weights that are being sent."""

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sets the parameters that forwards use from now on, and the optimizer may change."""
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        known = set(map(id, self._parameters))
        self._before = {key: weight for key, weight in self._before.items() if key in known}

    def begin_anew(self) -> None:
        """Lets the next forwards use the newest weights, in an empty pipeline."""
        self._before = {}
        self.began_anew_with = self.update

    def set_before(self, weights: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Sets the weights before the last update, for parameters from another stage."""
        self._before |= {id(parameter): weight for parameter, weight in weights}

    def begin_action(self, action: Action) -> None:
        """Gives the parameters the weights that an action uses."""
        if action.kind is Kind.FORWARD and action.microbatch not in self._used:
            # The update before its own may be made here already, or not yet.
            is_ahead = self.delays and self.num_updates == self.update
            before = self._before if is_ahead else {}
            used = [(p, before.get(id(p), p.data)) for p in self._parameters]
            self._used[action.microbatch] = used
        elif action.kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD):
            used = self._used[action.microbatch]
        else:
            return
        self._newest = [(parameter, parameter.data) for parameter, _ in used]
        _give(used)

    def end_action(self, action: Action) -> None:
        """Gives the parameters the newest weights again, as an action has ended."""
        self.restore()
        if action.kind is Kind.BACKWARD:
            del self._used[action.microbatch]

    def restore(self) -> None:
        """Gives the parameters the newest weights."""
        _give(self._newest)
        self._newest = []

    # --- updates ---

    @contextmanager
    def updating(self, parameters: Iterable[nn.Parameter], counts: bool = True) -> Iterator[None]:
        """Context of an optimizer's step.

        Args:
            parameters: those that it changes, if they have a gradient.
            counts: whether this is the stage's next update.
        """
        changed = [parameter for parameter in parameters if parameter.grad is not None]
        if self.delays:
            old = self._parameters if counts else changed
            self._before |= {id(parameter): parameter.data for parameter in old}
        self.num_updates += counts
        kept = {weight.data_ptr() for weight in self._kept()}
        for parameter in changed:
            if parameter.data_ptr() in kept:
                parameter.data = parameter.data.clone()
        # Autograd compares version counters, which tell it that a tensor has changed that a
        # backward needs. These backwards get the weights of their forward instead.
        with preserved_version_counters(changed):
            yield

    def _kept(self) -> list[Tensor]:
        """The weights that may not change."""
        used = (weight for weights in self._used.values() for _, weight in weights)
        return [*used, *self._before.values(), *list(self._pinned.values())]

    def pin(self, weights: Iterable[Tensor]) -> None:
        """Keeps weights from changes until :meth:`unpin`."""
        self._pinned |= {id(weight): weight for weight in weights}

    def unpin(self, weights: Iterable[Tensor]) -> None:
        """Undoes :meth:`pin`, from any thread."""
        for weight in weights:
            self._pinned.pop(id(weight), None)

    def explained(self, error: RuntimeError) -> LayerError | None:
        """The error for a weight that code outside of optimizers has changed, from torch's."""
        if "modified by an inplace operation" not in str(error):
            return None
        return LayerError(
            "A hook, or `optimizer_step`, has changed a weight in place while minibatches that have"
            " used it are in flight, as an asynchronous schedule has them: their backward needs the"
            " values of their forward. Change it in the `step` of a subclass of your optimizer,"
            ' which gets a copy; or pass `schedule="1f1b"`.'
        )

    def forget(self) -> None:
        """Forgets the minibatches in flight, after an error."""
        self.restore()
        self._used.clear()

    @property
    def num_versions(self) -> int:
        """How many versions there are of the weight that has most."""
        versions = {id(parameter): {parameter.data_ptr()} for parameter in self._parameters}
        for weights in self._used.values():
            for parameter, weight in weights:
                versions.setdefault(id(parameter), set()).add(weight.data_ptr())
        for key, weight in self._before.items():
            versions[key].add(weight.data_ptr())
        return max(map(len, versions.values()), default=1)


class InFlight(NamedTuple):
    """The minibatches in flight, as far as the move of a layer depends on them.

    Args:
        versions: the stage's weights.
        newest: returns how many updates are in the weights that a stage uses in the forward of a
            minibatch.
        earliest: the first minibatch that may be the cut-over; the cut-over is the next one that
            begins an update.
        num_stages: of the deepest virtual machine.
    """

    versions: WeightVersions
    newest: Callable[[int, int], int]
    earliest: int
    num_stages: int


def _give(weights: Weights) -> None:
    for parameter, values in weights:
        if parameter.data_ptr() != values.data_ptr():
            parameter.data = values
