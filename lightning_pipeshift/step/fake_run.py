"""One run of the user's step before the first one, which tells the planner what to expect: the
layers that it calls, in their order, with inputs of which shapes, and what crosses the boundaries
between them.

The step runs on values of which this rank has none, as if each layer were a stage of its own, and
this rank another one. It ends where it would read a value, or have an effect that cannot be undone.
What it has changed in Python objects and in tensors by then is undone.

It is a hint: the next step may call other layers. Without it, or for what comes behind its end, the
planner goes by the layers' sizes until steps have been measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.module_private import without_compiling
from lightning_pipeshift.compat.schema import written_arguments
from lightning_pipeshift.compat.torch_private import (
    FakeTensor,
    OperationMode,
    base_of,
    dispatch_modes_disabled,
    pytree,
    storage_key_of,
    swap_tensors,
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.model.measuring.measure import Unknown
from lightning_pipeshift.model.saved.saved_tensors import bytes_of
from lightning_pipeshift.model.tensors.trees import Rebuild, flatten, map_leaves
from lightning_pipeshift.model.user_state.effects import EffectError, effects_allowed, no_effects
from lightning_pipeshift.model.user_state.preserve import ObjectState, preserved
from lightning_pipeshift.plan.search.boundaries import Crossing
from lightning_pipeshift.runtime.comm.mailbox import Mailbox
from lightning_pipeshift.values.arguments import Arguments
from lightning_pipeshift.values.contract import Contract
from lightning_pipeshift.values.contract_finder import ContractFinder
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.microbatch import Microbatch
from lightning_pipeshift.values.value import StepParameter, Value, run_by


class FoundCall(NamedTuple):
    """A layer's call.

    Args:
        layer: its number.
        leaves: of its arguments, with :class:`Unknown` in the place of values.
        rebuild: builds arguments of such leaves.
        objects: the state of the objects among them when the layer was called.
    """

    layer: int
    leaves: list[Any]
    rebuild: Rebuild
    objects: ObjectState

    @contextmanager
    def as_called(self) -> Iterator[None]:
        """Context in which the objects among the arguments are as the layer found them."""
        now = ObjectState(self.leaves)
        self.objects.put_back()
        try:
            yield
        finally:
            now.put_back()


@dataclass
class FakeRun:
    """What a step does, as far as it is known before its first run.

    Args:
        num_layers: of the model.
    """

    num_layers: int
    calls: list[FoundCall] = field(default_factory=list)
    end: str = ""
    """Why the run has ended before the step did; empty if it did not."""
    draws: bool = False
    """Whether code between layers draws random numbers: another step may call other layers."""
    core: Core | None = None
    """Knows the contracts of the calls."""
    sent: dict[Value, tuple[int, int, bool]] = field(default_factory=dict)
    """The values that one layer computes, or code behind it, and a later one uses: these two, and
    whether a gradient comes back."""
    back: set[tuple[int, int]] = field(default_factory=set)
    """An earlier layer that uses a value, and the one that computes it."""

    @property
    def called(self) -> set[int]:
        """The layers that it calls."""
        return {call.layer for call in self.calls}

    def note_use(self, value: Value, stage: int, with_gradient: bool) -> None:
        """Notes that a layer, or code behind it, uses a value."""
        account = value.account
        if stage > account.owner:
            with_gradient &= account.requires_grad
            _, last, before = self.sent.get(value, (0, 0, False))
            self.sent[value] = account.owner, max(stage, last), with_gradient or before
        elif stage < account.owner:
            self.back.add((stage, account.owner))

    def crossings(self) -> list[Crossing]:
        """What crosses the boundary behind each layer."""
        found = []
        for boundary in range(1, self.num_layers + 1):
            over = [
                (bytes_of([value]), with_gradient)
                for value, (owner, last, with_gradient) in self.sent.items()
                if owner < boundary <= last
            ]
            found.append(
                Crossing(
                    sum(size for size, _ in over),
                    sum(size for size, with_gradient in over if with_gradient),
                    all(not first < boundary <= last for first, last in self.back),
                )
            )
        return found


def run_without_values(
    root: nn.Module,
    layers: Sequence[nn.Module],
    device: torch.device,
    step: Callable[[Any], Any],
    batch: Any,
    known: Core | None = None,
) -> FakeRun:
    """Runs a step without values.

    Args:
        root: the whole module.
        layers: its layers.
        device: this rank's.
        step: the user's.
        batch: one microbatch.
        known: the core of an earlier run.
    """
    found = FakeRun(len(layers))
    core = Core(
        root,
        layers,
        lambda number, _: number,
        cast(Mailbox, _Nowhere(len(layers))),
        device,
    )
    core.finder = _UnseenFinder(device)
    if known is not None:
        core.learn_from(known)
    found.core = core
    program, writes = _Program(core, found), _Writes()
    # User code may take items out of it.
    batch = map_leaves(lambda leaf: leaf, batch)
    with preserved(root.modules()) as iterators, _parameters_as_they_are(root):
        if iterators:
            found.end = f"a module keeps an iterator (`{type(iterators[0]).__name__}`)"
            return found
        try:
            with (
                core.placed(),
                run_by(program),
                core.seeing_parameters(),
                without_compiling(),
                writes,
                no_effects(),
            ):
                step(batch)
        except _End as end:
            found.end = str(end)
        except EffectError as effect:
            found.end = str(effect)
        except Exception as error:
            # Whatever goes wrong without values is seen again, or is not, in the first step.
            found.end = f"{type(error).__name__}: {error}"
        finally:
            program.undo()
            writes.undo()
    return found


class _End(BaseException):
    """The step goes on with what is not there.

    Not an ``Exception``, so that error handlers in user code do not catch it.
    """


class _UnseenFinder(ContractFinder):
    """Finds contracts as in any other step: for these calls it takes the place of the first one's
    finder, which finds less then.
    """

    def find(self, *args: Any, **kwargs: Any) -> Contract | None:
        """See :class:`ContractFinder`."""
        with effects_allowed(), dispatch_modes_disabled():
            return super().find(*args, **kwargs)


class _Nowhere:
    """The mailbox of a stage that has no part in anything."""

    def __init__(self, num_layers: int) -> None:
        self.stage, self.num_stages = num_layers, num_layers + 1


class _Program(Microbatch):
    """The step of a microbatch of which this stage has no value.

    Args:
        core: owners of layers are stages of these layers' numbers.
        found: gets what the step does.
    """

    def __init__(self, core: Core, found: FakeRun) -> None:
        super().__init__(core, 0, 0, 0)
        self._found = found
        self._adopted: list[tuple[Tensor, Tensor]] = []

    def undo(self) -> None:
        """Makes common tensors of the user's what they were."""
        for tensor, plain in reversed(self._adopted):
            swap_tensors(tensor, plain)
        self._adopted.clear()
        self.release()

    def layer(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`Microbatch`."""
        leaves, rebuild = flatten((args, kwargs))
        objects = ObjectState(leaves)
        result = super().layer(number, args, kwargs)
        with without_torch_function_of_subclasses():
            known = [Unknown(x.shape, x.dtype) if type(x) is Value else x for x in leaves]
        self._found.calls.append(FoundCall(number, known, rebuild, objects))
        return result

    def bring(self, tensor: Tensor, stage: int, with_gradient: bool, label: str) -> Tensor | None:
        """See :class:`Transfers`: nothing travels."""
        if isinstance(tensor, Value):
            self._found.note_use(tensor, stage, with_gradient)
        return None

    def note(self, label: str, *what: object) -> None:
        """See :class:`NotedProgram`."""
        if label == "optimizer.step":
            raise _End("it steps an optimizer")

    def note_call(self, label: str, digest: int, arguments: Arguments) -> None:
        """See :class:`NotedProgram`: nobody compares this program with others."""

    def _note_common(self, tensor: Tensor) -> None:
        """See :class:`NotedProgram`."""

    def tell(self, told: Any, stage: int, label: str) -> Any:
        """See :class:`Transfers`."""
        raise _End(f"what `{label}` returns depends on values")

    def _read_here(self, tensor: Tensor, label: str, device: torch.device | None) -> Tensor:
        if not isinstance(tensor, StepParameter) or tensor.is_meta or tensor in self.accounts:
            raise _End(f"`{label}` reads a value")
        with torch.no_grad(), run_by(None):
            return tensor.detach()

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """See :class:`Microbatch`."""
        raise _End("it calls `backward`")

    def _adopt(self, tensor: Tensor, stage: int, is_written: bool = True) -> None:
        if base_of(tensor) is not None:
            raise _End("it writes a value into a view")
        super()._adopt(tensor, stage, is_written)

    def _became_value(self, value: Tensor, plain: Tensor) -> None:
        self._adopted.append((value, plain))


class _Writes(OperationMode):
    """Keeps what is in tensors that were there before, and are written to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: set[int] = set()
        self._before: dict[int, tuple[Any, Any]] = {}

    def operation(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """See :class:`OperationMode`."""
        for tensor in written_arguments(func, args, kwargs):
            key = storage_key_of(tensor) if _has_memory(tensor) else None
            if key is not None and key not in self._made and key not in self._before:
                storage = tensor.untyped_storage()
                self._before[key] = storage, storage.clone()
        result = func(*args, **kwargs)
        given = set(map(storage_key_of, filter(_has_memory, pytree.tree_leaves((args, kwargs)))))
        for tensor in filter(_has_memory, pytree.tree_leaves(result)):
            if storage_key_of(tensor) not in given:
                self._made.add(storage_key_of(tensor))
        return result

    def undo(self) -> None:
        """Puts it back."""
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()


def _has_memory(x: Any) -> bool:
    is_plain = isinstance(x, Tensor) and not isinstance(x, FakeTensor | Value)
    return is_plain and x.layout is torch.strided and not x.is_meta


@contextmanager
def _parameters_as_they_are(root: nn.Module) -> Iterator[None]:
    """Context after which parameters are trained or not as before, and have the same gradients."""
    before = [(x, x.requires_grad, x.grad) for x in root.parameters()]
    try:
        yield
    finally:
        for parameter, is_trained, gradient in before:
            parameter.requires_grad_(is_trained)
            parameter.grad = gradient
