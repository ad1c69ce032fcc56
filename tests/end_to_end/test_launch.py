"""Scripts as users start them: Lightning starts the ranks, or a launcher does."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_pipeshift.testing.processes import RANK_VARIABLES, free_port
from lightning_pipeshift.testing.ranks import Launched, launch_script, launch_torchrun, run_ranks
from tests.features_models import differences, fit, on_one_device, on_rank, parameters_of
from tests.models import SequentialMLP, points

SCRIPT = """
import json, sys
import lightning.pytorch as L
import lightning_pipeshift
from lightning_pipeshift import PipeShiftStrategy
from tests.models import SequentialMLP, points
from tests.features_models import built, QUIET

if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    strategy = arguments.pop("strategy", {"microbatches": 4})
    if isinstance(strategy, dict):
        strategy = PipeShiftStrategy(**strategy)
    arguments = {**QUIET, "max_epochs": 2, **arguments}
    trainer = L.Trainer(accelerator="cpu", strategy=strategy, **arguments)
    module = built(SequentialMLP)
    trainer.fit(module, points(3))
    total = sum(float(p.detach().double().abs().sum()) for p in module.parameters())
    # One write, so that the ranks' lines do not mix.
    sys.stdout.write("RESULT " + json.dumps({
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "stage": trainer.strategy.stage,
        "stages": trainer.strategy.num_stages,
        "microbatches": trainer.strategy.plan.microbatches,
        "total": total,
        "loss": float(trainer.callback_metrics["train_loss"]),
    }) + "\\n")
"""


def results_of(launched: Launched) -> list[dict[str, Any]]:
    lines = [line for line in launched.output.splitlines() if "RESULT " in line]
    return sorted(
        (json.loads(line.split("RESULT ", 1)[1]) for line in lines),
        key=lambda result: result["rank"],
    )


def expected_total() -> float:
    record, _, _ = on_one_device(fit, SequentialMLP, points(3), max_epochs=2)
    return sum(float(p.double().abs().sum()) for p in record["parameters"].values())


def require_like_one_device(results: list[dict[str, Any]], stages: int) -> None:
    assert [result["rank"] for result in results] == list(range(stages))
    # Which rank is which stage depends on how fast each was in the first measurement.
    assert sorted(result["stage"] for result in results) == list(range(stages))
    assert {result["world_size"] for result in results} == {stages}
    assert {result["stages"] for result in results} == {stages}
    for result in results:
        assert result["total"] == pytest.approx(expected_total(), rel=1e-5)
        assert result["loss"] == results[0]["loss"]


# Two hosts with two devices and one: an agent of torchrun on each.
UNEVEN_HOSTS = """
import json, os, subprocess, sys, tempfile
from pathlib import Path

port, arguments, script = sys.argv[1:4]
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "script.py")
    path.write_text(script)
    agents = []
    for node, devices in enumerate((2, 1)):
        given = json.loads(arguments) | {"devices": devices, "num_nodes": 2}
        agents.append(subprocess.Popen([
            sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1",
            "--master-port", port, "--nnodes", "2", "--node-rank", str(node),
            "--nproc-per-node", str(devices), str(path), json.dumps(given),
        ]))
    sys.exit(max(agent.wait() for agent in agents))
