import re
from dataclasses import replace

import numpy as np
import pytest

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.search.stages import best_cut
from tests.unit.plan.workloads import random_workload, workload

GB = 1e9


def message(given, recompute="auto"):
    with pytest.raises(PlanError) as raised:
        best_cut(given, recompute)
    return str(raised.value)


def test_it_says_which_stage_lacks_how_much():
    given = workload([1, 1, 1, 1], static=2.5 * GB, room=[5 * GB, 4.2 * GB])
    assert message(given).startswith(
        "No plan fits in memory with recompute='auto'. In the cut that is nearest to fitting,"
        " [2, 2] layers,"
        " stage 1 lacks 800.00 MB (it would hold 5.00 GB, of 4.20 GB). What would fit: "
    )


@pytest.mark.parametrize(
    ("given", "recompute", "remedy"),
    [
        (workload([1, 1], saved=4 * GB, room=[5 * GB] * 2), "none", "recompute='auto'"),
        (
            workload([1, 1], saved=4 * GB, inputs=4 * GB, room=[9 * GB, 5 * GB], schedule="gpipe"),
            "auto",
            "schedule='1f1b'",
        ),
        (
            workload([1, 1], saved=4 * GB, inputs=4 * GB, room=[4 * GB] * 2, microbatches=2),
            "auto",
            "4 microbatches instead of 2 of the same batch",
        ),
        (workload([1, 1, 1], static=4 * GB, room=[5 * GB] * 2), "auto", "3 stages with 5.00 GB"),
        (
            workload([1, 1, 1], static=4 * GB, room=[5 * GB] * 2),
            "auto",
            "devices with 8.00 GB each",
        ),
        (
            workload([1, 1, 1], static=4 * GB, room=[5 * GB] * 2),
            "full",
            "devices with 8.00 GB each",
        ),
    ],
)
def test_it_says_what_would_fit(given, recompute, remedy):
    assert remedy in message(given, recompute).split("What would fit: ")[1]


def test_what_an_asynchronous_pipeline_can_do():
    """Its minibatches are not split. Another schedule trains otherwise, and the text says so."""
    given = workload(
        [1] * 3,
        [1] * 3,
        static=3 * GB,
        weight=1 * GB,
        saved=0.5 * GB,
        inputs=0.5 * GB,
        room=[5.5 * GB] * 3,
        schedule="async",
        microbatches=1,
    )
    text = message(given).split("What would fit: ")[1]
    # Three versions and three minibatches in flight need 6.5 GB on the first stage, two 5.5 GB.
    assert text.startswith("schedule='async-2bw'; batches of 1/4 of the size; ")
    assert "schedule='1f1b' with 12 microbatches, which trains otherwise" in text


def test_what_would_not_fit_is_not_recommended():
    # Parameters: neither recomputation nor smaller microbatches nor a schedule has any of them.
    text = message(workload([1, 1], static=4 * GB, room=[3 * GB] * 2), "none")
    assert text.endswith("What would fit: devices with 4.00 GB each.")


def test_the_recommended_devices_are_large_enough_and_no_larger():
    num_short = 0
    for seed in range(60):
        given = random_workload(seed, tight=True)
        try:
            best_cut(given)
        except PlanError as error:
            num_short += 1
            match = re.search(r"devices with (\d+) bytes each", str(error))
            assert match is not None, f"seed {seed}"
            room = float(match[1])
            enough = replace(given, usable_bytes=np.full(given.num_stages, room))
            best_cut(enough)
            with pytest.raises(PlanError):
                best_cut(replace(enough, usable_bytes=enough.usable_bytes - 1))
    assert num_short > 5
