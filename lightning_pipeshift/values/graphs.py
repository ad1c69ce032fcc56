"""Which values are connected by their gradients: one backward goes through all of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from operator import attrgetter, itemgetter
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


class Segment:
    """A part of a graph on this stage. No gradient connects it here with the others, and its links
    lie between theirs in the program: so the stage may run its backward by itself.

    Args:
        begin: its place in the program.
    """

    __slots__ = ("_into", "awaited", "begin", "end", "keys", "tokens")

    def __init__(self, begin: int) -> None:
        self.begin = self.end = begin
        self.tokens: list[Tensor] = []
        """The ends of chains of nodes: together they reach all of its links."""
        self.awaited: list[tuple[int, Way]] = []
        """How the gradients come that it receives, with their places in the program."""
        self.keys: set[int] = set()
        """Of the layers and parameters whose gradients it computes: see :attr:`Core.groups`."""
        self._into: Segment | None = None

    @property
    def whole(self) -> Segment:
        """The segment that this one is a part of by now."""
        segment = self
        while segment._into is not None:
            segment = segment._into
        return segment

    @property
    def ways(self) -> tuple[Way | None, ...]:
        """How the gradients come that its backward waits for, in the order in which it does;
        ``None`` in front of them if it can begin without.
        """
        # The backward runs the latest link first.
        awaited = sorted(self.awaited, key=itemgetter(0), reverse=True)
        begins = () if awaited and awaited[0][0] == self.end else (None,)
        return *begins, *(way for _, way in awaited)

    def take(self, other: Segment) -> None:
        """Makes another segment a part of this one."""
        other._into = self
        self.begin, self.end = min(self.begin, other.begin), max(self.end, other.end)
        self.tokens += other.tokens
        self.awaited += other.awaited
        self.keys |= other.keys
        other.tokens, other.awaited = [], []


class Graph:
    """Values that are connected by their gradients: what one backward goes through, and uses up.
    Every stage has the same graphs; here is what this stage has of one.

    Args:
        step: the run and the microbatch that it belongs to.
        used_at: for what has a part in a graph that is used up: the operation or layer that used
            it, and the user's line.
        is_divided: whether this stage may run its backward in several parts.
    """

    __slots__ = (
        "__weakref__",
        "_into",
        "has_links",
        "is_divided",
        "is_used",
        "segments",
        "step",
        "to_later",
        "used_at",
        "users",
    )

    def __init__(self, step: tuple[int, int], used_at: str = "", is_divided: bool = False) -> None:
        self.step, self.used_at, self.is_divided = step, used_at, is_divided
        self.segments: list[Segment] = []
        """In the order of the program."""
        self.users: dict[int, Segment] = {}
        """By the key of a layer or a parameter: the segment that has used it."""
        self.has_links = False
        """Whether any stage has links in it."""
        self.is_used = bool(used_at)
        """Whether a backward has gone through it, or its step is over."""
        self.to_later: ToLater | None = None
        """Of its gradients, those that an earlier stage sends to a later one."""
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
    def tokens(self) -> list[Tensor]:
        """The ends of chains of nodes: together they reach all of this stage's links."""
        return [token for segment in self.segments for token in segment.tokens]

    def join(self, other: Graph) -> Graph:
        """Makes two graphs one; returns it."""
        one, other = self.whole, other.whole
        if one is other:
            return one
        other._into = one
        one.has_links |= other.has_links
        one.to_later = _both(one.to_later, other.to_later)
        one.is_divided &= other.is_divided
        one.segments += other.segments
        one.segments.sort(key=attrgetter("begin"))
        other.segments = []
        for key, segment in other.users.items():
            one.merge([segment, one.users.setdefault(key, segment)])
        at = 0
        while at + 1 < len(one.segments):
            before, behind = one.segments[at : at + 2]
            if one.is_divided and before.end < behind.begin:
                at += 1
            else:
                one.merge([before, behind])
        return one

    def keep_whole(self) -> None:
        """From now on, this stage runs its backward as a whole."""
        self.is_divided = False
        if self.segments:
            self.merge([self.segments[0], self.segments[-1]])

    def merge(self, segments: Iterable[Segment]) -> Segment:
        """Makes some of its segments, and those between them, one; returns that."""
        places = [self.segments.index(each.whole) for each in segments]
        first, *others = self.segments[min(places) : max(places) + 1]
        for each in others:
            first.take(each)
            self.segments.remove(each)
        return first

    def end(self) -> None:
        """A backward has gone through it, or its step is over."""
        self.is_used = True
        for segment in self.segments:
            segment.tokens.clear()
            segment.awaited.clear()
        self.users.clear()


