"""Random training steps, which print as short Python programs.

A program is a list of layers with their stages, and the body of a ``step``. The body is made line
by line from small pieces of what users write: calls of layers, operations, views, writes, reads,
branches and loops on what was read, Python lists and counters, random draws, regions without
gradients, and so on. A piece uses what is there (``x``: tensors of ``(rows, TIME, WIDTH)``,
scalars, Python numbers), so nearly all programs run; those that torch refuses are thrown away.
"""

from __future__ import annotations

import linecache
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

TIME, WIDTH, WORDS = 4, 6, 7


# --- layers ---


class Linear(nn.Linear):
    """Also uses no bias, now and then."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__(WIDTH, WIDTH, bias=bias)


class Norm(nn.LayerNorm):
    """A normalisation."""

    def __init__(self) -> None:
        super().__init__(WIDTH)


class Act(nn.Module):
    """A layer without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x)


class Mlp(nn.Module):
    """Two layers and a branch around them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Attention(nn.Module):
    """Attends to another input, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, memory: Tensor | None = None, scale: float = 0.5) -> Tensor:
        k, v = self.kv(x if memory is None else memory).chunk(2, -1)
        return x + (self.q(x) @ k.transpose(1, 2) * scale).softmax(-1) @ v


class Conv(nn.Module):
    """Returns a view of another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Pair(nn.Module):
    """Takes two tensors and returns two, one of which may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x) + y, torch.tanh(self.b(y))


class Dicts(nn.Module):
    """Takes and returns dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        x = self.linear(inputs["x"])
        if inputs.get("skip") is not None:
            x = x + inputs["skip"][0]
        return {"x": x, "aux": (x.pow(2).mean(), inputs["x"].detach()), "rows": len(x)}


class Partly(nn.Module):
    """Has a parameter that is not used, and one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2)
        self.still = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            still = self.still(x)
        return self.linear(x) + still


class Cached(nn.Module):
    """Keeps what it got in a list of its caller, and uses what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        out: Tensor = self.linear(x)
        for old in cache[-2:]:
            out = out + 0.1 * old
        cache.append(out)
        return out


class Same(nn.Module):
    """Returns what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Rows(nn.Module):
    """Returns as many rows as the values say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x[x.sum(-1) > 0]


class Experts(nn.Module):
    """Sends each row to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.router = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x).softmax(-1)
        out, best = torch.zeros_like(x), scores.argmax(-1)
        for number, expert in enumerate(self.experts):
            picked = best == number
            out[picked] = expert(x[picked]) * scores[picked][:, number, None]
        return x + out, scores.mean()


class Relu(nn.Module):
    """Writes into what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x, inplace=True)


class Scaled(nn.Module):
    """A scalar parameter, and a second derivative inside of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad((y.tanh() * 0.5).sum(), y)
        return x * self.scale + slope


class Checkpointed(nn.Module):
    """Computes its inside again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inside, x, use_reentrant=False)
        return out


class Embedding(nn.Embedding):
    """Of words."""

    def __init__(self) -> None:
        super().__init__(WORDS, WIDTH)


class Gru(nn.Module):
    """A layer with flat weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.gru(x, state)
        return found


class Batched(nn.Module):
    """Statistics of the batch; its buffers change in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(TIME)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


class Keeping(nn.Module):
    """Keeps tensors and numbers in its attributes, and uses those of the call before."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.penalty: Tensor | None = None
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) + 0.1 * self.seen
        self.num_calls += 1
        self.penalty = x.pow(2).mean() / self.num_calls
        self.seen = 0.5 * self.seen + x.detach().mean((0, 1))
        return x


class Dropped(nn.Module):
    """Draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.linear(x), 0.3) + 0.1 * float(np.random.rand())


class Doubled(torch.autograd.Function):
    """A function of a user."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor * 1.25, None


