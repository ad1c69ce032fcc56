"""`pipeshift plan` for a run with ``MemoryCompression``, also with `--tensors`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeshift import ConfigurationError, Plan
from lightning_pipeshift.commands import planning as planning_command
from lightning_pipeshift.commands.cli import main
from lightning_pipeshift.plan.document.files import load_cluster, load_profile, save_profile
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.inputs.saved_tensors import SavedTensor
from lightning_pipeshift.testing.ranks import run_ranks
from tests.end_to_end.test_memory_compression import SAMPLES, WIDTH, same_bits, train

MB = 10**6


class Rows(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        labels = torch.randint(4, (40 * SAMPLES,))
        data = TensorDataset(torch.randn(40 * SAMPLES, WIDTH), labels)
        return DataLoader(data, batch_size=SAMPLES)


CONFIGURATION = """
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  strategy:
    class_path: lightning_pipeshift.PipeShiftStrategy
    init_args: {microbatches: 8, virtual_machines: 1, profile_steps: 4, partition: uniform}
model: {class_path: tests.end_to_end.test_memory_compression.Trains}
data: {class_path: tests.end_to_end.test_memory_command.Rows}
"""


def run_command(arguments: Sequence[str]) -> None:
    """Runs the command on one rank."""
    sys.argv = ["pipeshift", *arguments, "--config", "config.yaml"]
    main()


def pipeshift(folder: Path, *arguments: str) -> str:
    """What the command prints on the first rank of two, in a folder."""
    (folder / "config.yaml").write_text(CONFIGURATION)
    first, second = run_ranks(run_command, 2, arguments, cwd=folder, expect_failure=True)
    assert not first.failed, str(first)
    assert not second.failed, str(second)
    return first.output


def number(text: str) -> float:
    """A size, as the report has it."""
    digits, unit = text.split()
    return float(digits) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


# --- pipeshift plan --tensors ---


def test_every_tensor_is_shown_and_each_stage(tmp_path: Path) -> None:
    shown = pipeshift(tmp_path, "plan", "--tensors", "--budget", "1.4MB")
    assert "LightningCLI's args" not in shown
    size = r"([\d.]+ \w+)"
    heads = re.findall(rf"── stage (\d): at most {size} of 1.4 MB \({size} .*; {size}", shown)
    assert [head[0] for head in heads] == ["0", "1"]
    for _, most, static, before in heads:
        assert number(static) < number(most) <= 1.4e6
        assert number(most) <= number(before)
    assert number(heads[0][3]) > 1.4e6, "it would not fit if everything stayed"
    first = shown.split("── stage 1")[0]
    table = [line for line in first.splitlines() if re.search(r"(float32|bool)\[", line)]
    sizes = [re.search(r"\] +([\d.]+ k?B) ", line) for line in table]
    assert all(sizes)
    made = " ".join(table)
    # The input, what its modules have made, and the three tensors of the user's own function.
    for maker in ("input", "norm: native_layer_norm", "up: addmm", "where", "gt", "gelu"):
        assert maker in made, made
    # Of the microbatch's 16 rows of 256 numbers in 4 bytes, and in 1; the batch is there anyway.
    assert {number(size[1]) for size in sizes if size} <= {64, 4.1e3, 16.4e3}
    assert "code behind" in shown.split("── stage 1")[1], "the loss saves something, too"
    assert re.search("to the host|to stage 1|made again", made)
    assert re.search(r"a step: [\d.]+ s by the simulator, [\d.]+ s if all stays", shown)
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml"}


# --- a plan ---


def test_a_plan_that_moves_tensors_is_made_and_run(tmp_path: Path) -> None:
    # One block and the head are left to the second stage: the first has to let go of something.
    shown = pipeshift(tmp_path, "plan", "--budget", "1.4MB", "--host-budget", "100MB")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.prediction is not None
    assert max(plan.prediction.memory_bytes[0]) <= 1.4 * MB
    assert any(plan.swaps) or any(plan.recompute)
    assert "least memory left" in shown
    measured = load_cluster(tmp_path / "plan.cluster.yaml")
    assert {device.memory_bytes for device in measured.devices} == {1_400_000}
    assert {device.host_bytes for device in measured.devices} == {100 * MB}
    assert min(device.host_bandwidth for device in measured.devices) > 0
    assert load_profile(tmp_path / "plan.profile.json").layers[0].tensors
    # A run with it ends with the same bits as one in which everything stays.
    own: dict[str, Any] = {"partition": "auto", "plan": plan, "profile_steps": 0}
    plain = run_ranks(train, 2, None, partition=[4, 3])
    found = run_ranks(train, 2, {"budget": "1.4MB"}, **own)
    for mine, theirs in zip(found, plain, strict=True):
        assert same_bits(mine, theirs)
        assert mine["figures"]["peak_bytes"] <= mine["figures"]["budget_bytes"]
        assert json.loads(mine["plan"]).get("swaps") == json.loads(plan.to_json()).get("swaps")
    if any(not swap.stays for swaps in plan.swaps for swap in swaps):
        assert sum(mine["figures"]["moved_bytes"] for mine in found) > 0
        # Without the plugin nobody would move anything.
        failed = run_ranks(train, 2, None, expect_failure=True, **own)
        assert failed[0].error_type == "PlanError"
        assert "Add `MemoryCompression(...)`" in failed[0].message


def offline(folder: Path, cluster: str, *arguments: str) -> Plan:
    """A plan for machines that are not there, for eight layers that save two tensors each."""
    layers = tuple(
        LayerProfile(
            f"h.{number}",
            parameter_bytes=MB,
            gradient_bytes=MB,
            optimizer_bytes=2 * MB,
            payload_bytes=MB // 10,
            saved_bytes=20 * MB,
            tensors=(SavedTensor(0, 5 * MB), SavedTensor(1, 15 * MB)),
        )
        for number in range(8)
    )
    kinds = {"big": KindProfile((0.01,) * 8, (0.02,) * 8)}
    save_profile(Profile(layers, kinds, samples=4.0, microbatches=8), folder / "profile.json")
    (folder / "cluster.yaml").write_text(cluster)
    planning_command.main(
        [
            *("--cluster", str(folder / "cluster.yaml")),
            *("--profile", str(folder / "profile.json")),
            *("--out", str(folder / "plan.json")),
            *("--virtual-machines", "1", "--microbatches", "8", "--recompute", "none"),
            *arguments,
        ]
    )
    return Plan.load(folder / "plan.json")


FOUR = "devices:\n- {{host: a, kind: big, count: 4{}}}\nlinks: {{inside: {{bandwidth: 10 GB/s}}}}\n"
WITH_HOST = ", host_memory: 1GB, host_bandwidth: 8 GB/s"


def test_budgets_for_machines_that_are_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first stage holds 4 microbatches of 40 MB, and 8 MB of weights.
    enough = offline(tmp_path, FOUR.format(", memory: 1GB"), "--budget", "auto")
    assert not enough.swaps
    # Without the plugin, who has too little gets fewer layers, and waits for who has more.
    stays = offline(tmp_path, FOUR.format(", memory: 132MB"))
    lent = offline(tmp_path, FOUR.format(", memory: 1GB"), "--budget", "132MB")
    assert {stage for swap in lent.swaps[0] for stage in swap.stages} <= {1, 2, 3}
    assert lent.prediction is not None
    assert stays.prediction is not None
    assert lent.prediction.step_seconds < 0.8 * stays.prediction.step_seconds
    assert max(lent.prediction.memory_bytes[0]) <= 132 * MB
    capsys.readouterr()
    to_host = offline(tmp_path, FOUR.format(WITH_HOST), "--budget", "60MB")
    assert any(not swap.stages for swap in to_host.swaps[0])
    printed = capsys.readouterr().out
    assert "to the host" in printed
    assert "least memory left" in printed
    assert offline(
        tmp_path, FOUR.format(WITH_HOST), "--budget", "60MB", "--host-budget", "500MB"
    ).swaps


@pytest.mark.parametrize(
    ("cluster", "arguments", "words"),
    [
        ("", ["--budget", "auto"], "memory of a device, which is unknown for 'big' on host 'a'"),
        ("", ["--budget", "60MB", "--host-budget", "1GB"], "the bandwidth to its host is unknown"),
        (", memory: 1GB", ["--host-budget", "1GB"], "needs `--budget`"),
        ("", ["--budget", "1 sack"], r"budget='1 sack'.*'20GB'"),
        (", memory: 1GB", ["--budget", "10MB"], "No plan keeps|fits in memory|needs"),
    ],
)
def test_budgets_that_mean_nothing(
    tmp_path: Path, cluster: str, arguments: list[str], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        offline(tmp_path, FOUR.format(cluster), *arguments)
