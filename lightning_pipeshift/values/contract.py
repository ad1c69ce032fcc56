"""What a call gives and does, found on tensors without data.

A call of a layer or of an operation runs at one stage; the others have to know what comes out of
it. One run on fake tensors tells: the shapes of the results, which arguments the call uses, writes
to and returns, and what it changes in the objects that are passed in. It is kept for all calls
with arguments of the same shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from lightning_pipeshift.compat.torch_private import (
    storage_key_of,
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.values.arguments import (
    Items,
    New,
    Outcome,
    State,
    arguments_in,
    part_of,
    same_numbers,
)
from lightning_pipeshift.values.value import Spec, Value


@dataclass(frozen=True)
class Contract:
    """What a call gives and does.

    Args:
        specs: of the tensors that it makes.
        result: what it returns, encoded (see :mod:`.arguments`).
        changes: what it changes in the containers and objects among its arguments.
        used: the numbers of the argument tensors whose values it uses.
        written: the numbers of those that it writes to, and whether each needs a gradient then.
        draws: whether it may draw random numbers. Of a layer: that its run on fake tensors drew
            none does not say that it draws none on others.
        draws_on_host: whether it draws from NumPy or ``random``.
        is_bare: of a layer: whether the result is what the layer returns, and nothing around it.
    """

    specs: tuple[Spec, ...]
    result: Any
    changes: dict[int, State]
    used: frozenset[int]
    written: dict[int, bool]
    draws: bool
    draws_on_host: bool
    is_bare: bool = False

    @property
    def bare(self) -> Contract:
        """That of a layer whose call gives no more than what the layer returns; the same if it
        does: see :func:`~lightning_pipeshift.values.layer_contracts.leaving_flags`.
        """
        if part_of(self.result, 1) != Items(tuple, ()):
            return self
        return replace(self, result=part_of(self.result, 0, 0, 0), is_bare=True)

    @cached_property
    def needs_gradient(self) -> bool:
        """Whether a result needs a gradient."""
        return any(spec.requires_grad for spec in self.specs) or any(self.written.values())

    @cached_property
    def gives_one(self) -> bool:
        """Whether it gives one new tensor, and does nothing else."""
        is_one = type(self.result) is New and len(self.specs) == 1
        return is_one and not self.changes and not self.written

    @cached_property
    def places(self) -> list[int]:
        """The numbers of the argument tensors whose stage runs the call: of the first that is a
        value. A write goes to where the memory is, and a view, or what is returned as it is, is of
        it.
        """
        aliases = {spec.shares for spec in self.specs if spec.shares is not None}
        shared = [at for at in sorted(aliases) if at >= 0]
        return [*sorted(self.written), *shared, *sorted(arguments_in(self.result))]


def spec_of(tensor: Tensor, shares: int | None = None) -> Spec:
    """The spec of a tensor."""
    is_leaf = tensor.is_leaf
    return Spec(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, shares, is_leaf)


def specs_of(new: Sequence[Tensor], arguments: Sequence[Tensor]) -> list[Spec]:
    """The specs of a call's new tensors, with whose memory they share.

    Args:
        new: the tensors that the call has made.
        arguments: the call's tensors, plain or fake.
    """
    owners = {
        storage_key_of(one): at
        for at, one in reversed(list(enumerate(arguments)))
        if not isinstance(one, Value)
    }
    specs = []
    for at, tensor in enumerate(new):
        shares = owners.setdefault(storage_key_of(tensor), -1 - at)
        specs.append(spec_of(tensor, None if shares == -1 - at else shares))
    return specs


def kept_simply(contract: Contract, result: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether a call gave one new tensor, as its contract says: what is compared most often.

    Args:
        contract: of the call, which has changed no argument.
        result: what it returned.
        tensors: those in its arguments, plain.
    """
    if not contract.gives_one or not isinstance(result, Tensor):
        return False
    memory, shares = storage_key_of(result), None
    for at, x in enumerate(tensors):
        if x is result:
            return False
        if shares is None and type(x) is not Value and storage_key_of(x) == memory:
            shares = at
    return spec_of(result, shares) == contract.specs[0]


def require_kept(
    contract: Contract,
    label: str,
    tensors: Sequence[Tensor],
    before: Outcome,
    after: Outcome,
    written: Sequence[int],
) -> None:
    """Compares what a call gave and did with its contract, which the other stages go by.

    Args:
        contract: of the call.
        label: its name.
        tensors: those in its arguments, plain.
        before: the arguments before the call.
        after: what it gave.
        written: the numbers of the tensors that it has written to.

    Raises:
        LayerError: they differ.
    """
    changes = contract.changes
    with without_torch_function_of_subclasses():
        found = specs_of(after.new, tensors)
        # A write to a tensor counts for all that share its memory.
        memories = {storage_key_of(tensors[at]) for at in contract.written}
        unknown = [at for at in written if storage_key_of(tensors[at]) not in memories]
    states = after.changes_from(before)
    if unknown or states.keys() != changes.keys():
        raise LayerError(
            f"`{label}` writes to an argument, or changes an object, where its run without values"
            " did not, or does not where that did. Do it in every call, and not only if values say"
            " so; or return something new."
        )
    if not same_numbers(after.result, contract.result) or not all(
        same_numbers(states[at], changes[at]) for at in changes
    ):
        raise other_numbers(label)
    if found == list(contract.specs):
        return
    if [(x[0], *x[2:5]) for x in found] != [(x[0], *x[2:5]) for x in contract.specs]:
        raise LayerError(
            f"`{label}` gave {_listed(found)} where its run without values gave"
            f" {_listed(contract.specs)}. Results whose number, shape or type depends on the values"
            " of tensors, in a way that only the values tell, are not supported here."
        )
    for one, other in zip(found, contract.specs, strict=True):
        both = zip(one.shape, one.stride, other.stride, strict=True)
        if 0 not in one.shape and any(a != b for size, a, b in both if size > 1):
            raise LayerError(
                f"`{label}` gave a tensor of shape {tuple(one.shape)} with the strides"
                f" {one.stride} where its run without values gave {other.stride}. With another"
                " layout other stages would compute other bits: return `x.contiguous()`."
            )


def other_numbers(label: str) -> LayerError:
    """The error for a layer that left other numbers, texts or flags than its contract says."""
    return LayerError(
        f"`{label}` returned, or kept, a Python number or text that its run without values did"
        " not, or left other `requires_grad` or `training`. Numbers that depend on the values"
        " of tensors, or on what no argument tells, have to be tensors; freeze and thaw between"
        " layers."
    )


def _listed(specs: Sequence[Spec]) -> str:
    return ", ".join(f"{tuple(spec.shape)} {spec.dtype}" for spec in specs) or "no tensors"