class Mixed(torch.autograd.Function):
    """A function of a user with two tensors and two results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y, x - y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, y = ctx.saved_tensors
        return gradients[0] * y + gradients[1], gradients[0] * x - gradients[1]


LAYERS: dict[str, tuple[type[nn.Module], float]] = {
    each.__name__: (each, weight)
    for each, weight in (
        (Linear, 4),
        (Norm, 1),
        (Act, 1),
        (Mlp, 2),
        (Attention, 2),
        (Conv, 1),
        (Pair, 2),
        (Dicts, 1),
        (Partly, 1),
        (Cached, 1),
        (Same, 0.5),
        (Rows, 0.7),
        (Experts, 0.7),
        (Relu, 0.5),
        (Scaled, 1),
        (Checkpointed, 0.7),
        (Embedding, 0.7),
        (Gru, 0.4),
        (Batched, 0.5),
        (Keeping, 0.5),
        (Dropped, 0.4),
    )
}
# What makes a program keep something from one microbatch to the next, or draw at one stage.
_KEEPS = ("Batched", "Keeping", "self.count", "self.queue", "forward_hook", ".backward()")
_DRAWS = ("Dropped", "dropout", "bernoulli")


# --- programs ---


@dataclass(frozen=True)
class Block:
    """A statement with an indented body."""

    head: str
    body: tuple[Any, ...]


@dataclass(frozen=True)
class Program:
    """A program.

    Args:
        seed: of its parameters and its data.
        num_stages: of the pipeline.
        layers: the class of each layer.
        owners: the stage of each layer.
        tied: pairs of layers; the second one's weight is the first one's.
        frozen: layers that are not trained.
        rows: of each microbatch.
        body: of the step.
    """

    seed: int
    num_stages: int
    layers: tuple[str, ...]
    owners: tuple[int, ...]
    tied: tuple[tuple[int, int], ...]
    frozen: tuple[int, ...]
    rows: tuple[int, ...]
    body: tuple[Any, ...] = field(default=())

    def lines(self) -> list[str]:
        """The source of its step."""
        return ["def step(self, batch, turn):", *_indented(("x0, words = batch", *self.body))]

    def __str__(self) -> str:
        placed = ", ".join(
            f"{name}@{stage}" for name, stage in zip(self.layers, self.owners, strict=True)
        )
        more = f", tied {list(self.tied)}" if self.tied else ""
        more += f", frozen {list(self.frozen)}" if self.frozen else ""
        return (
            f"# seed {self.seed}: {self.num_stages} stages, microbatches of {list(self.rows)} rows"
            f"\n# layers {placed}{more}\n" + "\n".join(self.lines())
        )

    @property
    def keeps_state(self) -> bool:
        """Whether microbatches depend on the order in which they run: no part of one may pass."""
        return self._has(_KEEPS)

    @property
    def draws(self) -> bool:
        """Whether layers, or operations on values, draw random numbers: a plain loop would not draw
        the same ones.
        """
        return self._has(_DRAWS)

    @property
    def by_hand(self) -> bool:
        """Whether the step calls ``backward`` itself."""
        return ".backward()" in str(self)

    def _has(self, words: tuple[str, ...]) -> bool:
        text = str(self)
        return any(word in text for word in words)

    def without(self) -> Iterator[Program]:
        """Smaller programs."""
        for body in _smaller(self.body):
            yield replace(self, body=body)
        if len(self.rows) > 1:
            yield replace(self, rows=self.rows[:-1])
        if set(self.rows) != {2}:
            yield replace(self, rows=(2,) * len(self.rows))
        if self.tied:
            yield replace(self, tied=())
        if self.frozen:
            yield replace(self, frozen=())
        if self.num_stages > 2:
            fewer = self.num_stages - 1
            owners = tuple(min(owner, fewer - 1) for owner in self.owners)
            yield replace(self, num_stages=fewer, owners=owners)
        used = str(self)
        for at, owner in enumerate(self.owners):
            if owner and f"layers[{at}]" not in used:
                yield replace(self, owners=(*self.owners[:at], 0, *self.owners[at + 1 :]))
        for at, name in enumerate(self.layers):
            if name != "Linear":
                layers = (*self.layers[:at], "Linear", *self.layers[at + 1 :])
                yield replace(self, layers=layers)


def _indented(body: tuple[Any, ...]) -> list[str]:
    lines: list[str] = []
    for each in body:
        if isinstance(each, Block):
            lines += [f"    {each.head}", *(f"    {line}" for line in _indented(each.body))]
        else:
            lines.append(f"    {each}")
    return lines or ["    pass"]


def _smaller(body: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    half = len(body) // 2
    while half > 1:
        for at in range(0, len(body), half):
            yield body[:at] + body[at + half :]
        half //= 2
    for at in reversed(range(len(body))):
        each = body[at]
        yield body[:at] + body[at + 1 :]
        if isinstance(each, Block):
            if not each.head.startswith("else"):
                yield body[:at] + each.body + body[at + 1 :]
            for inner in _smaller(each.body):
                yield (*body[:at], Block(each.head, inner), *body[at + 1 :])


class Module(nn.Module):
    """The module of a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.layers = nn.ModuleList(LAYERS[name][0]() for name in program.layers)
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.shift = nn.Parameter(0.1 * torch.randn(WIDTH))
        self.register_buffer("ramp", torch.linspace(-1, 1, WIDTH))
        self.count, self.rank = 0, 0
        self.queue: deque[Tensor] = deque(maxlen=2)
        self.notes: list[Any] = []
        self.lines: list[float] = []
        self.num_microbatches = len(program.rows)
        for one, other in program.tied:
            self.layers[other].weight = self.layers[one].weight
        for at in program.frozen:
            self.layers[at].requires_grad_(False)
        self._step = _compiled(program)

    def note(self, turn: int, what: Any) -> None:
        """Keeps a Python value."""
        self.notes.append((turn, what))

    def step(self, batch: Any, turn: int) -> Any:
        """The program's step."""
        return self._step(self, batch, turn)


