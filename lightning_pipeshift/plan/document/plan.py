"""The plan: all decisions about a run, as one value.

It can be printed, compared, hashed, saved, read, edited by hand, and given to another run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

from lightning_pipeshift.documents import Document, as_json, read_document
from lightning_pipeshift.errors import PlanError, some_of
from lightning_pipeshift.files import write_text
from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.prediction import Prediction
from lightning_pipeshift.plan.cost.simulator import Costs, Timeline, clock, simulate
from lightning_pipeshift.plan.document.plan_checks import check_plan
from lightning_pipeshift.plan.document.text_plan import draw
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.inputs.saved_tensors import Swap
from lightning_pipeshift.plan.schedule.schedules import ASYNCHRONOUS, num_chunks

FORMAT_VERSION: Final = 1
"""Increased when an older version of the package can no longer read the files of this one."""

_CHECKSUM_DIGITS: Final = 16
_PREDICTED_DIGITS: Final = 4

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """The properties of a layer, per microbatch. Seconds are 0 until they are measured."""

    name: str
    parameter_bytes: int
    forward_seconds: float
    payload_bytes: int
    """The bytes across the boundary after the layer."""

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
    """The layers in call order, their owners, and the schedule.

    Args:
        layers: in call order.
        placement: the owners of the layers.
        schedule: by name.
        microbatches: the number of slices of a virtual machine's batch; 1 for an asynchronous
            schedule.
        recompute: for each virtual machine the layers that drop their saved tensors, and are
            recomputed before the backward; empty if there are none.
        swaps: for each virtual machine, saved tensors that are swapped between their forward and
            their backward, and those that recomputed layers keep; empty if there are none.
        optimizer_on_host: for each virtual machine the layers whose optimizer state is in host
            memory between two steps of the optimizer; empty if there are none.
        weights_on_host: for each virtual machine the layers whose weights are in host memory except
            around their forward, their backward and their update; empty if there are none.
        ranks: for each virtual machine its ranks in stage order; empty if any ranks may be used.
        kinds: the kind of each of these ranks' devices; empty if they are not required.
        batch_shares: how a global batch is divided; empty for equally.
        lane_shares: the part of all gradient bytes that each lane between virtual machines carries,
            the most urgent lane first; empty for equal parts.
        step_samples: of a step of all virtual machines together; 0 if not known.
        prediction: that of the simulator, if enough has been measured for it.

    Raises PlanError if these contradict each other."""

    layers: tuple[LayerRecord, ...]
    placement: Placement
    schedule: str
    microbatches: int
    recompute: tuple[tuple[int, ...], ...] = ()
    swaps: tuple[tuple[Swap, ...], ...] = ()
    optimizer_on_host: tuple[tuple[int, ...], ...] = ()
    weights_on_host: tuple[tuple[int, ...], ...] = ()
    ranks: tuple[tuple[int, ...], ...] = ()
    kinds: tuple[tuple[str, ...], ...] = ()
    batch_shares: tuple[float, ...] = ()
    lane_shares: tuple[float, ...] = ()
    step_samples: float = 0.0
    prediction: Prediction | None = None

    def __post_init__(self) -> None:
        check_plan(self)

    def __str__(self) -> str:
        return draw(self)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the pipeline does not drain between two batches."""
        return self.schedule in ASYNCHRONOUS

    @property
    def is_foreseen(self) -> bool:
        """Whether the simulator can time it: each stage has one range of layers, or as many as the
        schedule has chunks.
        """
        machines = range(self.placement.num_virtual_machines)
        return all(self._chunk_counts(vm) is not None for vm in machines)

    def _chunk_counts(self, vm: int) -> tuple[int, ...] | None:
        count = num_chunks(self.schedule, self.placement.num_stages(vm))
        return self.placement.chunk_counts(vm, count)

    # Properties of each stage.

    def stage_layers(self, vm: int) -> tuple[tuple[LayerRecord, ...], ...]:
        """The layers of each stage."""
        return tuple(
            tuple(self.layers[i] for i in self.placement.layers_of(vm, stage))
            for stage in range(self.placement.num_stages(vm))
        )

    def recomputed(self, vm: int) -> frozenset[int]:
        """The layers of a virtual machine that are recomputed before their backward."""
        return frozenset(self.recompute[vm]) if self.recompute else frozenset()

    def optimizer_on_host_of(self, vm: int) -> frozenset[int]:
        """The layers of a virtual machine whose optimizer state is in host memory."""
        return frozenset(self.optimizer_on_host[vm]) if self.optimizer_on_host else frozenset()

    def weights_on_host_of(self, vm: int) -> frozenset[int]:
        """The layers of a virtual machine whose weights wait in host memory."""
        return frozenset(self.weights_on_host[vm]) if self.weights_on_host else frozenset()

    def cut(self, vm: int) -> Cut:
        """A virtual machine's cut, for the planner."""
        on_host = self.optimizer_on_host_of(vm), self.weights_on_host_of(vm)
        counts = self._chunk_counts(vm)
        assert counts is not None, "see `is_foreseen`"
        return Cut(counts, self.recomputed(vm), *on_host)

    def swapped(self, vm: int) -> tuple[Swap, ...]:
        """The swaps of a virtual machine, and what recomputed layers keep, without the swaps that
        are impossible: a stage cannot take its own tensors.
        """
        swaps = self.swaps[vm] if self.swaps else ()
        return tuple(
            swap for swap in swaps if self.placement.stage_of(vm, swap.layer) not in swap.stages
        )

    def recomputations(self, vm: int) -> dict[int, frozenset[int]]:
        """The layers that are recomputed, with the numbers of the tensors that they do not drop."""
        found: dict[int, frozenset[int]] = dict.fromkeys(self.recomputed(vm), frozenset())
        for swap in self.swapped(vm):
            if swap.layer in found:
                found[swap.layer] |= frozenset(swap.tensors)
        return found

    def stage_forward_seconds(self, vm: int) -> tuple[float, ...]:
        """The seconds of one microbatch's forward on each stage."""
        if self.prediction is not None:
            seconds = self.prediction.costs[vm].forward_seconds
            num_stages = self.placement.num_stages(vm)
            return tuple(math.fsum(seconds[at::num_stages]) for at in range(num_stages))
        return tuple(
            math.fsum(layer.forward_seconds for layer in stage) for stage in self.stage_layers(vm)
        )

    def stage_parameter_bytes(self, vm: int) -> tuple[int, ...]:
        """The bytes of the parameters that each stage holds."""
        return tuple(
            sum(layer.parameter_bytes for layer in stage) for stage in self.stage_layers(vm)
        )

    def stage_payload_bytes(self, vm: int) -> tuple[int, ...]:
        """The bytes that each stage but the last sends per microbatch: 0 before the first layer."""
        if self.placement.owners:
            owners, sent = self.placement.owners[vm], [0] * self.placement.num_stages(vm)
            for layer, (owner, after) in zip(self.layers, pairwise(owners), strict=False):
                sent[owner] += layer.payload_bytes if after != owner else 0
            return tuple(sent[:-1])
        bounds = self.placement.bounds(vm)[1:]
        return tuple(self.layers[bound - 1].payload_bytes if bound else 0 for bound in bounds)

    @property
    def is_measured(self) -> bool:
        """Whether any layer's time is known, for a prediction."""
        if self.prediction is not None:
            return any(any(costs.forward_seconds) for costs in self.prediction.costs)
        return any(layer.forward_seconds for layer in self.layers)

    def timeline(self, vm: int = 0) -> Timeline:
        """The predicted timeline of a virtual machine's step, or of an asynchronous pipeline from
        filling to draining.

        Without a prediction the backward is counted as twice the forward (two matrix products for
        one), and transfers as free, because the plan then has no links.
        """
        if self.prediction is not None:
            costs = self.prediction.costs[vm]
            again = costs.recomputing_stages
            return simulate(clock(self.schedule, costs.num_stages, self.microbatches, again), costs)
        counts = self._chunk_counts(vm)
        if counts is None:
            # Drawn as if the chunks of a stage took equal time.
            seconds = self.stage_forward_seconds(vm)
            count = num_chunks(self.schedule, len(seconds))
            forward = tuple(each / count for each in seconds) * count
        else:
            ends = pairwise(accumulate(counts, initial=0))
            forward = tuple(
                math.fsum(layer.forward_seconds for layer in self.layers[begin:end])
                for begin, end in ends
            )
        free = (0.0,) * (len(forward) - 1)
        costs = Costs(
            forward_seconds=forward,
            backward_seconds=tuple(2 * seconds for seconds in forward),
            payload_seconds=free,
            gradient_seconds=free,
        )
        return simulate(clock(self.schedule, len(forward), self.microbatches), costs)

    # Another plan.

    def with_placement(self, placement: Placement) -> Plan:
        """The same plan with other owners, without the prediction for the present ones."""
        return replace(self, placement=placement, prediction=None)

    def is_like(self, other: Plan) -> bool:
        """Whether all ranks would act equally under the other plan."""
        names = ("placement", "recompute", "swaps", "optimizer_on_host", "weights_on_host", "ranks")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def require_layers(self, names: Sequence[str]) -> None:
        """Raises PlanError unless the plan was made for these layers in this order."""
        planned = [layer.name for layer in self.layers]
        if planned == list(names):
            return
        missing = [name for name in names if name not in planned]
        unexpected = [name for name in planned if name not in names]
        if missing or unexpected:
            lacks, has = (some_of([*map(repr, n)]) if n else "none" for n in (missing, unexpected))
            raise PlanError(
                f"the plan was made for another model: missing in the plan {lacks}; "
                f"unexpected in the plan {has}. "
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
        """The plan as a JSON document, one layer per line, to be read, edited and diffed.

        The prediction is rounded, and contains a checksum of the plan for which it was made.
        """
        document = _DOCUMENT.entries(self)
        if not self.placement.owners:
            document["placement"] = self.placement.counts
        layers = document.pop("layers")
        if document.pop("prediction", None):
            assert self.prediction is not None
            found = _rounded(asdict(self.prediction))
            costs = found.pop("costs")
            of = _checksum({**document, "layers": layers})
            document["prediction"] = {"of": of, **found, "costs": costs}
        return as_json({**document, "layers": layers}, ("layers", "prediction", "costs"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of to_json. If the plan was edited since, its prediction is dropped.

        Raises PlanError, naming the field, for a document that is damaged or of another version."""
        value = _DOCUMENT.parse(text)
        if isinstance(value, dict):
            rest = {name: value[name] for name in value if name != "prediction"}
            if isinstance(prediction := value.get("prediction"), dict):
                if prediction.pop("of", "") in ("", _checksum(rest)):
                    rest["prediction"] = prediction
                else:
                    log.warning(
                        "PipeShift: the plan was edited after its prediction was made, so the "
                        "prediction is ignored."
                    )
            value = rest
            if not isinstance(value.get("placement", {}), dict):
                value["placement"] = {"counts": value["placement"]}
        return _DOCUMENT.read(value)

    def save(self, path: str | Path) -> None:
        """Writes to a temporary file first, so that no reader ever sees a partial plan."""
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a saved plan. Raises PlanError, naming the file."""
        text = read_document(path, "the plan")
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error


_DOCUMENT: Final = Document(Plan, "the plan", "make the plan again", FORMAT_VERSION)


def _checksum(plan: dict[str, Any]) -> str:
    """Identifies a plan's entries except the prediction, regardless of the order of its fields."""
    text = json.dumps(plan, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_CHECKSUM_DIGITS]


def _rounded(value: Any) -> Any:
    """The numbers of a nested value, rounded to the digits that a prediction justifies."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_rounded(item) for item in value]
    rounded = float(f"{value:.{_PREDICTED_DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded
