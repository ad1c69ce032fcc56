"""What ``compat.random_private`` reads of the generators' memory is what their states say."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_pipeshift.compat import random_private


@pytest.mark.parametrize("draw", [random.random, np.random.random_sample])
def test_the_mark_has_the_position_that_the_states_say(draw: Callable[[], float]) -> None:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        random.seed(1)
        np.random.seed(1)
        for _ in range(700):
            draw()
            _, of_numpy, _, of_python, _ = random_private.host_mark()
            state: Any = np.random.get_state(legacy=False)
            assert of_numpy == state["state"]["pos"]
            assert of_python == random.getstate()[1][-1]
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def test_the_memory_is_read_where_it_is_as_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "getstate", lambda: pytest.fail("the whole state was copied"))
    assert random_private.host_mark() == random_private.host_mark()


def test_of_a_generator_of_another_kind_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_private, "_words", None)
    assert random_private.host_mark() != random_private.host_mark()
