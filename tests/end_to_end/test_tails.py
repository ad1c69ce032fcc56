"""Steps that read values: the first stage begins the next microbatch while
it waits for what a step reads, as far as the step's Python state allows it. The bits and the side
effects are those of plain Lightning.

What runs when is seen in a file: the first layer's forward writes a letter into it, and so does the
part of a step behind its read.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import os
import random
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

import tests.end_to_end.test_values
from tests.end_to_end.test_values import (
    BATCHES,
    MICROBATCHES,
    WIDTH,
    WORDS,
    Base,
    Block,
    Running,
    trained,
)

# So many steps are watched before a step runs ahead.
NUM_WATCHED = 2
TOTALS = {"steps": 0.0}
LOSSES: list[float] = []
WEIGHTS = [1.1]
RANDOM = random.Random(3)


class FirstBlock(Block):
    """A block that writes a letter into a file."""

    file: Path

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, length, width)`` -> the same."""
        if type(x) is Tensor:
            # No run without values.
            with type(self).file.open("a") as file:
                file.write("f")
        return super().forward(x)


class LastLayer(nn.Linear):
    """Begins the first microbatch of a step only when the first stage has begun the second one."""

    file: Path
    calls = itertools.count()
    waits = False

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, length, width)`` -> ``(batch, length, words)``."""
        if type(x) is not Tensor:
            # A run without values.
            return super().forward(x)
        step, microbatch = divmod(next(type(self).calls), MICROBATCHES)
        if type(self).waits and step >= NUM_WATCHED and not microbatch:
            begun = step * MICROBATCHES + 2
            while type(self).file.read_text().count("f") < begun:
                # If it never does, the test's time limit ends this.
                time.sleep(0.001)
        return super().forward(x)


class Reads(Base):
    """Reads its loss. Subclasses have other state."""

    runs_ahead = True
    """Whether the first stage runs ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0], self.head = FirstBlock(), LastLayer(WIDTH, WORDS)
        self.scale = 1.0

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        loss = self.loss(self(words) * self.scale, targets)
        return self.behind(loss, loss.item())

    def begin_files(self) -> None:
        """Tells the layers their files."""
        rank, others = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1") != "1"
        self.order = Path(f"{self.written}.{rank}.order")
        FirstBlock.file, LastLayer.file = self.order, Path(f"{self.written}.0.order")
        LastLayer.waits = others and self.runs_ahead

    def on_fit_start(self) -> None:
        self.begin_files()
        LastLayer.calls = itertools.count()

    def behind(self, loss: Tensor, read: float) -> Tensor:
        """The part of the step behind the read."""
        with self.order.open("a") as file:
            file.write("b")
        return loss


class Keeps(Reads):
    """Appends to a list, counts, writes a file, updates a metric, branches."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.meter, self.mean = 0, Running(), MeanMetric()

    def behind(self, loss: Tensor, read: float) -> Tensor:
        self.count += 1
        self.meter.update(read)
        self.mean.update(read)
        self.noted.append((self.count, read, self.meter.mean))
        if self.trainer.is_global_zero:
            with self.written.open("a") as file:
                file.write(f"{read}\n")
        if read > 2.4:
            loss = loss * 1.5
        return super().behind(loss, read)


class InOneLine(Reads):
    """Appends, and adds, in the line of the read."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        loss = self.loss(self(words), targets)
        self.noted.append(loss.item())
        self.total += loss.item()
        self.noted.append(self.total)
        return self.behind(loss, 0.0)


class Scales(Reads):
    """What a step reads decides on the next step's numbers, behind all layers."""

    def behind(self, loss: Tensor, read: float) -> Tensor:
        self.scale *= 0.99 if read > 2.4 else 1.01
        return super().behind(loss, read)


class ScalesLater(Reads):
    """As Scales, but nothing changes in the first steps, which are watched."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def behind(self, loss: Tensor, read: float) -> Tensor:
        self.count += 1
        if self.count > 13:
            self.scale *= 0.99
        return super().behind(loss, read)


class ScalesFirst(Scales):
    """As Scales, in front of the layers."""

    runs_ahead = False

    def forward(self, words: Tensor) -> Tensor:
        """``(batch, length)`` -> ``(batch, length, words)``."""
        return super().forward(words.flip(1) if self.scale < 0.96 else words)


class Draws(Reads):
    """Draws from a generator of its own in front of the read and behind it."""

    runs_ahead = False

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(5)

    def forward(self, words: Tensor) -> Tensor:
        """``(batch, length)`` -> ``(batch, length, words)``."""
        return (
            super().forward(words)
            if self.generator.random() < 0.7
            else super().forward(words.flip(1))
        )

    def behind(self, loss: Tensor, read: float) -> Tensor:
        self.noted.append(self.generator.random())
        return super().behind(loss, read)


class Collects(Reads):
    """A dictionary of lists that a step looks into in front of its read."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[float]] = {"losses": []}

    def forward(self, words: Tensor) -> Tensor:
        """``(batch, length)`` -> ``(batch, length, words)``."""
        return super().forward(words) * (1 + 0.01 * sum(self.found["losses"][-2:]))

    def behind(self, loss: Tensor, read: float) -> Tensor:
        self.found["losses"].append(read)
        return super().behind(loss, read)


