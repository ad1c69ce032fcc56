"""A zoo of LightningModules that know nothing of PipeShift, each with a habit of a real one.

``ZOO`` names them; ``ZOO["gpt2"].build()`` makes a module, the same weights every time, and leaves
the global random state alone; ``ZOO["gpt2"].loader()`` makes its data, the same batches every time.
What a test may expect of each stands with it: whether it draws random numbers, and whether it
should come out as in plain Lightning.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.demos import Transformer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

BATCH_SIZE = 8
NUM_FEATURES = 12
NUM_CLASSES = 5
NUM_TOKENS = 37
SEQUENCE_LENGTH = 10


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
    """What BoringModel trains on: batches of one row, fewer than the microbatches."""
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


class SkipConnection(Classifier):
    """What the first layer returns is used again behind the third."""

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
    """What a layer of ``StructuredOutputs`` returns."""

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

    def __init__(self, dropout: float = 0.0) -> None:
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

    def __init__(self) -> None:
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
                dropout_rate=0.0,
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

    @property
    def num_steps(self) -> int:
        """How many steps a comparison should take."""
        return 20 if self.draws else 5

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


#: Every model, by its name.
ZOO = {specimen.name: specimen for specimen in _zoo()}
