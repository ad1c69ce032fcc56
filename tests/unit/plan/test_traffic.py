"""The classes of traffic, and the commands that make a host honour them."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from lightning_pipeshift import Communication
from lightning_pipeshift.commands.lanes import commands, parse_rate, rate_of, report
from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.plan.inputs.traffic import CLASSES, with_marks


def test_marks_fall_and_other_traffic_comes_before_bulk_only() -> None:
    assert all(one.dscp > other.dscp for one, other in pairwise(CLASSES))
    assert all(one.priority >= other.priority for one, other in pairwise(CLASSES))
    lines = commands("eth0", 1e9, 0.02, CLASSES)
    flows = {
        int(found[1], 16): int(found[2])
        for line in lines
        if (found := re.search(r"ip tos (\w+) 0xfc flowid 1:(\d+)", line))
    }
    assert list(flows) == [one.tos for one in CLASSES]
    (other,) = {int(found[1]) for line in lines if (found := re.search(r"htb default (\d+)", line))}
    ordered = [*list(flows.values())[:-1], other, flows[CLASSES[-1].tos]]
    prio = {
        int(found[1]): int(found[2])
        for line in lines
        if (found := re.search(r"classid 1:(\d\d) .* prio (\d)", line))
    }
    assert [prio[number] for number in ordered] == list(range(8))
    # What is guaranteed to all is not more than the link has.
    rates = [float(found[1]) for line in lines if (found := re.search(r"rate (\d+)bit", line))]
    assert sum(rates[1:]) <= rates[0] == 1e9


def test_a_user_s_marks() -> None:
    marked = with_marks({"pipeline": 46, "bulk": 0})
    assert [one.dscp for one in marked] == [46, 32, 28, 24, 20, 16, 0]
    with pytest.raises(ConfigurationError, match="no lane is named 'swap'; there are 'pipeline'"):
        with_marks({"swap": 3})
    with pytest.raises(ConfigurationError, match="DSCP value is an integer from 0 to 63"):
        with_marks({"bulk": 64})
    with pytest.raises(ConfigurationError, match="'pipeline' and 'bulk' have the same mark, 40"):
        Communication(lane_marks={"bulk": 40})
    assert Communication(lane_marks=False).marks is None


def test_what_a_user_may_get_wrong() -> None:
    assert (parse_rate("10gbit"), parse_rate("2.5Mbit")) == (10e9, 2.5e6)
    for text in ("10", "fast", "0mbit", "10 GB"):
        with pytest.raises(ConfigurationError, match="write a number and a unit, as in 10gbit"):
            parse_rate(text)
    with pytest.raises(ConfigurationError, match="no network device 'eth77' here"):
        rate_of("eth77", "1gbit")
    with pytest.raises(ConfigurationError, match="does not report the rate of its link: pass it"):
        rate_of("lo", None)
    with pytest.raises(ConfigurationError, match=r"at most 0\.125"):
        report("lo", "1gbit", 0.2, [], apply=False)
