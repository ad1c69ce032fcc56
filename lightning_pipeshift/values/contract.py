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

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import (
    FAKE_TENSOR_LOG,
    FOR_EACH,
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
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.user_state.random_streams import (
    host_state,
    seed_host,
    set_host_state,
)
from lightning_pipeshift.values.arguments import (
    Arguments,
    Items,
    New,
    Outcome,
    State,
    arguments_in,
    copied_call,
    given,
    is_constant,
    part_of,
    same_numbers,
)
from lightning_pipeshift.values.functions import OF_SHAPE
from lightning_pipeshift.values.value import Spec, Value, run_by

# Operations that write to two of their arguments in training; no version tells it. Nor does one, on
# fake tensors, for operations on lists of tensors.
_NORMS = (
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.cudnn_batch_norm.default,
    torch.ops.aten.miopen_batch_norm.default,
)
_STATISTICS, _IS_TRAINING = slice(3, 5), 5
_IN_C = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)
# The two runs with assumed sizes: results that differ depend on values.
_ASSUMED_SIZES = (1, 3)


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
        self.is_running = False
        """Whether a call runs on fake tensors now."""

    def find(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        is_layer: bool = False,
    ) -> Contract | None:
        """Returns the contract of a call; ``None`` if what it gives depends on values.

        Args:
            function: what is called; a layer's has fake parameters.
            args: its arguments, with values and real tensors, which stay as they are.
            kwargs: its keyword arguments.
            is_layer: a number that an operation returns, and not a layer, was read from values.
        """
        self.num_runs += 1
        found = self._run(function, args, kwargs, None)
        if found is not None:
            return None if not is_layer and _gives_numbers(found) else found
        first, second = (self._run(function, args, kwargs, size) for size in _ASSUMED_SIZES)
        if first is None or second is None or (not is_layer and _gives_numbers(first)):
            return None
        same = first.specs == second.specs and first.result == second.result
        if not same or first.changes != second.changes or first.written != second.written:
            return None
        # Other values may lead to other draws.
        return replace(first, draws=True) if second.used <= first.used else None

    def _run(
        self, function: Callable[..., Any], args: Any, kwargs: Any, assumed_size: int | None
    ) -> Contract | None:
        states = host_state(), torch.get_rng_state()
        seed_host(0)
        arguments = Arguments(given(args, kwargs), id)
        with_gradient = torch.is_grad_enabled()
        # In inference mode no one counts writes.
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(with_gradient),
            run_by(None),
            without_torch_function_of_subclasses(),
            self.fake_mode,
        ):
            with torch.enable_grad():
                stand_ins = [self._stand_in(tensor) for tensor in arguments.tensors]
            memo: dict[int, Any] = {}
            fake_args, fake_kwargs = copied_call(
                args, kwargs, lambda tensor: stand_ins[arguments.number_of(tensor)], memo
            )
            nodes = [memo[id(node)] for node in arguments.nodes]
            before = Outcome(nodes, stand_ins)
            versions = list(map(version_of, stand_ins))
            watch = _Watch(assumed_size)
            # An operation that fails on them is run in another way, or on real tensors.
            FAKE_TENSOR_LOG.disabled = True
            self.is_running = True
            try:
                with watch:
                    result = function(*fake_args, **fake_kwargs)
                after = Outcome(nodes, stand_ins, result)
                specs = specs_of(after.new, stand_ins)
            except Exception:
                # Whatever goes wrong on fake tensors is seen again, or is not, on the real ones.
                return None
            finally:
                self.is_running = FAKE_TENSOR_LOG.disabled = False
                draws_on_host = host_state() != 0
                set_host_state(states[0])
                torch.set_rng_state(states[1])
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
                if version_of(one) != versions[at] or id(one) in watch.written
            },
            draws=watch.draws or not _is_torchs(function),
            draws_on_host=draws_on_host,
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


def _is_torchs(function: Any) -> bool:
    """Whether a function is torch's own, in Python or in C: it draws on all tensors, or on none."""
    is_in_c = isinstance(function, _IN_C)
    return is_in_c or (getattr(function, "__module__", None) or "").startswith("torch.")


def _gives_numbers(contract: Contract) -> bool:
    return not contract.specs and not contract.written and is_constant(contract.result)


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


class _Watch(OperationMode):
    """Notes which stand-ins are used.

    Args:
        assumed_size: used for sizes and numbers that only values tell; ``None``: they are errors.
    """

    def __init__(self, assumed_size: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used: set[int] = set()
        self.written: set[int] = set()
        self.draws = False
        self._assumed_size = assumed_size

    def operation(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        if kwargs.get("generator") is not None:
            # One of the layer's own keeps its state.
            kwargs = {**kwargs, "generator": None}
        if func not in OF_SHAPE:
            self.used.update(
                id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
            )
        if func in _NORMS and args[_IS_TRAINING]:
            self.written.update(map(id, args[_STATISTICS]))
        name = schema_of(func).name
        if name.startswith(FOR_EACH) and name.endswith("_"):
            self.written.update(map(id, args[0]))
        size = self._assumed_size
        if size is None:
            return func(*args, **kwargs)
        made = _result_of_assumed_size(func, args, kwargs, size)
        if made is not None:
            return made
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            # Fake tensors do not know the operation, or refuse it: it runs on assumed numbers.
            return self._on_assumed_numbers(func, args, kwargs, size)

    def _on_assumed_numbers(self, func: Any, args: Any, kwargs: Any, size: int) -> Any:
        def filled(x: Tensor) -> Tensor:
            new = torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device=x.device)
            is_number = x.dtype.is_floating_point or x.dtype.is_complex
            if size == 1:
                return new.zero_()
            # Others than before, and for whole numbers such that are an index of most tensors.
            numbers = torch.arange(x.numel(), device=x.device) % (x.numel() if is_number else 2)
            return new.copy_(numbers.reshape(x.shape))

        with real_tensors():
            real_args, real_kwargs = pytree.tree_map_only(Tensor, filled, (args, kwargs))
            result = func(*real_args, **real_kwargs)
        return pytree.tree_map_only(
            Tensor,
            lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device),
            result,
        )


def _result_of_assumed_size(func: Any, args: Any, kwargs: Any, size: int) -> Any:
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
