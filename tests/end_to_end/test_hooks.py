"""What user code does with parameters in hooks, between steps: the same bits, numbers and files on
one, two and three stages.
"""

from __future__ import annotations

import copy
import gc
import os
import time
import weakref
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.testing.ranks import LIMIT_SECONDS, run_ranks
from tests.features_models import QUIET, built, plain
from tests.models import NUM_CLASSES, NUM_FEATURES, Classifier, points

WIDTH = 16


class Watched(Classifier):
    """Four layers with parameters. ``seen`` collects what code has read."""

    def __init__(self) -> None:
        super().__init__()
        linears = [nn.Linear(NUM_FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
        layers = [module for linear in linears for module in (linear, nn.ReLU())]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, NUM_CLASSES))
        self.seen: list[Any] = []

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.net(features)
        return scores


class LogsNorms(Watched):
    def on_train_epoch_end(self) -> None:
        self.log("norms", sum(p.norm() for p in self.parameters()))
        self.seen += [p.norm().item() for p in self.parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("first", self.net[0].weight.abs().mean())  # type: ignore[operator]
        self.seen.append(f"{self.net[2].weight.std():.4f}")  # type: ignore[operator]


class ReadsWhole(Watched):
    def on_train_epoch_end(self) -> None:
        self.seen += [p.detach().cpu().numpy().ravel()[:3].tolist() for p in self.parameters()]
        self.seen.append({name: x.cpu().sum().item() for name, x in self.state_dict().items()})
        self.seen.append(parameters_to_vector(self.parameters()).norm().item())


class Saves(Watched):
    def on_train_epoch_end(self) -> None:
        path = f"weights_{self.global_rank}.pt"
        torch.save({"all": self.state_dict(), "first": self.net[0].weight}, path)
        saved = torch.load(path, weights_only=True)
        assert isinstance(saved["first"], nn.Parameter)
        self.seen += [x.sum().item() for x in (*saved["all"].values(), saved["first"])]


class Writes(Watched):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.3, 0.3)
            last: Any = self.net[-1]
            last.bias.copy_(self.get_parameter("net.0.bias")[:NUM_CLASSES])
        for parameter in self.net[2].parameters():
            parameter.data.mul_(0.99)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            linear: Any = self.net[4]
            linear.reset_parameters()
            nn.init.zeros_(self.get_parameter("net.2.bias"))


class Prunes(Watched):
    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    half = parameter.abs().flatten().kthvalue(parameter.numel() // 2).values
                    parameter.mul_(parameter.abs() > half)


class Copies(Watched):
    """Copies a trained module, and calls the copy."""

    def on_train_epoch_end(self) -> None:
        copied = copy.deepcopy(self.net).eval()
        assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in copied.parameters())
        with torch.no_grad():
            self.seen.append(copied(torch.ones(2, NUM_FEATURES)).sum().item())
            self.seen.append(self.net(torch.ones(2, NUM_FEATURES)).sum().item())


class LeavesGarbage(Watched):
    """Which the first rank's Python collects, and the others' do not."""

    def on_fit_start(self) -> None:
        if self.global_rank:
            gc.disable()

    def on_train_end(self) -> None:
        gc.enable()

    def on_train_batch_end(self, *_: Any) -> None:
        copied: Any = copy.deepcopy(self.net)
        copied.itself = [copied]
        del copied
        if self.global_rank == 0:
            gc.collect()

    def on_train_epoch_end(self) -> None:
        others = weakref.WeakSet(self.net)
        copied: Any = copy.deepcopy(self.net)
        others.update((*copied, copy.deepcopy(self), copied[0]))
        forward = copy.deepcopy(copied[0]).forward
        double = copy.copy(copied[0])
        double.weight = nn.Parameter(2 * copied[0].weight.detach())
        x = torch.ones(1, NUM_FEATURES)
        with torch.no_grad():
            self.seen += [f(x).sum().item() for f in (copied[0], forward, double)]
        assert "forward" not in copied[0].__dict__
        assert "log" not in copy.deepcopy(self).__dict__
        del copied, forward, double
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(others) > len(self.net) and time.monotonic() < deadline:
            # A thread that looks at stacks may hold a frame for a moment.
            time.sleep(0.01)
        self.seen.append(len(others))


