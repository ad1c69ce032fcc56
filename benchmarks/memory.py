"""Each rank's memory: its own layers, and nothing of other ranks' layers.

    python -m benchmarks.memory

A model with 400 MB of parameters is built in `__init__`, as Lightning users do, so every rank holds
all of it until the first batch; the plan is made then, and a stage lets go of what is not its own.
One process trains it with plain Lightning, then two and four stages do with PipeShift.

* `held` counts bytes: of parameters, buffers, gradients and optimizer state that are not on the
  meta device; `own layers` is what they should be, worked out from the shapes and the partition;
* `in all` counts the bytes of every tensor that the process can reach after a step;
* `resident` is the process's memory after a step, less what it had before the model was built;
  `peak` the most of it in a step, once the first two are over. A step adds the activations of the
  microbatches in flight, and fresh gradients beside those of the step before.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measuring import arguments, print_table, save
from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.testing.ranks import run_ranks

WIDTH = 2048
NUM_LAYERS = 24
NUM_MICROBATCHES = 8
MICROBATCH_SIZE = 32
NUM_STEPS = 4
LAYER_BYTES = (WIDTH * WIDTH + WIDTH) * 4
# Parameter, gradient, and Adam's two moments.
COPIES_TRAINED = 4
MB = 1e6


@dataclass
class Held:
    """One rank's memory in bytes; resident memory is above what the process had before the model.

    Args:
        whole: resident when the model is built.
        own: what parameters, gradients and optimizer state of its own layers should take.
        parameters: of real parameters and buffers after the last step.
        gradients: of their gradients.
        optimizer: of the optimizer's state.
        in_all: of all tensors that are reachable.
        resident: resident at the same time.
        peak: the most that was resident in a step after the first two.
        first_peak: the most that was resident before.
        activations: what the microbatches in flight keep for the backward, by the shapes.
    """

    whole: int = 0
    own: int = 0
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    in_all: int = 0
    resident: int = 0
    peak: int = 0
    first_peak: int = 0
    activations: int = 0


class Stack(L.LightningModule):
    """Wide layers whose parameters outweigh everything else."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
        for layer in layers:
            # With torch's own the values fade to denormal numbers, which are slow.
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
        self.layers = nn.ModuleList(layers)

    def training_step(self, batch: tuple[Tensor]) -> Tensor:
        (x,) = batch
        for layer in self.layers:
            x = F.relu(layer(x))
        loss = x.square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Optimizer:
        return Adam(self.parameters(), lr=1e-5)


class Weighed(Stack):
    """Weighs its process between two steps: before a batch, not in a hook, where the parameters of
    other stages can be used, too.

    Args:
        base: the process's bytes before the model was built.
        held: gets what is found.
    """

    def __init__(self, base: int, held: Held) -> None:
        super().__init__()
        self._base = base
        self._held = held

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Called when a batch is on the device."""
        if self.trainer.global_step == 2:
            self._held.first_peak = _status("VmHWM") - self._base
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        if self.trainer.global_step == NUM_STEPS:
            self._weigh()
        return batch

    def _weigh(self) -> None:
        held, trainer = self._held, self.trainer
        gc.collect()
        tensors = [*self.parameters(), *self.buffers()]
        held.parameters = _bytes_of(tensors)
        held.gradients = _bytes_of(p.grad for p in self.parameters())
        held.optimizer = _bytes_of(
            value for state in trainer.optimizers[0].state.values() for value in state.values()
        )
        held.in_all = _bytes_of(_all_tensors())
        held.resident = _status("VmRSS") - self._base
        held.peak = _status("VmHWM") - self._base


def _bytes_of(tensors: Iterable[Any]) -> int:
    """The memory behind tensors, each storage once."""
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor) and not tensor.is_meta:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _all_tensors() -> list[Tensor]:
    # Placeholders are tensors too, of a type of their own and without memory.
    found = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    # A gradient is reached through its parameter, not by the garbage collector.
    return found + [x.grad for x in found if x.is_leaf and x.grad is not None]


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def measure(num_stages: int) -> Held:
    """Runs on every rank."""
    stage = int(os.environ["RANK"])
    own_layers = NUM_LAYERS // num_stages
    in_flight = num_stages - stage if num_stages > 1 else NUM_MICROBATCHES
    batch_size = NUM_MICROBATCHES * MICROBATCH_SIZE
    # One more step: the last one is weighed before the next batch.
    data = TensorDataset(torch.randn(2 * batch_size, WIDTH).repeat(NUM_STEPS // 2 + 1, 1))
    gc.collect()
    base = _status("VmRSS")

    held = Held(own=own_layers * LAYER_BYTES * COPIES_TRAINED)
    model = Weighed(base, held)
    held.whole = _status("VmRSS") - base
    # A layer keeps its input; what the ReLU keeps is the next layer's input.
    held.activations = in_flight * own_layers * MICROBATCH_SIZE * WIDTH * 4
    options: dict[str, Any] = {}
    if num_stages > 1:
        options["strategy"] = PipeShiftStrategy(
            microbatches=NUM_MICROBATCHES, partition=[own_layers] * num_stages, schedule="1f1b"
        )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_stages,
        max_steps=NUM_STEPS + 1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(model, DataLoader(data, batch_size=batch_size))
    return held


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()

    rows, figures = [], {}
    for num_stages in options.stages:
        ranks = run_ranks(measure, num_stages, num_stages, timeout=600)
        figures[f"{num_stages} stages"] = {
            "own": ranks[0].own,
            "most_in_all": max(held.in_all for held in ranks),
            "most_beside_own": max(held.in_all - held.own for held in ranks),
            "least_resident": min(held.resident for held in ranks),
            "most_resident": max(held.resident for held in ranks),
            "ranks": [asdict(held) for held in ranks],
        }
        for stage, held in enumerate(ranks):
            exact = held.parameters + held.gradients + held.optimizer
            rows.append(
                [
                    f"stage {stage} of {num_stages}" if num_stages > 1 else "plain Lightning",
                    *(
                        round(value / MB)
                        for value in (
                            held.whole,
                            held.own,
                            exact,
                            held.in_all,
                            held.resident,
                            held.activations,
                            held.peak,
                            held.first_peak,
                        )
                    ),
                ]
            )
    header = [
        "MB",
        "model built",
        "own layers",
        "held",
        "in all",
        "resident",
        "activations",
        "peak",
        "peak at start",
    ]
    print_table(
        f"{NUM_LAYERS} layers of {LAYER_BYTES / MB:.1f} MB, Adam, {NUM_MICROBATCHES} microbatches",
        header,
        rows,
    )
    save(options.json, figures)


if __name__ == "__main__":
    main()
