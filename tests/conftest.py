"""The environment of every test: one thread, no model hub, a folder of its own."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import ROOT
from tests.not_on_values import KINDS, LISTED, ON_VALUES, entry_of, unused

# One thread, before torch is imported: the number of threads changes the order of sums, and so the
# last bit.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Trainers write logs and checkpoints where they run: not into the repository."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--listed", action="store_true", help="run the tests of tests/not_on_values.py only"
    )


KINDS_FOUND = pytest.StashKey[Counter[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _skip_cuda(items)
    only_listed = config.getoption("listed")
    if not (only_listed or ON_VALUES):
        return
    listed: list[pytest.Item] = []
    others: list[pytest.Item] = []
    entries = set()
    for item in items:
        entry = entry_of(item.nodeid, LISTED)
        (others if entry is None else listed).append(item)
        if entry is not None:
            entries.add(entry)
            config.stash.setdefault(KINDS_FOUND, Counter())[LISTED[entry]] += 1
    given = [os.path.relpath(config.invocation_params.dir / arg, ROOT) for arg in config.args]
    if stale := unused(LISTED, entries, given):
        raise pytest.UsageError(f"tests/not_on_values.py has entries without a test: {stale}")
    items[:], left_out = (listed, others) if only_listed else (others, listed)
    config.hook.pytest_deselected(items=left_out)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    return [
        f'listed as not on core="values": {number} for {KINDS[kind]}'
        for kind, number in sorted(config.stash.get(KINDS_FOUND, Counter()).items())
    ]


def _skip_cuda(items: list[pytest.Item]) -> None:
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