class Compares(Watched):
    """With the last batch's parameters, and the first ones."""

    last: list[Tensor] | None = None

    def on_fit_start(self) -> None:
        self.first = {name: p.detach().clone() for name, p in self.named_parameters()}

    def on_train_batch_end(self, *_: Any) -> None:
        now = [p.detach().clone() for p in self.parameters()]
        if self.last is not None:
            pairs = zip(now, self.last, strict=True)
            self.seen.append(sum((a - b).norm() for a, b in pairs).item())
        self.last = now
        for name, p in self.named_parameters():
            both = p.detach().flatten(), self.first[name].flatten()
            self.seen.append(F.cosine_similarity(*both, dim=0).item())


class KeepsTheBest(Watched):
    def on_train_epoch_end(self) -> None:
        self.best = {name: x.clone() for name, x in self.state_dict().items()}

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.load_state_dict(self.best)


class EvaluatesTheAverage(Watched):
    """Exchanges the weights with their average while it evaluates."""

    def on_fit_start(self) -> None:
        self.average = [p.detach().clone() for p in self.net.parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for average, p in zip(self.average, self.net.parameters(), strict=True):
                average.lerp_(p, 0.1)

    def exchange(self) -> None:
        for average, p in zip(self.average, self.net.parameters(), strict=True):
            before = p.data.clone()
            p.data.copy_(average)
            average.copy_(before)

    def on_validation_epoch_start(self) -> None:
        self.exchange()

    def on_validation_epoch_end(self) -> None:
        self.exchange()


class PullsToTheAverage(EvaluatesTheAverage):
    """A step uses what hooks write to."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pairs = zip(self.net.parameters(), self.average, strict=True)
        return super().training_step(batch, batch_idx) + sum(
            (p - x).square().sum() for p, x in pairs
        )


class AllAtOnce(EvaluatesTheAverage):
    def on_train_batch_end(self, *_: Any) -> None:
        torch._foreach_lerp_(self.average, [p.detach() for p in self.net.parameters()], 0.1)
        self.seen.append(torch.stack(torch._foreach_norm(self.average)).norm().item())


class ReadsGradients(Watched):
    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += [p.grad.norm().item() for p in self.parameters() if p.grad is not None]

    def on_before_zero_grad(self, *_: Any) -> None:
        self.seen.append([p.grad is None or p.grad.norm().item() for p in self.parameters()])


class ReadsOnOneRank(Watched):
    """All compute, and the first reads, which is the same on every split."""

    def on_train_batch_end(self, *_: Any) -> None:
        norm = self.get_parameter("net.6.weight").norm()
        if self.trainer.is_global_zero:
            Path("norm").write_text(f"{norm.item()}")

    def on_train_end(self) -> None:
        self.trainer.strategy.barrier()
        self.seen.append(Path("norm").read_text())


class KeepsMemory(Watched):
    """``x.data`` goes on to show what the optimizer has made of it."""

    kept: list[Tensor] | None = None

    def on_train_batch_end(self, *_: Any) -> None:
        if self.kept is None:
            self.kept = [p.data for p in self.parameters()]
        first, last = self.kept[0], self.kept[-2]
        self.seen.append(((first.sum() * last).sum() + (last.sum() * first).sum()).item())


class KeepsMemoryInSteps(Watched):
    kept: list[Tensor] | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, last = self.get_parameter("net.0.weight"), self.get_parameter("net.6.weight")
        if self.kept is None:
            self.kept = [first.data, last.detach()]
        a, b = self.kept
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * (a.mean() * last.sum() + b.mean() * first.sum())


class Freezes(Watched):
    def on_train_epoch_start(self) -> None:
        for p in self.net[0].parameters():
            p.requires_grad_(self.current_epoch % 2 == 0)


class Normalises(Watched):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for p in self.parameters():
                assert torch.isfinite(p).all()
                if p.dim() > 1:
                    p.div_(torch.linalg.matrix_norm(p, 2).clamp(min=1))


class Normed(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = linear, nn.BatchNorm1d(WIDTH)

    def forward(self, features: Tensor) -> Tensor:
        found: Tensor = self.norm(self.linear(features))
        return found


class ReplacesBuffers(Watched):
    """Gives layers other tensors for buffers that they write to, and keeps the former ones."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*map(Normed, (self.net[0], self.net[2], self.net[4])), self.net[6])
        self.former: list[Tensor] = []

    @property
    def norms(self) -> list[nn.BatchNorm1d]:
        return [x for x in self.modules() if isinstance(x, nn.BatchNorm1d)]

    def on_train_epoch_start(self) -> None:
        self.former = [norm.running_mean for norm in self.norms if norm.running_mean is not None]
        for at, norm in enumerate(self.norms):
            mean: Any = norm.running_mean
            norm.running_mean = torch.zeros_like(mean) if at < 2 else mean * 0.5

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += [norm.running_mean.sum().item() for norm in self.norms]  # type: ignore[union-attr]


class WritesThroughAView(Watched):
    """Of a parameter that two stages have."""

    view: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        first: Any = self.net[2]
        second: Any = self.net[4]
        second.weight = first.weight

    def on_train_batch_end(self, *_: Any) -> None:
        if self.view is None:
            self.view = self.get_parameter("net.2.weight").data
        else:
            self.view.clamp_(-0.1, 0.1)

    def on_before_optimizer_step(self, *_: Any) -> None:
        for p in self.net.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5)
        # A hook in a hook.
        self.on_train_epoch_start()


