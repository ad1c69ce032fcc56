"""What crosses between two stages of GPT-2 in a step, and what waits for it.

    python -m benchmarks.tied_embedding

A small GPT-2 of transformers, whose embedding is most of its parameters and is tied to its head: it
is at the first layer and behind the last one, so both stages hold it. Four microbatches, ``1f1b``,
AdamW, a thread for each rank. For each contender: the time of a step, the bytes that each stage
sends in it, by kind, and where the time goes, as ``PipelineTimeline`` records it. ``untied`` is the
same model with a head of its own: what it takes less is the price of the tie. With ``shared
memory`` the ranks send tensors as they do between two GPUs, through memory that both can reach; for
that, files in memory stand in here.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.measuring import arguments, interval, print_table, save, shown
from benchmarks.placements import Repeated
from lightning_pipeshift import PipelineTimeline, PipeShiftStrategy
from lightning_pipeshift.lightning import connection
from lightning_pipeshift.runtime.comm import channels
from lightning_pipeshift.runtime.comm.lane import Lane
from lightning_pipeshift.runtime.comm.memory_link import MemoryEnd, Written
from lightning_pipeshift.runtime.offload.shared_memory import address_here
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.timeline.recording import REPORT, RankRecord, Recording, What
from tests.features_models import quiet_trainer

MICROBATCHES, LENGTH, WARM_UP = 4, 64, 4
CONTENDERS = ("one stage", "two stages", "two stages, shared memory", "two stages, untied")

KINDS = {
    "payload": "payloads, forward",
    "gradient": "payloads' gradients",
    "tensor": "shared gradients",
    "object": "objects (reports, flags)",
    "memory": "through shared memory",
}


class GPT2(L.LightningModule):
    """A small GPT-2, most of which is the embedding."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        config = GPT2Config(
            n_layer=4, n_embd=256, n_head=4, n_positions=LENGTH, tie_word_embeddings=is_tied
        )
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: Tensor) -> Tensor:
        """The usual loss."""
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> Optimizer:
        """AdamW."""
        return AdamW(self.parameters(), lr=1e-4)


class Watch(L.Callback):
    """Times the steps, from the start of one to the start of the next, and counts what this rank
    sends in each.
    """

    def __init__(self) -> None:
        self.begun: list[float] = []
        self.sent: list[Counter[str]] = [Counter()]
        post = Lane._post_send

        def counted(lane: Lane, flat: Tensor, to: int, line: Any, tag: int) -> Any:
            self.sent[-1][_kind(tag)] += flat.nbytes
            return post(lane, flat, to, line, tag)

        Lane._post_send = counted  # type: ignore[assignment, method-assign]
        write = MemoryEnd.write

        def written(end: MemoryEnd, tensors: Sequence[Tensor]) -> Written:
            self.sent[-1]["memory"] += sum(tensor.nbytes for tensor in tensors)
            return write(end, tensors)

        MemoryEnd.write = written  # type: ignore[assignment, method-assign]

    def on_train_batch_start(self, *_: Any) -> None:
        """Before the timeline's own hook."""
        self.begun.append(time.perf_counter())
        self.sent.append(Counter())


def _kind(tag: int) -> str:
    if tag >= channels._HEADER_TAG:
        return "object" if tag % 2 == 0 or tag < 1 << 20 else "tensor"
    return "payload" if tag % 2 == channels.Direction.PAYLOAD else "gradient"


def _where(record: RankRecord) -> dict[str, float]:
    """The seconds of a rank's step."""
    waits = sum(mark.seconds for mark in record.of(What.WAIT) if mark.name != REPORT)
    sums = sum(mark.seconds for mark in record.of(What.SECTION) if mark.name == "sum gradients")
    return {
        "step": record.end - record.begin,
        "compute": record.compute_seconds,
        "wait for payloads": waits,
        "wait for the report": sum(mark.seconds for mark in record.of(What.WAIT)) - waits,
        "shared gradients": sums,
    }


def measure(
    is_tied: bool, shares_memory: bool, num_steps: int
) -> tuple[list[float], dict[str, float], list[Any]]:
    """Runs on every rank: the steps' seconds, the bytes sent in one, and the recorded steps."""
    if shares_memory:
        vars(connection)["payload_address"] = address_here
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        timeline = PipelineTimeline(every_n_steps=4, folder=folder)
        trainer = quiet_trainer(
            {
                "devices": int(os.environ["WORLD_SIZE"]),
                "strategy": PipeShiftStrategy(
                    microbatches=MICROBATCHES, schedule="1f1b", profile_steps=0
                ),
            },
            max_steps=num_steps + WARM_UP,
            callbacks=[watch, timeline],
        )
        sample = torch.randint(50257, (LENGTH,))
        trainer.fit(GPT2(is_tied), DataLoader(Repeated(sample), batch_size=4 * MICROBATCHES))
        files = sorted(Path(folder).glob("timeline-*.json"))
        records = [[_where(rank) for rank in Recording.load(file).ranks] for file in files]
    steps = [after - before for before, after in zip(watch.begun, watch.begun[1:], strict=False)]
    sent = {KINDS[kind]: watch.sent[-2][kind] / 1e6 for kind in KINDS}
    return steps[WARM_UP:], sent, records


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--num-steps", type=int, default=24)
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for name in CONTENDERS:
        ranks = run_ranks(
            measure,
            1 + ("two" in name),
            "untied" not in name,
            "memory" in name,
            options.num_steps,
            timeout=1200,
        )
        found[name] = {
            "seconds": interval(ranks[0][0]),
            "sent_mb": [rank[1] for rank in ranks],
            "where": [
                {key: median(record[stage][key] for record in ranks[0][2]) for key in first}
                for stage, first in enumerate(ranks[0][2][0])
            ]
            if len(ranks) > 1
            else [],
        }
        print(f"{name}: {shown(found[name]['seconds'])} s a step")
    rows = [
        [name, stage, kind, sent[kind]]
        for name, figures in found.items()
        for stage, sent in enumerate(figures["sent_mb"])
        for kind in KINDS.values()
        if sent[kind]
    ]
    print_table("MB that a stage sends in a step", ["run", "stage", "kind", "MB"], rows)
    rows = [
        [name, stage, *(1000 * seconds for seconds in where.values())]
        for name, figures in found.items()
        for stage, where in enumerate(figures["where"])
    ]
    header = ["run", "stage", *found["two stages"]["where"][0]]
    print_table("Milliseconds of a recorded step", header, rows)
    save(options.json, {"runs": found})


if __name__ == "__main__":
    main()
