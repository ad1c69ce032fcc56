"""The way of a microbatch through a pipeline whose stages hold one or several chunks of layers.

Whoever needs the previous or the next place on it asks here: with several chunks that is not always
the stage before or behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Place(NamedTuple):
    """A chunk of a stage: consecutive layers that it holds."""

    stage: int
    chunk: int = 0


@dataclass(frozen=True)
class Route:
    """Through all stages, once for each chunk (Narayanan et al., Efficient Large-Scale Language
    Model Training on GPU Clusters Using Megatron-LM, SC 2021, section 2.2)::

        stage 0   chunk 0   .         .         chunk 1   .         .
        stage 1   .         chunk 0   .         .         chunk 1   .
        stage 2   .         .         chunk 0   .         .         chunk 1
    """

    num_stages: int
    num_chunks: int = 1

    @property
    def num_places(self) -> int:
        return self.num_stages * self.num_chunks

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """All places, in order."""
        return tuple(
            Place(stage, chunk)
            for chunk in range(self.num_chunks)
            for stage in range(self.num_stages)
        )

    def index(self, place: Place) -> int:
        """The number of places before this one."""
        return place.chunk * self.num_stages + place.stage

    def neighbour(self, place: Place, steps: int) -> Place | None:
        """The place so many steps further, or before it if negative; ``None`` beyond the ends."""
        index = self.index(place) + steps
        return self.places[index] if 0 <= index < self.num_places else None
