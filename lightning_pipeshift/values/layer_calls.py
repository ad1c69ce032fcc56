"""Calls of layers: finds their contracts, runs them at their owners, changes what they changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_pipeshift.compat.module_private import BackwardHook, has_compiled, with_compiling
from lightning_pipeshift.compat.torch_private import without_torch_function_of_subclasses
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.random.random_streams import drawing_from, numbered_seed
from lightning_pipeshift.model.saved.saved_tensors import bytes_of
from lightning_pipeshift.model.tensors.trees import leaves_of
from lightning_pipeshift.values.arguments import Arguments, given
from lightning_pipeshift.values.calls import Call, described, modes_of
from lightning_pipeshift.values.contract import Contract, other_numbers
from lightning_pipeshift.values.layer_contracts import (
    Flagged,
    call_hooks,
    flagged_as,
    flagged_in,
    flags_of,
    hearing,
    leaving_flags,
    runs_torch_only,
    set_flags,
)
from lightning_pipeshift.values.layer_state import Attribute, Watch, run_twice, with_state
from lightning_pipeshift.values.value import StepParameter, Value, versions_in

if TYPE_CHECKING:
    from lightning_pipeshift.values.core import Core
    from lightning_pipeshift.values.microbatch import Microbatch
    from lightning_pipeshift.values.placed_layer import PlacedLayer


def call_layer(
    program: Microbatch,
    layer: PlacedLayer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    hooks: BackwardHook | None,
) -> Any:
    """Calls a layer. Every stage calls this.

    Args:
        program: its step runs.
        layer: the layer.
        args: its arguments, with values.
        kwargs: likewise.
        hooks: on its backward, if there are any.
    """
    core, module = program.core, layer.module
    stage = core.owners(layer.number, program.turn)
    watch = core.known.find_kind(layer)
    hooked = layer.hooked() if watch.has_hooks() else ()
    state: Sequence[Attribute] = layer.state
    if layer.replaced:
        state = *state, *layer.replaced
    # Most layers change no attributes, and have no hooks inside.
    is_bare = not state and not hooked
    all_args = args if is_bare else (tuple(each.get(module) for each in state), *args)
    arguments = Arguments(given(all_args, kwargs), described, exact=True)
    placed = [x for x in arguments.tensors if type(x) is StepParameter]
    if placed:
        core.place_parameters(placed, [stage])
    with without_torch_function_of_subclasses():
        flags = flags_of(layer.flagged)
    modes = modes_of(core)
    key = layer.kind, flags, modes, arguments.key, hooked, layer.own_hooks()
    known = core.known.contracts.get(key)
    is_new = known is None
    if known is None:
        if layer.find_flagged():
            return call_layer(program, layer, args, kwargs, hooks)
        fake_args = ((), *args) if is_bare else all_args
        contract, changed = _found_contract(core, layer, fake_args, kwargs, hooked, state, flags)
        if core.known.add_state(layer, changed):
            return call_layer(program, layer, args, kwargs, hooks)
        if is_bare and contract is not None:
            contract = contract.bare
        known = core.known.keep(key, contract, "layer", (flags, *modes))
    contract, _, digest = known
    # Not before: what a stage has learned about a layer's state may differ.
    program.note_call(layer.name, digest + layer.number, arguments)
    if is_bare and (contract is None or not contract.is_bare):
        is_bare, all_args = False, ((), *args)
    stream = program.next_stream("a layer")
    run: Callable[..., Any] = _runs_elsewhere
    if stage == program.stage:
        run = _Run(
            program, layer, contract, is_bare, is_new, hooked, state, watch, flags, hooks, stream
        ).run
        if core.awaited:
            core.before_layer(layer.number)
    accounts = program.accounts
    for buffer in layer.buffers if accounts else ():
        if buffer in accounts:
            accounts[buffer].refresh()
    # What operations have used, another stage may have the last word on.
    owners = core.parameter_owners
    parameters = layer.parameters if accounts else layer.foreign(stage, owners)
    result = program.call(
        Call(
            run,
            all_args,
            kwargs,
            arguments,
            contract,
            stage,
            layer.name,
            stream,
            parameters,
            layer=layer.number,
        )
    )
    if not is_bare:
        ((result, heard), after, more), left = result
        if left:
            set_flags(layer.flagged, left)
        for attribute, value in (*zip(state, after, strict=True), *more):
            attribute.set(module, value)
        core.known.add_state(layer, {attribute for attribute, _ in more})
    for buffer in layer.buffers if accounts else ():
        # The layer may have written to it.
        account = accounts.get(buffer)
        if account is not None:
            is_here = account.owner == program.stage
            account.begin(account.owner, account.tensor if is_here else None)
    if not is_bare:
        call_hooks(module, layer.name, heard)
    if program.timer is not None:
        values = (x for x in leaves_of(result) if type(x) is Value)
        core.result_bytes[layer.number] = bytes_of(values)
    return result


def _found_contract(
    core: Core,
    layer: PlacedLayer,
    args: Any,
    kwargs: dict[str, Any],
    hooked: Sequence[str],
    state: Sequence[Attribute],
    flags: tuple[bool, ...],
) -> tuple[Contract | None, set[Attribute]]:
    """The contract of a call, and the other attributes than its state that the layer changes in
    it. See :class:`_Run`.
    """
    changed: set[Attribute] = set()
    fake = core.known.fake_of(layer, core.finder.fake_mode, core.device)
    if fake is None:
        return None, changed
    forward: Callable[..., Any] = hearing(fake, layer.plain_forward(fake), hooked)
    forward = with_state(fake, forward, state, layer.watch_of(fake), changed)
    forward = partial(leaving_flags, forward, flagged_in(fake), flags)
    is_torchs = not hooked and runs_torch_only(layer.module, layer.own_forward)
    found = core.finder.find(forward, args, kwargs, is_layer=True, is_torchs=is_torchs)
    return found, changed


def _runs_elsewhere(*_: object) -> None:
    """Stands for the run of a layer of another stage: never called."""
    raise AssertionError


class _Run(NamedTuple):
    """Runs a call of a layer at its owner.

    Args:
        program: its step runs.
        layer: the layer.
        contract: of the call.
        is_bare: whether the call gives what the layer returns, and nothing around it.
        is_new: whether it is the first call of its kind.
        hooked: the names of modules inside of the layer, whose hooks every stage calls.
        state: the attributes that the call gets and returns.
        watch: tells of other attributes.
        flags: of the layer's modules and parameters before the call.
        hooks: on the layer's backward, if there are any.
        stream: of its random numbers: see :class:`Call`.
    """

    program: Microbatch
    layer: PlacedLayer
    contract: Contract | None
    is_bare: bool
    is_new: bool
    hooked: Sequence[str]
    state: Sequence[Attribute]
    watch: Watch
    flags: tuple[bool, ...]
    hooks: BackwardHook | None
    stream: tuple[int, int]

    def run(self, others: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
        """Runs it.

        Args:
            others: the parameters of other stages, by name.
            args: the arguments, plain.
            kwargs: likewise.
        """
        layer, finite = self.layer, self.program.finite
        label, changed = layer.name, set[Attribute]()
        forward = self._forward(others, changed)
        versions = versions_in(others.values()) if others else []
        inputs = []
        if finite is not None:
            inputs = Arguments(given(args, kwargs), described).tensors
            finite.given(label, inputs)
        result, left = leaving_flags(forward, layer.flagged, self.flags, *args, **kwargs)
        if finite is not None:
            finite.returned(label, inputs, leaves_of(result))
        if self.is_bare:
            changed = self.watch.look()
        if self.contract is not None and changed:
            names = ", ".join(f"`{path}.{name}`".replace("`.", "`") for path, name, *_ in changed)
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
        if not self.is_bare:
            return result, left
        if left:
            raise other_numbers(label)
        return result

    def _forward(self, others: dict[str, Tensor], changed: set[Attribute]) -> Callable[..., Any]:
        """The layer's forward with all that is around it.

        Args:
            others: see :meth:`run`.
            changed: gets the attributes that it changes and that are not in its state.
        """
        program, layer, state = self.program, self.layer, self.state
        core, module, number = program.core, layer.module, layer.number
        forward = layer.forward
        if self.is_new or has_compiled():
            # The first call may be the first that torch compiles (`torch.cond` does).
            forward = _compiling(core, layer)(forward)
        if self.hooks is not None:
            forward = _with_input_hook(self.hooks, forward)
        if not self.is_bare:
            forward = hearing(module, forward, self.hooked)
        recomputes = program.recomputes
        saves = None if recomputes else program.saves
        runs_twice = recomputes or (saves is not None and number in saves.recompute)
        if runs_twice:
            # The second run, in the backward, needs the tensors of other stages, too.
            forward = partial(_called_with, module, forward, others) if others else forward
            draws_on_host = self.contract is None or self.contract.draws_on_host
            seed = numbered_seed(*self.stream)
            again = partial(
                _as_before, core.generators, draws_on_host, seed, layer.flagged, self.flags
            )
            forward = run_twice(module, forward, state, again)
        if core.gates and core.gates[number].weights is not None:
            forward = partial(core.gates[number].run_by, forward)
        if recomputes:
            forward = partial(checkpoint, forward, use_reentrant=False)
        elif saves is not None:
            forward = partial(saves.layer, number, forward)
        if not self.is_bare:
            forward = with_state(module, forward, state, self.watch, changed)
        if others and not runs_twice:
            # Around the state: a layer may replace a buffer that was brought here.
            forward = partial(_called_with, module, forward, others)
        return forward if program.timer is None else program.timer.timed(number, forward)


def _with_input_hook(hooks: BackwardHook, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward that first connects the hooks on the layer's backward to its arguments."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*hooks.setup_input_hook(args), **kwargs)

    return run


@contextmanager
def _compiling(core: Core, layer: PlacedLayer) -> Iterator[None]:
    """Context of code of a layer that may be compiled: its tensors have their own classes."""
    classes, own_classes = [(tensor, type(tensor)) for tensor in layer.tensors], core.own_classes
    for tensor in layer.tensors:
        tensor.__class__ = own_classes.get(tensor, type(tensor))
    try:
        with core.unwatched(), with_compiling():
            yield
    finally:
        for tensor, cls in classes:
            tensor.__class__ = cls


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
