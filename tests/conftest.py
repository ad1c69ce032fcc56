"""The environment of every test: one thread, no model hub, a folder of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# One thread, before torch is imported: the number of threads changes the order of sums, and so the
# last bit.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Trainers write logs and checkpoints where they run: not into the repository."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needing_cuda = [item for item in items if item.get_closest_marker("cuda")]
    if not needing_cuda:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needing_cuda:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    # Tests without ranks need neither torch nor the server.
    ranks = sys.modules.get("lightning_pipeshift.testing.ranks")
    if ranks is not None:
        ranks.PRELOADED_MODULES.append("tests.quick_start")
