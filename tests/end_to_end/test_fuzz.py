"""Files that are damaged at random, or made to do harm; ``benchmarks/fuzz.py`` tries many more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.fuzz import KINDS, run_kind
from lightning_pipeshift.testing.ranks import run_ranks


def trying(kind: str, folder: Path) -> dict[str, Any]:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # The limit is for what hangs.
    return run_kind(kind, 300, 0, folder, limit_seconds=60)


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_refused_or_loaded_rightly(kind: str, tmp_path: Path) -> None:
    (found,) = run_ranks(trying, 1, kind, tmp_path)
    assert not found["problems"], found["problems"]
    assert found["refused"] > 100
    assert found["loaded"] > 0, "some bytes mean nothing"
