"""Writes the figures of ``benchmarks/results`` into the README and the pages in ``docs``.

    python -m benchmarks.figures            # after a benchmark, or after editing a page
    python -m benchmarks.figures --check    # changes nothing; says what is wrong

A figure in a sentence stands between two comments, which no reader of the page sees:

    <!-- figure: skip_cost / skipped_layer_us .0f -->23 (22 to 25)<!-- / --> us

The first says the result's file, the keys that lead to the figure, and its format: Python's, and if
need be a factor behind it (``.0f/1e6`` shows bytes in MB). A figure with an interval is shown with
it; add the key ``median`` to show the median alone. What stands between the comments is replaced.

Tables are listed in :mod:`benchmarks.tables`, and stand between ``<!-- begin: table NAME -->`` and
``<!-- end: table NAME -->``. Behind each of them stands what made it, when, and at which commit;
``<!-- begin: source NAME ... -->`` shows the same for figures that stand in no table.

``tests/project/test_figures.py`` holds the pages to this: filling them in changes nothing, no
number stands outside of such marks but those in ``NOT_MEASURED``, and what a result measures has
not changed much since its commit, but for those in ``OLD``.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.all import RESULTS, ROOT, RUNS, Run
from benchmarks.tables import NOT_MEASURED, OLD, tables

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MOST_CHANGED = 0.25
"""Of the lines that a result measures, until there is a release to compare it with."""

_FIGURE = re.compile(r"(<!-- figure: (.+?) -->)(.*?)(<!-- / -->)", re.DOTALL)
_BLOCK = re.compile(r"<!-- begin: (\w+) (.+?) -->\n.*?<!-- end: \1 \2 -->", re.DOTALL)
_REFERENCE = re.compile(r"\{(.+?)\}")
# Blocks of others: the page of models has one, written by benchmarks/zoo_page.py.
_WRITTEN = re.compile(r"<!-- begin: .*?<!-- end: .*?-->", re.DOTALL)
_CODE = re.compile(r"^```\w+[^\n]*\n.*?^```$", re.DOTALL | re.MULTILINE)
_UNIT = (
    r"%|percent|ns|us|µs|ms|s|seconds?|minutes?|hours?|[kKMGT]i?B|bytes|[KMG]?bit/s|nats|times|x|×"
)
_NUMBER = re.compile(rf"(?<![\w.])\d[\d,]*(?:\.\d+|(?:\.\d+)?[ -]?(?:{_UNIT})(?!\w))")


class FigureError(ValueError):
    """A page asks for a figure that is not there."""


class Results:
    """The results' files, read when they are asked for.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: Path = RESULTS) -> None:
        self.used: set[str] = set()
        self._folder = folder
        self._records: dict[str, dict[str, Any]] = {}

    def record(self, name: str) -> dict[str, Any]:
        """A file: its figures, and what made them."""
        if name not in self._records:
            path = self._folder / f"{name}.json"
            if not path.exists():
                raise FigureError(
                    f"there is no result {path}: python -m benchmarks.all --only {name}"
                )
            self._records[name] = json.loads(path.read_text())
        self.used.add(name)
        return self._records[name]

    def value(self, where: str) -> Any:
        """The value at ``file / key / key``."""
        name, *keys = (part.strip() for part in where.split(" / "))
        found = self.record(name)["figures"]
        for key in keys:
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise FigureError(f"{name}.json has no {key!r} in {where!r}") from None
        return found

    def shown(self, reference: str) -> str:
        """A figure as text.

        Args:
            reference: ``file / key / key FORMAT``, or ``file command``.
        """
        where, _, form = " ".join(reference.split()).rpartition(" ")
        if form == "command":
            return f"`{_command(self.record(where))}`"
        value = self.value(where)
        spec, sign, factor = re.fullmatch(r"([^*/]*)([*/]?)(.*)", form).groups()  # type: ignore[union-attr]
        scale = (float(factor) if sign == "*" else 1 / float(factor)) if sign else 1

        def text(each: Any) -> str:
            return format(each * scale if sign else each, spec)

        try:
            if isinstance(value, dict):
                low, high = text(value["low"]), text(value["high"])
                middle = text(value["median"])
                return middle if low == high == middle else f"{middle} ({low} to {high})"
            return text(value)
        except (KeyError, TypeError, ValueError) as error:
            raise FigureError(f"{where!r} cannot be shown as {form!r}: {error!r}") from None

    def source(self, names: Sequence[str]) -> str:
        """The command, place and time of some results."""
        return "<br>\n".join(f"<sub>{self._source(name)}</sub>" for name in names)

    def _source(self, name: str) -> str:
        record = self.record(name)
        machine = record["machine"]
        at = f"at commit {record['commit']}" if "commit" in record else "commit not recorded"
        load = f"load average {machine['load_average'][0]:.1f}" if "load_average" in machine else ""
        where = ", ".join(
            [f"{machine['cpu']}, {machine['cores']} cores", *([load] if load else [])]
            + [f"torch {machine['torch']}"]
        )
        old = f" **Older than the code: {OLD[name]}**" if name in OLD else ""
        return f"`{_command(record)}`, {record['date'][:10]}, {at}; {where}.{old}"


