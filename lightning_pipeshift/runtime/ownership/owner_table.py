"""Which stage of a virtual machine holds which parameters and layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_pipeshift.compat.module_private import buffers_of
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
        of_user_code: the identities of modules inside of layers whose buffers every stage holds.
    """

    def __init__(
        self,
        root: nn.Module,
        uses: list[ParameterUse],
        layers: Sequence[nn.Module],
        stage_of: Sequence[int],
        channels: Channels,
        of_user_code: Collection[int] = (),
    ) -> None:
        self.root = root
        self.uses = uses
        self.channels = channels
        self.device = channels.device
        self._modules = list(layers)
        self._of_user_code = frozenset(of_user_code)
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
        number_of = {id(use.parameter): number for number, use in enumerate(self.uses)}
        # Under all names, those of tied parameters too.
        self._use_named = {
            name: number_of[id(parameter)]
            for name, parameter in self.root.named_parameters(remove_duplicate=False)
            if id(parameter) in number_of
        }
        index_of = {id(layer): index for index, layer in enumerate(self._modules)}
        self._layer_named = {
            f"{name}.": index_of[id(module)]
            for name, module in self.root.named_modules(remove_duplicate=False)
            if id(module) in index_of
        }

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

    def stages_of(self, names: Collection[str], stage_of: Sequence[int] | None = None) -> set[int]:
        """The stages that hold all of these parameters and buffers.

        Args:
            names: as in the whole model; a name that it does not have counts as held by all stages.
            stage_of: the stage of each layer, if it differs from the present one.
        """
        stages = [stage for _, stage in self.layers] if stage_of is None else list(stage_of)
        found = set(range(self.channels.num_stages))
        for name in names:
            number = self._use_named.get(name)
            if number is not None:
                found &= set(self.uses[number].holders(stages, self.channels.num_stages))
                continue
            for prefix, layer in self._layer_named.items():
                if name.startswith(prefix):
                    found &= {stages[layer]}
        return found

    def layers_of(self, name: str) -> list[int]:
        """The layers that have a parameter or buffer of this name in the whole model."""
        number = self._use_named.get(name)
        layers = self.uses[number].layers if number is not None else ()
        return [
            layer
            for prefix, layer in self._layer_named.items()
            if layer in layers or name.startswith(prefix)
        ]

    def is_of_user_code(self, module: nn.Module) -> bool:
        """Whether a module belongs to user code, which keeps its buffers on every stage."""
        return id(module) in self._of_user_code

    def own_tensors(self) -> list[Tensor]:
        """The model's parameters, and the buffers of its layers except those of user code."""
        buffers = [
            buffer
            for layer in self._modules
            for module in layer.modules()
            if not self.is_of_user_code(module)
            for buffer in buffers_of(module).values()
            if buffer is not None
        ]
        return [*(use.parameter for use in self.uses), *buffers]