def _compiled(program: Program) -> Callable[..., Any]:
    name, source = f"<program {program.seed}>", "\n".join(program.lines()) + "\n"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    names: dict[str, Any] = {
        "__name__": "program",
        "torch": torch,
        "np": np,
        "random": random,
        "F": functional,
        "Doubled": Doubled,
        "Mixed": Mixed,
        "TIME": TIME,
        "WIDTH": WIDTH,
        "WORDS": WORDS,
    }
    exec(compile(source, name, "exec"), names)
    step: Callable[..., Any] = names["step"]
    return step


def batches_of(program: Program, num_steps: int) -> list[list[tuple[Tensor, Tensor]]]:
    """The microbatches of all steps."""
    generator = torch.Generator().manual_seed(program.seed + 1)
    return [
        [
            (
                torch.randn(rows, TIME, WIDTH, generator=generator),
                torch.randint(WORDS, (rows, TIME), generator=generator),
            )
            for rows in program.rows
        ]
        for _ in range(num_steps)
    ]


# --- making them ---


def random_program(seed: int) -> Program:
    """The program of a seed."""
    return _Maker(seed).program()


class _Maker:
    def __init__(self, seed: int) -> None:
        self._seed, self._random = seed, random.Random(seed)
        pick = self._random
        self._num_stages = pick.choice((2, 2, 3, 3, 4))
        names, weights = zip(*((name, weight) for name, (_, weight) in LAYERS.items()), strict=True)
        self._layers = pick.choices(names, weights, k=pick.randint(3, 8))
        self._layers[0] = "Linear"
        self._owners = self._placed()
        # Each program has its own habits, so that some have a lot of one.
        self._weights = {piece: weight * pick.choice((0, 1, 1, 2)) for piece, weight in PIECES}
        self._weights[_layer] = 8
        self._xs, self._scalars, self._numbers = ["x0"], [], []  # type: ignore[var-annotated]
        self._lists: list[str] = []
        self._num_names = 0
        self._depth = 0
        self.by_hand = pick.random() < 0.04

    def _placed(self) -> list[int]:
        pick, count, stages = self._random, len(self._layers), self._num_stages
        if pick.random() < 0.4:
            return [at * stages // count for at in range(count)]
        return [pick.randrange(stages) for _ in range(count)]

    def program(self) -> Program:
        pick = self._random
        body = list(self._body(pick.randint(4, 14)))
        body += self._end()
        like = [at for at, name in enumerate(self._layers) if name == "Linear"]
        tied = (
            [tuple(sorted(pick.sample(like, 2)))] if len(like) > 2 and pick.random() < 0.3 else []
        )
        frozen = [pick.randrange(1, len(self._layers))] if pick.random() < 0.2 else []
        rows = [2] * pick.randint(1, 5)
        if pick.random() < 0.4:
            rows = [pick.randint(1, 3) for _ in rows]
            if "Batched" in self._layers:
                rows = [max(each, 2) for each in rows]
        return Program(
            self._seed,
            self._num_stages,
            tuple(self._layers),
            tuple(self._owners),
            tuple(tied),  # type: ignore[arg-type]
            tuple(frozen),
            tuple(rows),
            tuple(body),
        )

    def _body(self, count: int) -> Iterator[Any]:
        for _ in range(count):
            piece = self._random.choices(list(self._weights), list(self._weights.values()))[0]
            yield from piece(self)

    def _end(self) -> Iterator[Any]:
        pick = self._random
        # What ends in the loss comes through some layer.
        x = self.x()
        last = self.new_x()
        yield f"{last} = self.layers[0]({x})"
        terms = [f"{last}.pow(2).mean()"]
        terms += [f"{self.x()}.mean()" for _ in range(pick.randint(0, 2))]
        if self._scalars:
            terms.append(f"0.1 * {self.scalar()}")
        pick.shuffle(terms)
        if not self.by_hand:
            yield f"return {' + '.join(terms)}"
        else:
            yield f"loss = {' + '.join(terms)}"
            yield "(loss / self.num_microbatches).backward()"
            yield "return loss.detach()"

    # --- for the pieces ---

    def pick(self, *options: Any) -> Any:
        return self._random.choice(options)

    def number(self, low: float = 0.2, high: float = 1.5) -> float:
        return round(self._random.uniform(low, high), 2)

    def x(self) -> str:
        """A tensor; rather one of the latest."""
        if self._random.random() < 0.6:
            return self._xs[-1]
        return self._random.choice(self._xs)

    def has_scalar(self) -> bool:
        return bool(self._scalars)

    def scalar(self) -> str:
        return self._random.choice(self._scalars) if self._scalars else f"{self.x()}.sum()"

    def new(self, letter: str) -> str:
        self._num_names += 1
        return f"{letter}{self._num_names}"

    def new_x(self) -> str:
        name = self.new("x")
        self._xs.append(name)
        return name

    def new_scalar(self) -> str:
        name = self.new("s")
        self._scalars.append(name)
        return name

    def assigned(self, value: str) -> str:
        """A line with a new tensor."""
        return f"{self.new_x()} = {value}"

    def layer_numbers(self) -> list[int]:
        return list(range(len(self._layers)))

    def layer_name(self, at: int) -> str:
        return self._layers[at]

    def inside(self, head: str, count: int, result: str | None = None) -> Any:
        """A block whose names end with it; ``result`` gets its latest tensor."""
        before = list(self._xs), list(self._scalars), list(self._numbers), list(self._lists)
        self._depth += 1
        body = list(self._body(count))
        self._depth -= 1
        if result is not None:
            body.append(f"{result} = {self._xs[-1]} * {self.number(0.5, 1)}")
        self._xs, self._scalars, self._numbers, self._lists = before
        return Block(head, tuple(body))

    @property
    def is_deep(self) -> bool:
        return self._depth >= 2

    @property
    def lists(self) -> list[str]:
        return self._lists

    @property
    def numbers(self) -> list[str]:
        return self._numbers


Piece = Callable[[_Maker], Iterator[Any]]


def _layer(make: _Maker) -> Iterator[Any]:
    at = make.pick(*make.layer_numbers())
    name, call, x = make.layer_name(at), f"self.layers[{at}]", make.x()
    if name == "Pair":
        one, other, y = make.new_x(), make.new_x(), make.x()
        y = x if y in (one, other) else y
        yield f"{one}, {other} = {call}({x}, {y})"
    elif name == "Dicts":
        found, y = make.new("d"), make.x()
        skip = make.pick("", f', "skip": [{y}]', f', "skip": ({y}, None)')
        yield f'{found} = {call}({{"x": {x}{skip}}})'
        yield f"{make.new_scalar()} = {found}['aux'][0]"
        yield make.assigned(make.pick(f"{found}['x']", f"{found}['x'] + {found}['aux'][1]"))
    elif name == "Cached":
        if not make.lists:
            make.lists.append(make.new("c"))
            yield f"{make.lists[-1]} = []"
        yield make.assigned(f"{call}({x}, {make.lists[-1]})")
    elif name == "Rows":
        yield f"{make.new_scalar()} = {call}({x}).sum()"
    elif name == "Experts":
        new, aux = make.new_x(), make.new_scalar()
        yield f"{new}, {aux} = {call}({x})"
    elif name == "Relu":
        new = make.new_x()
        yield f"{new} = {call}({make.pick(f'{x} * 1.0', f'{x} + {make.x() if False else x}')})"
    elif name == "Embedding":
        words = make.pick("words", "words", f"{x}.argmax(-1)")
        yield make.assigned(f"{call}({words})")
    elif name == "Gru":
        new, state = make.new_x(), make.new("h")
        yield f"{new}, {state} = {call}({x})"
        if make.pick(True, False):
            yield f"{new}, {state} = {call}({new}, {state})"
    elif name == "Attention":
        y = make.x()
        scale = make.number()
        given = make.pick(x, f"{x}, {y}", f"{x}, memory={y}", f"{x}, scale={scale}")
        yield make.assigned(f"{call}({given})")
    elif name == "Keeping":
        yield make.assigned(f"{call}({x})")
        if make.pick(True, False):
            yield f"{make.new_scalar()} = {call}.penalty"
        if make.pick(True, False):
            yield f"self.note(turn, {call}.num_calls)"
    else:
        yield make.assigned(f"{call}({x})")


def _operation(make: _Maker) -> Iterator[Any]:
    x, y, n = make.x(), make.x(), make.number()
    yield make.assigned(
        make.pick(
            f"{x} + {y}",
            f"{x} - {n} * {y}",
            f"{x} * {y}",
            f"{x} / ({y}.abs() + 1)",
            f"torch.tanh({x})",
            f"{x}.sigmoid() * {n}",
            f"F.gelu({x})",
            f"F.layer_norm({x}, (WIDTH,))",
            f"{x}.softmax(-1)",
            f"torch.where({x} > 0, {x}, {y})",
            f"torch.maximum({x}, {y})",
            f"{x}.clamp(-{n}, {n})",
            f"torch.cat([{x}, {y}], 1)[:, 2:2 + TIME]",
            f"torch.stack([{x}, {y}]).mean(0)",
            f"torch.stack([{x}, {y}], -1).amax(-1)",
            f"({x} @ {y}.transpose(1, 2)).softmax(-1) @ {x}",
            f"torch.einsum('bti,bui->btu', {x}, {y}) @ {y} * 0.1",
            f"{x}.roll(1, 1)",
            f"{x}.flip(1)",
            f"{x}.sort(-1)[0]",
            f"{x}.topk(WIDTH, -1).values",
            f"{x}.cumsum(1) * 0.5",
            f"{x} + {x}.mean((0, 1))",
            f"{x}.masked_fill({y} > 0, {n})",
            f"{x}.gather(1, words.unsqueeze(-1).expand_as({x}) % TIME)",
            f"{x}.index_select(1, torch.tensor([2, 0, 3, 1]))",
            f"{x}[:, [1, 0, 3, 2]]",
            f"{x} + torch.ones_like({y}) * {n}",
            f"{x} + {y}.new_full((WIDTH,), {n})",
            f"{x} * torch.arange({x}.shape[1]).unsqueeze(-1)",
            f"{x} * torch.ones(TIME, WIDTH).tril().to({x})",
            f"F.pad({x}, (0, 0, 1, 0))[:, :TIME]",
            f"torch.lerp({x}, {y}, {n})",
            f"{x}.double().mul({n}).float()",
            f"{x}.to(torch.bfloat16).float()",
            f"torch.addcmul({x}, {y}, {x}, value={n})",
            f"F.normalize({x}, dim=-1)",
            f"F.linear({x}, {y}[0, 0].outer({y}[0, 1]))",
        )
    )


def _view(make: _Maker) -> Iterator[Any]:
    x = make.x()
    kind = make.pick(0, 1, 2, 3, 4, 5)
    if kind == 0:
        one, other, dim = make.new("v"), make.new("v"), make.pick(1, -1)
        yield f"{one}, {other} = {x}.chunk(2, {dim})"
        yield make.assigned(f"torch.cat([{other}, {one} * {make.number()}], {dim})")
    elif kind == 1:
        yield make.assigned(f"torch.stack([row * {make.number()} for row in {x}])")
    elif kind == 2:
        names = [make.new("v") for _ in range(4)]
        yield f"{', '.join(names)} = {x}.unbind(1)"
        yield make.assigned(f"torch.stack([{names[2]}, {names[0]}, {names[3]}, {names[0]}], 1)")
    else:
        yield make.assigned(
            make.pick(
                f"{x}.transpose(1, 2).reshape({x}.shape)",
                f"{x}.view(-1, TIME, WIDTH)",
                f"{x}.flatten(0, 1).view({x}.shape)"
                if make.pick(True, False)
                else f"{x}.reshape(-1, WIDTH).reshape(-1, TIME, WIDTH)",
                f"{x}.unsqueeze(0).squeeze(0)",
                f"{x}.mean(1, keepdim=True).expand(-1, TIME, -1)",
                f"{x}.transpose(1, 2).contiguous().transpose(1, 2)",
                f"{x}[:, 0].unsqueeze(1).expand_as({x})",
                f"{x}[..., :1].repeat(1, 1, WIDTH)",
                f"{x}[:]",
            )
        )


def _write(make: _Maker) -> Iterator[Any]:
    x, y, n = make.x(), make.x(), make.number()
    new = make.new_x()
    if make.pick(0, 0, 0, 1):
        yield f"{new} = torch.zeros({x}.shape)"
    else:
        yield f"{new} = {x} * {n}"
    for _ in range(make.pick(1, 1, 2)):
        yield make.pick(
            f"{new}[:, 0] = {n}",
            f"{new}[:, 1] = {y}[:, 2]",
            f"{new}.mul_({n})",
            f"{new} += {y}",
            f"{new} *= {n}",
            f"{new}.add_({y}, alpha={n})",
            f"{new}[:, 1].add_({n})",
            f"{new}[:, 2] += {y}[:, 0]",
            f"{new}[{y} > 0.5] = {n}",
            f"{new}[:, :2].mul_({y}[:, 2:])",
            f"{new}.masked_fill_({y} > 1, {n})",
            f"{new}.clamp_(-2, 2)",
            f"{new}.copy_({y} * {n})",
        )


def _write_old(make: _Maker) -> Iterator[Any]:
    """Writes to what others may have used, or to a view that stays."""
    x, y, n = make.x(), make.x(), make.number()
    if x == "x0":
        return
    view = make.new("v")
    kind = make.pick(0, 1, 2, 3)
    if kind == 0:
        yield f"{x}.mul_({n})"
    elif kind == 1:
        yield f"{view} = {x}[:, 1:3]"
        yield f"{view} *= {n}"
        yield f"{make.new_scalar()} = {view}.mean()"
    elif kind == 2:
        new = make.new_x()
        yield f"{new} = {x} * {n}"
        yield f"{view} = {new}.transpose(1, 2)"
        yield f"{view}[:, 0] += {y}[:, :, 1]"
        yield make.assigned(f"{view}.transpose(1, 2)")
    else:
        new = make.new_x()
        yield f"{new} = {x} + {y}"
        yield f"{view} = {new}.detach()"
        yield f"{view}[:, 0] = {n}"


def _region(make: _Maker) -> Iterator[Any]:
    if make.is_deep:
        return
    new = make.new("x")
    head = make.pick(
        "with torch.no_grad():",
        "with torch.no_grad():",
        # Autocast's cache is the process's: another stage's thread would clear it in the middle.
        'with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):',
    )
    yield make.inside(head, make.pick(1, 2), new)
    yield f"{new} = {new}.float()"
    make._xs.append(new)


def _detach(make: _Maker) -> Iterator[Any]:
    x = make.x()
    yield make.assigned(
        make.pick(f"{x}.detach()", f"{x}.detach() + {make.x()}", f"{x}.data * 0.5", f"{x} * 1.0")
    )


def _slope(make: _Maker) -> Iterator[Any]:
    """A gradient in the middle of the step, as for an adversarial example."""
    x, leaf, at = make.x(), make.new("x"), make.pick(*make.layer_numbers())
    yield f"{leaf} = {x}.detach().requires_grad_()"
    used = make.pick(leaf, f"{leaf} * 1.1")
    slope = f"torch.autograd.grad(self.layers[{at}]({used}).pow(2).sum(), {leaf})[0]"
    yield make.assigned(f"{x} + 0.1 * {slope}.tanh()")


def _scalar(make: _Maker) -> Iterator[Any]:
    x, y = make.x(), make.x()
    yield f"{make.new_scalar()} = " + make.pick(
        f"{x}.mean()",
        f"{x}.pow(2).sum()",
        f"{x}[{y} > 0.3].sum()",
        f"F.mse_loss({x}, {y})",
        f"F.cross_entropy({x}.flatten(0, 1), words.flatten() % WIDTH)",
        f"{x}.std()",
        f"torch.linalg.vector_norm({x})",
        f"{x}.masked_select({y} > 0).sum()",
        f"sum(each.mean() for each in {x})",
        f"{x}.logsumexp(-1).max()",
        f"({x} - {y}).abs().amax()",
        f"torch.cdist({x}, {y}).mean()",
    )


def _read(make: _Maker) -> Iterator[Any]:
    x, s = make.x(), make.scalar()
    number = make.new("n")
    yield f"{number} = " + make.pick(
        f"{s}.item()",
        f"float({x}.abs().max())",
        f"{x}.mean().item()",
        f"float({x}[0, 0, 0].detach().numpy())",
        f"min({x}[0, 1].tolist())",
    )
    yield f"self.note(turn, {number})"
    make.numbers.append(number)


def _note(make: _Maker) -> Iterator[Any]:
    x = make.x()
    yield f"self.note(turn, {_noted(make, x)})"


def _noted(make: _Maker, x: str) -> str:
    found: str = make.pick(
        f"{x}[0, 0].tolist()",
        f"f'{{{x}.sum():.4f}}'",
        f"str({x}[0].detach())",
        f"{x}.detach().unique().numel()",
        f"len(torch.nonzero({x} > 0))",
        f"tuple({x}.shape)",
        f"({x}.dtype, {x}.requires_grad, {x}.ndim)",
        f"torch.equal({x}, {make.x()})",
        f"bool(({x} > 0).any())",
        f"[round(float(v), 3) for v in {x}[0, 1].detach()]",
        f"{x}.is_contiguous()",
    )
    return found


def _branch(make: _Maker) -> Iterator[Any]:
    if make.is_deep:
        return
    x, s, new = make.x(), make.scalar(), make.new("x")
    test = make.pick(
        f"{x}.mean() > 0",
        f"{s} > 0.5",
        f"{x}[0, 0, 0].item() > 0",
        f"int({x}.argmax()) % 2",
        f"({x} > 1).any()",
        "turn % 2",
        "torch.rand(()) < 0.5",
        "random.random() < 0.5",
        "np.random.rand() < 0.5",
        *(f"{number} > 0.3" for number in make.numbers),
    )
    yield make.inside(f"if {test}:", make.pick(1, 2, 3), new)
    if make.pick(True, False):
        yield make.inside("else:", make.pick(1, 2), new)
    else:
        yield Block("else:", (f"{new} = {x}",))
    make._xs.append(new)


def _loop(make: _Maker) -> Iterator[Any]:
    if make.is_deep:
        return
    x, new = make.x(), make.new("x")
    times = make.pick(
        "2",
        "turn % 3",
        f"int({x}.argmax()) % 3",
        "int(torch.randint(0, 3, ()))",
        f"int({x}.abs().sum()) % 3",
    )
    yield f"{new} = {x}"
    make._xs.append(new)
    yield make.inside(f"for _ in range({times}):", make.pick(1, 2), new)


def _all_layers(make: _Maker) -> Iterator[Any]:
    simple = [
        at
        for at in make.layer_numbers()
        if make.layer_name(at) in ("Linear", "Norm", "Act", "Mlp", "Conv", "Scaled", "Partly")
    ]
    x = make.x()
    new = make.new_x()
    yield f"{new} = {x}"
    yield Block(f"for layer in [self.layers[i] for i in {simple}]:", (f"{new} = layer({new})",))


def _list(make: _Maker) -> Iterator[Any]:
    name = make.new("l")
    x, y = make.x(), make.x()
    yield f"{name} = [{x}, {y}]"
    yield Block(
        f"for layer in [self.layers[0]] * {make.pick(1, 2, 3)}:",
        (f"{name}.append(layer({name}[-{make.pick(1, 2)}]))",),
    )
    yield make.assigned(make.pick(f"sum({name})", f"{name}.pop(0) + {name}[-1]", f"{name}[-1]"))


def _draw(make: _Maker) -> Iterator[Any]:
    x = make.x()
    yield make.assigned(
        make.pick(
            f"{x} + 0.1 * torch.randn(TIME, WIDTH)",
            f"{x} * random.random()",
            f"{x} + float(np.random.randn())",
            f"{x} + 0.1 * torch.rand_like({x})",
            f"{x}[:, torch.randperm(TIME)]",
            f"{x}[torch.from_numpy(np.random.permutation(len({x})))]",
        )
    )


def _draw_values(make: _Maker) -> Iterator[Any]:
    x = make.x()
    yield make.assigned(
        make.pick(f"F.dropout({x}, 0.2)", f"{x} * torch.bernoulli({x}.detach().sigmoid())")
    )


def _loose(make: _Maker) -> Iterator[Any]:
    x = make.x()
    linear = [at for at in make.layer_numbers() if make.layer_name(at) == "Linear"]
    at = make.pick(*linear)
    kind = make.pick(0, 1, 2, 3, 4)
    if kind == 0:
        yield make.assigned(make.pick(f"{x} * self.scale", f"self.shift + {x}"))
    elif kind == 1:
        yield make.assigned(f"F.linear({x}, self.layers[{at}].weight)")
    elif kind == 2:
        yield f"{make.new_scalar()} = 0.01 * self.layers[{at}].weight.pow(2).sum()"
    elif kind == 3:
        yield f"{make.new_scalar()} = sum(p.sum() for p in self.parameters()) * 0.0"
    else:
        yield make.assigned(f"{x} + self.ramp")


def _function(make: _Maker) -> Iterator[Any]:
    x, y = make.x(), make.x()
    if make.pick(True, False):
        yield make.assigned(f"Doubled.apply({x}, {make.number()})")
    else:
        one, other = make.new_x(), make.new_x()
        yield f"{one}, {other} = Mixed.apply({x}, {y})"


def _state(make: _Maker) -> Iterator[Any]:
    x = make.x()
    kind = make.pick(0, 1, 2)
    if kind == 0:
        yield "self.count += 1"
        yield make.assigned(f"{x} * (1 + self.count % 3)")
    elif kind == 1:
        yield f"self.queue.append({x}.detach())"
        yield make.assigned(f"{x} + sum(old.mean() for old in self.queue)")
    else:
        new = make.new_x()
        yield f"{new} = {x}"
        yield Block(
            "if self.queue:", (f"{new} = {new} * self.queue[0].mean().item()", "self.count += 2")
        )
        yield f"self.queue.append({new}.detach())"


def _guarded(make: _Maker) -> Iterator[Any]:
    kind = make.pick(0, 1, 2)
    if kind == 0:
        number = make.new("n")
        yield f"{number} = {make.x()}.mean().item()"
        yield Block("if self.rank == 0:", (f"self.lines.append({number})",))
        return
    # One rank alone reads.
    read = make.new("s")
    yield f"{read} = {make.x()}.mean()"
    if kind == 1:
        yield Block("if self.rank == 0:", (f"self.lines.append({read}.item())",))
    else:
        yield Block("if self.rank == 1:", (f"{read}.tolist()",))


def _leave(make: _Maker) -> Iterator[Any]:
    """No loss, for some microbatches."""
    if make._depth or make.by_hand:
        return
    test = make.pick("turn == 1", f"{make.x()}.mean() > 1", f"{make.scalar()} < -1")
    yield Block(f"if {test}:", ("return None",))


def _copied(make: _Maker) -> Iterator[Any]:
    """Python's own copies and containers."""
    x, y = make.x(), make.x()
    if make.pick(True, False):
        name = make.new("d")
        yield f'{name} = {{"a": {x}, "b": [{y}, {{"c": {x}}}]}}'
        yield make.assigned(f"{name}['a'] * {name}['b'][0] + {name}['b'][-1]['c']")
    else:
        yield f"best = max([{x}, {y}], key=lambda one: one.sum().item())"
        yield make.assigned("best + 0.5")


def _hooked(make: _Maker) -> Iterator[Any]:
    """A hook on a layer, for one call."""
    at, x, taken = make.pick(*make.layer_numbers()), make.x(), make.new("t")
    if make.layer_name(at) not in ("Linear", "Norm", "Act", "Mlp", "Conv", "Partly"):
        return
    inside = ".up" if make.layer_name(at) == "Mlp" and make.pick(True, False) else ""
    yield f"{taken} = []"
    yield (
        f"handle = self.layers[{at}]{inside}.register_forward_hook("
        f"lambda _, __, out: {taken}.append(out))"
    )
    yield make.assigned(f"self.layers[{at}]({x})")
    yield "handle.remove()"
    yield f"{make.new_scalar()} = {taken}[0].pow(2).mean()"


def _backward(make: _Maker) -> Iterator[Any]:
    """A loss on the way. What is used behind it is computed anew, or has no part in it."""
    if make._depth or not make.by_hand:
        return
    x = make.x()
    if make.pick(True, False):
        at = make.pick(*make.layer_numbers())
        yield f"(self.layers[{at}]({x}.detach()).pow(2).mean() / self.num_microbatches).backward()"
        return
    new = make.new("x")
    yield f"(self.layers[0]({x}).pow(2).mean() / self.num_microbatches).backward()"
    yield f"{new} = {x}.detach()"
    make._xs[:] = ["x0", new]
    make._scalars.clear()
    make.lists.clear()


PIECES: list[tuple[Piece, float]] = [
    (_layer, 8),
    (_operation, 5),
    (_view, 2),
    (_write, 2),
    (_write_old, 0.5),
    (_leave, 0.2),
    (_copied, 0.5),
    (_hooked, 0.4),
    (_region, 0.7),
    (_detach, 0.7),
    (_slope, 0.4),
    (_scalar, 1.5),
    (_read, 1),
    (_note, 1),
    (_branch, 1),
    (_loop, 0.8),
    (_all_layers, 0.6),
    (_list, 0.7),
    (_draw, 0.7),
    (_draw_values, 0.2),
    (_loose, 1),
    (_function, 0.8),
    (_state, 0.4),
    (_guarded, 0.3),
    (_backward, 1.5),
]
