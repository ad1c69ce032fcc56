from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightning_pipeshift.errors import ScheduleError
from lightning_pipeshift.plan.cost.simulator import Costs
from lightning_pipeshift.plan.schedule.actions import PROPERTIES, Kind, parse_row
from lightning_pipeshift.runtime.step.stage import Stage


@pytest.mark.parametrize("kind", Kind)
def test_all_that_is_known_of_a_kind_of_action_fits_together(kind: Kind) -> None:
    known = PROPERTIES[kind]
    assert callable(getattr(Stage, known.method))
    assert not known.cost or known.cost in {field.name for field in fields(Costs)}
    # A receive takes no time of its own: the send does.
    assert bool(known.cost) is not kind.is_receive
    if kind.is_compute:
        assert known.pair is None
        assert known.neighbour == 0
        assert all(PROPERTIES[other].line != known.line for other in Kind if other is not kind)
    else:
        assert known.pair is not None
        assert PROPERTIES[known.pair].pair is kind
        assert known.pair.is_receive is kind.is_send
        assert known.neighbour == -PROPERTIES[known.pair].neighbour != 0
    if known.needs is not None:
        assert known.needs.is_receive
    if known.causes is not None:
        assert known.causes.is_send


def test_methods_and_lines_are_each_of_one_kind() -> None:
    assert len({known.method for known in PROPERTIES.values()}) == len(Kind)
    assert sum(known.in_flight for known in PROPERTIES.values()) == 0


def test_a_stage_refuses_further_chunks() -> None:
    channels: Any = SimpleNamespace(stage=1, num_stages=2)
    unused: Any = None
    stage = Stage(nn.Linear(1, 1), channels, unused, unused, unused)
    with pytest.raises(ScheduleError, match=r"F0\.1 on stage 1: .* chunk 1; a stage runs"):
        stage.run(parse_row("F0 F0.1"), unused)
