"""Which stage of a virtual machine holds which parameters and layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_pipeshift.model.parameters.uses import ParameterUse
from lightning_pipeshift.runtime.comm.channels import Channels


class OwnerTable:
    """The holders of the parameters and layers of a model, as one stage sees them.

    Args:
        root: the LightningModule.
        uses: all its parameters.
        layers: its layers, in call order.
        stage_of: the stage of each layer.
        channels: the stage's connections.
    """

    def __init__(
        self,
        root: nn.Module,
        uses: list[ParameterUse],
        layers: Sequence[nn.Module],
        stage_of: Sequence[int],
        channels: Channels,
    ) -> None:
        self.root = root
        self.uses = uses
        self.channels = channels
        self.device = channels.device
        self._modules = list(layers)
        self._holders: dict[int, list[int]] = {}
        self.held: list[ParameterUse] = []
        """The parameters that this stage holds."""
        self.place(stage_of)

    @property
    def stage(self) -> int:
        """This stage."""
        return self.channels.stage

    def place(self, stage_of: Sequence[int], keeps_old: bool = False) -> None:
        """Sets the stage of each layer, without moving anything.

        Args:
            stage_of: the stage of each layer.
            keeps_old: whether the stage also goes on using what it holds now, until it is placed
                again: minibatches that run under the old placement need it.
        """
        before = self._holders if keeps_old else {}
        self.layers = list(zip(self._modules, stage_of, strict=True))
        # The stages that hold a parameter, lowest first, by the parameter's identity.
        self._holders = {
            id(use.parameter): holders
            for use, holders in zip(self.uses, self.all_holders(stage_of), strict=False)
        }
        self.held = [
            use
            for use in self.uses
            if self.stage in (*self._holders[id(use.parameter)], *before.get(id(use.parameter), ()))
        ]

    def knows(self, value: Any) -> bool:
        """Whether a value is one of the model's parameters."""
        return id(value) in self._holders

    def holders_of(self, parameter: Tensor) -> list[int]:
        """The stages that hold a parameter, lowest first; all stages, if it was added later."""
        return self._holders.get(id(parameter), list(range(self.channels.num_stages)))

    def all_holders(self, stage_of: Sequence[int] | None = None) -> list[list[int]]:
        """The stages that hold each parameter, and then those that hold each layer's other state.

        Args:
            stage_of: the stage of each layer, if it differs from the present one.
        """
        stages = [stage for _, stage in self.layers] if stage_of is None else list(stage_of)
        holders = [use.holders(stages, self.channels.num_stages) for use in self.uses]
        return holders + [[stage] for stage in stages]
