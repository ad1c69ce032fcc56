"""``PipeShiftStrategy``: what users give to a run, and what they ask of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from lightning_pipeshift.errors import ConfigurationError, PlanError
from lightning_pipeshift.lightning.hooks import StrategyHooks
from lightning_pipeshift.plan.document.moves import Move
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.communication import Communication
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.plan.search.options import Options
from lightning_pipeshift.plan.search.request import PlanRequest
from lightning_pipeshift.step.pipeline import Pipeline

_USUAL: Final = Communication()


class PipeShiftStrategy(StrategyHooks):
    """Trains one model as a pipeline over all devices, from an unmodified LightningModule.

    Every stage runs the user's own ``training_step``, and a layer runs at the stage that owns it.
    Schedules: GPipe (Huang et al. 2019, section 2.3) and 1F1B (Narayanan et al., PipeDream-Flush,
    2021, section 3.2), and those below.

    Args:
        virtual_machines: how many virtual machines (replicas of the pipeline) train in parallel; or
            the ranks of each in stage order, ``[[0, 2], [1, 3]]``. By default one, or as many as
            ``partition`` or ``plan`` has. ``"auto"``: the planner chooses. Where no ranks are
            named, the planner chooses their order, if it also chooses the cuts.
        microbatches: the number of slices of a batch; by default four for each stage, and 1
            with a single stage or an asynchronous schedule. ``"auto"``: the planner chooses.

            Results depend on both numbers, so ``"auto"`` chooses once, before the first batch of
            ``fit``, by a short measurement of the layers (on a batch from a copy of the training
            data, for which ``train_dataloader`` is called once more), the devices and the links.
            The choice is shown and saved in checkpoints, and a run that continues one keeps it. The
            hooks ``setup`` and ``configure_model`` run before it.
        schedule: ``"1f1b"``, ``"gpipe"``, or ``"eager_1f1b"``, which overlaps communication with
            compute and holds up to twice the activations; ``"zb-h1"``, which computes the gradients
            of weights where stages would be idle (Qi et al., ICLR 2024), with the same bits;
            ``"interleaved_1f1b"``, with two ranges of layers on each stage, so that less time is
            spent on filling and draining (Narayanan et al., SC 2021), with the same bits; or
            ``"async"`` or ``"async-2bw"``, which do not drain between batches, and use older
            weights (``docs/asynchronous.md``).
        partition: the layers of each stage. ``"auto"`` balances the measured forward times,
            ``"uniform"`` the number of layers, a list gives the number of layers of each stage, and
            a list of lists does so for each virtual machine. With ``"interleaved_1f1b"`` a list has
            a number for each range, in the order of the layers.
        plan: a :class:`~lightning_pipeshift.Plan`, or the path of one, that overrides the four
            above, ``recompute``, and ``batch_shares`` if it has any.
        batch_shares: how the samples of a global batch are divided among the virtual machines, one
            number for each: ``[3, 1]``. By default equally. A global batch has the DataLoader's
            batch size times the number of virtual machines.
        recompute: which layers drop the tensors saved for their backward, and are recomputed before
            it: ``"auto"``, as few as the memory of the devices requires; ``"full"``, all on stages
            that hold several microbatches; ``"none"``. It changes no bit of the results.
        profile_steps: after how many measured steps the layers are distributed again, if
            ``partition`` is ``"auto"``; 0: never.
        communication: how the ranks communicate: a :class:`~lightning_pipeshift.Communication`,
            with timeouts, backend, the way gradients are summed, and marks for the network.
        accelerator: as in every Lightning strategy; the Trainer's argument is the usual way.
        parallel_devices: this host's devices, likewise.
        cluster_environment: the source of a process's rank, likewise.
        checkpoint_io: the plugin that writes checkpoints, likewise.
        precision_plugin: the precision, likewise.

    Raises:
        ConfigurationError: an argument has a value that is not allowed; the message lists those
            that are.
    """

    def __init__(
        self,
        virtual_machines: int | Literal["auto"] | list[list[int]] | None = None,
        microbatches: int | Literal["auto"] | None = None,
        schedule: str = "1f1b",
        partition: Literal["auto", "uniform"] | list[int] | list[list[int]] = "auto",
        plan: str | Path | Plan | None = None,
        batch_shares: list[float] | None = None,
        recompute: Literal["auto", "full", "none"] = "auto",
        profile_steps: int = 20,
        communication: Communication = _USUAL,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        if not isinstance(communication, Communication):
            raise ConfigurationError(
                f"communication={communication!r}: pass a `Communication(...)`, which"
                " `lightning_pipeshift` has."
            )
        super().__init__(
            Options(
                virtual_machines=virtual_machines,
                microbatches=microbatches,
                schedule=schedule,
                partition=partition,
                plan=Plan.load(plan) if isinstance(plan, str | Path) else plan,
                batch_shares=batch_shares,
                recompute=recompute,
                profile_steps=profile_steps,
                **vars(communication),
            ),
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
        )

    # --- the rank's position ---

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self._session.connection.channels.stage

    @property
    def num_stages(self) -> int:
        """How many stages this rank's virtual machine has."""
        return self._session.connection.channels.num_stages

    @property
    def virtual_machine(self) -> int:
        """The index of this rank's virtual machine."""
        return self._session.connection.replicas.vm

    @property
    def topology(self) -> Topology:
        """The ranks of every virtual machine, in stage order."""
        return self._session.connection.replicas.topology

    @property
    def hosts(self) -> list[str]:
        """The name of each rank's host."""
        return self._session.connection.hosts

    # --- the plan and the measurements ---

    @property
    def pipeline(self) -> Pipeline:
        """This rank's pipeline, for tools that look into a run.

        Raises:
            ConfigurationError: no run has begun.
        """
        return self._run.pipeline

    @property
    def plan(self) -> Plan:
        """The plan in force. Raises PlanError before the first batch."""
        if self._session.run is None:
            raise PlanError(
                "There is no plan yet: no run has begun. It is made at the first batch."
            )
        return self.pipeline.planned.plan_in_order(self.pipeline.order)

    @property
    def is_measured(self) -> bool:
        """Whether the first steps have been measured; the same on every rank."""
        return self._session.run is not None and self.pipeline.planning.is_measured

    def predicted(self, plan: Plan) -> Plan:
        """The same plan with the simulator's prediction, by the measurements of this run. Every
        rank calls this.

        Args:
            plan: for the virtual machines of this run.

        Raises:
            PlanError: nothing has been measured yet.
        """
        return self.pipeline.planning.predicted(plan)

    def adopt(self, plan: Plan, at_once: bool = False) -> None:
        """Puts another plan in force: the next step prepares it, and still runs under the old one.
        Layers change their owners, and all results remain the same. If the plan has other ``ranks``
        in its virtual machines' stages, these become other stages. Layers that take long to
        transfer move one after the other in several steps. Every rank calls this, with the same
        plan, between the same steps (for example in ``on_train_batch_end``).

        Args:
            plan: the plan.
            at_once: whether all layers change their owners with the step after the next, however
                long they take to transfer.

        Raises:
            PlanError: it is for another model, or would change more than the owners of layers, the
                order of the ranks and the recomputation; or a device lacks memory for layers while
                they move (with an asynchronous schedule, only the first rank raises it then, and
                nothing moves).
        """
        self.pipeline.adopt(plan, at_once)

    def migrate(self, *moves: Move) -> None:
        """Makes layers change their owners: the next step prepares that, and still runs under the
        old placement. Layers that take long to transfer move one after the other in several steps.
        Every rank calls this, with the same moves, between the same steps; a second call adds to
        the first.

        Raises:
            PlanError: a layer, a stage or a virtual machine that does not exist; two moves of one
                layer; with an asynchronous schedule, a stage whose layers would not be contiguous;
                or a stage that would have too little memory, if only while layers move (with an
                asynchronous schedule, only the first rank raises it then). Then nothing changes.
        """
        self.pipeline.migrate(moves)

    @property
    def steps_left(self) -> float:
        """The number of steps over which a change of the plan can pay off; infinite if it was not
        set.
        """
        return self.pipeline.planning.steps_left

    @steps_left.setter
    def steps_left(self, steps: float) -> None:
        self.pipeline.planning.steps_left = steps

    @property
    def layer_names(self) -> list[str]:
        """The names of the layers, as plans and moves have them."""
        return self.pipeline.planned.names

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """The automatic changes of the plan so far, in their order: the fields that are known of a
        :class:`~lightning_pipeshift.timeline.outcomes.Change`, with the seconds of a step that were
        measured before, expected, and measured after it.
        """
        return [each.entries for each in self.pipeline.planning.decisions.changes]

    @property
    def move_seconds(self) -> float:
        """How long this rank has waited for the last change of owners, in seconds: the part that
        did not overlap with its steps.
        """
        return self.pipeline.changes.seconds

    @property
    def memory_figures(self) -> dict[str, float]:
        """Statistics of :class:`~lightning_pipeshift.MemoryCompression` on this rank since the run
        began: ``peak_bytes`` of saved tensors on the device, the ``budget_bytes`` that they may
        take (the device's, less the other memory of its layers), ``moved_bytes``,
        ``waited_seconds`` (how long the compute has waited for copies), ``num_evicted`` (tensors
        that were evicted although the plan keeps them) and ``host_peak_bytes`` (of all that has
        moved there). Of the optimizer's state that moves: ``optimizer_host_bytes``, the bytes in
        host memory; ``optimizer_peak_bytes``, the most of it on the device; and
        ``optimizer_moved_bytes``, the sum of the bytes moved out. Empty without the plugin.
        """
        memory = self.pipeline.memory
        return memory.figures() if memory is not None else {}

    @property
    def exposed_seconds(self) -> float:
        """How long the last step has waited for gradients of other virtual machines, in seconds,
        after its own compute.
        """
        return self.pipeline.exposed_seconds

    def gradient_norms(self, norm_type: float) -> dict[str, Tensor]:
        """The norm of every parameter's gradient by the parameter's name, over all stages.

        Every rank calls this. See :func:`lightning_pipeshift.grad_norm`, which adds the total.

        Args:
            norm_type: the order of the norm.

        Returns:
            Scalars, float32, on the CPU. A parameter without a gradient is omitted.
        """
        return self._run.training.gradients.norms_by_name(norm_type)

    @property
    def measured(self) -> tuple[Profile, Cluster, PlanRequest] | None:
        """The measurements, and the settings for a planner: on the first rank."""
        planning, memory = self.pipeline.planning, self.pipeline.settings.memory
        if planning.measured is None or not planning.is_measured:
            return None
        profile, cluster = planning.measured.profile, planning.measured.cluster
        policy = memory.policy if memory is not None else None
        return profile, cluster, self._options.request(profile.num_samples, policy)
