"""The backward on one stage: it goes through this stage's part of the graphs of the losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import without_torch_function_of_subclasses
from lightning_pipeshift.errors import LayerError, PipeShiftError
from lightning_pipeshift.values.gradients import Way
from lightning_pipeshift.values.graphs import Graph, Segment
from lightning_pipeshift.values.value import PLACED, Value, run_by, user_line

if TYPE_CHECKING:
    from lightning_pipeshift.values.microbatch import Microbatch


def run_backward(
    program: Microbatch,
    loss: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Runs this stage's part of the backward. Every rank calls this; other arguments as those of
    ``Tensor.backward``.

    Args:
        program: whose values are gone through.
    """
    _require_first_order(program, "backward", create_graph, [gradient])
    program.note("backward", bool(retain_graph))
    only = None if inputs is None else program.plain(inputs)
    if inputs is not None and not program.is_alone:
        several = [inputs] if isinstance(inputs, Tensor) else inputs
        only = [here for x in several if (here := _here(program, x)) is not None]

    def run(roots: list[Tensor], gradients: list[Tensor | None]) -> None:
        asked = program.graphs.with_token(only)
        torch.autograd.backward(roots, gradients, retain_graph, create_graph, inputs=asked)

    _go_back(program, [loss], [gradient], run, bool(retain_graph))
    program.gradients = None


def gradients_of(
    program: Microbatch,
    losses: Sequence[Tensor],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    is_kept: bool,
    is_more: bool,
) -> list[Tensor | None]:
    """The gradients of losses, where this stage has the inputs. Every rank calls this.

    Args:
        program: whose values are gone through.
        losses: values, or tensors that every stage has.
        inputs: likewise.
        gradients: of the losses; ``None`` for one.
        is_kept: whether another backward may follow.
        is_more: whether gradients of the gradients, or several of each, are wanted.
    """
    _require_first_order(program, "torch.autograd.grad", is_more, gradients)
    program.note("grad", is_kept)
    wanted = {at: here for at, x in enumerate(inputs) if (here := _here(program, x)) is not None}
    found: dict[int, Tensor] = {}

    def run(roots: list[Tensor], of_roots: list[Tensor | None]) -> None:
        asked = program.graphs.with_token(list(wanted.values()))
        if asked:
            here = torch.autograd.grad(
                roots, asked, of_roots, retain_graph=is_kept, allow_unused=True
            )
            found.update(zip(wanted, here, strict=False))

    _go_back(program, losses, gradients, run, is_kept)
    return [found.get(at) for at in range(len(inputs))]


def _require_first_order(
    program: Microbatch, label: str, is_more: bool, gradients: Sequence[Tensor | None]
) -> None:
    has_values = any(isinstance(gradient, Value) for gradient in gradients)
    if not program.is_alone and (is_more or has_values):
        raise LayerError(
            f"`{label}` ({user_line()}) with `create_graph`, `is_grads_batched`, or a gradient"
            " that one stage owns is not supported across layers. Compute second derivatives"
            " inside of one layer."
        )


def _here(program: Microbatch, tensor: Tensor) -> Tensor | None:
    """The plain tensor on this stage whose gradient is wanted; ``None`` if it is elsewhere."""
    if type(tensor) not in PLACED:
        return tensor if tensor.requires_grad else None
    program.place_parameters([tensor])
    return program.owned(tensor) if program.account_of(tensor).requires_grad else None


