"""The plan: everything that was decided about a run, as one value.

It can be printed, compared, hashed, saved, read, edited by hand, and given to another run.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from lightning_pipeshift.errors import PartitionError, PlanError, ScheduleError
from lightning_pipeshift.plan.document import Fields
from lightning_pipeshift.plan.draw import draw
from lightning_pipeshift.plan.placement import Placement
from lightning_pipeshift.plan.schedule import schedule_named
from lightning_pipeshift.plan.simulator import Costs, Timeline, simulate

FORMAT_VERSION: Final = 1
"""Raised when an older version of the package could no longer read what this one writes."""


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """What is known of a layer, per microbatch. Seconds are 0 until they are measured."""

    name: str
    parameter_bytes: int
    forward_seconds: float
    payload_bytes: int
    """Of the boundary behind the layer."""

    def __post_init__(self) -> None:
        if not self.name:
            raise PlanError("a layer with an empty name; use its name in the model")
        for field in ("parameter_bytes", "forward_seconds", "payload_bytes"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise PlanError(
                    f"layer {self.name!r}: field {field!r} is {value}; "
                    "it must be finite and at least 0"
                )


@dataclass(frozen=True, slots=True)
class Plan:
    """The layers in call order, who owns them, and the schedule.

    Raises PlanError where these don't fit together."""

    layers: tuple[LayerRecord, ...]
    placement: Placement
    schedule: str
    microbatches: int

    def __post_init__(self) -> None:
        if len(self.layers) != self.placement.num_layers:
            raise PlanError(
                f"the field 'placement' places {self.placement.num_layers} layers, and 'layers' "
                f"lists {len(self.layers)}; change the counts until they add up to that"
            )
        counts = Counter(layer.name for layer in self.layers)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise PlanError(
                f"the field 'layers' lists {_names(twice)} more than once; a name is unique"
            )
        try:
            schedule_named(self.schedule)
        except ScheduleError as error:
            raise PlanError(f"the field 'schedule': {error}") from error
        if self.microbatches < 1:
            raise PlanError(
                f"the field 'microbatches' is {self.microbatches}; it must be 1 or more"
            )

    def __str__(self) -> str:
        return draw(self)

    # What the plan says of each stage.

    def stage_layers(self, vm: int) -> tuple[tuple[LayerRecord, ...], ...]:
        """The layers of each stage."""
        return tuple(
            tuple(self.layers[i] for i in self.placement.layers_of(vm, stage))
            for stage in range(self.placement.num_stages(vm))
        )

    def stage_forward_seconds(self, vm: int) -> tuple[float, ...]:
        """What one microbatch's forward takes on each stage."""
        return tuple(
            math.fsum(layer.forward_seconds for layer in stage) for stage in self.stage_layers(vm)
        )

    def stage_parameter_bytes(self, vm: int) -> tuple[int, ...]:
        """The parameters that each stage holds."""
        return tuple(
            sum(layer.parameter_bytes for layer in stage) for stage in self.stage_layers(vm)
        )

    def stage_payload_bytes(self, vm: int) -> tuple[int, ...]:
        """What each stage but the last sends on per microbatch: nothing before the first layer."""
        bounds = self.placement.bounds(vm)[1:]
        return tuple(self.layers[bound - 1].payload_bytes if bound else 0 for bound in bounds)

    @property
    def is_measured(self) -> bool:
        """Whether there is any layer's time to predict from."""
        return any(layer.forward_seconds for layer in self.layers)

    def timeline(self, vm: int = 0) -> Timeline:
        """What a step of a virtual machine should look like.

        The backward is counted as twice the forward (two matrix products for one), and transfers as
        free, because a plan knows no link.
        """
        forward = self.stage_forward_seconds(vm)
        free = (0.0,) * (len(forward) - 1)
        costs = Costs(
            forward_seconds=forward,
            backward_seconds=tuple(2 * seconds for seconds in forward),
            payload_seconds=free,
            gradient_seconds=free,
        )
        return simulate(schedule_named(self.schedule)(len(forward), self.microbatches), costs)

    # Another plan.

    def with_placement(self, placement: Placement) -> Plan:
        """The same plan with other owners."""
        return replace(self, placement=placement)

    def require_layers(self, names: Sequence[str]) -> None:
        """Raises PlanError unless the plan was made for these layers in this order."""
        planned = [layer.name for layer in self.layers]
        if planned == list(names):
            return
        missing = [name for name in names if name not in planned]
        unexpected = [name for name in planned if name not in names]
        if missing or unexpected:
            raise PlanError(
                f"the plan was made for another model: missing in it {_names(missing)}; "
                f"unexpected in it {_names(unexpected)}. "
                "Use the plan of this model, or plan=None to make one"
            )
        place = next(i for i, (p, n) in enumerate(zip(planned, names, strict=True)) if p != n)
        raise PlanError(
            f"the plan has the layers in another order: layer {place} is {planned[place]!r} in the "
            f"plan, {names[place]!r} in the model. "
            "Use the plan of this model, or plan=None to make one"
        )

    # On disk.

    def to_json(self) -> str:
        """The plan as a JSON document, a layer per line, to be read, edited and diffed."""
        head = {
            "version": FORMAT_VERSION,
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            "placement": self.placement.counts,
        }
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
        layers = ",\n".join(f"    {json.dumps(asdict(layer))}" for layer in self.layers)
        return "\n".join(["{", *lines, '  "layers": [', layers, "  ]", "}"]) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of to_json.

        Raises PlanError, naming the field, for what is damaged or of another version."""
        try:
            value: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"the plan is no JSON document: {error}; "
                "take an undamaged copy, or make the plan anew"
            ) from error
        # Before the other fields: those of another version may have other names.
        if isinstance(value, dict) and value.get("version", FORMAT_VERSION) != FORMAT_VERSION:
            raise PlanError(
                f"the plan: field 'version' is {value['version']!r}; this PipeShift reads version "
                f"{FORMAT_VERSION}: make the plan anew, or use the version that made it"
            )
        known = ("version", "schedule", "microbatches", "placement", "layers")
        document = Fields(value, "the plan", known)
        try:
            placement = Placement(document.integer_rows("placement"))
        except PartitionError as error:
            raise PlanError(f"the plan: field 'placement': {error}") from error
        return cls(
            layers=tuple(
                _layer(item, f"the plan: layer {index}")
                for index, item in enumerate(document.items("layers"))
            ),
            placement=placement,
            schedule=document.text("schedule"),
            microbatches=document.integer("microbatches"),
        )

    def save(self, path: str | Path) -> None:
        """Writes the plan beside ``path`` first, so that no reader ever finds half of it."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self.to_json())
            # mkstemp makes a private file; a plan is no secret.
            os.chmod(part, 0o644)
            os.replace(part, path)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a saved plan. Raises PlanError, naming the file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"the plan {str(path)!r} cannot be read: {error}") from error
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error


def _layer(item: object, where: str) -> LayerRecord:
    record = Fields(item, where, [field.name for field in fields(LayerRecord)])
    return LayerRecord(
        name=record.text("name"),
        parameter_bytes=record.integer("parameter_bytes"),
        forward_seconds=record.number("forward_seconds"),
        payload_bytes=record.integer("payload_bytes"),
    )


def _names(names: Sequence[str], most: int = 8) -> str:
    """The names, but not a screenful of them."""
    if not names:
        return "none"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
