"""Placeholders for tensors on another stage.

A placeholder has the shape, type and device of the tensor it represents, but no memory, and records
the layer outputs from which it was computed. User code between layers runs on placeholders as on
tensors; the results are placeholders. So the same mechanism traces the tensors of a step, and skips
the layers of other stages. Where a value is needed, a placeholder raises an error at once: a silent
wrong number is impossible.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch

from lightning_pipeshift.compat.torch_private import (
    INDEX_PUT,
    make_wrapper_subclass,
    no_dispatch,
    no_torch_function,
    pytree,
    schema_of,
)
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.trace.conditions import ADVICE
from lightning_pipeshift.model.trace.schema import written_arguments
from lightning_pipeshift.plan.inputs.flow import TensorSpec, Value

META = torch.device("meta")
_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", INDEX_PUT})


class Origin:
    """The origin of the placeholders of one memory; views share it.

    Args:
        values: the layer outputs from which they were computed.
        inside: the call whose forward pass computed it, ``None`` for user code between layers.
    """

    __slots__ = ("inside", "num_writes", "values", "written_by")

    def __init__(self, values: Iterable[Value], inside: object = None) -> None:
        self.values = set(values)
        self.inside = inside
        self.written_by: object = None
        self.num_writes = 0


class PlaceholderListener:
    """Receives notifications about placeholders; during tracing, the recorder.

    The default watcher is for a stage that skips layers: nothing may depend on a placeholder's
    values.
    """

    inside: object = None

    def read(self, function: str, values: set[Value]) -> None:
        """Called when user code reads values on the host, or a shape depends on them."""
        raise LayerError(
            f"`{function}` needs the values of {_sources(values)}, which lives on another stage "
            "and was not sent here. The code between the layers took another branch than when it "
            f"was first traced. {ADVICE}"
        )

    def condition(self) -> bool:
        """The assumed result of a condition on values that this stage does not have."""
        return False

    def written(self, tensor: torch.Tensor, values: set[Value]) -> None:
        """Called when values are written into a tensor that is no placeholder."""

    def draws(self, draw: Callable[[], object]) -> None:
        """Called when a random operation is applied to placeholders; ``draw`` applies it to as many
        real numbers.
        """

    def shaped_by_batch(self) -> None:
        """Called when a shape depends on the values of a tensor that is no placeholder."""

    def used(self, origin: Origin) -> None:
        """Called when a placeholder is an input of an operation."""


_watcher: list[PlaceholderListener] = [PlaceholderListener()]


def watcher() -> PlaceholderListener:
    """The active watcher."""
    return _watcher[-1]


class watching:
    """Context in which ``new`` is the watcher."""

    def __init__(self, new: PlaceholderListener) -> None:
        self._new = new

    def __enter__(self) -> None:
        _watcher.append(self._new)

    def __exit__(self, *_: object) -> None:
        _watcher.pop()


class Placeholder(torch.Tensor):
    """A tensor without memory that remembers its origin.

    Args:
        shadow: a meta tensor, which computes its shape.
        device: the device it claims to be on.
        origin: its origin.
    """

    shadow: torch.Tensor
    origin: Origin
    label: Value | None
    """The value of the pass that it represents; ``None`` if operations that were not traced
    computed it."""
    owner: object
    """The pass."""
    is_tracked: bool
    """Whether the tensor that it represents requires a gradient; the placeholder itself has none.
    """

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(
        cls, shadow: torch.Tensor, device: torch.device, origin: Origin, requires_grad: bool = False
    ) -> Placeholder:
        self: Placeholder = make_wrapper_subclass(
            cls,
            shadow.size(),
            strides=shadow.stride() if shadow.layout == torch.strided else None,
            storage_offset=shadow.storage_offset() if shadow.layout == torch.strided else None,
            dtype=shadow.dtype,
            layout=shadow.layout,
            device=device,
            requires_grad=requires_grad,
            # No memory is allocated; the size bounds the views that operations allow.
            storage_size=shadow.untyped_storage().nbytes(),
        )
        self.shadow = shadow
        self.origin = origin
        self.label = None
        self.owner = None
        self.is_tracked = False
        return self

    @classmethod
    def of(
        cls, spec: TensorSpec, device: torch.device, values: Iterable[Value], inside: object = None
    ) -> Placeholder:
        """A placeholder for a tensor with known properties."""
        inner = torch.empty_strided(
            spec.shape, spec.stride, dtype=dtype_named(spec.dtype), device=META
        )
        return cls(inner, device, Origin(values, inside))

    @classmethod
    def standing_for(
        cls, value: Value, spec: TensorSpec, device: torch.device, owner: object
    ) -> Placeholder:
        """A placeholder for one value of a pass, which ``owner`` identifies."""
        self = cls.of(spec, device, (value,))
        self.label = value
        self.owner = owner
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return (
            f"Placeholder({tuple(self.shape)}, {self.dtype}, from {_sources(self.origin.values)})"
        )

    def tolist(self) -> Any:
        """Reads the values, as ``Tensor.tolist`` does."""
        return _estimate("tolist", self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Reads the values, as ``Tensor.numpy`` does."""
        return _estimate("numpy", self).numpy(force=force)

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if format_spec else str(self)

    def __array__(self, dtype: Any = None) -> Any:
        array = self.numpy(force=True)
        return array if dtype is None else array.astype(dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if schema_of(func).name == "aten::resize_":
        raise LayerError(
            "`resize_` changes a size in place, which does not work on stages that skip a layer: "
            "use an operation that returns a new tensor (`reshape`, `new_empty`)."
        )
    if torch.Tag.inplace_view in func.tags:
        # `unsqueeze_` and similar operations change only the shape: that of the placeholder, and of
        # its shadow.
        with no_dispatch():
            func(*args, **kwargs)
        func(args[0].shadow, *args[1:], **kwargs)
        return args[0]
    leaves, spec = pytree.tree_flatten((args, kwargs))
    seen = [leaf for leaf in leaves if isinstance(leaf, Placeholder)]
    told = watcher()
    for leaf in seen:
        told.used(leaf.origin)
    values = set().union(*(leaf.origin.values for leaf in seen))
    device = kwargs.get("device") or seen[0].device
    indexing = schema_of(func).name in _INDEXING
    plain = [_plain(leaf, indexing) for leaf in leaves]
    plain_args, plain_kwargs = pytree.tree_unflatten(plain, spec)
    if plain_kwargs.get("device") is not None:
        plain_kwargs["device"] = META

    def estimate(on: torch.device) -> Any:
        guesses = [_ones(leaf, on) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        guessed_args, guessed_kwargs = pytree.tree_unflatten(guesses, spec)
        return func(*guessed_args, **guessed_kwargs)

    if torch.Tag.nondeterministic_seeded in func.tags:
        told.draws(lambda: estimate(seen[0].device))
    try:
        if indexing:
            result = func(*plain_args, **plain_kwargs)
        else:
            result = _shaped(func, plain, spec, plain_args, plain_kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if _needs_values(error, func):
            told.read(schema_of(func).name, values)
            result = estimate(torch.device("cpu"))
        else:
            # Some operations support less on the meta device than on others (`_grouped_mm` only
            # bfloat16).
            try:
                result = estimate(seen[0].device)
            except Exception:
                raise error from None
        result = pytree.tree_map_only(torch.Tensor, lambda t: t.to(META), result)

    written = written_arguments(func, args, kwargs)
    for argument in written:
        if isinstance(argument, Placeholder):
            argument.origin.values |= values
            argument.origin.written_by = told.inside
            argument.origin.num_writes += 1
        elif told.inside is None:
            told.written(argument, values)
    if written and isinstance(result, torch.Tensor):
        # An in-place operation returns the tensor it wrote to.
        return written[0]
    aliased = _aliased_argument(func, args)
    origin = aliased.origin if isinstance(aliased, Placeholder) else Origin(values, told.inside)
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: Placeholder(tensor, torch.device(device), origin), result
    )


# For some operations, computing a shape takes several times as long as computing with small
# tensors.
_shapes: OrderedDict[Any, TensorSpec | None] = OrderedDict()
_MOST_SHAPES = 4096


def _shaped(
    func: Any, leaves: list[Any], spec: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of ``func`` for meta tensors; a single new tensor may come from the cache."""
    key = None
    if not any(argument.alias_info for argument in schema_of(func).arguments):
        described = tuple(
            (leaf.shape, leaf.stride(), leaf.dtype)
            if isinstance(leaf, torch.Tensor)
            else (type(leaf), leaf)
            for leaf in leaves
        )
        key = (func, described, spec)
        try:
            known = _shapes.get(key)
        except TypeError:
            # An argument that cannot be hashed (a generator, a symbolic number).
            key = known = None
        if known is not None:
            return torch.empty_strided(
                known.shape, known.stride, dtype=dtype_named(known.dtype), device=META
            )
    result = func(*args, **kwargs)
    if key is not None and isinstance(result, torch.Tensor) and result.layout == torch.strided:
        _shapes[key] = TensorSpec(
            tuple(result.shape), tuple(result.stride()), str(result.dtype), result.itemsize
        )
        if len(_shapes) > _MOST_SHAPES:
            _shapes.popitem(last=False)
    return result


def _plain(leaf: Any, indexing: bool) -> Any:
    if isinstance(leaf, Placeholder):
        return leaf.shadow
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if indexing and leaf.dtype in (torch.bool, torch.uint8) and not leaf.is_meta:
        # A real mask determines the shape: replaced by indices, it does so without values. `index`
        # takes one index for each dimension of the mask; only a one-dimensional mask remains one
        # argument.
        watcher().shaped_by_batch()
        if leaf.dim() == 1:
            return leaf.nonzero()[:, 0].to(META)
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=META)


def _needs_values(error: Exception, func: Any) -> bool:
    return (
        isinstance(error, NotImplementedError)
        or torch.Tag.data_dependent_output in func.tags
        or torch.Tag.dynamic_output_shape in func.tags
        or "meta" in str(error).lower()
    )


def _ones(tensor: torch.Tensor, on: torch.device) -> torch.Tensor:
    """A guess with which little user code fails: numbers are one (for a logarithm, a division); the
    watcher gives conditions.
    """
    if not isinstance(tensor, Placeholder):
        if tensor.is_meta:
            return torch.ones_like(tensor, device=on)
        return tensor.detach().to(on, copy=True)
    if tensor.dtype == torch.bool:
        return torch.full(tensor.shape, watcher().condition(), dtype=torch.bool, device=on)
    return torch.ones(tensor.shape, dtype=tensor.dtype, device=on)


def _estimate(function: str, placeholder: Placeholder) -> torch.Tensor:
    watcher().read(function, placeholder.origin.values)
    return _ones(placeholder, torch.device("cpu"))


def _aliased_argument(func: Any, args: tuple[Any, ...]) -> Any:
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and position < len(args):
            return args[position]
    return None


def _sources(values: Iterable[Value]) -> str:
    layers = sorted({value.layer for value in values})
    return (
        "the output of layer " + ", ".join(map(str, layers)) if layers else "another stage's value"
    )


@lru_cache(maxsize=64)
def dtype_named(name: str) -> torch.dtype:
    """The type with the name ``str(dtype)``."""
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype), name
    return dtype


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Shape, strides and type of a tensor.

    A tensor with gaps or overlaps (a slice, an expanded tensor) is sent without them, so its
    strides are those of a contiguous one.
    """
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if not is_dense(shape, stride):
        stride = tuple(accumulate((1, *shape[:0:-1]), lambda step, size: step * max(size, 1)))[::-1]
    return TensorSpec(shape, stride if shape else (), str(tensor.dtype), tensor.itemsize)


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape has neither gaps nor overlaps in its memory."""
    expected = 1
    for step, size in sorted(
        (step, size) for step, size in zip(stride, shape, strict=True) if size != 1
    ):
        if step != expected:
            return False
        expected *= size
    return True
