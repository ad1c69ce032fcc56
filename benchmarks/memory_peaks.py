"""The memory that a run really takes under a budget, beside what was predicted, and the budget.

    python -m benchmarks.memory_peaks
    python -m benchmarks.memory_peaks --models vit --stages 2

Models on one device and on two stages. A run without a budget says how much each stage needs; then
there is one run for each part of the largest need as the budget, in which tensors move to the host,
or are recomputed (``recompute``: there is no host memory). ``measured`` is the largest number of
bytes of tensors that lived at once on a stage, in any step from the second one on, counted from the
tensors themselves: weights, gradients, optimizer state, the batch, messages, saved tensors, and
what the layers take for a moment. ``predicted`` is the peak of the plan in force at the end, and
``under it`` the measured one of the steps under that plan: another plan may have come into force
when the first steps had been measured. Each row is a stage; ``OVER`` marks one that has taken more
than its budget in any step.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measuring import arguments, print_table, save
from benchmarks.memory_predictions import MODELS as MODELS_OF_OTHERS
from benchmarks.memory_predictions import Computing, Model, of_tokens, what_moves
from benchmarks.placements import Repeated
from lightning_pipeshift import MemoryCompression, PipeShiftStrategy
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.text import bytes_text
from tests.features_models import quiet_trainer
from tests.living_bytes import LivingBytes

WIDTH, NUM_LAYERS, VOCABULARY = 256, 8, 20_000
PROFILE_STEPS, NUM_STEPS = 4, 24
PARTS = (0.95, 0.85, 0.75, 0.65)
UNLIMITED, HOST_BUDGET = 1e12, 2e9


def _mlp() -> L.LightningModule:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(NUM_LAYERS)]
    return Computing(nn.Sequential(*layers, nn.Linear(WIDTH, 10)), _of_rows)


def _of_rows(net: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


def _vocabulary() -> L.LightningModule:
    """A GPT-2 whose loss takes more memory than its layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4, n_embd=64, n_head=4, vocab_size=VOCABULARY, n_positions=128, use_cache=False
    )
    return Computing(GPT2LMHeadModel(config), of_tokens)


MODELS = {
    "mlp": Model(_mlp, lambda: (torch.randn(WIDTH), torch.tensor(3)), rows=512, microbatches=4),
    "vit": MODELS_OF_OTHERS["vit"],
    "gpt2": MODELS_OF_OTHERS["gpt2"],
    "vocabulary": Model(
        _vocabulary, lambda: (torch.randint(VOCABULARY, (128,)),), rows=4, microbatches=4
    ),
}


class _Plans(L.Callback):
    """Notes the plan in force in each step."""

    def __init__(self) -> None:
        self.plans: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.plans.append(trainer.strategy.plan)


def _data(model: Model) -> Any:
    return torch.utils.data.DataLoader(
        Repeated(model.sample()), batch_size=model.rows * model.microbatches
    )


def train(name: str, num_stages: int, budget: float, host_budget: float) -> dict[str, Any]:
    """Runs on every rank: the peaks of its steps, and what was predicted of all stages."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    model, living, plans = MODELS[name], LivingBytes(), _Plans()
    module = model.make()
    strategy: Any = PipeShiftStrategy(
        microbatches=model.microbatches,
        partition="uniform",
        profile_steps=PROFILE_STEPS,
    )
    trainer = quiet_trainer(
        {"devices": num_stages, "strategy": strategy},
        max_steps=NUM_STEPS,
        max_epochs=-1,
        callbacks=[living, plans],
        plugins=[MemoryCompression(budget=budget, host_budget=host_budget)],
    )
    trainer.fit(module, _data(model))
    plan, measured = strategy.plan, strategy.pipeline.planning.measured
    peaks = list(zip(plans.plans, living.peaks, strict=True))[1:]
    return {
        "first_bytes": living.peaks[0],
        "measured_bytes": max(peak for _, peak in peaks),
        "measured_under_plan_bytes": max(peak for one, peak in peaks if one.is_like(plan)),
        "predicted_bytes": measured.prediction(plan).memory_bytes[0] if measured else None,
        "moves": what_moves(plan),
    }


def run(name: str, num_stages: int, budget: float, host_budget: float) -> list[dict[str, Any]]:
    """What came of a run, by stage; nothing if no plan keeps the budget."""
    given = name, num_stages, budget, host_budget
    outcomes = run_ranks(train, num_stages, *given, timeout=600, expect_failure=True)
    errors = {outcome.error_type: outcome for outcome in outcomes if outcome.failed}
    if "BudgetError" in errors:
        return []
    if errors:
        raise RuntimeError("\n".join(map(str, errors.values())))
    found = [outcome.value for outcome in outcomes]
    predicted = found[0]["predicted_bytes"]
    return [
        {**mine, "predicted_bytes": predicted[stage], "budget_bytes": budget}
        for stage, mine in enumerate(found)
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--parts", nargs="+", type=float, default=list(PARTS))
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for name in options.models:
        for num_stages in options.stages:
            free = run(name, num_stages, UNLIMITED, 0)
            need = max(stage["predicted_bytes"] for stage in free)
            cases = {"all kept": free}
            for way, host_budget in (("", HOST_BUDGET), (", recompute", 0.0)):
                for part in options.parts:
                    cases[f"{part:g}{way}"] = run(name, num_stages, part * need, host_budget)
            rows = [
                _row(case, n, one) for case, them in cases.items() for n, one in enumerate(them)
            ]
            rows += [[case, *[""] * 7, "no plan"] for case, them in cases.items() if not them]
            where = f"{num_stages} stage{'s' if num_stages > 1 else ''}"
            print_table(f"{name}, {where}", HEADER, rows)
            found = [stage for them in cases.values() for stage in them]
            ratios = [s["predicted_bytes"] / s["measured_under_plan_bytes"] for s in found]
            figures[f"{name}, {where}"] = {
                "cases": cases,
                "least_predicted": min(ratios),
                "most_predicted": max(ratios),
                "num_runs": sum(map(bool, cases.values())),
                "num_over": sum(any(_is_over(s) for s in them) for them in cases.values()),
                "num_over_first": sum(
                    any(s["first_bytes"] > s["budget_bytes"] for s in them)
                    for them in cases.values()
                ),
            }
            save(options.json, figures)


HEADER = (
    "budget",
    "stage",
    "of",
    "measured",
    "predicted",
    "under it",
    "of it",
    "first step",
    "plan",
)


def _row(case: str, stage: int, found: dict[str, Any]) -> list[Any]:
    predicted, measured, under, budget, first = (
        found[f"{name}_bytes"]
        for name in ("predicted", "measured", "measured_under_plan", "budget", "first")
    )
    return [
        case,
        stage,
        bytes_text(budget) if budget < UNLIMITED else "none",
        bytes_text(measured),
        bytes_text(predicted),
        bytes_text(under),
        f"{predicted / under:.3f}",
        bytes_text(first) + (" OVER" if first > budget else ""),
        ("OVER " if _is_over(found) else "") + found["moves"],
    ]


def _is_over(found: dict[str, Any]) -> bool:
    return bool(found["measured_bytes"] > found["budget_bytes"])


if __name__ == "__main__":
    main()
