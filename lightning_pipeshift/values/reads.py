"""Reads of values into Python. Any of the ranks may do it: a read is no operation of the program.

The owner of a value tells it to all stages when it reads it. Another stage that reads it alone asks
for it: small values stay where they are for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import without_torch_function_of_subclasses
from lightning_pipeshift.model.tensors.transfer import to_device
from lightning_pipeshift.runtime.comm.mailbox import Mailbox
from lightning_pipeshift.runtime.comm.messages import Key, Kind
from lightning_pipeshift.values.account import Account, Memory
from lightning_pipeshift.values.value import StepParameter

if TYPE_CHECKING:
    from lightning_pipeshift.values.transfers import Transfers

# Values up to this size are kept for stages that read them alone, as long as `KEPT_RUNS` says.
_KEPT_BYTES = 4096


def key_of(account: Account) -> Key:
    """Of a value, for the stages that read it."""
    assert account.name is not None
    run, turn, number = account.name
    return Key(account.owner, run, turn, Kind.READ, account.version, number)


def read_here(
    program: Transfers, tensor: Tensor, label: str, device: torch.device | None
) -> Tensor:
    """A value's tensor without its gradient. The owner tells it to all stages; another stage asks
    for it, since the owner may not read it.

    Args:
        program: its step runs.
        tensor: the value.
        label: of what reads it.
        device: where it is to be; ``None``: anywhere.
    """
    if isinstance(tensor, StepParameter) and tensor not in program.core.parameter_owners:
        # No operation has used it, so every stage has it. A read must not place it: the other
        # stages may not read it.
        with without_torch_function_of_subclasses():
            return tensor.detach()
    account, mailbox = program.account_of(tensor), program.mailbox
    account.refresh()
    here, key = account.tensor, program.read_key(account, tensor)
    if account.owner == program.stage:
        assert here is not None
        with without_torch_function_of_subclasses():
            here = here.detach()
            mailbox.tell(key, program.place(label), here)
    elif here is None and account.seen is not None and account.seen[0] == account.version:
        here = account.seen[1]
    elif here is None:
        place = program.place(label)
        if not mailbox.has(key):
            mailbox.ask(key, place)
        message = program.receive(key, place)
        with without_torch_function_of_subclasses():
            here = message.tensor(tensor.dtype, tensor.shape)
        account.seen = account.version, here
    with without_torch_function_of_subclasses():
        return (here if device is None else to_device(here, device)).detach()


def offer(mailbox: Mailbox, account: Account, is_changed_unseen: bool = False) -> None:
    """Lets other stages ask for a value of this one, if it is small. Called inside of
    :data:`without_torch_function_of_subclasses`.

    Args:
        mailbox: connects the stages.
        account: of the value.
        is_changed_unseen: whether other code than operations may write to its memory.
    """
    tensor = account.tensor
    if account.name is None or tensor is None or mailbox.num_stages == 1:
        return
    if tensor.layout is torch.strided and tensor.nbytes <= _KEPT_BYTES:
        key, kept = key_of(account), tensor.detach()
        # Torch does not count writes to tensors of inference mode, so they are copied. And a small
        # view would keep all of a large memory.
        is_part = kept.untyped_storage().nbytes() > _KEPT_BYTES
        if is_changed_unseen or is_part or kept.is_inference():
            kept = kept.clone()
        else:
            account.memory.offers.append(key)
        mailbox.offer(key, kept)


def copy_offers(mailbox: Mailbox, memory: Memory) -> None:
    """Called before a write to the memory of values."""
    for key in memory.offers:
        mailbox.copy_offer(key)
    memory.offers.clear()
