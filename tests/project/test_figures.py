"""The figures of the README and of ``docs`` come from results, and the results from this code."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import all as all_benchmarks
from benchmarks import convergence, figures
from benchmarks.all import ROOT, RUNS, Run
from benchmarks.figures import FigureError, Results, filled, unsourced
from benchmarks.measuring import interval
from benchmarks.tables import tables


@pytest.fixture
def results(tmp_path: Path) -> Results:
    record: dict[str, Any] = {
        "command": "python -m benchmarks.speed --json x.json",
        "date": "2026-11-23T00:00:00+00:00",
        "commit": "abc1234",
        "machine": {"cpu": "a cpu", "cores": 2, "load_average": [3.14, 0, 0], "torch": "2.13"},
        "figures": {
            "ratio, all": {"median": 1.25, "low": 1.125, "high": 1.5, "rounds": 7},
            "bytes": [1_500_000, 2_500_000],
            "plan": "0 -- 1",
        },
    }
    (tmp_path / "speed.json").write_text(json.dumps(record))
    return Results(tmp_path)


# --- the pages ---


@pytest.mark.parametrize("path", figures.PAGES, ids=lambda path: path.name)
def test_every_number_of_a_page_comes_from_a_result(path: Path) -> None:
    assert list(figures.problems_of(path, Results())) == []


def test_the_plot_is_that_of_its_result() -> None:
    figures = Results().record("convergence")["figures"]
    assert convergence.PLOT.read_text() == convergence.svg(figures)


def test_results_are_of_this_code() -> None:
    reason = figures.why_no_history()
    if reason is not None:
        pytest.skip(reason)
    results = Results()
    for path in figures.PAGES:
        list(figures.problems_of(path, results))
    assert results.used, "the pages quote no result"
    assert list(figures.problems_of_age(sorted(results.used), results)) == []


def test_tables_hold_no_figures_of_their_own() -> None:
    setup = {"1 : 0.5 : 0.25"}
    for name, rows in tables(Results()).items():
        for cell in (cell for row in rows() for cell in row):
            words = re.sub(r"\{.+?\}", "", cell)
            for phrase in setup:
                words = words.replace(phrase, "")
            if not re.search(r"Mbit/s| MB a layer|MTU", words):
                assert not re.search(r"\d\.\d|\d ?(%|ms|s)\b", words), f"{name}: {cell}"


# --- figures in a text ---


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("speed / ratio, all .2f", "1.25 (1.12 to 1.50)"),
        ("speed / ratio, all / median .1%", "125.0%"),
        ("speed / bytes / 1 .1f/1e6", "2.5"),
        ("speed / bytes / 0 .0f*2", "3000000"),
    ],
)
def test_a_figure_is_shown_in_its_format(results: Results, reference: str, text: str) -> None:
    assert filled(f"a <!-- figure: {reference} -->9<!-- / --> b", results) == (
        f"a <!-- figure: {reference} -->{text}<!-- / --> b"
    )


@pytest.mark.parametrize(
    "reference",
    ["speed / nothing .2f", "slow / bytes .2f", "speed / bytes / 2 .2f", "speed / plan .2f"],
)
def test_a_figure_that_is_not_there_is_an_error(results: Results, reference: str) -> None:
    with pytest.raises(FigureError):
        filled(f"<!-- figure: {reference} -->1<!-- / -->", results)


def test_blocks_hold_what_was_printed_and_what_made_it(results: Results) -> None:
    begin, end = "<!-- begin: output speed / plan -->", "<!-- end: output speed / plan -->"
    assert filled(f"{begin}\nold\n{end}", results) == f"{begin}\n\n```\n0 -- 1\n```\n\n{end}"
    source = filled("<!-- begin: source speed -->\n<!-- end: source speed -->", results)
    assert "`python -m benchmarks.speed`, 2026-11-23, at commit abc1234" in source
    assert "load average 3.1" in source
    # Filling in again changes nothing.
    assert filled(source, results) == source


def test_a_block_of_another_script_is_left_alone(results: Results) -> None:
    page = "<!-- begin: written by hand -->\n1.5 s\n<!-- end: written by hand -->"
    assert filled(page, results) == page


# --- numbers without a result ---


@pytest.mark.parametrize(
    "claim",
    [
        "1.5 as fast",
        "by 20 %",
        "20%",
        "takes 30 ms",
        "30 MB",
        "4 times",
        "in 5 seconds",
        "1,500 us",
    ],
)
def test_a_number_without_a_result_is_found(claim: str) -> None:
    (found,) = unsourced(f"It is {claim}, they say.", {})
    assert claim.split()[0].rstrip("%") in found
    (found,) = unsourced(f"```\nIt printed {claim}\n```", {})


@pytest.mark.parametrize(
    "text",
    [
        "four stages and 12 layers",
        "set `patience=3.5`",
        "```python\nbudget = 1.5  # 20 ms\n```",
        "<!-- figure: a / b .2f -->1.50 (1.40 to 1.60)<!-- / --> ms",
        "<!-- begin: table a -->\n| 1.5 s |\n<!-- end: table a -->",
    ],
)
def test_a_number_that_claims_nothing_is_left_alone(text: str) -> None:
    assert unsourced(text, {}) == []


def test_what_is_no_measurement_must_be_on_the_page() -> None:
    assert unsourced("within\n10 seconds", {"within 10 seconds": "a limit"}) == []
    with pytest.raises(FigureError, match="take it out"):
        unsourced("within 20 hours", {"within 10 seconds": "a limit"})


# --- the age of a result ---


def test_a_result_is_of_the_code_that_it_measures() -> None:
    reason = figures.why_no_history()
    if reason is not None:
        pytest.skip(reason)
    first = figures.git("rev-list", "--max-parents=0", "HEAD").split()[0]
    run = Run("planner", "planner", ("lightning_pipeshift/plan",))
    fresh = {"command": run.command, "date": "", "commit": figures.git("rev-parse", "HEAD")}
    assert figures.age_of(run, fresh) == []
    (old,) = figures.age_of(run, fresh | {"commit": first})
    assert "have changed" in old or "before the release" in old
    (other,) = figures.age_of(run, fresh | {"command": "python -m benchmarks.planner --fast"})
    assert "--fast" in other
    (dirty,) = figures.age_of(run, fresh | {"commit": fresh["commit"] + "+"})
    assert "differ from commit" in dirty


def test_all_benchmarks_measure_files_that_are_there() -> None:
    for run in RUNS:
        for path in run.paths:
            assert (ROOT / path).exists(), f"{run.result} measures {path}"


def test_a_benchmark_that_writes_nothing_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = Run("good", "good", ()), Run("bad", "bad", ())

    def run(words: list[str], **_: Any) -> Any:
        path = Path(words[-1])
        assert words[-2] == "--json"
        if path.stem == "good":
            path.write_text("{}")
        return type("Ended", (), {"returncode": 0})

    monkeypatch.setattr(subprocess, "run", run)
    assert all_benchmarks.make(good, tmp_path)
    assert not all_benchmarks.make(bad, tmp_path)


# --- intervals ---


def test_an_interval_holds_the_median_in_95_of_100_cases() -> None:
    # Of ten, P(at most one below the median) = 11 / 1024; of nine likewise 10 / 512.
    assert interval([5, 1, 2, 3, 4, 6, 7, 8, 9, 10]) == {
        "median": 5.5,
        "low": 2,
        "high": 9,
        "rounds": 10,
    }
    assert (interval(range(9))["low"], interval(range(9))["high"]) == (1, 7)
    assert (interval(range(8))["low"], interval(range(8))["high"]) == (0, 7)
    assert interval([3.0]) == {"median": 3.0, "low": 3.0, "high": 3.0, "rounds": 1}