"""


@pytest.mark.feature("Launch", "Lightning's own launcher, torchrun")
def test_lightning_and_torchrun_launch_the_ranks() -> None:
    """Two stages by the strategy's name, three on two hosts with as many microbatches: the same
    bits.
    """
    by_name = json.dumps({"devices": 2, "strategy": "pipeshift"})
    by_lightning = results_of(launch_script(SCRIPT, by_name))
    require_like_one_device(by_lightning, 2)
    assert by_lightning[0]["microbatches"] == 8
    arguments = json.dumps({"strategy": {"microbatches": 8}})
    by_torchrun = results_of(launch_script(UNEVEN_HOSTS, str(free_port()), arguments, SCRIPT))
    require_like_one_device(by_torchrun, 3)
    assert {result["total"] for result in by_lightning + by_torchrun} == {by_torchrun[0]["total"]}


def without_a_launcher(how: Any) -> Any:
    for name in list(os.environ):
        if name in RANK_VARIABLES or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    _, trainer, module = fit({**how, "devices": 1}, SequentialMLP, points(3), max_epochs=2)
    return parameters_of(module), trainer.world_size


def test_one_device() -> None:
    ((parameters, world_size),) = run_ranks(on_rank, 1, without_a_launcher, {}, (), {})
    expected = on_one_device(fit, SequentialMLP, points(3), max_epochs=2)[0]["parameters"]
    assert world_size == 1
    assert not differences(parameters, expected, 1e-4, 1e-6)


def of_so_many_devices(how: Any, devices: int) -> None:
    fit({**how, "devices": devices}, SequentialMLP, points(3), max_epochs=1)


@pytest.mark.parametrize(("processes", "devices"), [(2, 3), (3, 2)])
def test_devices_that_do_not_match_the_processes(processes: int, devices: int) -> None:
    args: tuple[Any, ...] = (of_so_many_devices, {}, (devices,), {})
    for outcome in run_ranks(on_rank, processes, *args, expect_failure=True):
        assert outcome.error_type == "ConfigurationError", str(outcome)
        for part in ("devices", str(processes), str(devices)):
            assert part in outcome.message


def of_unequal_hosts(how: Any, hosts: Sequence[int]) -> Any:
    """One host has one rank, the other two: node rank times devices would be wrong."""
    rank = int(os.environ["RANK"])
    devices = hosts.count(hosts[rank])
    os.environ.update(
        GROUP_RANK=str(hosts[rank]),
        LOCAL_RANK=str(rank - hosts.index(hosts[rank])),
        LOCAL_WORLD_SIZE=str(devices),
        GROUP_WORLD_SIZE="2",
    )
    how = {**how, "devices": devices, "num_nodes": 2}
    _, trainer, module = fit(how, SequentialMLP, points(3), max_epochs=2)
    strategy: Any = trainer.strategy
    return parameters_of(module), trainer.global_rank, trainer.world_size, strategy.stage


@pytest.mark.parametrize(
    ("hosts", "machines", "stages"),
    [([0, 1, 1], [[0, 1, 2]], [0, 1, 2]), ([0, 0, 1], [[0, 1], [2]], [0, 1, 0])],
)
def test_rank_and_world_size_are_the_launchers(hosts: Any, machines: Any, stages: Any) -> None:
    strategy = {"microbatches": 4, "virtual_machines": machines}
    results = run_ranks(on_rank, 3, of_unequal_hosts, strategy, (hosts,), {})
    expected = results[0][0]
    if len(machines) == 1:
        expected = on_one_device(fit, SequentialMLP, points(3), max_epochs=2)[0]["parameters"]
    for rank, (parameters, global_rank, world_size, stage) in enumerate(results):
        assert (global_rank, world_size, stage) == (rank, 3, stages[rank])
        assert not differences(parameters, expected, 1e-4, 1e-6)


FAILING = SCRIPT.replace(
    "trainer.fit(module, points(3))",
    """
    class Fails(L.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            if trainer.global_rank == trainer.world_size - 1:
                raise RuntimeError("the coffee is cold")
    trainer.callbacks.append(Fails())
    trainer.fit(module, points(3))
    """.strip(),
)


@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_a_failing_rank_ends_the_script_with_its_reason(launcher: str) -> None:
    arguments = json.dumps({"devices": 2})
    if launcher == "lightning":
        launched = launch_script(FAILING, arguments, check=False)
    else:
        launched = launch_torchrun(FAILING, 2, arguments, check=False)
    assert launched.returncode != 0
    assert "the coffee is cold" in launched.output


# Ends when every process that the script has started has closed its output.
WITH_ALL_ITS_PROCESSES = """
import subprocess, sys
found = subprocess.run([sys.executable, *sys.argv[1:]], capture_output=True, text=True)
print(found.stdout, found.stderr)
sys.exit(found.returncode)
"""

BEFORE_THEY_MEET = SCRIPT.replace(
    "arguments = json.loads(sys.argv[1])",
    """
    import os
    arguments = json.loads(sys.argv[1])
    if arguments.pop("ends") and os.environ.get("LOCAL_RANK") == "1":
        sys.exit("the coffee is cold")
    """.strip(),
)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_before_they_are_connected_ends_all(rank: int, tmp_path: Path) -> None:
    """Without it, the others wait for half an hour."""
    (tmp_path / "train.py").write_text(BEFORE_THEY_MEET)
    arguments = [str(tmp_path / "train.py"), json.dumps({"devices": 2, "ends": rank == 1})]
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1] if rank == 0 else free_port()
        environment = {"MASTER_PORT": str(port)}
        launched = launch_script(WITH_ALL_ITS_PROCESSES, *arguments, check=False, env=environment)
    assert launched.returncode == 1
    words = "another program uses that port" if rank == 0 else "process of rank 1 ended with exit"
    assert words in launched.output
    # That of the user's script, which ends with the reason.
    assert launched.output.count("Traceback") == (rank == 0)
    for name in ("TCPStore", "EADDRINUSE", "DistNetworkError"):
        assert name not in launched.output
