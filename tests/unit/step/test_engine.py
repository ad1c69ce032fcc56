"""A suspended step leaves nothing of its state to what runs meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from lightning_pipeshift.devices.properties import generators_of
from lightning_pipeshift.runtime.comm.messages import Key, Kind, Message, Place
from lightning_pipeshift.step.suspendable import Flight, SuspendableMicrobatch
from lightning_pipeshift.step.suspension import ThreadState, kept
from lightning_pipeshift.values.value import running

CPU = torch.device("cpu")
KEY, PLACE = Key(1, 1, 0, Kind.VALUE, 0, 1), Place("layer", 0, "model.py:1")


def core_with(mailbox: Any) -> Any:
    """As much of a core as a suspended step uses."""
    return SimpleNamespace(
        mailbox=mailbox,
        stage=0,
        device=CPU,
        digest=0,
        last=("", ""),
        step_number=0,
        seed=0,
        switched={},
        generators=generators_of(CPU),
    )


def test_what_runs_meanwhile_sees_no_context_of_a_suspended_step() -> None:
    message = Message(None, None, PLACE)
    mailbox = SimpleNamespace(num_stages=2, has=lambda _: False, take=lambda *_: message)
    core = core_with(mailbox)
    seen: list[Any] = []

    def body(microbatch: SuspendableMicrobatch) -> str:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            torch.rand(3)
            seen.append(microbatch.receive(KEY, PLACE))
            assert running() is microbatch
            assert torch.is_autocast_enabled("cpu")
            assert not torch.is_grad_enabled()
        return "done"

    with kept(CPU):
        outside = ThreadState(CPU)
        outside.restore()
        before = torch.get_rng_state()
        microbatch = SuspendableMicrobatch(core, 1, 0, 0, body, outside, None, Flight())
        microbatch.advance()
        assert microbatch.waits_for == (KEY, PLACE)
        assert running() is None
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert torch.equal(torch.get_rng_state(), before)
        microbatch.advance()
    assert microbatch.is_done
    assert microbatch.result == "done"
    assert seen == [message]


def test_no_step_is_suspended_in_inference_mode() -> None:
    message = Message(None, None, PLACE)
    mailbox = SimpleNamespace(num_stages=2, has=lambda _: False, take=lambda *_: message)
    core = core_with(mailbox)

    def body(microbatch: SuspendableMicrobatch) -> Message:
        with torch.inference_mode():
            return microbatch.receive(KEY, PLACE)

    with kept(CPU):
        outside = ThreadState(CPU)
        outside.restore()
        microbatch = SuspendableMicrobatch(core, 1, 0, 0, body, outside, None, Flight())
        microbatch.advance()
    assert microbatch.is_done
    assert microbatch.result is message