def _command(record: Mapping[str, Any]) -> str:
    """The command that made a result, without the paths of its output."""
    return re.sub(r" --(json|plot) \S+", "", record["command"])


def filled(page: str, results: Results) -> str:
    """A page with the results' figures in it."""
    page = _BLOCK.sub(lambda found: _block(found, results), page)
    return _FIGURE.sub(lambda found: found[1] + results.shown(found[2]) + found[4], page)


def _block(found: re.Match[str], results: Results) -> str:
    kind, name = found[1], found[2]
    if kind == "table":
        lines = list(_table(name, results))
    elif kind == "source":
        lines = [results.source(name.split())]
    elif kind == "output":
        # As it was printed.
        lines = ["```", str(results.value(name)), "```"]
    else:
        return found[0]
    return "\n".join(
        [f"<!-- begin: {kind} {name} -->", "", *lines, "", f"<!-- end: {kind} {name} -->"]
    )


def _table(name: str, results: Results) -> Iterator[str]:
    mine = Results(results._folder)
    try:
        header, *rows = tables(mine)[name]()
    except KeyError as error:
        raise FigureError(f"table {name!r}: {error!r} is not there") from None
    for row in [header, ["---"] * len(header), *rows]:
        cells = [_REFERENCE.sub(lambda found: mine.shown(found[1]), cell) for cell in row]
        yield f"| {' | '.join(cells)} |".replace("|  |", "| |")
    results.used |= mine.used
    yield ""
    yield mine.source(sorted(mine.used))


# --- what stands outside of all marks ---


def unsourced(page: str, not_measured: Mapping[str, str]) -> list[str]:
    """The numbers of a page that come from no result, with what stands around them.

    Args:
        page: the page's text. Code is no claim, but what a program has printed is one.
        not_measured: what is no measurement, and why.

    Raises:
        FigureError: something in ``not_measured`` is not on the page any more.
    """
    page = _WRITTEN.sub("", page)
    page = _FIGURE.sub("…", page)
    page = re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)
    page = _CODE.sub("", page).replace("```", "")
    page = " ".join(page.split())
    for phrase in not_measured:
        if phrase not in page:
            raise FigureError(f"{phrase!r} is not on the page: take it out of NOT_MEASURED")
    for phrase in not_measured:
        page = page.replace(phrase, "…")
    page = re.sub(r"`[^`]+`", "…", page)
    return [page[max(0, n.start() - 40) : n.end() + 20] for n in _NUMBER.finditer(page)]


def problems_of(path: Path, results: Results) -> Iterator[str]:
    """Claims of a page without a result that supports them."""
    page, name = path.read_text(), path.relative_to(ROOT).as_posix()
    mine = Results(results._folder)
    try:
        if filled(page, mine) != page:
            yield f"{name} differs from the results: python -m benchmarks.figures"
        for around in unsourced(page, NOT_MEASURED.get(name, {})):
            yield f"{name}: where does this number come from? … {around} …"
    except FigureError as error:
        yield f"{name}: {error}"
        return
    shown = {result for found in _BLOCK.finditer(page) for result in _sources(found, mine)}
    for result in sorted(mine.used - shown):
        yield f"{name} quotes {result}.json, and does not say what made it: add a source"
    results.used |= mine.used


