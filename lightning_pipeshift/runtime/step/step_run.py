"""Runs one stage's actions of one step, in the order of the schedule's row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeshift.errors import BatchError, BudgetError, LayerError
from lightning_pipeshift.model.execution.finite import finite_check
from lightning_pipeshift.model.execution.stage_pass import StagePass
from lightning_pipeshift.model.execution.timing import Timer
from lightning_pipeshift.model.execution.transfer import Fetch
from lightning_pipeshift.model.gates.gate import Switch
from lightning_pipeshift.model.parameters.gradient_box import SharedParameters
from lightning_pipeshift.model.saved.saved_tensors import (
    Observer,
    SavedTable,
    addresses_of,
    resident_in,
)
from lightning_pipeshift.model.trace.placeholder import dtype_named
from lightning_pipeshift.model.trace.trace import Payload, Trace
from lightning_pipeshift.model.user_state.logs import LoggedValue, LogRecorder
from lightning_pipeshift.model.user_state.random_streams import RandomStreams
from lightning_pipeshift.plan.cost.memory_model import SENDS_UNDER_WAY
from lightning_pipeshift.plan.inputs.flow import Value
from lightning_pipeshift.plan.schedule.actions import Action, Kind, Row
from lightning_pipeshift.runtime.comm.channels import Channels, Direction, Layout, Receipt
from lightning_pipeshift.runtime.comm.lane import Sent
from lightning_pipeshift.runtime.offload.activation_store import ActivationStore
from lightning_pipeshift.runtime.offload.out_of_memory import explained

UserStep = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Microbatch:
    """One microbatch of a step.

    Args:
        batch: the slice.
        size: its number of samples.
        share: its part of the batch's samples, 0 to 1.
        trace: the trace of a slice of this shape; ``None`` if one stage runs the step without
            tracing it.
        layers: the layers that this stage owns for it.
        key: its random streams depend on it.
        recompute: the layers that are recomputed before the backward.
    """

    batch: Any
    size: int
    share: float
    trace: Trace | None
    layers: range
    key: tuple[int | str, ...]
    recompute: frozenset[int] = frozenset()

    def payload(self, boundary: int) -> Payload:
        """The values that cross a boundary, and how to receive them."""
        return self.trace.payload(boundary) if self.trace is not None else []

    def gradients(self, boundary: int) -> Payload:
        """The values that cross a boundary and whose gradients come back."""
        return self.trace.gradients(boundary) if self.trace is not None else []


class Denominators(NamedTuple):
    """The denominators of the losses of all virtual machines: powers of two, so that the division
    is exact, and their choice has no effect on the result.

    Args:
        sizes: for microbatches weighted by their number of samples.
        weights: for microbatches weighted by the weight that ``training_step`` returns.
    """

    sizes: float
    weights: float


@dataclass
class Outcome:
    """The last stage's result of one microbatch. On a GPU its weight is a float64 tensor: to read
    it, the program would have to wait for the forward.
    """

    result: Any
    logs: list[LoggedValue]
    loss: Tensor | None = None
    weight: float | Tensor | None = None


Profile = Callable[[str], AbstractContextManager[Any]]
"""Makes a context for a named action, as Lightning's ``Profiler.profile`` does."""

WAIT: Final = "[PipeShift] wait for other stages"


