import pytest

from lightning_pipeshift.errors import PartitionError
from lightning_pipeshift.plan.balance import uniform


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
