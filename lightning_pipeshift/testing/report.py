"""The result of a check, as a printable value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from lightning_pipeshift.testing.findings import END_OF_STEP, Findings, FoundCode, FoundTensor
from lightning_pipeshift.testing.splits import Split
from lightning_pipeshift.text import bytes_text, seconds_text, table

_MOST_DIFFERENCES = 12
_MOST_LINES = 30
_MOST_FRAMES = 12
_NOT_REPEATABLE = (
    "Two runs on one stage differ from each other, too: the model draws random numbers without a",
    "seed, or depends on the time, for example. Make it repeatable first, and check again.",
)


@dataclass(frozen=True)
class Difference:
    """A value that is not bitwise equal to that on one stage.

    Args:
        kind: ``"parameter"``, ``"buffer"`` or ``"optimizer state"`` after the last step; ``"loss"``
            or ``"logged value"`` of a step.
        name: in the LightningModule, or as it was logged.
        distance: the largest difference, as a fraction of the largest value; ``None`` if the two
            cannot be compared: one is missing, has another shape, or contains NaN.
        step: for a loss and a logged value the first step in which it differs, from 0.
        ranks: those on which it differs.
    """

    kind: str
    name: str
    distance: float | None
    step: int | None = None
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        place = f" from step {self.step} on" if self.step is not None else ""
        how_far = "cannot be compared (missing, of another shape, or not a number)"
        if self.distance is not None:
            how_far = f"by {self.distance:.1e} of its largest value"
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {_list(self.ranks)}"
        return f"{self.kind} {self.name!r}{place} {how_far}, on {ranks}"


@dataclass(frozen=True)
class Failure:
    """A run's failure.

    Args:
        kind: the name of the exception's class; ``"hang"`` for a run that exceeded its time limit,
            ``"crash"`` for a rank that died without an exception.
        message: of the exception.
        details: its traceback, or the stacks of all ranks.
        is_refusal: whether it is PipeShift's own error for something that it does not support.
    """

    kind: str
    message: str
    details: str
    is_refusal: bool


@dataclass(frozen=True)
class CheckedRun:
    """One run of the model.

    Args:
        split: the split.
        counts: how many layers each stage owned at the end.
        losses: of each step; ``None`` for a step without a loss.
        differences: from the run on one stage.
        failure: its failure, if it failed.
        seconds: its duration, including the model's construction.
    """

    split: Split
    counts: tuple[int, ...] = ()
    losses: tuple[float | None, ...] = ()
    differences: tuple[Difference, ...] = ()
    failure: Failure | None = None
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """``"same bits"`` (``"trains"``, for one stage), ``"differs"``, ``"refused"`` or
        ``"fails"``.
        """
        if self.failure is not None:
            return "refused" if self.failure.is_refusal else "fails"
        if self.differences:
            return "differs"
        return "same bits" if self.split.stages > 1 else "trains"


@dataclass(frozen=True)
class CheckReport:
    """The result of :func:`~lightning_pipeshift.testing.check_model`. ``print`` shows it.

    Args:
        model: the name of the LightningModule's class.
        num_steps: how many steps each run trained.
        microbatches: into how many slices each batch was cut.
        one_stage: the run on one stage, with which the others are compared.
        runs: on several stages.
        findings: the layers, the payloads of the boundaries between them, and the code between
            them.
        is_repeatable: whether a second run on one stage gave the bits of the first; ``None`` if
            there was no second run, as nothing differed or was refused.
    """

    model: str
    num_steps: int
    microbatches: int
    one_stage: CheckedRun
    runs: tuple[CheckedRun, ...]
    findings: Findings
    is_repeatable: bool | None = None

    @property
    def ok(self) -> bool:
        """Whether every run trained, and gave the bits of one stage."""
        return bool(self.runs) and all(
            run.verdict in ("trains", "same bits") for run in (self.one_stage, *self.runs)
        )

    def raise_if_different(self) -> None:
        """For a test: raises AssertionError with the whole report, unless :attr:`ok`."""
        if not self.ok:
            raise AssertionError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, texts and numbers for JSON; numbers that JSON lacks (``nan``)
        are texts.
        """

        def named(run: CheckedRun) -> dict[str, Any]:
            return {**asdict(run), "split": run.split._asdict(), "verdict": run.verdict}

        found: dict[str, Any] = _plain(
            {
                **asdict(self),
                "one_stage": named(self.one_stage),
                "runs": [named(run) for run in self.runs],
                "ok": self.ok,
            }
        )
        return found

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return "\n".join(
            [
                *self._summary(),
                *self._failures(),
                *self._differences(),
                *self._layers(),
                *self._code(),
                *self._notes(),
            ]
        )

    # --- the parts of what is printed ---

    def _summary(self) -> list[str]:
        steps = _count(self.num_steps, "step")
        slices = _count(self.microbatches, "microbatch", "microbatches")
        lines = [f"PipeShift check of {self.model}: {steps} of {slices}, on the CPU", ""]
        rows = []
        for run in (self.one_stage, *self.runs):
            layers = ", ".join(map(str, run.counts))
            layers = f"layers {layers}" if run.split.stages > 1 and layers else ""
            rows.append([f"  {run.split}", run.verdict, layers, _losses(run.losses)])
        lines += table(rows)
        if not self.runs and self.one_stage.failure is not None:
            lines += ["", "It was not split, as it does not train on one stage."]
        return lines

    def _failures(self) -> list[str]:
        lines: list[str] = []
        found: dict[tuple[str, str], list[CheckedRun]] = {}
        for run in (self.one_stage, *self.runs):
            if run.failure is not None:
                found.setdefault((run.verdict, run.failure.message), []).append(run)
        for (verdict, message), runs in found.items():
            failure = runs[0].failure
            assert failure is not None
            where = "; ".join(str(run.split) for run in runs)
            lines += ["", f"{verdict.capitalize()} with {failure.kind} ({where}):"]
            lines += _indented(message)
            if verdict == "fails":
                lines += ["", *_indented(_shortened(failure))]
        return lines

    def _differences(self) -> list[str]:
        lines: list[str] = []
        for run in self.runs:
            if run.differences:
                lines += ["", f"Differs from one stage ({run.split}):"]
                lines += [f"  {difference}" for difference in run.differences[:_MOST_DIFFERENCES]]
                more = len(run.differences) - _MOST_DIFFERENCES
                lines += [f"  and {more} more"] if more > 0 else []
        if self.is_repeatable is False:
            lines += ["", *_NOT_REPEATABLE]
        return lines

    def _layers(self) -> list[str]:
        header = ["  layer", "class", "parameters", "forward", "crosses the boundary after it"]
        payloads = {boundary.before: boundary for boundary in self.findings.boundaries}
        rows = []
        for layer in self.findings.layers:
            boundary = payloads.get(layer.name)
            seconds = layer.forward_seconds
            crosses = "not called by the step"
            if boundary is not None:
                tensors = "; ".join(_tensor_text(each, layer.name) for each in boundary.payload)
                crosses = f"{bytes_text(boundary.num_bytes)}: {tensors}"
            elif layer.is_called:
                crosses = "-"
            rows.append(
                [
                    layer.name,
                    layer.kind,
                    bytes_text(layer.parameter_bytes),
                    seconds_text(seconds) if seconds is not None else "-",
                    crosses,
                ]
            )
        if not rows:
            return []
        lines = []
        # Equal blocks have equal lines.
        for _, alike in groupby(rows, key=lambda row: (row[1], row[2], row[4])):
            [name, kind, size, time, crosses], *others = alike
            if others:
                name = f"{name} … {others[-1][0]} ({len(others) + 1} layers)"
            if any(other[3] != time for other in others):
                time = f"{time} …"
            lines.append([f"  {name}", kind, size, time, crosses])
        num_layers = _count(len(self.findings.layers), "layer")
        title = f"Found {num_layers} (times and payloads are those of one microbatch):"
        return ["", title, *table([header, *lines])]

    def _code(self) -> list[str]:
        rows = [
            [f"  {_place(code)}", _counted(code.functions) or "-", _reads(code)]
            for code in self.findings.code
        ]
        if not rows:
            return []
        lines = []
        for same, alike in groupby(rows, key=lambda row: row[1:]):
            [place, *_], *others = alike
            more = f" … ({len(others) + 1} places)" if others else ""
            lines.append([place + more, *same])
        return ["", "Code between layers, by the functions that it calls:", *table(lines)]

    def _notes(self) -> list[str]:
        found, notes = self.findings, []
        if any(code.reads for code in found.code):
            notes.append(
                "Where code reads values, each stage waits for them; others' microbatches run "
                "meanwhile, as far as the step's own state allows."
            )
        for later, earlier in found.flows_back:
            notes.append(
                f"{earlier} takes what comes from {later}, a later layer: with a cut between them "
                "it travels back."
            )
        if found.shared:
            notes.append(
                f"Used by several layers: {_list(found.shared)}. Several stages may hold them."
            )
        return ["", *(f"Note: {note}" for note in notes)] if notes else []