class CountsOutside(Reads):
    """Adds to a global."""

    runs_ahead = False

    def behind(self, loss: Tensor, read: float) -> Tensor:
        TOTALS["steps"] += read
        return super().behind(loss * (1 + 0.01 * TOTALS["steps"]), read)


class AppendsOutside(Reads):
    """Appends to a global list behind the read only, and looks at another in front of it."""

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        loss = self.loss(self(words) * WEIGHTS[0], targets)
        read = loss.item()
        LOSSES.append(read)
        self.noted.append(len(LOSSES))
        return self.wrote(loss)

    def wrote(self, loss: Tensor) -> Tensor:
        """Notes that the step is behind the read."""
        with self.order.open("a") as file:
            file.write("b")
        return loss


class OnBothSides(Reads):
    """A number outside of the module, which a step changes behind its read, and uses in front of
    it.
    """

    runs_ahead = False

    def forward(self, words: Tensor) -> Tensor:
        """``(batch, length)`` -> ``(batch, length, words)``."""
        return super().forward(words.flip(1) if self.get() > 3 else words)

    def behind(self, loss: Tensor, read: float) -> Tensor:
        self.add()
        return super().behind(loss, read)

    def get(self) -> float:
        """The number."""
        raise NotImplementedError

    def add(self) -> None:
        """Adds one to the number."""
        raise NotImplementedError


class InAnotherModule(OnBothSides):
    """It is a global of another module."""

    def get(self) -> float:
        """See OnBothSides."""
        return len(tests.end_to_end.test_values.NOTED)

    def add(self) -> None:
        """See OnBothSides."""
        tests.end_to_end.test_values.NOTED.append(1)


class InItsClass(OnBothSides):
    """It is an attribute of the class."""

    num = 0

    def get(self) -> float:
        """See OnBothSides."""
        return type(self).num

    def add(self) -> None:
        """See OnBothSides."""
        type(self).num += 1


class InTheTrainer(OnBothSides):
    """The Trainer has it."""

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.kept.num_seen = 0

    @property
    def kept(self) -> Any:
        """The Trainer."""
        return self.trainer

    def get(self) -> float:
        """See OnBothSides."""
        return self.kept.num_seen

    def add(self) -> None:
        """See OnBothSides."""
        self.kept.num_seen += 1


class Counter(L.Callback):
    """A callback with a list in an object."""

    def __init__(self) -> None:
        self.kept = SimpleNamespace(seen=[])


class InACallback(OnBothSides):
    """A callback has it."""

    def configure_callbacks(self) -> Any:
        return [Counter()]

    @property
    def counter(self) -> Any:
        """The callback."""
        trainer: Any = self.trainer
        return next(x for x in trainer.callbacks if isinstance(x, Counter))

    def get(self) -> float:
        """See OnBothSides."""
        return len(self.counter.kept.seen)

    def add(self) -> None:
        """See OnBothSides."""
        self.counter.kept.seen.append(1)


class InAnEnclosingFunction(OnBothSides):
    """Functions around the step have it."""

    @staticmethod
    def counter() -> Any:
        """Two functions: what returns it, and what adds to it."""
        count = 0

        def get() -> int:
            return count

        def add() -> None:
            nonlocal count
            count += 1

        return get, add


InAnEnclosingFunction.get, InAnEnclosingFunction.add = (  # type: ignore[method-assign]
    staticmethod(each) for each in InAnEnclosingFunction.counter()
)


class InTheEnvironment(OnBothSides):
    """A variable of the environment."""

    def get(self) -> float:
        """See OnBothSides."""
        return int(os.environ.get("NUM_SEEN", "0"))

    def add(self) -> None:
        """See OnBothSides."""
        os.environ["NUM_SEEN"] = str(int(os.environ.get("NUM_SEEN", "0")) + 1)


class InAGenerator(OnBothSides):
    """A generator of numbers, in which nothing is seen."""

    def get(self) -> float:
        """See OnBothSides."""
        return RANDOM.random() * 6

    def add(self) -> None:
        """See OnBothSides."""
        self.noted.append(RANDOM.random())


