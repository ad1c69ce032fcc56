"""A strategy that has a pipeline: its plan, and what user code and Lightning ask of the whole model
while each rank holds a part: norms and checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeshift.connected import ConnectedStrategy
from lightning_pipeshift.errors import ConfigurationError, PlanError
from lightning_pipeshift.plan.plan import Plan
from lightning_pipeshift.runtime.holdings import Holdings
from lightning_pipeshift.runtime.pipeline import Pipeline


class PipelinedStrategy(ConnectedStrategy):
    """A rank that has its part in a pipeline, without a word of how it got it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pipeline: Pipeline | None = None
        self._trained: Pipeline | None = None

    # --- what is known ---

    @property
    def plan(self) -> Plan:
        """The plan in force. Raises PlanError before the first batch."""
        if self._pipeline is None:
            raise PlanError(
                "There is no plan yet: no run has begun. It is made when the first batch comes."
            )
        return self._pipeline.plan

    @property
    def exposed_seconds(self) -> float:
        """How long the last step has waited for gradients of other virtual machines, in seconds,
        with nothing left to compute.
        """
        return self._require_pipeline().exposed_seconds

    def _require_pipeline(self) -> Pipeline:
        if self._pipeline is None:
            raise ConfigurationError(
                "There is no pipeline yet: it is built when `fit`, `validate`, `test` or `predict`"
                " begins."
            )
        return self._pipeline

    def _require_holdings(self) -> Holdings:
        holdings = self._require_pipeline().holdings
        if holdings is None:
            raise ConfigurationError(
                "No stage has its layers yet: they are given out when the first batch comes."
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
            Scalars, float32, on the CPU. A parameter without a gradient is left out.
        """
        holdings = self._require_holdings()
        norms = holdings.gradient_norms([use.parameter for use in holdings.uses], norm_type)
        there = holdings.have_gradients()
        return {
            use.name: norm.float()
            for use, norm, has_one in zip(holdings.uses, norms, there, strict=True)
            if has_one
        }

    # --- checkpoints ---

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint, on rank 0. After a failure there is none to write: its parts are on
        ranks that no longer talk to each other.
        """
        if self._has_failed():
            rank_zero_warn(
                f"PipeShift: {filepath} is not saved. A rank has failed, and the others cannot send"
                " their layers any more. Go on from the last checkpoint that was saved before."
            )
            return
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole state on rank 0; elsewhere, what is not held is on the meta device."""
        module = self._require_module()
        if self._has_failed():
            return {}
        holdings = self._pipeline.holdings if self._pipeline is not None else None
        if holdings is None:
            return module.state_dict()
        # The parameters themselves, not copies of them, are what the stages know each other's by.
        state_dict: dict[str, Any] = module.state_dict(keep_vars=True)
        home = self._home()
        return state_dict if home is None else holdings.gather_state(state_dict, home)

    def _home(self) -> int | None:
        """The stage of rank 0, which writes checkpoints, if it is in this virtual machine."""
        ranks = self.topology.ranks[self.virtual_machine]
        return ranks.index(0) if 0 in ranks else None

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state on rank 0, in torch's own format."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if self._has_failed():
            return {}
        # An evaluation that came after the training has a plan of its own; the optimizers' state is
        # where the training left it.
        holdings = self._trained.holdings if self._trained is not None else None
        home = self._home()
        if holdings is None or home is None:
            return optimizer.state_dict()
        return holdings.gather_optimizer_state(optimizer, home)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the whole state, on the CPU; what a stage holds follows the parameters later."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    # --- the end ---

    def _let_go(self) -> None:
        if self._pipeline is not None:
            self._pipeline.release_gates()
