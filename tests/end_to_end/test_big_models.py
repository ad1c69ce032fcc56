"""Models that no rank ever holds whole: built in ``configure_model``."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeshift.testing.ranks import RanksFailed, run_ranks
from lightning_pipeshift.values.value import run_by
from tests.end_to_end.test_transparency import Pipelined, Trained, assert_same_bits, fit
from tests.features_models import on_rank, quiet_trainer
from tests.models import NUM_FEATURES, ZOO, is_held, points

_LIGHTNINGS_OWN = frozenset(vars(L.LightningModule()))
_TABLES = frozenset({"_parameters", "_buffers", "_modules"})


def late(build: Callable[[], L.LightningModule]) -> L.LightningModule:
    """A model of the same class that makes in ``configure_model`` what its ``__init__`` made."""

    class Late(type(build())):  # type: ignore[misc]
        def __init__(self) -> None:
            L.LightningModule.__init__(self)

        def configure_model(self) -> None:
            if self._parameters or self._modules:
                return
            self.__dict__.update(
                (name, value)
                for name, value in vars(build()).items()
                if name in _TABLES or name not in _LIGHTNINGS_OWN
            )

    return Late()


# Every kind of parameter: in layers, loose, tied, touched by user code; with buffers and dropout.
MODELS = ["dropout", "boring", "loose_parameters", "functional_tying", "batch_norm", "gpt2", "vit"]


def train(name: str, runs: list[Pipelined]) -> list[Trained]:
    specimen = ZOO[name]
    module = late(specimen.build)
    return [fit(module, specimen.loader(4), how) for how in runs]


@pytest.mark.feature("Training", "`configure_model`")
@pytest.mark.parametrize("name", MODELS)
def test_every_split_makes_and_trains_the_same(name: str) -> None:
    """Twice each: the second run begins with layers that other stages hold."""
    (expected,) = run_ranks(train, 1, name, [Pipelined(), Pipelined()])
    num_layers = len(expected[0].layers)
    middle = num_layers // 2
    cuts = [[middle, num_layers - middle], [num_layers - 1, 1]]
    of_each_rank = run_ranks(train, 2, name, [Pipelined(cut) for cut in cuts])
    for run, wanted in enumerate(expected):
        held: dict[str, Tensor] = {}
        for found in (of_rank[run] for of_rank in of_each_rank):
            here = {name: value for name, value in found.state.items() if not value.is_meta}
            assert found.state.keys() == wanted.state.keys()
            parts = {name: wanted.state[name] for name in here}
            states = {name: wanted.optimizer_state[name] for name in found.optimizer_state}
            assert_same_bits(
                found._replace(state=here),
                wanted._replace(state=parts, optimizer_state=states),
                f"{name}, run {run}",
            )
            assert run or len(here) < len(wanted.state) or num_layers == 1
            held |= here
        assert held.keys() == wanted.state.keys()


def in_virtual_machines(how: Any, late_model: bool) -> dict[str, Tensor]:
    """Replicas begin with the same values though each makes its own."""
    build = ZOO["sequential"].build
    torch.manual_seed(3)
    module = late(build)
    values: dict[str, Tensor] = {}

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            with run_by(None):
                held = {n: p for n, p in module.named_parameters() if is_held(p)}
                values.update({n: p.detach().clone() for n, p in held.items()})

    trainer = quiet_trainer(how, max_epochs=1, callbacks=[Looks()])
    trainer.fit(module, points(4))
    return values


def test_virtual_machines_hold_the_same() -> None:
    strategy = {"virtual_machines": 2, "partition": [[2, 3], [3, 2]]}
    ranks = run_ranks(on_rank, 4, in_virtual_machines, strategy, (True,), {})
    whole = [{**ranks[2 * vm], **ranks[2 * vm + 1]} for vm in range(2)]
    assert (
        whole[0].keys()
        == whole[1].keys()
        == dict(ZOO["sequential"].build().named_parameters()).keys()
    )
    for name, value in whole[0].items():
        assert torch.equal(value, whole[1][name]), name


# --------------------------------------------------------------------------------------------------
# Before, beside and after training
# --------------------------------------------------------------------------------------------------


def evaluating(how: Any) -> Any:
    """Validation alone, then training with a sanity check, then a prediction of what came of it."""
    torch.manual_seed(5)
    module = late(ZOO["sequential"].build)
    trainer = quiet_trainer(how, max_epochs=1, num_sanity_val_steps=1)
    losses: list[Any] = []

    class Validates(type(module)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0])

    module.__class__ = Validates
    losses.append(trainer.validate(module, points(2), verbose=False))
    trainer.fit(module, points(3), points(2))
    losses.append(float(trainer.callback_metrics["val_loss"]))
    predictions = trainer.predict(module, points(2))
    return losses, predictions


@pytest.mark.parametrize("partition", ["auto", [3, 2]])
def test_evaluation_needs_no_whole_model_either(partition: Any) -> None:
    (expected,) = run_ranks(on_rank, 1, evaluating, {"microbatches": 4}, (), {})
    strategy = {"microbatches": 4, "partition": partition}
    for losses, predictions in run_ranks(on_rank, 2, evaluating, strategy, (), {}):
        assert losses == expected[0]
        for found, wanted in zip(predictions, expected[1], strict=True):
            assert torch.equal(found, wanted)


class MadeElsewhere(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.layers = nn.Sequential(nn.Linear(NUM_FEATURES, 4), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def without_values(how: Any) -> None:
    quiet_trainer(how, max_epochs=1).fit(MadeElsewhere(), points(2))


def test_parameters_without_values_are_named() -> None:
    with pytest.raises(RanksFailed, match=r"No stage has the values of layers\.0\.weight"):
        run_ranks(on_rank, 2, without_values, {}, (), {})


# --------------------------------------------------------------------------------------------------
# Memory
# --------------------------------------------------------------------------------------------------

WIDTH, DEPTH = 1024, 32
MODEL_BYTES = WIDTH * WIDTH * DEPTH * 4


class Wide(L.LightningModule):
    """128 MB of parameters."""

    def configure_model(self) -> None:
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.layers(batch[0]).mean())


def peak_growth(how: Any) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = DataLoader(TensorDataset(torch.zeros(2, WIDTH)))
    quiet_trainer(how).validate(Wide(), data, verbose=False)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def test_a_rank_never_holds_the_layers_of_others() -> None:
    whole, *_ = run_ranks(on_rank, 1, peak_growth, {}, (), {})
    assert whole > 0.9 * MODEL_BYTES
    for peak in run_ranks(on_rank, 2, peak_growth, {"partition": "uniform"}, (), {}):
        assert peak < whole - 0.4 * MODEL_BYTES


def growth_while_saving(how: Any, path: Path) -> tuple[int, int]:
    """How much the peak grows by a save in one file, and how large the file is."""
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.zeros(2, WIDTH)))
    trainer = quiet_trainer(how)
    trainer.validate(Wide(), data, verbose=False)
    # Forgets the peak so far.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    trainer.save_checkpoint(path)
    return resident() - before, path.stat().st_size


def resident() -> int:
    """The peak of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def test_a_save_streams_tensor_by_tensor(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    first, second = run_ranks(
        on_rank, 2, growth_while_saving, {"partition": "uniform"}, (path,), {}
    )
    layer = MODEL_BYTES // DEPTH
    some = 4 << 20
    assert second[0] < layer + some
    # What it had, the first stage has already.
    assert first[0] < first[1] / 2 + some
