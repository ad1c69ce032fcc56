"""Settings that a step switches: training modes of modules, ``requires_grad`` of parameters.

Code between layers does so on every stage, but code of a layer only on the stage that runs it. The
others follow what was recorded, so that all stages agree on how gradients flow in the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.trace.signature import all_parameters, flags_of


@dataclass(frozen=True)
class Switches:
    """The settings that a step has switched when it ends.

    Args:
        modes: for modules whose training mode changes within the step, by their number, the mode in
            which it leaves them.
        flags: for parameters whose ``requires_grad`` changes within the step, by their number, the
            flag with which it leaves them.
    """

    modes: Mapping[int, bool] = field(default_factory=dict)
    flags: Mapping[int, bool] = field(default_factory=dict)

    @contextmanager
    def followed(self, root: nn.Module) -> Iterator[None]:
        """Around a stage's part of a step: leaves everything as the whole step leaves it.

        Raises:
            LayerError: it has switched otherwise than recorded.
        """
        before = self._parameters(root)
        was = {number: parameter.requires_grad for number, parameter in before.items()}
        yield
        if self.modes:
            for number, module in enumerate(root.modules()):
                module.training = self.modes.get(number, module.training)
        for number, parameter in self._parameters(root).items():
            if parameter.requires_grad not in (was.get(number), self.flags[number]):
                raise _unlike_recorded(root, [parameter])
            parameter.requires_grad_(self.flags[number])

    def _parameters(self, root: nn.Module) -> dict[int, nn.Parameter]:
        if not self.flags:
            return {}
        numbered = enumerate(all_parameters(root))
        return {number: p for number, p in numbered if p is not None and number in self.flags}


class SwitchRecorder:
    """Takes notes of what a step switches while it is followed, and undoes it at the end: the stage
    that runs this code switches it, and then the others follow.

    Args:
        root: the LightningModule.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._modules = list(root.modules())
        self._modes = [module.training for module in self._modules]
        self._switched: set[int] = set()
        self._begin = flags_of(root)
        self._by_layers: dict[int, bool] = {}
        """By a parameter's identity, ``requires_grad`` after layers have changed it."""
        self.result = Switches()

    def note_modes(self) -> None:
        """Notes which modules are in another training mode than when the step began."""
        for number, (module, mode) in enumerate(zip(self._modules, self._modes, strict=True)):
            if module.training is not mode:
                self._switched.add(number)

    def flag_of(self, parameter: Tensor) -> bool:
        """Whether a parameter requires a gradient at this point of the step."""
        return self._by_layers.get(id(parameter), parameter.requires_grad)

    def set_flag(self, parameter: nn.Parameter, flag: bool) -> None:
        """Takes note of the ``requires_grad`` with which a layer leaves a parameter."""
        if flag is not self.flag_of(parameter):
            self._by_layers[id(parameter)] = flag

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Around the step."""
        try:
            yield
        finally:
            self.note_modes()
            flags = {}
            for number, parameter in enumerate(all_parameters(self._root)):
                if parameter is not None:
                    flag = self.flag_of(parameter)
                    if flag is not self._begin[number]:
                        flags[number] = flag
                        parameter.requires_grad_(self._begin[number])
            modes = {number: self._modules[number].training for number in self._switched}
            self.result = Switches(modes, flags)


def require_only(switches: Iterable[Switches], begin: Sequence[bool], root: nn.Module) -> None:
    """Raises LayerError if a step has changed the ``requires_grad`` of parameters otherwise than
    when it was followed.

    Args:
        switches: of its microbatches.
        begin: the flags when it began.
        root: the LightningModule, after the step.
    """
    expected = dict(enumerate(begin))
    for each in switches:
        expected |= each.flags
    found = flags_of(root)
    changed = {number for number, flag in enumerate(found) if flag is not expected[number]}
    if changed:
        parameters = list(all_parameters(root))
        raise _unlike_recorded(root, [parameters[number] for number in sorted(changed)])


def _unlike_recorded(root: nn.Module, parameters: Iterable[nn.Parameter | None]) -> LayerError:
    own = set(map(id, parameters))
    names = [repr(name) for name, each in root.named_parameters() if id(each) in own]
    return LayerError(
        f"The step has changed `requires_grad` of {', '.join(names[:3])}"
        f"{', ...' if len(names) > 3 else ''}, as it did not when it was followed first, so"
        " gradients of this step may be wrong, and other stages do not know it. Change"
        " `requires_grad` in a hook (`on_train_epoch_start`, `on_train_batch_start`), or"
        " with `BaseFinetuning`."
    )
