"""What ``compat.random_private`` reads of the generators' memory is what their states say."""

import random

import numpy as np
import pytest

from lightning_pipeshift.compat import random_private


def test_the_position_of_a_generator_of_numpys_moves_with_draws() -> None:
    generator = np.random.MT19937(0)
    position = random_private.position_of(generator)
    random_private.seed_in_place(generator, 5)
    assert position.value == random_private.NUM_WORDS == 624
    for num_draws in (1, 3, 700):
        generator.random_raw(num_draws)
        assert position.value == generator.state["state"]["pos"]
    random_private.seed_in_place(generator, 5)
    assert position.value == random_private.NUM_WORDS


def test_seeding_in_place_is_seeding_as_numpy_does() -> None:
    generator = np.random.MT19937(0)
    random_private.seed_in_place(generator, 123)
    drawn = np.random.RandomState(generator).standard_normal(700)
    assert np.array_equal(drawn, np.random.RandomState(123).standard_normal(700))


def test_the_position_of_pythons_generator_moves_with_draws() -> None:
    position = random_private.python_position()
    before = random.getstate()
    try:
        random.seed(1)
        assert position() == random_private.NUM_WORDS
        for _ in range(700):
            random.random()
            assert position() == random.getstate()[1][-1]
    finally:
        random.setstate(before)


def test_another_shared_generator_is_asked_for_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "_inst", object())
    assert random_private.python_position()() == random.getstate()[1][-1]


def test_the_memory_is_read_where_it_is_as_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    position = random_private.python_position()
    monkeypatch.setattr(random, "getstate", lambda: pytest.fail("the whole state was copied"))
    assert 0 < position() <= random_private.NUM_WORDS
