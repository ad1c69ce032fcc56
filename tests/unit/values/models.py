"""Small modules, each with a habit of users, and how they are trained with and without the core."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from lightning_pipeshift.plan.schedule.actions import Kind
from lightning_pipeshift.plan.schedule.schedules import schedule_named
from lightning_pipeshift.runtime.comm.mailbox import Mailbox
from lightning_pipeshift.step.engine import Engine
from lightning_pipeshift.step.tails import Tails
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.value import Value

WIDTH, LENGTH, BATCH, WORDS = 16, 6, 3, 11
MICROBATCHES, STEPS = 3, 3


class Block(nn.Module):
    """A block of a transformer, with or without cross attention to a memory."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """``(batch, length, width)`` -> the same."""
        normed = self.norm(x)
        keys = normed if memory is None else memory
        x = x + self.attention(normed, keys, keys, need_weights=False)[0]
        hidden = functional.gelu(self.up(x))
        return x + functional.dropout(self.down(hidden), self.dropout, self.training)


class Model(nn.Module):
    """A small language model. Subclasses have other steps."""

    dropout = 0.0
    by_hand = False
    """Whether the step calls ``backward`` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(self.dropout) for _ in range(4))
        self.head: nn.Module | None = nn.Linear(WIDTH, WORDS)
        self.noted: list[Any] = []

    def layers(self) -> list[nn.Module]:
        """What is placed."""
        return [self.embedding, *self.blocks, *([self.head] if self.head is not None else [])]

    def owner(self, number: int, stages: int) -> int:
        """The stage of a layer."""
        return min(number * stages // len(self.layers()), stages - 1)

    def hidden(self, words: Tensor) -> Tensor:
        """What the head gets."""
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Of what the head gets."""
        assert self.head is not None
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    def step(self, batch: Any, number: int) -> Any:
        """The user's step."""
        words, targets = batch
        return self.loss(self.hidden(words), targets)


class Drops(Model):
    """Dropout inside of layers and between them."""

    dropout = 0.2

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        x = functional.dropout(self.hidden(words), 0.2)
        return self.loss(x + 0.1 * torch.randn_like(x) + 0.1 * torch.rand(WIDTH), targets)


class Tied(Model):
    """The embedding's weight is the head's, and parameters outside of layers are used."""

    def __init__(self) -> None:
        super().__init__()
        self.head = None
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.full((1,), 1.3))

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = functional.linear(self.norm(x) * self.scale, self.embedding.weight)
        penalty = 1e-3 * self.embedding.weight.pow(2).sum() + self.scale.pow(2).sum()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + penalty


class SharedHead(Model):
    """A layer at the end uses the weight of the layer at the front."""

    def __init__(self) -> None:
        super().__init__()
        head = nn.Linear(WIDTH, WORDS, bias=False)
        head.weight = self.embedding.weight
        self.head = head


class Skips(Model):
    """Values go around layers, and back to earlier stages."""

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        x, kept = self.embedding(words), []
        for block in self.blocks[:2]:
            kept.append(x)
            x = block(x)
        for block in self.blocks[2:]:
            x = block(torch.cat([x, kept.pop()], 1)[:, :LENGTH], x) + 0.5 * x
        return self.loss(self.blocks[0](x) + kept.__len__(), targets)


class Scattered(Model):
    """Neighbouring layers at stages that are none."""

    def owner(self, number: int, stages: int) -> int:
        return (2 * number + 1) % stages


class Reads(Model):
    """Values become Python numbers, decide branches, and are printed."""

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        x = self.hidden(words)
        if x.abs().mean() > 0.5:
            x = x * 0.9
        loss = self.loss(x, targets)
        self.noted += [loss.item(), f"{loss:.4f}", str(loss.detach()), x[0].tolist()[0]]
        best = x.argmax(-1).flatten().bincount(minlength=WIDTH)
        return loss + 0.01 * x[:, : int(best.argmax()) + 1].mean() + 0.1 * x[x > 0.3].sum()


