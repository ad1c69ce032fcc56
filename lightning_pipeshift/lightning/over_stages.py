"""Makes any precision plugin decide over all stages: with one gradient norm, and one overflow
decision.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeshift.compat.torch_private import scale_device, scaler_device, scaler_state
from lightning_pipeshift.model.tensors.transfer import to_device, to_host
from lightning_pipeshift.values.value import run_by

# A function of the optimizer's parameters and the kind of norm: returns the norm of each parameter
# of the model, over all stages.
GradientNorms = Callable[[list[Tensor], float], Tensor]
# The context in which user code may read gradients.
GradientHooks = Callable[[], AbstractContextManager[None]]
# A function of a flag tensor of this stage: returns whether it is set on any stage.
AnyStage = Callable[[Tensor], Tensor]


class _OverStages(Precision):
    """Mixed into the class of the user's precision plugin, so that the plugin remains an instance
    of its own class.
    """

    gradient_norms: GradientNorms
    gradient_hooks: GradientHooks

    def post_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Makes `on_after_backward` see that parameters of other stages have gradients."""
        with self.gradient_hooks():
            return super().post_backward(*args, **kwargs)

    def _after_closure(self, *args: Any, **kwargs: Any) -> None:
        # The hooks before an optimizer's step, including the one that clips.
        with self.gradient_hooks():
            super()._after_closure(*args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clips by the norm over the parameters of all stages, each counted once."""
        with run_by(None):
            self._clip_by_norm(optimizer, clip_val)

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        parameters: list[Tensor] = [p for p in self.main_params(optimizer) if isinstance(p, Tensor)]
        norms = self.gradient_norms(parameters, 2.0)
        total = torch.linalg.vector_norm(norms.float(), 2.0)
        held = [p for p in parameters if p.grad is not None and not p.grad.is_meta]
        if held:
            total = to_device(total, held[0].device)
            torch.nn.utils.clip_grads_with_norm_(held, clip_val, total)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clips this stage's gradients. It may have none, for which torch raises an error."""
        with run_by(None):
            held = [p for p in self.main_params(optimizer) if isinstance(p, Tensor)]
            held = [p for p in held if p.grad is not None and not p.grad.is_meta]
            if held:
                torch.nn.utils.clip_grad_value_(held, clip_val)


class _ScalerOverStages(torch.amp.GradScaler):
    """A gradient scaler that skips a step on every stage when any stage found an overflow."""

    any_stage: AnyStage

    def unscale_(self, optimizer: Optimizer) -> None:
        super().unscale_(optimizer)
        self._agree(optimizer)

    def _check_inf_per_device(self, optimizer: Optimizer) -> Any:
        # Replaces `unscale_` for optimizers whose kernel unscales (`fused=True`).
        super()._check_inf_per_device(optimizer)
        self._agree(optimizer)
        return scaler_state(self, optimizer)["found_inf_per_device"]

    def _agree(self, optimizer: Optimizer) -> None:
        state = scaler_state(self, optimizer)
        found = state["found_inf_per_device"]
        mine = torch.zeros(1)
        for flag in to_host(list(found.values())):
            mine += flag
        # Kernels treat 1, and no other value, as an overflow, and the scaler sums the entries.
        verdict = self.any_stage(mine).clamp(max=1).reshape(())
        device = scale_device(self)
        # A stage without gradients recorded nothing; the scaler insists on an entry. In host memory
        # it can be read at once; for kernels, the scaler takes it to the device.
        state["found_inf_per_device"] = {next(iter(found), device): verdict}


def over_stages(
    plugin: Precision,
    gradient_norms: GradientNorms,
    gradient_hooks: GradientHooks,
    any_stage: AnyStage,
) -> Precision:
    """Makes the user's precision plugin decide over all stages.

    The plugin keeps its state, its class's name (checkpoints store its state under it) and
    ``isinstance``.
    """
    if not isinstance(plugin, _OverStages):
        kind = type(plugin)
        combined = type(kind.__name__, (_OverStages, kind), {"__qualname__": kind.__qualname__})
        plugin.__class__ = combined
    plugin.gradient_norms = gradient_norms  # type: ignore[attr-defined]
    plugin.gradient_hooks = gradient_hooks  # type: ignore[attr-defined]
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        if not isinstance(plugin.scaler, _ScalerOverStages):
            plugin.scaler.__class__ = _ScalerOverStages
        plugin.scaler.any_stage = any_stage  # type: ignore[attr-defined]
    return plugin


def by_itself(plugin: Precision) -> None:
    """Undoes :func:`over_stages`: the plugin is a plain object of the user's class again."""
    if isinstance(plugin, _OverStages):
        plugin.__class__ = type(plugin).__bases__[1]
        for name in ("gradient_norms", "gradient_hooks"):
            delattr(plugin, name)
    scaler: Any = getattr(plugin, "scaler", None)
    if isinstance(scaler, _ScalerOverStages):
        vars(scaler).pop("any_stage")
        setattr(scaler, "__class__", torch.amp.GradScaler)  # noqa: B010


def loss_scale_of(plugin: Precision) -> float | Tensor:
    """The factor by which the plugin multiplies a loss before its backward. On a GPU it is a
    float64 tensor: to read the scaler's, the program would have to wait for the earlier step.
    """
    scaler = getattr(plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return 1.0
    # The first `scale` makes the scaler's state.
    scale: Tensor = scaler.scale(torch.ones((), device=scaler_device(scaler))).double()
    return float(scale) if scale.device.type == "cpu" else scale
