"""What end-to-end tests share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """One for each number of stages."""
    return [str(tmp_path_factory.mktemp(f"stages{number}")) for number in range(4)]
