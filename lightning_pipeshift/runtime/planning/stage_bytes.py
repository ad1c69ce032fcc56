"""What a stage's device holds besides saved tensors. Every rank counts it for itself, and so that
the planner's count (:class:`~lightning_pipeshift.plan.cost.layer_memory.LayerMemory`) is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from lightning_pipeshift.plan.cost.layer_memory import batches_held, window_bytes
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.profile import Profile, shared_bytes
from lightning_pipeshift.plan.schedule.asynchronous import shared_copies, weight_versions


class StageBytes:
    """The bytes of one stage under a plan.

    Args:
        model: the bytes of its layers; no times are needed.
        working_bytes: what layers take for a moment while they run.
        plan: the plan.
        vm: the stage's virtual machine.
        stage: the stage.
    """

    def __init__(
        self, model: Profile, working_bytes: Mapping[int, int], plan: Plan, vm: int, stage: int
    ) -> None:
        self._model = model
        self._working_bytes = working_bytes
        self._plan = plan
        self._stage = stage
        self._num_stages = plan.placement.num_stages(vm)
        self._own = plan.placement.layers_of(vm, stage)
        self._on_host = plan.optimizer_on_host_of(vm)
        self._waiting = plan.weights_on_host_of(vm)

    def taken(self, runs: Collection[int], leaving: Iterable[int], copied: Iterable[int]) -> float:
        """All of them.

        Args:
            runs: the layers that run on the stage: its own, and those that come to it or leave it
                while minibatches are in flight.
            leaving: the layers that it still holds, and another stage owns already.
            copied: the layers of which it holds the weights in addition, as they move.
        """
        moving = self._held_twice(leaving, copied)
        return self._permanent(runs) + moving + self.window + self.room(runs)

    def _permanent(self, runs: Collection[int]) -> float:
        """What layers take all the time."""
        model = self._model
        pipeline = self._plan.schedule, self._num_stages, model.num_accumulated
        # Of versions of the weights, and of gradients.
        num_more = weight_versions(*pipeline)[self._stage] + model.num_gradients - 2
        found = shared_bytes(model.layers, model.shared, runs, self._on_host)
        for index in runs:
            layer = model.layers[index]
            found += layer.static_bytes + num_more * layer.gradient_bytes
            found -= layer.optimizer_bytes if index in self._on_host else 0
            found -= layer.waiting_bytes if index in self._waiting else 0
        as_first, as_other = shared_copies(*pipeline)[self._stage]
        for shared in model.shared:
            if not set(shared.layers) - set(runs):
                continue
            for place, user in enumerate(shared.layers):
                found += (user in runs) * (as_other if place else as_first) * shared.sent_bytes
        return found

    def _held_twice(self, leaving: Iterable[int], copied: Iterable[int]) -> int:
        """What layers take because they move, as :meth:`Measured.lacking_during` counts it."""
        layers, leaving = self._model.layers, list(leaving)
        weights = (layers[n].weights_bytes(n in self._waiting) for n in (*leaving, *copied))
        state = (layers[n].optimizer_bytes for n in leaving if n not in self._on_host)
        return sum(weights) + sum(state)

    @property
    def window(self) -> float:
        """For weights that wait in host memory, and come for a part of each step."""
        layers = self._model.layers
        return window_bytes([layers[n].waiting_bytes for n in self._own if n in self._waiting])

    def room(self, runs: Iterable[int]) -> int:
        """What is left free for batches, and for the layer that runs."""
        held = batches_held(self._plan.schedule, self._num_stages, self._plan.microbatches)
        return held[self._stage] * self._model.batch_bytes + self.working(runs)

    def working(self, runs: Iterable[int]) -> int:
        """The most bytes that one of these layers takes only while it runs. In an optimizer's
        update no layer runs, and they are free.
        """
        return max((self._working_bytes.get(n, 0) for n in runs), default=0)
