"""Private names of Lightning that are read without importing it: below the top, nothing may."""

from __future__ import annotations

from typing import Any, Final

TRAINER: Final = "_trainer"
"""The attribute by which a LightningModule refers to its Trainer."""
OWNERS: Final = frozenset({TRAINER, "_fabric"})
"""The attributes by which a LightningModule refers to what runs it."""


def trainer_of(module: Any) -> Any:
    """The Trainer that runs a module; ``None`` for none, and for what is no LightningModule.
    ``LightningModule.trainer`` raises an error then. Checked with Lightning 2.6.
    """
    return getattr(module, TRAINER, None)
