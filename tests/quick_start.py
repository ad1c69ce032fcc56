"""Makes the ranks of tests cheaper; imported last by the server that they are forked from.

Nothing here changes what a run computes or sends: only how long it measures, and work that would
give the same result in every rank is done once, before the fork. Ranks of `launch_script` and
`launch_torchrun` are real interpreters and know nothing of it.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata

import lightning.fabric.utilities.registry
import torch
import torch.nn.functional as F

from lightning_pipeshift.plan.document import plan as document
from lightning_pipeshift.runtime.planning import probe
from tests.unit.model.following import Model, follow, linears


def _measure_briefly() -> None:
    """A run measures its devices and links for 0.1 s of processor time in each rank, as much as all
    else that a small model's run does. The smallest measurement goes through the same code.
    """
    vars(probe).update(_SLICES_SECONDS=0.0, _MOST_BYTES=probe._FIRST_BYTES)


def _list_packages_once() -> None:
    """Every Trainer looks through all installed packages for callbacks (20 ms of 150 packages)."""
    once = functools.cache(importlib.metadata.entry_points)
    vars(lightning.fabric.utilities.registry).update(entry_points=once)


def _warm_up() -> None:
    """Fills the caches of torch and pydantic that a rank's first step would fill.

    Without a backward and without a process group: they may start threads, which do not survive a
    fork.
    """
    document._DOCUMENT._adapter  # noqa: B018
    with torch.random.fork_rng():
        model = Model(
            lambda model, x: F.cross_entropy(model.b(model.a(x).tanh()), x.argmax(1)),
            **linears("a b"),
        )
        follow(model, torch.randn(2, 4))


_measure_briefly()
_list_packages_once()
_warm_up()
# The garbage collector of a rank leaves alone what the server has imported: going through it takes
# time, and writes to (so copies) most of the memory that ranks share with the server.
gc.collect()
gc.freeze()
