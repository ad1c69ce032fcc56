"""Every error that PipeShift raises on purpose.

They have one base class, so that a user can catch them all, and one type for each kind of remedy,
so that a program can distinguish them. A message contains the value found, the allowed values, and
the remedy.
"""

import re
from collections.abc import Sequence
from typing import Final, TypeVar

E = TypeVar("E", bound=BaseException)

_MOST_NAMES = 8
_MACHINE: Final = re.compile(r"\b[Vv]irtual machine(s?)(?: \d+(?:(?:, | and | to )\d+)*)?(?![\w'])")


def explained(text: str) -> str:
    """A message that says at the first use of "virtual machine" that no hypervisor is meant."""
    if "of the pipeline)" in text:
        return text
    return _MACHINE.sub(
        lambda found: f"{found[0]} ({'' if found[1] else 'one '}replica{found[1]} of the pipeline)",
        text,
        count=1,
    )


def some_of(names: Sequence[str]) -> str:
    """Names for a message: only the first ones if there are many."""
    left = len(names) - _MOST_NAMES
    more = f" and {left} more" if left > 0 else ""
    return (", ".join(names[:_MOST_NAMES]) + more) or "nothing"


def without_stack(error: E) -> E:
    """An error that is kept for later, without its tracebacks: they keep the variables of all
    callers alive, a batch for instance, and those may refer to the error in turn.
    """
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__context__
    return error


class PipeShiftError(RuntimeError):
    """The root of the package's errors."""

    def __str__(self) -> str:
        return explained(super().__str__())


class ConfigurationError(PipeShiftError):
    """An argument, or a combination of settings, that PipeShift does not support."""


class PartitionError(ConfigurationError):
    """A partition that does not fit the model or the stages."""


class ScheduleError(ConfigurationError):
    """An unknown schedule, or one that would deadlock or leak."""


class PlanError(ConfigurationError):
    """A plan that is damaged, or that was made for another model or another set of stages."""


class BudgetError(ConfigurationError):
    """A memory budget that cannot be kept."""


class LayerError(PipeShiftError):
    """A model whose layers cannot be distinguished, placed or skipped."""


class BatchError(PipeShiftError):
    """A batch that cannot be split into microbatches, or that differs between the stages of a
    virtual machine.
    """


class NotFiniteError(PipeShiftError):
    """NaN or infinite values, found with ``Trainer(detect_anomaly=True)``."""


class CheckpointError(PipeShiftError):
    """A checkpoint that is incomplete, damaged, or of another model, or that cannot be written."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A checkpoint that not all ranks can find."""


class StageFailedError(PipeShiftError):
    """Another stage failed first; the message is that stage's."""
