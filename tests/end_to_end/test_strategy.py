"""The strategy as an object: before its first run, copied, and with classes of users derived from
it.
"""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest

from lightning_pipeshift import ConfigurationError, PipeShiftStrategy
from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.runtime.comm.sockets import open_sockets
from lightning_pipeshift.testing.ranks import run_ranks
from tests.features_models import built, quiet_trainer
from tests.models import SequentialMLP, points


@pytest.mark.parametrize(
    "name", ["stage", "num_stages", "virtual_machine", "topology", "hosts", "pipeline", "decisions"]
)
def test_what_belongs_to_a_run_is_not_there_before_it(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"not connected yet|no pipeline yet"):
        getattr(PipeShiftStrategy(), name)


def test_a_new_strategy_starts_nothing() -> None:
    sockets, threads = open_sockets(), threading.active_count()
    strategy = PipeShiftStrategy(virtual_machines=2)
    assert (open_sockets(), threading.active_count()) == (sockets, threads)
    # Nothing to reduce or to wait for: there are no other ranks.
    strategy.barrier()
    assert strategy.broadcast("value") == "value"


class Counting(PipeShiftStrategy):
    """A user's own strategy."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.num_steps = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.num_steps += 1
        return super().training_step(*args, **kwargs)


def counted() -> list[tuple[int, int, int]]:
    strategy = Counting(microbatches=2, partition=[2, 3])
    found = []
    for how in (strategy, copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        trainer = quiet_trainer({"strategy": how, "devices": 2}, max_epochs=1)
        trainer.fit(built(SequentialMLP), points(3))
        # Of what the copy has trained, only its own attributes are copied.
        kept = copy.deepcopy(how)
        with pytest.raises(PlanError, match="no run has begun"):
            _ = kept.plan
        found.append((how.num_steps, kept.num_steps, how.plan.microbatches))
    return found


def test_a_class_derived_from_the_strategy_trains_and_so_do_its_copies() -> None:
    for found in run_ranks(counted, 2):
        assert found == [(3, 3, 2)] * 3
