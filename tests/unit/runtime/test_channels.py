from typing import Any

import pytest
import torch

from lightning_pipeshift.runtime.comm.channels import Direction
from lightning_pipeshift.runtime.comm.specs import spec_of
from lightning_pipeshift.testing.ranks import run_ranks
from tests.unit.runtime.stages import connect

# Through gloo, or through memory that the ranks share.
WAYS = pytest.mark.parametrize("shares", [False, True], ids=["sent", "shared memory"])


def kinds() -> dict[str, torch.Tensor]:
    numbers = torch.arange(24, dtype=torch.float32)
    return {
        "contiguous": numbers.view(2, 3, 4),
        "transposed": numbers.view(4, 6).T,
        "permuted": numbers.view(2, 3, 4).permute(2, 0, 1),
        "channels last": numbers.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "sliced": numbers.view(4, 6)[:, ::2],
        "with an offset": numbers[5:11].view(2, 3),
        "expanded": numbers[:3].expand(4, 3),
        "flipped": numbers.view(4, 6).flip(0),
        "scalar": torch.tensor(3.5),
        "bool": numbers.view(4, 6) > 11,
        "bfloat16": numbers.view(4, 6).bfloat16().T,
        "half": numbers.half(),
        "int64": numbers.long().view(3, 8),
        "uint8": numbers.byte(),
        "float64": numbers.double() / 3,
        "complex": torch.complex(numbers, -numbers),
        "empty": torch.empty(0, 4),
        "empty in the middle": torch.empty(3, 0, 2, dtype=torch.int32),
    }


def pass_tensors_along(direction: Direction, shares: bool) -> list[tuple[Any, ...]]:
    """From the first stage to the last, or back; each stage in between sends on what it got."""
    channels, _ = connect(shares_memory=shares)
    tensors = list(kinds().values())
    specs = [spec_of(tensor) for tensor in tensors]
    assert len(channels.shares_memory_with) == 2 * shares
    step = 1 if direction is Direction.PAYLOAD else -1
    order = list(range(channels.num_stages))[::step]
    if channels.stage != order[0]:
        receipts = channels.post_receive(specs, direction, channels.stage - step)
        tensors = [receipt.wait() for receipt in receipts]
    if channels.stage != order[-1]:
        channels.send(tensors, specs, direction, channels.stage + step).wait()
    return [(tensor.clone(), tuple(tensor.stride()), tensor.dtype) for tensor in tensors]


@WAYS
@pytest.mark.parametrize("direction", list(Direction))
def test_tensors_of_every_kind_arrive_as_they_left(direction: Direction, shares: bool) -> None:
    results = run_ranks(pass_tensors_along, 3, direction, shares)
    for result in results[1:] if direction is Direction.PAYLOAD else results[:-1]:
        for (name, sent), (tensor, stride, dtype) in zip(kinds().items(), result, strict=True):
            assert torch.equal(tensor, sent), name
            assert stride == sent.stride(), name
            assert dtype == sent.dtype, name


def send_with_other_strides() -> Any:
    """A kernel may choose another order than the one that was recorded."""
    channels, _ = connect()
    tensor = torch.arange(6.0).view(2, 3)
    spec = spec_of(torch.empty(3, 2).T)
    if channels.stage == 0:
        return channels.send([tensor], [spec], Direction.PAYLOAD, 1).wait()
    (receipt,) = channels.post_receive([spec], Direction.PAYLOAD, 0)
    received = receipt.wait()
    return received.clone(), received.stride()


def test_what_arrives_has_the_strides_that_it_had() -> None:
    _, (tensor, stride) = run_ranks(send_with_other_strides, 2)
    assert torch.equal(tensor, torch.arange(6.0).view(2, 3))
    assert stride == (3, 1)


def many_at_once(num: int, shares: bool) -> list[float]:
    """Both directions at once, receives posted late, nothing waited for in between."""
    channels, _ = connect(shares_memory=shares)
    spec = spec_of(torch.empty(1000))
    here, there = Direction(channels.stage), Direction(1 - channels.stage)
    sent = [
        channels.send(
            [torch.full((1000,), float(n)), torch.full((1000,), -float(n))],
            [spec] * 2,
            here,
            1 - channels.stage,
        )
        for n in range(num)
    ]
    receipts = [channels.post_receive([spec] * 2, there, 1 - channels.stage) for _ in range(num)]
    found = [float(receipt.wait().sum()) / 1000 for pair in reversed(receipts) for receipt in pair]
    for each in sent:
        each.wait()
    return found[::-1]