def _place(code: FoundCode) -> str:
    if code.after is None:
        return f"in front of {code.before or END_OF_STEP}"
    return f"behind {code.after}"


def _counted(functions: Mapping[str, int]) -> str:
    return ", ".join(
        name if count == 1 else f"{count} x {name}" for name, count in functions.items()
    )


def _reads(code: FoundCode) -> str:
    return f"reads values by {_counted(code.reads)}" if code.reads else ""


def _tensor_text(tensor: FoundTensor, layer: str) -> str:
    """Shape, type and origin; ``it`` is the layer before the boundary."""
    made_by = "it" if tensor.layer == layer else tensor.layer
    if tensor.function is not None:
        made_by = f"{tensor.function} behind {made_by}"
    shape = " x ".join(map(str, tensor.shape)) or "scalar"
    return f"{shape} {tensor.dtype.removeprefix('torch.')} from {made_by}"


def _losses(losses: Sequence[float | None]) -> str:
    texts = ["none" if loss is None else f"{loss:.6g}" for loss in losses]
    if not texts:
        return ""
    return f"loss {texts[0]}" if len(texts) == 1 else f"loss {texts[0]} … {texts[-1]}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _list(items: Sequence[object]) -> str:
    names = list(map(str, items))
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _shortened(failure: Failure) -> str:
    """The innermost frames: the last ones of a traceback, the first ones of each thread's stack."""
    lines = failure.details.strip().splitlines()
    if failure.kind not in ("hang", "crash"):
        frames = (n for n, line in enumerate(lines) if line.startswith("  File"))
        first = next((n for n in frames if n >= len(lines) - _MOST_LINES), 0)
        return "\n".join(lines[first:])
    kept, num_frames = [], 0
    for line in lines:
        num_frames = num_frames + 1 if line.startswith("  File") else 0
        kept += [line] if num_frames <= _MOST_FRAMES else []
    return "\n".join(kept)


def _indented(text: str) -> list[str]:
    return [f"    {line}".rstrip() for line in text.strip("\n").splitlines()]


def _plain(value: Any) -> Any:
    """A value that JSON can represent."""
    if isinstance(value, dict):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value
