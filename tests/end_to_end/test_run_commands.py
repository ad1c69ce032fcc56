"""`pipeshift move`: a run that is under way is asked from outside."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from torch.utils.data import DataLoader

from lightning_pipeshift import ConfigurationError, LayerMigration
from lightning_pipeshift.commands import running as run_commands
from lightning_pipeshift.plan.document.moves import Move
from lightning_pipeshift.step.control_files import FOLDER, STATUS, Answer, ControlFiles, ask
from lightning_pipeshift.testing.ranks import run_ranks
from tests.end_to_end.test_changing_plans import Sleeper
from tests.features_models import built, differences, parameters_of, quiet_trainer
from tests.models import points

# More than anybody who asks takes, however slowly; the run ends with the last answer.
MANY = 4000


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--help"], "and move some"),
        (["timeline", "--help"], "RUN"),
        (["move", "--help"], "LAYER STAGE"),
        (["move", "--run", "nowhere"], "No run is in progress"),
        (["timeline", "."], "No step of a run is recorded"),
        (["timeline", "nowhere"], "the timeline 'nowhere' cannot be read"),
        (["doctor", "--lanes", "no_card"], "no_card"),
    ],
)
def test_commands_for_a_run_elsewhere_import_neither_torch_nor_lightning(
    arguments: list[str], told: str
) -> None:
    code = (
        "import sys, pipeshift_command\n"
        f"sys.argv = ['pipeshift', *{arguments}]\n"
        "try:\n    pipeshift_command.main()\n"
        "except SystemExit as end:\n    print('exit code', end.code)\n"
        "found = {name.partition('.')[0] for name in sys.modules}\n"
        "print('imported', sorted(found & {'torch', 'lightning', 'pytorch_lightning'}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "imported []" in run.stdout
    assert re.search(told, run.stdout + run.stderr)
    assert ("exit code 2" in run.stdout) == ("--help" not in arguments)


def said(command: Any, *arguments: str) -> str:
    """The text that a command prints, or with which it exits."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            command(arguments)
    except SystemExit as end:
        return f"ended with {end.code}"
    return printed.getvalue()