class FlatMemory(Watched):
    """All parameters in one tensor, with its parts."""

    def on_fit_start(self) -> None:
        sizes = [p.numel() for p in self.parameters()]
        self.flat = torch.zeros(sum(sizes))
        self.parts = [part.detach() for part in self.flat.split(sizes)]
        self.parts = [x.detach() for x in self.parts]

    def on_train_batch_end(self, *_: Any) -> None:
        self.flat.copy_(parameters_to_vector(self.parameters()).detach())

    def on_train_end(self) -> None:
        self.seen += [part.sum().item() for part in self.parts]


class Draws(Watched):
    """By values, and as many numbers as these say."""

    def on_train_batch_end(self, *_: Any) -> None:
        for name in ("net.0.weight", "net.6.weight"):
            weight = self.get_parameter(name).detach()
            self.seen.append(torch.bernoulli(weight.sigmoid()).sum().item())
            self.seen.append(torch.normal(weight, weight.abs()).sum().item())
            self.seen.append(torch.multinomial(weight.abs().flatten(), 3).tolist())
            self.seen.append(torch.poisson(weight.abs() * 20).sum().item())
            self.seen.append(F.dropout(weight).sum().item())
        self.seen.append(torch.rand(1).item())


class KeepsTheBestModule(Watched):
    """A copy that becomes a part of the module while it trains."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.best = copy.deepcopy(self.net)
        self.seen += [p.norm().item() for p in self.best.parameters()]


class KeepsAnAverageAsParameters(WritesThroughAView):
    """That the module gets while it trains, of layers with a parameter in common."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 1:
            copies = [nn.Parameter(p.detach().clone()) for p in self.parameters()]
            self.average = nn.ParameterList(copies)
        else:
            for average, p in zip(self.average, self.net.parameters(), strict=True):
                average.data.lerp_(p.data, 0.1)


class LogsAParameter(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features) * self.scale

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("scale", self.scale, on_epoch=True)


