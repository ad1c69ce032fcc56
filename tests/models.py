"""A zoo of LightningModules that know nothing of PipeShift, each with a habit of a real one.

``ZOO`` names them; ``ZOO["gpt2"].build()`` makes a module, the same weights every time, and leaves
the global random state alone; ``ZOO["gpt2"].loader()`` makes its data, the same batches every time.
What a test may expect of each stands with it: whether it draws random numbers, and whether it
should come out as in plain Lightning.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.demos import Transformer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

BATCH_SIZE = 8
NUM_FEATURES = 12
NUM_CLASSES = 5
NUM_TOKENS = 37
SEQUENCE_LENGTH = 10


def is_held(parameter: Tensor) -> bool:
    """Whether this stage has the values of a parameter: in a hook it does not look otherwise."""
    return "absent_name" not in vars(parameter)


# --------------------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------------------


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def points(num_batches: int, seed: int = 1) -> DataLoader:
    """Batches of (features [8, 12], class [8]); the classes can be learned."""
    generator = _generator(seed)
    features = torch.randn(num_batches * BATCH_SIZE, NUM_FEATURES, generator=generator)
    classes = features[:, :NUM_CLASSES].argmax(dim=1)
    return DataLoader(TensorDataset(features, classes), batch_size=BATCH_SIZE)


def uneven_points(num_batches: int, seed: int = 1) -> DataLoader:
    """As ``points``, in batches of 7, the last one of 3: no microbatch count divides them all."""
    dataset = points(num_batches, seed).dataset
    num_points = (num_batches - 1) * 7 + 3
    return DataLoader(torch.utils.data.Subset(dataset, range(num_points)), batch_size=7)


def images(num_batches: int) -> DataLoader:
    """Batches of (image [8, 3, 16, 16], class [8])."""
    generator = _generator(2)
    num_images = num_batches * BATCH_SIZE
    pixels = torch.randn(num_images, 3, 16, 16, generator=generator)
    classes = torch.randint(NUM_CLASSES, (num_images,), generator=generator)
    return DataLoader(TensorDataset(pixels, classes), batch_size=BATCH_SIZE)


def _sentences(num_sentences: int, length: int, generator: torch.Generator) -> Tensor:
    """Token t+1 follows from token t, so that there is something to learn. 0 is no token."""
    first = torch.randint(1, NUM_TOKENS, (num_sentences, 1), generator=generator)
    steps = torch.arange(length)
    return (first + 3 * steps) % (NUM_TOKENS - 1) + 1


def sentences(num_batches: int) -> DataLoader:
    """Batches of token numbers [8, 10]."""
    tokens = _sentences(num_batches * BATCH_SIZE, SEQUENCE_LENGTH, _generator(3))
    return DataLoader(_Rows(tokens), batch_size=BATCH_SIZE)


def sentence_pairs(num_batches: int) -> DataLoader:
    """Batches of {"source": [8, 10], "target": [8, 6]}."""
    generator = _generator(4)
    source = _sentences(num_batches * BATCH_SIZE, SEQUENCE_LENGTH, generator)
    return DataLoader(
        _Rows({"source": source, "target": source.flip(1)[:, :6]}), batch_size=BATCH_SIZE
    )


def sentences_of_many_lengths(num_batches: int) -> DataLoader:
    """Batches of token numbers, each of its own size and its own length."""
    generator = _generator(5)
    sizes = [8, 3, 8, 5, 1, 8, 6]
    lengths = [10, 4, 7, 10, 3, 12]
    batches = [
        _sentences(sizes[i % len(sizes)], lengths[i % len(lengths)], generator)
        for i in range(num_batches)
    ]
    return DataLoader(_Rows(batches), batch_size=None)


def masked_sentences(num_batches: int) -> DataLoader:
    """Batches of {"tokens": [8, 10], "mask": [8, 10]}.

    Of a batch's first rows no token is masked, of its last nearly all, so microbatches weigh from
    nothing to a lot.
    """
    generator = _generator(6)
    num_sentences = num_batches * BATCH_SIZE
    tokens = _sentences(num_sentences, SEQUENCE_LENGTH, generator)
    odds = torch.tensor([0.0, 0.0, 0.1, 0.1, 0.2, 0.2, 0.8, 0.9]).repeat(num_batches)
    mask = torch.rand(tokens.shape, generator=generator) < odds[:, None]
    return DataLoader(_Rows({"tokens": tokens, "mask": mask}), batch_size=BATCH_SIZE)


def boring_data(num_batches: int) -> DataLoader:
    """The data of BoringModel: batches of one row, fewer than the microbatches."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return DataLoader(RandomDataset(32, num_batches))


