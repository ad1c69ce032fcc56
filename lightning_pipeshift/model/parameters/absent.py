"""Parameters and buffers whose values other stages hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.schema import written_arguments
from lightning_pipeshift.compat.torch_private import (
    COPY_TO,
    PARAMETER_MARK,
    make_subclass,
    mark_as_parameter,
    pytree,
    renew_hooks,
    schema_of,
    swap_tensors,
)
from lightning_pipeshift.errors import LayerError

# Of this class, and of values.
_OWN_ATTRIBUTES = frozenset(
    {"absent_name", "account", "geometry", "has_history", "stays", PARAMETER_MARK}
)
# These give another tensor without values.
_COPIES = frozenset(
    {COPY_TO, *(getattr(torch.ops.aten, name).default for name in ("detach", "alias", "clone"))}
)
_in_run = [False]


def set_in_run(is_in_run: bool) -> None:
    """Sets whether a run is in progress, in which checkpoints are completed from other stages."""
    _in_run[0] = is_in_run


class AbsentTensor(Tensor):
    """Stands for a parameter or a buffer of the model on a stage that does not hold it: it has a
    shape and a type, on the meta device, and no values.

    Steps and hooks see it as a value. Other code (an optimizer, a thread) can ask for its shape.
    Writing to it has no effect, as the stages that hold the tensor do it; all else is an error.
    Torch's own meta tensors would not do: many operations, ``add_`` among them, silently ignore a
    meta tensor among their inputs.
    """

    absent_name: str
    """Of the parameter or buffer in the whole model."""

    @classmethod
    def like(cls, tensor: Tensor, name: str) -> AbsentTensor:
        """A tensor of this class that can replace a parameter or a buffer.

        Args:
            tensor: the tensor.
            name: its name.
        """
        data = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
        )
        made: AbsentTensor = make_subclass(cls, data, tensor.requires_grad)
        made.absent_name = name
        if isinstance(tensor, nn.Parameter):
            mark_as_parameter(made)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        absent = next(x for x in leaves if isinstance(x, AbsentTensor))
        if func in _COPIES:
            return AbsentTensor.like(absent, absent.absent_name)
        written = written_arguments(func, args, kwargs or {})
        if written and all(isinstance(x, AbsentTensor) for x in written):
            return args[0] if isinstance(args[0], Tensor) else None
        raise absent_error(schema_of(func).name.removeprefix("aten::"), absent.absent_name)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"AbsentTensor({self.absent_name!r}, {tuple(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        if _in_run[0]:
            raise LayerError(
                f"{self.absent_name!r} cannot be pickled here: another stage has its values. Save"
                " it with `trainer.save_checkpoint`, as a part of the state dict of the"
                " LightningModule or of a callback, which is completed there; or after the run,"
                " when every rank has the whole model."
            )
        # A part of a model that no rank can hold whole, and that remains distributed after the run.
        like = torch.empty_strided(self.size(), self.stride(), dtype=self.dtype, device="meta")
        fresh = nn.Parameter(like, self.requires_grad) if isinstance(self, nn.Parameter) else like
        return AbsentTensor.like, (fresh, self.absent_name)


def absent_error(function: str, name: str) -> LayerError:
    """The error for a function that needs the values of a tensor of another stage."""
    return LayerError(
        f"`{function}` needs the values of {name!r}, which another stage holds. Use it where every"
        " stage gets them: in a step, or in a hook of the LightningModule or of a callback"
        " (`on_train_batch_end`); not in another thread, in the optimizer's own code, or in a hook"
        " that an optimizer calls. Norms of gradients over all stages come from"
        " `self.clip_gradients` and `lightning_pipeshift.grad_norm`. After the run every rank has"
        " all values."
    )


def swap(tensor: Tensor, fresh: Tensor) -> None:
    """Gives a tensor the values, the device and the class of another one. The object remains the
    same, with its attributes and hooks; so optimizers, schedulers and the user's own references
    remain valid.
    """
    attributes = {name: v for name, v in vars(tensor).items() if name not in _OWN_ATTRIBUTES}
    swap_tensors(tensor, fresh)
    vars(tensor).update(attributes)
    renew_hooks(tensor)
