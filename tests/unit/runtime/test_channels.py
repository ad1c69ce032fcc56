from typing import Any

import torch

from lightning_pipeshift.testing.ranks import run_ranks
from tests.unit.runtime.stages import connect


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
    found.append(channels.gather(10 * channels.stage))
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
    return channels.gather(3), channels.sum(torch.ones(1)).item(), channels.share_object("x", 0)


def test_a_single_stage_needs_nobody() -> None:
    assert run_ranks(alone, 1) == [([3], 1.0, "x")]


def conjugated_and_negated() -> list[Any]:
    """Views whose values are worked out when they are read."""
    channels, _ = connect()
    number = torch.complex(torch.arange(3.0), torch.ones(3)).conj()
    tensors = [number, number.imag]
    if channels.stage == 0:
        for tensor in tensors:
            channels.send_tensor(tensor, 1)
        return tensors
    return [channels.receive_tensor(tensor, 0) for tensor in tensors]


def test_lazily_conjugated_and_negated_tensors() -> None:
    _, (number, imaginary) = run_ranks(conjugated_and_negated, 2)
    assert number.tolist() == [-1j, 1 - 1j, 2 - 1j]
    assert imaginary.tolist() == [-1.0] * 3
