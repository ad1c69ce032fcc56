"""Modules whose layers keep, share and change things, and steps that use gradients."""

from __future__ import annotations

import types
import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tests.unit.values import models
from tests.unit.values.models import LENGTH, MICROBATCHES, WIDTH, Block, Model, Trained


class Counting(nn.Module):
    """A layer that counts in a set and in an array, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.shapes: set[tuple[int, ...]] = set()
        self.counts = np.zeros(2, int)

    def forward(self, x: Tensor) -> Tensor:
        """Uses how often it was called."""
        self.shapes.add((*x.shape, int(self.counts[0]) % 2))
        self.counts[0] += 1
        return self.block(x) * (1.0 + 0.1 * int(self.counts[0]))


class Counts(Model):
    """What layers count is read behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(4))

    def step(self, batch: Any, number: int) -> Any:
        loss = super().step(batch, number)
        for block in self.blocks:
            assert isinstance(block, Counting)
            self.noted.append((sorted(block.shapes), block.counts.tolist()))
            loss = loss + 0.01 * len(block.shapes)
        return loss


class Statistics(nn.Module):
    """A layer that keeps what values say in an array, and a text."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.mean, self.sign = Block(), np.zeros(WIDTH, np.float32), "none"

    def forward(self, x: Tensor) -> Tensor:
        """Adds the mean of the call before."""
        x = self.block(x) + torch.from_numpy(self.mean.copy())
        self.mean[...] = x.detach().mean((0, 1)).numpy()
        self.sign = "+" if float(x.detach().sum()) > 0 else "-"
        return x


class Measures(Model):
    """What a layer keeps of values is read behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Statistics(), Block(), Statistics()])

    def step(self, batch: Any, number: int) -> Any:
        loss = super().step(batch, number)
        for block in (self.blocks[1], self.blocks[3]):
            assert isinstance(block, Statistics)
            self.noted.append((block.sign, block.mean.tolist()))
            loss = loss * (1.0 + float(block.mean[0]))
        return loss


class Listens(Model):
    """Hooks before modules inside of layers take things out; others make weights."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for block in self.blocks:
                assert isinstance(block, Block)
                nn.utils.weight_norm(block.up)

    def step(self, batch: Any, number: int) -> Any:
        taken: list[Tensor] = []
        handles = []
        for block in self.blocks:
            assert isinstance(block, Block)
            handles.append(
                block.up.register_forward_pre_hook(lambda _, args: taken.append(args[0]))
            )
        loss = super().step(batch, number)
        for handle in handles:
            handle.remove()
        self.noted.append([tuple(each.shape) for each in taken])
        return loss + sum(0.01 * each.pow(2).mean() for each in taken)


class Clips(Model):
    """The step clips, checks, scales and drops gradients itself."""

    by_hand = True

    def step(self, batch: Any, number: int) -> Any:
        loss = super().step(batch, number)
        (loss / MICROBATCHES).backward()
        norm = clip_grad_norm_(self.parameters(), 0.1)
        for parameter in self.blocks[1].parameters():
            assert parameter.grad is not None
            parameter.grad *= 0.5
        first = next(self.blocks[2].parameters())
        first.grad = None if number else first.grad * 3.0  # type: ignore[operator,assignment]
        self.noted.append(norm.item())
        self.noted.append([x.grad is None for x in self.parameters()])
        self.noted.append(
            any(bool(x.grad.isnan().any()) for x in self.parameters() if x.grad is not None)
        )
        return loss.detach()


class Adversarial(Model):
    """The gradient of what a layer returns is used."""

    by_hand = True

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        x = self.embedding(words).detach().requires_grad_()
        h = x
        for block in self.blocks:
            h = block(h)
        self.loss(h, targets).backward()
        assert x.grad is not None
        self.noted.append(x.grad.abs().sum().item())
        moved = self.embedding(words) + 0.1 * x.grad.sign()
        for block in self.blocks:
            moved = block(moved)
        loss = self.loss(moved, targets)
        (loss / MICROBATCHES).backward()
        return loss.detach()


class Normed(nn.Module):
    """A block behind a norm that all layers have."""

    def __init__(self, norm: nn.BatchNorm1d, mask: Tensor) -> None:
        super().__init__()
        self.block, self.norm = Block(), norm
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        """Uses the statistics of the calls before, too."""
        assert isinstance(self.mask, Tensor)
        assert self.norm.running_mean is not None
        x = self.block(self.norm(x)) * self.mask
        return x + 0.1 * self.norm.running_mean.mean()


class Shares(Model):
    """Layers of all stages have the same buffers."""

    def __init__(self) -> None:
        super().__init__()
        norm, mask = nn.BatchNorm1d(LENGTH), torch.linspace(0.5, 1.0, WIDTH)
        self.blocks = nn.ModuleList(Normed(norm, mask) for _ in range(4))

    def step(self, batch: Any, number: int) -> Any:
        loss = super().step(batch, number)
        first = self.blocks[0]
        assert isinstance(first, Normed)
        assert first.norm.running_var is not None
        assert first.norm.num_batches_tracked is not None
        self.noted.append(
            (first.norm.running_var.sum().item(), first.norm.num_batches_tracked.item())
        )
        return loss + 0.01 * first.norm.running_var.sum()


class Settable(nn.Module):
    """A layer with settings."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.dropout = Block(), nn.Dropout(0.0)
        self.parts, self.options, self.taken = 1, {"memory": False}, [0]

    def forward(self, x: Tensor, memory: Tensor, seen: list[Tensor]) -> Tensor:
        """``x`` or several of it, and what was seen."""
        x = self.dropout(self.block(x, memory if self.options["memory"] else None))
        if self.taken:
            seen += [x] * self.taken[0]
        return torch.cat([x] * self.parts, 1)


