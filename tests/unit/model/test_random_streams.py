import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.user_state.random_streams import (
    RandomStreams,
    drawing_from,
    global_state,
    host_state,
    seed_host,
    set_global_state,
    set_host_state,
    stream_seed,
)

CPU = torch.device("cpu")


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
    streams = RandomStreams(CPU)
    with streams.switched(1, "layer"):
        first = draw()
    draw()
    with streams.switched(1, "layer"):
        again = draw()
    with streams.switched(1, "other"):
        other = draw()
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_outside_everything_goes_on_as_if_nothing_happened():
    streams = RandomStreams(CPU)

    def seed():
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        # The second of a pair of normal draws is kept by NumPy and by `random`.
        return np.random.randn(), random.gauss(0, 1)

    seed()
    expected = draw()
    seed()
    with streams.switched("x"):
        draw()
        np.random.randn()
    assert draw() == expected


def test_an_error_inside_changes_nothing_either():
    streams = RandomStreams(CPU)
    before = global_state()
    expected = draw()
    set_global_state(before)

    def fail_inside():
        with streams.switched("x"):
            draw()
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail_inside()
    assert draw() == expected


def test_the_spare_normal_draw_does_not_reach_the_next_stream():
    streams = RandomStreams(CPU)
    with streams.switched("a"):
        np.random.randn()
        random.gauss(0, 1)
        streams.begin("b")
        after_one = draw()
        np.random.randn()
        np.random.randn()
        streams.begin("b")
        after_two = draw()
    assert after_one == after_two


def test_nested_streams():
    streams = RandomStreams(CPU)
    with streams.switched("outer"):
        draw()
        expected = draw()
    with streams.switched("outer"):
        draw()
        with streams.switched("inner"):
            inner = draw()
        assert draw() == expected
    with streams.switched("inner"):
        assert draw() == inner


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
        drawing_from([torch.default_generator], False, 1),
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
    with drawing_from([torch.default_generator], True, 1):
        inside = draw()
    second = draw()
    with drawing_from([torch.default_generator], True, 1):
        again = draw()

    assert [first, second] == expected
    assert inside == again
    assert inside not in expected