class _Rows(Dataset):
    """The rows of a tensor, of a list, or of a dict of tensors."""

    def __init__(self, rows: Tensor | Sequence[Tensor] | dict[str, Tensor]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(next(iter(self.rows.values())) if isinstance(self.rows, dict) else self.rows)

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.rows, dict):
            return {name: rows[index] for name, rows in self.rows.items()}
        return self.rows[index]


# --------------------------------------------------------------------------------------------------
# Two bases, only to save lines: a classifier and a language model
# --------------------------------------------------------------------------------------------------


class Classifier(L.LightningModule):
    """``forward`` maps features to class scores; the loss is the mean over the batch."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        features, classes = batch
        loss = F.cross_entropy(self(features), classes)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        features, classes = batch
        self.log("val_loss", F.cross_entropy(self(features), classes))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        features, classes = batch
        self.log("test_loss", F.cross_entropy(self(features), classes))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class LanguageModel(L.LightningModule):
    """``forward`` maps tokens [B, T] to scores of the next token [B, T, V]."""

    def next_token_loss(self, tokens: Tensor) -> Tensor:
        scores = self(tokens[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.next_token_loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("val_loss", self.next_token_loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


# --------------------------------------------------------------------------------------------------
# Classifiers
# --------------------------------------------------------------------------------------------------


class SequentialMLP(Classifier):
    """Everything in one ``nn.Sequential``, with dropout between its layers."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(NUM_FEATURES, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, NUM_CLASSES),
        )

    def forward(self, features: Tensor) -> Tensor:
        return self.model(features)


