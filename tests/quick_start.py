"""Makes the ranks of tests cheaper; imported last by the server that they are forked from.

Nothing here changes what a run computes or sends: only how long it measures, and work that would
give the same result in every rank is done once, before the fork. Ranks of `launch_script` and
`launch_torchrun` are real interpreters and know nothing of it, and so are all ranks where there is
a GPU: see `start_method` in `lightning_pipeshift/testing/processes.py`.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib.metadata
import logging
import os
import random
import warnings

import lightning.fabric.utilities.registry
import lightning.pytorch as L
import numpy as np
import torch

from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.runtime.planning import link_probe, probe
from lightning_pipeshift.testing.processes import STACK_SIGNAL, free_port, rank_variables
from lightning_pipeshift.testing.training import QUIET
from tests.models import ZOO


def _measure_briefly() -> None:
    """A run measures its devices and links for 0.1 s of processor time in each rank, as much as all
    else that a small model's run does. The smallest measurement goes through the same code.
    """
    few = link_probe._FIRST_BYTES
    vars(probe).update(_SLICES_SECONDS=0.0)
    vars(link_probe).update(_MOST_BYTES=few, _MOST_DEVICE_BYTES=few)


def _list_packages_once() -> None:
    """Every Trainer looks through all installed packages for callbacks (20 ms of 150 packages)."""
    once = functools.cache(importlib.metadata.entry_points)
    vars(lightning.fabric.utilities.registry).update(entry_points=once)


def _train_alone() -> None:
    """Fills the caches that a rank's first training fills: those of torch, pydantic and Python.

    All threads that this starts end again, since none survives a fork.
    """
    environment = dict(os.environ)
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    logging.disable(logging.CRITICAL)
    os.environ.update(rank_variables(0, 1, free_port()))
    torch.set_num_threads(1)
    try:
        # Python forgets at the end which warnings it has shown.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            strategy = PipeShiftStrategy(microbatches=2)
            trainer = L.Trainer(
                **QUIET, accelerator="cpu", devices=1, max_steps=2, strategy=strategy
            )
            trainer.fit(ZOO["sequential"].build(), ZOO["sequential"].loader())
            strategy._session.connection.close()
    finally:
        # Lightning has put the handler back without faulthandler's knowledge, which would then not
        # install it again in a rank.
        faulthandler.unregister(STACK_SIGNAL)
        os.environ.clear()
        os.environ.update(environment)
        logging.disable(logging.NOTSET)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


_measure_briefly()
_list_packages_once()
_train_alone()
# The garbage collector of a rank leaves alone what the server has imported: going through it takes
# time, and writes to (so copies) most of the memory that ranks share with the server.
gc.collect()
gc.freeze()
if (left := os.listdir("/proc/self/task"))[1:]:
    raise RuntimeError(f"{len(left) - 1} threads of a run have stayed, so no rank can be forked")
