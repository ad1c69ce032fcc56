"""How near predictions come to real steps when tensors move or are computed again.

    python -m benchmarks.memory_predictions
    python -m benchmarks.memory_predictions --models gpt2 vit

Two stages. The first steps are measured with all tensors on the device; from that one measurement
the planner makes a plan for each budget and policy below, and predicts its steps. The plans then
take turns in the same run, each under the budget that it was made for: so an error is the model's,
and not that of another measurement.

- ``sleep``: layers that sleep instead of computing, and save 4 MB of real tensors for each
  microbatch. Copies to the host cross a link of their own (:class:`SlowLink`), which takes time
  and next to no processor, as that of a GPU would.
- ``parts``: layers of two operations. One sleeps; what the other computes is large and takes next
  to no time, so it is the one to run again.
- ``gpt2``, ``vit``: layers of transformers (GPT-2, by configuration) and of timm. They compute, and
  copies to the host are those of the CPU: they take a core, and memory bandwidth, from the compute.
  How fast the machine is meanwhile may change by a third, so everything is kept in a turn before
  and after each other plan's: ``beside 'all kept'`` is the error of how many times as long a step
  is as those.

Predictions for layers that sleep are to be within 5 %.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from statistics import median
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.holding import Holder
from benchmarks.measuring import arguments, interval, print_table, ratios, save, shown
from benchmarks.placements import Plans, Repeated, TakingTurns, Timed
from lightning_pipeshift import KeepAll, MemoryCompression, PipeShiftStrategy, Plan, RecomputeAll
from lightning_pipeshift.plan.inputs.policies import Planned, Policy, SwapAll, TensorRecord
from lightning_pipeshift.plan.inputs.saved_tensors import Choice
from lightning_pipeshift.runtime.offload import stage_memory
from lightning_pipeshift.runtime.offload.copying import Copier, ThreadCopier, Ticket
from lightning_pipeshift.runtime.planning.make_plan import make_plan
from lightning_pipeshift.testing.ranks import run_ranks
from tests.features_models import quiet_trainer

NUM_STAGES = 2
BYTES_PER_SECOND = 1e9
"""Of the link to the host of layers that sleep."""

SLEEPS = (0.006, 0.012)
NUM_LAYERS, WIDTH, SAVED_BYTES = 8, 768, 4_000_000
PARTS_WIDTH, PARTS_COPIES = 128, 512


@dataclass(frozen=True)
class Case:
    """What the planner is asked for.

    Args:
        saved: the part of what the first stage saves that its budget has room for.
        state: likewise, of its optimizer state.
        weights: likewise, of its weights.
        policy: of saved tensors.
        has_host: whether tensors may move to the host.
        recompute: as users say it.
    """

    saved: float = 1.0
    state: float = 1.0
    weights: float = 1.0
    policy: Policy = field(default_factory=Planned)
    has_host: bool = True
    recompute: str = "auto"

    def budget(self, saved: float, state: float, weights: float, others: float) -> float:
        """Bytes, from those of a stage with all of its tensors."""
        # With some room for rounding.
        found = self.saved * saved + self.state * state + self.weights * weights + others
        return 1.001 * found + 4096


@dataclass(frozen=True)
class HoldsCostly:
    """Keeps the results of operations that take long, and computes the others again from them: each
    layer is recomputed in part."""

    def choose(self, record: TensorRecord) -> Choice:
        """See :class:`~lightning_pipeshift.Policy`."""
        is_costly = any(name in record.maker for name in ("mm", "attention", "slow"))
        return Choice.KEEP if is_costly else Choice.RECOMPUTE


KEPT = "all kept"
CASES = {
    KEPT: Case(),
    "some recomputed": Case(saved=0.6, has_host=False),
    "all recomputed": Case(policy=RecomputeAll()),
    "all recomputed in part": Case(policy=HoldsCostly()),
    "some swapped": Case(saved=0.6, recompute="none"),
    "all swapped": Case(policy=SwapAll(min_bytes=1 << 16)),
    "as planned, 0.6": Case(saved=0.6),
    "as planned, 0.4": Case(saved=0.4),
    "half of the state moves": Case(state=0.5, policy=KeepAll()),
    "all state moves": Case(state=0.05, policy=KeepAll()),
    "state and weights move": Case(state=0.0, weights=0.75, policy=KeepAll()),
}


# --- models ---


class SlowLink(ThreadCopier):
    """Copies at a given bandwidth in each direction: a thread that has copied sleeps for the rest
    of the time. The compute sleeps meanwhile, and needs no processor.
    """

    takes_processor = False

    def _submit(self, way: str, work: Callable[[], Any], done: Callable[[], None]) -> Ticket:
        def slowly() -> None:
            begun = time.perf_counter()
            with _CopiedBytes() as copied:
                work()
            left = copied.num_bytes / BYTES_PER_SECOND - (time.perf_counter() - begun)
            time.sleep(max(0.0, left))

        return super()._submit(way, slowly, done)


class _CopiedBytes(TorchDispatchMode):
    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.num_bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def slow_copier_of(_: Any, on_error: Any = None) -> Copier:
    """Takes the place of ``copier_of``."""
    return SlowLink(on_error)


class WithAdam(Holder):
    """Layers that sleep, and hold optimizer state."""

    def configure_optimizers(self) -> Optimizer:
        """Two values of state for each weight."""
        return Adam(self.parameters(), lr=1e-5)


@torch.library.custom_op("pipeshift::slow", mutates_args=())
def slow(x: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
    """An operation that sleeps: the same values."""
    time.sleep(forward_seconds)
    return x.clone()


@slow.register_fake
def _(x: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
    return torch.empty_like(x)


def _keep_seconds(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.seconds = inputs[2]


def _slow_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    time.sleep(ctx.seconds)
    return gradient, None, None


slow.register_autograd(_slow_backward, setup_context=_keep_seconds)


class InParts(nn.Module):
    """A slow operation, and quick ones whose results are large."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(PARTS_WIDTH, PARTS_WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The mean of many copies."""
        found = F.gelu(slow(self.linear(x), *SLEEPS))
        return found.repeat(PARTS_COPIES, 1, 1).sigmoid().mean(dim=0)