class InAHiddenModule(OnBothSides):
    """A module that is no part of this one, in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = (nn.Identity(),)

    def get(self) -> float:
        """See OnBothSides."""
        return int(getattr(self.hidden[0], "num_seen", 0))

    def add(self) -> None:
        """See OnBothSides."""
        hidden: Any = self.hidden[0]
        hidden.num_seen = self.get() + 1


OUTSIDE = (
    InAnotherModule,
    InItsClass,
    InTheTrainer,
    InACallback,
    InAnEnclosingFunction,
    InTheEnvironment,
    InAGenerator,
    InAHiddenModule,
)


class Noisy(Block):
    """A block that keeps what it returned."""

    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, length, width)`` -> the same."""
        self.kept = super().forward(x)
        return self.kept


class Looks(Reads):
    """Uses what a layer has kept, behind the read."""

    runs_ahead = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Noisy()

    def behind(self, loss: Tensor, read: float) -> Tensor:
        block: Any = self.blocks[1]
        return super().behind(loss + 0.1 * block.kept.pow(2).mean(), read)


class CallsAgain(Reads):
    """Calls a layer with running statistics behind the read, too."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.BatchNorm1d(6)

    def forward(self, words: Tensor) -> Tensor:
        """``(batch, length)`` -> ``(batch, length, words)``."""
        return self.head(self.blocks[1](self.normed(self.blocks[0](self.embedding(words)))))

    def behind(self, loss: Tensor, read: float) -> Tensor:
        extra = self.normed(self.embedding(torch.ones(2, 6, dtype=torch.long))).mean()
        return super().behind(loss + extra, read)


class WithinAContext(Reads):
    """Reads within a context of something that a process or a thread has one of. Steps that are
    suspended in it would find each other's.
    """

    runs_ahead = False

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        loss = self.loss(self(words) * self.scale, targets)
        self.within(loss)
        return self.behind(loss, 0.0)

    def within(self, loss: Tensor) -> None:
        """Reads the loss, and notes what it finds."""
        raise NotImplementedError


class PrintsIntoText(WithinAContext):
    """Its ``print`` is redirected."""

    def within(self, loss: Tensor) -> None:
        """See WithinAContext."""
        with contextlib.redirect_stdout(io.StringIO()) as text:
            print(f"{loss.item():.6f}")
            print(f"{loss.item() * 2:.6f}")
        self.noted.append(text.getvalue())


class CatchesWarnings(WithinAContext):
    """It catches warnings."""

    def within(self, loss: Tensor) -> None:
        """See WithinAContext."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                warnings.warn(f"the loss is {loss.item()}", stacklevel=1)
        self.noted += [str(each.message) for each in caught]


class InAFolder(WithinAContext):
    """It works in another folder."""

    def within(self, loss: Tensor) -> None:
        """See WithinAContext."""
        before = Path.cwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            loss.item()
            self.noted.append(Path(folder).resolve() == Path.cwd())
            os.chdir(before)


class InAnEventLoop(WithinAContext):
    """It is a coroutine."""

    def within(self, loss: Tensor) -> None:
        """See WithinAContext."""

        async def read() -> float:
            await asyncio.sleep(0)
            return loss.item()

        self.noted.append(asyncio.run(read()))


MODELS = (
    Reads,
    Keeps,
    InOneLine,
    Scales,
    ScalesFirst,
    ScalesLater,
    Draws,
    Collects,
    CountsOutside,
    AppendsOutside,
    *OUTSIDE,
    Looks,
    CallsAgain,
    PrintsIntoText,
    CatchesWarnings,
    InAFolder,
    InAnEventLoop,
)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_the_first_stage_runs_ahead_where_it_may(
    kind: type[Reads], stages: int, folders: list[str]
) -> None:
    at = MODELS.index(kind)
    expected = trained(MODELS, 0, folders[0])[0][at]
    for found in (each[at] for each in trained(MODELS, stages, folders[stages])):
        others = expected.parameters
        assert [n for n, x in found.parameters.items() if not torch.equal(x, others[n])] == []
        assert found.noted == expected.noted
    first = trained(MODELS, stages, folders[stages])[0][at]
    assert first.lines == expected.lines
    file = Path(folders[stages]) / f"{kind.__name__}.0.order"
    order = file.read_text()
    steps = [order[at : at + 2 * MICROBATCHES] for at in range(0, len(order), 2 * MICROBATCHES)]
    assert len(steps) == 2 * BATCHES
    assert steps[:NUM_WATCHED] == ["fb" * MICROBATCHES] * NUM_WATCHED
    assert all(step.startswith("ff") is kind.runs_ahead for step in steps[NUM_WATCHED:])
