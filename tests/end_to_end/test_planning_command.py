"""`pipeshift plan`, and what a run makes of the plan that it wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeshift import PipeShiftError, PipeShiftStrategy, Plan, PlanError
from lightning_pipeshift.commands import planning as planning_command
from lightning_pipeshift.plan.document.files import load_cluster, load_profile, save_profile
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.search.request import PlanRequest
from lightning_pipeshift.testing.processes import free_port
from lightning_pipeshift.testing.ranks import run_ranks
from tests import ROOT
from tests.end_to_end.test_changing_plans import go_by_sleep, hearing
from tests.end_to_end.test_stage_orders import Heavy
from tests.features_models import quiet_trainer
from tests.models import ZOO

GB = 10**9


def profile(num_layers: int = 12, **changes: Any) -> Profile:
    layers = tuple(
        LayerProfile(
            f"h.{number}",
            parameter_bytes=GB // 10,
            gradient_bytes=GB // 10,
            optimizer_bytes=GB // 5,
            payload_bytes=10**6,
            payload_gradient_bytes=10**6,
            saved_bytes=GB // 20,
            input_bytes=10**6,
        )
        for number in range(num_layers)
    )
    kinds = {"big": KindProfile((0.01,) * num_layers, (0.02,) * num_layers)}
    return Profile(layers, kinds, **{"samples": 4.0, "microbatches": 8, **changes})


def plan_for(folder: Path, cluster: str, *arguments: str, **changes: Any) -> tuple[str, Plan]:
    """The command's output for these machines, and the plan that it wrote."""
    (folder / "cluster.yaml").write_text(cluster)
    save_profile(profile(**changes), folder / "profile.json")
    command = ["--cluster", str(folder / "cluster.yaml"), "--profile", str(folder / "profile.json")]
    out = folder / "out.json"
    planning_command.main([*command, "--out", str(out), *arguments])
    return str(out), Plan.load(out)