class Parts(WithAdam):
    """Layers of two operations."""

    def __init__(self) -> None:
        super().__init__(0, 1, 0, SLEEPS)
        self.layers = nn.ModuleList(InParts() for _ in range(NUM_LAYERS))


class Computing(L.LightningModule):
    """A model of others.

    Args:
        net: the model.
        loss: of the model and a batch.
    """

    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.net, self._loss = net, loss

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """The loss."""
        return self._loss(self.net, batch)

    def configure_optimizers(self) -> Optimizer:
        """Two values of state for each weight."""
        return Adam(self.parameters(), lr=1e-5)


@dataclass(frozen=True)
class Model:
    """A model and its data.

    Args:
        make: makes the model.
        sample: makes a sample.
        rows: samples in a microbatch.
        microbatches: in a step.
        is_slow: whether the link to the host is slow.
    """

    make: Callable[[], L.LightningModule]
    sample: Callable[[], tuple[Tensor, ...]]
    rows: int
    microbatches: int
    is_slow: bool = False


def _gpt2() -> L.LightningModule:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=8, n_embd=256, n_head=4, vocab_size=256, n_positions=128, use_cache=False
    )
    return Computing(GPT2LMHeadModel(config), of_tokens)


def of_tokens(net: nn.Module, batch: list[Tensor]) -> Tensor:
    found: Tensor = net(input_ids=batch[0], labels=batch[0]).loss
    return found


def _vit() -> L.LightningModule:
    import timm

    net = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, patch_size=8, depth=8, num_classes=10
    )
    return Computing(net, _of_images)


