"""The model and the machines of a run, as far as this rank knows them; the first rank also has the
measurements of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_pipeshift.plan.inputs.cluster import Cluster, Device
from lightning_pipeshift.plan.inputs.profile import LayerProfile, Profile, SharedWeights
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.plan.search.measurements import Measured
from lightning_pipeshift.runtime.planning.make_plan import Settings
from lightning_pipeshift.runtime.planning.profile_fitting import (
    RankFigures,
    Times,
    estimates_by_kind,
    profile_of,
)


class RunModel:
    """The model of a run, and its machines.

    Args:
        settings: the user's settings.
        topology: the virtual machines.
        here: this rank's device.
    """

    def __init__(self, settings: Settings, topology: Topology, here: Device) -> None:
        self._settings = settings
        self._topology = topology
        self._profile: Profile | None = None
        self._kinds: Sequence[int] = ()
        self._estimates: dict[int, Times] = {}
        self.cluster = Cluster((Device(here.host, here.kind),) * topology.num_ranks)
        """The machines, by the latest measurements."""
        self.batch_samples = 0.0
        """The samples of a virtual machine's batch, the largest so far; 0: not known yet."""
        self.overlaps_updates = False
        """Whether layers are updated one by one while the next step begins."""
        self.state_stays = ""
        """Why the optimizer's state cannot be in host memory between two steps; empty if it can."""

    @property
    def profile(self) -> Profile:
        """The model without times."""
        assert self._profile is not None
        return self._profile

    @property
    def optimizer_bytes(self) -> dict[int, int]:
        """The expected bytes of each layer's optimizer state."""
        return {index: layer.optimizer_bytes for index, layer in enumerate(self.profile.layers)}

    def begin(
        self,
        layers: tuple[LayerProfile, ...],
        samples: float,
        shared: tuple[SharedWeights, ...],
        batch_bytes: int,
        updates_at_once: bool,
    ) -> None:
        """Takes what needs no measurement; see :class:`Profile`."""
        settings = self._settings
        self._profile = Profile(
            layers,
            samples=samples,
            microbatches=settings.num_microbatches(self._topology.stages_per_vm),
            num_accumulated=settings.num_accumulated,
            num_gradients=1 + settings.accumulates,
            shared=shared,
            batch_bytes=batch_bytes,
            updates_at_once=updates_at_once,
        )

    def note_samples(self, number: float) -> None:
        """Called before each batch. The last one of an epoch may have fewer than the others.

        Args:
            number: the samples of a virtual machine's batch.
        """
        self.batch_samples = max(self.batch_samples, float(number))

    def note_results(self, num_bytes: Mapping[int, int], kinds: Sequence[int]) -> None:
        """Takes what a step has shown of layers, if none ran on fake tensors before the first.

        Args:
            num_bytes: of what they have returned, by layer.
            kinds: the kind of each layer, a number.
        """
        layers = tuple(
            replace(layer, payload_bytes=found, payload_gradient_bytes=found)
            if (found := num_bytes.get(index)) is not None
            else layer
            for index, layer in enumerate(self.profile.layers)
        )
        self._kinds, self._profile = kinds, replace(self.profile, layers=layers)

    def measured(self, figures: Sequence[RankFigures]) -> Measured:
        """The measurements of all ranks, fitted to the model.

        Args:
            figures: by rank.
        """
        if self._kinds:
            # Until here they were those of bytes.
            self._estimates = estimates_by_kind(figures, self._kinds) | self._estimates
            figures = [replace(mine, estimates=self._estimates) for mine in figures]
        model = replace(
            self.profile,
            overlaps_updates=self.overlaps_updates,
            state_stays=self.state_stays,
            batch_samples=self.batch_samples,
        )
        profile, cluster = profile_of(model, self.cluster, figures)
        waited = tuple(each.waited_seconds for each in figures)
        ran = [each.ran for each in figures]
        return Measured(profile, cluster, self._topology.ranks, waited if any(waited) else (), ran)