@pytest.mark.parametrize("given", ["0", "-4", "many"])
def test_a_step_has_at_least_one_sample(
    given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        plan_for(tmp_path, "devices:\n- {host: a, kind: big}\n", f"--batch-size={given}")
    assert f"argument --batch-size: '{given}' is not a whole number" in capsys.readouterr().err


def test_the_samples_of_a_step_that_its_microbatches_do_not_divide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have 3, 3, 2 and 2 samples. In units of 20 ms, a sample's forward on a stage::

    stage 0   F0 0-3, F1 3-6,  B0 12-18, F2 18-20, B1 21-27, F3 27-29, B2 29-33, B3 35-39
    stage 1   F0 3-6, B0 6-12, F1 12-15, B1 15-21, F2 21-23, B2 23-27, F3 29-31, B3 31-35
    """
    cluster = "devices:\n- {host: a, kind: big, count: 2}\n"
    given = {"samples": 3.0, "microbatches": 4, "batch_samples": 10.0}
    fixed = ("--virtual-machines", "1", "--microbatches", "4")
    _, plan = plan_for(tmp_path, cluster, *fixed, **given)
    assert "a step has 10 samples" in capsys.readouterr().out
    assert plan.prediction is not None
    # Four equal microbatches of 2.5 samples would take 750 ms.
    assert plan.prediction.step_seconds == pytest.approx(0.78, abs=2e-3)


def test_machines_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = "devices:\n- {host: a, kind: big}\n- {host: a, kind: big, speed: 0.5}\n"
    _, plan = plan_for(tmp_path, cluster, "--virtual-machines", "1", "--microbatches", "8")
    assert sorted(plan.placement.counts[0]) == [4, 8], "twice the speed, twice the layers"
    assert sorted(plan.ranks[0]) == [0, 1]
    assert plan.kinds == (("big", "big"),)
    printed = capsys.readouterr().out
    assert str(plan) in printed
    for words in ("uniform split", "samples per second", "peak of memory", "times the uniform"):
        assert words in printed
    # 8 slow forwards and backwards of 6 layers at least, where the plan takes those of 4.
    assert plan.prediction is not None
    assert 8 * 8 * 0.03 <= plan.prediction.step_seconds < 8 * 12 * 0.03


def test_an_asynchronous_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = "devices:\n- {host: a, kind: big}\n- {host: a, kind: big, speed: 0.5}\n"
    arguments = ("--virtual-machines", "1", "--schedule", "async")
    _, plan = plan_for(tmp_path, cluster, *arguments)
    assert sorted(plan.placement.counts[0]) == [4, 8]
    assert plan.microbatches == 1
    # 8 layers or 4 slow ones, of 32 samples at once.
    assert plan.prediction is not None
    assert plan.prediction.step_seconds == pytest.approx(8 * 8 * 0.03, rel=1e-3)
    printed = capsys.readouterr().out
    assert "predicted pace: 1.92 s a minibatch" in printed
    assert "\na minibatch   " in printed
    with pytest.raises(PlanError, match="does not split a batch"):
        plan_for(tmp_path, cluster, *arguments, "--microbatches", "4")


def test_a_thousand_devices(tmp_path: Path) -> None:
    cluster = (
        "devices:\n- {host: node, hosts: 128, kind: big, count: 8, memory: 80GB}\n"
        "links: {inside: {bandwidth: 200 Gbit/s}, outside: {bandwidth: 10 Gbit/s, latency: 50us}}\n"
    )
    _, plan = plan_for(tmp_path, cluster, "--batch-size", "32768", num_layers=96)
    assert sum(map(len, plan.ranks)) == 1024


def test_memory_that_does_not_suffice_is_recomputed(tmp_path: Path) -> None:
    fits = "devices:\n- {host: a, kind: big, count: 2, memory: 3200MB}\n"
    _, plan = plan_for(tmp_path, fits, "--virtual-machines", "1", "--microbatches", "8")
    assert plan.recompute
    assert plan.prediction is not None
    assert max(plan.prediction.memory_bytes[0]) <= 0.9 * 3.2e9, "a tenth is left free"
    enough = "devices:\n- {host: a, kind: big, count: 2, memory: 29GB}\n"
    _, plan = plan_for(tmp_path, enough, "--virtual-machines", "1", "--microbatches", "8")
    assert not plan.recompute


def test_a_budget_is_no_more_than_a_device_has(tmp_path: Path) -> None:
    machines = (
        "devices:\n- {host: a, kind: big, memory: 3200MB}\n- {host: a, kind: big, memory: 40GB}\n"
    )
    _, plan = plan_for(
        tmp_path, machines, "--virtual-machines", "1", "--microbatches", "8", "--budget", "20GB"
    )
    assert plan.prediction is not None
    peaks = dict(zip(plan.ranks[0], plan.prediction.memory_bytes[0], strict=True))
    assert peaks[0] <= 0.9 * 3.2e9
    assert peaks[1] <= 20e9


def test_links_that_are_not_given_are_assumed_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Free links would make a cut between hosts cost nothing."""
    machines = "devices:\n- {host: a, kind: big}\n- {host: b, kind: big}\n"
    _, plan = plan_for(tmp_path, machines, "--virtual-machines", "1", "--microbatches", "8")
    printed = " ".join(capsys.readouterr().out.split())
    assert "assumed are between hosts `outside: {latency: 100us, bandwidth: 1 Gbit/s}`" in printed
    assert plan.prediction is not None
    slow = plan.prediction.step_seconds
    given = f"{machines}links: {{outside: {{latency: 0, bandwidth: 1e15}}}}\n"
    _, plan = plan_for(tmp_path, given, "--virtual-machines", "1", "--microbatches", "8")
    assert "assumed" not in capsys.readouterr().out
    assert plan.prediction is not None
    # The first payload and the last gradient: 1 MB each, for 4 of 4 samples.
    assert slow - plan.prediction.step_seconds >= 2 * 1e6 / 125e6


def test_a_plan_keeps_the_number_of_samples_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    links = "links: {inside: {latency: 0, bandwidth: 1e15}}\n"
    machines = f"devices:\n- {{host: a, kind: big, count: 4}}\n{links}"
    seconds = {}
    for count in (1, 4):
        number = str(count)
        _, plan = plan_for(tmp_path, machines, "--virtual-machines", number, "--batch-size", "64")
        printed = " ".join(capsys.readouterr().out.split())
        assert "a step has 64 samples" in printed
        assert ("set its `batch_size` to 16" in printed) == (count == 4)
        assert plan.step_samples == 64, "what a run with the plan is compared with"
        assert plan.prediction is not None
        seconds[count] = plan.prediction.step_seconds
    # 64 samples of 12 layers, 0.0075 s each, on four devices: either way the same work.
    assert seconds[4] == pytest.approx(64 * 12 * 0.03 / 4 / 4, rel=0.01)
    assert seconds[4] <= seconds[1] <= 1.5 * seconds[4]
    with pytest.raises(PlanError, match="the 30 samples of a step cannot be divided equally"):
        plan_for(tmp_path, machines, "--virtual-machines", "4", "--batch-size", "30")


def test_idle_devices_and_what_limits_each_depth_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = (
        "devices:\n- {host: a, kind: big, count: 2}\n- {host: b, kind: big, speed: 0.01}\n"
        "links: {inside: {bandwidth: 10 GB/s}, outside: {bandwidth: 10 GB/s}}\n"
    )
    plan_for(tmp_path, machines)
    printed = capsys.readouterr().out
    (idle,) = [line for line in printed.splitlines() if "none: idle" in line]
    assert "big at 0.01" in idle
    assert idle.split()[-1] == "b"
    # One model for both: no other depth is said to be faster than the plan.
    (chosen,) = re.findall(r"\(chosen\) ([\d.]+)", " ".join(printed.split()))
    rates = re.findall(r"\d+ stages? ([\d.]+),", " ".join(printed.split()))
    assert rates
    assert all(float(rate) <= float(chosen) for rate in rates)


def test_each_devices_part_of_the_samples_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """One virtual machine of two devices, and one of a device of half the speed."""
    devices = [Device("a", "big"), Device("a", "big"), Device("b", "big", speed=0.5)]
    request = PlanRequest(
        virtual_machines=((0, 1), (2,)), batch_shares=(3.0, 1.0), step_samples=64.0, microbatches=4
    )
    made = planning_command.make(profile(), Cluster(tuple(devices)), request)
    printed = planning_command.report(made, Cluster(tuple(devices)))
    (header,) = [line for line in printed.splitlines() if "part of the samples" in line]
    begin = header.index("part of the samples")
    rows = [line for line in printed.splitlines() if " big" in line]
    found = {(row.split()[-1], row[begin:].split()[0]) for row in rows}
    assert found == {("a", "75.0%"), ("b", "25.0%")}
    # The even cut of the same shares is this plan.
    assert "1.00 times the uniform split's" in printed


def test_the_uniform_split_is_compared_only_where_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = (
        "devices:\n- {host: a, kind: big, memory: 2GB}\n- {host: a, kind: big, memory: 9GB}\n"
    )
    plan_for(tmp_path, machines, "--virtual-machines", "1", "--recompute", "none")
    printed = capsys.readouterr().out
    assert "the uniform split does not fit in memory" in printed
    assert "times the uniform" not in printed


def test_1f1b_is_named_where_an_asynchronous_pipeline_does_not_fit(tmp_path: Path) -> None:
    machines = "devices:\n- {host: a, kind: big, count: 2, memory: 4GB}\n"
    arguments = ("--virtual-machines", "1", "--recompute", "none", "--schedule", "async")
    with pytest.raises(PlanError, match="schedule='1f1b' with 8 microbatches"):
        plan_for(tmp_path, machines, *arguments)


def test_help_and_plans_from_files_need_no_torch(tmp_path: Path) -> None:
    plan_for(tmp_path, "devices:\n- {host: a, kind: big, count: 2}\n")
    code = (
        "import sys, pipeshift_command\n"
        "try:\n    pipeshift_command.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'lightning'} & sys.modules.keys()\n"
    )
    files = ["--cluster", "cluster.yaml", "--profile", "profile.json"]
    for arguments in (["--help"], files):
        words = [sys.executable, "-c", code, "plan", *arguments]
        ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        assert ("usage: pipeshift plan" if "--help" in arguments else "uniform") in ended.stdout


def test_no_plan_fits(tmp_path: Path) -> None:
    small = "devices:\n- {host: a, kind: big, count: 2, memory: 1GB}\n"
    with pytest.raises(PlanError, match=r"stage \d.*GB"):
        plan_for(tmp_path, small, "--virtual-machines", "1")


def test_half_of_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="needs both, or --config"):
        planning_command.main(["--cluster", str(tmp_path / "cluster.yaml")])