class Sets(Model):
    """Settings of layers change between their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Settable() for _ in range(4))

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        memory = x = self.embedding(words)
        seen: list[Tensor] = []
        for at, block in enumerate(self.blocks):
            assert isinstance(block, Settable)
            block.parts = 1 + (number + at) % 2
            block.options["memory"] = number == 1
            block.taken[0] = number
            x = block(x, memory, seen)[:, -LENGTH:]
        self.noted.append(len(seen))
        return self.loss(x + sum(each.mean() for each in seen), targets)


class SetsDropout(Sets):
    """As :class:`Sets`, with dropout from the second microbatch on."""

    def step(self, batch: Any, number: int) -> Any:
        for block in self.blocks:
            assert isinstance(block, Settable)
            block.dropout.p = 0.3 * number
        return super().step(batch, number)


def _twice(self: Any, x: Tensor) -> Tensor:
    return torch.cat([x, Block.forward(self, x)], 1)[:, 1:]


class Patched(Model):
    """Layers, and a module in one, have forwards of their own: as methods, and as a function."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third, _ = self.blocks
        first.forward = types.MethodType(_twice, first)
        assert isinstance(second, Block)
        plain = second.norm.forward
        second.norm.forward = lambda x: 2.0 * plain(x)  # type: ignore[method-assign,assignment]
        third.forward = lambda x: Block.forward(third, x)[:, 1:]  # type: ignore[arg-type]

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        x = self.hidden(words)
        self.noted.append(tuple(x.shape))
        return self.loss(x[:, -LENGTH:], targets)


class FrozenBehind(Model):
    """Layers and loose parameters are frozen, and thawed, behind their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 1.3))

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        x = self.hidden(words) * self.scale
        self.blocks[number % 2].requires_grad_(number == 1)
        self.embedding.weight.requires_grad = number != 1
        self.scale.requires_grad_(number == 0)
        extra = functional_penalty(x, self.embedding.weight)
        self.blocks[3].requires_grad_(number != 2)
        return self.loss(x, targets) + extra * self.scale.sum()


class Freezing(Block):
    """A layer that freezes, thaws and switches what is in it, in each call another part."""

    def forward(self, x: Tensor, number: int) -> Tensor:  # type: ignore[override]
        """The block of ``x``."""
        self.norm.weight.requires_grad_(number != 1)
        self.up.requires_grad_(number == 1)
        self.norm.train(number == 0)
        return super().forward(x)


class FrozenInside(Model):
    """Parameters of layers are frozen, and thawed, where the layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Freezing(), Freezing(), Block()])

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        first, second, third, fourth = self.blocks
        x = third(second(first(self.embedding(words)), number), number + 1)
        for each in (second, third):
            trained = [name for name, p in each.named_parameters() if p.requires_grad]
            self.noted.append((trained, [module.training for module in each.modules()]))
        return self.loss(fourth(x), targets)