class Somebody(L.Callback):
    """Asks from outside, in a thread of the first rank, and lets the run end with the last move."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.counts: list[tuple[int, ...]] = []
        self._thread: threading.Thread | None = None

    def _ask(self) -> None:
        move = run_commands.move
        for arguments in (
            ("layers.4", "0"),
            ("another", "0"),
            ("layers.4", "7"),
            ("layers.4", "1", "--virtual-machine", "3"),
            (),
            ("layers.4", "1", "layers.3", "1"),
        ):
            heard = said(move, "--run", ".", *arguments)
            # It is written now and then, and only here does anything have to wait for it.
            while not arguments and not ("(5)" in heard and " ms" in heard):
                threading.Event().wait(0.05)
                heard = said(move, "--run", ".")
            self.heard.append(heard)

    def on_train_batch_end(self, trainer: Any, module: Any, *others: Any) -> None:
        self.counts.append(trainer.strategy.plan.placement.counts[0])
        if others[2] == 1 and trainer.is_global_zero:
            self._thread = threading.Thread(target=self._ask)
            self._thread.start()
        trainer.should_stop = self.counts[-1] == (3, 5)

    def on_train_end(self, *_: Any) -> None:
        if self._thread is not None:
            self._thread.join()


def asked() -> Any:
    L.seed_everything(7, verbose=False)
    module, somebody = built(Sleeper), Somebody()
    trainer = quiet_trainer(
        {"devices": 2, "pipeshift": {"partition": [4, 4], "microbatches": 2}},
        # What is watched here moves nothing: a gain of 99 is not to be had.
        callbacks=[LayerMigration(min_gain=99, patience=2), somebody],
        max_epochs=1,
    )
    trainer.fit(module, DataLoader(points(MANY).dataset, batch_size=4))
    with pytest.raises(ConfigurationError, match="No run is in progress"):
        run_commands.move(["--run", ".", "layers.4", "0"])
    return {
        "counts": somebody.counts,
        "heard": somebody.heard,
        "parameters": parameters_of(module),
        "left": sorted(os.listdir()),
    }


def left_alone(num_steps: int) -> Any:
    L.seed_everything(7, verbose=False)
    module = built(Sleeper)
    trainer = quiet_trainer(
        {"devices": 2, "pipeshift": {"partition": [4, 4], "microbatches": 2}},
        max_epochs=1,
        limit_train_batches=num_steps,
    )
    trainer.fit(module, DataLoader(points(MANY).dataset, batch_size=4))
    return {"parameters": parameters_of(module)}


def test_a_run_is_asked_for_moves_and_how_it_stands(tmp_path: Path) -> None:
    ranks = run_ranks(asked, 2, cwd=tmp_path)
    first = ranks[0]
    moved, unknown, stage, machine, status, both = first["heard"]
    assert "the layer 'layers.4' moves to stage 0, from step" in moved
    assert "the layer 'another'; the layers are 'layers.0'" in unknown
    assert "the stages 0 to 1" in stage
    assert "virtual machine 3 (one replica of the pipeline); there are 1" in machine
    assert all("ended with nothing moves" in text for text in (unknown, stage, machine))
    assert "is running" in status
    assert "layers.0 to layers.4 (5)" in status
    assert "payload" in status
    assert "layers.5 to layers.7 (3)" in status
    assert "'layers.4' moves to stage 1, the layer 'layers.3' moves to stage 1" in both
    changes = [a for a, b in zip(first["counts"], first["counts"][1:], strict=False) if a != b]
    assert changes == [(4, 4), (5, 3)]
    assert first["counts"][-1] == (3, 5)
    assert first["left"] == ["lightning_logs"], "the status is in it, and goes with the run"
    plain = run_ranks(left_alone, 2, len(first["counts"]))
    for one, other in zip(ranks, plain, strict=True):
        assert one["counts"] == first["counts"]
        assert not differences(one["parameters"], other["parameters"], 0, 0)


# --- without a run ---


def status() -> dict[str, Any]:
    return {"step": 1, "step_seconds": None, "virtual_machines": [], "decisions": []}


@pytest.fixture
def outside(tmp_path: Path) -> Any:
    found = ControlFiles()
    found.open(tmp_path, status)
    yield found
    found.close()


def test_the_reader_of_a_command_may_leave() -> None:
    """As `head` does: `pipeshift timeline RUN.json | head`."""
    code = (
        "import sys, pipeshift_command\n"
        "sys.argv = ['pipeshift', 'timeline']\n"
        "pipeshift_command._leave_out_package_code()\n"
        "import lightning_pipeshift.commands.timeline as timeline\n"
        "timeline.main = lambda: print(('x' * 100 + chr(10)) * 10**5)\n"
        "pipeshift_command.main()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.readline()
        run.stdout.close()
        assert run.stderr.read() == b""
    assert run.returncode == 0


def test_a_request_that_is_not_understood(outside: ControlFiles, tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    for number, text in enumerate(
        ("{", "[]", '{"moves": []}', '{"moves": [{"layer": 3, "stage": 1}]}')
    ):
        (folder / f"request-{number}.json").write_text(text)
    texts = []
    for number in range(4):
        path = folder / f"answer-{number}.json"
        while not path.exists():
            threading.Event().wait(0.01)
        texts.append(Answer(**json.loads(path.read_text())).text)
    assert "not valid JSON" in texts[0]
    assert "the request is []; it must be an object" in texts[1]
    assert "'moves' is []; it must be a list that is not empty" in texts[2]
    assert "'layer'" in texts[3]
    assert not outside.has_requests


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: path.mkdir(), "is not a regular file"),
        (lambda path: os.mkfifo(path), "is not a regular file"),
        (lambda path: path.symlink_to("nowhere"), "symbolic links"),
        (lambda path: path.symlink_to("/etc/passwd"), "symbolic links"),
        (lambda path: path.write_text("[" * 60_000), "not valid JSON"),
        (lambda path: path.write_text(" " * 70_000), "more than 65,536 bytes"),
        (lambda path: path.write_bytes(b"\xff"), "not valid JSON"),
        (lambda path: path.write_text('{"moves": [{"layer": "\x1b[2J", "stage": 1e3}]}'), "JSON"),
    ],
)
def test_no_file_stops_the_requests_behind_it(
    make: Any, told: str, outside: ControlFiles, tmp_path: Path
) -> None:
    folder = tmp_path / FOLDER
    make(folder / "request-1.json")
    # A reader that finds half of what is being written says so: a request is renamed to its name.
    while not (folder / "answer-1.json").exists():
        threading.Event().wait(0.01)
    answer = Answer(**json.loads((folder / "answer-1.json").read_text()))
    assert not answer.is_done
    assert told in answer.text
    assert ask(folder, [Move(layer="a", stage=0)], timeout=0.5) is None
    while not outside.has_requests:
        threading.Event().wait(0.01)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user: needs root")
def test_a_request_of_another_user_is_not_read(outside: ControlFiles, tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    path = tmp_path / "request"
    path.write_text('{"moves": [{"layer": "a", "stage": 1}]}')
    os.chown(path, 12345, -1)
    path.rename(folder / "request-1.json")
    while not (folder / "answer-1.json").exists():
        threading.Event().wait(0.01)
    assert "belongs to the user 12345" in (folder / "answer-1.json").read_text()
    assert not outside.has_requests


def test_what_is_printed_does_not_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FOLDER).mkdir()
    stage = {"rank": 0, "layers": ["\x1b[2J"], "host": "a\rb"}
    found = status() | {"virtual_machines": [[stage]], "host": "h", "process": 1, "time": 0}
    (tmp_path / FOLDER / STATUS).write_text(json.dumps(found))
    run_commands.move(["--run", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\\x1b[2J" in printed


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000])
def test_a_status_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / STATUS).write_text(text)
    with pytest.raises(ConfigurationError, match="is not the status of a run"):
        run_commands.move(["--run", str(tmp_path)])


def test_nobody_answers_in_time(outside: ControlFiles, tmp_path: Path) -> None:
    assert ask(tmp_path / FOLDER, [Move(layer="a", stage=0)], timeout=0.5) is None
    while not outside.has_requests:
        threading.Event().wait(0.01)
    (request,) = outside.take_requests()
    assert request.moves == (Move(layer="a", stage=0),)


def test_what_is_asked_as_the_run_ends_is_answered(outside: ControlFiles, tmp_path: Path) -> None:
    request = {"moves": [{"layer": "a", "stage": 1}]}
    # At once: before the run has looked.
    (tmp_path / FOLDER / "request-1.json").write_text(json.dumps(request))
    outside.close()
    answer = Answer(**json.loads((tmp_path / FOLDER / "answer-1.json").read_text()))
    assert "the run has ended" in answer.text


def test_what_was_asked_of_an_earlier_run_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / FOLDER / "request-2.json").mkdir(parents=True)
    (tmp_path / FOLDER / "request-1.json").write_text('{"moves": [{"layer": "a", "stage": 1}]}')
    found = ControlFiles()
    found.open(tmp_path, status)
    found.close()
    assert not found.take_requests()


def test_which_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No run is in progress"):
        run_commands.folder_of(tmp_path)
    runs = [ControlFiles(), ControlFiles()]
    for name, run in zip("ab", runs, strict=True):
        run.open(tmp_path / name, status)
    with pytest.raises(ConfigurationError, match="several runs"):
        run_commands.folder_of(tmp_path)
    runs[0].close()
    assert run_commands.folder_of(tmp_path) == tmp_path / "b" / FOLDER
    runs[1].close()


def test_a_process_that_is_gone(outside: ControlFiles, tmp_path: Path) -> None:
    path = tmp_path / FOLDER / STATUS
    found = json.loads(path.read_text())
    outside.close()
    assert not path.parent.exists()
    path.parent.mkdir()
    path.write_text(json.dumps(found | {"process": 2**22, "time": 0}))
    assert "has ended without an error message" in said(
        run_commands.move, "--run", str(tmp_path), "a", "1"
    )
    assert "last seen" in said(run_commands.move, "--run", str(tmp_path))


@pytest.mark.parametrize("moves", [["a"], ["a", "b"], ["a", "1", "b"]])
def test_a_move_is_a_layer_and_a_number(
    moves: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_commands.move(["--run", str(tmp_path), *moves])
    assert "a layer and the number of its new stage" in capsys.readouterr().err
