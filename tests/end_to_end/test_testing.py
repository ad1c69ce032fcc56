"""`lightning_pipeshift.testing` and `pipeshift check`: what is not the same is found and named,
what cannot be split is told with the reason, and a run that hangs or dies does not hold up the
others.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_pipeshift import Communication, ConfigurationError, PipeShiftError
from lightning_pipeshift.commands import check, cli
from lightning_pipeshift.testing import (
    CheckedRun,
    CheckReport,
    Difference,
    Failure,
    Findings,
    FoundBoundary,
    FoundCode,
    FoundLayer,
    FoundTensor,
    Split,
    check_model,
)
from lightning_pipeshift.testing import workers as workers_module
from lightning_pipeshift.testing.bits import differences
from lightning_pipeshift.testing.checking import PRELOADED, splits_of
from lightning_pipeshift.testing.ranks import warm_server
from lightning_pipeshift.testing.splits import random_cut, some_splits
from lightning_pipeshift.testing.workers import JobFailedError, Workers

LIMIT_SECONDS = 240.0
# Where a job that hangs says that it does.
WAITS = Path("waits")


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    """A process has one fork server: it is to be of use to other tests as well."""
    warm_server()


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(PRELOADED) as started:
        yield started


def place() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def process() -> int:
    return os.getpid()


def fails_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        raise ValueError(f"rank {rank} cannot\nand says more")


def dies_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os._exit(7)


def waits_on(rank: int) -> None:
    WAITS.touch()
    while int(os.environ["RANK"]) == rank:
        time.sleep(0.1)


def test_the_same_processes_do_one_job_after_another(workers: Workers) -> None:
    assert workers.run(place, world_size=2, limit_seconds=LIMIT_SECONDS) == [(0, 2), (1, 2)]
    assert workers.run(place, world_size=1, limit_seconds=LIMIT_SECONDS) == [(0, 1)]
    before = workers.run(process, world_size=2, limit_seconds=LIMIT_SECONDS)
    assert workers.run(process, world_size=2, limit_seconds=LIMIT_SECONDS) == before


@pytest.mark.parametrize(
    ("job", "limit_seconds", "kind", "line"),
    [
        (fails_on, LIMIT_SECONDS, "ValueError", "ValueError: rank 1 cannot"),
        (dies_on, LIMIT_SECONDS, "crash", "crash: rank 1 died, exit code 7"),
        (waits_on, 1.0, "hang", "hang: still running after 1 s"),
    ],
)
def test_a_job_that_fails_is_told_and_the_next_one_runs(
    workers: Workers,
    job: object,
    limit_seconds: float,
    kind: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, waits = time.monotonic(), workers.scratch / "cwd" / WAITS

    def monotonic() -> float:
        """The limit begins when there is something that hangs."""
        return time.monotonic() if kind != "hang" or waits.exists() else begun

    clock = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
    monkeypatch.setattr(workers_module, "time", clock)
    with pytest.raises(JobFailedError) as caught:
        workers.run(job, 1, world_size=2, limit_seconds=limit_seconds)  # type: ignore[arg-type]
    assert (caught.value.kind, caught.value.first_line) == (kind, line)
    if kind == "hang":
        assert "waits_on" in caught.value.details
    assert workers.run(place, world_size=2, limit_seconds=LIMIT_SECONDS) == [(0, 2), (1, 2)]


def test_a_difference_is_one_of_bits() -> None:
    state = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([0.0, float("nan")])}
    same = {name: value.clone() for name, value in state.items()}
    assert differences(state, same) == {}
    same["a"][1] = torch.nextafter(same["a"][1], torch.tensor(0.0))
    same["b"][0] = -0.0
    found = differences(state, same)
    assert 0 < found["a"] < 1e-6
    assert "b" in found
    assert differences(state, {"a": state["a"]}) == {"b": float("inf")}


@pytest.mark.parametrize(("layers", "stages"), [(2, 3), (3, 3), (9, 2), (40, 3)])
def test_a_random_cut_is_the_same_each_time_and_fits(layers: int, stages: int) -> None:
    cut = random_cut("model", layers, stages)
    assert cut == random_cut("model", layers, stages)
    assert (len(cut), sum(cut)) == (stages, layers)
    assert all(cut) == (layers >= stages)


def test_some_splits_have_every_pair_of_values() -> None:
    values: list[Sequence[Any]] = [(2, 3), ("measured", "random"), ("1f1b", "gpipe")]
    found = some_splits(*values)
    assert len(found) == 4
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert len({(split[one], split[other]) for split in found}) == 4


# --- models ---


class Clean(L.LightningModule):
    """Five layers, code between them, dropout, a batch norm, a tensor that skips layers."""

    seen: Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Sequential(nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 1))
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        first = x = self.stem(x)
        for block in self.blocks:
            x = block(x).relu() * self.scale
        loss = self.loss_of(self.head(x + first))
        self.seen += 1
        self.log("loss", loss)
        return loss

    def loss_of(self, output: Tensor) -> Tensor:
        return output.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class RankDependent(Clean):
    """Computes something else on the second rank, or where there are two.

    Args:
        what: what differs.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        if what == "parameter":
            for parameter in self.head.parameters():
                nn.init.constant_(parameter, self.rank + 1)

    @property
    def rank(self) -> int:
        return int(os.environ["RANK"])

    def loss_of(self, output: Tensor) -> Tensor:
        size = int(os.environ["WORLD_SIZE"])
        if self.what == "logged value":
            self.log("size", float(size))
        if self.what == "loss":
            return super().loss_of(output) + size
        if self.what == "program":
            return super().loss_of(output) + self.rank
        return super().loss_of(output)

    def configure_optimizers(self) -> Any:
        momentum = 0.9
        if self.what == "optimizer state":
            momentum -= int(os.environ["WORLD_SIZE"]) / 4
        # Nothing is learned, so that only one thing differs.
        return torch.optim.SGD(self.parameters(), lr=0.0, momentum=momentum)