def test_a_kind_that_was_never_measured(tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match=r"the profile has no measurements of the kind 'other'.*'big'"
    ):
        plan_for(tmp_path, "devices:\n- {host: a, kind: other}\n")


# --- the machines in hand ---


class Wide(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def training_step(self, batch: Any) -> Tensor:
        (x,) = batch
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class Rows(L.LightningDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(80, 64)), batch_size=self.batch_size)


class TwoHeavy(Wide):
    """Nearly all work is in one of two layers: two replicas take half of the time of two stages.
    The times are those of a clock that the layers turn.
    """

    def __init__(self) -> None:
        super().__init__()
        go_by_sleep()
        self.layers = nn.ModuleList(Heavy(times, width=64) for times in (1, 16))

    def configure_layers(self) -> list[nn.Module]:
        return list(self.layers)


CONFIGURATION = """
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  callbacks: [{class_path: lightning.pytorch.callbacks.ModelCheckpoint}]
  strategy:
    class_path: lightning_pipeshift.PipeShiftStrategy
    init_args: {microbatches: 2, virtual_machines: 1, profile_steps: 4}
model: {class_path: tests.end_to_end.test_planning_command.Wide}
data: {class_path: tests.end_to_end.test_planning_command.Rows}
"""


def pipeshift(folder: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command with ``config.yaml`` of a folder."""
    return subprocess.run(
        [sys.executable, "-m", "lightning_pipeshift", command, "--config=config.yaml", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            # Lightning, which launches the ranks, would take one that somebody else may take too.
            "MASTER_PORT": str(free_port()),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_two_devices_that_become_two_virtual_machines_train_on_as_many_samples(
    tmp_path: Path,
) -> None:
    text = CONFIGURATION.replace("virtual_machines: 1, ", "").replace("Wide", "TwoHeavy")
    (tmp_path / "config.yaml").write_text(text)
    ran = pipeshift(tmp_path, "plan")
    assert ran.returncode == 0, ran.stderr[-3000:]
    printed = " ".join(ran.stdout.split())
    assert "a step has 8 samples, as asked for, in 2 virtual machines" in printed
    assert "so set its `batch_size` to 4," in printed
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.ranks in (((0,), (1,)), ((1,), (0,)))
    assert plan.step_samples == 8
    with_plan = ("--trainer.strategy.init_args.plan=plan.json",)
    twice = pipeshift(tmp_path, "fit", *with_plan)
    assert twice.returncode != 0
    assert "steps of 8 samples, and the first step of this run has 16" in twice.stderr
    as_said = pipeshift(tmp_path, "fit", *with_plan, "--data.batch_size=4")
    assert as_said.returncode == 0, as_said.stderr[-3000:]
    assert "steps of 8 samples" not in as_said.stderr


def test_measured_planned_and_not_trained(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIGURATION)
    ran = pipeshift(tmp_path, "plan")
    assert ran.returncode == 0, ran.stderr[-3000:]
    plan = Plan.load(tmp_path / "plan.json")
    assert str(plan) in ran.stdout
    assert plan.prediction is not None
    assert plan.microbatches == 2
    assert len(plan.layers) == 6
    measured = load_profile(tmp_path / "plan.profile.json")
    (times,) = measured.kinds.values()
    assert min(times.forward) > 0
    assert measured.layers[0].parameter_bytes == 4 * (64 * 64 + 64)
    assert measured.layers[0].optimizer_bytes >= 2 * 4 * (64 * 64 + 64)
    # Each layer saves its input, which the one before has made, and the first one the batch.
    assert sum(layer.saved_bytes for layer in measured.layers) >= 4 * 4 * 64
    assert load_cluster(tmp_path / "plan.cluster.yaml").num_ranks == 2
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"config.yaml", "plan.json", "plan.profile.json", "plan.cluster.yaml"}


# --- using a plan ---


def run_plan(document: dict[str, Any]) -> Any:
    Path("plan.json").write_text(json.dumps(document))
    trainer = quiet_trainer({"devices": 2, "pipeshift": {"plan": "plan.json"}}, max_epochs=1)
    module = ZOO["sequential"].build()
    try:
        with hearing() as heard:
            trainer.fit(module, ZOO["sequential"].loader(2))
    except PipeShiftError as error:
        return f"{type(error).__name__}: {error}"
    strategy: Any = trainer.strategy
    if "step_samples" in document:
        return strategy.plan.step_samples, [line for line in heard if "made for steps" in line]
    return (
        strategy.topology.ranks,
        strategy.plan.placement.counts,
        strategy.stage,
        strategy.plan.recompute,
    )


def written() -> dict[str, Any]:
    trainer = quiet_trainer({"devices": 1, "strategy": PipeShiftStrategy()}, max_epochs=1)
    trainer.fit(ZOO["sequential"].build(), ZOO["sequential"].loader(1))
    plan: Plan = trainer.strategy.plan  # type: ignore[attr-defined]
    document: dict[str, Any] = json.loads(plan.to_json())
    return document


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """A plan for one stage, to be edited."""
    (found,) = run_ranks(written, 1)
    return {**found, "microbatches": 4}


def test_a_plan_names_ranks_and_what_is_recomputed(document: dict[str, Any]) -> None:
    edited = {**document, "placement": [[2, 3]], "ranks": [[1, 0]], "recompute": [[0, 1]]}
    first, second = run_ranks(run_plan, 2, edited)
    assert first[:2] == second[:2] == (((1, 0),), ((2, 3),))
    assert (first[2], second[2]) == (1, 0)
    assert first[3] == ((0, 1),)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"placement": [[2, 3]], "ranks": [[0, 1]], "kinds": [["abacus", "abacus"]]},
            "PlanError: The plan was made for another cluster: for stage 0 it has a 'abacus'",
        ),
        (
            {"placement": [[1, 2, 2]], "ranks": [[0, 1, 2]]},
            "PlanError: The plan is for 3 devices (its field 'ranks'), and this run has 2.",
        ),
    ],
)
def test_a_plan_for_another_cluster(
    document: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    for error in run_ranks(run_plan, 2, {**document, **changes}):
        assert words in error or "StageFailedError" in error


def test_a_run_keeps_the_samples_of_its_plans_steps_or_asks(document: dict[str, Any]) -> None:
    """A DataLoader's batch has 8 samples, in each of two virtual machines."""
    machines = {**document, "placement": [[5], [5]], "ranks": [[0], [1]]}
    for found in run_ranks(run_plan, 2, {**machines, "step_samples": 16}):
        assert found == (16, [])
    for error in run_ranks(run_plan, 2, {**machines, "step_samples": 8}):
        assert error == (
            "PlanError: the plan was made for steps of 8 samples, and the first step of this run"
            " has 16: 8 for each virtual machine (replica of the pipeline), of which there are 2."
            " Set the DataLoader's `batch_size` to 4; or, if you want steps of 16 samples, the"
            " plan's field 'step_samples' to 16"
        )
    # A batch size that the user may have chosen since is said, and taken.
    first, second = run_ranks(run_plan, 2, {**machines, "step_samples": 20})
    assert second == (20, []), "the first rank speaks for all"
    _, [line] = first
    assert "20 samples, and the first step of this run has 16" in line
    assert "`batch_size` to 10;" in line
    # What is not known is found out.
    for found in run_ranks(run_plan, 2, {**machines, "step_samples": 0}):
        assert found == (16, [])


def test_unequal_shares_of_a_step_are_added(document: dict[str, Any]) -> None:
    shares = {"batch_shares": [3, 1], "step_samples": 0}
    machines = {**document, "placement": [[5], [5]], "ranks": [[0], [1]]}
    for found in run_ranks(run_plan, 2, {**machines, **shares}):
        assert found == (16, []), "12 and 4"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step_samples": -8}, "'step_samples' is -8.0; it must be finite and above 0"),
        ({"recompute": [[9]]}, "'recompute' of virtual machine 0 .*is.*from 0 to 4"),
        ({"recompute": [[0, 0]]}, "each once"),
        ({"ranks": [[0, 1]]}, r"'ranks' is for virtual machines .*of \[2\] stages.*has \[1\]"),
        ({"ranks": [[0], [1]]}, "'ranks' has entries for 2 virtual machines.*has 1"),
        ({"batch_shares": [1, -1]}, "'batch_shares'"),
        ({"batch_shares": [-1]}, "share -1"),
        ({"kinds": [[1]]}, r"'kinds\[0\]\[0\]' is 1; it must be a text"),
        (
            {"prediction": {"costs": []}},
            "no field 'step_seconds'; add it, or make the plan again",
        ),
    ],
)
def test_an_edited_plan_that_breaks_an_invariant(
    document: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        Plan.from_json(json.dumps({**document, **changes}))
