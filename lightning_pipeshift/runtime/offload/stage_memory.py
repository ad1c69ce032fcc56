"""One stage's memory for saved tensors: its budget, its offload targets, and the blocks of other
stages that it keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch.optim import Optimizer

from lightning_pipeshift.devices.buffers import BufferPool
from lightning_pipeshift.devices.shared_memory import address_here
from lightning_pipeshift.devices.streams import is_asynchronous, synchronize
from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.model.saved.codec import codec_named
from lightning_pipeshift.plan.cost.layer_memory import passing_bytes
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.policies import Planned, Policy
from lightning_pipeshift.plan.inputs.saved_tensors import Swap
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.offload.activation_store import ActivationStore, StagePolicy
from lightning_pipeshift.runtime.offload.copy_costs import copy_costs
from lightning_pipeshift.runtime.offload.copying import copier_of, nothing
from lightning_pipeshift.runtime.offload.lending import Borrower, Lender, RemoteTarget
from lightning_pipeshift.runtime.offload.optimizer_state import Layers, OptimizerStates
from lightning_pipeshift.runtime.offload.targets import LocalTarget, OffloadTarget
from lightning_pipeshift.runtime.offload.waiting_weights import WaitingWeights
from lightning_pipeshift.text import ceil_bytes_text

MARGIN: Final = 0.1
"""The part of a device's free memory that is reserved for uncounted uses: kernels' workspaces, and
gaps between allocations."""

_HOST_PART: Final = 0.5
"""How much of a host's free memory swapped tensors may take, all of its ranks together."""

_TRIED_BYTES: Final = 1 << 24
_TRIES: Final = 4


@dataclass(frozen=True)
class MemoryRequest:
    """The user's settings.

    Args:
        budget_bytes: of each device; ``None``: its memory, less a margin.
        host_bytes: of a host's memory, for each rank; ``None``: a part of the free memory.
        policy: decides what happens to saved tensors.
        compression: of swapped tensors: ``"lossless"``, ``"8bit"`` or ``None``.
    """

    budget_bytes: float | None = None
    host_bytes: float | None = None
    policy: Policy = field(default_factory=Planned)
    compression: str | None = None


@dataclass(frozen=True)
class RankMemory:
    """One rank's memory.

    Args:
        budget_bytes: of its device, for everything.
        host_bytes: of its host, for swapped tensors.
        host_bandwidth: of copies to the host and back, in bytes per second.
        copy_seconds: of the compute's processor, for each copy of a tensor.
        copy_seconds_per_byte: likewise, for each byte.
    """

    budget_bytes: int
    host_bytes: int
    host_bandwidth: float
    copy_seconds: float = 0.0
    copy_seconds_per_byte: float = 0.0