class Lazy(nn.Module):
    """A layer that gets attributes when it is first called; its arguments have names that others
    could have, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    @cached_property
    def scale(self) -> float:
        """Computed once."""
        return 1.5

    def forward(self, x: Tensor, *, state: Tensor) -> Tensor:
        """The block of ``x + state``."""
        if not hasattr(self, "size"):
            self.size = x.shape[1]
        return self.block(x + state) * self.scale + self.size


class BeginsLate(Model):
    """A parameter outside of layers is first used as an argument of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Lazy(), Lazy()])
        self.start = nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH))

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        x = self.blocks[1](self.blocks[0](self.embedding(words)))
        for block in self.blocks[2:]:
            x = block(x, state=self.start)
            self.noted.append((block.size, block.scale))
        return self.loss(x, targets)


def functional_penalty(x: Tensor, weight: Tensor) -> Tensor:
    return 1e-2 * (x.mean() * weight.pow(2).mean())


NAMES: list[str] = []
for each in (
    Counts,
    Measures,
    Listens,
    Clips,
    Adversarial,
    Shares,
    Sets,
    SetsDropout,
    Patched,
    FrozenBehind,
    FrozenInside,
    BeginsLate,
):
    models.MORE[each.__name__] = each
    NAMES.append(each.__name__)


def on_stages(cases: Sequence[tuple[str, str, bool]]) -> list[Trained]:
    """As that of :mod:`.models`, for the models here."""
    return models.on_stages(cases)


class Hiding(nn.Module):
    """A layer whose attribute changes where branches on values lead, which no run without values
    takes both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        """``x``."""
        if x.detach().sum() > -1e9 and not x.detach().sum() > 1e9:
            self.count += 1
        return x * 1.0


class Writing(nn.Module):
    """As :class:`Hiding`, but it writes to its argument, and appends to a list."""

    def forward(self, x: Tensor, seen: list[Tensor], writes: bool) -> Tensor:
        """``x``."""
        if x.detach().sum() > -1e9 and not x.detach().sum() > 1e9:
            if writes:
                x.detach().mul_(2.0)
            else:
                seen.append(x)
        return x * 1.0


class Hardening(nn.Module):
    """As :class:`Hiding`, but it freezes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """``x``."""
        if x.detach().sum() > -1e9 and not x.detach().sum() > 1e9:
            self.requires_grad_(False)
        return x * 1.0


class Strided(nn.Module):
    """A layer that has another layout with values."""

    def forward(self, x: Tensor) -> Tensor:
        """``x``."""
        return x.transpose(0, 1).contiguous().transpose(0, 1) if type(x) is Tensor else x * 1.0


class Refused(Model):
    """With layers that do what the other stages are not told."""

    def __init__(self) -> None:
        super().__init__()
        self.hiding, self.writing, self.strided = Hiding(), Writing(), Strided()
        self.hardening = Hardening()

    def layers(self) -> list[nn.Module]:
        return [*super().layers(), self.hiding, self.writing, self.strided, self.hardening]


def hidden_change(model: Any, rank: int, words: Tensor) -> Any:
    return model.hiding(model.hidden(words)).sum()


def hidden_write(model: Any, rank: int, words: Tensor) -> Any:
    return model.writing(model.hidden(words) * 1.0, [], True).sum()


def hidden_item(model: Any, rank: int, words: Tensor) -> Any:
    return model.writing(model.hidden(words) * 1.0, [], False).sum()


def hidden_flag(model: Any, rank: int, words: Tensor) -> Any:
    return model.hardening(model.hidden(words)).sum()


def other_layout(model: Any, rank: int, words: Tensor) -> Any:
    return model.strided(model.hidden(words) * 1.0).sum()


def early_gradient(model: Any, rank: int, words: Tensor) -> Any:
    loss = model.hidden(words).sum()
    return loss * (0.0 if model.embedding.weight.grad is None else 1.0)


def written_by_a_hook(model: Any, rank: int, words: Tensor) -> Any:
    handle = model.blocks[0].up.register_forward_pre_hook(lambda _, args: (args[0] * 2.0,))
    try:
        return model.hidden(words).sum()
    finally:
        handle.remove()


def refused(step: Any) -> None:
    """Runs two steps on the ranks of a job, which end with an error."""
    models.refused(step, Refused)
