"""Random streams that do not depend on the stage of a layer.

All random numbers of a step come from a stream for each (seed, purpose, step, microbatch, virtual
machine) and call of a layer, or operation on values that may draw; the rest of the user's step,
which runs on every stage, has one of its own. So a mask drawn in ``training_step`` is the same on
all stages, and dropout is the same on every split and across every migration. This covers torch on
the CPU and on the stage's device, NumPy and Python's ``random``.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipeshift.compat.random_private import host_mark
from lightning_pipeshift.errors import LayerError

_MASK_32 = (1 << 32) - 1
_MASK_64 = (1 << 64) - 1


def stream_seed(*key: int | str) -> int:
    """A 64-bit seed for a key; different keys give unrelated seeds."""
    parts = [x.encode() if isinstance(x, str) else struct.pack("<q", x) for x in key]
    # A length before each part distinguishes ("ab", "c") from ("a", "bc").
    data = b"".join([struct.pack("<I", len(part)) + part for part in parts])
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


# The last seed of NumPy's and Python's global generators, and their mark behind it.
_seeded: tuple[int, Any] = (0, None)


def seed_host(seed: int) -> None:
    """Seeds NumPy's and Python's global generators."""
    global _seeded
    random.seed(seed)
    np.random.seed(seed & _MASK_32)
    _seeded = seed, host_mark()


def host_state() -> Any:
    """The state of NumPy's and Python's global generators. To copy it takes longer than many layers
    take to run: if nothing was drawn since :func:`seed_host`, it is the seed.
    """
    if host_mark() == _seeded[1]:
        return _seeded[0]
    return np.random.get_state(), random.getstate()


def set_host_state(state: Any) -> None:
    """Restores the result of :func:`host_state`."""
    if isinstance(state, tuple):
        np.random.set_state(state[0])
        random.setstate(state[1])
    elif host_state() != state:
        seed_host(state)


def numbered_seed(seed: int, number: int) -> int:
    """The seed of one of many streams, faster than :func:`stream_seed`: by the mixing step of
    SplitMix64 (Steele, Lea and Flood 2014, figure 16).
    """
    found = (seed + number + 0x9E3779B97F4A7C15) & _MASK_64
    found = ((found ^ (found >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    found = ((found ^ (found >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (found ^ (found >> 31)) >> 1


class drawing_from:
    """Context in which draws of torch's generators come from the stream of a seed; with ``host``
    those of NumPy and ``random``, too, which takes much longer: without, they are a LayerError.
    Afterwards, the generators continue with their earlier state.
    """

    def __init__(self, generators: Sequence[torch.Generator], host: bool, seed: int) -> None:
        self._generators, self._host, self._seed = generators, host, seed

    def __enter__(self) -> None:
        self._states = [generator.get_state() for generator in self._generators]
        self._before = host_state() if self._host else host_mark()
        for generator in self._generators:
            generator.manual_seed(self._seed)
        if self._host:
            seed_host(self._seed)

    def __exit__(self, failure: object, *_: object) -> None:
        for generator, before in zip(self._generators, self._states, strict=True):
            generator.set_state(before)
        if self._host:
            set_host_state(self._before)
        elif failure is None and host_mark() != self._before:
            raise LayerError(
                "A layer has drawn from NumPy or `random`, and did not in its run without values:"
                " from here on, other stages would draw other numbers than this one. Draw in every"
                " call, and not only if things outside of the layer say so; or draw from torch."
            )


def global_state() -> dict[str, Any]:
    """The state of the CPU generators that data loaders draw from, in types that ``torch.load``
    accepts with ``weights_only=True``.
    """
    kind, keys, *others = np.random.get_state()
    version, words, spare = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": (kind, _bytes_of(keys), *others),
        "python": (version, _bytes_of(words), spare),
    }


def set_global_state(state: dict[str, Any]) -> None:
    """Restores the result of :func:`global_state`, in this or in another process."""
    kind, keys, *others = state["numpy"]
    version, words, spare = state["python"]
    torch.set_rng_state(state["torch"])
    np.random.set_state((kind, _words_of(keys), *others))
    random.setstate((version, tuple(_words_of(words).tolist()), spare))


def _bytes_of(words: Any) -> Tensor:
    return torch.from_numpy(np.array(words, dtype=np.uint32).view(np.uint8))


def _words_of(found: Tensor) -> Any:
    return found.numpy().view(np.uint32)


def seed_all(seed: int) -> None:
    """Seeds torch's, NumPy's and Python's generators on the CPU."""
    torch.default_generator.manual_seed(seed)
    seed_host(seed)


class SharedRandomStream:
    """Switches the global random state between a stream that is the same on all virtual machines,
    and this virtual machine's own stream.

    The state in force at construction is the shared stream, and has to be the same everywhere. A
    dataloader that is split over the virtual machines switches to the shared stream when its
    iteration begins, and while its sampler draws. All other code draws from the own stream: data
    sets, and the user's code around the steps, which may draw as many numbers as its virtual
    machine has samples. The own stream remains active when the sampler is exhausted, as the last
    batches are then still being loaded; for code after an epoch that must draw the same everywhere,
    the caller has to call :meth:`to_shared`.

    Args:
        vm: index of the virtual machine.
    """

    def __init__(self, vm: int) -> None:
        self._vm = vm
        self._is_own = False
        self._resting: dict[str, Any] | None = None
        """The state of the inactive stream; ``None`` before the own one has started."""

    def to_shared(self) -> None:
        """Makes later draws come from the stream that all virtual machines share."""
        if self._is_own:
            self._switch()

    def to_own(self) -> None:
        """Makes later draws come from this virtual machine's own stream."""
        if not self._is_own:
            self._switch()

    def state(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The states of the shared stream, and of the own one (``None`` before it has begun)."""
        here = global_state()
        if self._is_own:
            assert self._resting is not None
            return self._resting, here
        return here, self._resting

    def set_state(self, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Continues, on the shared stream, from a result of :meth:`state`."""
        set_global_state(shared)
        self._is_own = False
        self._resting = own

    def _switch(self) -> None:
        leaving = global_state()
        if self._resting is None:
            # A draw from a copy does not change the next draws of the shared stream.
            generator = torch.Generator()
            generator.set_state(leaving["torch"])
            draw = torch.empty((), dtype=torch.int64).random_(generator=generator)
            seed_all(stream_seed("virtual machine", int(draw), self._vm))
        else:
            set_global_state(self._resting)
        self._resting = leaving
        self._is_own = not self._is_own
