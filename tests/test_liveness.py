"""A rank that is gone, on hosts of their own: all processes end, and say which rank it is.

How soon is measured by ``python -m benchmarks.liveness``; here the longest time is that benchmark's
own, several times what it takes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.hosts import Hosts, hosts, why_not
from benchmarks.liveness import run


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with hosts(2) as made:
        yield made


@pytest.mark.parametrize(
    ("moment", "fault"),
    [("start", "out"), ("async save", "cable"), ("rings", "stopped"), ("validation", "stuck")],
)
def test_all_processes_end_and_name_the_rank_that_is_gone(
    moment: str, fault: str, two_hosts: Hosts
) -> None:
    result = run(two_hosts, moment, fault)
    assert result.seconds is not None, "\n=====\n".join(result.output)
    assert result.named == (True, True), "\n=====\n".join(result.output)
