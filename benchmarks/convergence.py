"""What the asynchronous pipeline learns, from as many samples and in as much time.

    python -m benchmarks.convergence
    python -m benchmarks.convergence --draw FILE        # the plot again, from a result's JSON

Trains the model of ``examples/train_gpt.py`` on four stages, from the same initial weights, with
the same samples in the same order. 1f1b splits the batch of an update into four microbatches. An
asynchronous pipeline takes a minibatch of as many samples as those have and accumulates four, or
takes the whole batch as one minibatch, as if only the schedule's name had been changed. Two more
contenders make an update from a quarter of the samples.

The learning rate rises over the first samples and stays, so that each point of a curve is the end
of a training of its own. It is the best one for the first seed: half and twice of it are worse.
There is no clipping by norm, which an asynchronous pipeline cannot do.

Two cores cannot show how fast four stages are. So the seconds of an update are measured in another
run, where layers sleep instead of computing, in proportion to their samples (see
:mod:`benchmarks.asynchronous`). A pipeline that has drained for a validation pays for being filled
again.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset

from benchmarks.asynchronous import seconds_per_batch
from benchmarks.measuring import arguments, interval, print_table, save, shown
from examples.train_gpt import GPT, TextDataModule, Windows
from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.testing.ranks import run_ranks

NUM_STAGES = NUM_MICROBATCHES = 4
BATCH, LENGTH, NUM_VALIDATION = 32, 64, 128
WARM_UP = 16 * BATCH
FORWARD_SECONDS = 0.020
"""Of a quarter of a batch on one stage; a backward takes twice as long."""
PLOT = Path(__file__).resolve().parent.parent / "docs" / "convergence.svg"
Points = list[tuple[int, float]]
"""The validation loss by the number of samples that were trained with."""
COLOURS = ("#1b1b1b", "#d1495b", "#edae49", "#00798c", "#8a8a8a", "#6a4c93")


@dataclass(frozen=True)
class Contender:
    """A way to train.

    Args:
        schedule: by name.
        samples: of an update.
        size: the samples of a batch of the loader: one minibatch, if asynchronous.
    """

    schedule: str
    samples: int
    size: int

    @property
    def is_synchronous(self) -> bool:
        """Whether the pipeline drains at each update."""
        return self.schedule == "1f1b"

    @property
    def name(self) -> str:
        """For tables."""
        parts = NUM_MICROBATCHES if self.is_synchronous else self.samples // self.size
        what = "microbatch" if self.is_synchronous else "minibatch"
        return f"{self.schedule}, {parts} {what}{'es' if parts > 1 else ''} an update"


CONTENDERS = (
    Contender("1f1b", BATCH, BATCH),
    Contender("async", BATCH, BATCH // 4),
    Contender("async", BATCH, BATCH),
    Contender("async-2bw", BATCH, BATCH // 4),
    Contender("1f1b", BATCH // 4, BATCH // 4),
    Contender("async", BATCH // 4, BATCH // 4),
)


class Model(GPT):
    """The example's model; its learning rate rises and stays, by the number of samples."""

    samples_of_update = BATCH

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        steps = WARM_UP // self.samples_of_update
        found["lr_scheduler"]["scheduler"] = LambdaLR(
            found["optimizer"], lambda step: min(1.0, (step + 1) / steps)
        )
        return found


