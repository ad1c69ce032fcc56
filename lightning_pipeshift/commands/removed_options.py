"""Options that commands had once: they end with what to do instead."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from lightning_pipeshift.errors import ConfigurationError


class Removed(argparse.Action):
    """An option that is gone. It is not in the help, and raises ConfigurationError if it is given.

    Args:
        advice: what to do instead.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, advice: str) -> None:
        super().__init__(option_strings, dest, nargs="?", help=argparse.SUPPRESS)
        self._advice = advice

    def __call__(self, *given: Any) -> NoReturn:
        """Raises the error."""
        option = self.option_strings[0]
        raise ConfigurationError(f"`{option}` is no option any more. {self._advice}")
