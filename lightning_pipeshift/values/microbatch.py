"""One microbatch's step on one rank: where each operation runs, and what is sent for it."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_pipeshift.compat.torch_private import (
    BackwardHook,
    has_compiled,
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.errors import LayerError, PipeShiftError
from lightning_pipeshift.model.execution.finite import finite_check
from lightning_pipeshift.model.execution.timing import Timer
from lightning_pipeshift.model.execution.trees import leaves_of, map_leaves
from lightning_pipeshift.model.saved.saved_tensors import bytes_of
from lightning_pipeshift.model.user_state.random_streams import (
    drawing_from,
    numbered_seed,
    stream_seed,
)
from lightning_pipeshift.values.arguments import (
    Arguments,
    copied,
    given,
)
from lightning_pipeshift.values.calls import Call, Calls
from lightning_pipeshift.values.contract import Contract, other_numbers
from lightning_pipeshift.values.functions import READS
from lightning_pipeshift.values.gradients import Graph
from lightning_pipeshift.values.layer_contracts import (
    Flagged,
    call_hooks,
    flagged_as,
    flagged_in,
    flags_of,
    hearing,
    leaving_flags,
    set_flags,
    with_backward_hooks,
)
from lightning_pipeshift.values.layer_state import Attribute, run_twice, with_state
from lightning_pipeshift.values.special import SPECIAL
from lightning_pipeshift.values.value import (
    PLACED,
    StepParameter,
    Value,
    name_of,
    run_by,
    user_line,
    versions_in,
)

if TYPE_CHECKING:
    from lightning_pipeshift.values.core import Core
# Functions whose results' shapes depend on floats.
_SHAPED_BY_FLOATS = frozenset({functional.interpolate})
OUTSIDE = -1
"""The turn of what runs outside of steps."""


class Microbatch(Calls):
    """The step of one microbatch on this rank. Every rank runs the same one.

    Args:
        core: what all microbatches share.
        run_number: of the run of a schedule; the same on all ranks.
        step: the number of the step, for the random streams.
        turn: the microbatch's number in the run.
    """

    def __init__(self, core: Core, run_number: int, step: int, turn: int) -> None:
        super().__init__(core, run_number, turn)
        self._seed = stream_seed("calls", core.seed, step, turn)
        # By the function's name: on the only stage, what a step has kept are plain tensors in the
        # next one, and functions of them do not count. Others draw the same numbers all the same.
        self._num_calls: Counter[str] = Counter()
        self.is_in_backward = False
        self.has_later_backward = False
        """Whether the schedule runs the backward, some time after the step."""
        self.gradients: dict[Tensor, Tensor | None] | None = None
        """Those of all parameters, as values; ``None`` if they may have changed since they were
        asked for. What changes them by other means than operations has to set it to ``None``."""
        self.sets_gradients = False
        """Whether user code has replaced a gradient."""
        self._recomputes = False
        self.timer: Timer | None = None
        """Times the layers that this stage runs, if that is wanted."""
        self.finite = finite_check(turn, core.step_number, core.stage)
        """With torch's anomaly mode: looks for values that are no numbers."""

    def release(self) -> None:
        """Lets go of all tensors."""
        super().release()
        self.gradients = None

    # --- operations between layers ---

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function of torch, one of whose arguments is a value or a parameter."""
        special = SPECIAL.get(function)
        if special is not None:
            return special(self, *args, **kwargs)
        if function in READS:
            if self.core.calls is not None:
                self.core.calls.read(self, name_of(function))
            return self._read_by(function, args, kwargs)
        core = self.core
        arguments = Arguments(given(args, kwargs), _described, function in _SHAPED_BY_FLOATS)
        self.place_parameters([x for x in arguments.tensors if type(x) in PLACED])
        key = function, torch.is_grad_enabled(), _autocast(core.device_kind), arguments.key
        known = core.contracts.get(key)
        if known is None:
            contract = core.finder.find(function, args, kwargs)
            known = core.keep(key, contract, name_of(function), key[1:-1])
        contract, label, digest = known
        self.note_call(label, digest, arguments)
        stream = self._next_stream(label)
        stage = self._stage_of(contract, arguments)
        if stage is None:
            return self._everywhere(function, args, kwargs)

        def run(_: Any, run_args: Any, run_kwargs: Any) -> Any:
            core.operation = label
            try:
                if self.saves is not None:
                    return self.saves.operation(function, run_args, run_kwargs)
                return function(*run_args, **run_kwargs)
            finally:
                core.operation = None

        return self._call(Call(run, args, kwargs, arguments, contract, stage, label, stream))

    def read_number(self, value: Tensor) -> Any:
        """See :class:`Program`."""
        return self._read_by(Tensor.item, (value,), {})

    def _call(self, call: Call) -> Any:
        result = super()._call(call)
        if self.core.calls is not None:
            self.core.calls.called(self, call, result)
        return result

    def _next_stream(self, name: str) -> tuple[int, int]:
        """The random stream of the next call of a name: see :class:`Call`."""
        self._num_calls[name] += 1
        return self._seed ^ (zlib.crc32(name.encode()) << 31), self._num_calls[name]

    def plain(self, tree: Any) -> Any:
        """A structure with the tensors of this stage in the place of values."""
        return map_leaves(lambda x: x.account.tensor if isinstance(x, Value) else x, tree)

    def place_parameters(self, placed: Sequence[Tensor]) -> None:
        """Places parameters outside of layers where an operation uses them first.

        Args:
            placed: the values and the parameters of the operation.
        """
        parameters = [x for x in placed if type(x) is StepParameter]
        if parameters:
            owners = [x.account.owner for x in placed if isinstance(x, Value)]
            self.core.place_parameters(parameters, owners)

    def _stage_of(self, contract: Contract | None, arguments: Arguments) -> int | None:
        """Where an operation runs; ``None`` for everywhere: it uses only shapes."""
        tensors = arguments.tensors
        for at in () if contract is None else contract.places:
            if type(tensors[at]) in PLACED:
                return self.account_of(tensors[at]).owner
        used = range(len(tensors)) if contract is None else contract.used
        placed = [tensors[at] for at in used if type(tensors[at]) in PLACED]
        return max([self.account_of(x).owner for x in placed], default=None)

    def _everywhere(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation that uses only the shapes of values, on every stage."""

        def without_values(x: Tensor) -> Tensor:
            if type(x) not in PLACED:
                return x
            return torch.empty_strided(
                tuple(x.shape), x.stride(), dtype=x.dtype, device=self.core.device
            )

        with without_torch_function_of_subclasses():
            plain_args, *plain_kwargs = copied(given(args, kwargs), without_values, {})
            return function(*plain_args, **dict(plain_kwargs))

    # --- layers ---

    def layer(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a layer."""
        if self._is_alone:
            self.core.called.setdefault(self.turn, []).append(number)
        self.enters_layer(number)
        return self._called(number, args, kwargs, self.core.backward_hooks.pop(number, None))

    def enters_layer(self, number: int) -> None:
        """Called before a layer."""

    def _called(
        self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], hooks: BackwardHook | None
    ) -> Any:
        core = self.core
        stage, layer = core.owners(number, self.turn), core.layers[number]
        hooked, (kind, watch) = core.hooked(number), core.kind_of(number)
        state: Sequence[Attribute] = core.states[number]
        if core.replaced[number]:
            state = *state, *core.replaced[number]
        recomputes = self._recomputes
        # Most layers change no attributes, and have no hooks inside.
        is_bare = not state and not hooked
        all_args = args if is_bare else (tuple(each.get(layer) for each in state), *args)
        arguments = Arguments(given(all_args, kwargs), _described, exact=True)
        placed = [x for x in arguments.tensors if type(x) is StepParameter]
        if placed:
            core.place_parameters(placed, [stage])
        flagged = core.flagged[number]
        with without_torch_function_of_subclasses():
            flags = flags_of(flagged)
        key = (
            kind,
            flags,
            torch.is_grad_enabled(),
            _autocast(core.device_kind),
            arguments.key,
            hooked,
            core.own_hooks(number),
        )
        known = core.contracts.get(key)
        is_new = known is None
        if known is None:
            if core.find_flagged(number):
                return self._called(number, args, kwargs, hooks)
            contract, fake = None, core.fake_of(number)
            if fake is not None:
                changed: set[Attribute] = set()
                forward: Callable[..., Any] = core.plain_forward(number, fake)
                forward = hearing(fake, forward, hooked)
                forward = with_state(fake, forward, state, core.watch(number, fake), changed)
                forward = partial(leaving_flags, forward, flagged_in(fake), flags)
                fake_args = ((), *args) if is_bare else all_args
                contract = core.finder.find(forward, fake_args, kwargs, is_layer=True)
                if core.add_state(number, changed):
                    return self._called(number, args, kwargs, hooks)
                if is_bare and contract is not None:
                    contract = contract.bare
            known = core.keep(key, contract, "layer", key[1:-3])
        contract, _, digest = known
        label = core.names[number]
        # Not before: what a stage has learned about a layer's state may differ.
        self.note_call(label, digest + number, arguments)
        if is_bare and (contract is None or not contract.is_bare):
            is_bare, all_args = False, ((), *args)

        def run(others: dict[str, Tensor], run_args: Any, run_kwargs: Any) -> Any:
            changed: set[Attribute] = set()
            forward = core.forwards[number]
            if is_new or has_compiled():
                # The first call may be the first that torch compiles (`torch.cond` does).
                forward = core.compiling(number)(forward)
            if hooks is not None:
                forward = with_backward_hooks(forward, hooks)
            if not is_bare:
                forward = hearing(layer, forward, hooked)
            saves = None if recomputes else self.saves
            runs_twice = recomputes or (saves is not None and number in saves.recompute)
            if runs_twice:
                # The second run, in the backward, needs the tensors of other stages, too.
                forward = partial(_called_with, layer, forward, others) if others else forward
                draws_on_host = contract is None or contract.draws_on_host
                seed = numbered_seed(*stream)
                again = partial(_as_before, core.generators, draws_on_host, seed, flagged, flags)
                forward = run_twice(layer, forward, state, again)
            if core.gates and core.gates[number].weights is not None:
                forward = partial(core.gates[number].run_by, forward)
            if recomputes:
                forward = partial(checkpoint, forward, use_reentrant=False)
            elif saves is not None:
                forward = partial(saves.layer, number, forward)
            if not is_bare:
                forward = with_state(layer, forward, state, watch, changed)
            if others and not runs_twice:
                # Around the state: a layer may replace a buffer that was brought here.
                forward = partial(_called_with, layer, forward, others)
            if self.timer is not None:
                forward = self.timer.timed(number, forward)
            versions = versions_in(others.values()) if others else []
            inputs = []
            if self.finite is not None:
                inputs = Arguments(given(run_args, run_kwargs), _described).tensors
                self.finite.given(label, inputs)
            result, left = leaving_flags(forward, flagged, flags, *run_args, **run_kwargs)
            if self.finite is not None:
                self.finite.returned(label, inputs, leaves_of(result))
            if is_bare:
                changed = watch.look()
            if contract is not None and changed:
                names = ", ".join(
                    f"`{path}.{name}`".replace("`.", "`") for path, name, *_ in changed
                )
                raise LayerError(
                    f"`{label}` has changed its attribute {names}, which it did not in its run"
                    " without values. Every stage has a layer's attributes, and only one runs it:"
                    " assign the attribute in every call, or return what it keeps, and not only if"
                    " values, or things outside of the layer, say so."
                )
            if others and versions != versions_in(others.values()):
                raise LayerError(
                    f"`{label}` writes in place to a parameter that another stage holds, since a"
                    " layer there has it, too. Write to it between layers."
                )
            if not is_bare:
                return result, left
            if left:
                raise other_numbers(label)
            return result

        stream = self._next_stream("a layer")
        if core.awaits and stage == self.stage:
            core.before_layer(number)
        for buffer in core.buffers[number] if self.accounts else ():
            if buffer in self.accounts:
                self.accounts[buffer].refresh()
        # What operations have used, another stage may have the last word on.
        parameters = core.parameters[number] if self.accounts else core.foreign(number, stage)
        call = Call(
            run,
            all_args,
            kwargs,
            arguments,
            contract,
            stage,
            label,
            stream,
            parameters,
            layer=number,
        )
        result = self._call(call)
        if not is_bare:
            ((result, heard), after, more), left = result
            if left:
                set_flags(flagged, left)
            for attribute, value in (*zip(state, after, strict=True), *more):
                attribute.set(layer, value)
            core.add_state(number, {attribute for attribute, _ in more})
        for buffer in core.buffers[number] if self.accounts else ():
            # The layer may have written to it.
            account = self.accounts.get(buffer)
            if account is not None:
                is_here = account.owner == self.stage
                account.begin(account.owner, account.tensor if is_here else None)
        if not is_bare:
            call_hooks(layer, label, heard)
        if self.timer is not None:
            core.result_bytes[number] = bytes_of(x for x in leaves_of(result) if type(x) is Value)
        return result

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Context of layers that the backward runs again, in place of what they would keep."""
        before, self._recomputes = self._recomputes, True
        try:
            yield
        finally:
            self._recomputes = before

    # --- the backward ---

    def backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Runs this stage's part of the backward. Every rank calls this; arguments as those of
        ``Tensor.backward``.
        """
        self._require_first_order("backward", create_graph, [gradient])
        self.note("backward", bool(retain_graph))
        only = None if inputs is None else self.plain(inputs)
        if inputs is not None and not self._is_alone:
            several = [inputs] if isinstance(inputs, Tensor) else inputs
            only = [here for x in several if (here := self.here(x)) is not None]

        def run(roots: list[Tensor], gradients: list[Tensor | None]) -> None:
            torch.autograd.backward(
                roots, gradients, retain_graph, create_graph, inputs=self._with_token(only)
            )

        self._go_back([loss], [gradient], run, bool(retain_graph))
        self.gradients = None

    def gradients_of(
        self,
        losses: Sequence[Tensor],
        inputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        is_kept: bool,
        is_more: bool,
    ) -> list[Tensor | None]:
        """The gradients of losses, where this stage has the inputs. Every rank calls this.

        Args:
            losses: values, or tensors that every stage has.
            inputs: likewise.
            gradients: of the losses; ``None`` for one.
            is_kept: whether another backward may follow.
            is_more: whether gradients of the gradients, or several of each, are wanted.
        """
        self._require_first_order("torch.autograd.grad", is_more, gradients)
        self.note("grad", is_kept)
        wanted = {at: x for at, x in enumerate(map(self.here, inputs)) if x is not None}
        found: dict[int, Tensor] = {}

        def run(roots: list[Tensor], of_roots: list[Tensor | None]) -> None:
            asked = self._with_token(list(wanted.values()))
            if asked:
                here = torch.autograd.grad(
                    roots, asked, of_roots, retain_graph=is_kept, allow_unused=True
                )
                found.update(zip(wanted, here, strict=False))

        self._go_back(losses, gradients, run, is_kept)
        return [found.get(at) for at in range(len(inputs))]

    def _require_first_order(
        self, label: str, is_more: bool, gradients: Sequence[Tensor | None]
    ) -> None:
        has_values = any(isinstance(gradient, Value) for gradient in gradients)
        if not self._is_alone and (is_more or has_values):
            raise LayerError(
                f"`{label}` ({user_line()}) with `create_graph`, `is_grads_batched`, or a gradient"
                " that one stage owns is not supported across layers. Compute second derivatives"
                " inside of one layer."
            )

    def here(self, tensor: Tensor) -> Tensor | None:
        """Of what needs a gradient: a common tensor, or that of a value or a parameter at its
        owner.
        """
        if type(tensor) not in PLACED:
            return tensor if tensor.requires_grad else None
        self.place_parameters([tensor])
        return self.owned(tensor) if self.account_of(tensor).requires_grad else None

    def owned(self, tensor: Tensor) -> Tensor | None:
        """The tensor of a value or a parameter, at its owner."""
        account = self.account_of(tensor)
        account.refresh()
        return account.tensor if account.owner == self.stage else None

    def _with_token(self, only: Any) -> Any:
        # Else a backward for some inputs would leave out what leads to other stages.
        return only if only is None or self._token is None else [*only, self._token]

    def _go_back(
        self,
        losses: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        run: Callable[[list[Tensor], list[Tensor | None]], None],
        is_kept: bool,
    ) -> None:
        graphs: dict[Graph, None] = {}
        roots: list[Tensor] = []
        of_roots: list[Tensor | None] = []
        for loss, gradient in zip(losses, gradients, strict=True):
            self.require_unused(loss)
            graph, link = self.graph_of(loss), loss
            if graph is not None:
                graphs[graph] = None
            if type(loss) in PLACED:
                account = self.account_of(loss)
                account.refresh()
                if account.last != self.stage:
                    continue
                assert account.link is not None
                link = account.link
            roots.append(link)
            of_roots.append(self.plain(gradient))
        if any(graph.has_links for graph in graphs):
            self.begins_backward()
        for graph in graphs:
            roots += graph.tokens
            of_roots += map(torch.zeros_like, graph.tokens)
        if roots:
            self._run_backward(partial(run, roots, of_roots))
        if not self._is_alone:
            self.end_graphs(graphs, is_kept)

    def begins_backward(self) -> None:
        """Called before a backward over several stages."""

    def _run_backward(self, run: Callable[[], None]) -> None:
        self.is_in_backward = True
        begin = None if self.timer is None else self.timer.now()
        try:
            with run_by(None), without_torch_function_of_subclasses():
                run()
        except PipeShiftError:
            # The words of another stage's error may be any.
            raise
        except RuntimeError as error:
            found = None if self.finite is None else self.finite.backward(error)
            if found is not None:
                raise found from error
            if "modified by an inplace operation" not in str(error):
                raise
            raise LayerError(
                f"{error} With several stages the backward also goes through what another stage"
                " has used and the loss does not depend on. Use an operation that returns a new"
                " tensor (`x = x * 2` in place of `x.mul_(2)`)."
            ) from error
        finally:
            self.is_in_backward = False
        if self.timer is not None:
            self.timer.end_backward(begin)


def _described(tensor: Tensor) -> Any:
    """What of a tensor the shapes of a call's results may depend on."""
    if type(tensor) is Value:
        return tensor.geometry, tensor.account.requires_grad
    with without_torch_function_of_subclasses():
        return (tensor.shape, tensor.stride(), tensor.dtype), tensor.requires_grad


def _autocast(device_kind: str) -> torch.dtype | None:
    """The type that autocast computes in; ``None`` without it."""
    if not torch.is_autocast_enabled(device_kind):
        return None
    return torch.get_autocast_dtype(device_kind)


@contextmanager
def _as_before(
    generators: Sequence[torch.Generator],
    draws_on_host: bool,
    seed: int,
    flagged: Flagged,
    flags: tuple[bool, ...],
) -> Iterator[None]:
    """Context of a layer's second run, with the random numbers and the flags of the first."""
    with flagged_as(flagged, flags), drawing_from(generators, draws_on_host, seed):
        yield


def _called_with(
    layer: torch.nn.Module, forward: Any, others: dict[str, Tensor], /, *args: Any, **kwargs: Any
) -> Any:
    """Calls a layer with tensors in place of some of its parameters."""
    bare = _Bare(layer, forward)
    named = {f"layer.{name}": tensor for name, tensor in others.items()}
    return torch.func.functional_call(bare, named, args, kwargs)


class _Bare(torch.nn.Module):
    """Calls a layer's forward without the hooks of the layer, which have been called."""

    def __init__(self, layer: torch.nn.Module, forward: Any) -> None:
        super().__init__()
        self.layer, self._forward = layer, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it."""
        return self._forward(*args, **kwargs)