class ReadsAlone(Model):
    """The first rank, and the last one, read what others do not read: values, and a parameter
    outside of layers before it is used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.read_here = nn.Parameter(torch.full((1,), 1.3)), list[Any]()

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        x = self.embedding(words)
        read: list[Any] = []
        if dist.is_initialized() and dist.get_rank() == 0 and not self.read_here:
            self.read_here.append(self.scale.item())
        loss = self.loss(self.hidden(words) * self.scale, targets)
        mean = x.mean()
        if dist.is_initialized() and dist.get_rank() == 0:
            read += [loss.item(), f"{mean:.3f}"]
        if dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1:
            read += [mean.item()]
        self.read_here += read
        return loss


class Queue(Model):
    """Detached values of steps before are used."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[Tensor] = deque(maxlen=2)

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        x = self.hidden(words)
        loss = self.loss(x, targets)
        if self.queue:
            loss = loss + 0.1 * sum((x - old).pow(2).mean() for old in self.queue)
        self.queue.append(x.detach())
        return loss


class InPlace(Model):
    """Values and common tensors are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        x = self.hidden(words) * 1.0
        x[:, 0] = 0.5
        x[:, 1].mul_(2.0)
        parts = torch.zeros(BATCH, 2, WIDTH)
        parts[:, 0] = x.mean(1)
        loss = self.loss(x, targets) + parts.pow(2).mean() + self.blocks[0](x).mean()
        self.total += loss.detach()
        self.noted.append(self.total.item())
        return loss


class Cache:
    """An object with tensors in it."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.count = 0


class Caching(nn.Module):
    """A layer that keeps what it saw in an object of its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, cache: Cache) -> dict[str, Any]:
        """Uses what the last two layers kept."""
        out = self.block(x)
        for key in cache.keys[-2:]:
            out = out + 0.1 * key
        cache.keys.append(out)
        cache.count += 1
        return {"x": out, "cache": cache}


class Objects(Model):
    """Layers change objects that are passed in, and return dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Caching() for _ in range(4))

    def hidden(self, words: Tensor) -> Tensor:
        cache = Cache()
        x = self.embedding(words)
        for block in self.blocks:
            found = block(x, cache=cache)
            x = found["x"]
            assert found["cache"] is cache
        self.noted.append((cache.count, len(cache.keys), tuple(cache.keys[0].shape)))
        return x + cache.keys[1].mean()


class Keeping(nn.Module):
    """A layer with attributes that its calls change: of plain kinds, with gradients, in buffers."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm = Block(), nn.BatchNorm1d(LENGTH)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.penalty: Tensor | None = None
        self.history: list[Tensor] = []
        self.num_calls, self.rate = 0, 0.1

    def forward(self, x: Tensor) -> Tensor:
        """Uses what the call before has kept."""
        x = self.norm(self.block(x)) + self.rate * self.seen
        self.num_calls += 1
        self.rate += 0.1
        self.penalty = x.pow(2).mean() * self.num_calls
        self.history.append(x.detach().mean(0))
        self.seen = 0.5 * self.seen + self.history[-1].mean(0)
        return x + sum(self.history[-2:])


class Keeps(Model):
    """Attributes and buffers of layers are read behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeping() for _ in range(4))

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        loss = self.loss(self.hidden(words), targets)
        for block in self.blocks:
            assert isinstance(block, Keeping)
            assert block.penalty is not None
            assert block.norm.running_mean is not None
            loss = loss + 0.01 * block.penalty + 0.01 * block.norm.running_mean.sum()
            self.noted.append((block.num_calls, len(block.history), block.seen.sum().item()))
        return loss


class Casts(Model):
    """A part of the step computes in half precision: a stage waits in it while others go on."""

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        with torch.autocast("cpu", torch.bfloat16):
            x = self.hidden(words)
        return self.loss(x.float(), targets) + 0.0 * torch.full_like(x, float("nan")).isnan().sum()


class ByHand(Model):
    """The step calls ``backward`` itself, several times, for values that are computed anew."""

    by_hand = True

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        for factor in (0.5, 0.25):
            loss = self.loss(self.hidden(words), targets)
            (factor * loss / MICROBATCHES).backward()
        return loss.detach()


class MadeWeights(Model):
    """Weights for one call of a layer: what layers at other stages have made, with their gradient;
    what every stage has; and a leaf.
    """

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        x = self.hidden(words)
        assert self.head is not None
        block: Any = self.blocks[0]
        weights = dict(block.named_parameters())
        made = {name: w + 0.01 * x.mean((0, 1)).sum() for name, w in weights.items()}
        x = torch.func.functional_call(block, made, (x,))
        some = {name: torch.full_like(w, 0.1) for name, w in list(weights.items())[:1]}
        x = x + torch.func.functional_call(block, some, (x.detach(),))
        leaf = torch.zeros(WORDS, requires_grad=True)
        logits = torch.func.functional_call(self.head, {"bias": leaf + x.mean()}, (block(x),))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Adversary(Model):
    """A backward between a value and its use, as in a GAN: of a loss that the value, detached, has
    a part in, and of one that it has none in; and two losses, the earlier one first.
    """

    by_hand = True

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        made = self.hidden(words)
        (self.loss(made.detach().tanh(), targets) / MICROBATCHES).backward()
        early, late = (self.blocks[at](self.blocks[2](made.detach() * at)) for at in (3, 0))
        (early.pow(2).mean() / MICROBATCHES).backward()
        (late.pow(2).mean() / MICROBATCHES).backward()
        # What is used up may be looked at, also together with what is not.
        self.noted.append((early.mean() + late.mean() + made.mean()).item())
        loss = self.loss(made, targets)
        (loss / MICROBATCHES).backward()
        return loss.detach()


