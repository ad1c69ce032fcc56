"""Several virtual machines train as one device would with the whole global batch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.features_models import differences, fit, on_one_device, on_rank, plain
from tests.harness import run_ranks
from tests.models import ZOO, points


def trained(how: Mapping[str, Any], name: str, per_device: int, **arguments: Any) -> Any:
    """Trains a specimen of the zoo; ``per_device`` batches make a global one on one device."""
    specimen = ZOO[name]
    torch.manual_seed(3)
    count = per_device if "pipeshift" not in how else 1
    data = DataLoader(points(8).dataset, batch_size=6 * count, shuffle=True)
    record, trainer, _ = fit(how, specimen.make_module, data, **{"max_epochs": 2, **arguments})
    return plain(record)


def over_virtual_machines(
    scenario: Any, ranks: int, *args: Any, rtol: float = 1e-4, atol: float = 1e-6, **strategy: Any
) -> list[Any]:
    """Requires every rank to end as one device, and all with the same bits."""
    expected = on_one_device(scenario, *args)
    strategy = {"microbatches": 2, "partition": "uniform", **strategy}
    folder = Path.cwd() / f"ranks{len(list(Path.cwd().glob('ranks*')))}"
    found = run_ranks(on_rank, ranks, scenario, strategy, args, {}, timeout=60.0, cwd=folder)
    problems = []
    for rank, mine in enumerate(found):
        problems += [f"rank {rank}: {p}" for p in differences(mine, expected, rtol, atol)]
    assert not problems, "unlike one device:\n" + "\n".join(problems[:40])
    for mine in found[1:]:
        assert not differences(mine["parameters"], found[0]["parameters"], 0, 0)
    return found


@pytest.mark.parametrize(
    ("ranks", "virtual_machines"), [(2, 2), (4, 2), (3, [[0, 1], [2]]), (4, [[3, 1], [0, 2]])]
)
def test_as_one_device_with_the_global_batch(ranks: int, virtual_machines: Any) -> None:
    over_virtual_machines(trained, ranks, "sequential", 2, virtual_machines=virtual_machines)
