"""A strategy that has a pipeline: its plan, and the norms of its ranks' gradients."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_pipeshift.errors import ConfigurationError, PlanError
from lightning_pipeshift.lightning.connected import ConnectedStrategy
from lightning_pipeshift.plan.document.moves import Move
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.step.control_files import ControlFiles
from lightning_pipeshift.runtime.step.pipeline import Pipeline


class PipelinedStrategy(ConnectedStrategy):
    """The part of the strategy that has a pipeline, and does not depend on how it is set up."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pipeline: Pipeline | None
        self._trained: Pipeline | None
        self._outside: ControlFiles

    def _of_a_run(self) -> dict[str, Any]:
        own = {"_pipeline": None, "_trained": None, "_outside": ControlFiles()}
        return super()._of_a_run() | own

    # --- the plan and the measurements ---

    @property
    def plan(self) -> Plan:
        """The plan in force. Raises PlanError before the first batch."""
        if self._pipeline is None:
            raise PlanError(
                "There is no plan yet: no run has begun. It is made at the first batch."
            )
        return self._pipeline.plan_in_call_order

    @property
    def is_measured(self) -> bool:
        """Whether the first steps have been measured; the same on every rank."""
        return self._pipeline is not None and self._pipeline.planning.is_measured

    def predicted(self, plan: Plan) -> Plan:
        """The same plan with the simulator's prediction, by the measurements of this run. Every
        rank calls this.

        Args:
            plan: for the virtual machines of this run.

        Raises:
            PlanError: nothing has been measured yet.
        """
        return self._require_pipeline().planning.predicted(plan)

    def adopt(self, plan: Plan, from_microbatch: int = 0) -> None:
        """Puts another plan in force: the next step prepares it, and still runs under the old one.
        Layers change their owners, and all results remain the same. Every rank calls this, with the
        same plan, between the same steps (for example in ``on_train_batch_end``).

        Args:
            plan: the plan.
            from_microbatch: the microbatch of the step after the next from which on it is in force.
                Earlier microbatches of that step run on the old owners, forward and backward.

        Raises:
            PlanError: it is for another model, or would change more than the owners of layers and
                the recomputation; or there is no such microbatch, or only whole steps can change.
        """
        self._require_pipeline().adopt(plan, from_microbatch)

    def migrate(self, *moves: Move) -> None:
        """Makes layers change their owners: the next step prepares that, and still runs under the
        old placement. Every rank calls this, with the same moves, between the same steps; a second
        call adds to the first.

        Raises:
            PlanError: a layer, a stage or a virtual machine that does not exist; two moves of one
                layer; a stage whose layers would not be contiguous; or a stage that would have too
                little memory. Then nothing changes.
        """
        self._require_pipeline().migrate(moves)

    @property
    def steps_left(self) -> float:
        """The number of steps over which a change of the plan can pay off; infinite if it was not
        set.
        """
        return self._require_pipeline().planning.steps_left

    @steps_left.setter
    def steps_left(self, steps: float) -> None:
        self._require_pipeline().planning.steps_left = steps

    @property
    def layer_names(self) -> list[str]:
        """The names of the layers, as plans and moves have them."""
        return list(self._require_pipeline().layers)

    @property
    def decisions(self) -> list[dict[str, float]]:
        """The expected and the measured effects of changes of the plan, in their order:
        ``expected_gain`` and later ``measured_gain`` (the speedup of a step), and ``step_seconds``
        at that time.
        """
        return self._require_pipeline().planning.decisions

    @property
    def move_seconds(self) -> float:
        """How long this rank has waited for the last change of owners, in seconds: the part that
        did not overlap with its steps.
        """
        return self._require_pipeline().changes.seconds

    @property
    def memory_figures(self) -> dict[str, float]:
        """Statistics of :class:`~lightning_pipeshift.MemoryCompression` on this rank since the run
        began: ``peak_bytes`` of saved tensors on the device, the ``budget_bytes`` that they may
        take (the device's, less the other memory of its layers), ``moved_bytes``,
        ``waited_seconds`` (how long the compute has waited for copies), ``num_evicted`` (tensors
        that were evicted although the plan keeps them) and ``host_peak_bytes``. Empty without the
        plugin.
        """
        memory = self._require_pipeline().memory
        return memory.figures() if memory is not None else {}

    @property
    def exposed_seconds(self) -> float:
        """How long the last step has waited for gradients of other virtual machines, in seconds,
        after its own compute.
        """
        return self._require_pipeline().exposed_seconds

    def _require_pipeline(self) -> Pipeline:
        if self._pipeline is None:
            raise ConfigurationError(
                "There is no pipeline yet: it is created when `fit`, `validate`, `test` or "
                "`predict` begins."
            )
        return self._pipeline

    def _require_holdings(self) -> Holdings:
        holdings = self._require_pipeline().holdings
        if holdings is None:
            raise ConfigurationError(
                "No stage has its layers yet: they are distributed at the first batch."
            )
        return holdings

    def _require_module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # --- norms ---

    def _gradient_norms(self, parameters: list[Tensor], norm_type: float) -> Tensor:
        return self._require_holdings().gradient_norms(parameters, norm_type)

    def gradient_norms(self, norm_type: float) -> dict[str, Tensor]:
        """The norm of every parameter's gradient by the parameter's name, over all stages.

        Every rank calls this. See :func:`lightning_pipeshift.grad_norm`, which adds the total.

        Args:
            norm_type: the order of the norm.

        Returns:
            Scalars, float32, on the CPU. A parameter without a gradient is omitted.
        """
        holdings = self._require_holdings()
        norms = holdings.gradient_norms([use.parameter for use in holdings.uses], norm_type)
        there = holdings.have_gradients()
        return {
            use.name: norm.float()
            for use, norm, has_one in zip(holdings.uses, norms, there, strict=True)
            if has_one
        }

    # --- the end ---

    def _let_go(self) -> None:
        self._outside.close()
        if self._pipeline is not None:
            self._pipeline.release_gates()
