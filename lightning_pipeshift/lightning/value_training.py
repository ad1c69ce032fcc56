"""Training on values: every stage runs the whole of the user's step."""

from __future__ import annotations

from typing import Any

from lightning_pipeshift.lightning.training import TrainingSteps


class ValueTraining(TrainingSteps):
    """The training steps of a :class:`~lightning_pipeshift.step.pipeline.ValuePipeline`."""

    def __init__(self, trainer: Any, pipeline: Any, *rest: Any) -> None:
        super().__init__(trainer, pipeline, *rest)
        pipeline.find_optimizers = lambda: trainer.optimizers
