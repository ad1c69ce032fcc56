"""Finds contracts: runs calls on fake tensors.

The run is on fake tensors of the real device, not on the meta device: code asks for ``x.device``.
Where shapes or Python values depend on the tensors' values, there is no contract: the stage that
runs the call tells the others afterwards.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
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
    version_of,
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.model.random.random_streams import (
    host_state,
    seed_host,
    set_host_state,
)
from lightning_pipeshift.values.arguments import Arguments, Outcome, copied_call, given, is_constant
from lightning_pipeshift.values.contract import Contract, specs_of
from lightning_pipeshift.values.functions import OF_SHAPE
from lightning_pipeshift.values.value import run_by

# Operations that write to two of their arguments in training; no version tells it. Nor does one, on
# fake tensors, for operations on lists of tensors.
_NORMS = (
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.cudnn_batch_norm.default,
    torch.ops.aten.miopen_batch_norm.default,
)
# Of a tensor that is not contiguous, torch's fake ones give results of other strides.
_OF_OTHER_STRIDES = frozenset(
    f"aten::{name}"
    for name in (
        "_batch_norm_with_update",
        "_native_batch_norm_legit",
        "cudnn_batch_norm",
        "log_sigmoid_forward",
        "miopen_batch_norm",
        "native_batch_norm",
        "native_channel_shuffle",
        "roll",
        "rrelu_with_noise",
    )
)
_STATISTICS, _IS_TRAINING = slice(3, 5), 5
_IN_C = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)
# The namespaces of operators of which torch says whether they draw.
_TORCHS = frozenset({"aten", "prims", "prim"})
# The two runs with assumed sizes: results that differ depend on values.
_ASSUMED_SIZES = (1, 3)


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
        is_torchs: bool | None = None,
    ) -> Contract | None:
        """Returns the contract of a call; ``None`` if what it gives depends on values.

        Args:
            function: what is called; a layer's has fake parameters.
            args: its arguments, with values and real tensors, which stay as they are.
            kwargs: its keyword arguments.
            is_layer: a number that an operation returns, and not a layer, was read from values.
            is_torchs: whether it runs torch's own code only: with these arguments that draws on all
                tensors, or on none. An operator of a user's own may draw where nobody sees it.
        """
        self.num_runs += 1
        if is_torchs is None:
            is_torchs = _is_torchs(function)
        leaves = pytree.tree_leaves((args, kwargs))
        if any(map(callable, leaves)):
            is_torchs = False
        with without_torch_function_of_subclasses():
            if any(isinstance(x, Tensor) and x.layout is not torch.strided for x in leaves):
                # Results on fake sparse tensors have other strides.
                return None
        found = self._run(function, args, kwargs, None, is_torchs)
        if found is not None:
            return None if not is_layer and _gives_numbers(found) else found
        first, second = (
            self._run(function, args, kwargs, size, is_torchs) for size in _ASSUMED_SIZES
        )
        if first is None or second is None or (not is_layer and _gives_numbers(first)):
            return None
        same = first.specs == second.specs and first.result == second.result
        if not same or first.changes != second.changes or first.written != second.written:
            return None
        # Other values may lead to other draws.
        return replace(first, draws=True) if second.used <= first.used else None

    def _run(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        assumed_size: int | None,
        is_torchs: bool,
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
            draws=watch.draws or draws_on_host or not is_torchs,
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
    """Whether a function is torch's own."""
    module = getattr(function, "__module__", None) or ""
    if isinstance(function, _IN_C):
        return not module or module.startswith("torch")
    if isinstance(function, types.FunctionType):
        return module.startswith("torch.")
    return bool(module == "torch._ops.aten")


def _gives_numbers(contract: Contract) -> bool:
    return not contract.specs and not contract.written and is_constant(contract.result)


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
        is_torchs = func.namespace in _TORCHS
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags or not is_torchs
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
        if name in _OF_OTHER_STRIDES and not args[0].is_contiguous():
            return self._on_assumed_numbers(func, args, kwargs, size or 1)
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
