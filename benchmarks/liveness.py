"""Two hosts with two ranks each train, and something happens to the second host: how long does it
take until the last process has ended, and what does it say?

    python -m benchmarks.liveness --json benchmarks/results/liveness.json
    python -m benchmarks.liveness --faults stopped --moments forward backward

The hosts are network namespaces (see :mod:`benchmarks.hosts`), with a name each, and torchrun
starts the ranks on both. At a chosen moment one rank of the second host waits while the fault
happens, and then goes on, or does not. The seconds are those from the fault to the end of the last
process; a host that is cut off has to find out by itself. Needs Linux and root.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.hosts import CARD, Hosts, hosts, why_not
from benchmarks.measuring import arguments, commit, print_table, save

NAMES = ("alpha", "beta")
PER_HOST = 2
GIVE_UP_SECONDS = 120.0

# The function whose call is the moment, how many calls come before it, and the kind of run.
MOMENTS: dict[str, tuple[str, int, str]] = {
    "start": ("runtime.comm.groups.Lanes.between_stages", 0, "pipeline"),
    "plan": ("runtime.planning.replanning.Replanning.first_plan", 0, "plans"),
    "forward": ("step.engine.SuspendableMicrobatch.advance", 20, "pipeline"),
    "backward": ("step.engine.Engine._run_backward", 20, "pipeline"),
    "rings": ("runtime.gradients.rings.Rings.start", 20, "replicas"),
    "move": ("runtime.ownership.migration.Migration.send_newest", 0, "moves"),
    "swap": ("runtime.offload.lending.Borrower.send", 5, "swaps"),
    "checkpoint": ("lightning.strategy.PipeShiftStrategy.save_checkpoint", 0, "saves"),
    "validation": ("lightning.evaluation.EvaluationSteps.run", 2, "validates"),
    "async save": ("checkpoint.sharded.Writing.finish", 0, "async"),
    "teardown": ("lightning.strategy.PipeShiftStrategy.teardown", 0, "pipeline"),
    "between runs": ("benchmarks.liveness.between_runs", 0, "twice"),
}
FAULTS = ("cable", "in", "out", "killed", "stopped", "stuck")


# --- on the ranks ---


def between_runs() -> None:
    """Nothing: the moment between two runs."""


@contextmanager
def at(path: str, calls_before: int, happens: Callable[[], None]) -> Iterator[None]:
    """Lets something happen at the beginning of a call of a function or method."""
    module, _, name = path.rpartition(".")
    try:
        owner: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        module, _, kind = module.rpartition(".")
        owner = getattr(importlib.import_module(module), kind)
    original, count = getattr(owner, name), 0

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == calls_before + 1:
            happens()
        return original(*args, **kwargs)

    setattr(owner, name, called)
    try:
        yield
    finally:
        setattr(owner, name, original)


def strike(folder: Path, fault: str) -> None:
    """Waits until the fault has happened, or is the fault; on the first rank that gets here."""
    try:
        with (folder / "now").open("x") as file:
            file.write(os.environ["RANK"])
    except FileExistsError:
        return
    while not (folder / "done").exists():
        time.sleep(0.005)
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "stuck":
        # In a system call, with Python's lock.
        ctypes.PyDLL(None).sleep(1000)


def on_rank(folder: Path, moment: str, fault: str) -> None:
    """Trains on one rank."""
    import torch

    torch.set_num_threads(1)
    path, calls_before, kind = MOMENTS[moment]
    if not path.startswith("benchmarks"):
        path = f"lightning_pipeshift.{path}"
    if int(os.environ["RANK"]) < PER_HOST:
        train(folder, kind)
        return
    with at(path, calls_before, lambda: strike(folder, fault)):
        train(folder, kind)


def train(folder: Path, kind: str) -> None:
    """A run of the kind that has the moment in it."""
    import lightning.pytorch as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch import nn

    from lightning_pipeshift import (
        LayerMigration,
        MemoryCompression,
        Move,
        PipeShiftCheckpointIO,
        PipeShiftStrategy,
        SwapAll,
    )

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layers(batch[0]).square().mean()

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("loss", self.layers(batch[0]).square().mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    callbacks: list[L.Callback] = []
    plugins: list[Any] = []
    strategy: dict[str, Any] = {"partition": [2, 2, 2, 2], "microbatches": 4}
    if kind == "replicas":
        strategy = {"virtual_machines": [[0, 2], [1, 3]], "partition": [4, 4], "microbatches": 4}
    if kind == "swaps":
        policy = SwapAll("device", min_bytes=1)
        plugins.append(MemoryCompression(policy=policy))
    if kind == "plans":
        strategy["partition"], strategy["profile_steps"] = "auto", 2
    if kind == "moves":
        callbacks.append(LayerMigration(moves=[Move(layer="layers.5", stage=3, step=3)]))
    if kind in ("saves", "async"):
        callbacks.append(ModelCheckpoint(folder / "kept", every_n_train_steps=3, save_top_k=-1))
    if kind == "async":
        plugins.append(PipeShiftCheckpointIO(sharded=True, asynchronous=True))
    torch.manual_seed(1)
    batches = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(4096, 32)), batch_size=16
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=PER_HOST,
        num_nodes=2,
        max_steps=10 if kind == "twice" else 200,
        val_check_interval=5 if kind == "validates" else None,
        limit_val_batches=3 if kind == "validates" else 0,
        strategy=PipeShiftStrategy(**strategy),
        callbacks=callbacks,
        plugins=plugins,
        logger=False,
        enable_checkpointing=bool(kind in ("saves", "async")),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Model()
    trainer.fit(module, batches, batches)
    if kind == "twice":
        importlib.import_module("benchmarks.liveness").between_runs()
        trainer.fit_loop.epoch_loop.max_steps = 20
        trainer.fit(module, batches)


# --- beside the hosts ---


@dataclass(frozen=True)
class Result:
    """The result of one run.

    Args:
        seconds: from the fault to the end of the last process; ``None`` if it was given up.
        named: by host, whether its output names a rank of the other one, or the rank that the fault
            was in, with its host.
        output: that of each host.
    """

    seconds: float | None
    named: tuple[bool, ...]
    output: tuple[str, ...]


def run(made: Hosts, moment: str, fault: str, restarts: int = 0) -> Result:
    """One run with one fault.

    Args:
        made: two hosts.
        moment: of :data:`MOMENTS`.
        fault: of :data:`FAULTS`.
        restarts: how often torchrun may restart.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = []
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": CARD,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parent.parent),
        }
        for host in range(2):
            torchrun = [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2"),
                *(f"--nproc-per-node={PER_HOST}", f"--node-rank={host}"),
                *(f"--master-addr={made.address(0)}", f"--master-port={made.port}"),
                *(f"--max-restarts={restarts}", "-m", "benchmarks.liveness"),
                *("--on-rank", name, moment, fault),
            ]
            named_host = ["unshare", "--uts", "sh", "-c", f'hostname {NAMES[host]}; exec "$@"', "-"]
            output = (folder / f"output-{host}").open("w")
            processes.append(
                subprocess.Popen(
                    made.command(host, [*named_host, *torchrun]),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            )
        try:
            seconds = _strike_and_wait(made, processes, folder, fault)
        finally:
            set_link(made, fault, is_up=True)
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            subprocess.run(["pkill", "-9", "-f", f"on-rank {name}"], check=False)
        outputs = tuple((folder / f"output-{host}").read_text() for host in range(2))
        now = folder / "now"
        rank = now.read_text() if now.exists() else "-"
    named = tuple(_names(host, fault, rank, outputs[host]) for host in range(2))
    return Result(seconds, named, outputs)


def _strike_and_wait(
    made: Hosts, processes: Sequence[subprocess.Popen[bytes]], folder: Path, fault: str
) -> float | None:
    begun = time.monotonic()
    while not (folder / "now").exists():
        has_ended = any(process.poll() is not None for process in processes)
        if has_ended or time.monotonic() - begun > GIVE_UP_SECONDS:
            return None
        time.sleep(0.02)
    set_link(made, fault, is_up=False)
    (folder / "done").touch()
    struck = time.monotonic()
    while time.monotonic() - struck < GIVE_UP_SECONDS:
        if all(process.poll() is not None for process in processes):
            return time.monotonic() - struck
        time.sleep(0.02)
    return None


def set_link(made: Hosts, fault: str, is_up: bool) -> None:
    """The cable of the second host, or one direction of it."""
    if fault == "cable":
        made.set_cable(1, is_up)
    elif fault in ("in", "out"):
        made.set_direction(1, fault, is_up)


def _names(host: int, fault: str, rank: str, output: str) -> bool:
    """Whether a host's output names who is gone: for a fault of the network any rank of the other
    host, else the rank that it happened to."""
    other = NAMES[1 - host]
    if fault in ("cable", "in", "out"):
        return re.search(rf"\(rank \d on {other}\)", output) is not None
    if f"(rank {rank} on {NAMES[1]})" in output:
        return True
    # Torchrun may be faster to end the other ranks of a host on which one was killed: it names it.
    torchruns = rf"host +: {NAMES[1]}\s+rank +: {rank} .*\s+exitcode +: -9"
    return host == 1 and fault == "killed" and re.search(torchruns, output) is not None


def main() -> None:
    """Runs the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--moments", nargs="+", choices=list(MOMENTS), default=list(MOMENTS))
    parser.add_argument("--goes-on", action="store_true", help="keep what is in the JSON file")
    parser.add_argument("--show", action="store_true", help="print what the ranks printed")
    parser.add_argument("--on-rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_rank:
        folder, moment, fault = options.on_rank
        on_rank(Path(folder), moment, fault)
        return
    reason = why_not()
    if reason is not None:
        raise SystemExit(f"not possible here: {reason}")
    known = options.json is not None and options.json.exists() and options.goes_on
    figures = json.loads(options.json.read_text())["figures"]["runs"] if known else []
    done = {(one["moment"], one["fault"]) for one in figures}
    with hosts(2) as made:
        for moment in options.moments:
            for fault in options.faults:
                if (moment, fault) in done:
                    continue
                result = run(made, moment, fault)
                figures.append(
                    {
                        "moment": moment,
                        "fault": fault,
                        "seconds": result.seconds,
                        "named": list(result.named),
                        "commit": commit(),
                    }
                )
                print(*_row(figures[-1]), flush=True)
                if options.show:
                    print("\n=====\n".join(result.output))
                save(options.json, {"runs": figures}, says_so=False)
    header = ["moment", "fault", "the last process ends after", *map("named on {}".format, NAMES)]
    print_table("From the fault to the end of the last process", header, list(map(_row, figures)))


def _row(figure: Mapping[str, Any]) -> list[str]:
    seconds = figure["seconds"]
    shown = "never" if seconds is None else f"{seconds:.1f} s"
    named = ("yes" if one else "NO" for one in figure["named"])
    return [figure["moment"], figure["fault"], shown, *named]


if __name__ == "__main__":
    main()
