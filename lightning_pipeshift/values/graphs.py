"""Which values are connected by their gradients: one backward goes through all of them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.values.gradients import Way
from lightning_pipeshift.values.value import Value, user_line

if TYPE_CHECKING:
    from lightning_pipeshift.values.account import Account
    from lightning_pipeshift.values.calls import Call


ToLater = tuple[int, int, str]
"""The first stage that sends a gradient to a later stage, the last stage that receives such a
gradient, and the operation or layer that uses the value there."""


class Graph:
    """Values that are connected by their gradients: what one backward goes through, and uses up.
    Every stage has the same graphs; here is what this stage has of one.

    Args:
        step: the run and the microbatch that it belongs to.
        used_at: for what has a part in a graph that is used up: the operation or layer that used
            it, and the user's line.
    """

    __slots__ = (
        "__weakref__",
        "_into",
        "_latest",
        "has_links",
        "is_used",
        "step",
        "to_later",
        "tokens",
        "used_at",
    )

    def __init__(self, step: tuple[int, int], used_at: str = "") -> None:
        self.step, self.used_at = step, used_at
        self.tokens: list[Tensor] = []
        """The ends of chains of nodes: together they reach all of this stage's links."""
        self.has_links = False
        """Whether any stage has links in it."""
        self.is_used = bool(used_at)
        """Whether a backward has gone through it, or its step is over."""
        self.to_later: ToLater | None = None
        """Of its gradients, those that an earlier stage sends to a later one."""
        self._latest: tuple[int, Way | None] = -1, None
        self._into: Graph | None = None

    @property
    def whole(self) -> Graph:
        """The graph that this one is a part of by now."""
        graph = self
        while graph._into is not None:
            # So that a long row of joined graphs is followed once only.
            graph._into = graph._into._into or graph._into
            graph = graph._into
        return graph

    @property
    def first(self) -> Way | None:
        """How the gradient comes that this stage's backward waits for first; ``None`` if it can
        begin.
        """
        return self._latest[1]

    def add(self, token: Tensor, way: Way, is_received: bool) -> None:
        """Adds one of this stage's links.

        Args:
            token: its end of the chain.
            way: of its gradient.
            is_received: whether that comes to this stage.
        """
        self.tokens.append(token)
        self._latest = way.serial, way if is_received else None

    def join(self, other: Graph) -> Graph:
        """Makes two graphs one; returns it."""
        one, other = self.whole, other.whole
        if one is other:
            return one
        other._into = one
        one.has_links |= other.has_links
        one.to_later = _both(one.to_later, other.to_later)
        one.tokens += other.tokens
        other.tokens.clear()
        # The backward runs the latest link first.
        one._latest = max(one._latest, other._latest, key=itemgetter(0))
        return one

    def end(self) -> None:
        """A backward has gone through it, or its step is over."""
        self.is_used = True
        self.tokens.clear()


class Graphs:
    """The graphs of a program's values.

    Args:
        step: the run and the microbatch.
        device: of this stage.
    """

    def __init__(self, step: tuple[int, int], device: torch.device) -> None:
        self._step, self._device = step, device
        self._graphs: list[weakref.ref[Graph]] = []
        self.sends = False
        """Whether any gradient leaves this stage."""
        self._token: Tensor | None = None
        """The leaf tensor at the beginning of each chain of links."""
        self.entered: Graph | None = None
        """That of the common tensors whose gradient the present call needs."""

    @property
    def to_later(self) -> ToLater | None:
        """Of the gradients that are still to come, those that an earlier stage sends to a later
        one.
        """
        found: ToLater | None = None
        for each in self._graphs:
            graph = each()
            if graph is not None and not graph.whole.is_used:
                found = _both(found, graph.whole.to_later)
        return found

    def release(self) -> None:
        """Lets go of all tensors."""
        for each in self._graphs:
            if (graph := each()) is not None:
                graph.end()
        self._graphs.clear()
        self._token = None

    def new_graph(self) -> Graph:
        """A graph of nothing so far."""
        graph = Graph(self._step)
        self._graphs.append(weakref.ref(graph))
        return graph

    def joined(self, call: Call, accounts: Mapping[Tensor, Account]) -> Graph:
        """The graph of what a call returns that needs a gradient: those of what it uses, which it
        makes one. A leaf that no other stage has used is in none: its gradients are summed where it
        is, by as many backwards as there are.

        Args:
            call: the call.
            accounts: of parameters.
        """
        tensors = call.arguments.tensors
        used = range(len(tensors)) if call.contract is None else call.contract.used
        found = self.entered
        candidates = [tensors[at] for at in used]
        if call.parameters:
            candidates += [x for _, x in call.parameters]
        for tensor in candidates:
            account = tensor.account if type(tensor) is Value else accounts.get(tensor)
            if account is None or account.graph is None or not account.requires_grad:
                continue
            graph = account.graph.whole
            if graph.is_used or account.graph.step != self._step:
                return Graph(self._step, graph.used_at or f"`{call.label}` ({user_line()})")
            if found is not graph:
                found = graph if found is None else found.join(graph)
        return found or self.new_graph()

    def is_used(self, account: Account) -> bool:
        """Whether a backward has gone through the graph of a value, or its step is over."""
        graph = account.graph
        return graph is not None and (graph.whole.is_used or graph.step != self._step)

    def require_unused(self, loss: Tensor) -> None:
        """Raises LayerError for a loss that has a part in a graph which is used up."""
        if isinstance(loss, Value) and self.is_used(loss.account):
            assert loss.account.graph is not None
            where = loss.account.graph.whole.used_at or f"`backward` ({user_line()})"
            raise LayerError(
                f"{where} needs the gradient of a value that an earlier `backward` has gone"
                " through, or of an earlier step. With several stages a `backward` uses up all that"
                " is connected with its loss: compute the value again, `detach()` it, or call"
                " `backward` once for the sum of the losses."
            )

    def begin(self, graph: Graph, source: int, last: int, label: str) -> None:
        """Notes a link in a graph.

        Args:
            graph: the graph.
            source: the stage that sends its gradient.
            last: the latest stage that receives it.
            label: of what uses the value.
        """
        graph.has_links = True
        known = graph.to_later
        # Only then: to find the user's line takes time.
        if source < last and (known is None or source < known[0] or last > known[1]):
            graph.to_later = _both((source, last, f"`{label}` ({user_line()})"), known)

    @property
    def token(self) -> Tensor | None:
        """The leaf that all of this stage's links lead to; ``None`` if it sends no gradients."""
        return self._token if self.sends else None

    def token_of(self, graph: Graph) -> Tensor:
        """Returns the token that the graph's next link takes as its input."""
        if graph.tokens:
            return graph.tokens.pop()
        if self._token is None:
            self._token = torch.zeros((), device=self._device, requires_grad=True)
        return self._token

    def with_token(self, only: Any) -> Any:
        """The tensors whose gradients a backward computes, of which this stage has some; ``None``
        for all. Else a backward for some of them would leave out what leads to other stages.
        """
        return only if only is None or self._token is None else [*only, self._token]


def _both(one: ToLater | None, other: ToLater | None) -> ToLater | None:
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1]), one[2]
