from contextlib import nullcontext
from datetime import timedelta

import pytest

from lightning_pipeshift.runtime.comm.lane import finish


class Collective:
    """Is over just after the caller has waited for a whole interval.

    Args:
        error: that of the collective; ``None`` if it succeeds.
    """

    def __init__(self, error: str | None = None) -> None:
        self.error = error
        self.num_waits = 0

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.num_waits += 1
        if self.num_waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return True


def test_a_collective_that_is_over_just_after_an_interval_has_not_failed() -> None:
    finish(Collective(), lambda _: nullcontext())


def test_its_own_error_is_raised() -> None:
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        finish(Collective("Connection closed by peer"), lambda _: nullcontext())
