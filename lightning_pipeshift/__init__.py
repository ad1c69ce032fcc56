"""PipeShift: trains one model across different machines, from inside PyTorch Lightning.

Importing the package registers the strategy, so that ``Trainer(strategy="pipeshift")`` finds it.
Everything else is imported when it is first used: a script that imports the package for a run that
it may not make, or for an error's type, waits for nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import StrategyRegistry

if TYPE_CHECKING:
    from lightning_pipeshift.checkpoint.checkpoint_io import PipeShiftCheckpointIO
    from lightning_pipeshift.checkpoint.pretrained import load_pretrained
    from lightning_pipeshift.errors import (
        BatchError,
        BudgetError,
        CheckpointError,
        CheckpointNotFoundError,
        ConfigurationError,
        LayerError,
        NotFiniteError,
        PartitionError,
        PipeShiftError,
        PlanError,
        ScheduleError,
        StageFailedError,
    )
    from lightning_pipeshift.lightning.callbacks.layer_migration import LayerMigration
    from lightning_pipeshift.lightning.callbacks.pipeline_timeline import PipelineTimeline
    from lightning_pipeshift.lightning.gradient_norms import grad_norm
    from lightning_pipeshift.lightning.precision.memory_compression import MemoryCompression
    from lightning_pipeshift.lightning.strategy import PipeShiftStrategy
    from lightning_pipeshift.plan.document.moves import Move
    from lightning_pipeshift.plan.document.plan import Plan
    from lightning_pipeshift.plan.inputs.communication import Communication
    from lightning_pipeshift.plan.inputs.policies import (
        KeepAll,
        Planned,
        Policy,
        RecomputeAll,
        SwapAll,
        TensorRecord,
    )
    from lightning_pipeshift.plan.inputs.saved_tensors import Choice, Swap

__all__ = [
    "BatchError",
    "BudgetError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "Choice",
    "Communication",
    "ConfigurationError",
    "KeepAll",
    "LayerError",
    "LayerMigration",
    "MemoryCompression",
    "Move",
    "NotFiniteError",
    "PartitionError",
    "PipeShiftCheckpointIO",
    "PipeShiftError",
    "PipeShiftStrategy",
    "PipelineTimeline",
    "Plan",
    "PlanError",
    "Planned",
    "Policy",
    "RecomputeAll",
    "ScheduleError",
    "StageFailedError",
    "Swap",
    "SwapAll",
    "TensorRecord",
    "grad_norm",
    "load_pretrained",
]

__version__ = "0.1.0"

# The module of each public name: the imports above, for Python.
_MODULES = {
    "checkpoint.checkpoint_io": "PipeShiftCheckpointIO",
    "checkpoint.pretrained": "load_pretrained",
    "errors": "BatchError BudgetError CheckpointError CheckpointNotFoundError ConfigurationError"
    " LayerError NotFiniteError PartitionError PipeShiftError PlanError ScheduleError"
    " StageFailedError",
    "lightning.callbacks.layer_migration": "LayerMigration",
    "lightning.callbacks.pipeline_timeline": "PipelineTimeline",
    "lightning.gradient_norms": "grad_norm",
    "lightning.precision.memory_compression": "MemoryCompression",
    "lightning.strategy": "PipeShiftStrategy",
    "plan.document.moves": "Move",
    "plan.document.plan": "Plan",
    "plan.inputs.communication": "Communication",
    "plan.inputs.policies": "KeepAll Planned Policy RecomputeAll SwapAll TensorRecord",
    "plan.inputs.saved_tensors": "Choice Swap",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    except AttributeError as error:
        # Python would say that there is no such name, and hide why.
        raise ImportError(f"{__name__}.{name} cannot be imported: {error}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _strategy(**arguments: Any) -> PipeShiftStrategy:
    from lightning_pipeshift.lightning.strategy import PipeShiftStrategy

    return PipeShiftStrategy(**arguments)


if "pipeshift" not in StrategyRegistry:
    StrategyRegistry.register(
        "pipeshift",
        _strategy,
        description="Pipeline parallelism for unmodified LightningModules, over unlike devices",
    )
