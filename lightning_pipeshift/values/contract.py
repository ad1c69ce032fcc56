"""What a call gives and does, found on tensors without data.

A call of a layer or of an operation runs at one stage; the others have to know what comes out of
it. One run on fake tensors tells: the shapes of the results, which arguments the call uses, writes
to and returns, and what it changes in the objects that are passed in. It is kept for all calls
with arguments of the same shapes.

The run is on fake tensors of the real device, not on the meta device: code asks for ``x.device``.
Where shapes or Python values depend on the tensors' values, there is no contract: the stage that
runs the call tells the others afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import (
    READ_NUMBER,
    FakeTensorMode,
    OperationMode,
    pytree,
    real_tensors,
    schema_of,
    storage_key_of,
    version_of,
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.values.arguments import (
    Arguments,
    Outcome,
    State,
    arguments_in,
    copied,
    is_constant,
)
from lightning_pipeshift.values.functions import OF_SHAPE
from lightning_pipeshift.values.value import Spec, run_by

# The two runs with made-up sizes: results that differ depend on values.
_MADE_UP = (1, 3)


@dataclass(frozen=True, slots=True)
class Contract:
    """What a call gives and does.

    Args:
        specs: of the tensors that it makes.
        result: what it returns, encoded (see :mod:`.arguments`).
        changes: what it changes in the containers and objects among its arguments.
        used: the numbers of the argument tensors whose values it uses.
        written: the numbers of those that it writes to, and whether each needs a gradient then.
    """

    specs: tuple[Spec, ...]
    result: Any
    changes: dict[int, State]
    used: frozenset[int]
    written: dict[int, bool]

    @property
    def needs_gradient(self) -> bool:
        """Whether a result needs a gradient."""
        return any(spec.requires_grad for spec in self.specs) or any(self.written.values())

    def aliases(self) -> set[int]:
        """The numbers of the argument tensors that a result shares memory with."""
        return {spec.shares for spec in self.specs if spec.shares is not None and spec.shares >= 0}

    def returned(self) -> set[int]:
        """The numbers of the argument tensors that the call returns as they are."""
        return arguments_in(self.result)


def spec_of(tensor: Tensor, shares: int | None = None) -> Spec:
    """The spec of a tensor."""
    return Spec(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, shares)


class _Rooted(torch.autograd.Function):
    """Gives a tensor a history: it is no leaf then, and may be written to in place."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, holder: list[Tensor]) -> Tensor:
        return holder[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


class ContractFinder:
    """Runs calls on fake tensors.

    Args:
        device: where tensors would be whose memory another stage has.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.num_runs = 0
        """How many calls were run on fake tensors so far."""

    def find(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        marks: Callable[[], dict[Any, Any]] | None = None,
    ) -> Contract | None:
        """Returns the contract of a call; ``None`` if what it gives depends on values.

        Args:
            function: what is called; a layer's has fake parameters.
            args: its arguments, with values and real tensors, which stay as they are.
            kwargs: its keyword arguments.
            marks: of a layer, what tells whether its attributes were changed; the changed ones are
                in :attr:`changed` then. A number that an operation returns, and not a layer, was
                read from values.
        """
        self.num_runs += 1
        self.changed: set[Any] = set()
        is_layer = marks is not None
        self._marks = marks or dict
        found = self._run(function, args, kwargs, None)
        if found is not None:
            return None if not is_layer and _gives_numbers(found) else found
        first, second = (self._run(function, args, kwargs, size) for size in _MADE_UP)
        if first is None or second is None or (not is_layer and _gives_numbers(first)):
            return None
        same = first.specs == second.specs and first.result == second.result
        if not same or first.changes != second.changes or first.written != second.written:
            return None
        return first if second.used <= first.used else None

    def _run(
        self, function: Callable[..., Any], args: Any, kwargs: Any, made_up: int | None
    ) -> Contract | None:
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        arguments = Arguments((args, kwargs), id)
        with run_by(None), without_torch_function_of_subclasses(), self.fake_mode:
            with torch.enable_grad():
                stand_ins = [self._stand_in(tensor) for tensor in arguments.tensors]
            memo: dict[int, Any] = {}
            fake_args, fake_kwargs = copied(
                (args, kwargs), lambda tensor: stand_ins[arguments.number_of(tensor)], memo
            )
            nodes = [memo[id(node)] for node in arguments.nodes]
            before = Outcome(nodes, stand_ins)
            versions = list(map(version_of, stand_ins))
            watch = _Watch(made_up)
            marked = self._marks()
            try:
                with watch:
                    result = function(*fake_args, **fake_kwargs)
                now = self._marks()
                self.changed |= {name for name in now if now[name] != marked.get(name, now)}
                after = Outcome(nodes, stand_ins, result)
                specs = specs_of(after.new, stand_ins)
            except Exception:
                # Whatever goes wrong on fake tensors is seen again, or is not, on the real ones.
                return None
            finally:
                random.setstate(states[0])
                np.random.set_state(states[1])
                torch.set_rng_state(states[2])
        if any(not isinstance(size, int) for spec in specs for size in spec.shape):
            return None
        return Contract(
            specs=tuple(specs),
            result=after.result,
            changes=after.changes_from(before),
            used=frozenset(at for at, one in enumerate(stand_ins) if id(one) in watch.used),
            written={
                at: one.requires_grad
                for at, one in enumerate(stand_ins)
                if version_of(one) != versions[at]
            },
        )

    def _stand_in(self, tensor: Tensor) -> Tensor:
        there = self._device if tensor.is_meta else tensor.device
        new = torch.empty_strided(
            tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=there
        )
        if not tensor.requires_grad:
            return new
        root = torch.empty((), requires_grad=True)
        rooted: Tensor = _Rooted.apply(root, [new])  # type: ignore[no-untyped-call]
        return rooted


def _gives_numbers(contract: Contract) -> bool:
    return not contract.specs and not contract.written and is_constant(contract.result)


def specs_of(new: Sequence[Tensor], arguments: Sequence[Tensor]) -> list[Spec]:
    """The specs of a call's new tensors, with whose memory they share.

    Args:
        new: the tensors that the call has made.
        arguments: the call's tensors, plain or fake.
    """
    owners = {storage_key_of(one): at for at, one in reversed(list(enumerate(arguments)))}
    specs = []
    for at, tensor in enumerate(new):
        shares = owners.setdefault(storage_key_of(tensor), -1 - at)
        specs.append(spec_of(tensor, None if shares == -1 - at else shares))
    return specs


class _Watch(OperationMode):
    """Notes which stand-ins are used.

    Args:
        made_up: what stands for sizes and numbers that only values tell; ``None``: they are errors.
    """

    def __init__(self, made_up: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used: set[int] = set()
        self._made_up = made_up

    def operation(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func not in OF_SHAPE:
            self.used.update(
                id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
            )
        size = self._made_up
        if size is None:
            return func(*args, **kwargs)
        made = _made_up_result(func, args, kwargs, size)
        if made is not None:
            return made
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            # Fake tensors do not know the operation, or refuse it: it runs on made-up numbers.
            return self._on_made_up_numbers(func, args, kwargs, size)

    def _on_made_up_numbers(self, func: Any, args: Any, kwargs: Any, size: int) -> Any:
        def filled(x: Tensor) -> Tensor:
            number = 0 if x.dtype.is_floating_point or x.dtype.is_complex else min(size - 1, 1)
            new = torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device=x.device)
            return new.fill_(number)

        with real_tensors():
            real_args, real_kwargs = pytree.tree_map_only(Tensor, filled, (args, kwargs))
            result = func(*real_args, **real_kwargs)
        return pytree.tree_map_only(
            Tensor,
            lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device),
            result,
        )


def _made_up_result(func: Any, args: Any, kwargs: Any, size: int) -> Any:
    """The result of an operation whose size or number depends on values; ``None`` for others."""
    aten = torch.ops.aten
    tensor: Any = args[0] if args else None
    if func is aten.nonzero.default:
        shape = (size, tensor.dim())
        return torch.empty(shape, dtype=torch.long, device=tensor.device)
    if schema_of(func).name == READ_NUMBER and getattr(tensor, "constant", None) is None:
        if tensor.dtype is torch.bool:
            return size > 1
        return float(size) if tensor.dtype.is_floating_point else size - 1
    if func is aten.masked_select.default:
        return torch.empty((size,), dtype=tensor.dtype, device=tensor.device)
    if func is aten.index.Tensor:
        masks = (torch.bool, torch.uint8)
        if not any(index is not None and index.dtype in masks for index in args[1]):
            return None
        indices: list[Any] = []
        for index in args[1]:
            if index is None or index.dtype not in masks:
                indices.append(index)
            else:
                picked = torch.empty((size,), dtype=torch.long, device=index.device)
                indices += [picked] * index.dim()
        return func(tensor, indices)
    return None