class Retains(Model):
    """Two losses of what layers have in common, one backward each."""

    by_hand = True

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        made = self.hidden(words)
        loss, other = self.loss(made, targets), self.blocks[1](made).pow(2).mean()
        (other / MICROBATCHES).backward(retain_graph=True)
        (loss / MICROBATCHES).backward()
        return (loss + other).detach()


class EntersWithHistory(Model):
    """Tensors that every stage has, with a history, are used at several stages: each stage has
    their gradient.
    """

    by_hand = True

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        noise = torch.zeros(WIDTH, requires_grad=True)
        for _ in range(2):
            moved = noise + 0.01 * torch.arange(WIDTH)
            x = self.blocks[2](self.embedding(words) + moved * 2) * moved
            loss = self.loss(self.blocks[0](x + moved), targets) + noise.pow(2).sum()
            (slope,) = torch.autograd.grad(loss, noise, retain_graph=True)
            assert type(slope) is Tensor
            (loss / MICROBATCHES).backward()
            assert noise.grad is not None
            self.noted.append((slope.tolist(), noise.grad.tolist()))
            noise = (noise + 0.1 * noise.grad.sign()).detach().requires_grad_()
        return loss.detach()


class Differentiates(Model):
    """Gradients that no parameter gets: of a tensor and a value of the step, and of weights."""

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        x = self.embedding(words).detach().requires_grad_()
        made = self.blocks[1](self.blocks[2](x) * 2)
        loss = self.loss(self.blocks[0](made), targets)
        some: Any = [x, made, *self.blocks[2].parameters()]
        slopes = torch.autograd.grad(loss, some, retain_graph=True)
        asked = [made, self.embedding.weight]
        again = torch.autograd.grad([loss, made.sum()], asked, allow_unused=True)
        assert again[1] is None
        self.noted.append([slope.abs().sum().item() for slope in (*slopes, again[0])])
        return self.loss(self.hidden(words) + 0.1 * slopes[0].sign() * slopes[1], targets)


class Attacks(Model):
    """The gradient of a tensor that the step makes itself, and that layers of two stages use."""

    by_hand = True

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        noise = torch.zeros(BATCH, 1, LENGTH, WIDTH)[:, 0]
        noise.requires_grad = True

        def loss(x: Tensor, noise: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x + noise, noise)
            return self.loss(x, targets)

        (loss(self.embedding(words), noise) / MICROBATCHES).backward()
        assert noise.grad is not None
        self.noted.append(noise.grad.abs().sum().item())
        worst = loss(self.embedding(words), 0.1 * noise.grad.sign())
        (worst / MICROBATCHES).backward()
        return worst.detach()


class Hooks(Model):
    """Hooks of modules inside of layers, and of layers, take things out; layers return classes of
    their own.
    """

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        taken: list[Tensor] = []
        handles = []
        for block in self.blocks:
            assert isinstance(block, Block)
            handles += [
                each.register_forward_hook(lambda _, __, out: taken.append(out))
                for each in (block, block.up)
            ]
        loss = self.loss(self.hidden(words), targets)
        for handle in handles:
            handle.remove()
        self.noted.append([tuple(each.shape) for each in taken])
        return loss + sum(0.01 * each.pow(2).mean() for each in taken)


class Frozen(Model):
    """Layers are frozen, and thawed again, from step to step."""

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        if number == 0:
            first = self.blocks[0]
            is_trained = not next(first.parameters()).requires_grad
            first.requires_grad_(is_trained)
            self.embedding.requires_grad_(is_trained)
        return self.loss(self.hidden(words), targets)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None


class Functions(Model):
    """A user's autograd function between layers."""

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        return self.loss(_Doubled.apply(self.hidden(words), 1.5), targets)


