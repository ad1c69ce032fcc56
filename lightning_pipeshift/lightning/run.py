"""One run: its pipeline, and the parts that Lightning's hooks delegate to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_pipeshift.errors import explained
from lightning_pipeshift.lightning.asynchronous import AsynchronousTraining
from lightning_pipeshift.lightning.connection import Connection
from lightning_pipeshift.lightning.evaluation import EvaluationSteps
from lightning_pipeshift.lightning.finetuning import SharedComparison
from lightning_pipeshift.lightning.interruptions import Interruptions
from lightning_pipeshift.lightning.metric_sync import MetricSync, silence_advice_to_synchronise
from lightning_pipeshift.lightning.over_stages import by_itself, over_stages
from lightning_pipeshift.lightning.patches import Adjustments
from lightning_pipeshift.lightning.steps import StepContext
from lightning_pipeshift.lightning.training import TrainingSteps
from lightning_pipeshift.model.parameters.deferred_init import DeferredInit
from lightning_pipeshift.runtime.comm.backends import device_of
from lightning_pipeshift.runtime.planning.make_plan import Settings
from lightning_pipeshift.step.asynchronous import AsynchronousPipeline
from lightning_pipeshift.step.control_files import ControlFiles
from lightning_pipeshift.step.pipeline import Pipeline
from lightning_pipeshift.step.status import status_of
from lightning_pipeshift.step.synchronous import SynchronousPipeline


def _say(message: str) -> None:
    rank_zero_info(f"PipeShift: {explained(message)}")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of one run. They answer questions until the next run starts."""

    pipeline: Pipeline
    requests: ControlFiles
    training: TrainingSteps
    evaluation: EvaluationSteps
    interruptions: Interruptions
    metric_sync: MetricSync

    @classmethod
    def start(
        cls,
        trainer: pl.Trainer,
        connection: Connection,
        settings: Settings,
        deferred: DeferredInit,
    ) -> Run:
        """Makes the pipeline of the Trainer's module. Every rank calls this.

        Args:
            trainer: the Trainer.
            connection: to the other ranks.
            settings: of the run.
            deferred: has the values of tensors that are on the meta device.
        """
        topology = connection.replicas.topology
        number, is_given = settings.num_microbatches(topology.stages_per_vm), settings.microbatches
        trains = trainer.state.fn == TrainerFn.FITTING
        if trains and not (is_given or settings.plan or settings.only_measures) and number > 1:
            # Before anything else that is said of the run.
            _say(
                f"a batch is cut into {number} microbatches: the default, which depends on the"
                " number of stages, and results depend on it. Set `PipeShiftStrategy(microbatches="
                f"{number})` for the same results on other numbers of devices."
            )
        module, device = trainer.lightning_module, connection.channels.device
        metric_sync = MetricSync(connection.replicas)
        metric_sync.attach(module, device)
        requests = ControlFiles()
        make_pipeline: type[Pipeline] = SynchronousPipeline
        make_training: Any = TrainingSteps
        if settings.is_asynchronous and not settings.leaves_steps_whole(topology.stages_per_vm):
            make_pipeline, make_training = AsynchronousPipeline, AsynchronousTraining
        pipeline = make_pipeline(
            root=module,
            channels=connection.channels,
            replicas=connection.replicas,
            rings=connection.rings,
            groups=connection.groups,
            settings=settings,
            here=device_of(device),
            deferred=deferred,
            say=_say,
            outside=requests,
            fail_from_thread=connection.announce_from_thread,
            profile=trainer.profiler.profile,  # type: ignore[attr-defined]
        )
        context = StepContext(trainer, pipeline.recorder, metric_sync)
        return cls(
            pipeline=pipeline,
            requests=requests,
            training=make_training(trainer, pipeline, context, connection.hosts, _say),
            evaluation=EvaluationSteps(trainer, pipeline, context),
            interruptions=Interruptions(trainer, pipeline, connection),
            metric_sync=metric_sync,
        )

    def adjust(
        self,
        trainer: pl.Trainer,
        adjustments: Adjustments,
        deferred: DeferredInit,
        is_sharded: bool,
    ) -> None:
        """Changes objects of Lightning's, until the end of the run.

        Args:
            trainer: the Trainer.
            adjustments: undoes the changes.
            deferred: as for :meth:`start`.
            is_sharded: whether each rank saves its own part of a checkpoint.
        """
        precision, channels = trainer.precision_plugin, self.pipeline.channels
        gradients = self.training.gradients
        over_stages(precision, gradients.norms, gradients.hooks, channels.sum)
        adjustments.when_over(partial(by_itself, precision))
        adjustments.when_over(silence_advice_to_synchronise())
        adjustments.take_steps_without_loss(trainer)
        self.training.adjust(adjustments)
        adjustments.filter_parameters(
            partial(SharedComparison, trainer.lightning_module, channels, deferred)
        )
        self.interruptions.listen(adjustments, is_sharded)

    def take_requests(self, folder: Path) -> None:
        """Takes requests for moves in a folder, and writes the run's status there."""
        try:
            self.requests.open(folder, partial(status_of, self.pipeline))
        except OSError as error:
            _say(f"this run takes no requests for moves, as its folder is not writable: {error}.")
        else:
            _say(f"`pipeshift move --run {folder}` shows the status of this run.")

    def release(self) -> None:
        """Takes no more requests, and ends what runs beside the steps."""
        self.requests.close()
        self.pipeline.release()

    def end(self, has_failed: bool) -> None:
        """Makes the model whole again, unless other ranks can no longer send their layers."""
        self.release()
        if not has_failed:
            self.pipeline.make_whole()
        elif self.pipeline.holdings is not None:
            self.pipeline.holdings.to_cpu()
