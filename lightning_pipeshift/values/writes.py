"""Which tensors a call may write to: a write has to reach all that share the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import base_of, num_other_uses
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.values.value import PLACED, StepParameter, Value, user_line

if TYPE_CHECKING:
    from lightning_pipeshift.values.calls import Call, Calls
    from lightning_pipeshift.values.core import Core


def require_writable(program: Calls, call: Call, at: int, with_gradient: bool) -> None:
    """Raises LayerError if a write would reach a copy only: of a tensor with views, or with a
    history that stays elsewhere.

    Args:
        program: which calls it.
        call: the call.
        at: the number of the argument tensor that it writes to, a value or a parameter.
        with_gradient: whether the call's gradient is needed.
    """
    assert call.contract is not None
    target = call.arguments.tensors[at]
    account = program.account_of(target)
    is_away = account.owner != call.stage
    stays = isinstance(target, StepParameter) or (isinstance(target, Value) and target.stays)
    if stays and is_away:
        raise LayerError(
            f"`{call.label}` ({user_line()}) writes to parameters or gradients of several"
            " stages at once, or in a layer of another stage. Write to each by itself"
            " (`foreach=False`, or `for p in ...: p.mul_(2)`)."
        )
    others = [
        program.account_of(call.arguments.tensors[other])
        for other in call.contract.used - {at}
        if type(call.arguments.tensors[other]) in PLACED
    ]
    has_views = len(account.memory.accounts) > 1
    if (
        (is_away and any(other.memory is account.memory for other in others))
        or (is_away and account.requires_grad and not with_gradient)
        or (not is_away and has_views and (account.has_left or account.memory.has_returned))
    ):
        raise LayerError(
            f"`{call.label}` ({user_line()}) writes in place to a value that other tensors"
            " share, or whose gradient another stage computes. Use an operation that returns a"
            " new tensor (`x = x * 2` in place of `x.mul_(2)`)."
        )


def require_own(core: Core, tensor: Tensor, label: str, needs_gradient: bool) -> None:
    """Raises LayerError if a common tensor, with the tensor that it is a view of, cannot become a
    value of one stage: others that share its memory would not.

    Args:
        core: this stage's.
        tensor: the tensor.
        label: of what writes to it.
        needs_gradient: whether it needs a gradient then.
    """
    if not is_own(core, tensor, needs_gradient):
        require_no_parameter(core, tensor, label)
        raise LayerError(
            f"`{label}` ({user_line()}) writes a value of one stage into a tensor that every"
            " stage has, and whose memory other tensors or arrays share, or that needs a"
            " gradient, or whose class is not `Tensor`. Write into a tensor of its own"
            " (`x.clone()`), before others share it, write by index (`x[i] = value`), or use an"
            " operation that returns a new tensor (`torch.where`, `torch.cat`)."
        )


def require_no_parameter(core: Core, tensor: Tensor, label: str) -> None:
    """Raises LayerError for a tensor that one stage has, or a parameter, between two steps: there
    they are no values.
    """
    if isinstance(tensor, nn.Parameter) and not core.sees_parameters:
        raise LayerError(
            f"`{label}` ({user_line()}) writes a value of a step into a parameter, and runs"
            " between two steps, where a parameter's bytes are at its own stage only. Do it in"
            " `training_step` (under `torch.no_grad()`), or in `on_before_optimizer_step`."
        )


def is_own(core: Core, tensor: Tensor, needs_gradient: bool) -> bool:
    """Whether a common tensor can become a value, with what it is a view of, and its aliases."""
    base = base_of(tensor)
    if base is not None:
        is_alone = num_other_uses(tensor) == 1 and not tensor.requires_grad
        return is_alone and not needs_gradient and _may_become_value(core, base)
    if tensor.requires_grad and (needs_gradient or not tensor.is_leaf):
        return False
    if num_other_uses(tensor) and not tensor.untyped_storage().resizable():
        return False  # An array of NumPy has the memory, too.
    aliases = core.aliases.of(tensor)
    return len(aliases) == num_other_uses(tensor) and all(
        _may_become_value(core, x) for x in (tensor, *aliases)
    )


def _may_become_value(core: Core, tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor not in core.parameter_owners