def _sources(found: re.Match[str], results: Results) -> set[str]:
    if found[1] == "source":
        return set(found[2].split())
    if found[1] == "table":
        mine = Results(results._folder)
        list(_table(found[2], mine))
        return mine.used
    return set()


# --- whether a result is of this code ---


def git(*words: str) -> str:
    """The output of a git command; empty if it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def why_no_history() -> str | None:
    """Why nothing can be said of a result's age here, or None."""
    if git("rev-parse", "--show-toplevel") != str(ROOT):
        return "this is no checkout of git (an archive, say), so there is no history to ask"
    if git("rev-parse", "--is-shallow-repository") != "false":
        return "a shallow clone does not know how old the results are"
    return None


def age_of(run: Run, record: Mapping[str, Any]) -> list[str]:
    """Why a result is not of this code; empty if it is."""
    found = []
    if _command(record) != run.command:
        found.append(f"made by `{_command(record)}`, and not by `{run.command}`")
    commit = record.get("commit", "")
    if not commit:
        found.append("its commit was not recorded")
    if commit.endswith("+"):
        found.append(f"made by files that differ from commit {commit[:-1]}")
    known = git("rev-parse", "--verify", "--quiet", f"{commit.rstrip('+')}^{{commit}}")
    # A branch that was squashed takes its commits along: then what was there at that time.
    known = known or git("rev-list", "-1", f"--before={record['date']}", "HEAD")
    release = git("describe", "--tags", "--abbrev=0", "--match=v*")
    if release:
        is_before = git("merge-base", known, release) == known
        if is_before and _changed(known, release, run):
            found.append(f"what it measures has changed before the release {release}")
        return found
    part = _changed(known, "HEAD", run)
    if part > MOST_CHANGED:
        found.append(f"{part:.0%} of the lines that it measures have changed since")
    return found


def _changed(before: str, after: str, run: Run) -> float:
    """How many of the measured files' lines are others, as a part of all of them. A file that has
    another name or place by now has changed where its lines have.
    """
    changed = sum(
        lines
        for path, lines in _changed_lines(before, after)
        if any(path == measured or path.startswith(f"{measured}/") for measured in run.paths)
    )
    files = git("ls-files", "--", *run.paths).split("\n")
    return changed / sum(len((ROOT / file).read_text().splitlines()) for file in files)


@functools.cache
def _changed_lines(before: str, after: str) -> list[tuple[str, int]]:
    """The files that differ, by their present paths, and in how many lines."""
    found = []
    fields = iter(git("diff", "--numstat", "-z", "-M40%", "-l9999", before, after).split("\0"))
    for field in fields:
        if not field:
            continue
        added, removed, path = field.split("\t")
        if not path:
            # Renamed: the old path and the new one follow.
            _, path = next(fields), next(fields)
        if added.isdigit():
            found.append((path, max(int(added), int(removed))))
    return found


def problems_of_age(names: Sequence[str], results: Results) -> Iterator[str]:
    """Results that are of other code than this, or that are said to be and are not."""
    runs = {run.result: run for run in RUNS}
    for name in sorted(names):
        if name not in runs:
            yield f"{name}.json is quoted, and benchmarks/all.py does not make it"
            continue
        reasons = age_of(runs[name], results.record(name))
        if reasons and name not in OLD:
            yield f"{name}.json is not of this code: {'; '.join(reasons)}"
        if not reasons and name in OLD:
            yield f"{name}.json is of this code: take it out of OLD"
    for name in OLD.keys() - set(names):
        yield f"no page quotes {name}.json: take it out of OLD"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(given)
    results = Results()
    if not options.check:
        for path in PAGES:
            path.write_text(filled(path.read_text(), results))
    problems = [problem for path in PAGES for problem in problems_of(path, results)]
    reason = why_no_history()
    if reason is None:
        problems += problems_of_age(sorted(results.used), results)
    else:
        print(f"The results' age is not looked at: {reason}.")
    print("\n".join(problems) or "Every figure is in its result.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
