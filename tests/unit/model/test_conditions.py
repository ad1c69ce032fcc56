import copy
import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipeshift.model.trace.conditions import PlainChanges, PlainValues, Watch
from tests.unit.model.following import Model, follow, linears


class Trainer:
    def __init__(self):
        self.step, self.is_last = 3, False

    @property
    def global_step(self):
        return self.step

    @property
    def is_last_batch(self):
        return self.is_last


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self._trainer: Any = Trainer()
        self.count: Any = 4
        self.rate, self.name, self.is_on = 0.5, "first", True


def followed(step, module=None, *arguments):
    """The watch of a step, and the module after it."""
    module = module or Module()
    watch = Watch()
    with PlainValues(module, arguments).watched(watch) as given:
        step(module, *given)
    return watch, module


@pytest.mark.parametrize(
    ("condition", "others"),
    [
        (lambda m: m.count > 5, [{"count": 6}]),
        (lambda m: m.count % 3 == 1, [{"count": 5}]),
        (lambda m: 2 * m.count - 1 != 7, [{"count": 5}]),
        (lambda m: -m.count // 2 < -2, [{"count": 6}]),
        (lambda m: (m.count + m.rate) / 2 >= 3, [{"count": 6}, {"rate": 5.0}]),
        (lambda m: abs(m.rate) ** 2 <= 0.25, [{"rate": -2.0}]),
        (lambda m: round(m.rate * 10, 1) == 5, [{"rate": 0.25}]),
        (lambda m: min(m.count, 5) == 4, [{"count": 9}, {"count": 3}]),
        (lambda m: not m.count, [{"count": 0}]),
        (lambda m: m.name == "first", [{"name": "second"}]),
        (lambda m: m.name in ("none", "first"), [{"name": "second"}]),
        (lambda m: "ir" in m.name, [{"name": "second"}]),
        (lambda m: m._trainer.global_step > m.count, [{"count": 1}]),
    ],
)
def test_a_condition_holds_while_its_outcome_is_the_same(condition, others):
    module = Module()
    outcome = condition(module)
    watch, _ = followed(lambda m: condition(m), Module())
    assert PlainValues(module, ()).meet(watch.conditions)
    for other in others:
        changed = Module()
        vars(changed).update(other)
        assert condition(changed) is not outcome
        assert not PlainValues(changed, ()).meet(watch.conditions)


def test_the_trainer_and_the_arguments():
    def step(module, batch_idx):
        if batch_idx == 1 and module._trainer.global_step < 5:
            assert not module._trainer.is_last_batch

    module = Module()
    watch, _ = followed(step, module, 1)
    assert type(module._trainer) is Trainer
    assert PlainValues(module, (1,)).meet(watch.conditions)
    assert not PlainValues(module, (2,)).meet(watch.conditions)
    module._trainer.step = 4
    assert PlainValues(module, (1,)).meet(watch.conditions)
    module._trainer.step = 5
    assert not PlainValues(module, (1,)).meet(watch.conditions)
    module._trainer.step, module._trainer.is_last = 4, True
    assert not PlainValues(module, (1,)).meet(watch.conditions)


def test_an_attribute_that_is_gone_or_of_another_type_meets_no_condition():
    watch, _ = followed(lambda m: m.count > 3)
    values: list[Any] = [None, "text", torch.ones(2)]
    for value in values:
        module = Module()
        module.count = value
        assert not PlainValues(module, ()).meet(watch.conditions)
    module = Module()
    del module.count
    assert not PlainValues(module, ()).meet(watch.conditions)


def test_a_module_without_trainer():
    module = Module()
    for trainer in (None, SimpleNamespace(global_step=1)):
        module._trainer = trainer
        followed(lambda m: m.count > 3, module)
        assert module._trainer is trainer


def test_watched_values_are_numbers_and_strings():
    def step(m):
        x = torch.arange(25.0).view(5, 5)
        assert x[: m.count].shape == (4, 5)
        assert x[m.count, 0] == 20
        assert (x * m.rate).equal(x * 0.5)
        assert (m.rate * x).equal(x * 0.5)
        assert (x + m.count).equal(x + 4)
        assert torch.full((m.count, m.count), m.rate).equal(torch.full((4, 4), 0.5))
        assert torch.tensor([m.count, 1]).dtype is torch.int64
        assert nn.Dropout(m.rate).p == 0.5
        assert list(range(m.count)) == [0, 1, 2, 3]
        assert {4: "four"}[m.count] == "four"
        assert f"{m.count:02d} {m.rate:.2f} {m.name}" == "04 0.50 first"
        assert math.floor(m.rate) == 0
        assert (int(m.rate), float(m.count)) == (0, 4.0)
        for copied in (pickle.loads(pickle.dumps(m.count)), copy.deepcopy(m.count)):
            assert (type(copied), copied) == (int, 4)
        with pytest.raises(ZeroDivisionError):
            m.count / 0
        with pytest.raises(TypeError):
            m.count + "text"

    followed(step)


def counts(m, watch):
    """Uses a count before the first layer, and changes it behind the last."""
    assert m.count > 3
    for _ in range(2):
        watch.end_interval()
    m.count += 2
    m.name = "last"


def changes_of(step):
    module, watch = Module(), Watch()
    with PlainValues(module, ()).watched(watch):
        step(module, watch)
    return watch.changes


def test_changes_are_computed_for_the_next_microbatch():
    changes = changes_of(counts)
    assert changes.early == {"count"}
    module = Module()
    module.count = 10
    values = PlainValues(module, ()).after(changes)
    assert (values.attributes["count"], values.attributes["name"]) == (12, "last")
    assert values.after(changes).attributes["count"] == 14
    assert module.count == 10


def test_what_is_changed_before_it_is_used_is_not_early():
    def step(m, watch):
        watch.end_interval()
        m.rate *= 2
        watch.end_interval()
        m.rate + 1

    changes = changes_of(step)
    assert (list(changes.updates), changes.early) == (["rate"], set())


def test_a_switch_that_changes_may_have_been_asked_for_at_any_time():
    def step(m, watch):
        m.is_on = not m.is_on

    changes = changes_of(step)
    assert (changes.updates, changes.early) == ({"is_on": False}, {"is_on"})


def test_values_of_tensors_are_unknown():
    def step(m, watch):
        value = watch.read(torch.Tensor.item, 0.25)
        m.rate += value
        if value * 2 < m.count:
            m.count += 1
        m.is_on = False
        assert m.count > 3
        assert m.rate > 0

    module, watch = Module(), Watch()
    with PlainValues(module, ()).watched(watch):
        step(module, watch)
    assert not watch.conditions
    assert not watch.changes.early


def test_unknown_values_leave_other_conditions_as_they_are():
    def step(m, watch):
        assert not watch.read(torch.Tensor.item, True) or m._trainer.global_step < 5

    watch, module = Watch(), Module()
    with PlainValues(module, ()).watched(watch):
        step(module, watch)
    (outcome,) = watch.conditions.values()
    assert outcome is True


def test_later_stages_change_it_on_all_stages():
    changes = changes_of(counts)
    module = Module()
    with PlainValues(module, ()).followed(changes, is_last=False):
        pass
    assert (module.count, module.name) == (6, "first")
    with PlainValues(module, ()).followed(changes, is_last=True):
        module.count += 2
    with (
        pytest.raises(Exception, match=r"`self\.count`.*to 11, where 10 was expected"),
        PlainValues(module, ()).followed(changes, is_last=True),
    ):
        module.count += 3
    with PlainValues(module, ()).followed(PlainChanges(), is_last=True):
        module.count = 0


def test_a_trace_takes_no_notes_of_what_is_compared_later():
    kept = []

    def step(m, x):
        kept.append(m.count)
        hidden = m.a(x)
        m.count += 1
        return m.b(hidden).sum() * (2 if m.count > 2 else 1)

    model = Model(step, **linears("a b"), count=4)
    trace = follow(model, torch.ones(2, 4))
    before = dict(trace.conditions)
    assert len(before) == 1
    assert trace.changes.early == {"count"}
    assert kept[0] > 1
    assert trace.conditions == before
    assert (type(model.count), model.count) == (int, 4)