class StepRun:
    """The state of one step on one stage, and one method for each kind of action.

    Args:
        root: the LightningModule.
        step: runs the user's step on a module and a slice, in the user's precision.
        microbatches: the step's microbatches.
        channels: the stage's connections.
        switch: the gates' switch.
        streams: the random generators.
        shared: the shared parameters held here.
        recorder: replaces ``LightningModule.log``.
        loss_scale: a factor of every loss, applied before its backward.
        denominators: divide the losses while their total weight is not known yet; ``None`` to
            derive them from this step's own numbers.
        on_first_outcome: called on the last stage after its first forward.
        before_last_backward: called before the stage's last backward.
        timers: measure the layers and actions of some microbatches, if measurements are needed.
        observer: records the tensors that the first microbatch's layers save, if needed.
        store: keeps saved tensors within a budget, if there is one.
        before_layer: called before each of the stage's layers, if layers may still be on their way.
        on_last_outcome: called on the last stage after its last forward; starts to copy the
            outcomes to the host.
        resolve_state: replaces placeholders that user code has kept by values.
        profile: see :data:`Profile`.
    """

    def __init__(
        self,
        root: nn.Module,
        step: UserStep,
        microbatches: Sequence[Microbatch],
        channels: Channels,
        switch: Switch,
        streams: RandomStreams,
        shared: SharedParameters,
        recorder: LogRecorder,
        loss_scale: float | Tensor = 1.0,
        denominators: Denominators | None = None,
        on_first_outcome: Callable[[Outcome], Denominators] | None = None,
        before_last_backward: Callable[[], None] | None = None,
        timers: Mapping[int, Timer] = MappingProxyType({}),
        observer: Observer | None = None,
        store: ActivationStore | None = None,
        before_layer: Callable[[int], None] | None = None,
        on_last_outcome: Callable[[Sequence[Outcome]], Fetch] | None = None,
        resolve_state: Callable[[Callable[[Any], Any]], None] | None = None,
        profile: Profile = nullcontext,
    ) -> None:
        self._profile = profile
        self._resolve_state = resolve_state
        self.outcomes: list[Outcome] = []
        self.order: list[int] = []
        """The layers in the order in which the last forward called them, if the step is not traced.
        """
        self._root = root
        self._step = step
        self._microbatches = microbatches
        self._channels = channels
        self._switch = switch
        self._streams = streams
        self._shared = shared
        self._recorder = recorder
        self._loss_scale = loss_scale
        self._is_last = channels.stage == channels.num_stages - 1
        self._passes: dict[int, StagePass] = {}
        self._payloads: dict[int, list[Receipt]] = {}
        self._gradients: dict[int, list[Receipt]] = {}
        self._outgoing: dict[int, dict[Value, Tensor]] = {}
        self._sent: dict[tuple[Kind, int], Sent] = {}
        self._denominators = denominators
        self._on_first_outcome = on_first_outcome
        self._on_last_outcome = on_last_outcome
        self._fetch = Fetch(None)
        self._before_last_backward = before_last_backward
        self._num_backwards = 0
        self._trains = False
        self._timers = timers
        self._observer = observer
        self._store = store
        self._before_layer = before_layer
        self._under_way: StagePass | None = None
        # The time until which the current action has waited for other stages.
        self._waited: Any = None
        # The expected sum of user-given weights, by which losses are divided meanwhile: see
        # `counted`.
        self._expected_weight: float | Tensor | None = None

    def run(self, row: Row) -> None:
        """Executes the stage's actions in order."""
        self._trains = any(action.kind is Kind.BACKWARD for action in row)
        with self._streams.switched(*self._microbatches[0].key):
            if self._store is not None:
                self._store.begin_step(row)
            for place, action in enumerate(row):
                timer = self._timers.get(action.microbatch)
                if self._store is not None:
                    self._store.begin_action(place, action)
                try:
                    if timer is None:
                        _ACTIONS[action.kind](self, action.microbatch)
                    else:
                        self._timed(timer, action)
                except torch.OutOfMemoryError as error:
                    raise self._explained(error, action) from error
                if self._store is not None:
                    self._store.end_action(action)
                self._channels.num_done += 1

    def _explained(self, error: torch.OutOfMemoryError, action: Action) -> BudgetError:
        device = self._channels.device
        total = 0.0
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
        return explained(
            error,
            f"stage {self._channels.stage}",
            str(action),
            self._under_way,
            self._store.device_bytes if self._store is not None else None,
            total,
        )

    def _timed(self, timer: Timer, action: Action) -> None:
        begin, self._waited = timer.now(), None
        _ACTIONS[action.kind](self, action.microbatch)
        # An action first waits for other stages; that time is not part of its work.
        start = self._waited if self._waited is not None else begin
        timer.add(action.kind.name, -1, start, timer.now())

    def _has_waited(self, number: int) -> None:
        timer = self._timers.get(number)
        if timer is not None:
            self._waited = timer.now()

    def settle(self) -> None:
        """Waits for all sends in progress."""
        for sent in self._sent.values():
            sent.wait()
        self._sent.clear()

    def unsettled(self) -> list[Sent]:
        """The sends in progress, for a caller that waits later."""
        return list(self._sent.values())

    def _layout(self, number: int, boundary: int, direction: Direction, left: int) -> Layout:
        """The memory layout of the values that cross a boundary, agreed on by each pair of
        neighbours.

        Args:
            number: the microbatch.
            boundary: the layer after it.
            direction: that of the tensors.
            left: the lower stage of the two.
        """
        trace = self._microbatches[number].trace
        assert trace is not None
        layouts = trace.layouts
        layout: Layout = layouts.setdefault((boundary, left, direction), Layout())
        return layout

    # --- forward ---

    def receive_payload(self, number: int) -> None:
        """Posts the receive of the payload before this stage's layers."""
        microbatch = self._microbatches[number]
        specs = [spec for _, spec in microbatch.payload(microbatch.layers.start)]
        self._payloads[number] = self._channels.post_receive(
            specs,
            Direction.PAYLOAD,
            self._layout(
                number, microbatch.layers.start, Direction.PAYLOAD, self._channels.stage - 1
            ),
        )

    def forward(self, number: int) -> None:
        """Runs this stage's part of the user's step."""
        microbatch = self._microbatches[number]
        values = [value for value, _ in microbatch.payload(microbatch.layers.start)]
        with self._profile(WAIT):
            received = [receipt.wait() for receipt in self._payloads.pop(number, [])]
        self._has_waited(number)
        self._streams.begin(*microbatch.key)
        current = StagePass(
            trace=microbatch.trace,
            layers=microbatch.layers,
            is_last=self._is_last,
            received=dict(zip(values, received, strict=True)),
            device=self._channels.device,
            streams=self._streams,
            key=microbatch.key,
            shared=self._shared,
            recompute=microbatch.recompute,
            timer=self._timers.get(number),
            table=self._table(number),
            memory=self._store,
            observer=self._observer if number == 0 else None,
            resident=self._resident,
            before_layer=self._before_layer,
            resolve_state=self._resolve_state,
            finite=finite_check(microbatch.key, self._channels.stage),
        )
        self._switch.current = self._under_way = current
        self._recorder.current = current
        # From now on only the model itself keeps parts of the payload alive.
        received.clear()
        try:
            with self._profile("[PipeShift] forward"):
                current.run(lambda: self._step(self._root, microbatch.batch))
        finally:
            self._switch.current = None
            self._recorder.current = None
        logs = self._recorder.take()
        self._passes[number] = current
        self.order = current.order
        if self._is_last and current.finite is not None and torch.is_grad_enabled():
            current.finite.loss(current.result)
        if self._is_last:
            self.outcomes.append(self._outcome(current.result, logs))
            current.result = None
            if self._on_first_outcome is not None and len(self.outcomes) == 1:
                self._denominators = self._on_first_outcome(self.outcomes[0])
            if self._on_last_outcome is not None and len(self.outcomes) == len(self._microbatches):
                self._fetch = self._on_last_outcome(self.outcomes)

    @cached_property
    def _resident(self) -> frozenset[int]:
        """Addresses of the model's own tensors, if saved tensors are counted or recorded."""
        return resident_in(self._root) if self._looks_at_saved else frozenset()

    @property
    def _looks_at_saved(self) -> bool:
        return self._store is not None or self._observer is not None

    def _table(self, number: int) -> SavedTable:
        if not self._looks_at_saved or not torch.is_grad_enabled():
            return SavedTable()
        held = addresses_of(self._microbatches[number].batch)
        return SavedTable(number, self._store, held)

    def _outcome(self, result: Any, logs: list[LoggedValue]) -> Outcome:
        if not torch.is_grad_enabled():
            return Outcome(result, logs)
        loss, weight = result, None
        if isinstance(result, Mapping):
            if "loss" not in result:
                raise LayerError(
                    "`training_step` returned a dict without a 'loss' (it has"
                    f" {sorted(map(str, result))}). Return the loss itself, a dict with the key"
                    " 'loss', or None to leave the microbatch out."
                )
            loss, weight = result["loss"], result.get("weight")
        if loss is not None and (not isinstance(loss, Tensor) or loss.numel() != 1):
            raise LayerError(
                f"`training_step` returned {type(loss).__name__} as its loss; it has to be a tensor"
                " with one element, or None to leave the microbatch out."
            )
        outcome = Outcome(result, logs, loss, None if weight is None else self._number(weight))
        if outcome.loss is not None and self.outcomes:
            others = [o for o in self.outcomes if o.loss is not None]
            if others and (others[0].weight is None) != (outcome.weight is None):
                raise BatchError(
                    "`training_step` returned a 'weight' for some microbatches of a batch and none"
                    " for others. Return it for every microbatch, or never."
                )
        return outcome

    def _number(self, value: Any) -> float | Tensor:
        device = self._channels.device
        if device.type == "cpu":
            return float(value)
        if isinstance(value, Tensor):
            there: Tensor = value.detach().to(device, torch.float64, non_blocking=True)
            return there.reshape(())
        return torch.full((), float(value), dtype=torch.float64, device=device)

    def send_payload(self, number: int) -> None:
        """Sends the payload after this stage's layers."""
        microbatch, current = self._microbatches[number], self._passes[number]
        payload = microbatch.payload(microbatch.layers.stop)
        for value, _ in payload:
            if value not in current.outgoing:
                raise LayerError(
                    "The step did not produce a value that the next stage needs (layer "
                    f"{value.layer}): it ended early. The step must call the same layers for "
                    "every batch."
                )
        tensors = [current.outgoing.pop(value) for value, _ in payload]
        specs = [spec for _, spec in payload]
        if not self._trains:
            del self._passes[number]
            self._wait_for_earlier(Kind.SEND_PAYLOAD)
        elif self._store is not None:
            self._store.hold(_payload_bytes(microbatch))
        self._sent[Kind.SEND_PAYLOAD, number] = self._channels.send(
            tensors,
            specs,
            Direction.PAYLOAD,
            self._layout(number, microbatch.layers.stop, Direction.PAYLOAD, self._channels.stage),
        )

    # --- backward ---

    def recompute(self, number: int) -> None:
        """Recomputes the layers that have dropped their saved tensors."""
        current = self._switch.current = self._passes[number]
        try:
            with self._profile("[PipeShift] recompute"):
                current.recompute_layers()
        finally:
            self._switch.current = None

    def receive_gradient(self, number: int) -> None:
        """Posts the receive of the gradients of the payload that was sent."""
        microbatch = self._microbatches[number]
        specs = [spec for _, spec in microbatch.gradients(microbatch.layers.stop)]
        self._gradients[number] = self._channels.post_receive(
            specs,
            Direction.GRADIENT,
            self._layout(number, microbatch.layers.stop, Direction.GRADIENT, self._channels.stage),
        )

    def backward(self, number: int) -> None:
        """Runs this stage's part of the backward."""
        microbatch, current = self._microbatches[number], self._passes.pop(number)
        self._under_way = current
        if self._observer is not None and number == 0:
            self._observer.end()
        roots: list[Any] = []
        gradients: list[Tensor | None] = []
        if self._is_last:
            outcome = self.outcomes[number]
            if outcome.loss is not None:
                roots.append(outcome.loss)
                scale = self._scale(outcome, microbatch)
                if isinstance(scale, Tensor):
                    gradients.append(scale.to(outcome.loss.dtype).reshape(outcome.loss.shape))
                else:
                    gradients.append(torch.full_like(outcome.loss, scale))
                outcome.loss = outcome.loss.detach()
        else:
            receipts = self._gradients.pop(number)
            # The next stage has used the payload, so its send is complete.
            self._sent.pop((Kind.SEND_PAYLOAD, number)).wait()
            if self._store is not None:
                self._store.hold(-_payload_bytes(microbatch))
            values = [value for value, _ in microbatch.gradients(microbatch.layers.stop)]
            with self._profile(WAIT):
                received = [receipt.wait() for receipt in receipts]
            for value, gradient in zip(values, received, strict=True):
                if current.edges[value] is not None:
                    roots.append(current.edges[value])
                    gradients.append(gradient)
            self._has_waited(number)
        self._num_backwards += 1
        if self._num_backwards == len(self._microbatches) and self._before_last_backward:
            self._before_last_backward()
        if roots:
            self._switch.current = current
            timer = self._timers.get(number)
            begin = timer.now() if timer is not None else None
            try:
                with self._profile("[PipeShift] backward"):
                    current.backward(roots, gradients)
            except RuntimeError as error:
                found = current.finite.backward(error) if current.finite is not None else None
                if found is None:
                    raise
                raise found from error
            finally:
                self._switch.current = None
            if timer is not None:
                timer.end_backward(begin)
        for value, box in current.boxes.items():
            is_expected = microbatch.trace is None or value in microbatch.trace.flow.differentiable
            if box.gradient is not None and not is_expected:
                raise LayerError(
                    f"A gradient flows back to the layer {value.layer}, which is on an earlier "
                    "stage, and did not when the step was first traced (for example, a `detach` "
                    "that depends on the step). Detach the same values in every step, or change "
                    "`requires_grad` of parameters instead, which is noticed."
                )
        if self._is_last:
            self.outcomes[number].result = _detached(self.outcomes[number].result)
        self._outgoing[number] = {}
        for value, spec in microbatch.gradients(microbatch.layers.start):
            back = current.boxes[value].gradient
            if back is None:
                kind = dtype_named(spec.dtype)
                back = torch.zeros(spec.shape, dtype=kind, device=self._channels.device)
            self._outgoing[number][value] = back

    def _scale(self, outcome: Outcome, microbatch: Microbatch) -> float | Tensor:
        """The factor of a microbatch's loss: a float64 tensor if it depends on values that are on
        the device, and then the same number. (Torch divides by a plain number otherwise on a GPU
        than on a CPU: those below are powers of two, or have been made tensors.)
        """
        if self._denominators is not None:
            if outcome.weight is None:
                return microbatch.size / self._denominators.sizes * self._loss_scale
            return outcome.weight / self._denominators.weights * self._loss_scale
        if outcome.weight is None:
            return microbatch.share * self._loss_scale
        weight, expected = outcome.weight, self._expected_weight
        if isinstance(weight, Tensor):
            before = expected if isinstance(expected, Tensor) else torch.zeros_like(weight)
            expected = torch.where(before == 0, weight * len(self._microbatches), before)
            self._expected_weight = expected
            return torch.where(weight == 0, 0.0, weight / expected) * self._loss_scale
        if not weight:
            return 0.0
        if expected is None:
            self._expected_weight = expected = weight * len(self._microbatches)
        return weight / expected * self._loss_scale

    def send_gradient(self, number: int) -> None:
        """Sends the gradients of the received payload back."""
        microbatch = self._microbatches[number]
        gradients = self._outgoing.pop(number)
        payload = microbatch.gradients(microbatch.layers.start)
        tensors = [gradients[value] for value, _ in payload]
        specs = [spec for _, spec in payload]
        self._wait_for_earlier(Kind.SEND_GRADIENT)
        self._sent[Kind.SEND_GRADIENT, number] = self._channels.send(
            tensors,
            specs,
            Direction.GRADIENT,
            self._layout(
                number, microbatch.layers.start, Direction.GRADIENT, self._channels.stage - 1
            ),
        )

    def _wait_for_earlier(self, kind: Kind) -> None:
        """Waits until all sends of a kind but the last are complete, and their memory is free.

        The neighbour receives them in this order, and does not wait for later actions of this stage
        in between. So there is no deadlock; running further ahead would only use more memory.
        """
        under_way = [key for key in self._sent if key[0] is kind]
        for key in under_way[: 1 - SENDS_UNDER_WAY]:
            self._sent.pop(key).wait()

    # --- results on the last stage ---

    def fetched(self) -> Any:
        """The values that ``on_last_outcome`` has started to fetch."""
        return self._fetch.wait()

    def weights(self, outcomes: Sequence[Outcome]) -> list[float]:
        """The weight of each microbatch; 0 for one without a loss.

        Args:
            outcomes: of all microbatches, in host memory.
        """
        return [
            0.0
            if outcome.loss is None
            else float(microbatch.size)
            if outcome.weight is None
            else float(outcome.weight)
            for outcome, microbatch in zip(outcomes, self._microbatches, strict=True)
        ]

    def counted(self, outcomes: Sequence[Outcome]) -> tuple[float, float]:
        """The total weight of the losses, and the denominator by which they have been divided.

        The weights that ``training_step`` returns are known only after each forward, and the first
        backward runs before the last forward. So each loss is divided by the sum that the weights
        would have if all equalled the first, which is exact for equal weights. The quotient of the
        two returned values corrects the rest, also for microbatches without a loss.
        """
        weights = self.weights(outcomes)
        counted = sum(weights)
        is_weighted = any(outcome.weight is not None for outcome in outcomes)
        if self._denominators is not None:
            divided = self._denominators.weights if is_weighted else self._denominators.sizes
            return counted, divided
        first = next((weight for weight in weights if weight), None)
        if is_weighted and first is not None:
            return counted, first * len(weights)
        return counted, float(sum(microbatch.size for microbatch in self._microbatches))


# Not on the instance: a table of bound methods would be a reference cycle, and keep the step's
# batches and activations alive until the garbage collector runs.
_ACTIONS: dict[Kind, Callable[[StepRun, int], None]] = {
    Kind.RECEIVE_PAYLOAD: StepRun.receive_payload,
    Kind.FORWARD: StepRun.forward,
    Kind.SEND_PAYLOAD: StepRun.send_payload,
    Kind.RECOMPUTE: StepRun.recompute,
    Kind.RECEIVE_GRADIENT: StepRun.receive_gradient,
    Kind.BACKWARD: StepRun.backward,
    Kind.SEND_GRADIENT: StepRun.send_gradient,
}


def _payload_bytes(microbatch: Microbatch) -> int:
    """The bytes of the payload that the stage sends on, held from its forward to its backward."""
    payload = microbatch.payload(microbatch.layers.stop)
    return sum(spec.num_bytes for _, spec in payload)


def _detached(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.detach()
    if isinstance(result, Mapping):
        return {key: _detached(value) for key, value in result.items()}
    return result
