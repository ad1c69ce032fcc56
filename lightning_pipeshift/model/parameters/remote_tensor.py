"""Tensors whose values are on other stages: parameters, copies of them, and values computed from
them.

A stage has the values of its own layers, and only the names of all other parameters. Hooks run on
every stage, on all parameters: ``average.mul_(0.9).add_(parameter)``. Values are computed on the
stage that has the inputs: the stage that holds the parameter computes this; on all other stages the
parameter, and then the average, are tensors of this class, which have a shape and a type but no
values. Torch's own meta tensors would not do: many operations, ``add_`` among them, silently ignore
a meta tensor among their inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.schema import written_arguments
from lightning_pipeshift.compat.torch_private import (
    FOR_EACH,
    PARAMETER_MARK,
    READ_NUMBER,
    make_subclass,
    mark_as_parameter,
    no_dispatch,
    num_other_uses,
    one_by_one,
    pytree,
    renew_hooks,
    schema_of,
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.errors import LayerError, PipeShiftError, some_of

_NORMS = (
    "Norms of gradients over all stages come from `self.clip_gradients` and"
    " `lightning_pipeshift.grad_norm`."
)
# Functions that read values without an operation, and their names in messages. (A format of "" is
# `repr`.)
_READS: dict[Any, str] = {
    Tensor.tolist: "tolist",
    Tensor.numpy: "numpy",
    Tensor.__array__: "numpy",
    Tensor.__format__: "format",
}
# They read no more of their further arguments than type and device.
_READ_KIND = frozenset({Tensor.to, Tensor.type_as})
_OWN_ATTRIBUTES = frozenset({"_home", PARAMETER_MARK})


class OwnerLookup(Protocol):
    """Finds the stages that hold tensors, during a run."""

    @property
    def device(self) -> torch.device:
        """The device of this stage."""

    def stages_of(self, names: Collection[str]) -> set[int]:
        """The stages that hold all of these parameters and buffers."""

    def is_held(self, tensor: Tensor) -> bool:
        """Whether a tensor shares memory with a part of the model that this stage holds."""

    def copied(self, tensor: Tensor) -> str | None:
        """The parameter or buffer of which user code keeps a copy with this tensor's memory."""

    def aliases(self, tensor: Tensor, afresh: bool = False) -> list[Tensor]:
        """The tensors kept by user code that have the same memory.

        Args:
            tensor: its memory is compared.
            afresh: whether to search again, instead of using an earlier result.
        """


_known: list[OwnerLookup | None] = [None]


def set_owner_lookup(known: OwnerLookup | None) -> None:
    """Sets the object that finds tensors from now on; ``None``: no run is in progress."""
    _known[0] = known


@dataclass(slots=True)
class _Home:
    """The stages that have the values of some memory; views share it. For the arguments see
    :meth:`RemoteTensor.like`.
    """

    computed_from: frozenset[str]
    is_the_models: bool = False

    def __deepcopy__(self, memo: object) -> _Home:
        """For a copy of a tensor: user code's own."""
        return _Home(self.computed_from)


