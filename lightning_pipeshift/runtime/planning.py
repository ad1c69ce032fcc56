"""Makes the plan of a run from what was asked for and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_pipeshift.errors import LayerError, PlanError
from lightning_pipeshift.model.gate import Gate
from lightning_pipeshift.plan.flow import Flow
from lightning_pipeshift.plan.partition import PartitionSpec, resolve
from lightning_pipeshift.plan.placement import Placement
from lightning_pipeshift.plan.plan import LayerRecord, Plan


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Args:
        microbatches: slices of a batch; ``"auto"``: four for each stage.
        schedule: the name of the training schedule.
        partition: see :func:`lightning_pipeshift.plan.partition.resolve`.
        plan: a plan to use instead of all that.
        seed: what all random streams depend on.
        gradient_aggregation: ``"ring"``, ``"allreduce"`` or ``"auto"``.
    """

    microbatches: int | str
    schedule: str
    partition: PartitionSpec
    plan: Plan | None
    seed: int
    gradient_aggregation: str = "auto"

    def num_microbatches(self, stages_per_vm: Sequence[int]) -> int:
        """Into how many slices a virtual machine's training batch is cut."""
        if self.plan is not None:
            return self.plan.microbatches
        if isinstance(self.microbatches, int):
            return self.microbatches
        # Enough that filling and draining costs a fifth at most, with slices that are still worth
        # computing.
        return 4 * max(stages_per_vm) if max(stages_per_vm) > 1 else 1

    def check(self, gates: Sequence[Gate], stages_per_vm: tuple[int, ...]) -> None:
        """Raises PartitionError or PlanError where the model's layers and the stages do not fit."""
        if self.plan is not None:
            self.plan.require_layers([gate.name for gate in gates])
            planned = tuple(map(len, self.plan.placement.counts))
            if planned != stages_per_vm:
                raise PlanError(
                    f"The plan is for {_stages(planned)}, and this run has"
                    f" {_stages(stages_per_vm)}. Use `Trainer(devices={sum(planned)})`, or make a"
                    " plan for the stages there are."
                )
        else:
            resolve(self.partition, num_layers=len(gates), stages_per_vm=stages_per_vm)

    def aggregation(
        self, backend: str, num_owner_sets: int, placement: Placement
    ) -> tuple[str, str]:
        """``"ring"`` or ``"allreduce"``: how gradients are summed over virtual machines; and why.

        Args:
            backend: that of the devices.
            num_owner_sets: how many different sets of owners the layers have.
            placement: who owns what.
        """
        if self.gradient_aggregation != "auto":
            return self.gradient_aggregation, "you asked for it"
        # NCCL's own collectives are rings already, inside of the GPU; gloo's wait for each other in
        # one order.
        kind = "ring" if backend == "gloo" else "allreduce"
        why = f"the backend is {backend}"
        if num_owner_sets > max(map(len, placement.counts)):
            # Collectives would need a process group for each set, and keep one order in all of
            # them; rings need neither.
            kind = "ring"
            why += f", and layers have {num_owner_sets} different sets of owners"
        return kind, why


def make_plan(
    settings: Settings,
    gates: Sequence[Gate],
    flow: Flow,
    seconds: dict[int, float],
    stages_per_vm: tuple[int, ...],
) -> Plan:
    """The plan for a model.

    Args:
        settings: what the user asked for.
        gates: the layers' gates, in call order.
        flow: of one microbatch.
        seconds: the measured forward time of each layer that could be measured.
        stages_per_vm: how many stages each virtual machine has.
    """
    if settings.plan is not None:
        return settings.plan
    payload_bytes = [flow.payload_bytes(boundary) for boundary in range(len(gates) + 1)]
    parameter_bytes = [
        sum(p.numel() * p.element_size() for p in gate.layer.parameters()) for gate in gates
    ]
    estimated = _estimated(seconds, parameter_bytes)
    return Plan(
        layers=tuple(
            LayerRecord(gate.name, parameter_bytes[i], estimated[i], payload_bytes[i + 1])
            for i, gate in enumerate(gates)
        ),
        placement=resolve(
            settings.partition,
            num_layers=len(gates),
            stages_per_vm=stages_per_vm,
            seconds=estimated if any(estimated) else None,
            payload_bytes=payload_bytes,
        ),
        schedule=settings.schedule,
        microbatches=settings.num_microbatches(stages_per_vm),
    )


def _stages(stages_per_vm: Sequence[int]) -> str:
    if len(stages_per_vm) == 1:
        return f"{stages_per_vm[0]} stages"
    return f"virtual machines of {', '.join(map(str, stages_per_vm))} stages"


def check_order(flow: Flow, placement: Placement, vm: int, gates: Sequence[Gate]) -> None:
    """Raises LayerError where a step calls a layer of an earlier stage after one of a later."""
    for before, after in zip(flow.calls, flow.calls[1:], strict=False):
        first = placement.stage_of(vm, before.layer)
        second = placement.stage_of(vm, after.layer)
        if second < first:
            raise LayerError(
                f"The layer {gates[after.layer].name!r} (stage {second}) is called after"
                f" {gates[before.layer].name!r} (stage {first}): this step calls the layers in"
                " another order than the one that the plan was made for. Call them in one order in"
                " training and evaluation, or choose a `partition` that has both in one stage."
            )


def _estimated(seconds: dict[int, float], parameter_bytes: Sequence[int]) -> list[float]:
    """Measured seconds; where there are none, seconds in proportion to the parameters."""
    measured = sum(seconds.values())
    bytes_measured = sum(parameter_bytes[layer] for layer in seconds)
    per_byte = measured / bytes_measured if measured and bytes_measured else 0.0
    return [seconds.get(layer, per_byte * size) for layer, size in enumerate(parameter_bytes)]
