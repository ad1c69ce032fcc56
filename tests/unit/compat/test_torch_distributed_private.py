"""Each name of ``compat.torch_distributed_private`` and ``compat.gloo_private`` exists, and does
what the package relies on.
"""

import sys
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_pipeshift.compat import gloo_private, torch_distributed_private
from lightning_pipeshift.testing.ranks import run_ranks

CPU = torch.device("cpu")


def groups() -> dict[str, Any]:
    """On one rank: what is seen of its groups."""
    dist.init_process_group("cpu:gloo", timeout=timedelta(seconds=60))
    store = torch_distributed_private.default_store()
    store.set("key", "value")
    group = dist.new_group([0])
    backend = torch_distributed_private.backend_of(group, CPU)
    try:
        torch_distributed_private.backend_of(group, torch.device("cuda"))
        error = None
    except RuntimeError as raised:
        error = str(raised)
    seen = {"value": store.get("key"), "name": backend.name(), "error": error}
    torch_distributed_private.forget_all_groups()
    return {**seen, "is_initialized": dist.is_initialized()}


def test_stores_backends_and_the_end_of_all_groups() -> None:
    (seen,) = run_ranks(groups, 1)
    assert seen["value"] == b"value"
    assert seen["name"] == "gloo"
    assert seen["error"]
    assert not seen["is_initialized"]


def test_the_timeout_of_options_is_set() -> None:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    torch_distributed_private.set_options_timeout(options, timedelta(seconds=7))
    assert options._timeout == timedelta(seconds=7)


def ended_wait(sends: bool) -> str:
    """Rank 0 waits for a message that rank 1 never sends or takes, until the wait is ended."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    text = ""
    if dist.get_rank() == 0:
        # More than the buffers of a connection hold.
        message = torch.zeros(1 << 24)
        work: Any = dist.isend(message, 1) if sends else dist.irecv(message, 1)
        begun = threading.Event()

        def end() -> None:
            begun.wait()
            # An abort before the wait has begun ends nothing: it is repeated.
            while waiting.is_alive():
                gloo_private.abort_wait(work)
                time.sleep(0.01)

        def wait() -> None:
            nonlocal text
            begun.set()
            try:
                text = f"returned {work.wait()}"
            except RuntimeError as error:
                text = f"raised {type(error).__name__}"

        waiting = threading.Thread(target=wait)
        waiting.start()
        end()
        waiting.join()
    torch_distributed_private.default_store().set(f"done {dist.get_rank()}", "")
    torch_distributed_private.default_store().wait(["done 0", "done 1"])
    return text


@pytest.mark.skipif(sys.platform != "linux", reason="gloo's waits can be ended on Linux only")
@pytest.mark.parametrize("sends", [False, True])
def test_a_wait_of_gloo_can_be_ended(sends: bool) -> None:
    text, _ = run_ranks(ended_wait, 2, sends)
    assert text == "returned False"


def test_other_objects_are_left_alone() -> None:
    gloo_private.abort_wait(object())
    gloo_private.abort_wait(torch.ones(1))
