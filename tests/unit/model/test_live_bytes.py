"""The bytes of living tensors, whatever made them."""

import threading

import torch
from torch._subclasses import FakeTensorMode

from lightning_pipeshift.model.measuring.live_bytes import LiveBytes

CPU = torch.device("cpu")


def test_memory_counts_once_until_it_is_freed():
    with LiveBytes(CPU) as live:
        x = torch.ones(100)
        view = x[50:].reshape(5, 10)
        assert live.num_bytes == 400
        y = x * 2
        assert live.num_bytes == 800
        del x, y
        assert (live.num_bytes, live.peak_bytes) == (400, 800)
        live.peak_bytes = live.num_bytes
    del view
    assert (live.num_bytes, live.peak_bytes) == (0, 400)


def test_what_was_made_outside_counts_from_its_first_use():
    mine, theirs = torch.ones(100), torch.ones(100)
    with LiveBytes(CPU, [theirs]) as live:
        assert live.num_bytes == 0
        mine.add_(theirs)
        assert live.num_bytes == 400
        live.note([mine, torch.empty(10), "no tensor"])
        assert live.peak_bytes == 440


def test_only_the_devices_memory_counts():
    with LiveBytes(CPU) as live:
        torch.ones(100, device="meta") * 2
        with FakeTensorMode():
            torch.ones(100) * 2
    assert live.peak_bytes == 0


def test_a_backward_is_seen():
    x = torch.ones(100, requires_grad=True)
    with LiveBytes(CPU, [x]) as live:
        y = x.exp().sum()
        assert live.num_bytes == 404
        live.peak_bytes = 0
        y.backward()
        # What `exp` saved, the gradients of both ends, and the loss.
        assert 800 <= live.peak_bytes <= 812
        del y
    assert live.num_bytes == 400


def test_another_thread_may_free_it():
    with LiveBytes(CPU) as live:
        held = [torch.ones(100)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert live.num_bytes == 0