@WAYS
def test_many_sends_arrive_in_their_order(shares: bool) -> None:
    num = 200
    expected = [sign * float(n) for n in range(num) for sign in (-1, 1)]
    assert run_ranks(many_at_once, 2, num, shares) == [expected, expected]


def receive_first(shares: bool) -> float:
    """Receives that are posted before the peer sends."""
    channels, _ = connect(shares_memory=shares)
    spec = spec_of(torch.empty(3))
    if channels.stage == 1:
        receipts = [channels.post_receive([spec], Direction.PAYLOAD, 0)[0] for _ in range(3)]
        channels.send_object("ready", 0)
        channels.settle()
        return sum(float(receipt.wait()[0]) * 10**n for n, receipt in enumerate(receipts))
    assert channels.receive_object(1) == "ready"
    sent = [
        channels.send([torch.full((3,), float(n))], [spec], Direction.PAYLOAD, 1) for n in (1, 2, 3)
    ]
    for each in sent:
        each.wait()
    return 0.0


@WAYS
def test_receives_posted_early(shares: bool) -> None:
    assert run_ranks(receive_first, 2, shares) == [0.0, 321.0]


# The first message holds 4096 bytes; a pickled `bytes` has some bytes around it.
SIZES = [0, 1, 4000, *range(4075, 4100), 5000, 300_000]


def exchange_objects() -> list[Any]:
    channels, _ = connect()
    objects: list[Any] = [bytes([n % 251]) * size for n, size in enumerate(SIZES)]
    objects += [None, {"loss": torch.ones(2)}, [1, "two"], torch.zeros(50, 50)]
    if channels.stage == 0:
        for obj in objects:
            channels.send_object(obj, 1)
        channels.settle()
        return objects
    return [channels.receive_object(0) for _ in objects]


def test_objects_of_every_size() -> None:
    sent, received = run_ranks(exchange_objects, 2)
    assert received[: len(SIZES)] == sent[: len(SIZES)]
    none, logged, listed, tensor = received[len(SIZES) :]
    assert none is None
    assert torch.equal(logged["loss"], torch.ones(2))
    assert listed == [1, "two"]
    assert tensor.shape == (50, 50)


def share() -> list[Any]:
    channels, _ = connect()
    found = []
    for source in (0, 2, 1, 2):
        found.append(
            channels.share_object({"from": channels.stage, "x": "x" * 5000}, source)["from"]
        )
    found.append(channels.gather_int(10 * channels.stage))
    found.append(channels.sum(torch.full((2,), 0.1 * (channels.stage + 1))).tolist())
    channels.settle()
    return found


def test_what_all_stages_share() -> None:
    results = run_ranks(share, 3)
    assert results[0][:5] == [0, 2, 1, 2, [0, 10, 20]]
    assert results[0] == results[1] == results[2]


def single_tensors() -> list[Any]:
    channels, _ = connect()
    if channels.stage == 0:
        for tensor in kinds().values():
            channels.send_tensor(tensor, 1)
        return []
    return [channels.receive_tensor(tensor, 0) for tensor in kinds().values()]


def test_single_tensors() -> None:
    _, received = run_ranks(single_tensors, 2)
    for (name, sent), tensor in zip(kinds().items(), received, strict=True):
        assert torch.equal(tensor, sent), name
        assert tensor.dtype == sent.dtype, name


def alone() -> Any:
    channels, _ = connect()
    return channels.gather_int(3), channels.sum(torch.ones(1)).item(), channels.share_object("x", 0)


def test_a_single_stage_needs_nobody() -> None:
    assert run_ranks(alone, 1) == [([3], 1.0, "x")]


def conjugated_and_negated() -> list[Any]:
    """Views whose values are worked out when they are read."""
    channels, _ = connect()
    number = torch.complex(torch.arange(3.0), torch.ones(3)).conj()
    tensors = [number, number.imag]
    specs = [spec_of(tensor) for tensor in tensors]
    if channels.stage == 0:
        channels.send(tensors, specs, Direction.PAYLOAD, 1).wait()
        channels.send_tensor(number, 1)
        return tensors
    got = [receipt.wait() for receipt in channels.post_receive(specs, Direction.PAYLOAD, 0)]
    return [*got, channels.receive_tensor(number, 0)]


def test_lazily_conjugated_and_negated_tensors() -> None:
    _, (number, imaginary, alone) = run_ranks(conjugated_and_negated, 2)
    assert number.tolist() == alone.tolist() == [-1j, 1 - 1j, 2 - 1j]
    assert imaginary.tolist() == [-1.0] * 3
