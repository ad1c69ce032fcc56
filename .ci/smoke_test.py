"""Installs a wheel in a fresh environment and trains with the README's eight lines, on two ranks.

    python .ci/smoke_test.py dist/*.whl                       # with this Python
    python .ci/smoke_test.py dist/*.whl python3.10 python3.13

Other packages are installed as the wheel asks for them. With ``--packages FOLDER`` they are taken
from a ``site-packages`` that has them, which takes seconds.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MODEL = """
import torch
torch.manual_seed(1)  # every rank makes the same data
from torch.utils.data import DataLoader, TensorDataset
from lightning.pytorch import LightningModule

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def on_train_epoch_end(self):
        self.trainer.should_stop = True

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

model, data = Model(), DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=16)
before = [layer.weight.detach().clone() for layer in model.layers]
"""

CHECK = """
import sys
import lightning_pipeshift
assert lightning_pipeshift.__file__.startswith(sys.prefix), lightning_pipeshift.__file__
assert len(trainer.strategy.plan.placement.counts[0]) == 2
for layer, weight in zip(model.layers, before):
    assert not torch.equal(layer.weight, weight), "a layer was not trained"
if trainer.is_global_zero:
    print("trained on Python", sys.version.split()[0], "torch", torch.__version__, "lightning",
          L.__version__, "lightning_pipeshift", lightning_pipeshift.__version__)
"""


def script() -> str:
    """The reader's model, the first block of Python in the README, and what has to be true then."""
    block = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert block, "README.md has no block of Python"
    return MODEL + block[1] + CHECK


def smoke_test(wheel: Path, python: str, packages: Path | None) -> None:
    """Installs the wheel for a Python, and trains in an empty folder.

    Raises:
        CalledProcessError: it cannot be installed, or does not train.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "environment")
        subprocess.run([python, "-m", "venv", str(home)], check=True)
        if packages is not None:
            (site,) = home.glob("lib/python*/site-packages")
            (site / "packages.pth").write_text(f"{packages.resolve()}\n")
        alone = ["--no-deps", "--ignore-installed"] if packages is not None else []
        install = [str(home / "bin/pip"), "install", "--quiet", *alone, str(wheel)]
        subprocess.run(install, check=True, env=environment)
        Path(folder, "train.py").write_text(script())
        trained = subprocess.run(
            [str(home / "bin/python"), "train.py"], cwd=folder, check=False, env=environment,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300,
        )  # fmt: skip
        said = [line for line in trained.stdout.splitlines() if line.startswith("trained on")]
        if trained.returncode or len(said) != 1:
            raise SystemExit(f"{trained.stdout}\n{python}: the wheel does not train")
        print(said[0])
        subprocess.run(
            [str(home / "bin/pipeshift"), "--help"],
            check=True,
            env=environment,
            stdout=subprocess.DEVNULL,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("pythons", nargs="*", default=[sys.executable])
    parser.add_argument("--packages", type=Path)
    arguments = parser.parse_args()
    for each in arguments.pythons:
        smoke_test(arguments.wheel.resolve(), each, arguments.packages)