class Recurrent(Model):
    """Every layer is called again and again, for a number of times that is drawn."""

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        x = self.embedding(words)
        for _ in range(int(torch.randint(1, 4, ()))):
            for block in self.blocks:
                x = block(x)
        return self.loss(x, targets)


class SeveralLosses(Model):
    """Losses of several stages, and layers that no gradient reaches."""

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        x = self.embedding(words)
        losses = []
        for block in self.blocks[:3]:
            x = block(x)
            losses.append(self.loss(x, targets))
        with torch.no_grad():
            self.noted.append(round(self.blocks[3](x).sum().item(), 4))
        first, *others = losses
        return sum(others, first) / len(losses)


class Masks(Model):
    """Shapes are asked for, and tensors are made that are like values."""

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        x = self.hidden(words)
        batch_size, length, _ = x.shape
        mask = torch.ones(batch_size, length, device=x.device).tril().unsqueeze(-1).to(x)
        assert x.to(x.dtype).contiguous() is x
        picked = torch.zeros(BATCH, LENGTH, WIDTH)
        picked[x > 0.5] = x[x > 0.5]
        x = x + 0.1 * picked
        weights = torch.full_like(x, 0.5) + x.new_zeros(x.size(-1))
        self.noted.append((x.dtype, x.ndim, x.requires_grad, len(x), weights.sum().item()))
        return self.loss(x * mask + weights, targets)


class Pruned(Model):
    """A hook of a layer makes its weight before each call."""

    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.head, "weight", 0.5)


class AssignsData(Model):
    """`x.data = y` between tensors of two stages, of one, and such as every stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow, self.other = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.slow.requires_grad_(False)
        self.other.requires_grad_(False)
        self.average = torch.zeros(WIDTH)

    def layers(self) -> list[nn.Module]:
        """The encoder is first, and what follows it is last."""
        return [self.fast, *super().layers(), self.slow, self.other]

    def step(self, batch: Any, number: int) -> Any:
        words, targets = batch
        for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
            before = slow.data
            slow.data = slow.data * 0.9 + fast.data * 0.1
            self.noted.append(round((slow - before).sum().item(), 5))
            # Both names are of one memory.
            both = slow.detach() * 1.0
            slow.data = both
            both.mul_(0.99)
        self.average.data = self.average.data * 0.5 + self.fast.bias.data
        self.other.bias.data = torch.full((WIDTH,), 0.1 * number)
        kept = self.other.weight.data
        self.other.weight.data = kept * 0.0
        x = self.blocks[0](self.fast(self.embedding(words)))
        target = self.slow(x).detach() + self.other(x).detach()
        self.other.weight.data = kept
        distance = functional.mse_loss(self.blocks[1](x), target) + self.average.sum()
        return self.loss(self.blocks[3](self.blocks[2](x)), targets) + distance


MODELS: dict[str, type[Model]] = {
    each.__name__: each
    for each in (
        Model,
        Drops,
        Tied,
        SharedHead,
        Skips,
        Scattered,
        Reads,
        ReadsAlone,
        Queue,
        InPlace,
        Objects,
        Keeps,
        Casts,
        ByHand,
        MadeWeights,
        EntersWithHistory,
        Differentiates,
        Adversary,
        Retains,
        Attacks,
        Hooks,
        Frozen,
        Functions,
        Recurrent,
        SeveralLosses,
        Masks,
        Pruned,
        AssignsData,
    )
}


MORE: dict[str, type[Model]] = {}
"""Models of other files."""


def made(name: str) -> tuple[Model, list[list[tuple[Tensor, Tensor]]]]:
    """A model, and the microbatches of all steps."""
    torch.manual_seed(7)
    model = (MODELS.get(name) or MORE[name])()

    def words() -> Tensor:
        return torch.randint(WORDS, (BATCH, LENGTH))

    return model, [[(words(), words()) for _ in range(MICROBATCHES)] for _ in range(STEPS)]


def plainly(name: str) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    """Trains in a plain loop; returns losses, parameters, and what the step noted."""
    model, steps = made(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for batches in steps:
        for number, batch in enumerate(batches):
            loss = model.step(batch, number)
            if not model.by_hand:
                (loss / len(batches)).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: x.detach() for name, x in model.named_parameters()}, model.noted


class Trained(NamedTuple):
    """What a rank has after a model's training.

    Args:
        losses: where this rank owns them.
        held: the parameters that this rank holds.
        noted: what the model's step noted.
        num_fake: how many runs on fake tensors there were.
        num_suspended: how often a step was suspended.
    """

    losses: list[float | None]
    held: dict[str, Tensor]
    noted: list[Any]
    num_fake: int
    num_suspended: int


def require_same(
    ranks: Sequence[Trained], losses: Sequence[float | None], parameters: dict[str, Tensor]
) -> None:
    """Requires that ranks have together these losses and parameters, bit for bit."""
    found = [
        next(loss for loss in each if loss is not None)
        for each in zip(*(rank.losses for rank in ranks), strict=True)
    ]
    assert found == losses
    held = {name: each for rank in ranks for name, each in rank.held.items()}
    assert held.keys() == parameters.keys()
    assert [name for name, each in held.items() if not torch.equal(each, parameters[name])] == []


def connected() -> Mailbox:
    """A mailbox of this rank for all ranks of the job."""
    ranks = list(range(dist.get_world_size()))
    group = dist.new_group(backend="gloo")
    return Mailbox(group, ranks, ranks, dist.get_rank(), lambda _: nullcontext())


def core_of(model: Model, mailbox: Mailbox) -> Core:
    """The core of a model whose layers say where they are."""
    stages = mailbox.num_stages
    return Core(
        model,
        model.layers(),
        lambda number, turn: model.owner(number, stages),
        mailbox,
        torch.device("cpu"),
    )


def on_stages(cases: Sequence[tuple[str, str, bool]]) -> list[Trained]:
    """Trains models on the ranks of a job, each under a schedule, with or without overlap."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return [_trained(*case) for case in cases]


