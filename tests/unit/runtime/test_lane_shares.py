"""The lanes that carry the gradients of layers."""

import pytest

from lightning_pipeshift.runtime.gradients.lanes import (
    MOST_PIECES,
    PIECE_BYTES,
    equal_shares,
    lanes_by_share,
    num_pieces,
)


@pytest.mark.parametrize(
    ("sizes", "shares", "expected"),
    [
        ([1, 1, 1, 1], [0.5, 0.5], [0, 0, 1, 1]),
        ([1, 1, 1, 1], [1.0], [0, 0, 0, 0]),
        ([6, 1, 1], [0.5, 0.5], [0, 1, 1]),
        ([1, 1, 6], [0.5, 0.5], [0, 0, 1]),
        ([0, 0], [0.5, 0.5], [0, 0]),
        ([], [0.5, 0.5], []),
        ([1, 2, 3, 4], [0.1, 0.2, 0.7], [0, 1, 2, 2]),
    ],
)
def test_the_first_layers_travel_on_the_most_urgent_lane(
    sizes: list[int], shares: list[float], expected: list[int]
) -> None:
    assert lanes_by_share(sizes, shares) == tuple(((1.0, lane),) for lane in expected)


def test_a_large_layer_is_split_between_two_pieces() -> None:
    sizes = [PIECE_BYTES, 3 * PIECE_BYTES, PIECE_BYTES]
    assert lanes_by_share(sizes, [0.4, 0.6]) == (
        ((1.0, 0),),
        ((1 / 3, 0), (1.0, 1)),
        ((1.0, 1),),
    )
    # No more parts than there are pieces, however large it is.
    shares = [1 / 5] * 5
    (parts,) = lanes_by_share([100 * PIECE_BYTES], shares)
    assert [part.lane for part in parts] == [0, 1, 2, 3, 4]
    assert all(part.end * MOST_PIECES == round(part.end * MOST_PIECES) for part in parts)


def test_equal_shares_are_as_many_as_there_are_pieces() -> None:
    assert equal_shares([10, 0, 10]) == (1 / 2,) * 2
    assert equal_shares([10] * 9) == (1 / 5,) * 5
    assert equal_shares([0, 0]) == (1.0,)
    assert equal_shares([3 * PIECE_BYTES]) == (1 / 3,) * 3
    assert num_pieces(0) == 1
