"""Steps of an optimizer that update some of its parameters, and whether it allows them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeshift.compat.torch_private import has_step_hooks
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.lightning.steps import is_hook_used
from lightning_pipeshift.model.parameters.optimizer_trial import BY_PARAMETER

OptimizerOptions = list[dict[str, Any]]
"""The options of an optimizer's parameter groups (learning rates, for example)."""

GRADIENT_HOOKS: Final = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
STEP_METHODS: Final = ("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad")


def why_all_gradients(trainer: pl.Trainer) -> str:
    """Returns why a step of the Trainer's optimizer needs all gradients at once, in words; empty if
    it may update one layer after the other.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and scaler.is_enabled():
        return "precision='16-mixed' leaves out a step if any gradient overflows"
    if _clips_by_norm(trainer):
        return "clipping by norm needs the norm of all gradients"
    if looks := _who_looks(trainer):
        return f"{looks} may look at all gradients"
    return why_state_stays(trainer.optimizers)


def why_state_stays(optimizers: Sequence[Optimizer]) -> str:
    """Returns why the optimizers' state cannot be in host memory between two steps, in words; empty
    if it can: then a step is made for one layer after the other, with all gradients there.
    """
    for optimizer in optimizers:
        if type(optimizer) not in BY_PARAMETER:
            return (
                f"the optimizer {type(optimizer).__name__} is none of torch.optim's that update"
                " each parameter by its own gradient and state only (such as SGD, Adam, AdamW)"
            )
        if has_step_hooks(optimizer):
            return "a hook is called before or after each step of the optimizer"
    return ""


def check_known(
    optimizers: Sequence[Optimizer], root: nn.Module, is_known: Callable[[Any], bool]
) -> None:
    """Raises LayerError if an optimizer has a parameter that the model did not have when its layers
    were distributed: no stage computes its gradient.

    Args:
        optimizers: those of the run.
        root: the LightningModule.
        is_known: whether the model had a parameter then.
    """
    unknown = {
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not is_known(parameter)
    }
    if not unknown:
        return
    names = [repr(name) for name, each in root.named_parameters() if id(each) in unknown]
    if not names:
        raise LayerError(
            f"The optimizer has {len(unknown)} parameters that are in no module of the"
            " LightningModule, so no stage trains them. Make the module that has them an attribute"
            " of the LightningModule, and keep lists of modules in an `nn.ModuleList`."
        )
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    raise LayerError(
        f"The optimizer has {', '.join(names[:3])}{more}, which came into the model after its"
        " layers were distributed: a module or a parameter has been added or replaced while"
        " training runs, and no stage trains it. Create all modules before (in `__init__`,"
        " `configure_model` or `on_fit_start`) and write new values into parameters that are there"
        " (with `reset_parameters()`, `load_state_dict()` or `parameter.copy_()`); or end this"
        " `fit`, change the model, and call `fit` again."
    )


def only_clips_by_norm(trainer: pl.Trainer) -> bool:
    """Whether the Trainer clips gradients by their norm, and no code may change them before."""
    return _clips_by_norm(trainer) and not _who_looks(trainer)


def _clips_by_norm(trainer: pl.Trainer) -> bool:
    return bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"


def _who_looks(trainer: pl.Trainer) -> str:
    """The code that may look at gradients between the backward and the optimizer's step, in words;
    empty if there is none.
    """
    module, precision = trainer.lightning_module, trainer.precision_plugin
    for name in STEP_METHODS:
        if is_overridden(name, module):
            return f"`{name}` of the LightningModule"
    for hook in GRADIENT_HOOKS:
        if is_hook_used(trainer, hook):
            return f"a hook `{hook}`"
    if any(_is_foreign(kind) for kind in type(precision).__mro__):
        return f"the precision plugin {type(precision).__name__}"
    return ""


def _is_foreign(kind: type) -> bool:
    """Whether a precision plugin's class is neither Lightning's nor ours, and changes a step."""
    package = kind.__module__.partition(".")[0]
    methods = ("optimizer_step", "clip_gradients", "clip_grad_by_value", "_after_closure")
    return package not in ("lightning", "lightning_pipeshift") and any(
        name in vars(kind) for name in methods
    )


def options_of(optimizer: Optimizer) -> OptimizerOptions:
    """Returns a copy of an optimizer's options."""
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


@contextmanager
def with_options(
    optimizer: Optimizer, options: OptimizerOptions
) -> Generator[OptimizerOptions, None, None]:
    """Context in which an optimizer has other options. Gives those that it has afterwards."""
    present = options_of(optimizer)
    _set_options(optimizer, options)
    try:
        yield present
    finally:
        _set_options(optimizer, present)


def step_with(
    trainer: pl.Trainer,
    options: OptimizerOptions,
    counting: Sequence[OptimizerOptions] | None = None,
) -> None:
    """Makes a step of the Trainer's only optimizer, which has the same options afterwards.

    Args:
        trainer: the Trainer.
        options: of this step.
        counting: an optimizer may count its steps in its options (schedule-free ones do).
            Such changes go on in its present options and in these; ``None``: they are dropped.
    """
    optimizer = trainer.optimizers[0]
    with with_options(optimizer, options) as present:
        # A plugin's closure returns the loss, which no optimizer reads that steps only once.
        trainer.precision_plugin.optimizer_step(
            optimizer, model=trainer.lightning_module, closure=lambda: torch.zeros(())
        )
        followers = [present, *counting] if counting is not None else []
        for place, (before, group) in enumerate(zip(options, optimizer.param_groups, strict=True)):
            changed = {
                name: group[name]
                for name, value in before.items()
                if group[name] is not value and not bool(group[name] == value)
            }
            for follower in followers if changed else ():
                follower[place].update(changed)


def _set_options(optimizer: Optimizer, options: OptimizerOptions) -> None:
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)


@contextmanager
def outside_of_steps(dtype: torch.dtype, device: torch.device) -> Generator[None, None, None]:
    """Context in which torch computes as it does between two steps, inside of one.

    Args:
        dtype: the default type between two steps.
        device: for which no operation is cast automatically.
    """
    inside = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_default_dtype(inside)