class Graphs:
    """The graphs of a program's values.

    Args:
        step: the run and the microbatch.
        device: of this stage.
    """

    def __init__(self, step: tuple[int, int], device: torch.device) -> None:
        self._step, self._device = step, device
        self.is_divided = False
        """Whether this stage may run backwards in several parts."""
        self.segment: Segment | None = None
        """That of what the present call, of this stage, returns."""
        # Counts links and segments.
        self._place = 0
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

    def keep_whole(self) -> None:
        """From now on, this stage runs backwards as a whole: what hooks see keeps its order."""
        self.is_divided = False
        for each in self._graphs:
            if (graph := each()) is not None:
                graph.whole.keep_whole()

    def new_graph(self) -> Graph:
        """A graph of nothing so far."""
        graph = Graph(self._step, is_divided=self.is_divided)
        self._graphs.append(weakref.ref(graph))
        return graph

    def joined(
        self, call: Call, accounts: Mapping[Tensor, Account], keys: Iterable[int] | None
    ) -> Graph:
        """The graph of what a call returns that needs a gradient: those of what it uses, which it
        makes one. A leaf that no other stage has used is in none: its gradients are summed where it
        is, by as many backwards as there are.

        Args:
            call: the call.
            accounts: of parameters.
            keys: of its layer and its parameters, if this stage runs it, and may run its backward
                in parts: see :attr:`Segment.keys`.
        """
        tensors = call.arguments.tensors
        used = range(len(tensors)) if call.contract is None else call.contract.used
        found = self.entered
        candidates = [tensors[at] for at in used]
        if call.parameters:
            candidates += [x for _, x in call.parameters]
        self.segment, segments = None, []
        for tensor in candidates:
            account = tensor.account if type(tensor) is Value else accounts.get(tensor)
            if account is None or account.graph is None or not account.requires_grad:
                continue
            graph = account.graph.whole
            if graph.is_used or account.graph.step != self._step:
                return Graph(self._step, graph.used_at or f"`{call.label}` ({user_line()})")
            if found is not graph:
                found = graph if found is None else found.join(graph)
            if keys is not None and account.segment is not None:
                segments.append(account.segment)
        found = found or self.new_graph()
        if keys is not None:
            if any(map(_is_leaf, candidates)):
                # Segments would sum its gradient in another order.
                found.keep_whole()
            self.segment = self._used(found, keys, segments)
        return found

    def _used(self, graph: Graph, keys: Iterable[int], segments: list[Segment]) -> Segment:
        """The segment of a use of layers and parameters, by their keys, and of values in these
        segments.
        """
        known = [*segments, *(graph.users[key] for key in keys if key in graph.users)]
        segment = graph.merge(known) if known else self.new_segment(graph)
        segment.keys.update(keys)
        graph.users.update(dict.fromkeys(keys, segment))
        return segment

    def new_segment(self, graph: Graph) -> Segment:
        """A segment of nothing so far; the only one of a graph that is not divided."""
        if not graph.segments or graph.is_divided:
            self._place += 1
            graph.segments.append(Segment(self._place))
        return graph.segments[-1]

    def segment_of(self, graph: Graph, account: Account, keys: Iterable[int]) -> Segment:
        """The segment of a value's next link.

        Args:
            graph: the value's.
            account: of the value.
            keys: of a parameter.
        """
        if not graph.is_divided:
            return self.new_segment(graph)
        if account.segment is None:
            return self._used(graph, keys, [])
        # A link of an earlier one lies behind those of the later ones.
        return graph.merge([account.segment, graph.segments[-1]])

    def add(self, segment: Segment, token: Tensor, way: Way, is_received: bool) -> None:
        """Adds one of this stage's links.

        Args:
            segment: to which it is added.
            token: its end of the chain.
            way: of its gradient.
            is_received: whether that comes to this stage.
        """
        self._place += 1
        segment.tokens.append(token)
        segment.end = self._place
        if is_received:
            segment.awaited.append((self._place, way))

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

    def token_of(self, segment: Segment) -> Tensor:
        """Returns the token that the next link of a segment takes as its input."""
        if segment.tokens:
            return segment.tokens.pop()
        if self._token is None:
            self._token = torch.zeros((), device=self._device, requires_grad=True)
        return self._token

    def with_token(self, only: Any) -> Any:
        """The tensors whose gradients a backward computes, of which this stage has some; ``None``
        for all. Else a backward for some of them would leave out what leads to other stages.
        """
        return only if only is None or self._token is None else [*only, self._token]


def _is_leaf(x: Tensor) -> bool:
    return type(x) is Value and x.account.requires_grad and x.account.segment is None


def _both(one: ToLater | None, other: ToLater | None) -> ToLater | None:
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1]), one[2]
