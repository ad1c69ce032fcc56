"""Runs a layer on made-up values, when it cannot be traced without values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import NO_VALUES
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.execution.trees import flatten
from lightning_pipeshift.model.gates.gate import Gate
from lightning_pipeshift.model.gates.side_outputs import SideOutput
from lightning_pipeshift.model.parameters.gradient_box import GradientBox
from lightning_pipeshift.model.parameters.uses import substituted
from lightning_pipeshift.model.trace.graph_links import joined
from lightning_pipeshift.model.trace.placeholder import Placeholder


def with_side_outputs(gate: Gate, output: Any) -> tuple[Any, list[SideOutput]]:
    """A layer's result, and the side outputs of the call that has just ended."""
    return output, gate.reports.take() if gate.reports is not None else []


def run_made_up(
    gate: Gate,
    slots: Sequence[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    error: Exception,
) -> tuple[Any, list[SideOutput]]:
    """Runs a layer on real tensors of ones, for a layer that needs real values.

    Args:
        gate: that of the layer.
        slots: its parameters and buffers.
        args: the arguments of the call, as are the next ones.
        kwargs: by name.
        device: that of the placeholders which are returned.
        error: what the layer has raised without values; raised again if it needs others.

    Returns:
        its result, and its side outputs, as placeholders.
    """
    leaves, rebuild = flatten((args, kwargs))
    sources = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]

    def made_up(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Placeholder) and not tensor.is_meta:
            return tensor.detach().clone()
        return torch.ones(tensor.shape, dtype=tensor.dtype, device=device)

    def argument(tensor: Tensor) -> Tensor:
        # What is computed from it shows whether gradients flow to it. The layer may write to it.
        number = made_up(tensor)
        return GradientBox(number).open() if tensor.requires_grad else number

    numbers = [argument(x) if isinstance(x, Tensor) else x for x in leaves]
    real: dict[int, Tensor] = {}
    for slot in slots:
        tensor = slot.get()
        if tensor is not None and id(tensor) not in real:
            real[id(tensor)] = made_up(tensor).requires_grad_(tensor.requires_grad)
            if tensor.requires_grad:
                sources.append(real[id(tensor)])
    real_args, real_kwargs = rebuild(numbers)
    try:
        with substituted(slots, real):
            output = with_side_outputs(gate, gate.run(*real_args, **real_kwargs))
    except Exception:
        if NO_VALUES not in str(error):
            raise error from None
        raise LayerError(
            f"The layer {gate.name!r} is given a value that decides how it runs, and cannot run on"
            " other values: a `PackedSequence`, for example, which another layer has made. Stages"
            " that lack such a value cannot tell what the layer returns. Let one module make the"
            " value and use it (return it from `configure_layers()` if it is not a layer yet)."
        ) from None
    outputs, rebuild_output = flatten(output, opens_objects=True)
    needs_gradient = bool(sources) and torch.is_grad_enabled()
    found: list[Any] = []
    for leaf in outputs:
        if isinstance(leaf, Tensor):
            is_tracked = needs_gradient and leaf.requires_grad
            leaf = joined(leaf.detach(), device, sources if is_tracked else [])
        found.append(leaf)
    made: tuple[Any, list[SideOutput]] = rebuild_output(found)
    return made
