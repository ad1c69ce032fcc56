"""Common tensors, which every stage has, become values of one stage where values are written into
them.
"""

from __future__ import annotations

import weakref
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import (
    base_of,
    has_hooks,
    mark_as_parameter,
    swap_tensors,
)
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.parameters.absent import swap
from lightning_pipeshift.values.account import Account
from lightning_pipeshift.values.contract import spec_of
from lightning_pipeshift.values.transfers import Transfers
from lightning_pipeshift.values.value import Value, user_line
from lightning_pipeshift.values.writes import is_own, require_no_parameter

if TYPE_CHECKING:
    from lightning_pipeshift.values.calls import Call


class CommonTensors(Transfers):
    """A program in which common tensors become values."""

    def writes_placed(self) -> None:
        """Called where an operation writes to a parameter, or to a buffer of a layer."""

    def make_value(self, tensor: Tensor, stage: int) -> None:
        """Makes a common tensor a value of a stage, for ``x.data = y``.

        Raises:
            LayerError: others that share its memory would not become values.
        """
        if not is_own(self.core, tensor, False):
            require_no_parameter(self.core, tensor, "x.data = y")
            raise LayerError(
                f"`x.data = y` ({user_line()}): one of the two is a tensor that every stage has,"
                " and whose memory other tensors or arrays share, or that needs a gradient, or"
                " whose class is not `Tensor`. Take a tensor of its own (`x.data = y.clone()`), or"
                " write in place (`with torch.no_grad(): x.copy_(y)`)."
            )
        self._note_common(tensor)
        self._adopt(tensor, stage)

    def share_memory(self, tensor: Tensor, account: Account) -> None:
        """Gives a value or a parameter an account of other memory, which others may have, too."""
        if isinstance(tensor, Value):
            tensor.account = account
            return
        self.writes_placed()
        self.core.writes_to(tensor)
        self.accounts[tensor] = account
        self._shared.append((account.memory, user_line()))

    def _with_gradient(self, tensor: Tensor, call: Call) -> Tensor | None:
        """Lets a call use a common tensor that needs a gradient; returns what it uses at its stage.
        A plain leaf becomes a value of the stage that its gradient comes to.
        """
        is_plain = type(tensor) is Tensor and tensor.is_leaf
        if is_plain and tensor.grad is None and not has_hooks(tensor):
            self._adopt(tensor, call.stage, is_written=False)
        elif not self.is_alone:
            return self.enter(tensor, call.stage, call.label)
        return None

    def _adopt(self, tensor: Tensor, stage: int, is_written: bool = True) -> None:
        """Makes a common tensor a value of one stage.

        Args:
            tensor: the tensor.
            stage: writes into it, or gets the gradient of what is a leaf.
            is_written: whether it writes, so that all who have the memory have to see that.
        """
        base = base_of(tensor)
        if base is not None and not tensor.requires_grad:
            # A write reaches what it is a view of. What has a view cannot be swapped.
            shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
            swap_tensors(tensor, torch.empty(0))
            self._adopt(base, stage)
            view = base.as_strided(shape, stride, offset)
            if self.is_alone:
                self._living.pop()
            swap_tensors(tensor, view)
            self._note_living(tensor)
            return
        first = self.new_account(stage, tensor.requires_grad, None)
        aliases = self.core.aliases.of(tensor) if is_written and base is None else ()
        for each in (tensor, *aliases):
            spec, account = spec_of(each), first
            if each is not tensor:
                account = Account(stage, spec.requires_grad, None, first.memory)
                # Which there are may differ between the ranks: garbage is among them.
                account.name = _name_of_alias(first.name, each)
                self._named.append(weakref.ref(account))
            value = Value(spec, self.core.device, account)
            if isinstance(each, nn.Parameter):
                mark_as_parameter(value)
            try:
                swap(each, value)
            except RuntimeError as error:
                raise LayerError(
                    f"A value of one stage is written into a tensor ({user_line()}) that something"
                    " of torch still refers to: the graph of a minibatch in flight. Write into a"
                    " copy of it (`x.clone()`), or let it be a buffer of the LightningModule that"
                    " steps alone write to."
                ) from error
            # Now the user's object is the value, and the other one has the memory.
            self._became_value(each, value)

    def _became_value(self, value: Tensor, plain: Tensor) -> None:
        self._note_living(value)
        account = self.account_of(value)
        if self.stage == account.owner:
            account.begin(self.stage, plain)


def _name_of_alias(name: Any, alias: Tensor) -> Any:
    """Names an alias by what it is: which there are may differ between ranks."""
    run, turn, number = name
    what = alias.storage_offset(), alias.shape, alias.stride(), alias.dtype
    return run, turn, number ^ zlib.crc32(repr(what).encode())