class LayersOfItsOwn(Classifier):
    """No inner model: the LightningModule holds the layers itself."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, width)
        self.second = nn.Linear(width, width)
        self.third = nn.Linear(width, width)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features).relu()
        hidden = self.second(hidden).tanh()
        hidden = F.layer_norm(self.third(hidden), hidden.shape[1:]).relu()
        return self.head(hidden)


class RunsAgain(torch.autograd.Function):
    """Activation checkpointing as older code has it: the module runs again in the backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], hidden: Tensor, *weights: Tensor) -> Any:
        ctx.run, ctx.hidden, ctx.weights = run, hidden, weights
        with torch.no_grad():
            return run(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden = ctx.hidden.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.run(hidden)
        given = [hidden, *ctx.weights]
        return None, *torch.autograd.grad(output, given, gradients, allow_unused=True)


class CheckpointedByHand(nn.Module):
    """A linear layer that runs again in the backward."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Any:
        return RunsAgain.apply(self.linear.forward, hidden, *self.parameters())


class SkipConnection(Classifier):
    """The output of the first layer is used again after the third."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, width)
        self.second = nn.Linear(width, width)
        self.third = nn.Linear(width, width)
        self.head = nn.Linear(2 * width, NUM_CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        early = self.first(features)
        hidden = self.second(early.relu())
        late = self.third(hidden.tanh())
        return self.head(torch.cat([early, late + early], dim=1))


class InPlace(Classifier):
    """The code behind a layer writes into the layer's output, of which others keep a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.second = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.third = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        hidden += features
        hidden.relu_()
        hidden = self.second(hidden)
        columns = hidden[:, :3]
        hidden.mul_(0.5)
        columns.add_(1.0)
        hidden = self.third(hidden)
        hidden[:, 0] = features[:, 0]
        hidden.relu_()
        return self.head(hidden)


@dataclass
class Sorted:
    """The result of a layer of ``StructuredOutputs``."""

    values: Tensor
    order: Tensor
    width: int


class _ToDict(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, width)

    def forward(self, features: Tensor) -> dict[str, Any]:
        hidden = self.linear(features)
        return {"hidden": hidden, "positive": hidden > 0, "note": "not a tensor"}


class _ToTuple(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor, positive: Tensor) -> tuple[Tensor, tuple[Tensor, None]]:
        hidden = self.linear(hidden.masked_fill(~positive, 0.1))
        return hidden, (hidden.argmax(dim=1), None)


class _ToDataclass(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Embedding(width, 1)

    def forward(self, hidden: Tensor, *, best: Tensor) -> Sorted:
        values, order = (self.linear(hidden) * self.scale(best)).sort(dim=1)
        return Sorted(values=values, order=order, width=hidden.shape[1])


class StructuredOutputs(Classifier):
    """Layers return a dict, a nested tuple and a dataclass, with bool and int tensors in them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.to_dict = _ToDict(width)
        self.to_tuple = _ToTuple(width)
        self.to_dataclass = _ToDataclass(width)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        first = self.to_dict(features)
        hidden, (best, _) = self.to_tuple(first["hidden"], positive=first["positive"])
        sorted_ = self.to_dataclass(hidden.relu(), best=best)
        mixed = sorted_.values + 0.1 * sorted_.order / sorted_.width
        return self.head(mixed * first["positive"])


class LooseParameters(Classifier):
    """Parameters of no layer, used by the code between layers, one of them at two places."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, width)
        self.second = nn.Linear(width, width)
        self.third = nn.Linear(width, width)
        self.head = nn.Linear(width, NUM_CLASSES)
        self.shift = nn.Parameter(torch.randn(width))
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(width))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, features: Tensor) -> Tensor:
        hidden = (self.first(features) + self.shift).relu()
        hidden = (self.second(hidden) * self.scale).tanh()
        hidden = (self.third(hidden) - self.shift).relu()
        return self.head(hidden) / self.temperature


class RandomMask(SequentialMLP):
    """``training_step`` draws from torch, NumPy and ``random``, before and behind the layers."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        features, classes = batch
        features = features * (torch.rand_like(features) < 0.8)
        features = features + 0.1 * float(np.random.standard_normal())
        scores = self(features) * random.uniform(0.9, 1.1)
        smoothing = 0.2 * torch.rand(()).item()
        loss = F.cross_entropy(scores, classes, label_smoothing=smoothing)
        self.log("train_loss", loss)
        return loss


class ParameterGroups(LayersOfItsOwn):
    """AdamW, with weight decay for matrices only, and a group of its own for the head."""

    def configure_optimizers(self) -> Any:
        head = list(self.head.parameters())
        rest = [p for p in self.parameters() if not any(p is h for h in head)]
        return torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
                {"params": head, "weight_decay": 0.0, "lr": 3e-3},
            ],
            lr=1e-2,
        )


class WithAccuracy(SequentialMLP):
    """Logs torchmetrics objects, in training and in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.train_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.val_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        features, classes = batch
        scores = self(features)
        loss = F.cross_entropy(scores, classes)
        self.train_accuracy(scores, classes)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        return {"loss": loss, "scores": scores.detach()}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        features, classes = batch
        scores = self(features)
        self.val_accuracy(scores, classes)
        self.log_dict(
            {"val_loss": F.cross_entropy(scores, classes), "val_accuracy": self.val_accuracy}
        )


class WithAccumulators(SequentialMLP):
    """Keeps every step's results in lists, for ``on_*_epoch_end`` to sum up."""

    def __init__(self) -> None:
        super().__init__()
        self.train_losses: list[Tensor] = []
        self.val_scores: list[Tensor] = []
        self.val_classes: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.train_losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("train_mean_loss", torch.stack(self.train_losses).mean())
        self.train_losses.clear()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        features, classes = batch
        self.val_scores.append(self(features))
        self.val_classes.append(classes)

    def on_validation_epoch_end(self) -> None:
        scores, classes = torch.cat(self.val_scores), torch.cat(self.val_classes)
        self.log("val_loss", F.cross_entropy(scores, classes))
        self.log("val_accuracy", (scores.argmax(dim=1) == classes).float().mean())
        self.val_scores.clear()
        self.val_classes.clear()


