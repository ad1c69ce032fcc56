"""Train a small GPT on Python's own standard library, one byte at a time, over pipeline stages.

    python examples/train_gpt.py                # two CPU stages, two minutes
    python examples/train_gpt.py --help

`GPT` and `TextDataModule` are ordinary Lightning classes that know nothing of PipeShift; only
`main` does. The text is on every machine that runs this, so there is nothing to download. The same
run as a config file: `examples/gpt.yaml`.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

NUM_SYMBOLS = 256  # the model reads and writes bytes


class Block(nn.Module):
    """One pre-norm transformer block: causal self-attention, then a two-layer perceptron."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.contract(F.gelu(self.expand(self.mlp_norm(x)))))

    def attention(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, head, position, channel)
        mixed = F.scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).flatten(-2))


def rotated(x: Tensor) -> Tensor:
    """Turn channel pairs by angles that grow with the position (RoPE; Su et al. 2021, section 3.2).

    The product of a query and a key then depends on how far apart they are.
    """
    num_positions, num_channels = x.shape[-2:]
    positions = torch.arange(num_positions, device=x.device)
    frequencies = 1000 ** -torch.linspace(0, 1, num_channels // 2, device=x.device)
    angles = torch.outer(positions, frequencies)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


class GPT(L.LightningModule):
    """A decoder-only transformer over bytes.

    A batch is a `(batch, position)` tensor of byte values, one position longer than what the model
    reads: every byte but the first is a target.
    """

    def __init__(
        self,
        num_layers: int = 4,
        width: int = 128,
        num_heads: int = 4,
        dropout: float = 0.0,  # the run is shorter than the text: no byte is seen twice
        learning_rate: float = 3e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 50,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps

        self.token_embedding = nn.Embedding(NUM_SYMBOLS, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_SYMBOLS, bias=False)
        self.initialize()

    def initialize(self) -> None:
        """Draw small matrices, and smaller those that write to the residual stream (as GPT-2)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                std = 0.5 / math.sqrt(self.head.in_features)
                if name.endswith(("projection.weight", "contract.weight")):
                    std /= math.sqrt(2 * len(self.blocks))
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map `(batch, position)` bytes to `(batch, position, symbol)` logits of the next byte."""
        x = self.dropout(self.token_embedding(tokens))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, batch: Tensor) -> Tensor:
        """The mean cross-entropy, in nats per byte."""
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))
        scale = warmup_then_cosine(self.warmup_steps, int(self.trainer.estimated_stepping_batches))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def warmup_then_cosine(warmup_steps: int, num_steps: int) -> Callable[[int], float]:
    """Return the learning rate's factor by step: a line up to 1, then half a cosine down to 0.1."""

    def scale(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
        return 0.55 + 0.45 * math.cos(math.pi * progress)

    return scale


class Windows(Dataset[Tensor]):
    """A text cut into windows of `length` bytes, each with the one after it: its last target."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text = text
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.text[start : start + self.length + 1].long()


class TextDataModule(L.LightningDataModule):
    """The source files of Python's standard library; every fortieth is for validation.

    Args:
        batch_size: the number of windows in a batch.
        length: the number of bytes in a window.
        folder: other files than the standard library's.
    """

    def __init__(self, batch_size: int = 32, length: int = 64, folder: str | None = None) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.length = length
        self.folder = Path(folder or sysconfig.get_path("stdlib"))

    def setup(self, stage: str | None = None) -> None:
        files = sorted(self.folder.glob("*.py"))
        self.val_text = read_bytes(files[::40])
        del files[::40]
        self.train_text = read_bytes(files)

    def train_dataloader(self) -> DataLoader[Tensor]:
        windows = Windows(self.train_text, self.length)
        return DataLoader(windows, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Windows(self.val_text, self.length), self.batch_size)


def read_bytes(files: list[Path]) -> Tensor:
    """Return the files' contents, one after another, as a tensor of bytes."""
    text = bytearray(b"".join(file.read_bytes() for file in files))
    return torch.frombuffer(text, dtype=torch.uint8)


class PrintPlan(L.Callback):
    """Prints the plan when the first batch is done: by then there is one."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == 1:
            strategy: Any = trainer.strategy
            pl_module.print(f"\n{strategy.plan}\n")


def byte_frequency_loss(train_text: Tensor, val_text: Tensor) -> float:
    """The nats per byte of a model that only knows how often each byte occurs in `train_text`."""
    train_counts = torch.bincount(train_text.int(), minlength=NUM_SYMBOLS) + 1
    val_counts = torch.bincount(val_text.int(), minlength=NUM_SYMBOLS)
    nats = -(train_counts / train_counts.sum()).log()
    return float((nats * val_counts).sum() / val_counts.sum())


@torch.no_grad()
def write(
    checkpoint: str, prompt: str, num_bytes: int, context: int, temperature: float = 0.7
) -> str:
    """Load a checkpoint in plain PyTorch and let it write `num_bytes` behind `prompt`."""
    saved = torch.load(checkpoint, weights_only=True)
    model = GPT(**saved["hyper_parameters"])
    model.load_state_dict(saved["state_dict"])
    model.eval()
    text = torch.tensor([list(prompt.encode())])
    for _ in range(num_bytes):
        logits = model(text[:, -context:])[:, -1]
        text = torch.cat([text, torch.multinomial(F.softmax(logits / temperature, -1), 1)], 1)
    return bytes(text[0].tolist()).decode(errors="replace")


def main(
    stages: int = 2,
    virtual_machines: int = 1,
    microbatches: int = 8,
    schedule: Literal["1f1b", "eager_1f1b", "gpipe", "zb-h1"] = "1f1b",
    steps: int = 300,
    layers: int = 4,
    width: int = 128,
) -> None:
    """Train the GPT as a pipeline, then load its checkpoint in plain PyTorch and let it write.

    Args:
        stages: the number of processes that a pipeline has.
        virtual_machines: the number of pipelines that train side by side.
        microbatches: into how many slices a batch is cut.
        schedule: the order of the forwards and backwards on each stage.
        steps: the number of optimizer steps.
        layers: the number of transformer blocks.
        width: the number of channels of the residual stream.
    """
    from lightning_pipeshift import PipeShiftStrategy

    L.seed_everything(1)
    data = TextDataModule()
    model = GPT(num_layers=layers, width=width)
    strategy = PipeShiftStrategy(
        virtual_machines=virtual_machines, microbatches=microbatches, schedule=schedule
    )
    checkpoint = ModelCheckpoint(monitor="val_loss")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=stages * virtual_machines,
        strategy=strategy,
        max_steps=steps,
        val_check_interval=steps,
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
        logger=CSVLogger("."),
        callbacks=[PrintPlan(), checkpoint, TQDMProgressBar(refresh_rate=10)],
    )
    trainer.fit(model, data)

    if trainer.is_global_zero:
        val_loss = float(trainer.callback_metrics["val_loss"])
        frequency_loss = byte_frequency_loss(data.train_text, data.val_text)
        print(f"\nvalidation loss       {val_loss:.3f} nats per byte")
        print(f"byte-frequency model  {frequency_loss:.3f} nats per byte")
        print(f"\n{checkpoint.best_model_path}, loaded in plain PyTorch, writes:\n")
        print(write(checkpoint.best_model_path, "def ", num_bytes=400, context=data.length))


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main)
