import pickle
import random
import threading
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_pipeshift.model.user_state.attributes import attributes_of
from lightning_pipeshift.model.user_state.generators import random_state
from lightning_pipeshift.model.user_state.module_state import ModuleState, combine
from tests.unit.model.following import CPU, placeholder


@dataclass
class Record:
    score: float


@dataclass(slots=True)
class Counts:
    right: int = 0
    wrong: int = 0


class Private:
    __slots__ = ("__sum", "absent")

    def __init__(self) -> None:
        self.__sum = 0

    def update(self) -> None:
        self.__sum += 1


class Phase(Enum):
    WARM = "warm"
    HOT = "hot"


class Meter:
    """Not compared by its values."""

    def __init__(self, number: int = 0) -> None:
        self.sum, self.seen, self.record = 0.0, [number], Record(0.25)
        self.mean = torch.zeros(2)
        self.samples = list(range(2_000))
        self.by_word = {str(number): number for number in range(2_000)}
        self.draw = random.Random(3)
        self.lock = threading.Lock()

    def update(self) -> None:
        self.sum += 1.5


IGNORED = frozenset(nn.Module().__dict__) | {"trainer"}


class User(nn.Module):
    child: Any
    meter: Any

    def __init__(self):
        super().__init__()
        self.outputs = []
        self.by_kind = {"train": [], "val": [1.0]}
        self.recent: deque[int] = deque(maxlen=3)
        self.full: deque[int] = deque(range(300), maxlen=300)
        self.words = Counter({str(number): 1 for number in range(300)})
        self.many = {number: [number] for number in range(300)}
        self.seen = {1, 2}
        self.table = np.zeros(3)
        self.meter = Meter()
        self.phase = Phase.WARM
        self.counts, self.private = Counts(), Private()
        self.pair = (Counts(), [1])
        self.draw = random.Random(1)
        self.generators = [
            np.random.default_rng(1),
            np.random.RandomState(1),
            np.random.Generator(np.random.MT19937(1)),
            torch.Generator().manual_seed(1),
        ]
        self.meters: dict[str, Any] = {"train": [Meter(1), Meter(2)], "val": Meter(3)}
        self.count = 0
        self.best = float("nan")
        self.name = "start"
        self.nothing = None
        self.average: torch.Tensor
        self.total = torch.zeros(2)
        self.nested = {"a": {"b": torch.zeros(1)}, "list": [torch.zeros(1)]}
        self.trainer = object()
        self.register_buffer("average", torch.zeros(3))
        self.child = nn.Module()
        self.child.calls = 0