class BatchNorm(Classifier):
    """Layers whose buffers change in every forward."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(NUM_FEATURES, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.BatchNorm1d(width, momentum=0.3),
            nn.ReLU(),
            nn.Linear(width, NUM_CLASSES),
        )

    def forward(self, features: Tensor) -> Tensor:
        return self.model(features)


class HuggingFaceViT(Classifier):
    """``cls_token`` and ``position_embeddings`` are parameters of no submodule."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        self.model = ViTForImageClassification(
            ViTConfig(
                hidden_size=16,
                num_hidden_layers=3,
                num_attention_heads=2,
                intermediate_size=32,
                image_size=16,
                patch_size=8,
                num_labels=NUM_CLASSES,
            )
        )

    def forward(self, features: Tensor) -> Tensor:
        return self.model(pixel_values=features).logits


# --------------------------------------------------------------------------------------------------
# Language models
# --------------------------------------------------------------------------------------------------


class DemoTransformer(L.LightningModule):
    """Lightning's demo: an encoder-decoder whose embedding is called twice, and caches a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=NUM_TOKENS, ninp=16, nhead=2, nhid=32, nlayers=2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = F.nll_loss(self.model(batch[:, :-1], batch[:, 1:]), batch[:, 1:].reshape(-1))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        scores = self.model(batch[:, :-1], batch[:, 1:])
        self.log("val_loss", F.nll_loss(scores, batch[:, 1:].reshape(-1)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class HuggingFaceGPT2(L.LightningModule):
    """The token embedding and the output layer share one parameter; the loss is the model's own."""

    def __init__(self, dropout: float = 0.0, checkpointing: bool = False) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=NUM_TOKENS,
                n_positions=16,
                n_embd=16,
                n_layer=3,
                n_head=2,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
                bos_token_id=0,
                eos_token_id=0,
                use_cache=False,
                loss_type="ForCausalLM",
            )
        )
        if checkpointing:
            self.model.gradient_checkpointing_enable()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class HuggingFaceT5(L.LightningModule):
    """An encoder-decoder: the first block's position bias serves every later block, the encoder's
    output every block of the decoder, and one embedding the encoder, the decoder and the output."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        self.model = T5ForConditionalGeneration(
            T5Config(
                vocab_size=NUM_TOKENS,
                d_model=16,
                d_kv=8,
                d_ff=32,
                num_layers=2,
                num_decoder_layers=2,
                num_heads=2,
                dropout_rate=dropout,
                pad_token_id=0,
                eos_token_id=0,
                decoder_start_token_id=0,
                use_cache=False,
            )
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.model(input_ids=batch["source"], labels=batch["target"]).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.log("val_loss", self.model(input_ids=batch["source"], labels=batch["target"]).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class _Block(nn.Module):
    """A residual block over a sequence: each position sees the mean of what came before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        counts = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[:, None]
        past = normed.cumsum(dim=1) / counts
        return hidden + F.gelu(self.mix(torch.cat([normed, past], dim=-1)))


