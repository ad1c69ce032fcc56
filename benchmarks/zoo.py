"""Other people's models, each trained on one stage and on several: do the bits agree?

    python -m benchmarks.zoo --library timm
    python -m benchmarks.zoo --library torchvision --match 'resnet|detection' --plain --overhead
    python -m benchmarks.zoo --library transformers --limit 20 --stages 2 --cuts random
    python -m benchmarks.zoo --library transformers --schedules async-2bw --steps 5

The smallest member of every family of timm and torchvision, and every architecture of transformers
that a tiny configuration builds, as their authors wrote them: random initialisation, dropout and
stochastic depth on. Each trains a few steps on one stage, then on 2 and 3, by a measured cut (the
strategy's own, which is made anew after the first step) and by a random one, as 1f1b and as gpipe
(each pair of these at least once, all eight with `--every-split`); losses and final parameters are
compared with those of one stage to the bit. `--plain` compares with a plain PyTorch
loop as well, without dropout and to rounding; `--overhead` times the step of one stage beside a
plain one, and a step of Lightning by default likewise.

The processes do one model after another. One that hangs or dies is recorded, and new ones go on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import zoo_models, zoo_training
from benchmarks.measuring import arguments, commit, print_table, save
from benchmarks.zoo_models import Case
from benchmarks.zoo_training import Fit, Trained
from lightning_pipeshift.plan.schedule.schedules import ASYNCHRONOUS
from lightning_pipeshift.testing.splits import Split, random_cut, some_splits
from lightning_pipeshift.testing.workers import JobFailedError, Workers

PRELOADED = ["lightning.pytorch", "lightning_pipeshift", "benchmarks.zoo_training"]
LIBRARY_MODULES = {
    "timm": ["timm"],
    "torchvision": ["torchvision.models"],
    "transformers": ["transformers.models.auto.modeling_auto", "transformers.modeling_utils"],
}
BUILD_LIMIT_SECONDS = 120.0
NUM_OVERHEAD_STEPS = 15
OVERHEAD_LIMIT_SECONDS = 4.0

Record = dict[str, Any]

PLAIN = {True: "same", False: "differs!", None: "draws random numbers"}
"""How a model has fared beside a plain loop."""


class Sweep:
    """Trains cases one after another.

    Args:
        workers: for the runs.
        splits: how to split each model.
        num_steps: of each run.
        limit_seconds: for each run.
        plain: whether to compare with a plain loop.
        overhead: whether to time the step of one stage.
    """

    def __init__(
        self,
        workers: Workers,
        splits: Sequence[Split],
        num_steps: int,
        limit_seconds: float,
        plain: bool,
        overhead: bool,
    ) -> None:
        self._workers = workers
        self._splits = splits
        self._num_steps = num_steps
        self._limit_seconds = limit_seconds
        self._plain = plain
        self._overhead = overhead

    def run(self, case: Case) -> Record:
        """Everything that is asked of one case."""
        begun = time.monotonic()
        record: Record = {"library": case.library, "family": case.family, "name": case.name}
        try:
            [case] = self._call(zoo_training.settle, case, limit_seconds=BUILD_LIMIT_SECONDS)
        except JobFailedError as error:
            # It has nothing to do with pipelines: the model is not counted.
            return record | {"built": False, **_told(error)}
        record |= {"built": True, "options": case.options, "runs": []}
        one_file = str(self._workers.scratch / "one_stage.pt")
        # Of asynchronous schedules, one has the same bits on every split, but not those of others.
        schedule = self._splits[0].schedule if self._splits else Fit(1).schedule
        how = Fit(self._num_steps, schedule=schedule)
        one = self._fit(record, case, 1, "all", how, one_file, None)
        if one is None and record["runs"][0]["error"].startswith("hang"):
            return record  # nor would the splits be ready in time
        if one is not None and self._plain:
            record["plain"] = self._compare_with_plain(case)
        if one is not None and self._overhead:
            record["overhead"] = self._measure_overhead(case)
        for split in self._splits:
            self._split(record, case, one, split, one_file)
        record["seconds"] = round(time.monotonic() - begun, 1)
        return record

    def _split(
        self, record: Record, case: Case, one: Trained | None, split: Split, one_file: str
    ) -> None:
        num_layers = record.get("num_layers", 0)
        # Whether all boundaries may be cut is known after a run on several stages.
        partition: Any = "auto"
        if split.cut == "random":
            if not num_layers:
                return
            # A model of few layers is opened further, nobody has seen yet into how many.
            partition = "uniform"
            if num_layers >= split.stages:
                partition = random_cut(f"{case.name}/{split.stages}", num_layers, split.stages)
        how = Fit(self._num_steps, partition, split.schedule)
        compare_with = one_file if one is not None else None
        run = self._fit(record, case, split.stages, split.cut, how, None, compare_with)
        if run is not None and one is not None:
            record["runs"][-1] |= {
                "same_bits": not run.differing,
                "same_losses": _same(run.losses, one.losses),
                "same_layers": run.layers == one.layers,
                "num_differing": len(run.differing),
                "differing": dict(list(run.differing.items())[:8]),
            }

    def _fit(
        self,
        record: Record,
        case: Case,
        num_stages: int,
        cut: Any,
        how: Fit,
        save_as: str | None,
        compare_with: str | None,
    ) -> Trained | None:
        entry: Record = {
            "stages": num_stages,
            "cut": cut,
            "partition": how.partition,
            "schedule": how.schedule,
        }
        record["runs"].append(entry)
        try:
            runs: list[Trained] = self._call(
                zoo_training.fit, case, how, save_as, compare_with, world_size=num_stages
            )
        except JobFailedError as error:
            entry |= {"trains": False, **_told(error)}
            return None
        first = runs[0]
        entry |= {
            "trains": True,
            "counts": first.counts,
            "losses": first.losses,
            "ranks_agree": all(
                run.digest == first.digest and _same(run.losses, first.losses) for run in runs
            ),
            "first_step_seconds": round(first.first_step_seconds, 3),
            "seconds": round(first.seconds, 3),
        }
        record.setdefault("num_layers", len(first.layers))
        return first

    def _compare_with_plain(self, case: Case) -> Record:
        path = str(self._workers.scratch / "without_dropout.pt")
        how = Fit(self._num_steps, drops=False)
        try:
            self._call(zoo_training.fit, case, how, path, None)
            [far] = self._call(zoo_training.train_plainly, case, self._num_steps, path)
        except JobFailedError as error:
            # What draws cannot be compared; what fails is different.
            draws = error.first_line.startswith(zoo_training.StillDrawsError.__name__)
            return {"same": None if draws else False, **_told(error)}
        return {
            "same": not far,
            "num_differing": len(far),
            "differing": dict(list(far.items())[:8]),
        }

    def _measure_overhead(self, case: Case) -> Record:
        try:
            [measured], [by_default] = (
                self._call(
                    zoo_training.measure_overhead,
                    case,
                    NUM_OVERHEAD_STEPS,
                    OVERHEAD_LIMIT_SECONDS,
                    with_pipeshift,
                )
                for with_pipeshift in (True, False)
            )
        except JobFailedError as error:
            return _told(error)
        return {
            "ratio": round(measured.ratio, 4),
            "lightning_ratio": round(by_default.ratio, 4),
            "step_seconds": round(median(measured.fitted), 5),
            "plain_step_seconds": round(median(measured.plain), 5),
            "num_steps": len(measured.fitted),
        }

    def _call(
        self, function: Any, *args: Any, world_size: int = 1, limit_seconds: float | None = None
    ) -> list[Any]:
        limit = limit_seconds or self._limit_seconds
        return self._workers.run(function, *args, world_size=world_size, limit_seconds=limit)


def _same(losses: Sequence[float], others: Sequence[float]) -> bool:
    # By their text, in which what is not a number is the same as itself.
    return list(map(repr, losses)) == list(map(repr, others))


def _told(error: JobFailedError) -> Record:
    return {"error": error.first_line, "message": error.message[:2000], "details": error.details}


# --- what is printed ---


def verdict(run: Record) -> str:
    """One word for a run, or how far it is from one stage, or the error."""
    if not run["trains"]:
        return f"{run['error'].split(':')[0]}!"
    if not run["ranks_agree"]:
        return "ranks differ!"
    if "same_bits" not in run:
        return "trains"
    if run["same_bits"] and run["same_losses"]:
        return "same bits"
    return f"off by {max([*run['differing'].values(), 0.0]):.0e}"


def is_settled(record: Record) -> bool:
    """Whether a model need not be tried again: the bits were the same, or it could not be built."""
    runs = record.get("runs", [])
    return not record["built"] or (
        (len(runs) > 1 or "plain" in record)
        and runs[0]["trains"]
        and {verdict(run) for run in runs[1:]} <= {"same bits"}
        and bool(record.get("plain", {"same": True})["same"])
    )


def line_of(record: Record) -> list[Any]:
    """A row of the table."""
    name = f"{record['family']}/{record['name']}"
    if not record["built"]:
        return [name, "", "not built", "", "", ""]
    runs = record["runs"]
    verdicts = [
        f"{run['stages']}{run['cut'][0]}{run['schedule'][0]}: {verdict(run)}" for run in runs[1:]
    ]
    plain = record.get("plain")
    overhead = record.get("overhead", {})
    return [
        name,
        record.get("num_layers", "?"),
        verdict(runs[0]),
        "; ".join(verdicts),
        "" if plain is None else PLAIN[plain["same"]],
        overhead.get("ratio", ""),
    ]


def summary(records: Sequence[Record]) -> Record:
    """Counts over all models."""
    built = [record for record in records if record["built"]]
    several = [record["runs"][1:] for record in built]

    def ratios(name: str = "ratio") -> list[float]:
        found = [record.get("overhead", {}).get(name) for record in built]
        return sorted(ratio for ratio in found if ratio is not None)

    def count(is_so: Any) -> int:
        return sum(all(is_so(run) for run in runs) and bool(runs) for runs in several)

    result: Record = {
        "models": len(built),
        "not built": len(records) - len(built),
        "train on one stage": sum(record["runs"][0]["trains"] for record in built),
        "train on all splits": count(lambda run: run["trains"]),
        "same bits on all splits": count(lambda run: verdict(run) == "same bits"),
        "hang or die somewhere": sum(
            any(run.get("error", "").startswith(("hang", "crash")) for run in record["runs"])
            for record in built
        ),
    }
    plain = [record["plain"]["same"] for record in built if "plain" in record]
    if plain:
        compared = [same for same in plain if same is not None]
        result["same as a plain loop"] = f"{sum(compared)} of {len(compared)}"
        result["not comparable with it"] = len(plain) - len(compared)
    if ratios():
        result["overhead on one stage, median"] = median(ratios())
        result["overhead on one stage, worst"] = ratios()[-1]
        result["overhead of Lightning by default, median"] = median(ratios("lightning_ratio"))
        result["overhead of Lightning by default, worst"] = ratios("lightning_ratio")[-1]
    return result


def print_errors(records: Sequence[Record]) -> None:
    """Every error's first line with the models that have it."""
    models: dict[str, list[str]] = {}
    for record in records:
        errors = {run["error"] for run in record.get("runs", []) if "error" in run}
        for error in sorted(errors):
            models.setdefault(error, []).append(record["name"])
    rows = [
        [len(names), error[:140], ", ".join(names[:4])]
        for error, names in sorted(models.items(), key=lambda item: -len(item[1]))
    ]
    if rows:
        print_table("Errors", ["models", "first line", "of"], rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--library", required=True, choices=zoo_models.LIBRARIES)
    parser.add_argument("--match", help="a regular expression, looked for in family/name")
    parser.add_argument("--limit", type=int, help="no more models than this")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many at the beginning")
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 3], help="none: one alone")
    parser.add_argument("--cuts", choices=["measured", "random", "both"], default="both")
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe"])
    parser.add_argument(
        "--every-split",
        action="store_true",
        help="combine all stages, cuts and schedules, not only every two of their values",
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="compare with a plain loop too")
    parser.add_argument("--overhead", action="store_true", help="time the step of one stage too")
    parser.add_argument("--limit-seconds", type=float, default=90.0, help="for each run")
    parser.add_argument("--list", action="store_true", help="only say which models these are")
    parser.add_argument(
        "--go-on",
        action="store_true",
        help="keep what the --json FILE has of models whose bits were the same, or that could not"
        " be built; do the others, and those that it lacks",
    )
    options = parser.parse_args()
    cases = zoo_models.cases(options.library, options.match)
    cases = cases[options.skip :][: options.limit]
    if options.list:
        print("\n".join(f"{case.family}/{case.name}" for case in cases))
        return
    records: list[Record] = []
    known: dict[str, Record] = {}
    if options.go_on:
        if options.json is None or not options.json.exists():
            parser.error("--go-on needs the --json FILE of the sweep that it is to go on with")
        before = json.loads(options.json.read_text())["figures"]["models"]
        known = {record["name"]: record for record in before if is_settled(record)}
    if len(options.schedules) > 1 and ASYNCHRONOUS.keys() & options.schedules:
        parser.error("an asynchronous schedule has other bits than the others: name it alone")
    preloaded = [*PRELOADED, *LIBRARY_MODULES[options.library]]
    cuts = ["measured", "random"] if options.cuts == "both" else [options.cuts]
    with Workers(preloaded) as workers:
        splits = some_splits(options.stages, cuts, options.schedules)
        if options.every_split:
            splits = [Split(*each) for each in product(options.stages, cuts, options.schedules)]
        sweep = Sweep(
            workers,
            splits,
            options.steps,
            options.limit_seconds,
            options.plain,
            options.overhead,
        )
        for number, case in enumerate(cases, start=1):
            if case.name in known:
                records.append(known[case.name])
                continue
            record = sweep.run(case) | {"commit": commit()}
            records.append(record)
            name, layers, one, splits, plain, overhead = line_of(record)
            print(
                f"[{number}/{len(cases)}] {name}: {layers} layers; 1: {one}; {splits}"
                + (f"; plain: {plain}" if plain else "")
                + (f"; overhead {overhead}" if overhead else "")
                + f" ({record.get('seconds', 0)} s)",
                flush=True,
            )
            for error in sorted(
                {r["error"] for r in [record, *record.get("runs", [])] if "error" in r}
            ):
                print(f"    {error}", flush=True)
            if options.json is not None:
                # A sweep takes long: what is done is there, whatever becomes of the rest.
                _write(options.json, options.library, records, says_so=False)
    if options.json is not None:
        _write(options.json, options.library, records, says_so=True)
    print_table(
        f"{options.library}: m is the measured cut, r a random one; 1 is 1f1b, g gpipe, a async",
        ["model", "layers", "1 stage", "splits", "plain loop", "overhead"],
        [line_of(record) for record in records],
    )
    print_errors(records)
    print_table(
        "Summary", ["", ""], [[name, str(value)] for name, value in summary(records).items()]
    )


def _write(path: Path, library: str, records: Sequence[Record], says_so: bool) -> None:
    figures = {"library": library, "summary": summary(records), "models": list(records)}
    save(path, figures, says_so=says_so)


if __name__ == "__main__":
    main()