class Unrepeatable(Clean):
    def loss_of(self, output: Tensor) -> Tensor:
        return super().loss_of(output) * random.SystemRandom().random()


class OwnBackward(Clean):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Returns(Clean):
    """A layer near the end computes on what comes from its successor, and the step reads."""

    def loss_of(self, output: Tensor) -> Tensor:
        loss = super().loss_of(output) + self.blocks[1](output.expand(-1, 8)).mean()
        return loss if loss > 0 else -loss


class Broken(Clean):
    """Raises, or ends its process, where there are several."""

    def __init__(self, dies: bool) -> None:
        super().__init__()
        self.dies = dies

    def on_train_batch_start(self, *_: Any) -> None:
        if os.environ["RANK"] == "1":
            if self.dies:
                os._exit(7)
            raise ValueError("the user's own exception")


class Unseeded(Dataset):
    """Other samples each time."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        dice = random.SystemRandom()
        return (torch.tensor([dice.random() for _ in range(4)]),)


class Rows(L.LightningDataModule):
    """Batches that are drawn anew by everyone who asks for them, and halved on their way."""

    def train_dataloader(self) -> Any:
        return DataLoader(Unseeded(), batch_size=4, shuffle=True)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [part / 2 for part in batch]


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(4, 4, generator=generator),) for _ in range(4)]


def on_two_stages(module: Any, **options: Any) -> CheckReport:
    return check_model(
        module, batches, **{"stages": [2], "cuts": ["uniform"], "steps": 2, **options}
    )


# --- what is said of them ---


def test_a_clean_model() -> None:
    report = check_model(Clean, Rows(), cuts=["measured", [1, 3, 1]], schedules=["1f1b", "gpipe"])
    report.raise_if_different()
    assert report.ok
    assert report.is_repeatable is None
    assert [(run.split, run.verdict) for run in (report.one_stage, *report.runs)] == [
        (Split(1, "measured", "1f1b"), "trains"),
        (Split(2, "measured", "1f1b"), "same bits"),
        (Split(3, "measured", "gpipe"), "same bits"),
        (Split(3, (1, 3, 1), "1f1b"), "same bits"),
    ]
    assert report.runs[-1].counts == (1, 3, 1)
    assert len(report.one_stage.losses) == 3

    found = report.findings
    assert [layer.name for layer in found.layers] == [
        "stem",
        "blocks.0",
        "blocks.1",
        "head.0",
        "head.2",
    ]
    assert found.layers[0].num_parameters == 4 * 8 + 8
    assert found.layers[0].forward_seconds is not None
    first, second, third, last = found.boundaries
    assert (first.before, first.after, first.num_bytes) == ("stem", "blocks.0", 2 * 8 * 4)
    assert [(t.layer, t.function, t.needed_by) for t in second.payload] == [
        ("stem", None, ("code behind blocks.1",)),
        ("blocks.0", "scale", ("code behind blocks.1",)),
        ("blocks.0", "mul", ("blocks.1",)),
    ]
    assert [t.shape for t in second.payload] == [(2, 8), (), (2, 8)]
    assert [t.function for t in (*third.payload, *last.payload)] == ["add", "dropout"]
    assert [(code.after, dict(code.functions)) for code in found.code] == [
        ("blocks.0", {"relu": 1, "mul": 1}),
        ("blocks.1", {"relu": 1, "mul": 1, "add": 1}),
        ("head.0", {"dropout": 1}),
        ("head.2", {"square": 1, "mean": 1, "div": 1}),
    ]
    assert (found.shared, found.flows_back) == ((), ())

    text = str(report)
    for words in ("3 steps of 2 microbatches", "same bits", "2 x 8 float32 from it", "relu, mul"):
        assert words in text
    document = json.loads(report.to_json())
    assert document["ok"] is True
    assert document["runs"][2]["split"] == {"stages": 3, "cut": [1, 3, 1], "schedule": "1f1b"}
    assert document["findings"]["boundaries"][0]["payload"][0]["dtype"] == "torch.float32"


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("parameter", {("parameter", "head.2.bias", None), ("loss", "loss", 0)}),
        ("loss", {("loss", "loss", 0), ("logged value", "loss", 0)}),
        ("logged value", {("logged value", "size", 0)}),
        ("optimizer state", None),
    ],
)
def test_what_differs_is_named(what: str, found: Any) -> None:
    report = on_two_stages(partial(RankDependent, what))
    assert not report.ok
    assert report.is_repeatable is True
    (run,) = report.runs
    assert run.verdict == "differs"
    named = {(each.kind, each.name, each.step) for each in run.differences}
    if found is None:
        assert {kind for kind, _, _ in named} == {what}
        assert ("optimizer state", "head.2.weight: momentum_buffer", None) in named
    else:
        assert found <= named
    assert all(each.distance is None or each.distance > 0 for each in run.differences)
    with pytest.raises(AssertionError, match="Differs from one stage"):
        report.raise_if_different()


def test_a_model_that_is_never_the_same() -> None:
    report = on_two_stages(Unrepeatable)
    assert (report.ok, report.is_repeatable) == (False, False)
    assert "Make it repeatable first" in str(report)


def test_what_is_refused_is_told_with_the_reason() -> None:
    report = on_two_stages(partial(RankDependent, "program"), cuts=["uniform", [1, 4]])
    assert (report.one_stage.verdict, report.ok, report.is_repeatable) == ("trains", False, True)
    for run in report.runs:
        assert run.verdict == "refused"
        assert run.failure is not None
        assert run.failure.kind == "LayerError"
        assert "stage 0 ended it at `add`" in run.failure.message
        assert "test_testing.py" in run.failure.message
    text = str(report)
    assert "Refused with LayerError (2 stages, uniform cut, 1f1b; 2 stages, layers [1, 4]" in text
    # What one stage has shown is told all the same.
    assert [code.after for code in report.findings.code][-1] == "head.2"
    assert "Make it repeatable" not in text


def test_what_one_stage_refuses_is_not_split() -> None:
    report = on_two_stages(OwnBackward())
    assert (report.one_stage.verdict, report.runs, report.ok) == ("refused", (), False)
    assert "overrides `backward`" in str(report)


def test_reads_and_values_that_travel_back_are_told() -> None:
    report = on_two_stages(Returns)
    report.raise_if_different()
    assert report.findings.flows_back == (("head.2", "blocks.1"),)
    assert dict(report.findings.code[-1].reads) == {"__bool__": 1}
    text = str(report)
    assert "reads values by __bool__" in text
    assert "blocks.1 takes what comes from head.2, a later layer" in text


@pytest.mark.parametrize(
    ("dies", "kind", "words"),
    [(False, "ValueError", "the user's own exception"), (True, "crash", "rank 1 died")],
)
def test_a_run_that_fails_is_told(dies: bool, kind: str, words: str) -> None:
    report = on_two_stages(partial(Broken, dies))
    (run,) = report.runs
    assert run.verdict == "fails"
    assert run.failure is not None
    assert run.failure.kind == kind
    assert words in run.failure.message
    assert words in str(report)


def test_how_a_report_prints() -> None:
    blocks = [FoundLayer(f"blocks.{i}", "Block", 64, 256, None) for i in range(3)]
    tensor = {"shape": (2, 8), "dtype": "torch.float32", "num_bytes": 64, "has_gradient": True}
    boundaries = [
        FoundBoundary(a, b, (FoundTensor(a, "add", (b,), **tensor),))  # type: ignore[arg-type]
        for a, b in (("blocks.0", "blocks.1"), ("blocks.1", "blocks.2"), ("blocks.2", "head"))
    ]
    head, spare = FoundLayer("head", "Linear", 5, 20, 0.001), FoundLayer("spare", "Linear", 5, 20)
    findings = Findings(
        (*blocks, head, replace(spare, is_called=False)),
        tuple(boundaries),
        (FoundCode("blocks.0", "blocks.1", {"mean": 1, "add": 2}, {"item": 2}),),
        shared=("scale",),
    )
    stack = "rank 0:\n" + "\n".join(f'  File "a.py", line {n} in f' for n in range(99))
    hung = Failure("hang", "still running after 9 s", stack, is_refusal=False)
    differences = (
        Difference("loss", "loss", 2e-7, 1, (0, 1)),
        Difference("buffer", "mean", None, None, (1,)),
    )
    one = CheckedRun(Split(1, "measured", "1f1b"), (5,), (2.5, None, 1.5))
    report = CheckReport(
        "Net",
        3,
        2,
        one,
        (
            CheckedRun(Split(2, "random", "1f1b"), (2, 3), (2.5, None, 1.6), differences),
            CheckedRun(Split(3, (1, 2, 2), "gpipe"), failure=hung),
        ),
        findings,
        is_repeatable=True,
    )
    assert not report.ok
    lines = [" ".join(line.split()) for line in str(report).splitlines()]
    for line in (
        "PipeShift check of Net: 3 steps of 2 microbatches, on the CPU",
        "1 stage trains loss 2.5 … 1.5",
        "2 stages, random cut, 1f1b differs layers 2, 3 loss 2.5 … 1.6",
        "3 stages, layers [1, 2, 2], gpipe fails",
        "Fails with hang (3 stages, layers [1, 2, 2], gpipe):",
        "still running after 9 s",
        'File "a.py", line 0 in f',
        "loss 'loss' from step 1 on by 2.0e-07 of its largest value, on ranks 0, 1",
        "buffer 'mean' cannot be compared (missing, of another shape, or not a number), on rank 1",
        "blocks.0 … blocks.2 (3 layers) Block 0.3 kB - 64 B: 2 x 8 float32 from add behind it",
        "head Linear 20 B 1 ms -",
        "spare Linear 20 B - not called by the step",
        "behind blocks.0 mean, 2 x add reads values by 2 x item",
    ):
        assert line in lines, line
    assert 'File "a.py", line 98 in f' not in lines
    assert "Several stages may hold them" in str(report)
    assert "Make it repeatable" not in str(report)
    assert json.loads(report.to_json())["runs"][0]["differences"][1]["distance"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stages": [1]}, "a split into 1 stages"),
        ({"cuts": ["best"]}, "cuts has 'best'; allowed are 'measured'"),
        ({"schedules": ["2f2b"]}, "unknown schedule '2f2b'"),
        ({"schedules": []}, "schedules is empty"),
        ({"stages": []}, "nothing to compare"),
    ],
)
def test_splits_that_there_are_not(options: dict[str, Any], words: str) -> None:
    wanted = {"stages": [2], "cuts": ["random"], "schedules": ["1f1b"], **options}
    with pytest.raises(ConfigurationError, match=words):
        splits_of(**wanted)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"module": lambda: Clean()}, "cannot be pickled.*no lambdas"),
        ({"module": 3}, "The model is a `int`"),
        ({"data": 3}, "The data is a `int`"),
        ({"steps": 0}, "steps=0: it must be 1 or more"),
        ({"trainer_arguments": {"max_epochs": 3}}, "has max_epochs, which the check sets itself"),
    ],
)
def test_arguments_that_are_not_allowed(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(PipeShiftError, match=words):
        check_model(**{"module": Clean, **arguments})


# --- the command ---


class Raises(L.Callback):
    def setup(self, *_: Any) -> None:
        raise AssertionError("a callback of the configuration was called")


CONFIGURATION = """
trainer:
  devices: 4
  max_epochs: 100
  gradient_clip_val: 0.1
  callbacks: [{class_path: tests.end_to_end.test_testing.Raises}]
  strategy:
    class_path: lightning_pipeshift.PipeShiftStrategy
    init_args: {microbatches: 2, virtual_machines: 2, schedule: gpipe, partition: [3, 2]}
