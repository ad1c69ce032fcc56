"""Which rank is waited for, when nothing goes on."""

from __future__ import annotations

import faulthandler
import json
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from lightning_pipeshift.plan.inputs.communication import Communication
from lightning_pipeshift.runtime.liveness import failure
from lightning_pipeshift.runtime.liveness.stalls import (
    StallWatch,
    activity,
    print_stacks_on_a_signal,
    write_stacks,
)
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.text import print_at_once
from tests.features_models import fit, on_rank
from tests.models import LayersOfItsOwn, points


def answer(
    waits: int | None = None,
    action: str | None = None,
    layer: str | None = None,
    at: str | None = None,
    purpose: str | None = None,
) -> str:
    doing = {"action": action, "layer": layer, "at": at, "purpose": purpose}
    return json.dumps({"waits": waits, **doing})


class Watched:
    """A watch of three ranks, with a clock of its own."""

    def __init__(self, timeout: float) -> None:
        self.said: list[str] = []
        self.num_asked = 0
        self.answers: dict[int, str] = {}
        self._watch = StallWatch(timeout, "rank {}".format, self.said.append)

    def look(self, total: int, now: float) -> None:
        self._watch.look({0: total, 1: 0, 2: 0}, lambda: self.answers, self.ask, now)

    def ask(self) -> None:
        self.num_asked += 1


def test_nothing_is_said_while_something_goes_on() -> None:
    watched = Watched(60.0)
    for second in range(1000):
        watched.look(second // 50, float(second))
    assert not watched.said
    assert not watched.num_asked


def test_a_rank_that_does_not_wait_is_waited_for() -> None:
    watched = Watched(60.0)
    for second in range(61):
        watched.look(5, float(second))
    assert watched.num_asked == 1
    watched.answers = {
        0: answer(1),
        1: answer(None, "the backward of microbatch 3", "h.5", "train.py:53 in forward"),
        2: answer(1),
    }
    for second in range(61, 200):
        watched.look(5, float(second))
    (text,) = watched.said
    assert text.startswith(
        "no rank has completed anything for 61 s. Rank 1 is waited for; it is at"
    )
    assert "the backward of microbatch 3, in the layer 'h.5', train.py:53 in forward" in text
    watched.look(6, 200.0)
    assert watched.said[1:] == ["progress resumes, after 200 s."]
    for second in range(201, 262):
        watched.look(6, float(second))
    assert watched.num_asked == 2


def test_ranks_that_do_not_answer_are_not_waited_for() -> None:
    watched = Watched(10.0)
    watched.answers = {0: answer(1), 2: ""}
    for second in range(20):
        watched.look(5, float(second))
    assert "All wait for each other: rank 0 waits for rank 1." in watched.said[0]


def test_what_each_rank_waits_for_and_the_line_that_led_there() -> None:
    watched = Watched(10.0)
    gathers = answer(1, at="train.py:20 in on_train_batch_end", purpose="a checkpoint's gathering")
    watched.answers = {0: gathers, 1: answer(0, "the forward of microbatch 0"), 2: answer(-1)}
    for second in range(20):
        watched.look(5, float(second))
    assert (
        "rank 0 waits for rank 1, in a checkpoint's gathering (train.py:20 in on_train_batch_end);"
        " rank 1 waits for rank 0, in the forward of microbatch 0;"
        " rank 2 waits for several ranks." in watched.said[0]
    )


def test_never() -> None:
    watched = Watched(0.0)
    for second in range(1000):
        watched.look(5, float(second))
    assert not watched.said


def test_what_a_thread_does() -> None:
    begun, ends = threading.Event(), threading.Event()

    def user_code() -> None:
        begun.set()
        ends.wait()

    thread = threading.Thread(target=user_code)
    thread.start()
    assert begun.wait(60.0)
    assert thread.ident is not None
    found = activity(thread.ident)
    ends.set()
    thread.join()
    assert found["action"] is found["layer"] is None
    assert "test_stalls.py" in found["at"]
    assert found["at"].endswith("in user_code")


def writes_its_stacks(folder: str) -> None:
    write_stacks(Path(folder), 3)
    write_stacks(Path(folder), 3)


def test_stacks_are_written_to_a_file(tmp_path: Path) -> None:
    # In a process of its own: of more than a hundred threads, faulthandler leaves out the oldest,
    # and other tests may have left that many here.
    run_ranks(writes_its_stacks, 1, str(tmp_path / "made"))
    text = (tmp_path / "made" / "stacks-rank-3.txt").read_text()
    assert len(re.findall(r"^--- .*, process \d+$", text, re.MULTILINE)) == 2
    assert "in writes_its_stacks" in text


class Stuck(LayersOfItsOwn):
    """Its second stage does not go on until the first rank has said so."""

    folder: Path

    def forward(self, features: Any) -> Any:
        hidden = self.third(self.second(self.first(features)).relu())
        if self.trainer.global_rank == 1 and self.trainer.global_step == 2:
            self.wait()
        return self.head(hidden)

    def wait(self) -> None:
        while not (self.folder / "said").exists():
            threading.Event().wait(0.05)


def training(how: Any, folder: str) -> None:
    Stuck.folder = Path(folder)
    original = print_at_once

    def say(text: str) -> None:
        original(text)
        (Path(folder) / "said").write_text(text)

    vars(failure)["print_at_once"] = say
    try:
        fit(how, Stuck, points(4), max_epochs=1, default_root_dir=folder)
    finally:
        vars(failure)["print_at_once"] = original


def test_the_first_rank_says_who_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPESHIFT_STACKS", "1")
    strategy = {"partition": [2, 2], "communication": Communication(stall_timeout=1.0)}
    run_ranks(on_rank, 2, training, strategy, (str(tmp_path),), {})
    stacks = (tmp_path / "lightning_logs" / "pipeshift" / "stacks-rank-1.txt").read_text()
    assert "in wait" in stacks
    said = (tmp_path / "said").read_text()
    assert "Stage 1 (rank 1 on " in said
    assert "is waited for; it is at the forward of microbatch" in said


def test_a_signal_prints_the_stacks_unless_the_user_handles_it() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    unregister: Any = faulthandler.unregister  # typed as returning nothing
    try:
        for handler, prints in ((signal.SIG_DFL, True), (lambda *_: None, False)):
            signal.signal(signal.SIGUSR2, handler)
            print_stacks_on_a_signal()
            assert unregister(signal.SIGUSR2) == prints
    finally:
        signal.signal(signal.SIGUSR2, before)