class Curve(pl.Callback):
    """The validation loss by the number of samples that were trained with."""

    def __init__(self, samples_of_update: int) -> None:
        self.points: Points = []
        self._samples = samples_of_update

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Notes it."""
        loss = float(trainer.callback_metrics["val_loss"])
        self.points.append((trainer.global_step * self._samples, loss))


@dataclass(frozen=True)
class Job:
    """One training.

    Args:
        contender: how.
        rate: the learning rate.
        seed: of the initial weights and of the order of the samples.
        num_samples: how many it trains with.
        num_points: how many validations there are.
        width: of the model.
    """

    contender: Contender
    rate: float
    seed: int
    num_samples: int
    num_points: int
    width: int


def curve(job: Job) -> Points:
    """Trains, on every rank; returns the validation losses."""
    torch.set_num_threads(1)
    contender = job.contender
    data = TextDataModule(length=LENGTH)
    data.setup()
    train = Windows(data.train_text, LENGTH)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(job.seed))
    chosen = Subset(train, order[: job.num_samples].tolist())
    validation = Windows(data.val_text, LENGTH)
    every = range(0, len(validation), len(validation) // NUM_VALIDATION)[:NUM_VALIDATION]
    pl.seed_everything(job.seed, verbose=False)
    model = Model(num_layers=NUM_STAGES, width=job.width, learning_rate=job.rate)
    model.samples_of_update = contender.samples
    found = Curve(contender.samples)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=NUM_STAGES,
        strategy=PipeShiftStrategy(
            schedule=contender.schedule,
            microbatches=NUM_MICROBATCHES if contender.is_synchronous else 1,
            partition="uniform",
            profile_steps=0,
        ),
        callbacks=[found],
        max_epochs=1,
        accumulate_grad_batches=contender.samples // contender.size,
        val_check_interval=job.num_samples // contender.size // job.num_points,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(
        model,
        DataLoader(chosen, contender.size),
        DataLoader(Subset(validation, list(every)), BATCH),
    )
    return found.points


def curves(jobs: Sequence[Job]) -> list[Points]:
    """Runs on every rank."""
    return [curve(job) for job in jobs]


def searches(jobs: Sequence[Job]) -> list[dict[float, Points]]:
    """Runs on every rank, where losses are the same."""
    return [search(job) for job in jobs]


def search(job: Job) -> dict[float, Points]:
    """The training's curves by learning rate: its own one and others, by factors of two, until the
    best one of them stands between two that are worse.
    """
    found = {rate: curve(replace(job, rate=rate)) for rate in (job.rate, 2 * job.rate)}
    while (best := best_of(found)) in (min(found), max(found)):
        rate = best / 2 if best == min(found) else best * 2
        found[rate] = curve(replace(job, rate=rate))
    return found


def best_of(found: Mapping[float, Points]) -> float:
    """The learning rate with the lowest loss in the end."""
    ends = {rate: points[-1][1] for rate, points in found.items()}
    return min(ends, key=lambda rate: ends[rate] if math.isfinite(ends[rate]) else math.inf)


def measured_paces(num_batches: int) -> dict[str, float]:
    """The seconds of a quarter of a batch, by schedule, on stages that sleep."""
    synchronous = run_ranks(
        seconds_per_batch, NUM_STAGES, "1f1b", NUM_STAGES, NUM_MICROBATCHES, num_batches // 8,
        FORWARD_SECONDS, timeout=300,
    )  # fmt: skip
    asynchronous = run_ranks(
        seconds_per_batch, NUM_STAGES, "async", NUM_STAGES, 1, num_batches, FORWARD_SECONDS,
        timeout=300,
    )  # fmt: skip
    return {"1f1b": max(synchronous) / NUM_MICROBATCHES, "async": max(asynchronous)}


def seconds(contender: Contender, points: Sequence[int], paces: Mapping[str, float]) -> list[float]:
    """The time at which each point of a curve is reached.

    Args:
        contender: the contender.
        points: the samples that were trained with.
        paces: :func:`measured_paces`.
    """
    if contender.is_synchronous:
        return [samples / (BATCH // 4) * paces["1f1b"] for samples in points]
    fill = (NUM_STAGES - 1) * contender.size
    return [
        (samples + number * fill) / (BATCH // 4) * paces["async"]
        for number, samples in enumerate(points, start=1)
    ]


def at(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """A curve's value, on a line between its points."""
    place = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    part = (x - xs[place - 1]) / (xs[place] - xs[place - 1])
    return ys[place - 1] + part * (ys[place] - ys[place - 1])


# --- the plot ---


def svg(figures: Mapping[str, Any]) -> str:
    """Two plots of the validation loss, over samples and over seconds."""
    contenders = [one for one in figures["contenders"].values() if one["samples"] == BATCH]
    panels = [_panel(contenders, key, 360 * i) for i, key in enumerate(("points", "seconds"))]
    legend = [
        f'<line x1="{60 + 350 * (i % 2)}" x2="{85 + 350 * (i % 2)}" y1="{y}" y2="{y}"'
        f' stroke="{COLOURS[i]}" stroke-width="2"/>'
        f'<text x="{92 + 350 * (i % 2)}" y="{y + 4}">{one["name"]}</text>'
        for i, one in enumerate(contenders)
        for y in [318 + 20 * (i // 2)]
    ]
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 360">',
            '<rect width="740" height="360" fill="white"/>',
            '<g font-size="11" font-family="sans-serif">',
            *panels,
            *legend,
            "</g>",
            "</svg>\n",
        ]
    )


def _panel(contenders: Sequence[Mapping[str, Any]], key: str, left: int) -> str:
    titles = {"points": "samples", "seconds": "seconds of measured paces"}
    most = max(one[key][-1] for one in contenders)
    losses = [loss for one in contenders for loss in one["losses"]]
    low, high = min(losses), max(losses)

    def place(x: float, y: float) -> str:
        return f"{left + 60 + 300 * x / most:.1f},{270 - 240 * (y - low) / (high - low):.1f}"

    lines = [
        f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="'
        f'{" ".join(place(x, y) for x, y in zip(one[key], one["losses"], strict=True))}"/>'
        for one, colour in zip(contenders, COLOURS, strict=False)
    ]
    marks = []
    for part in range(5):
        x, y = place(most * part / 4, loss := low + (high - low) * part / 4).split(",")
        marks += [
            f'<line x1="{left + 60}" x2="{left + 360}" y1="{y}" y2="{y}" stroke="#dddddd"/>',
            f'<text x="{left + 54}" y="{y}" text-anchor="end">{loss:.2f}</text>',
            f'<text x="{x}" y="286" text-anchor="middle">{most * part / 4:.0f}</text>',
        ]
    title = f"validation loss, nats per byte, over {titles[key]}"
    return "\n".join(
        [*marks, *lines, f'<text x="{left + 210}" y="18" text-anchor="middle">{title}</text>']
    )