model: {class_path: tests.end_to_end.test_testing.Clean}
data: {class_path: tests.end_to_end.test_testing.Rows}
"""


def command(folder: Path, *arguments: str) -> Any:
    (folder / "config.yaml").write_text(CONFIGURATION)
    given = ["--config", "config.yaml", "--stages", "2", "--cuts", "random", "--steps", "2"]
    words = ["pipeshift", "check", *given, *arguments]
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.object(sys, "path", [*sys.path]),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    return ended.value.code


def test_a_check_keeps_how_the_configuration_communicates(own_folder: Path) -> None:
    own = "init_args: {communication: {heartbeat_timeout: 20, lane_marks: false}, "
    (own_folder / "config.yaml").write_text(CONFIGURATION.replace("init_args: {", own, 1))
    recipe = check.Configured(("--config", "config.yaml"), 1)
    how = {"communication": Communication(process_group_backend="gloo"), "partition": "uniform"}
    made: Any = recipe.build({}, {**how, "virtual_machines": 1}).trainer.strategy
    found = made._options
    assert (found.heartbeat_timeout, found.marks, found.process_group_backend) == (20, None, "gloo")


def test_the_command_says_that_all_is_the_same(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = command(own_folder, "--json", "report.json", "--model.init_args.width", "12")
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "2 steps of 2 microbatches" in printed
    document = json.loads(Path("report.json").read_text())
    splits = [run["split"] for run in document["runs"]]
    assert splits == [
        {"stages": 2, "cut": "random", "schedule": "gpipe"},
        {"stages": 2, "cut": [3, 2], "schedule": "gpipe"},
    ]
    assert document["findings"]["layers"][0]["num_parameters"] == 4 * 12 + 12
    assert {path.name for path in own_folder.iterdir()} == {"config.yaml", "report.json"}


def test_the_command_says_what_differs(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [
        "--model",
        "tests.end_to_end.test_testing.RankDependent",
        "--model.what",
        "logged value",
    ]
    assert command(own_folder, *model) == 1
    assert "logged value 'size' from step 0 on by" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model.init_args.no_such", "1"], "no_such"),
        (["--schedules", "2f2b"], "unknown schedule '2f2b'"),
        (["--trainer.strategy", "ddp"], "the configuration has `ddp`"),
        (["--json", "no/such/folder.json"], "there is no folder 'no/such'"),
        (["--steps", "none"], "invalid int value"),
    ],
)
def test_a_command_that_cannot_be_understood(
    own_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert command(own_folder, *arguments) == 2
    assert words in capsys.readouterr().err
