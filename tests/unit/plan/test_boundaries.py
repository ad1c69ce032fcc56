import pytest

from lightning_pipeshift.plan.search.boundaries import worthwhile_cuts


def cuts(inner, num_stages, ends=(0, 0)):
    """The worthwhile boundaries, given what the boundaries between layers carry."""
    return sorted(worthwhile_cuts([ends[0], *inner, ends[1]], num_stages))


@pytest.mark.parametrize(
    ("inner", "num_stages", "expected"),
    [
        # Whole blocks as layers: any boundary.
        ([1, 1, 1, 1], 2, [1, 2, 3, 4]),
        # Blocks opened into four layers each.
        ([1, 2, 2, 2, 1, 2, 2, 2, 1], 2, [1, 5, 9]),
        # A block within a block.
        ([1, 2, 3, 2, 1, 2, 2, 1], 2, [1, 5, 8]),
        # A convnet: less and less crosses.
        ([9, 8, 7, 6, 4, 2, 1], 3, [1, 2, 3, 4, 5, 6, 7]),
        ([8, 8, 4, 4, 2, 2], 3, [1, 2, 3, 4, 5, 6]),
        # Dense connections: more and more.
        ([1, 2, 3, 4], 2, [1, 2, 3, 4]),
        # A hill that reaches an end has only one foot.
        ([2, 2, 1, 1], 2, [1, 2, 3, 4]),
        # A valley is worth cutting above all, but its sides are no hills.
        ([3, 2, 1, 2, 3], 2, [1, 2, 3, 4, 5]),
        ([], 2, []),
        ([5], 2, [1]),
    ],
)
def test_cuts(inner, num_stages, expected):
    assert cuts(inner, num_stages) == expected


def test_the_ends_of_the_model_are_nobodys_foot():
    assert cuts([5, 5, 5], 2, ends=(0, 0)) == cuts([5, 5, 5], 2, ends=(9, 9)) == [1, 2, 3]


def test_the_slopes_of_a_u_net_can_be_cut():
    # Fourteen layers: on two stages the top of seven counts as a block, on four that of three.
    inner = [1, 2, 3, 4, 5, 6, 7, 6, 5, 4, 3, 2, 1]
    assert cuts(inner, 2) == [1, 2, 3, 4, 10, 11, 12, 13]
    assert cuts(inner, 4) == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13]


def test_the_blocks_of_a_u_net_are_kept_whole():
    #        down: a block    down: a block   middle  up: a block    up: a block
    inner = [10, 15, 15, 20, 25, 25, 30, 20, 25, 25, 15, 18, 18, 10]
    kept = cuts(inner, 2)
    assert set(kept) >= {1, 4, 8, 11, 14}
    assert not set(kept) & {9, 10, 12, 13}


def test_too_few_cuts_for_the_stages_allow_all():
    inner = [1, 2, 2, 1, 2, 2, 1]
    assert cuts(inner, 2) == [1, 4, 7]
    assert cuts(inner, 5) == [1, 2, 3, 4, 5, 6, 7]


def test_a_hill_wider_than_a_stages_share_is_not_kept_whole():
    inner = [1, 2, 2, 2, 2, 2, 1, 1]  # One hill over 6 of 9 layers.
    assert cuts(inner, 1) == [1, 7, 8]
    assert cuts(inner, 2) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_what_is_worthwhile_may_be_cut():
    assert sorted(worthwhile_cuts([0, 1, 1, 1, 1, 0], 2, {2, 4})) == [2, 4]
    # The rest is too few: all that may be cut, and no more.
    assert sorted(worthwhile_cuts([0, 1, 5, 1, 5, 1, 0], 2, {2, 4})) == [2, 4]
