"""Writes the results of the sweeps into ``docs/compatibility.md``: which models train unmodified.

    python -m benchmarks.zoo_page

Takes what lies in ``benchmarks/results/zoo_*.json``, and leaves out libraries without results. A
sweep that compared with a plain loop alone is in a file of its own (``zoo_plain_*.json``), and is
joined by the models' names. What stands outside of the two markers is written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.zoo import PLAIN, Record, summary, verdict
from benchmarks.zoo_models import LIBRARIES
from lightning_pipeshift import errors

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- begin: written by `python -m benchmarks.zoo_page` -->"
END = "<!-- end: written by `python -m benchmarks.zoo_page` -->"

_MOST_CHARACTERS = 400
_MOST_MODELS = 12

Split = tuple[int, str, str]
"""Stages, cut, schedule."""


def results() -> dict[str, Record]:
    """The committed results of each library."""
    found = {library: _read(f"zoo_{library}.json") for library in LIBRARIES}
    plain = {library: _read(f"zoo_plain_{library}.json") for library in LIBRARIES}
    return {
        library: _joined(result, plain[library])
        for library, result in found.items()
        if result is not None
    }


def _read(name: str) -> Record | None:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def _joined(result: Record, plain: Record | None) -> Record:
    """A sweep over splits, with what another has found of the same models in a plain loop."""
    if plain is None:
        return result
    compared = {
        record["name"]: record["plain"]
        for record in plain["figures"]["models"]
        if "plain" in record
    }
    models = [
        record | ({"plain": compared[record["name"]]} if record["name"] in compared else {})
        for record in result["figures"]["models"]
    ]
    joined = result | {"figures": result["figures"] | {"models": models}}
    joined["plain"] = {name: plain[name] for name in ("command", "commit", "date")}
    return joined


def filled(page: str, found: Mapping[str, Record]) -> str:
    """The page with other results between its markers.

    Args:
        page: the page's text.
        found: by library, what a sweep has written.
    """
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page has no line {BEGIN!r}, or no {END!r} after it; put them back")
    lines = [BEGIN, "", *_overview(found)]
    for library, result in found.items():
        lines += ["", *_library(library, result)]
    return before + "\n".join([*lines, "", END]) + after


def _overview(found: Mapping[str, Record]) -> Iterator[str]:
    counts = {name: summary(result["figures"]["models"]) for name, result in found.items()}
    header = list(dict.fromkeys(name for each in counts.values() for name in each))
    rows = [
        [name, *(_figure(each.get(key, "")) for key in header)] for name, each in counts.items()
    ]
    yield from _table(["library", *header], rows)


def _figure(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _library(library: str, result: Record) -> Iterator[str]:
    models = result["figures"]["models"]
    built = [record for record in models if record["built"]]
    splits = list(dict.fromkeys(_split(run) for record in built for run in record["runs"][1:]))
    machine = result["machine"]
    yield f"## {library}"
    yield ""
    yield f"`{result['command']}`"
    yield ""
    where = f"on {machine['cores']} cores ({machine['cpu']})"
    versions = f"Python {machine['python']}, torch {machine['torch']}"
    at = f" at commit {result['commit']}" if "commit" in result else ""
    yield (
        f"{result['date'][:10]}{at}, {where}, {versions}, lightning {machine['lightning']}. The"
        f" columns behind *layers* are runs; each is compared with the run on one stage."
    )
    if "plain" in result:
        plain = result["plain"]
        yield (
            f"The last column: `{plain['command']}`, {plain['date'][:10]} at commit"
            f" {plain['commit']}."
        )
    yield ""
    names = [f"{stages} stages, {cut}, {schedule}" for stages, cut, schedule in splits]
    rows = [_row(record, splits) for record in built]
    header = ["family", "model", "layers", "1 stage", *names]
    if any("plain" in record for record in built):
        header.append("plain loop")
        for row, record in zip(rows, built, strict=True):
            row.append(PLAIN[record["plain"]["same"]] if "plain" in record else "not tried")
    yield from _table(header, rows)
    yield from _reasons(built)
    left_out = [record for record in models if not record["built"]]
    if left_out:
        yield ""
        yield (
            f"Not built, and not counted among the models ({len(left_out)}): what does not train in"
            " plain PyTorch with an input that the sweep makes, or is too large for it."
        )
        yield ""
        for record in left_out:
            yield f"- `{record['name']}`: {_shortened(record['error'])}"


def _split(run: Record) -> Split:
    return run["stages"], run["cut"], run["schedule"]


def _row(record: Record, splits: Sequence[Split]) -> list[Any]:
    runs = {_split(run): _word(run) for run in record["runs"][1:]}
    layers = record.get("num_layers", "")
    first = _word(record["runs"][0])
    found = [runs.get(split, "not tried") for split in splits]
    return [record["family"], f"`{record['name']}`", layers, first, *found]


def _word(run: Record) -> str:
    if run["trains"]:
        return verdict(run)
    kind = run["error"].split(":")[0]
    return f"refused ({kind})" if _is_refusal(run) else f"fails ({kind})"


def _is_refusal(run: Record) -> bool:
    return hasattr(errors, run["error"].split(":")[0])


def _reasons(built: Sequence[Record]) -> Iterator[str]:
    """The models that did not train, with the reason; those with the same reason together."""
    found: dict[tuple[bool, str], dict[str, None]] = {}
    for record in built:
        for run in record["runs"]:
            if not run["trains"]:
                key = _is_refusal(run), run.get("message", run["error"])
                found.setdefault(key, {})[record["name"]] = None
    for title, is_refusal in (("Refused, with the reason:", True), ("Failed:", False)):
        reasons = [(text, models) for (kind, text), models in found.items() if kind == is_refusal]
        if reasons:
            yield ""
            yield title
            yield ""
        for text, models in sorted(reasons, key=lambda reason: -len(reason[1])):
            names = [f"`{name}`" for name in models]
            more = f" and {len(names) - _MOST_MODELS} more" if len(names) > _MOST_MODELS else ""
            yield f"- {', '.join(names[:_MOST_MODELS])}{more}: {_shortened(text)}"


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST_CHARACTERS else line[:_MOST_CHARACTERS] + " …"


def _table(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    for row in [header, ["---"] * len(header), *rows]:
        yield f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |"


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(), results()))
    print(f"written to {PAGE}")


if __name__ == "__main__":
    main()
