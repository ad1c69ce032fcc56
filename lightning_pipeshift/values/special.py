"""Functions of torch that are no operations on values: what they do instead."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_pipeshift.compat.torch_private import without_torch_function_of_subclasses
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.values.backward import gradients_of
from lightning_pipeshift.values.contract import spec_of
from lightning_pipeshift.values.for_each import BY_STAGE
from lightning_pipeshift.values.reads import offer
from lightning_pipeshift.values.value import DATA, PLACED, StepParameter, Value, run_by, user_line

if TYPE_CHECKING:
    from lightning_pipeshift.values.microbatch import Microbatch


def _over_rows(microbatch: Microbatch, tensor: Tensor) -> Any:
    return iter(tensor.unbind(0))


def _detached(microbatch: Microbatch, tensor: Tensor) -> Any:
    return tensor.detach()


def _require_gradient(microbatch: Microbatch, tensor: Tensor, requires_grad: bool = True) -> Tensor:
    microbatch.note("requires_grad_", requires_grad)
    if isinstance(tensor, StepParameter):
        # From here in the step on.
        microbatch.core.switched.setdefault(tensor, tensor.requires_grad)
        if tensor in microbatch.accounts:
            microbatch.accounts[tensor].requires_grad = requires_grad
        with without_torch_function_of_subclasses():
            return tensor.requires_grad_(requires_grad)
    account = microbatch.account_of(tensor)
    account.requires_grad = requires_grad
    with without_torch_function_of_subclasses():
        tensor.requires_grad_(requires_grad)
        if account.tensor is not None and account.owner == microbatch.stage:
            account.tensor.requires_grad_(requires_grad)
    return tensor


def _gradient(microbatch: Microbatch, tensor: Tensor) -> Tensor | None:
    """The attribute ``grad``: a value of the stage of its parameter or value."""
    _require_own_backward(microbatch)
    if not isinstance(tensor, StepParameter):
        return _told_gradients(microbatch, [tensor])[tensor]
    core = microbatch.core
    if microbatch.gradients is None:
        microbatch.gradients = _told_gradients(microbatch, core.all_parameters())
    gradient = microbatch.gradients[tensor]
    if core.parameter_owners[tensor] == microbatch.stage:
        known = gradient.account.tensor if isinstance(gradient, Value) else None
        if _plain_gradient(tensor) is not known:
            raise LayerError(
                f"The gradient of a parameter ({user_line()}) was replaced by code that does not"
                " run in the step, after the step had asked for it."
            )
    return gradient


def _set_gradient(microbatch: Microbatch, tensor: Tensor, gradient: Tensor | None = None) -> None:
    _require_own_backward(microbatch)
    microbatch.sets_gradients = True
    if isinstance(tensor, StepParameter):
        microbatch.core.place_parameters([tensor], ())
    account, plain = microbatch.account_of(tensor), gradient
    if gradient is not None and type(gradient) in PLACED:
        plain = microbatch.bring(gradient, account.owner, False, "grad")
    if microbatch.stage == account.owner:
        assert account.tensor is not None
        with without_torch_function_of_subclasses():
            account.tensor.grad = None if plain is None else plain.detach()
    if gradient is not None:
        microbatch.gradients = None
    elif microbatch.gradients is not None and tensor in microbatch.gradients:
        microbatch.gradients[tensor] = None


def _require_own_backward(microbatch: Microbatch) -> None:
    microbatch.note("grad")
    if microbatch.has_later_backward:
        raise LayerError(
            f"The step uses `.grad` ({user_line()}), and its backward runs later, among those of"
            " other microbatches. Use gradients in `on_before_optimizer_step`, or with manual"
            " optimization, behind `manual_backward`."
        )


def _plain_gradient(tensor: Tensor | None) -> Tensor | None:
    with without_torch_function_of_subclasses():
        has_one = tensor is not None and (tensor.is_leaf or tensor.retains_grad)
        return tensor.grad if tensor is not None and has_one else None


def _told_gradients(
    microbatch: Microbatch, tensors: Sequence[Tensor]
) -> dict[Tensor, Tensor | None]:
    """The gradients of tensors. Only their owners know which there are, and with which strides."""
    accounts = [(tensor, microbatch.account_of(tensor)) for tensor in tensors]
    own = [
        _plain_gradient(account.tensor) if account.owner == microbatch.stage else None
        for _, account in accounts
    ]
    found = dict(zip(tensors, _told(microbatch, tensors, own), strict=True))
    for value in found.values():
        if value is not None:
            cast(Value, value).stays = True
    return found


def _told(
    microbatch: Microbatch, tensors: Sequence[Tensor], own: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The values of gradients.

    Args:
        microbatch: its step runs.
        tensors: whose gradients they are.
        own: the gradients of those tensors that this stage has, if there are any.
    """
    # Those of common tensors are common.
    found = [None if type(x) in PLACED else own[at] for at, x in enumerate(tensors)]
    owners = [microbatch.account_of(x).owner if type(x) in PLACED else -1 for x in tensors]
    for stage in sorted(set(owners) - {-1}):
        numbers = [at for at, owner in enumerate(owners) if owner == stage]
        with without_torch_function_of_subclasses():
            told = [None if (x := own[at]) is None else spec_of(x) for at in numbers]
        for at, spec in zip(numbers, microbatch.tell(told, stage, "grad"), strict=True):
            if spec is None:
                continue
            account = microbatch.new_account(stage, spec.requires_grad, own[at])
            layers = microbatch.core.layers_with.get(tensors[at], ())
            account.layer = layers[0] if len(layers) == 1 else None
            with without_torch_function_of_subclasses():
                offer(microbatch.mailbox, account, is_changed_unseen=True)
            found[at] = microbatch.new_value(spec, account)
    return found


