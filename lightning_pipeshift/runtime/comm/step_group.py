"""The process group of user code in a step.

Losses of self-supervised models, among others, call ``torch.distributed`` in the middle of a step
(``all_reduce`` of a batch's mean) to combine the replicas of the model, which are all ranks where
each rank has a replica. Here a replica is a virtual machine, and of its ranks only those run the
code that hold its layer: in the group of all ranks, the others would never come.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeshift.compat.torch_distributed_private import default_group
from lightning_pipeshift.errors import LayerError


class _Done:
    """A collective that is complete."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _copied(targets: list[Tensor], sources: list[Tensor]) -> _Done:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source.reshape(target.shape))
    return _Done()


def _copied_one(target: Tensor, source: Tensor, *_: Any) -> _Done:
    return _copied([target], [source])


_Operation = Callable[..., _Done]
# With one replica, what each operation of `dist.ProcessGroup` does with its arguments.
_ALONE: dict[str, _Operation] = {
    "allreduce": lambda tensors, *_: _Done(),
    "allreduce_coalesced": lambda tensors, *_: _Done(),
    "reduce": lambda tensors, *_: _Done(),
    "broadcast": lambda tensors, *_: _Done(),
    "barrier": lambda *_: _Done(),
    "allgather": lambda outputs, inputs, *_: _copied([row[0] for row in outputs], inputs),
    "gather": lambda outputs, inputs, *_: _copied([row[0] for row in outputs], inputs),
    "scatter": lambda outputs, inputs, *_: _copied(outputs, [row[0] for row in inputs]),
    "reduce_scatter": lambda outputs, inputs, *_: _copied(outputs, [row[0] for row in inputs]),
    "alltoall": lambda outputs, inputs, *_: _copied(outputs, inputs),
    # Torch has renamed these.
    **dict.fromkeys(("_allgather_base", "all_gather_single"), _copied_one),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), _copied_one),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), _copied_one),
    "send": lambda *_: _refuse("send", 1),
    "recv": lambda *_: _refuse("recv", 1),
}


def _refuse(name: str, num_replicas: int) -> _Done:
    raise LayerError(
        f"A step calls `torch.distributed` (`{name.strip('_')}`), with {num_replicas} virtual"
        " machines. Of their ranks only those run this code that hold the layer in front of it, so"
        " the others would never take part. Call it in a hook (`on_train_batch_end`), which every"
        " rank runs, with a group of your own; or use one virtual machine, with which such a call"
        " finds one replica of the model."
    )


def _operation(name: str, alone: _Operation) -> Callable[..., _Done]:
    def operation(self: StepGroup, *args: Any, **kwargs: Any) -> _Done:
        return alone(*args) if self.size() == 1 else _refuse(name, self.size())

    return operation


class StepGroup(dist.ProcessGroup):
    """The replicas of a model.

    Args:
        replica: this rank's.
        num_replicas: how many virtual machines there are. With one, operations do what they do for
            one rank; with several, they raise LayerError.
    """

    def __init__(self, replica: int, num_replicas: int) -> None:
        super().__init__(replica, num_replicas)  # type: ignore[call-arg]

    def in_force(self) -> AbstractContextManager[None]:
        """Context in which code that names no group gets this one."""
        return default_group(self) if dist.is_initialized() else nullcontext()

    def getBackendName(self) -> str:
        """See ``ProcessGroup``."""
        return "pipeshift"


for _name, _alone in _ALONE.items():
    setattr(StepGroup, _name, _operation(_name, _alone))