def played(step):
    """The state of the last stage after ``step``, and that of another stage that hears of it."""
    last, other = User(), User()
    states = [ModuleState({"": user, "child": user.child}, IGNORED) for user in (last, other)]
    for state in states:
        state.remember()
    step(last)
    changes = states[0].changes()
    states[1].apply(pickle.loads(pickle.dumps(changes)), CPU)
    return last, other, changes


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple | deque):
        return [type(value).__name__, getattr(value, "maxlen", None), *map(plain, value)]
    if (state := random_state(value)) is not None:
        return state
    if isinstance(value, Meter | Record | Counts | Private):
        own = {key: v for key, v in attributes_of(value).items() if key != "lock"}
        if isinstance(value, Meter):
            own["by_word"] = list(own["by_word"].items())[1_999:]
            own["samples"] = [len(own["samples"]), *own["samples"][1_900:]]
        return {key: plain(v) for key, v in own.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def attributes(user):
    shown = {k: plain(v) for k, v in user.__dict__.items() if k not in IGNORED}
    shown["average"] = plain(user.average)
    shown["child"] = user.child.calls
    if shown["best"] != shown["best"]:
        shown["best"] = "nan"
    return shown


def in_inference_mode(user):
    with torch.inference_mode():
        user.total = torch.ones(2)


STEPS = {
    "list": lambda u: u.outputs.append(torch.ones(2)),
    "list of records": lambda u: u.outputs.append(Record(0.5)),
    "list by several": lambda u: u.outputs.extend([1, "two", {"three": torch.ones(1)}]),
    "list anew": lambda u: setattr(u, "outputs", [1, 2]),
    "dict of lists": lambda u: u.by_kind["train"].append(1.0),
    "new key": lambda u: u.by_kind.update(test=[5]),
    "removed key": lambda u: u.by_kind.pop("val"),
    "changed entry": lambda u: u.by_kind["val"].__setitem__(0, 7.0),
    "cleared list": lambda u: u.by_kind["val"].clear(),
    "deque": lambda u: u.recent.extend([1, 2]),
    "counter": lambda u: setattr(u, "count", u.count + 1),
    "number anew": lambda u: setattr(u, "best", 0.5),
    "text": lambda u: setattr(u, "name", "end"),
    "from nothing": lambda u: setattr(u, "nothing", torch.ones(1)),
    "to nothing": lambda u: setattr(u, "name", None),
    "tensor in place": lambda u: u.total.add_(1),
    "tensor anew": lambda u: setattr(u, "total", u.total + 1),
    "tensor in inference mode": in_inference_mode,
    "nested tensor": lambda u: u.nested["a"]["b"].add_(1),
    "tensor in a list in place": lambda u: u.nested["list"][0].add_(1),
    "buffer in place": lambda u: u.average.mul_(0).add_(2),
    "buffer anew": lambda u: setattr(u, "average", torch.ones(3)),
    "child": lambda u: setattr(u.child, "calls", 3),
    "new attribute": lambda u: setattr(u, "fresh", (1, torch.ones(2))),
    "numpy": lambda u: setattr(u, "fresh", np.ones(2)),
    "full deque": lambda u: u.full.append(7),
    "shorter deque": lambda u: u.full.popleft(),
    "large counter": lambda u: u.words.update(["5", "new"]),
    "list in a large dict": lambda u: u.many[7].append(1),
    "set": lambda u: u.seen.add(3),
    "numpy in place": lambda u: u.table.__setitem__(1, 2.0),
    "flag": lambda u: setattr(u, "count", True),
    "object": lambda u: u.meter.update(),
    "list of an object": lambda u: u.meter.seen.append(1),
    "object of an object": lambda u: setattr(u.meter.record, "score", 0.5),
    "tensor of an object in place": lambda u: u.meter.mean.add_(1),
    "new attribute of an object": lambda u: setattr(u.meter, "best", 1.0),
    "removed attribute of an object": lambda u: delattr(u.meter, "sum"),
    "record of an object anew": lambda u: setattr(u.meter, "record", Record(0.75)),
    "object in a dict": lambda u: u.meters["val"].update(),
    "object with slots": lambda u: setattr(u.counts, "right", 1),
    "object with private slots": lambda u: u.private.update(),
    "new attribute in a slot": lambda u: setattr(u.private, "absent", 2.0),
    "removed attribute of a slot": lambda u: delattr(u.counts, "wrong"),
    "object in a tuple": lambda u: setattr(u.pair[0], "right", 1),
    "list in a tuple": lambda u: u.pair[1].append(2),
    "tuple anew": lambda u: setattr(u, "pair", (Counts(1), [2])),
    "long list of an object": lambda u: u.meter.samples.append(1),
    "long list of an object, shorter": lambda u: u.meter.samples.pop(),
    "long list of an object in the middle": lambda u: u.meter.samples.__setitem__(1_900, -7),
    "long dict of an object in the middle": lambda u: u.meter.by_word.update({"1999": -7}),
    "long dict of an object": lambda u: u.meter.by_word.update(new=1),
    "generator": lambda u: u.draw.random(),
    "generator of NumPy": lambda u: u.generators[0].random(),
    "older generator of NumPy": lambda u: u.generators[1].rand(),
    "generator of arrays": lambda u: u.generators[2].random(),
    "generator of torch": lambda u: torch.rand(1, generator=u.generators[3]),
    "generator of an object": lambda u: u.meter.draw.random(),
    "object in a list": lambda u: u.meters["train"][1].update(),
    "member of an enumeration": lambda u: setattr(u, "phase", Phase.HOT),
    "record anew": lambda u: setattr(u, "nothing", Record(0.5)),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_another_stage_ends_up_with_the_same(step):
    last, other, changes = played(step)
    assert len(changes) == 1
    assert attributes(other) == attributes(last)
    assert attributes(last) != attributes(User())


def test_only_what_changed_in_a_large_dict_is_sent():
    _, _, changes = played(STEPS["large counter"])
    assert len(pickle.dumps(changes)) < 300


def test_nothing_changed():
    _, _, changes = played(lambda user: None)
    assert changes == {}


def test_lists_and_buffers_stay_the_same_objects():
    last, other = User(), User()
    kept, buffer = other.outputs, other.average
    states = [ModuleState({"": user}, IGNORED) for user in (last, other)]
    for state in states:
        state.remember()
    last.outputs.append(1)
    last.average.add_(1)
    states[1].apply(states[0].changes(), CPU)
    assert other.outputs is kept == [1]
    assert other.average is buffer


def test_only_what_is_new_is_sent():
    last = User()
    last.outputs.extend([torch.zeros(10_000) for _ in range(5)])
    state = ModuleState({"": last}, IGNORED)
    state.remember()
    last.outputs.append(1)
    assert len(pickle.dumps(state.changes())) < 1000


def test_what_other_stages_had_in_the_meantime_is_replaced():
    """User code in front of the last layer may have appended there, too."""
    last, other = User(), User()
    states = [ModuleState({"": user}, IGNORED) for user in (last, other)]
    for user, state in zip((last, other), states, strict=True):
        user.outputs.append("before")
        state.remember()
        user.outputs.append("in between")
    last.outputs.append("at the end")
    states[1].apply(states[0].changes(), CPU)
    assert other.outputs == last.outputs == ["before", "in between", "at the end"]


def test_step_after_step():
    last, other = User(), User()
    states = [ModuleState({"": user}, IGNORED) for user in (last, other)]
    for number in range(3):
        for state in states:
            state.remember()
        last.outputs.append(number)
        last.by_kind.setdefault(str(number), []).append(number)
        last.total.add_(number)
        states[1].apply(pickle.loads(pickle.dumps(states[0].changes())), CPU)
        assert attributes(other) == attributes(last)


def twice(first, second):
    """As :func:`played`, with two steps whose changes are combined."""
    last, other = User(), User()
    states = [ModuleState({"": user, "child": user.child}, IGNORED) for user in (last, other)]
    for state in states:
        state.remember()
    found: dict[Any, Any] = {}
    for step in (first, second):
        step(last)
        combine(found, pickle.loads(pickle.dumps(states[0].changes())))
        states[0].remember()
    states[1].apply(found, CPU)
    return last, other


def at_random(user, draw):
    """A change of a random part."""
    names = [name for name in STEPS if name != "tensor in inference mode"]
    with suppress(KeyError, AttributeError, IndexError):
        STEPS[draw.choice(names)](user)


@pytest.mark.parametrize("seed", range(40))
def test_changes_of_several_steps_are_combined(seed):
    draw = random.Random(seed)
    steps = [[draw.randrange(1 << 30) for _ in range(draw.randrange(1, 9))] for _ in range(2)]

    def step(user, numbers):
        for number in numbers:
            at_random(user, random.Random(number))

    last, other = twice(*(partial(step, numbers=numbers) for numbers in steps))
    assert attributes(other) == attributes(last)


@pytest.mark.parametrize("name", STEPS)
def test_a_change_that_is_made_twice(name):
    with suppress(KeyError, AttributeError):
        last, other = twice(STEPS[name], STEPS[name])
        assert attributes(other) == attributes(last)


def test_what_belongs_to_the_framework_or_cannot_be_sent_stays():
    def step(user):
        user.trainer = object()
        user.handle = open  # a function
        user.outputs.append(lambda: 0)
        user.outputs = user.outputs
        user.seen = placeholder(2)

    _, other, changes = played(step)
    assert changes == {}
    assert not hasattr(other, "handle")


def test_of_long_lists_of_an_object_only_what_is_new_is_sent():
    last, other, changes = played(lambda user: user.meter.samples.append(7))
    assert len(pickle.dumps(changes)) < 300
    assert other.meter.samples == last.meter.samples
    assert other.meter.lock is not last.meter.lock


def test_an_object_that_is_on_the_last_stage_only_changes_nothing_elsewhere():
    for elsewhere in (None, Record(0.5)):
        last, other = User(), User()
        other.meter = elsewhere
        states = [ModuleState({"": user}, IGNORED) for user in (last, other)]
        for state in states:
            state.remember()
        last.meter.update()
        states[1].apply(states[0].changes(), CPU)
        assert other.meter is elsewhere
    assert other.meter == Record(0.5)


def test_placeholders_are_replaced_wherever_they_are_kept():
    user, kept = User(), placeholder(2)
    user.count = kept
    user.outputs.append(kept)
    user.full.append(kept)
    user.words["last"] = kept
    user.many[7].append(kept)
    user.meter.seen.append(kept)
    user.meter.samples[1_000] = kept
    user.counts.right = kept
    user.pair[1].append(kept)
    value = torch.ones(2)
    ModuleState({"": user}, IGNORED).resolve(lambda _: value)
    found = [
        user.count,
        user.outputs[-1],
        user.full[-1],
        user.words["last"],
        user.many[7][-1],
        user.meter.seen[-1],
        user.meter.samples[1_000],
        user.counts.right,
        user.pair[1][-1],
    ]
    assert all(each is value for each in found)


def test_values_are_detached():
    def step(user):
        user.outputs.append(torch.ones(2, requires_grad=True) * 2)

    _, other, _ = played(step)
    assert not other.outputs[0].requires_grad
