"""A run whose numbers the planner chooses has the bits of one that gives them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.lightning import auto_numbers
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.inputs.profile import KindProfile, Profile
from lightning_pipeshift.testing.ranks import run_ranks
from tests.end_to_end.test_changing_plans import hearing
from tests.features_models import built, differences, parameters_of, quiet_trainer
from tests.models import SequentialMLP, points

AUTO = {"virtual_machines": "auto", "microbatches": "auto"}


def measure_as(gradient_bytes: int) -> None:
    """Replaces all that was measured, as tests do not go by the clock: devices are equal, layers
    take a second and have gradients of one size, and nothing else takes time but their transfer.
    """
    module: Any = auto_numbers
    choose = module.choose_numbers

    def replaced(profile: Profile, cluster: Cluster, *args: Any) -> Any:
        layers = tuple(replace(each, gradient_bytes=gradient_bytes) for each in profile.layers)
        seconds = (1.0,) * len(layers)
        profile = Profile(layers, {"equal": KindProfile(seconds, seconds)}, profile.samples)
        devices = tuple(Device(each.host, "equal") for each in cluster.devices)
        return choose(profile, Cluster(devices, inside=Link(1e-4, 1e10)), *args)

    module.choose_numbers = replaced


def trained(
    folder: Path, strategy: dict[str, Any], gradient_bytes: int, name: str, resumes: bool
) -> dict[str, Any]:
    measure_as(gradient_bytes)
    torch.manual_seed(3)
    module = built(SequentialMLP)
    order = torch.Generator().manual_seed(5)
    loader = DataLoader(points(6).dataset, batch_size=4, shuffle=True, generator=order)
    trainer = quiet_trainer(
        {"devices": int(os.environ["WORLD_SIZE"]), "pipeshift": strategy},
        max_epochs=2 if resumes else 1,
    )
    with hearing() as heard:
        trainer.fit(module, loader, ckpt_path=folder / "auto.ckpt" if resumes else None)
    trainer.save_checkpoint(folder / f"{name}.ckpt")
    found: Any = trainer.strategy
    return {
        "numbers": (found.topology.num_virtual_machines, found.plan.microbatches),
        "num_batches": trainer.num_training_batches,
        "parameters": parameters_of(module),
        "heard": heard,
    }


LIGHT, HEAVY = 1, 1 << 50


def test_chosen_numbers_give_the_bits_of_a_run_that_gives_them(tmp_path: Path) -> None:
    own = run_ranks(trained, 2, tmp_path, AUTO, LIGHT, "auto", False)
    assert own[0]["numbers"][0] == 2, "without large gradients, two machines have no bubble"
    assert any("virtual_machines='auto' is 2" in line for line in own[0]["heard"])
    numbers = dict(zip(("virtual_machines", "microbatches"), own[0]["numbers"], strict=True))
    given = run_ranks(trained, 2, tmp_path, numbers, LIGHT, "given", False)
    # On other machines, where one virtual machine would be faster.
    on_three = run_ranks(trained, 3, tmp_path, AUTO, HEAVY, "resumed", True)
    assert any("as in the run that saved" in line for line in on_three[0]["heard"])
    ranks = {**numbers, "virtual_machines": [[2, 0], [1]]}
    goes_on = run_ranks(trained, 3, tmp_path, ranks, HEAVY, "goes_on", True)
    for ones, others in ((own, given), (on_three, goes_on)):
        for one, other in zip(ones, others, strict=False):
            assert one["numbers"] == other["numbers"] == own[0]["numbers"]
            assert one["num_batches"] == other["num_batches"] == 6
            assert not differences(one["parameters"], other["parameters"], 0, 0)


# --- a batch that leaves no trace ---


class Counts(IterableDataset[Any]):
    """A stream that remembers its position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < 9:
            self.position += 1
            yield torch.tensor([float(self.position)])


def drawn_by(generator: torch.Generator) -> Any:
    return generator.get_state().tolist()


def test_a_batch_is_drawn_without_a_trace() -> None:
    data: Any = list(torch.arange(20.0).split(1))
    generator = torch.Generator().manual_seed(3)
    shuffled: Any = DataLoader(data, 4, shuffle=True, generator=generator, num_workers=2)
    before = drawn_by(generator)
    batch = auto_numbers.first_batch(shuffled)
    assert batch.shape == (4, 1)
    assert drawn_by(generator) == before
    assert batch.flatten().tolist() == next(iter(shuffled.batch_sampler)), "its own order"
    stream = Counts()
    own: Any = DataLoader(stream, 3)
    assert auto_numbers.first_batch(own).flatten().tolist() == [1, 2, 3]
    assert stream.position == 0
    sampler = BatchSampler(RandomSampler(data), 5, drop_last=True)
    both = CombinedLoader({"a": DataLoader(data, batch_sampler=sampler), "b": [1, 2]}, "max_size")
    found = auto_numbers.first_batch(both)
    assert found["a"].shape == (5, 1)
    assert found["b"] == 1
    assert isinstance(both.flattened[0], DataLoader)
    single: Any = DataLoader(data, batch_size=None)
    assert auto_numbers.first_batch(single).shape == (1,)


def test_data_that_cannot_be_copied_is_an_error_with_advice() -> None:
    with pytest.raises(ConfigurationError, match=r"generator.*Give both numbers instead"):
        auto_numbers.first_batch(x for x in range(3))