def _trained(name: str, schedule: str, overlaps: bool) -> Trained:
    model, steps = made(name)
    mailbox = connected()
    core = core_of(model, mailbox)
    engine = Engine(core, Tails(core, num_watched=0) if overlaps else None)
    row = schedule_named(schedule)(mailbox.num_stages, MICROBATCHES)[mailbox.stage]
    if model.by_hand:
        row = tuple(action for action in row if action.kind is Kind.FORWARD)
    losses: list[float | None] = []
    optimizer: torch.optim.Optimizer | None = None
    with core.placed(), core.seeing_parameters():
        for number, batches in enumerate(steps):
            for loss in engine.run(number, batches, model.step, row):
                # On one stage it is a plain tensor.
                here = loss
                if isinstance(loss, Value):
                    here = loss.account.tensor if loss.account.owner == mailbox.stage else None
                losses.append(None if here is None else here.item())
            if optimizer is None and core.held():
                optimizer = torch.optim.AdamW(core.held().values(), lr=0.01)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    held = {name: x.detach().clone() for name, x in core.held().items()}
    # Another stage may still read what this one has.
    dist.barrier()
    mailbox.close()
    return Trained(losses, held, model.noted, core.finder.num_runs, engine.num_suspended)


class Extra(nn.Module):
    """A layer that returns a view of what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        """The same memory in another shape."""
        return x.flatten(1)


def other_operations(model: Model, rank: int, words: Tensor) -> Tensor:
    x = model.hidden(words)
    if rank == 1:
        x = x * 2
    return x.sin().sum()


def other_numbers(model: Model, rank: int, words: Tensor) -> Tensor:
    return (model.hidden(words) * (1.0 + rank)).sum() + model.blocks[0](model.hidden(words)).sum()


def other_layers(model: Model, rank: int, words: Tensor) -> Tensor:
    x = model.embedding(words)
    return model.blocks[3](model.blocks[1 if rank else 0](x)).sum()


def other_keywords(model: Model, rank: int, words: Tensor) -> Tensor:
    x = model.embedding(words)
    return model.blocks[3](torch.add(x, x, alpha=1.0 + rank)).sum()


def other_slices(model: Model, rank: int, words: Tensor) -> Tensor:
    x = model.embedding(words)
    return model.blocks[3](torch.cat([x[:, rank:], x[:, :rank]], 1)).sum()


def other_draws(model: Model, rank: int, words: Tensor) -> Tensor:
    if rank == 1:
        torch.rand(1)
    return model.blocks[3](model.embedding(words)).sum()


def other_tensors(model: Model, rank: int, words: Tensor) -> Tensor:
    mask = torch.ones(WIDTH)
    if rank == 1:
        mask[2] = 0.5
    return model.blocks[3](model.embedding(words) * mask).sum()


def other_modes(model: Model, rank: int, words: Tensor) -> Tensor:
    with torch.set_grad_enabled(rank == 0):
        x = model.embedding(words)
    return model.blocks[3](x).sum()


def into_history(model: Model, rank: int, words: Tensor) -> Tensor:
    total = 2 * torch.zeros(3, requires_grad=True)
    total[0] = model.hidden(words).mean()
    return total.sum()


def into_a_view(model: Model, rank: int, words: Tensor) -> Tensor:
    total = torch.zeros(3)
    total[0].copy_(model.hidden(words).mean())
    return total.sum()


def into_what_others_see(model: Model, rank: int, words: Tensor) -> Tensor:
    total = torch.zeros(3)
    seen = total[1:]
    total += model.hidden(words).mean()
    return seen.sum()


def stale(model: Model, rank: int, words: Tensor) -> Tensor:
    x = model.embedding(words) * 1.0
    view = model.extra(x)  # type: ignore[operator]
    view.mul_(2.0)
    return x.sum()


def derivative(model: Model, rank: int, words: Tensor) -> Tensor:
    x = model.hidden(words)
    return torch.autograd.grad(x.pow(2).sum(), [x], create_graph=True)[0].sum()


def other_shape(model: Model, rank: int, words: Tensor) -> Tensor:
    weight = model.embedding.weight
    weight.data = weight.data[:5]
    return model.hidden(words).sum()


def written_after(model: Model, rank: int, words: Tensor) -> Tensor:
    assert model.head is not None
    new = model.embedding.weight.data * 2
    model.head.weight.data = new
    new.mul_(2)
    return model.head(model.hidden(words)).sum()


def written_after_its_last_use(model: Model, rank: int, words: Tensor) -> Tensor:
    assert model.head is not None
    new = model.embedding.weight.data * 2
    model.head.weight.data = new
    x = model.head(model.hidden(words)).sum()
    new.mul_(2)
    return x


def shared_with_others(model: Model, rank: int, words: Tensor) -> Tensor:
    first, second = torch.zeros(2, WIDTH)
    model.blocks[0].norm.weight.data = first  # type: ignore[union-attr]
    second.add_(1)
    return model.hidden(words).sum()


def kept_behind(model: Model, rank: int, words: Tensor) -> Tensor:
    model.noted.append(model.embedding.weight.data * 2)
    model.embedding.weight.data = model.noted[-1]
    return model.hidden(words).sum()


def shared_by_two(model: Model, rank: int, words: Tensor) -> Tensor:
    model.blocks[0].norm.weight.data = model.blocks[3].norm.weight.data  # type: ignore[union-attr]
    return model.hidden(words).sum()


def second_backward(model: Model, rank: int, words: Tensor) -> Tensor:
    x = model.hidden(words)
    model.blocks[3](x).sum().backward()
    return model.blocks[3](x).sum()


def copied_view(model: Model, rank: int, words: Tensor) -> Tensor:
    x = model.embedding(words) * 1.0
    view = x[:, 0]
    moved = model.head(x)  # type: ignore[misc]
    loss = moved.sum() + model.embedding(words).sum() + (x * 2).sum()
    x.mul_(2.0)
    return loss + view.sum()


class Reading(nn.Module):
    """A layer that returns a number which depends on values."""

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        """``x``, and a text."""
        return x * 1.0, "large" if float(x.detach().abs().max()) > 1e-6 else "small"


def number_of_values(model: Model, rank: int, words: Tensor) -> Tensor:
    x, size = model.reading(model.embedding(words) * 0.0)  # type: ignore[operator]
    assert isinstance(size, str)
    return x.sum()


class _Inside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        return layer(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def layer_inside(model: Model, rank: int, words: Tensor) -> Tensor:
    x: Tensor = _Inside.apply(model.embedding(words), model.blocks[3])
    return x.sum()


class Wrong(Model):
    """With a layer at the last stage that returns a view."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.reading = Extra(), Reading()

    def layers(self) -> list[nn.Module]:
        return [*super().layers(), self.extra, self.reading]


def refused(step: Any, cls: type[Model] = Wrong) -> None:
    """Runs two steps on the ranks of a job, which end with an error."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model, mailbox = cls(), connected()
    core = core_of(model, mailbox)
    words = torch.randint(WORDS, (BATCH, LENGTH))
    engine = Engine(core)
    row = schedule_named("1f1b")(mailbox.num_stages, 2)[mailbox.stage]
    with core.placed(), core.seeing_parameters():
        for number in range(2):
            engine.run(
                number, [words, words], lambda batch, _: step(model, mailbox.stage, batch), row
            )