class StageMemory:
    """Manages memory compression on one stage.

    Args:
        request: the user's settings.
        channels: this stage's connections.
        names: of the layers.
        threads: their threads wait for other stages.
        fail_from_thread: called in a thread that fails.
        say: shows a message to the user after the step.
    """

    def __init__(
        self,
        request: MemoryRequest,
        channels: Channels,
        names: Sequence[str],
        threads: Threads,
        fail_from_thread: Callable[[BaseException], None],
        say: Callable[[str], None],
    ) -> None:
        self.request = request
        self.store = ActivationStore(StagePolicy(float("inf")), say)
        self._channels = channels
        self._names = tuple(names)
        self._codec = codec_named(request.compression)
        device, address = channels.device, address_here(channels.device)
        self._copier = copier_of(device, fail_from_thread)
        self._say = say
        pinned_for = device if is_asynchronous(device) else None
        self._host = BufferPool(torch.device("cpu"), 0.0, pinned_for, self._copier.finish, say)
        self._to_host = LocalTarget(self._host, self._copier, self._codec)
        self._lender = Lender(channels.swaps, device, threads, self.store.lend, address)
        self._borrow_from = partial(
            Borrower,
            lanes=channels.swaps,
            on_error=fail_from_thread,
            device=device,
            address=address,
            say=say,
        )
        self.weights = WaitingWeights(self._host, self._copier)
        self._states = OptimizerStates(
            self._host,
            self._copier,
            device,
            self._update_room,
            self.weights,
        )
        self._working_bytes = 0.0
        self._borrowers: dict[int, Borrower] = {}
        self.memory: RankMemory | None = None
        """This rank's memory, once it has been measured."""

    def _update_room(self) -> float:
        """The memory for what comes to the device in an update: no layer runs then."""
        free = self.weights.free_bytes + self._working_bytes
        return self.store.budget_bytes - self.store.held_bytes + free

    def measure(self, device_bytes: float, host_bytes: float, num_sharers: int) -> RankMemory:
        """Measures this rank's memory.

        Args:
            device_bytes: the free memory of its device.
            host_bytes: the free memory of its host.
            num_sharers: how many ranks share the host's memory.
        """
        budget, on_host = self.request.budget_bytes, self.request.host_bytes
        if budget is None:
            budget = (1 - MARGIN) * device_bytes
        if on_host is None:
            on_host = _HOST_PART * host_bytes / num_sharers
        self._host.limit_bytes = on_host
        costs = (0.0, 0.0)
        if rate := self._bandwidth() if on_host else 0.0:
            costs = copy_costs(self._channels.device, self._to_host)
            self._host.peak_bytes = 0
        self.memory = RankMemory(int(budget), int(on_host), rate, *costs)
        return self.memory

    def _bandwidth(self) -> float:
        """Measures the bandwidth to the host and back, the lower of the two, with copies in both
        directions at once, as in a step. All ranks of a host measure at the same time.
        """
        size = int(min(_TRIED_BYTES, self._host.limit_bytes // 2))
        buffers = [self._host.take(size) for _ in range(2) if size and self._host.claim(size)]
        if len(buffers) < 2:
            return 0.0
        device, (to, source) = self._channels.device, buffers
        tensors = [torch.zeros_like(buffer, device=device) for buffer in buffers]
        best = float("inf")
        for _ in range(_TRIES):
            synchronize(device)
            begun = time.perf_counter()
            out = self._copier.out(partial(to.copy_, tensors[0], non_blocking=True), nothing)
            back = self._copier.back(partial(tensors[1].copy_, source, non_blocking=True), nothing)
            out.wait()
            back.wait()
            synchronize(device)
            best = min(best, time.perf_counter() - begun)
        for buffer in buffers:
            self._host.give(buffer)
        self._host.peak_bytes = 0
        return size / best

    def follow(
        self,
        plan: Plan,
        vm: int,
        taken_bytes: float,
        working_bytes: float,
        expected_bytes: Mapping[int, int],
    ) -> None:
        """Applies a plan from now on. Every stage calls this, with the same plan.

        Args:
            plan: the plan.
            vm: this stage's virtual machine.
            taken_bytes: what the device holds besides saved tensors and messages between stages.
            working_bytes: the part of it that a layer takes while it runs.
            expected_bytes: the memory that each layer is expected to save for a microbatch.
        """
        self._working_bytes = working_bytes
        stage = self._channels.stage
        own = plan.placement.layers_of(vm, stage)
        swaps = [swap for swap in plan.swapped(vm) if not swap.stays]
        for swap in swaps:
            if stage in swap.stages:
                self._lender.serve(plan.placement.stage_of(vm, swap.layer))
        budget, device_bytes = float("inf"), None
        if self.memory is not None:
            device_bytes = self.memory.budget_bytes
            payloads = (0, *plan.stage_payload_bytes(vm), 0)
            budget = device_bytes - passing_bytes(*payloads[stage : stage + 2]) - taken_bytes
        places: dict[tuple[int, int], tuple[OffloadTarget, ...]] = {}
        for swap in swaps:
            if swap.layer in own:
                target = self._target(swap)
                places.update({(swap.layer, number): (target,) for number in swap.tensors})
        self.store.follow(
            StagePolicy(
                budget,
                places,
                self._to_host if self._host.limit_bytes else None,
                {layer: expected_bytes.get(layer, 0) for layer in own},
                self.request.budget_bytes is not None,
                self._names,
                f"stage {stage} of virtual machine {vm}",
                device_bytes,
            )
        )

    def take_steps_of(self, optimizers: Iterable[Optimizer]) -> None:
        """Makes steps of these optimizers layer by layer, if a plan says so."""
        for optimizer in optimizers:
            self._states.take_steps_of(optimizer)

    def follow_with_state(
        self,
        plan: Plan,
        vm: int,
        optimizers: Iterable[Optimizer],
        own: Layers,
        only_theirs: Layers,
        window_bytes: float,
        state_bytes: Mapping[int, int],
        state_stays: str,
    ) -> None:
        """Moves optimizer state and weights as a plan says, after :meth:`follow`.

        Args:
            plan: the plan.
            vm: this stage's virtual machine.
            optimizers: those of the run.
            own: the parameters of this stage's layers.
            only_theirs: those of them that nothing else uses.
            window_bytes: the part of the device's memory for weights that come and go.
            state_bytes: of each layer.
            state_stays: why no state can move, in words; empty if it can.

        Raises:
            PlanError: the plan moves what cannot move.
        """
        for name, what in (
            ("optimizer_on_host", "optimizer state in host memory between two steps"),
            ("weights_on_host", "the weights of layers that wait in host memory"),
        ):
            if state_stays and any(getattr(plan, name)):
                raise PlanError(
                    f"The plan has {what} (its field {name!r}), which is not possible:"
                    f" {state_stays}. Remove the field, or use an optimizer that updates each"
                    " parameter by itself."
                )
        waiting = plan.weights_on_host_of(vm)
        self.weights.follow(only_theirs, waiting, window_bytes, self._names)
        planned = sum(p.nbytes for n in waiting & own.keys() for p in only_theirs[n])
        if planned > self.weights.host_bytes:
            self._say(
                f"{ceil_bytes_text(planned - self.weights.host_bytes)} of weights that the plan has"
                " in host memory stay on the device, as their layer is compiled (`torch.compile`),"
                " or something else refers to their memory (an alias, a NumPy array, another"
                " process): the budget may be exceeded by as much."
            )
        moved = plan.optimizer_on_host_of(vm) & own.keys()
        self._states.follow(optimizers, own, moved, state_bytes, self._names)

    def _target(self, swap: Swap) -> OffloadTarget:
        """The offload target for a swap's tensors."""
        if not swap.stages:
            return self._to_host
        for stage in swap.stages:
            if stage not in self._borrowers:
                self._borrowers[stage] = self._borrow_from(stage)
        borrowers = {stage: self._borrowers[stage] for stage in swap.stages}
        return RemoteTarget(borrowers, swap.shares, self._codec)

    def figures(self) -> dict[str, float]:
        """Statistics of the store, for users and tests."""
        traffic, states = self.store.traffic, self._states.traffic
        return {
            "peak_bytes": traffic.peak_bytes,
            "budget_bytes": self.store.budget_bytes,
            "moved_bytes": traffic.moved_bytes,
            "waited_seconds": traffic.waited_seconds,
            "num_evicted": traffic.num_evicted,
            "host_bytes": self._host.allocated_bytes,
            "host_peak_bytes": self._host.peak_bytes,
            "optimizer_host_bytes": self._states.homes.num_bytes,
            "optimizer_peak_bytes": states.peak_bytes,
            "optimizer_moved_bytes": states.moved_bytes,
            "weights_host_bytes": self.weights.host_bytes,
            "weights_peak_bytes": self.weights.traffic.peak_bytes,
            "weights_moved_bytes": self.weights.traffic.moved_bytes,
        }

    def close(self) -> None:
        """Called at the end of the run: frees the memory, and ends the offloading between
        stages.
        """
        self.weights.leave_all()
        self._states.close()
        for borrower in self._borrowers.values():
            borrower.close()
        self._borrowers.clear()
        self._copier.close()
        self._host.clear()
