"""Puts off the gradients of weights, for which no other stage waits.

A backward computes the gradients of what a stage has received, and those of its weights. Only the
first are sent on (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2): so they come
first, and a stage computes the others where it would be idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_pipeshift.compat.torch_private import version_of
from lightning_pipeshift.compat.weight_products import (
    LEAF,
    PASSES_ON,
    RUNS_AGAIN,
    WEIGHTS_AT,
    Node,
    Weights,
    computing,
)


class Division(NamedTuple):
    """A backward in two parts.

    Args:
        weights: what comes later.
        others: the leaves whose gradients come first.
    """

    weights: list[Weights]
    others: list[Tensor]


def divided(roots: Sequence[Tensor], token: Tensor) -> Division:
    """Divides a backward. What comes later are the weights of products whose other factor leads to
    what the stage has received, if the product alone uses them.

    Args:
        roots: where the backward begins.
        token: the leaf that all leads to whose gradient other stages get.

    Returns:
        without weights: the backward has to stay whole.
    """
    following: dict[Node, list[Node]] = {}
    before: dict[Node, list[Node]] = {}
    todo: list[Node] = [x.grad_fn for x in roots]
    # Where the backward begins, a gradient comes, too.
    uses = Counter[Node](todo)
    if None in todo:
        # A root that is a leaf is none of those that are found.
        return Division([], [])
    while todo:
        node = todo.pop()
        if node in following:
            continue
        if type(node).__name__ == RUNS_AGAIN:
            # Torch refuses it where a backward asks for some gradients only.
            return Division([], [])
        found = following[node] = [x for x, _ in node.next_functions if x is not None]
        uses.update(found)
        for each in found:
            before.setdefault(each, []).append(node)
        todo += found
    leaves = {node: node.variable for node in following if type(node).__name__ == LEAF}
    if not all(leaf.requires_grad for leaf in leaves.values()):
        # Torch does not compute the gradients of some that have been frozen since.
        return Division([], [])
    todo = [node for node, leaf in leaves.items() if leaf is token]
    sent = set(todo)
    while todo:
        new = [x for x in before.get(todo.pop(), ()) if x not in sent]
        sent.update(new)
        todo += new

    def end_of(node: Node) -> Node | None:
        """The leaf's node behind those that pass a weight on; ``None`` if others use it, too."""
        while node is not None and uses[node] == 1:
            if node in leaves:
                return node
            if type(node).__name__ not in PASSES_ON:
                return None
            (node,) = following[node]
        return None

    weights = []
    for node in following:
        places = WEIGHTS_AT.get(type(node).__name__)
        if places is None or node not in sent:
            continue
        edges = [x for x in map(node.next_functions.__getitem__, places) if x[0] is not None]
        ends = [end for x, _ in edges if (end := end_of(x)) is not None]
        if not edges or len(ends) < len(edges) or not sent.isdisjoint(x for x, _ in edges):
            continue
        how = computing(node)
        if how is not None:
            own = tuple(leaves.pop(end) for end in ends)
            towards = tuple(GradientEdge(*x) for x in edges)
            weights.append(Weights(node, towards, own, how, tuple(map(version_of, how.uses))))
    return Division(weights, list(leaves.values()))
