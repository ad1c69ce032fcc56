"""The inputs of a stage's autograd graph: received payloads, and shared parameters.

For both, the stage passes a tensor to user code whose gradient is stored in a box instead of a
leaf. Such a tensor is not a leaf, so user code may modify it in place; it is neither a view nor a
copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import storage_use_count
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.parameters.uses import ParameterUse
from lightning_pipeshift.model.user_state.random_streams import START, Position

Sums = dict[tuple[str, Position], Tensor]

# In place of a segment's position, for gradients that are of no segment: they are added last.
_NONE: Final[Position] = (-1,)

_CONTAINERS = (tuple, list, dict, slice)

# Inputs that make autograd record the functions below, which have no other differentiable input.
_anchors: dict[torch.device, Tensor] = {}


class GradientBox:
    """Holds the gradient of a tensor that was passed to user code, after the backward."""

    __slots__ = ("gradient", "source")

    may_lack_gradient = True
    """Whether a function that used the tensor may return no gradient for it; zeros then."""

    def __init__(self, source: Tensor) -> None:
        self.source: Tensor | None = source
        self.gradient: Tensor | None = None

    def open(self) -> Tensor:
        """The tensor, to be used in a forward pass; once only."""
        assert self.source is not None
        anchor = _anchors.get(self.source.device)
        if anchor is None or anchor.is_inference():
            with torch.inference_mode(False):
                anchor = torch.zeros((), device=self.source.device, requires_grad=True)
            _anchors[self.source.device] = anchor
        tensor: Tensor = _Open.apply(anchor, self)  # type: ignore[no-untyped-call]
        return tensor

    def take(self, gradient: Tensor | None) -> None:
        """Called in the backward, once for each graph that uses the tensor."""
        self.gradient = gradient


class _Open(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, box: GradientBox) -> Tensor:
        ctx.box = box
        ctx.set_materialize_grads(box.may_lack_gradient)
        source, box.source = box.source, None
        assert source is not None
        return source

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.box.take(gradients[0])
        return None, None


def is_alone(tensor: Tensor) -> bool:
    """Whether nothing else refers to a tensor's memory, so that it may be written to.

    Args:
        tensor: one to which only the caller refers.
    """
    if tensor.requires_grad or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    storage = tensor.untyped_storage()
    return not tensor.is_inference() and storage_use_count(storage) <= 2


def added(total: Tensor, part: Tensor) -> Tensor:
    """The sum of two gradients; in the memory of the first one, if it is alone there."""
    return total.add_(part) if is_alone(total) else total + part


class _SegmentBox(GradientBox):
    __slots__ = ("key", "sums")

    may_lack_gradient = False

    def __init__(self, source: Tensor, sums: Sums, key: tuple[str, Position]) -> None:
        super().__init__(source)
        self.sums = sums
        self.key = key

    def take(self, gradient: Tensor | None) -> None:
        if gradient is None:
            # A module that runs again in the backward refers to the parameter, not to the tensor
            # that this function was given for it.
            raise LayerError(
                f"A function that used the parameter {self.key[0]!r} returned no gradient for it."
                " Does an `autograd.Function` of your model run a module again in its backward?"
                " Use `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)` instead. Or"
                " pass `parameter.detach()` to the function, if it is to have no gradient."
            )
        before = self.sums.get(self.key)
        if before is not None:
            self.sums[self.key] = added(before, gradient)
        else:
            # A tensor of its own: once the graph is gone, nothing else refers to its memory.
            self.sums[self.key] = gradient if gradient.requires_grad else gradient.detach()


class SharedParameters:
    """Collects the gradients of shared parameters separately for each segment. A segment is the
    code between two points where a module with its own random stream begins or ends; segments are
    the same on every split.

    In a layer, the module's slots refer to an alias of each shared parameter. For code between
    layers, an alias replaces each shared parameter that it passes to a function of torch. Where one
    layer alone refers to a parameter, that layer uses the parameter itself: autograd adds up the
    gradients of all its calls in one sum, which counts as that of the segment of the last call.

    Args:
        uses: the shared parameters that this stage holds.
        others: the other parameters that it holds. Code between layers may use them too, if it is
            not traced.
        before: what has been collected with another choice of parameters, and is continued.
    """

    def __init__(
        self,
        uses: list[ParameterUse],
        others: Iterable[ParameterUse] = (),
        before: SharedParameters | None = None,
    ) -> None:
        self.uses = uses
        self.sums: Sums = {} if before is None else before.sums
        """By a parameter's name and the position at which the segment begins."""
        self._names = {id(use.parameter): use.name for use in [*uses, *others]}
        self._by_layer: dict[int, list[ParameterUse]] = {}
        for use in uses:
            for layer in use.used_in:
                if layer != use.own_layer:
                    self._by_layer.setdefault(layer, []).append(use)
        self._segment = START
        self._here: Sequence[ParameterUse] = ()
        """The shared parameters of the current layer."""
        self._aliases: dict[int, Tensor] = {}
        self._replaced: list[ParameterUse] = []
        self._last_call: dict[int, Position] = {} if before is None else before._last_call
        """By layer, the segment in which it was called last."""
        self.was_handed_out = False
        """Whether any alias was passed to user code whose gradients are collected in :attr:`sums`.
        """

    def enter_layer(self, layer: int, is_again: bool = False) -> None:
        """Called when the forward pass enters a layer.

        Args:
            layer: its index.
            is_again: whether a call is recomputed in the backward.
        """
        self._here = self._by_layer.get(layer, ())
        if not is_again:
            self._last_call[layer] = self._segment
        if self._here:
            self._replace()

    def leave_layer(self) -> None:
        """Called when the forward pass leaves a layer."""
        self._here = ()
        if self._aliases or self._replaced:
            self.restore()

    def enter_segment(self, segment: Position) -> None:
        """Called when the forward pass enters another segment.

        Args:
            segment: the position at which it begins.
        """
        self._segment = segment
        if self._aliases or self._replaced:
            self.restore()
        if self._here:
            self._replace()

    def _replace(self) -> None:
        if not torch.is_grad_enabled():
            return
        for use in self._here:
            if use.parameter.requires_grad:
                alias = self._opened(use.parameter, use.name)
                for slot in use.slots:
                    slot.put(alias)
                self._replaced.append(use)

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter that is held here."""
        return id(tensor) in self._names

    def are_used(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a parameter held here may be among the arguments of a function: a quick check,
        which does not search nested lists.
        """
        names = self._names
        for values in (args, kwargs.values()) if kwargs else (args,):
            for value in values:
                if id(value) in names or isinstance(value, _CONTAINERS):
                    return True
        return False

    def alias(self, parameter: Tensor) -> Tensor:
        """Returns the alias that code between layers uses for a parameter."""
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return parameter
        alias = self._aliases.get(id(parameter))
        if alias is None:
            alias = self._opened(parameter, self._names[id(parameter)])
            self._aliases[id(parameter)] = alias
        return alias

    def _opened(self, parameter: Tensor, name: str) -> Tensor:
        self.was_handed_out = True
        # `detach` shares the memory and the version counter, so autograd still notices changes of
        # the parameter.
        return _SegmentBox(parameter.detach(), self.sums, (name, self._segment)).open()

    def restore(self) -> None:
        """Makes the model refer to the parameters themselves again."""
        self._aliases = {}
        for use in self._replaced:
            for slot in use.slots:
                slot.put(use.parameter)
        self._replaced = []

    def begin_step(self) -> None:
        """Discards the gradients of the previous step."""
        self.sums.clear()
        self.was_handed_out = False

    def total(self, use: ParameterUse, start: Tensor | None) -> Tensor | None:
        """``start`` plus the gradients of this stage's segments, from the last segment to the
        first, as a backward makes them; ``None`` if there are no such gradients. Afterwards they
        are no longer here.
        """
        segments = sorted((s for name, s in self.sums if name == use.name), reverse=True)
        for segment in segments:
            part = self.sums.pop((use.name, segment))
            start = part if start is None else added(start, part)
        return start

    def take_own(self, uses: Iterable[ParameterUse]) -> None:
        """Adds the gradients that have accumulated in shared parameters themselves to those of the
        segments.

        Args:
            uses: the parameters that are held here. One of them may have turned out to be shared
                during the step.
        """
        shared = {use.name for use in self.uses} | {name for name, _ in self.sums}
        for use in uses:
            if use.name in shared and use.parameter.grad is not None:
                layer = use.own_layer
                segment = _NONE if layer is None else self._last_call.get(layer, _NONE)
                self.sums[use.name, segment] = use.parameter.grad
                use.parameter.grad = None
