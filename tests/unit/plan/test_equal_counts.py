import pytest

from lightning_pipeshift.errors import PartitionError
from lightning_pipeshift.plan.search.equal_counts import uniform


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "counts"),
    [
        (6, 3, (2, 2, 2)),
        (9, 2, (5, 4)),
        (11, 4, (3, 3, 3, 2)),
        (2, 4, (1, 1, 0, 0)),
        (0, 2, (0, 0)),
        (5, 1, (5,)),
    ],
)
def test_uniform(num_layers, num_stages, counts):
    assert uniform(num_layers, num_stages) == counts


def test_no_stage():
    with pytest.raises(PartitionError, match="0 stages"):
        uniform(3, 0)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "possible", "idle", "counts"),
    [
        # As without limits, where the limits allow it.
        (7, 3, range(1, 7), (), (3, 2, 2)),
        (9, 3, {1, 3, 6, 8}, (), (3, 3, 3)),
        # The nearest that may be cut.
        (9, 3, {2, 5}, (), (2, 3, 4)),
        (8, 2, {1, 3}, (), (3, 5)),
        # Too few: stages stay empty, the last ones.
        (8, 3, {3}, (), (3, 5, 0)),
        (8, 2, set(), (), (8, 0)),
        # Idle layers do not count.
        (8, 2, {2, 6}, {0, 1, 2, 3}, (6, 2)),
    ],
)
def test_only_what_may_be_cut_is_cut(num_layers, num_stages, possible, idle, counts):
    assert uniform(num_layers, num_stages, possible, idle) == counts
