"""PipeShift: trains one model across different machines, from inside PyTorch Lightning.

Importing the package registers the strategy, so that ``Trainer(strategy="pipeshift")`` finds it.
"""

from lightning.pytorch.strategies import StrategyRegistry

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

__version__ = "0.1.0.dev0"

if "pipeshift" not in StrategyRegistry:
    StrategyRegistry.register(
        "pipeshift",
        PipeShiftStrategy,
        description="Pipeline parallelism for unmodified LightningModules, over unlike devices",
    )