HABITS = [
    LogsNorms,
    ReadsWhole,
    Saves,
    Writes,
    Prunes,
    Copies,
    LeavesGarbage,
    Compares,
    KeepsTheBest,
    EvaluatesTheAverage,
    PullsToTheAverage,
    AllAtOnce,
    ReadsGradients,
    ReadsOnOneRank,
    KeepsMemory,
    KeepsMemoryInSteps,
    Freezes,
    Normalises,
    ReplacesBuffers,
    WritesThroughAView,
    FlatMemory,
    Draws,
    KeepsTheBestModule,
    KeepsAnAverageAsParameters,
    LogsAParameter,
]


class Moves(L.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        counts = {1: (1, 3), 4: (3, 1), 6: (0, 4)}.get(trainer.global_step)
        if counts is not None:
            plan = trainer.strategy.plan
            trainer.strategy.adopt(plan.with_placement(Placement((counts,))))


def fit_all(schedule: str = "1f1b", moves: bool = False) -> list[dict[str, Any]]:
    """Trains one after the other, as a rank of a job."""
    found = []
    how: dict[str, Any] = {**QUIET, "num_sanity_val_steps": 0}
    for habit in HABITS:
        L.seed_everything(3, verbose=False)
        module = built(habit)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            strategy=PipeShiftStrategy(microbatches=2, partition="uniform", schedule=schedule),
            max_epochs=3,
            callbacks=[Moves()] if moves else [],
            **how,
        )
        trainer.fit(module, points(3), points(2, seed=3))
        logged = plain(dict(trainer.callback_metrics))
        state = plain(dict(module.state_dict()))
        found.append({"state": state, "seen": repr(module.seen), "logged": logged})
    return found


def require_same(ranks: list[Any], expected: list[Any]) -> None:
    for rank, found in enumerate(ranks):
        for habit, mine, theirs in zip(HABITS, found, expected, strict=True):
            where = f"{habit.__name__}, rank {rank}"
            assert mine["seen"] == theirs["seen"], where
            for kind in ("state", "logged"):
                assert mine[kind].keys() == theirs[kind].keys(), where
                different = [
                    n for n, x in mine[kind].items() if not torch.equal(x, theirs[kind][n])
                ]
                assert not different, f"{where}: {kind} differ in {different}"


@pytest.mark.feature("Callbacks", "parameters and gradients in hooks, read and written")
def test_hooks_see_the_parameters_of_all_stages() -> None:
    (expected,) = run_ranks(fit_all, 1)
    for stages in (2, 3):
        require_same(run_ranks(fit_all, stages), expected)
    require_same(run_ranks(fit_all, 2, moves=True), expected)


class CopiesItself(Watched):
    """A copy's hooks are its own."""

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.current_epoch)

    def on_train_end(self) -> None:
        copied = copy.deepcopy(self)
        copied.on_train_epoch_end()
        assert len(copied.seen) == len(self.seen) + 1


class KeepsAnArray(Watched):
    """NumPy has the memory of a tensor that becomes a value."""

    def on_train_batch_end(self, *_: Any) -> None:
        kept = torch.zeros(NUM_CLASSES)
        self.array = kept.numpy()
        kept.copy_(self.get_parameter("net.6.bias").detach())


def fit_one(habit: type[Watched]) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=PipeShiftStrategy(microbatches=2, partition="uniform"),
        max_epochs=1,
        **cast("dict[str, Any]", QUIET),
    )
    trainer.fit(built(habit), points(2))


@pytest.mark.parametrize("stages", [1, 2])
def test_a_copy_of_the_module_has_its_own_hooks(stages: int) -> None:
    run_ranks(fit_one, stages, CopiesItself)


def test_a_tensor_whose_memory_an_array_has_becomes_no_value() -> None:
    outcomes = run_ranks(fit_one, 2, KeepsAnArray, expect_failure=True)
    assert any("whose memory other tensors or arrays share" in o.message for o in outcomes)
