"""PipeShift: trains one model across different machines, from inside PyTorch Lightning.

Importing the package registers the strategy, so that ``Trainer(strategy="pipeshift")`` finds it.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_pipeshift.callbacks.layer_migration import LayerMigration
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
from lightning_pipeshift.grad_norm import grad_norm
from lightning_pipeshift.plan.moves import Move
from lightning_pipeshift.plan.plan import Plan
from lightning_pipeshift.plan.policies import (
    KeepAll,
    Planned,
    Policy,
    RecomputeAll,
    SwapAll,
    TensorRecord,
)
from lightning_pipeshift.plan.saved_tensors import Choice, Swap
from lightning_pipeshift.plugins.checkpoint_io import PipeShiftCheckpointIO
from lightning_pipeshift.plugins.memory_compression import MemoryCompression
from lightning_pipeshift.pretrained import load_pretrained
from lightning_pipeshift.strategy import PipeShiftStrategy

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
