"""`pipeshift doctor`: alone, and on several ranks before a first run."""

from __future__ import annotations

import resource

import pytest

from lightning_pipeshift.commands import doctor, host_findings, link_findings
from lightning_pipeshift.commands.host_findings import Finding
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.timeline.clocks import Offset


def lines(text: str, what: str) -> list[str]:
    """The line of a finding, and that of its advice if it has one."""
    found = text.splitlines()
    number = next(i for i, line in enumerate(found) if line[2:].startswith(what))
    return [line for line in found[number : number + 2] if line == found[number] or "→" in line]


def test_alone_it_shows_the_host_and_how_to_look_at_the_network(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_findings, "_FEWEST_FILES", 10**9)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    doctor.main([])
    text = capsys.readouterr().out
    now, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    mark, advice = lines(text, "open files")
    assert mark.startswith("! ")
    assert str(now) in mark
    assert "ulimit -n" in advice
    assert len(lines(text, "CPU")) == 1
    assert "gloo" in lines(text, "backends")[0]
    assert "does not have" in lines(text, "GLOO_SOCKET_IFNAME")[0]
    assert "torchrun" in lines(text, "network")[1]
    assert text.rstrip().splitlines()[-1].startswith("Do what stands below the lines with `!` (")


def on_each_rank() -> str:
    import contextlib
    import io

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        doctor.main([])
    return printed.getvalue()


def test_the_ranks_of_a_job_measure_their_links() -> None:
    first, *others = run_ranks(on_each_rank, 3)
    assert others == ["", ""]
    for pair in ("ranks 0 and 1", "ranks 0 and 2", "ranks 1 and 2"):
        (line, *_) = lines(first, pair)
        assert "B/s" in line
        assert "each way" in line
    # One host speaks once, and needs no comparison of clocks.
    assert first.count(" CPU ") == 1
    assert "clocks of" not in first


def test_clocks_that_are_far_apart_are_reported() -> None:
    near, far = (
        link_findings.clocks(Offset(seconds, 0.01), "one", "two") for seconds in (0.5, -3.0)
    )
    assert not near.advice
    assert "3 s apart" in far.found
    assert "chronyd" in far.advice
    assert "All is well" in doctor.report({"one": [Finding("CPU", "2 cores")]}, [near])
