"""``MemoryCompression``: a precision plugin that keeps a memory budget."""

from __future__ import annotations

import inspect
from functools import partial, wraps
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pipeshift.compat.lightning_names import trainer_of
from lightning_pipeshift.compat.lightning_private import (
    arguments_check,
    make_precision,
    make_precision_by,
)
from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.plan.inputs.policies import Planned, Policy
from lightning_pipeshift.runtime.offload.stage_memory import MemoryRequest
from lightning_pipeshift.text import bytes_of_text


class MemoryCompression(Precision):
    """Keeps a device's memory within a budget: tensors that layers, and the code between them, save
    for their backward are kept, recomputed, or moved to the host's memory or to another device and
    back, whichever is predicted to cost least. Under every policy, and with every compression but
    ``"8bit"``, gradients have the same bits.

    CN114880130B; the paper: MPress, HPCA 2023.

    It can be combined with any precision::

        Trainer(plugins=[MemoryCompression(budget="20GB")], precision="bf16-mixed", ...)
        Trainer(plugins=[MemoryCompression(MyPrecision(), budget="20GB")], ...)

    Args:
        precision: another precision plugin, which works as before.
        budget: bytes of each device for weights, gradients, the optimizer's state, messages between
            stages, and saved tensors: a number, or text like ``"20GB"`` or ``"16 GiB"``.
            ``"auto"``: the free memory of the device, less a tenth. On a CPU it simulates a
            device's memory.
        host_budget: bytes of the host's memory that each rank may move tensors to; ``"auto"``: half
            of the free memory, divided among the host's ranks; 0: none.
        policy: decides how saved tensors are handled; ``None``: the planner. See
            :class:`~lightning_pipeshift.Policy`.
        compression: of tensors that move. ``"lossless"`` packs masks into bits and omits zeros;
            ``"8bit"`` keeps 8 bits of each number, with an error of up to 1/254 of the largest of
            its 256 neighbours.

    Raises:
        ConfigurationError: an argument has a value that is not allowed; the message lists those
            that are.
    """

    def __init__(
        self,
        precision: Precision | None = None,
        budget: float | str = "auto",
        host_budget: float | str = "auto",
        policy: Policy | None = None,
        compression: Literal["lossless", "8bit"] | None = None,
    ) -> None:
        if precision is not None and not isinstance(precision, Precision):
            raise ConfigurationError(
                f"MemoryCompression(precision={precision!r}): pass a precision plugin, or set"
                " `Trainer(precision=...)`."
            )
        if policy is not None and not isinstance(policy, Policy):
            raise ConfigurationError(
                f"MemoryCompression(policy={policy!r}): pass an object with a method `choose` that"
                " takes a `TensorRecord` and returns a `Choice`, or None."
            )
        if compression not in (None, "lossless", "8bit"):
            raise ConfigurationError(
                f"MemoryCompression(compression={compression!r}): allowed are 'lossless', '8bit'"
                " and None."
            )
        request = MemoryRequest(
            budget_bytes=bytes_of_text("budget", budget),
            host_bytes=bytes_of_text("host_budget", host_budget, least=0.0),
            policy=policy or Planned(),
            compression=compression,
        )
        super().__init__()
        self._wrap(precision or Precision())
        self.memory_request = request
        # With a plugin inside, a `precision=` beside it would be a second one: Lightning's error.
        self._takes_precision = precision is None
        self._stand_beside_precision()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A process that gets the plugin by pickle has not created it, and may create the Trainer.
        self._stand_beside_precision()

    def _stand_beside_precision(self) -> None:
        if self._takes_precision and not allow_beside_precision():
            rank_zero_warn(
                f"Lightning {pl.__version__} is not known to this version of PipeShift: "
                "`Trainer(precision=...)` cannot be combined with `MemoryCompression`. Pass it "
                "the precision plugin instead, such as "
                "`MemoryCompression(MixedPrecision('bf16-mixed', 'cuda'))`."
            )

    def _wrap(self, inner: Precision) -> None:
        """Makes this plugin an instance of the other's class as well, so that ``isinstance``
        checks, and the name of its state in a checkpoint, are the same as without this one.
        """
        kind = type(inner)
        mine = next(base for base in type(self).__mro__ if not base.__dict__.get("_is_mixed"))
        own = {"__qualname__": kind.__qualname__, "_is_mixed": True}
        if kind is not Precision:
            self.__class__ = type(kind.__name__, (mine, kind), own)
        self.__dict__.update(inner.__dict__)

    def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
        """Raises ConfigurationError if another strategy runs the training."""
        from lightning_pipeshift.lightning.strategy import PipeShiftStrategy

        trainer = trainer_of(model)
        if trainer is not None and not isinstance(trainer.strategy, PipeShiftStrategy):
            raise ConfigurationError(
                f"MemoryCompression needs the PipeShift strategy, but this run has"
                f" `{type(trainer.strategy).__name__}`. Set `Trainer(strategy='pipeshift')`, which"
                " also trains on one device, or remove the plugin."
            )
        return super().connect(model, optimizers, lr_schedulers)


def allow_beside_precision(connector: Any = None) -> bool:
    """Allows ``Trainer(precision=...)`` together with the plugin, which then wraps the precision
    plugin that Lightning makes.

    Lightning allows only one of the two, and offers no hook there: its connector decides it before
    it makes the strategy. So the connector's check is replaced. All other arguments of a Trainer
    are passed to Lightning's own check unchanged.

    Args:
        connector: a class that makes a Trainer's parts; by default, the one that Trainers use.

    Returns:
        Whether it is allowed now. If it is not, then this version of Lightning has unknown methods;
            nothing has been replaced, and Lightning refuses the combination.
    """
    known = arguments_check(connector)
    if known is None:
        return False
    check, replace = known
    if hasattr(check, "__pipeshift__"):
        return True
    signature = inspect.signature(check)
    if not {"plugins", "precision"} <= signature.parameters.keys():
        return False

    @wraps(check)
    def check_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        plugins = given.arguments.get("plugins")
        plugins = list(plugins) if isinstance(plugins, list | tuple) else [plugins]
        mine = [p for p in plugins if isinstance(p, MemoryCompression) and p._takes_precision]
        if len(mine) != 1 or given.arguments.get("precision") is None:
            return check(self, *args, **kwargs)
        given.arguments["plugins"] = [plugin for plugin in plugins if plugin is not mine[0]]
        # Lightning calls this once it has the strategy, and finds it on the object before it finds
        # its own on the class.
        make_precision_by(self, partial(_make_and_wrap, self, mine[0]))
        return check(*given.args, **given.kwargs)

    check_config.__pipeshift__ = True  # type: ignore[attr-defined]
    replace(check_config)
    return True


def _make_and_wrap(connector: Any, plugin: MemoryCompression) -> MemoryCompression:
    # It has had its turn: from here on the object is as Lightning made it.
    plugin._wrap(make_precision(connector))
    return plugin
