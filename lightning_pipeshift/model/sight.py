"""What a recorder of flows sees besides placeholders: parameters that are used directly, draws, and
shapes made of the batch's values."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pipeshift.model.placeholder import Placeholder
from lightning_pipeshift.model.trees import leaves_of, map_leaves


class Seeing(Protocol):
    """Who is told."""

    inside: Any

    def is_parameter(self, tensor: object) -> bool:
        """Whether a tensor is one of the model's parameters."""

    def touch(self, parameter: Tensor) -> None:
        """A parameter itself is used."""

    def drew(self) -> None:
        """A random function was called on real tensors."""

    def shaped_by_batch(self) -> None:
        """A shape is made of the values of a real tensor."""


class TouchedParameters(TorchFunctionMode):
    """Sees every torch function that is called with a parameter itself, which inside its layer is a
    stand-in.
    """

    # What a parameter's name, shape and type say is known on every stage.
    _HARMLESS = frozenset(
        {
            "shape",
            "dtype",
            "ndim",
            "requires_grad",
            "layout",
            "is_leaf",
            "is_sparse",
            "names",
            "itemsize",
        }
    )

    def __init__(self, recorder: Seeing) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor:
            # It reads its arguments' memory, which placeholders have none of.
            args = map_leaves(lambda x: x.item() if isinstance(x, Placeholder) else x, args)
        for leaf in leaves_of((args, kwargs)):
            if self._recorder.is_parameter(leaf) and not self._is_harmless(func):
                self._recorder.touch(leaf)
        before = torch.default_generator.get_state() if self._recorder.inside is None else None
        result = func(*args, **kwargs)
        if before is not None and not torch.equal(before, torch.default_generator.get_state()):
            self._recorder.drew()
        return result

    def _is_harmless(self, func: Any) -> bool:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            owner = getattr(func, "__self__", None)
            return getattr(owner, "__name__", "") in self._HARMLESS
        return name in (
            "size",
            "dim",
            "numel",
            "__len__",
            "element_size",
            "is_floating_point",
            "is_complex",
            "__repr__",
        )


class BatchValues(TorchDispatchMode):
    """Sees where a shape is made of the values of the batch: such a flow holds for this batch only.

    Conditions (``if mask.all():``) are not counted: they seldom change a shape, and a stage notices
    when they do.
    """

    def __init__(self, recorder: Seeing) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not any(issubclass(kind, Placeholder) for kind in types) and _makes_shape(func, args):
            self._recorder.shaped_by_batch()
        return func(*args, **(kwargs or {}))


def _makes_shape(func: Any, args: tuple[Any, ...]) -> bool:
    name = func._schema.name
    if name == "aten::_local_scalar_dense":
        dtype = args[0].dtype
        return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    if name == "aten::index":
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return torch.Tag.dynamic_output_shape in func.tags