def _gradients(
    microbatch: Microbatch,
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad``: the gradients are values of the stages of the inputs."""
    tensors = list(inputs) if type(inputs) in (list, tuple) else [inputs]
    if microbatch.is_alone:
        microbatch.place_parameters([x for x in tensors if type(x) in PLACED])
        options = retain_graph, create_graph, only_inputs, allow_unused, is_grads_batched
        args = microbatch.plain((outputs, tensors, grad_outputs, *options, materialize_grads))
        with run_by(None), without_torch_function_of_subclasses():
            alone = torch.autograd.grad(*args)
        # Values here too: what draws random numbers for them draws those of several stages.
        return tuple(_told(microbatch, tensors, alone))
    losses = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    if grad_outputs is None or isinstance(grad_outputs, Tensor):
        grad_outputs = [grad_outputs] * len(losses)
    own = gradients_of(
        microbatch,
        losses,
        tensors,
        list(grad_outputs),
        bool(retain_graph),
        create_graph or is_grads_batched,
    )
    found = _told(microbatch, tensors, own)
    for at, tensor in enumerate(tensors):
        if found[at] is None and materialize_grads:
            found[at] = torch.zeros_like(tensor)
        elif found[at] is None and not allow_unused:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set"
                f" allow_unused=True if this is the desired behavior. It is input {at} of"
                f" `torch.autograd.grad` ({user_line()})."
            )
    return tuple(found)


def _register_hook(microbatch: Microbatch, tensor: Tensor, hook: Callable[[Any], Any]) -> Any:
    """At the owner the whole gradient comes together; the hook runs there only."""

    def defined(gradient: Tensor | None) -> Any:
        return None if gradient is None else hook(gradient)

    microbatch.graphs.keep_whole()
    with without_torch_function_of_subclasses():
        here = microbatch.owned(tensor)
        if here is None and tensor.requires_grad:
            return RemovableHandle(OrderedDict())
        return (tensor if here is None else here).register_hook(defined)


def _retain_gradient(microbatch: Microbatch, tensor: Tensor) -> None:
    with without_torch_function_of_subclasses():
        here = microbatch.owned(tensor)
        (tensor if here is None else here).retain_grad()


def _backward(microbatch: Microbatch, *args: Any, **kwargs: Any) -> None:
    microbatch.backward(*args, **kwargs)


def _set_memory(microbatch: Microbatch, *args: Any, **kwargs: Any) -> Any:
    if microbatch.is_alone:
        args, kwargs = microbatch.plain((args, kwargs))
        with run_by(None), without_torch_function_of_subclasses():
            return Tensor.set_(*args, **kwargs)
    raise LayerError(
        f"`set_` ({user_line()}) is not supported on a tensor that one stage owns: write in place"
        " instead (`with torch.no_grad(): x.copy_(y)`)."
    )


def _set_data(microbatch: Microbatch, tensor: Tensor, data: Tensor) -> None:
    """``tensor.data = data``: the tensor has the other one's memory from then on. Where they are
    at different stages it has a copy, and what is used after a write to the other is an error.
    """
    if data is tensor:
        return
    microbatch.place_parameters([x for x in (tensor, data) if type(x) in PLACED])
    for one, other in ((tensor, data), (data, tensor)):
        if type(one) not in PLACED:
            microbatch.make_value(one, microbatch.account_of(other).owner)
    before, source = microbatch.account_of(tensor), microbatch.account_of(data)
    microbatch.note("data", before.name, source.name)
    is_computed = isinstance(tensor, Value) and not tensor.is_leaf
    is_fixed = isinstance(tensor, Value) or microbatch.mailbox.num_stages > 1
    with without_torch_function_of_subclasses():
        layouts = {(x.shape, x.stride(), x.dtype) for x in (tensor, data)}
    if is_computed or (is_fixed and len(layouts) > 1):
        raise LayerError(
            f"`x.data = y` ({user_line()}) changes the shape, the strides or the type of `x`, or"
            " `x` has a history. Write in place instead (`with torch.no_grad(): x.copy_(y)`)."
        )
    plain = microbatch.bring(data, before.owner, False, "data")
    held = before.tensor if microbatch.stage == before.owner else None
    account = microbatch.new_account(before.owner, before.requires_grad, held, source.memory)
    account.graph, account.segment, account.layer = before.graph, before.segment, source.layer
    if held is not None:
        assert plain is not None
        # What is on its way must not change.
        microbatch.mailbox.flush()
        with run_by(None), without_torch_function_of_subclasses():
            held.data = plain if source.owner == before.owner else plain.clone()
            if not held.is_inference():
                # A backward that has saved it must not go on with other bytes.
                torch.autograd.graph.increment_version(held)
            offer(microbatch.mailbox, account)
    microbatch.share_memory(tensor, account)


_GRAD: Any = Tensor.grad

SPECIAL: dict[Any, Callable[..., Any]] = {
    Tensor.backward: _backward,
    _GRAD.__get__: _gradient,
    _GRAD.__set__: _set_gradient,
    _GRAD.__delete__: _set_gradient,
    Tensor.__iter__: _over_rows,
    DATA.__get__: _detached,
    DATA.__set__: _set_data,
    Tensor.requires_grad_: _require_gradient,
    Tensor.requires_grad.__set__: _require_gradient,  # type: ignore[attr-defined]
    Tensor.register_hook: _register_hook,
    Tensor.retain_grad: _retain_gradient,
    torch.autograd.grad: _gradients,
    Tensor.set_: _set_memory,
    **BY_STAGE,
}
"""By the function: ``(microbatch, its arguments) -> its result``."""