def summary(
    contender: Contender,
    searched: Mapping[float, Points],
    others: Sequence[Points],
    paces: Mapping[str, float],
) -> dict[str, Any]:
    """The figures of one contender.

    Args:
        contender: the contender.
        searched: the curves of the first seed by learning rate.
        others: those of the other seeds, with the best of them.
        paces: :func:`measured_paces`.
    """
    rate = best_of(searched)
    found = [searched[rate], *others]
    points = [samples for samples, _ in found[0]]
    by_seed = [[loss for _, loss in one] for one in found]
    return {
        "name": contender.name,
        "samples": contender.samples,
        "is_synchronous": contender.is_synchronous,
        "rate": rate,
        "searched": {f"{rate:g}": searched[rate][-1][1] for rate in sorted(searched)},
        "points": points,
        "seconds": seconds(contender, points, paces),
        "losses": [median(losses) for losses in zip(*by_seed, strict=True)],
        "by_seed": by_seed,
    }


def compare(contenders: Iterable[dict[str, Any]]) -> None:
    """Adds to each contender how much higher its loss is than that of the synchronous one with
    updates of as many samples: after all samples, and at the time at which the faster one has used
    all of them.
    """
    synchronous = {one["samples"]: one for one in contenders if one["is_synchronous"]}
    for one in contenders:
        other = synchronous[one["samples"]]
        ends = {key: min(one[key][-1], other[key][-1]) for key in ("points", "seconds")}
        one["end"] = interval([losses[-1] for losses in one["by_seed"]])
        for key, x in ends.items():
            more = [
                at(x, one[key], mine) - at(x, other[key], theirs)
                for mine, theirs in zip(one["by_seed"], other["by_seed"], strict=True)
            ]
            one[f"more_by_{key}"] = interval(more)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw this result, and end")
    parser.add_argument("--plot", type=Path, default=PLOT, help="where the plot goes")
    parser.add_argument("--updates", type=int, default=96, help=f"of {BATCH} samples")
    parser.add_argument("--points", type=int, default=8, help="validations of a training")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=2e-3, help="where the search begins")
    parser.add_argument("--timeout", type=float, default=3600, help="of all trainings, in seconds")
    options = parser.parse_args()
    if options.draw is not None:
        options.plot.write_text(svg(json.loads(options.draw.read_text())["figures"]))
        return
    paces = measured_paces(60)

    def job(contender: Contender, rate: float, seed: int) -> Job:
        samples = options.updates * BATCH
        return Job(contender, rate, seed, samples, options.points, options.width)

    def train(function: Any, jobs: Sequence[Job]) -> Any:
        return run_ranks(function, NUM_STAGES, jobs, timeout=options.timeout)[0]

    # Larger for larger batches, as gradients are less noisy: by the square root, for Adam (Malladi
    # et al., NeurIPS 2022).
    begin = [options.rate * math.sqrt(one.samples / BATCH) for one in CONTENDERS]
    found = train(searches, [job(*one, 1) for one in zip(CONTENDERS, begin, strict=True)])
    seeds = range(2, options.seeds + 1)
    best = zip(CONTENDERS, map(best_of, found), strict=True)
    others = train(curves, [job(*one, seed) for one in best for seed in seeds])
    contenders = {
        f"{one.schedule}, {one.samples}, {one.size}": summary(
            one, searched, others[place * len(seeds) : (place + 1) * len(seeds)], paces
        )
        for place, (one, searched) in enumerate(zip(CONTENDERS, found, strict=True))
    }
    compare(contenders.values())
    print_table(
        f"{NUM_STAGES} stages, {options.updates * BATCH} samples, {options.seeds} seeds;"
        " validation loss in nats per byte",
        ["", "samples of an update", "learning rate", "loss", "- 1f1b's", "- 1f1b's in that time"],
        [
            [one["name"], one["samples"], f"{one['rate']:g}"]
            + [shown(one[key]) for key in ("end", "more_by_points", "more_by_seconds")]
            for one in contenders.values()
        ],
    )
    figures = {"paces": paces, "contenders": contenders}
    save(options.json, figures)
    if options.json is not None:
        options.plot.write_text(svg(figures))


if __name__ == "__main__":
    main()
