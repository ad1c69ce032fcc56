"""In an interactive interpreter, as in a notebook: the other ranks are copies of its process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_pipeshift.testing.ranks import TIMEOUT_SECONDS
from tests import ROOT

CELLS = """
import os
import lightning.pytorch as L
import torch
from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.testing.processes import free_port
from tests.features_models import QUIET
from tests.models import LayersOfItsOwn, points

torch.set_num_threads(1)

def trained(devices, **how):
    # Lightning would take one that somebody else may take too.
    os.environ["MASTER_PORT"] = str(free_port())
    L.seed_everything(1, verbose=False)
    model, data = LayersOfItsOwn(), points(16)
    trainer = L.Trainer(accelerator="cpu", devices=devices, max_epochs=2, **how, **QUIET)
    trainer.fit(model, data)
    trainer.validate(model, data, verbose=False)
    return model, trainer.callback_metrics

same = lambda: PipeShiftStrategy(microbatches=4, partition="uniform")
alone, loss = trained(1, strategy=same())
model, its_loss = trained(2, strategy=same())
print("same", all(torch.equal(a, b) for a, b in zip(alone.parameters(), model.parameters())))
print("same metrics", torch.allclose(loss["val_loss"], its_loss["val_loss"]))
print("here", {str(parameter.device) for parameter in model.parameters()})
exit()
"""


@pytest.mark.feature("Launch", "notebooks")
def test_a_notebook_trains_on_several_stages(tmp_path: Path) -> None:
    script = tmp_path / "cells.py"
    script.write_text(CELLS)
    run = subprocess.run(
        [sys.executable, "-i", str(script)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=TIMEOUT_SECONDS,
    )
    told = run.stdout + run.stderr
    assert "same True" in run.stdout, told
    assert "same metrics True" in run.stdout, told
    assert "here {'cpu'}" in run.stdout, told
