"""Where the bytes of a value are, and where its gradient is summed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.runtime.comm.messages import Key

if TYPE_CHECKING:
    from lightning_pipeshift.values.graphs import Graph, Segment


SEVERAL = -1
"""See :attr:`Account.layer`."""


class Memory:
    """The memory that a value shares with its views.

    Attributes:
        accounts: of the values that share it.
        offers: the messages that could carry its bytes as they are now: see :meth:`Mailbox.offer`.
        num_writes: how often an operation has written to it.
        writer: the stage of the last write; ``None`` before the first.
        of: the parameter or buffer whose memory it is, if there is one.
        has_returned: whether a value's consumers were at another stage and are at its owner again:
            they use another tensor there, whose history a write through a view would reach alone.
    """

    __slots__ = ("accounts", "has_returned", "num_writes", "of", "offers", "writer")

    def __init__(self, of: Tensor | None = None) -> None:
        self.of = of
        self.accounts: list[weakref.ref[Account]] = []
        self.offers: list[Key] = []
        self.num_writes = 0
        self.writer: int | None = None
        self.has_returned = False

    def write(self, stage: int) -> list[Account]:
        """Notes that an operation at a stage has written to the memory; returns the accounts of the
        values there.
        """
        self.num_writes += 1
        self.writer = stage
        self.has_returned = False
        return [account for each in self.accounts if (account := each()) is not None]

    def renumber(self, numbers: Sequence[int]) -> None:
        """See :meth:`Core.renumber`."""
        self.writer = None if self.writer is None else numbers[self.writer]
        self.offers = [key._replace(source=numbers[key.source]) for key in self.offers]


class Account:
    """Where a value is, and how its gradient travels: the same on every stage. On the stages that
    have the value, also the tensor.

    The consumers of a value at other stages form a chain, in program order. Each link of the chain
    is one stage's run of consumers; in the backward, a link's gradient goes to the link before it,
    and is the first term of the sum there. So the terms are added in the order of plain autograd.

    Attributes:
        owner: the stage that computed the value.
        requires_grad: whether the value needs a gradient.
        tensor: the value, at its owner and where it was sent; ``None`` elsewhere.
        holders: the stages that have the bytes.
        last: the stage of the latest consumers: the end of the chain.
        link: here, the tensor that consumers use while ``last`` is this stage.
        memory: shared with the value's views.
        has_left: whether consumers elsewhere have used it with its gradient: ``link`` may be
            another tensor with the same memory then.
        graph: what its gradient is a part of; ``None`` for a leaf that nothing has used so far.
        segment: the part of that graph on this stage that ``link`` belongs to; ``None`` for a leaf,
            and where backwards are not divided.
        name: the run, the microbatch and the number of the value in it; ``None``: a parameter.
        sent_at: at the owner: how often the tensor had been written to when it was sent first.
        version: how often the memory had been written to when the bytes were computed.
        seen: here, what another stage has sent for a read; it may be of a write before.
        layer: the number of the only layer that it is computed from, between two steps: an average
            of its parameters, which moves with it; :data:`SEVERAL`: there is more than one;
            ``None``: of no parameter.
    """

    __slots__ = (
        "__weakref__",
        "graph",
        "has_left",
        "holders",
        "last",
        "layer",
        "link",
        "memory",
        "name",
        "owner",
        "requires_grad",
        "seen",
        "segment",
        "sent_at",
        "tensor",
        "version",
    )

    def __init__(
        self, owner: int, requires_grad: bool, tensor: Tensor | None, memory: Memory | None = None
    ) -> None:
        self.requires_grad = requires_grad
        self.memory = Memory() if memory is None else memory
        self.memory.accounts.append(weakref.ref(self))
        self.graph: Graph | None = None
        self.segment: Segment | None = None
        self.name: tuple[int, int, int] | None = None
        self.seen: tuple[int, Tensor] | None = None
        self.layer: int | None = None
        self.begin(owner, tensor)

    def begin(self, owner: int, tensor: Tensor | None) -> None:
        """Resets the account to a tensor that only its owner has, as after a write."""
        self.owner = owner
        self.tensor = self.link = tensor
        self.holders = {owner}
        self.last = owner
        self.has_left = False
        self.sent_at: int | None = None
        self.version = self.memory.num_writes

    def renumber(self, numbers: Sequence[int]) -> None:
        """See :meth:`Core.renumber`."""
        self.owner, self.last = numbers[self.owner], numbers[self.last]
        self.holders = {numbers[stage] for stage in self.holders}

    def refresh(self) -> None:
        """Forgets the copies at other stages if the memory was written to, through a view perhaps.

        Raises:
            LayerError: another stage wrote to its copy of this memory, so the owner's is old.
        """
        if self.version == self.memory.num_writes:
            return
        if self.memory.writer != self.owner:
            raise LayerError(
                f"Stage {self.memory.writer} has written in place to a view of a value that stage"
                f" {self.owner} owns, and the value is used again. The write went to a copy. Use an"
                " operation that returns a new tensor (`x = x + y`, `torch.where`) in place of the"
                " one that writes."
            )
        self.begin(self.owner, self.tensor)
