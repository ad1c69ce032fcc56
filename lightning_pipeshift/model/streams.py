"""Random streams that do not depend on where a layer lives.

User code draws from one stream per (seed, purpose, step, microbatch, virtual machine), the same on every stage; a layer
draws from its own. So a mask drawn in ``training_step`` is the same everywhere, and dropout is the same on every split
and across every migration. Covered are torch on the CPU and on the stage's device, NumPy and Python's ``random``.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

_MASK_32 = (1 << 32) - 1


def stream_seed(*key: int | str) -> int:
    """A 64-bit seed for a key; different keys give unrelated seeds."""
    digest = blake2b(digest_size=8)
    for part in key:
        # A length in front of each part keeps ("ab", "c") and ("a", "bc") apart.
        data = part.encode() if isinstance(part, str) else struct.pack("<q", part)
        digest.update(struct.pack("<I", len(data)) + data)
    return int.from_bytes(digest.digest(), "little") >> 1


class Streams:
    """Switches the global generators between streams.

    Args:
        device: the stage's device; its generator is switched together with the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self._generators: list[torch.Generator] = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        # NumPy's global state is 2.5 KB and slow to read and write; its bit generator is one pointer, so each depth of
        # nesting has a bit generator of its own, which is put in place and taken away.
        self._numpy_generators = [np.random.MT19937(0), np.random.MT19937(0)]
        self._depth = 0

    @contextmanager
    def switched(self, *key: int | str) -> Iterator[None]:
        """Draws come from the key's stream inside the context; outside, everything goes on as if nothing happened."""
        seed = stream_seed(*key)
        torch_states = [generator.get_state() for generator in self._generators]
        python_state = random.getstate()
        outer = np.random.get_bit_generator()
        inner: Any = self._numpy_generators[self._depth]
        inner._legacy_seeding(seed & _MASK_32)
        self._depth += 1
        for generator in self._generators:
            generator.manual_seed(seed)
        random.seed(seed)
        np.random.set_bit_generator(inner)
        try:
            yield
        finally:
            self._depth -= 1
            np.random.set_bit_generator(outer)
            random.setstate(python_state)
            for generator, state in zip(self._generators, torch_states, strict=True):
                generator.set_state(state)

    @staticmethod
    def pass_by() -> None:
        """Leaves NumPy's stream as running a layer would leave it.

        NumPy's legacy normal draws come in pairs, and switching streams forgets the spare one. A stage that skips a
        layer has to forget it too, or the user's stream would depend on where layers live.
        """
        np.random.set_bit_generator(np.random.get_bit_generator())


def global_state() -> dict[str, Any]:
    """The state of the CPU generators that data loaders draw from."""
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def set_global_state(state: dict[str, Any]) -> None:
    """Puts back what :func:`global_state` returned, on this or on another process."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