class SmallLanguageModel(LanguageModel):
    """An embedding, a ``ModuleList`` of blocks, and a head."""

    def __init__(self, width: int = 16, num_blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, NUM_TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class FunctionalTying(SmallLanguageModel):
    """The code behind the last block uses the embedding's weight; no module is shared."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(hidden, self.embedding.weight)


class MaskedTokens(SmallLanguageModel):
    """Predicts the masked tokens; the loss is their mean, so they are a microbatch's weight."""

    def masked_mean(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        tokens, mask = batch["tokens"], batch["mask"]
        scores = self(tokens.masked_fill(mask, 0))
        losses = F.cross_entropy(scores.transpose(1, 2), tokens, reduction="none")
        num_masked = mask.sum()
        return (losses * mask).sum() / num_masked.clamp(min=1), num_masked

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:  # type: ignore[override]
        loss, num_masked = self.masked_mean(batch)
        self.log("train_loss", loss)
        return {"loss": loss, "weight": num_masked}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:  # type: ignore[override]
        loss, num_masked = self.masked_mean(batch)
        self.log("val_loss", loss, batch_size=int(num_masked))


# --------------------------------------------------------------------------------------------------
# Unusual code between layers, and unusual layers
# --------------------------------------------------------------------------------------------------


class InPlaceSkip(Classifier):
    """A layer's output is written into twice, behind two different layers, and used again later."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, width)
        self.second = nn.Linear(width, width)
        self.third = nn.Linear(width, width)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        early = self.first(features)
        early.mul_(0.7)
        hidden = self.second(early.tanh()).tanh_()
        early[:, ::2] += hidden[:, ::2]
        late = self.third(early)
        late *= hidden
        return self.head(late.add_(early))


class ActivatedSkip(SkipConnection):
    """The skip connection starts behind the activation, which is no layer."""

    def forward(self, features: Tensor) -> Tensor:
        early = self.first(features).tanh()
        late = self.third(F.gelu(self.second(early)))
        return self.head(torch.cat([early, late + early], dim=1))


class Scored(NamedTuple):
    """The result of a layer of ``MoreStructures``."""

    hidden: Tensor
    keep: Tensor
    order: Tensor
    nothing: None = None


@dataclass(frozen=True)
class Frozen:
    """The result of another layer of ``MoreStructures``."""

    parts: list[Tensor]
    scale: Tensor


class _ToNamedTuple(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, width)

    def forward(self, features: Tensor) -> Scored:
        hidden = self.linear(features)
        return Scored(hidden, hidden > -0.5, hidden.argsort(dim=1))


class _ToFrozen(nn.Module):
    """Returns views of one tensor, and a number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, hidden: Tensor) -> Frozen:
        left, right = self.linear(hidden).split(hidden.shape[1], dim=1)
        return Frozen([left, right], hidden.std())


class _PassesThrough(nn.Module):
    """Returns its input itself, twice, and a transposed view of something else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> tuple[Tensor, list[Tensor | None], Tensor]:
        return hidden, [None, hidden], self.linear(hidden).t()


class MoreStructures(Classifier):
    """Layers return a named tuple, a frozen dataclass of a list, and their own input."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.to_named_tuple = _ToNamedTuple(width)
        self.to_frozen = _ToFrozen(width)
        self.passes_through = _PassesThrough(width)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        scored = self.to_named_tuple(features)
        frozen = self.to_frozen(scored.hidden.masked_fill(~scored.keep, 0.0))
        left, right = frozen.parts
        same, (_, again), transposed = self.passes_through(left.tanh() * frozen.scale)
        mixed = same + 0.5 * again + transposed.t() + right.gather(1, scored.order)
        return self.head(mixed * scored.keep)


class Recurrent(Classifier):
    """Two LSTMs; the second starts from the states of the first."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first = nn.LSTM(3, width, batch_first=True)
        self.second = nn.LSTM(width, width, batch_first=True)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, NUM_CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        hidden, states = self.first(features.unflatten(1, (4, 3)))
        hidden, _ = self.second(hidden, states)
        hidden, last = self.gru(hidden)
        return self.head(hidden[:, -1] + last.mean(dim=0).repeat(1, 2))


class Attention(LanguageModel):
    """``nn.MultiheadAttention`` with a mask made on the way; residuals outside of layers."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, width)
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=dropout, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.head = nn.Linear(width, NUM_TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        normed = self.norm(hidden)
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        attended, weights = self.attention(normed, normed, normed, attn_mask=mask)
        hidden = hidden + attended
        hidden = hidden + self.feed_forward(hidden)
        self.log("attention", weights.diagonal(dim1=1, dim2=2).mean())
        return self.head(hidden)


class FrozenFront(SequentialMLP):
    """The first layers do not learn, and the optimizer does not know them."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.model[:4]:  # type: ignore[attr-defined]
            layer.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        learning = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(learning, lr=0.1, momentum=0.9, weight_decay=0.01)


class NoGradBackbone(Classifier):
    """The first layers run without gradients, although their parameters would take them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(NUM_FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.adapter = nn.Linear(width, width)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.backbone(features)
        return self.head(hidden + self.adapter(hidden).tanh())


class _DropoutBlock(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(self.linear(hidden).tanh())


class Checkpointed(Classifier):
    """The model recomputes its blocks in the backward, dropout included."""

    def __init__(
        self, dropout: float = 0.0, use_reentrant: bool = False, blocks_at_once: int = 1
    ) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, 16)
        self.blocks = nn.ModuleList(_DropoutBlock(16, dropout) for _ in range(4))
        self.head = nn.Linear(16, NUM_CLASSES)
        self.use_reentrant = use_reentrant
        self.blocks_at_once = blocks_at_once

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        for start in range(0, len(self.blocks), self.blocks_at_once):
            hidden = checkpoint(self._some_blocks, hidden, start, use_reentrant=self.use_reentrant)
        return self.head(hidden)

    def _some_blocks(self, hidden: Tensor, start: int) -> Tensor:
        for block in self.blocks[start : start + self.blocks_at_once]:
            hidden = block(hidden).relu()
        return hidden


class FunctionalDropout(LayersOfItsOwn):
    """Draws between its layers, of hidden values and of other shapes, in three libraries."""

    def forward(self, features: Tensor) -> Tensor:
        hidden = F.dropout(self.first(features), 0.2, self.training).relu()
        hidden = hidden + 0.1 * torch.randn_like(hidden)
        hidden = self.second(hidden).tanh()
        hidden = hidden * float(np.random.uniform(0.9, 1.1, size=3).sum() / 3)
        if self.training:
            hidden = hidden[torch.randperm(len(hidden)).argsort()]
        hidden = F.dropout(self.third(hidden), 0.2, self.training)
        hidden = hidden + torch.rand(()) * random.gauss(0.0, 0.1)
        return self.head(F.dropout(hidden.relu_(), 0.1, self.training))


class ControlDependence(LayersOfItsOwn):
    """The code branches on what layers returned, and reads the loss on the host."""

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        if hidden.mean() > 0:
            hidden = hidden * 2.0
        hidden = self.second(hidden.relu())
        positive = int((hidden > 0).sum())
        hidden = self.third(hidden.tanh())
        hidden = hidden * (positive / hidden.numel())
        return self.head(hidden.relu())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if loss.item() > 1.6:
            loss = 0.5 * loss
        self.log("halved", float(loss.item() < 0.8), reduce_fx="max")
        return loss


class _Gated(nn.Module):
    """Returns its output and how evenly it used its gate, as a mixture of experts does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2)
        self.experts = nn.Linear(width, 2 * width)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.gate(hidden).softmax(dim=-1)
        outputs = self.experts(hidden).unflatten(-1, (2, -1)).tanh()
        return hidden + (shares[..., None] * outputs).sum(dim=-2), shares.square().mean()


class AuxiliaryLosses(Classifier):
    """Every block's side output, and the hidden state behind each, goes into the loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, width)
        self.blocks = nn.ModuleList(_Gated(width) for _ in range(3))
        self.head = nn.Linear(width, NUM_CLASSES)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        features, classes = batch
        hidden = self.first(features)
        balance, sizes = [], []
        for block in self.blocks:
            hidden, auxiliary = block(hidden)
            balance.append(auxiliary)
            sizes.append(self.size_of(hidden))
        loss = F.cross_entropy(self.head(hidden), classes)
        self.log("train_loss", loss)
        self.log_dict({f"balance{i}": value for i, value in enumerate(balance)})
        return loss + 0.1 * torch.stack(balance).sum() + 0.01 * sum(size() for size in sizes)

    @staticmethod
    def size_of(hidden: Tensor) -> Callable[[], Tensor]:
        return lambda: hidden.square().mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        features, classes = batch
        hidden = self.first(features)
        for block in self.blocks:
            hidden, _ = block(hidden)
        self.log("val_loss", F.cross_entropy(self.head(hidden), classes))


class EarlyLosses(AuxiliaryLosses):
    """Computes the hidden states' part of the loss on the way, and not at the end."""

    @staticmethod
    def size_of(hidden: Tensor) -> Callable[[], Tensor]:
        size = hidden.square().mean()
        return lambda: size


class WeightPenalty(LayersOfItsOwn):
    """``training_step`` goes over all parameters itself, those of all layers."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.01 * sum(parameter.square().sum() for parameter in self.parameters())


class Hooks(LayersOfItsOwn):
    """Forward hooks change what layers take and return, and keep it; a hook clips a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.second.register_forward_hook(self._halve_and_keep)
        self.third.register_forward_pre_hook(lambda _, inputs: (2.0 * inputs[0],))
        self.third.weight.register_hook(lambda gradient: 0.5 * gradient)

    def _halve_and_keep(self, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        self.kept.append(output)
        return 0.5 * output

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) + self.kept[-1].square().mean()
        self.kept.clear()
        return loss


class Parametrized(LayersOfItsOwn):
    """Weight and spectral normalisation, in the modern and in the old way."""

    def __init__(self) -> None:
        super().__init__()
        from torch.nn.utils import parametrizations, weight_norm

        parametrizations.weight_norm(self.first)
        parametrizations.weight_norm(self.second)
        parametrizations.weight_norm(self.second, "bias", dim=0)
        parametrizations.spectral_norm(self.third)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            weight_norm(self.head)


class BuffersOfItsOwn(LayersOfItsOwn):
    """Counts samples, and keeps the highest score, in buffers of the LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.num_seen: Tensor
        self.highest: Tensor
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("highest", torch.tensor(-1e9))
        self.num_samples = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        features, classes = batch
        self.num_seen += len(features)
        self.num_samples += len(features)
        scores = self(features)
        self.highest = torch.maximum(self.highest, scores.detach().max())
        loss = F.cross_entropy(scores, classes)
        self.log("train_loss", loss)
        self.log("num_samples", float(self.num_samples), reduce_fx="max")
        return loss

    def on_train_end(self) -> None:
        assert self.num_samples == int(self.num_seen)


class ConvolutionalNet(Classifier):
    """Convolutions, ``BatchNorm2d`` and ``ReLU(inplace=True)``, as vision models are written."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.dropout = nn.Dropout(0.1, inplace=True)
        self.head = nn.Linear(32, NUM_CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.features(features)
        self.dropout(hidden)
        return self.head(hidden)


class _Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 0.5 * gradient


class AutogradTricks(LayersOfItsOwn):
    """A function with its own backward, a detached path, a gradient hook, in-place masking."""

    def forward(self, features: Tensor) -> Tensor:
        early = self.first(features)
        hidden = self.second(_Halve.apply(early).relu())
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: 0.5 * gradient)
        hidden = self.third(torch.where(hidden > 0, hidden, 0.1 * early.detach()))
        with torch.no_grad():
            shift = early.mean(dim=0)
        return self.head((hidden - shift).relu() + early * hidden.detach().sign())


class ConfiguredLayers(SmallLanguageModel):
    """Names its layers itself: the blocks in two halves, the embedding with the first."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(self.embedding, *self.blocks[:2])
        self.back = nn.Sequential(self.blocks[2], self.head)
        del self.embedding, self.blocks, self.head

    def configure_layers(self) -> list[nn.Module]:
        return [self.front, self.back[0], self.back[1]]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.back(self.front(tokens))


# --------------------------------------------------------------------------------------------------
# The list
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Specimen:
    """One model of the zoo, with its data."""

    name: str
    make_module: Callable[[], L.LightningModule]
    make_loader: Callable[[int], DataLoader]
    #: Draws random numbers while it trains.
    draws: bool = False
    #: Trains as in plain Lightning, to float tolerance. Not so where random numbers are drawn (for
    #: each layer and microbatch, instead of for the batch), nor where a layer looks at its whole
    #: batch (BatchNorm looks at a microbatch).
    like_plain: bool = True
    #: Has the same bits on every split. Not so in principle where the code between two layers
    #: computes something that layers on both sides of a cut use: each side computes it, each takes
    #: its own part of the gradient back through it, and the parts are rounded before they are
    #: added.
    same_bits: bool = True

    @property
    def num_steps(self) -> int:
        """How many steps a comparison should take."""
        return 8 if self.draws else 5

    def build(self) -> L.LightningModule:
        """A new module, the same weights every time; the global random state stays as it was."""
        with torch.random.fork_rng():
            torch.manual_seed(20)
            return self.make_module()

    def loader(self, num_batches: int | None = None) -> DataLoader:
        """New data, the same every time; by default one epoch of ``num_steps`` batches."""
        return self.make_loader(self.num_steps if num_batches is None else num_batches)


def _zoo() -> Iterator[Specimen]:
    yield Specimen("sequential", SequentialMLP, points)
    yield Specimen(
        "dropout", lambda: SequentialMLP(dropout=0.3), points, draws=True, like_plain=False
    )
    yield Specimen("uneven_batches", SequentialMLP, uneven_points)
    yield Specimen("boring", BoringModel, boring_data)
    yield Specimen("demo_transformer", DemoTransformer, sentences, draws=True, like_plain=False)
    yield Specimen("layers_of_its_own", LayersOfItsOwn, points)
    yield Specimen("skip_connection", SkipConnection, points)
    yield Specimen("in_place", InPlace, points)
    yield Specimen("structured_outputs", StructuredOutputs, points)
    yield Specimen("loose_parameters", LooseParameters, points)
    yield Specimen("functional_tying", FunctionalTying, sentences)
    yield Specimen("random_mask", RandomMask, points, draws=True, like_plain=False)
    yield Specimen("many_lengths", SmallLanguageModel, sentences_of_many_lengths)
    yield Specimen("parameter_groups", ParameterGroups, points)
    yield Specimen("masked_tokens", MaskedTokens, masked_sentences)
    yield Specimen("accuracy", WithAccuracy, points)
    yield Specimen("accumulators", WithAccumulators, points)
    yield Specimen("batch_norm", BatchNorm, points, like_plain=False)
    yield Specimen("gpt2", HuggingFaceGPT2, sentences)
    yield Specimen(
        "gpt2_dropout", lambda: HuggingFaceGPT2(0.1), sentences, draws=True, like_plain=False
    )
    yield Specimen("vit", HuggingFaceViT, images)
    yield Specimen("t5", HuggingFaceT5, sentence_pairs)
    yield Specimen(
        "t5_dropout", lambda: HuggingFaceT5(0.1), sentence_pairs, draws=True, like_plain=False
    )
    yield Specimen(
        "gpt2_checkpointing",
        lambda: HuggingFaceGPT2(0.1, checkpointing=True),
        sentences,
        draws=True,
        like_plain=False,
    )
    yield Specimen("in_place_skip", InPlaceSkip, points)
    yield Specimen("activated_skip", ActivatedSkip, points)
    # A standard deviation over the rows of a batch is not one over those of a microbatch.
    yield Specimen("more_structures", MoreStructures, points, like_plain=False)
    yield Specimen("recurrent", Recurrent, points)
    yield Specimen("attention", Attention, sentences)
    yield Specimen(
        "attention_dropout",
        lambda: Attention(dropout=0.1),
        sentences,
        draws=True,
        like_plain=False,
    )
    yield Specimen("frozen_front", FrozenFront, points)
    yield Specimen("no_grad_backbone", NoGradBackbone, points)
    yield Specimen("checkpointed", Checkpointed, points)
    yield Specimen(
        "checkpointed_dropout", lambda: Checkpointed(0.2), points, draws=True, like_plain=False
    )
    yield Specimen("checkpointed_pairs", lambda: Checkpointed(blocks_at_once=2), points)
    yield Specimen("functional_dropout", FunctionalDropout, points, draws=True, like_plain=False)
    # A microbatch may take another branch than the whole batch.
    yield Specimen("control_dependence", ControlDependence, points, like_plain=False)
    yield Specimen("auxiliary_losses", AuxiliaryLosses, points)
    yield Specimen("early_losses", EarlyLosses, points)
    yield Specimen("weight_penalty", WeightPenalty, points)
    yield Specimen("hooks", Hooks, points)
    # Each forward in training improves the estimate of the spectral norm.
    yield Specimen("parametrized", Parametrized, points, like_plain=False)
    yield Specimen("buffers_of_its_own", BuffersOfItsOwn, points)
    yield Specimen("convolutional_net", ConvolutionalNet, images, draws=True, like_plain=False)
    # The mean that is taken without gradients is one over the microbatch.
    yield Specimen("autograd_tricks", AutogradTricks, points, like_plain=False)
    yield Specimen("configured_layers", ConfiguredLayers, sentences)


#: Every model, by its name.
ZOO = {specimen.name: specimen for specimen in _zoo()}
