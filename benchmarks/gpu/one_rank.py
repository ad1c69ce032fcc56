"""One rank beside plain Lightning: the same bits, and what each step waits for."""

from __future__ import annotations

import contextlib
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

from benchmarks.gpu.cases import Decoder, tokens
from benchmarks.gpu.running import sizes
from benchmarks.placements import Repeated
from lightning_pipeshift import MemoryCompression, PipeShiftStrategy, SwapAll
from lightning_pipeshift.runtime.offload.activation_store import ActivationStore
from tests.features_models import QUIET

GPU = torch.device("cuda", 0)


class _Small(L.LightningModule):
    """A model with a loss of its own; ``sample`` is what one item of a batch looks like."""

    sample: Tensor

    def training_step(self, batch: Tensor) -> Tensor:
        """The mean square of what comes out, noise of this step's device included."""
        noise = torch.arange(batch.shape[0], device=self.device, dtype=batch.dtype)
        found: Tensor = self(batch)
        return (found.flatten(1) * (1 + noise[:, None] / 10)).square().mean()

    def configure_optimizers(self) -> Any:
        """A fused optimizer, whose counters are on the device."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class Recurrent(_Small):
    """Two LSTM layers, whose weights are one block of memory."""

    sample = torch.linspace(-1, 1, 7 * 16).view(7, 16)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(16, 16, batch_first=True)
        self.second = nn.LSTM(16, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Through both."""
        found: Tensor = self.second(self.first(x)[0])[0]
        return found


class ChannelsLast(_Small):
    """Convolutions with BatchNorm, their memory in the other order."""

    sample = torch.linspace(-1, 1, 3 * 16 * 16).view(3, 16, 16)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        )
        self.body.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        """Through all."""
        found: Tensor = self.body(x.contiguous(memory_format=torch.channels_last))
        return found


class Attention(_Small):
    """Attention by one of torch's kernels.

    Args:
        backend: which.
    """

    sample = torch.linspace(-1, 1, 16 * 64).view(16, 64)

    def __init__(self, backend: SDPBackend) -> None:
        super().__init__()
        self.backend = backend
        self.before = nn.Linear(64, 3 * 64)
        self.after = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Four heads."""
        query, key, value = self.before(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.backend):
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        found: Tensor = self.after(mixed.transpose(1, 2).flatten(2))
        return found


def _decoder() -> Decoder:
    """Without dropout: plain Lightning draws other random numbers."""
    module = Decoder(tied=True, fused=True)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    return module


MODELS: dict[str, Callable[[], L.LightningModule]] = {
    "decoder": _decoder,
    "lstm": Recurrent,
    "channels last": ChannelsLast,
    "attention by math": partial(Attention, SDPBackend.MATH),
    "flash attention": partial(Attention, SDPBackend.FLASH_ATTENTION),
    "efficient attention": partial(Attention, SDPBackend.EFFICIENT_ATTENTION),
    "cudnn attention": partial(Attention, SDPBackend.CUDNN_ATTENTION),
}


class _Waits(L.Callback):
    """Counts where a step waits for the GPU."""

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()
        self._counts = False

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """A step begins."""
        self._counts = trainer.global_step >= sizes().steps[1]

    def on_train_end(self, *_: Any) -> None:
        """Later code is not part of a step."""
        self._counts = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Context of a run."""
        with warnings.catch_warnings(), mock.patch("warnings.showwarning", self._heard):
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")

    def _heard(self, message: Any, *_: Any, **__: Any) -> None:
        if not self._counts or "synchroniz" not in str(message):
            return
        frames = [f for f in traceback.extract_stack() if "warnings" not in f.filename]
        ours = [f for f in frames if "lightning" in f.filename] or frames
        last = ours[-2] if ours[-1].filename == __file__ and len(ours) > 1 else ours[-1]
        self.places[f"{os.path.relpath(last.filename)}:{last.lineno} {last.line}"] += 1

    def per_step(self) -> dict[str, float]:
        """How often each place waits in a step."""
        num_steps, first = sizes().steps
        return {place: count / (num_steps - first) for place, count in self.places.most_common()}


def gpus() -> dict[str, Any]:
    """The GPUs that a rank sees, and what of NCCL."""
    count = torch.cuda.device_count()
    return {
        "gpus": [
            {
                "name": torch.cuda.get_device_name(index),
                "uuid": str(getattr(torch.cuda.get_device_properties(index), "uuid", "")),
                "free_bytes": torch.cuda.mem_get_info(index)[0],
                "total_bytes": torch.cuda.mem_get_info(index)[1],
                "reaches": [
                    other
                    for other in range(count)
                    if other != index and torch.cuda.can_device_access_peer(index, other)
                ],
            }
            for index in range(count)
        ],
        "cuda": torch.version.cuda,
        "nccl": torch.cuda.nccl.version(),
    }


def compared_with_plain(name: str) -> dict[str, Any]:
    """Trains the same model in plain Lightning and as a pipeline of one stage, with the memory
    plugin. Returns what differs, and the waits of each.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    states, waits = [], []
    for has_pipeline in (False, True):
        L.seed_everything(5, verbose=False)
        module = MODELS[name]()
        counted = _Waits()
        data = (
            DataLoader(Repeated(module.sample), batch_size=8)
            if isinstance(module, _Small)
            else tokens(sizes().steps[0])
        )
        how: dict[str, Any] = {}
        if has_pipeline:
            how["plugins"] = [MemoryCompression()]
            how["strategy"] = PipeShiftStrategy(microbatches=1, parallel_devices=[GPU])
        trainer = L.Trainer(
            accelerator="gpu",
            devices=1,
            max_steps=sizes().steps[0],
            # Kernels of attention are there for half precision only.
            precision="bf16-mixed" if "attention" in name else "32-true",
            callbacks=[counted],
            **how,
            **QUIET,  # type: ignore[arg-type]
        )
        with counted.listening():
            trainer.fit(module, data)
        states.append({key: value.cpu() for key, value in module.state_dict().items()})
        waits.append(counted.per_step())
    differing = [key for key, value in states[0].items() if not torch.equal(states[1][key], value)]
    return {
        "problems": [f"differing from plain Lightning: {differing[:5]}"] if differing else [],
        "waits_of_plain_lightning": waits[0],
        "waits": waits[1],
    }


def held_and_allocated(compression: Any) -> dict[str, Any]:
    """After each action of the last steps: the bytes of saved tensors that the store counts as held
    on the device, and those that torch has allocated beyond what it had before the step.
    """
    rows: list[tuple[str, int, int]] = []
    end_action = ActivationStore.end_action
    base = [0]

    def noting(store: ActivationStore, action: Any) -> None:
        end_action(store, action)
        rows.append((str(action), store.held_bytes, torch.cuda.memory_allocated() - base[0]))

    class Base(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            torch.cuda.synchronize()
            base[0] = torch.cuda.memory_allocated()
            rows.clear()

    L.seed_everything(5, verbose=False)
    plugin = MemoryCompression(policy=SwapAll(min_bytes=1), compression=compression)
    with mock.patch.object(ActivationStore, "end_action", noting):
        L.Trainer(
            accelerator="gpu",
            devices=1,
            max_steps=sizes().steps[0],
            strategy=PipeShiftStrategy(microbatches=4, schedule="gpipe", parallel_devices=[GPU]),
            plugins=[plugin],
            callbacks=[Base()],
            **QUIET,  # type: ignore[arg-type]
        ).fit(Decoder(), tokens(sizes().steps[0], 32))
    return {"action, held, allocated": rows}