class RemoteTensor(Tensor):
    """A tensor whose values are on other stages.

    Its memory is on the meta device (``is_meta``), but ``device`` is this stage's own: user code
    makes tensors for it there (``x.to(next(self.parameters()).device)``). Operations on it return
    tensors of this class. Writing to it has no effect on this stage, as the stages that hold the
    tensor do it. Writing it into a tensor of this stage makes that one a tensor of this class as
    well. Reading it is an error.

    Args:
        data: has its shape and type; on the meta device.
        home: the stages that have its values.
        requires_grad: as for any tensor.
    """

    _home: _Home

    @staticmethod
    def __new__(cls, data: Tensor, home: _Home, requires_grad: bool = False) -> RemoteTensor:
        self: RemoteTensor = make_subclass(cls, data, requires_grad)
        self._home = home
        return self

    @classmethod
    def like(
        cls, tensor: Tensor, computed_from: Iterable[str], is_the_models: bool = False
    ) -> RemoteTensor:
        """A tensor of this class that can replace a tensor.

        Args:
            tensor: the tensor.
            computed_from: see the property.
            is_the_models: whether it is a parameter or buffer itself, and remains one whatever is
                written to it.
        """
        data = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
        )
        made = cls(data, _Home(frozenset(computed_from), is_the_models), tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            mark_as_parameter(made)
        return made

    @property
    def computed_from(self) -> frozenset[str]:
        """The names of the parameters and buffers that it is or was computed from: its values are
        on the stages that hold all of these.
        """
        return self._home.computed_from

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            return _set_data(*args)
        if func == Tensor.device.__get__:
            return _device()
        if func in _READS and args[1:] != ("",):
            raise reading(_READS[func], [args[0]])
        if func == Tensor.data_ptr:
            # Safetensors, and so `save_pretrained`, would save what is there.
            raise args[0]._saving("saved, nor its memory be used,")
        if func in _READ_KIND and not isinstance(args[0], RemoteTensor):
            # A tensor of this stage keeps its values, whatever it is converted like.
            args, kwargs = pytree.tree_map_only(
                RemoteTensor,
                lambda like: torch.empty(0, dtype=like.dtype, device=_device()),
                (args, kwargs or {}),
            )
        # Torch's own code still refers to what it writes to, until the function ends.
        before, _writes.under_way = _writes.under_way, []
        try:
            with without_torch_function_of_subclasses():
                result = func(*args, **(kwargs or {}))
        except PipeShiftError:
            raise
        except RuntimeError as error:
            # Parts of torch's own code (`torch.tensor([x])`) do not dispatch to subclasses.
            if "meta tensor" not in str(error):
                raise
            leaves = pytree.tree_leaves((args, kwargs))
            absent = [leaf for leaf in leaves if isinstance(leaf, RemoteTensor)]
            raise reading(getattr(func, "__name__", str(func)), absent) from error
        finally:
            written, _writes.under_way = _writes.under_way, before
        for tensor, computed_from, function in written:
            if not isinstance(tensor, RemoteTensor):
                _send_away(tensor, computed_from, function)
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, schema_of(func).name
        if name.startswith(FOR_EACH):
            # Some of the items may be on this stage.
            return one_by_one(func, *args, **kwargs)
        if name == "aten::equal" and args[0] is args[1]:
            return True
        return _without_values(func, args, kwargs)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"RemoteTensor({tuple(self.shape)}, {self.dtype}, with {_named(self.computed_from)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        if _known[0] is not None:
            raise self._saving("pickled")
        # A part of a model that no rank can hold whole, and that remains distributed after the run.
        like = torch.empty_strided(self.size(), self.stride(), dtype=self.dtype, device="meta")
        fresh = nn.Parameter(like, self.requires_grad) if isinstance(self, nn.Parameter) else like
        return RemoteTensor.like, (fresh, self.computed_from)

    def _saving(self, saved: str) -> LayerError:
        return LayerError(
            f"A tensor cannot be {saved} here: it lives with {_named(self.computed_from)}, on "
            f"{_stages(self.computed_from)}. Save it with `trainer.save_checkpoint`, as a part of "
            "the state dict of the LightningModule or of a callback, which is completed there; "
            "or after the run, when every rank has the whole model."
        )


# --- operations ---


def _without_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation on a stage that lacks its inputs."""
    leaves = pytree.tree_leaves((args, kwargs))
    absent = [leaf for leaf in leaves if isinstance(leaf, RemoteTensor)]
    if not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(func.tags):
        raise reading(schema_of(func).name, absent)
    computed_from = _together(func, absent, leaves)
    if torch.Tag.nondeterministic_seeded in func.tags:
        # The stage that has the tensor draws random numbers, so all stages have to.
        some_args, some_kwargs = pytree.tree_map_only(Tensor, _some_numbers, (args, kwargs))
        if "device" in some_kwargs:
            some_kwargs["device"] = _device()
        func(*some_args, **some_kwargs)
    before: dict[int, Tensor] = {}

    def on_meta(tensor: Tensor) -> Tensor:
        there = tensor if tensor.is_meta else tensor.detach().to("meta")
        before[id(there)] = tensor
        return there

    plain_args, plain_kwargs = pytree.tree_map_only(Tensor, on_meta, (args, kwargs))
    if plain_kwargs.get("device") is not None:
        plain_kwargs["device"] = torch.device("meta")
    if "generator" in plain_kwargs:
        plain_kwargs["generator"] = None
    try:
        with no_dispatch():
            result = func(*plain_args, **plain_kwargs)
    except NotImplementedError as error:
        raise reading(schema_of(func).name, absent) from error
    for written in written_arguments(func, args, kwargs):
        if not isinstance(written, RemoteTensor):
            if _writes.under_way is None:
                raise LayerError(_cannot_be_written(computed_from, _short(func)))
            _writes.under_way.append((written, computed_from, _short(func)))
        elif not written._home.is_the_models:
            written._home.computed_from = computed_from
    is_view = any(a.alias_info and not a.alias_info.is_write for a in schema_of(func).arguments)
    home = absent[0]._home if is_view else _Home(computed_from)

    def standing_for(made: Tensor) -> Tensor:
        # An in-place operation returns its argument.
        return before[id(made)] if id(made) in before else RemoteTensor(made, home)

    return pytree.tree_map_only(Tensor, standing_for, result)


def _together(func: Any, absent: Sequence[RemoteTensor], leaves: Iterable[Any]) -> frozenset[str]:
    """The names of the parameters whose stages compute the result of an operation.

    Args:
        func: the operation.
        absent: those of its inputs that have no values here.
        leaves: all of its inputs.

    Raises:
        LayerError: its inputs are on different stages.
    """
    names = frozenset().union(*(tensor.computed_from for tensor in absent))
    known = _known[0]
    if known is None:
        return names
    for leaf in leaves:
        # Other stages have no values of a copy either: each would take the result for a copy of
        # another parameter.
        is_here = isinstance(leaf, Tensor) and not leaf.is_meta
        name = known.copied(leaf) if is_here else None
        if name is not None and not known.stages_of({*names, name}):
            raise LayerError(
                f"`{_short(func)}` takes a copy of {name!r}, and a value computed from "
                f"{_named(names)}: the former is on {_stages([name])}, the latter on "
                f"{_stages(names)}. Copies of the model that callbacks and the LightningModule "
                "keep are on the stages of their originals, as for averages. A model of its own "
                "that you train or evaluate in addition to this one must not look like a copy: "
                "keep it outside of callbacks and the LightningModule, in a global variable, say."
            )
    if len(names) > 1 and not known.stages_of(names):
        homes = dict.fromkeys(tensor.computed_from for tensor in absent)
        places = "; ".join(f"{_named(one)} on {_stages(one)}" for one in homes)
        raise LayerError(
            f"`{_short(func)}` takes tensors that no stage has all of: {places}. User code "
            "between the steps can compute with what is on the same stage: with a parameter, its "
            f"gradient and its copies. {_NORMS} Code that needs the values of several layers "
            "belongs in `training_step`, or after the run."
        )
    return names


def _some_numbers(like: Tensor) -> Tensor:
    return torch.ones(like.shape, dtype=like.dtype, device=_device())


def _device() -> torch.device:
    known = _known[0]
    return known.device if known is not None else torch.device("cpu")


# --- writing to tensors of this stage ---


_Written = tuple[Tensor, frozenset[str], str]
"""A tensor of this stage, the home of what was written to it, and the function that did."""


class _Writing(threading.local):
    """The tensors that the active torch function has written to; ``None`` if none is active."""

    under_way: list[_Written] | None = None


_writes = _Writing()


def _send_away(tensor: Tensor, computed_from: frozenset[str], function: str) -> None:
    """Makes a tensor a ``RemoteTensor``, with all tensors that share its memory."""
    known = _known[0]
    refusal = _cannot_be_written(computed_from, function)
    if known is not None and known.is_held(tensor):
        raise LayerError(refusal)
    aliases = {id(tensor): tensor}
    for afresh in (False, True):
        if num_other_uses(tensor) != len(aliases) - 1 and known is not None:
            kept = [tensor, *known.aliases(tensor, afresh)]
            aliases = {id(alias): alias for alias in kept}
    if num_other_uses(tensor) != len(aliases) - 1:
        # Another reference would keep the old values.
        raise LayerError(refusal)
    for alias in aliases.values():
        try:
            swap(alias, RemoteTensor.like(alias, computed_from))
        except RuntimeError as error:
            raise LayerError(refusal) from error


def _cannot_be_written(computed_from: frozenset[str], function: str) -> str:
    return (
        f"`{function}` writes a value computed from {_named(computed_from)} into a tensor of "
        f"this stage, and that value is on {_stages(computed_from)} only. An average, or any other "
        "value that you keep of a parameter, is on the parameter's stage: create it as a copy of "
        "the parameter (`parameter.detach().clone()`, `torch.zeros_like(parameter)`, "
        "`copy.deepcopy(module)`) and write to it, not into other parameters, into gradients, or "
        "into a part of a larger tensor. Or do it in `training_step`, inside `torch.no_grad()`, "
        f"where stages send each other what they need. {_NORMS}"
    )


def _set_data(tensor: Tensor, data: Tensor) -> None:
    """``tensor.data = data`` for a tensor of another stage: has no effect on values here."""
    assert isinstance(tensor, RemoteTensor)
    if not isinstance(data, RemoteTensor):
        # A write has no effect here, but the shape may change.
        data = RemoteTensor.like(data, tensor.computed_from)
    with without_torch_function_of_subclasses():
        Tensor.data.__set__(tensor, data)  # type: ignore[attr-defined]
    if not tensor._home.is_the_models:
        tensor._home = _Home(data.computed_from)


def swap(tensor: Tensor, fresh: Tensor) -> None:
    """Gives a tensor the values, the device and the class of another one. The object remains the
    same, with its attributes and hooks; so optimizers, schedulers and the user's own references
    remain valid.
    """
    attributes = {name: v for name, v in vars(tensor).items() if name not in _OWN_ATTRIBUTES}
    torch.utils.swap_tensors(tensor, fresh)
    vars(tensor).update(attributes)
    renew_hooks(tensor)


# --- messages ---


def reading(function: str, absent: Sequence[RemoteTensor]) -> LayerError:
    """The error for a function that reads tensors that are on other stages."""
    names = frozenset().union(*(tensor.computed_from for tensor in absent))
    return LayerError(
        f"`{_short(function)}` reads the value of {_named(names)}, or of a value computed from it "
        f"(a gradient, a copy, a norm): it is on {_stages(names)}, and this stage has its shape "
        "and type only. Read it in `training_step`, `validation_step` or "
        "`on_before_optimizer_step`, where every stage gets the value; or compute with it and keep "
        "the result, which is on that stage too, and is saved from there; or skip it if "
        f"`tensor.is_meta`. {_NORMS} After the run every rank has all values."
    )


def _short(function: Any) -> str:
    name = function if isinstance(function, str) else schema_of(function).name
    name = str(name).removeprefix("aten::")
    return "item" if name == READ_NUMBER.removeprefix("aten::") else name


def _named(names: Iterable[str]) -> str:
    return some_of([repr(name) for name in sorted(names)])


def _stages(names: Collection[str]) -> str:
    known = _known[0]
    if known is None:
        return "another stage"
    stages = sorted(known.stages_of(names))
    return "stage " + " and ".join(map(str, stages)) if stages else "no single stage"
