import random
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.random.random_streams import (
    drawing_from,
    global_state,
    host_state,
    seed_host,
    set_global_state,
    set_host_state,
    stream_seed,
)

GENERATORS = [torch.default_generator]


def draw():
    return (
        torch.rand(2).tolist(),
        np.random.rand(2).tolist(),
        np.random.randn(1).tolist(),
        random.random(),
        random.gauss(0, 1),
    )


def test_different_keys_have_unrelated_seeds():
    keys: list[tuple[int | str, ...]] = [
        (),
        (0,),
        (0, 0),
        (1,),
        (-1,),
        ("",),
        ("a", "bc"),
        ("ab", "c"),
        ("abc",),
        (7, "layer", 0, 0),
        (7, "layer", 0, 1),
        (7, "layer", 1, 0),
        (7, "interval", 0, 0),
    ]
    seeds = [stream_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_stays_the_same_between_versions():
    # Checkpoints continue with the same numbers.
    assert stream_seed(1, "layer", 2) == stream_seed(1, "layer", 2)
    assert stream_seed(0) == 4220729633496414863


def test_a_stream_has_its_own_numbers_each_time():
    found = []
    for seed in (1, 1, 2):
        with drawing_from(GENERATORS, True, seed):
            found.append(draw())
        draw()
    first, again, other = found
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("fails", [False, True])
def test_outside_everything_goes_on_as_if_nothing_happened(fails):
    def seed():
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        # The second of a pair of normal draws is kept by NumPy and by `random`.
        return np.random.randn(), random.gauss(0, 1)

    seed()
    expected = draw()
    seed()
    with suppress(ZeroDivisionError), drawing_from(GENERATORS, True, 1):
        draw()
        np.random.randn()
        if fails:
            raise ZeroDivisionError
    assert draw() == expected


def test_nested_streams():
    with drawing_from(GENERATORS, True, 1):
        draw()
        expected = draw()
    with drawing_from(GENERATORS, True, 1):
        draw()
        # One of a pair is left.
        np.random.randn()
        random.gauss(0, 1)
        np.random.randn()
        random.gauss(0, 1)
        with drawing_from(GENERATORS, True, 2):
            inner = draw()
    with drawing_from(GENERATORS, True, 1):
        draw()
        with drawing_from(GENERATORS, True, 2):
            assert draw() == inner
        assert draw() == expected


def test_the_global_state_travels():
    torch.manual_seed(3)
    state = global_state()
    expected = draw()
    draw()
    set_global_state(state)
    assert draw() == expected


_DRAWS: dict[str, Callable[[], object]] = {
    "random": random.random,
    "a whole state of random": lambda: [random.getrandbits(32) for _ in range(624)],
    "NumPy": np.random.rand,
    "a whole state of NumPy": lambda: np.random.rand(312),
    "half a pair of NumPy's normal numbers": np.random.randn,
}


@pytest.mark.parametrize("drawn", _DRAWS)
@pytest.mark.parametrize("is_fresh", [True, False])
def test_the_state_of_numpy_and_random_is_restored(drawn: str, is_fresh: bool) -> None:
    seed_host(5)
    if not is_fresh:
        _DRAWS[drawn]()
    state = host_state()
    expected = np.random.randn(3).tolist(), random.random()
    set_host_state(state)
    _DRAWS[drawn]()

    set_host_state(state)

    assert (np.random.randn(3).tolist(), random.random()) == expected


@pytest.mark.parametrize("drawn", _DRAWS)
def test_a_draw_from_numpy_or_random_that_was_not_expected_is_refused(drawn: str) -> None:
    with (
        pytest.raises(LayerError, match="did not in its run without values"),
        drawing_from(GENERATORS, False, 1),
    ):
        _DRAWS[drawn]()


def test_a_stream_of_its_own_leaves_the_others_as_they_were() -> None:
    def draw() -> tuple[float, ...]:
        return torch.rand(()).item(), np.random.randn(), random.random()

    seed_host(5)
    torch.manual_seed(5)
    expected = [draw(), draw()]
    seed_host(5)
    torch.manual_seed(5)

    first = draw()
    with drawing_from(GENERATORS, True, 1):
        inside = draw()
    second = draw()
    with drawing_from(GENERATORS, True, 1):
        again = draw()

    assert [first, second] == expected
    assert inside == again
    assert inside not in expected
