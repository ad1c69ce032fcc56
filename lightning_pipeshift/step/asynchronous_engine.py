"""Runs the minibatches of an asynchronous schedule on one rank."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.plan.schedule.actions import Action
from lightning_pipeshift.runtime.comm.messages import Key, Place
from lightning_pipeshift.step.engine import Engine
from lightning_pipeshift.step.suspendable import Flight, SuspendableMicrobatch
from lightning_pipeshift.step.tails import Tails


class AsynchronousEngine(Engine):
    """An :class:`Engine` whose microbatches are minibatches: the backward of one comes in the call
    of a later one on all stages but the last.
    """

    def _advance(
        self,
        microbatch: SuspendableMicrobatch,
        action: Action,
        flight: Flight,
        tails: Tails | None,
    ) -> None:
        super()._advance(microbatch, action, flight, tails)
        # The same step may have to wait in one run and not in another: both end with the error.
        if microbatch.is_done and microbatch.latest_wait is not None:
            self._require_no_gradient_to_later([microbatch], *microbatch.latest_wait)

    def _wait(self, flight: Flight) -> None:
        begun = {**flight.done, **flight.live}
        for waiting in self._in_turn(flight.live):
            if waiting.waits_for is not None:
                earlier = [one for number, one in begun.items() if number < waiting.order]
                self._require_no_gradient_to_later(earlier, *waiting.waits_for)
        super()._wait(flight)

    def _require_no_gradient_to_later(
        self, begun: Iterable[SuspendableMicrobatch], key: Key, place: Place
    ) -> None:
        """Raises LayerError if a forward waits for a later stage that may wait for a gradient of
        this one: in its backward of an earlier minibatch, which comes in a later call here.
        """
        stage = self._core.stage
        for one in begun:
            first, end, where = one.graphs.to_later or (0, 0, "")
            if first <= stage < min(end, key.source):
                raise LayerError(
                    f"`{place.label}` ({place.line}) at stage {stage} needs what stage"
                    f" {key.source} computes for the same batch, and stage {end} needs a gradient"
                    f" of stage {first}, since {where} uses there what a later stage has computed"
                    " or used before. With an asynchronous schedule each would wait for the other."
                    " Let values that need a gradient go to later stages only: use another"
                    " partition, compute what an earlier stage has to compute before later layers"
                    " are called, `detach()` it, or use schedule='1f1b'."
                )
