"""Threads that user code starts while a step runs: no step runs in them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.testing.ranks import run_ranks
from tests.features_models import built, on_rank, parameters_of, quiet_trainer
from tests.models import SequentialMLP, points


class Watched(SequentialMLP):
    """A thread looks at the parameters in the middle of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, classes = batch
        with ThreadPoolExecutor() as pool:
            loss = F.cross_entropy(self(x), classes)
            self.found.append(pool.submit(self.look).result())
        return loss

    def look(self) -> list[Any]:
        """What the thread finds of each parameter: its norm, or an error."""
        found: list[Any] = []
        for parameter in self.parameters():
            try:
                found.append(float(parameter.detach().norm()))
            except LayerError as error:
                found.append(str(error))
        return found


def trained(how: Any, make: Callable[[], Any]) -> Any:
    module = built(make)
    quiet_trainer(how, max_epochs=1).fit(module, points(4))
    return parameters_of(module), getattr(module, "found", None)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_thread_finds_the_parameters_of_its_stage(microbatches: int) -> None:
    """It was taken for a part of the step, which other ranks do not have."""
    strategy = {"microbatches": microbatches}
    ((expected, whole),) = run_ranks(on_rank, 1, trained, strategy, (Watched,), {})
    for stages in (2, 3):
        ranks = run_ranks(on_rank, stages, trained, strategy, (Watched,), {})
        for parameters, _ in ranks:
            assert all(torch.equal(parameters[name], x) for name, x in expected.items())
        for step, norms in enumerate(whole):
            for at, norm in enumerate(norms):
                each = [found[step][at] for _, found in ranks]
                assert each.count(norm) == 1
                assert all("in another thread" in x for x in each if x != norm)


class CallsLayersInThreads(SequentialMLP):
    """Calls its first layers in threads."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, classes = batch
        with ThreadPoolExecutor() as pool:
            for layer in self.model:
                x = pool.submit(layer, x).result()
        return F.cross_entropy(x, classes)


def test_a_layer_in_a_thread_is_an_error() -> None:
    args = (CallsLayersInThreads,)
    outcomes = run_ranks(on_rank, 2, trained, {"microbatches": 1}, args, {}, expect_failure=True)
    assert any(each.error_type == "LayerError" for each in outcomes)
    assert any("use the step's own thread" in each.message for each in outcomes)