def _of_images(net: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


MODELS = {
    "sleep": Model(
        lambda: WithAdam(NUM_LAYERS, WIDTH, SAVED_BYTES, SLEEPS),
        lambda: (torch.randn(WIDTH), torch.randn(WIDTH)),
        rows=1,
        microbatches=8,
        is_slow=True,
    ),
    "parts": Model(
        Parts,
        lambda: (torch.randn(PARTS_WIDTH), torch.randn(PARTS_WIDTH)),
        rows=4,
        microbatches=8,
        is_slow=True,
    ),
    "gpt2": Model(_gpt2, lambda: (torch.randint(256, (128,)),), rows=4, microbatches=4),
    "vit": Model(_vit, lambda: (torch.randn(3, 64, 64), torch.tensor(3)), rows=8, microbatches=4),
}


# --- a run ---


class UnderBudgets(TakingTurns):
    """Plans that take turns, each under its own budget."""

    def __init__(
        self, cases: Mapping[str, Case], num_rounds: int, num_steps: int, beside: str | None
    ) -> None:
        super().__init__(self._made, num_rounds, num_steps, self._set_budget, beside)
        self._cases = cases
        self._budgets: dict[str, float] = {}
        self._strategy: Any = None
        self.waited: dict[str, list[float]] = {}

    def _made(self, strategy: PipeShiftStrategy) -> Plans:
        """Every rank calls this; the first one makes the plans."""
        self._strategy = strategy
        world = strategy.pipeline.replicas.world
        found: dict[str, tuple[str, list[float]]] = {}
        if world.stage == 0:
            found = {name: _plan_for(strategy, case) for name, case in self._cases.items()}
        found = world.share_object(found, source=0)
        self._budgets = {name: budgets[world.stage] for name, (_, budgets) in found.items()}
        return {name: Plan.from_json(text) for name, (text, _) in found.items()}

    def _set_budget(self, name: str) -> None:
        memory = self._strategy.pipeline.memory
        memory.memory = replace(memory.memory, budget_bytes=int(self._budgets[name]))


def _plan_for(strategy: PipeShiftStrategy, case: Case) -> tuple[str, list[float]]:
    """The plan of a case, with its prediction, and the budget of each stage."""
    pipeline: Any = strategy.pipeline
    measured = pipeline.planning.measured
    plan, layers = strategy.plan, measured.profile.layers
    budgets = []
    for stage, peak in enumerate(measured.prediction(plan).memory_bytes[0]):
        own = [layers[layer] for layer in plan.placement.layers_of(0, stage)]
        state, weights, gradients = (
            sum(getattr(layer, name) for layer in own)
            for name in ("optimizer_bytes", "waiting_bytes", "gradient_bytes")
        )
        saved = peak - sum(layer.static_bytes for layer in own)
        is_last = stage == NUM_STAGES - 1
        # The last stage holds one microbatch, which recomputing makes no smaller.
        given = replace(case, saved=1.0) if is_last else case
        others = sum(layer.static_bytes for layer in own) - state - weights
        assert gradients <= others
        budgets.append(given.budget(saved, state, weights, others))
    devices = tuple(
        replace(
            device,
            memory_bytes=int(budget),
            host_bytes=device.host_bytes if case.has_host else 0,
        )
        for device, budget in zip(measured.cluster.devices, budgets, strict=True)
    )
    settings = pipeline.settings
    settings = replace(
        settings,
        memory=replace(settings.memory, policy=case.policy),
        recompute=case.recompute,
        partition=[list(row) for row in plan.placement.counts],
    )
    cluster = replace(measured.cluster, devices=devices)
    made = make_plan(settings, measured.profile, cluster, pipeline.replicas.topology)
    return made.to_json(), budgets


def measure(name: str, cases: list[str], num_rounds: int, num_steps: int) -> Any:
    """Runs on every rank: what was timed, and each plan."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    model = MODELS[name]
    if model.is_slow:
        # A library has no use for it.
        vars(stage_memory)["copier_of"] = slow_copier_of
    module = model.make()
    strategy = PipeShiftStrategy(
        microbatches=model.microbatches, partition="uniform", profile_steps=8
    )
    # Sleeping takes as long on a busy machine.
    beside = None if model.is_slow else KEPT
    turns = UnderBudgets({case: CASES[case] for case in cases}, num_rounds, num_steps, beside)
    trainer = quiet_trainer(
        {"devices": NUM_STAGES, "strategy": strategy},
        max_epochs=-1,
        callbacks=[turns],
        plugins=[MemoryCompression(budget="1TB", host_budget="2GB")],
    )
    data = torch.utils.data.DataLoader(
        Repeated(model.sample()), batch_size=model.rows * model.microbatches
    )
    trainer.fit(module, data)
    return turns.found, {case: what_moves(turns._plans[case]) for case in cases}


def what_moves(plan: Plan) -> str:
    """What a plan does, in short."""
    swaps = [swap for row in plan.swaps for swap in row]
    parts = {
        "recomputed": len([layer for row in plan.recompute for layer in row]),
        "in part": len({swap.layer for swap in swaps if swap.stays}),
        "to the host": sum(len(s.tensors) for s in swaps if not s.stays and not s.stages),
        "to the other stage": sum(len(s.tensors) for s in swaps if s.stages),
        "state": sum(map(len, plan.optimizer_on_host)),
        "weights": sum(map(len, plan.weights_on_host)),
    }
    return ", ".join(f"{count} {what}" for what, count in parts.items() if count) or "nothing"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--num-runs", type=int, default=1, help="one after the other")
    parser.add_argument("--num-rounds", type=int, default=2)
    parser.add_argument("--num-steps", type=int, default=4)
    options = parser.parse_args()

    figures: dict[str, Any] = {}
    for name in [name for name in options.models for _ in range(options.num_runs)]:
        given = (options.cases, options.num_rounds, options.num_steps)
        found, moves = run_ranks(measure, NUM_STAGES, name, *given, timeout=1200)[0]
        rows, cases = [], {}
        kept = found.get(KEPT)
        for place, (case, timed) in enumerate(found.items()):
            error = interval(errors_of(timed))
            is_beside = kept and timed is not kept and not MODELS[name].is_slow
            of_kept = (
                interval(errors_of(timed, kept, place - 1, len(found) - 1)) if is_beside else error
            )
            rows.append(
                [
                    case,
                    moves[case],
                    f"{1000 * timed.predicted_seconds:.0f} ms",
                    f"{1000 * timed.median:.0f} ms",
                    shown(error, "+.1f"),
                    shown(of_kept, "+.1f"),
                ]
            )
            cases[case] = {"error_percent": error, "error_beside_kept_percent": of_kept}
            cases[case] |= {"moves": moves[case], "median_seconds": timed.median} | asdict(timed)
            del cases[case]["plan"]
        print_table(
            f"{name}: {NUM_STAGES} stages, {MODELS[name].microbatches} microbatches",
            [
                "plan",
                "layers and tensors",
                "predicted",
                "measured",
                "off by, %",
                f"beside {KEPT!r}, %",
            ],
            rows,
        )
        run: dict[str, Any] = {"num_cases": len(cases), "cases": cases}
        for kind in ("error", "error_beside_kept"):
            sizes = [abs(each[f"{kind}_percent"]["median"]) for each in cases.values()]
            run[kind] = {
                "largest_percent": max(sizes),
                "median_percent": median(sizes),
                "within_5_percent": sum(size <= 5 for size in sizes),
                "within_10_percent": sum(size <= 10 for size in sizes),
            }
            print(f"\n{kind}: {run[kind]} of {len(cases)}")
        figures.setdefault(name, []).append(run)
        save(options.json, figures)


def errors_of(
    timed: Timed, kept: Timed | None = None, place: int = 0, num_others: int = 1
) -> list[float]:
    """In percent of the measured time, in each turn; or of how many times as long it is as that of
    a plan in the turns just before and after, which says nothing of how busy the machine was then.

    Args:
        timed: the plan.
        kept: the other plan, which has a turn before each of the others.
        place: of the plan among these.
        num_others: how many these are.
    """
    assert timed.predicted_seconds is not None
    predicted, turns = timed.predicted_seconds, timed.turns
    if kept is not None and kept.predicted_seconds:
        predicted /= kept.predicted_seconds
        before, after = kept.turns[place::num_others], kept.turns[place + 1 :: num_others]
        around = [sum(pair) / len(pair) for pair in _pairs(before, after)]
        turns = ratios(turns, around)
    return [100 * (predicted / seconds - 1) for seconds in turns]


def _pairs(before: list[float], after: list[float]) -> Iterator[list[float]]:
    """Each turn and the one after the plan; the very last plan has none after it."""
    for one, other in zip_longest(before, after):
        yield [each for each in (one, other) if each is not None]


if __name__ == "__main__":
    main()