def _go_back(
    program: Microbatch,
    losses: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    run: Callable[[list[Tensor], list[Tensor | None]], None],
    is_kept: bool,
) -> None:
    """Runs a backward.

    Args:
        program: whose values are gone through.
        losses: where it begins.
        gradients: of the losses; ``None`` for one.
        run: calls torch with this stage's roots, and with their gradients.
        is_kept: whether another backward may follow.
    """
    graphs: dict[Graph, None] = {}
    roots: list[Tensor] = []
    of_roots: list[Tensor | None] = []
    for loss, gradient in zip(losses, gradients, strict=True):
        graph, link, _ = _root(program, loss)
        if graph is not None:
            graphs[graph] = None
        if link is not None:
            roots.append(link)
            of_roots.append(program.plain(gradient))
    if any(graph.has_links for graph in graphs):
        program.begins_backward()
    program.finish_gradients()
    for graph in graphs:
        roots += graph.tokens
        of_roots += map(torch.zeros_like, graph.tokens)
    if roots:
        run_part(program, partial(run, roots, of_roots))
    if not program.is_alone:
        program.end_graphs(graphs, is_kept)


def _root(program: Microbatch, loss: Tensor) -> tuple[Graph | None, Tensor | None, Segment | None]:
    """The graph of a loss; where its backward begins, if that is on this stage; and the segment of
    this.
    """
    program.graphs.require_unused(loss)
    graph = program.graph_of(loss)
    if type(loss) not in PLACED:
        return graph, loss, None
    account = program.account_of(loss)
    account.refresh()
    if account.last != program.stage:
        return graph, None, None
    assert account.link is not None
    return graph, account.link, account.segment


class Part(NamedTuple):
    """A part of a backward on this stage, which no gradient connects here with the others.

    Args:
        roots: where torch begins.
        gradients: of the roots.
        ways: how the gradients come that it waits for: see :attr:`Segment.ways`.
        keys: of the layers and parameters whose gradients it computes: see :attr:`Core.groups`;
            ``None``: of any.
    """

    roots: list[Tensor]
    gradients: list[Tensor | None]
    ways: Sequence[Way | None]
    keys: Set[int] | None


def begin_backward(program: Microbatch, loss: Tensor) -> list[Part]:
    """Begins the backward of a loss that a schedule runs in parts: see :func:`run_part`. Returns
    this stage's parts, the first one last. :func:`end_backward` ends it. Every rank calls this.
    """
    graph, root, of_root = _root(program, loss)
    if graph is not None and root is not None and of_root is None:
        # A leaf.
        graph.keep_whole()
    segments = [] if graph is None else graph.segments
    is_divided = len(segments) > 1
    parts = [
        Part(
            list(each.tokens),
            list(map(torch.zeros_like, each.tokens)),
            each.ways,
            each.keys if is_divided else None,
        )
        for each in segments
    ]
    if root is not None:
        parts = parts or [Part([], [], (None,), None)]
        first = parts[-1 if of_root is None else segments.index(of_root.whole)]
        first.roots.insert(0, root)
        first.gradients.insert(0, None)
    return [part for part in parts if part.roots]


def end_backward(program: Microbatch, loss: Tensor) -> None:
    """Ends a backward whose parts have run."""
    program.note("backward", False)
    program.gradients = None
    graph = program.graph_of(loss)
    if not program.is_alone:
        program.end_graphs([] if graph is None else [graph], False)


def run_part(program: Microbatch, run: Callable[[], None]) -> None:
    """Runs a part of a backward on this stage.

    Args:
        program: whose.
        run: calls torch.

    Raises:
        LayerError: what the backward needs has been written to.
    """
    program.is_in_backward = True
    begin = None if program.timer is None else program.timer.now()
    try:
        with run_by(None), without_torch_function_of_subclasses():
            run()
    except PipeShiftError:
        # The words of another stage's error may be any.
        raise
    except RuntimeError as error:
        found = None if program.finite is None else program.finite.backward(error)
        if found is not None:
            raise found from error
        if "modified by an inplace operation" not in str(error):
            raise
        raise LayerError(
            f"{error} With several stages the backward also goes through what another stage"
            " has used and the loss does not depend on. Use an operation that returns a new"
            " tensor (`x = x * 2` in place of `x.mul_(2)`)."
        ) from error
    finally:
        program.is_in_backward = False
    if program.timer is not None:
        program.timer.end_backward(begin)
