"""Models as other people write them: the same bits on one, two and three stages.

Each has a habit that the sweep over timm, torchvision and transformers (``benchmarks/zoo.py``) or a
reader of other people's code found to go wrong once. All are trained in the same few processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, cast

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from lightning_pipeshift.errors import LayerError, StageFailedError
from lightning_pipeshift.testing.ranks import run_ranks
from tests.end_to_end.test_transparency import Pipelined, Trained, assert_same_bits, fit
from tests.features_models import quiet_trainer
from tests.models import NUM_CLASSES, NUM_FEATURES, Classifier, points

WIDTH = 8


class Habit(Classifier):
    """Four layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.third(self.second(self.first(x))))


class WritesAParameter(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.halved = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.halved.mul_(0.5)
        return super().forward(x) * self.halved.sum()


class WritesAParameterBehind(WritesAParameter):
    """Only the last stage comes there."""

    def forward(self, x: Tensor) -> Tensor:
        result = Habit.forward(self, x)
        with torch.no_grad():
            self.halved.add_(0.25)
        return result


class LooksAtAParameter(Habit):
    """Computes with a parameter that learns, without a gradient, between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x))
        with torch.no_grad():
            largest = self.scale.abs().max()
        hidden = hidden * self.scale / largest
        return self.last(self.third(hidden).relu() * hidden)


class MomentumAtTheHead(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for slow, fast in zip(self.slow.parameters(), self.second.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        hidden = self.second(self.first(x))
        return self.last(self.third(hidden) + self.slow(hidden).detach())


class NormWithoutParameters(Habit):
    """As SimSiam, BYOL and DINO end their heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.third(self.norm(self.second(self.first(x)))))


class RunningBuffer(Habit):
    """Keeps an average of what is in the middle of the network."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x))
        with torch.no_grad():
            self.running.mul_(0.9).add_(0.1 * hidden.mean(0))
        return self.last(self.third(hidden))


class FunctionalNorm(Habit):
    """Its running statistics are written by a kernel whose schema does not say so."""

    mean: Tensor
    var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x))
        hidden = F.batch_norm(hidden, self.mean, self.var, training=self.training)
        return self.last(self.third(hidden))


class DropsLayers(Habit):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.first(x), 0.1, self.training)
        for layer in (self.second, self.third):
            probability = torch.rand([])
            if self.training and probability < 0.4:
                continue
            hidden = layer(hidden).relu()
        return self.last(hidden)


class DropsLayersByPython(Habit):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for layer in (self.second, self.third):
            if not self.training or random.random() > 0.4:
                hidden = hidden + layer(hidden)
        return self.last(hidden)


class ChecksValues(Habit):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        assert torch.isfinite(hidden).all()
        mean = F.dropout(self.second(hidden), 0.2, self.training)
        scale = self.third(hidden).exp()
        if (scale <= 0).any():
            raise ValueError("no scale")
        drawn = torch.distributions.Normal(mean, scale).rsample()
        return self.last(drawn)


class NeedsRealValues(Habit):
    class Routes(nn.Module):
        """Its work depends on values, as a mixture of experts' does."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            chosen = x.detach().numpy().argmax(1) % 2
            rows = [self.experts[int(i)](row) for i, row in zip(chosen, x, strict=True)]
            return torch.stack(rows)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Routes(), self.Routes()])
        del self.second, self.third

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks[1](self.blocks[0](self.first(x))))


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -0.3 * gradients[0]


class CustomFunctions(Habit):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        turned = _Reverse.apply(hidden)
        return self.last(self.third(self.second(hidden) + turned) * turned)


class Reentrant(Habit):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for layer in (self.second, self.third):
            hidden = checkpoint(layer, hidden, use_reentrant=True).relu()
        return self.last(hidden)


class _Result:
    def __init__(self, hidden: Tensor, name: str) -> None:
        self.hidden = hidden
        self.name = name


class ReturnsAnObject(Habit):
    class Wraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> _Result:
            return _Result(self.linear(x), "wrapped")

    def __init__(self) -> None:
        super().__init__()
        self.second = self.Wraps()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        result: Any = self.second(self.first(x))
        assert result.name == "wrapped"
        return self.last(self.third(result.hidden))


class IgnoresOne(nn.Linear):
    """Uses the first of its arguments only."""

    def forward(self, x: Tensor, unused: Tensor | None = None) -> Tensor:
        return super().forward(x)


class PassesWhatIsNotUsed(Habit):
    """As models of transformers do that hand all arguments on: here it is another stage's."""

    def __init__(self) -> None:
        super().__init__()
        self.second = IgnoresOne(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(self.second(hidden, self.third(hidden)))


class AppendsToAList(nn.Module):
    """Returns the list that it was given, with one more tensor: torchvision's feature pyramids."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        features.append(self.linear(features[-1]))
        return features


class CollectsFeatures(Habit):
    """A layer returns values that it does not use, here another stage's."""

    def __init__(self) -> None:
        super().__init__()
        self.second: Any = AppendsToAList()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(sum(self.second([hidden, self.third(hidden)]), torch.zeros(())))


class NumbersByTorch(Habit):
    """Torch itself reads a number where it expects one, and asks no class of tensors."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x))
        count = (hidden.detach().mean() > 0).long() + 2
        places = torch.arange(count, dtype=x.dtype) + torch.full((), hidden.detach().sum())
        return self.last(self.third(hidden)) + 0.01 * places.mean()


class CallsOneLayerAgain(Habit):
    """As ALBERT does, with dropout in it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))
        self.configure_layers = lambda: [self.first, self.shared, self.last]
        del self.second, self.third

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(3):
            hidden = self.shared(hidden).tanh()
        return self.last(hidden)


class TwoViews(Habit):
    """Calls all layers for one view of the batch, and then again for another, as SimSiam does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def embed(self, x: Tensor) -> Tensor:
        view = self.first(x + 0.1 * torch.randn_like(x))
        return self.third(self.norm(F.dropout(self.second(view), 0.1, self.training)).relu())

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.embed(x), self.embed(x)
        return self.last(one) * other.detach().mean() + self.last(other) * one.detach().mean()


class FewLayers(Classifier):
    """Opened further on three stages than on one."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(NUM_FEATURES, WIDTH)
            self.two = nn.Linear(WIDTH, WIDTH)
            self.three = nn.Linear(WIDTH, NUM_CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            hidden = F.dropout(self.one(x), 0.2, self.training)
            hidden = hidden + F.dropout(self.two(hidden), 0.2, self.training)
            return self.three(hidden)

    def __init__(self) -> None:
        super().__init__()
        self.net = self.Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(F.dropout(x, 0.1, self.training))


class TiesFewLayers(FewLayers):
    """The two that are tied are parts of one layer on one stage."""

    class Net(FewLayers.Net):
        def __init__(self) -> None:
            super().__init__()
            self.again = nn.Linear(WIDTH, WIDTH)
            self.again.weight = self.two.weight

        def forward(self, x: Tensor) -> Tensor:
            hidden = F.dropout(self.one(x), 0.2, self.training)
            hidden = hidden + self.two(hidden).tanh()
            hidden = hidden + self.again(hidden).tanh()
            return self.three(hidden)


class DropoutOnBothSides(Habit):
    """Random numbers are drawn with values that are needed on both sides of every cut."""

    def forward(self, x: Tensor) -> Tensor:
        memory = F.dropout(self.first(x), 0.3, self.training) * 1.1
        hidden = self.second(memory) + memory
        return self.last(self.third(hidden) * memory.sigmoid() + memory[:, :1].expand(-1, WIDTH))


class WritesToViews(Habit):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        part = hidden[:, :3]
        middle = self.second(hidden * 1.0)
        part += middle[:, :3]
        return self.last(self.third(hidden) + hidden)


class ScaledParameters(Habit):
    """A value computed from a parameter before the layers is used after several of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.exp() / 3
        hidden = self.second(self.first(x) * scale) * scale
        return self.last(self.third(hidden) * scale)


class CollectsStates(Habit):
    """Results of all layers so far are put together, beginning with what is made where the code may
    take another way.
    """

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        states = hidden.new_zeros(*hidden.shape[:-1], 0, WIDTH)
        if not torch.isfinite(x).all():
            states = hidden.unsqueeze(-2)
        states = states * 2
        for layer in (self.second, self.third):
            new = layer(hidden + states.sum(-2))
            states = torch.cat([states.to(hidden.device), hidden.unsqueeze(-2)], dim=-2)
            hidden = new
        return self.last(states.mean(-2) + hidden)


class Expert(nn.Module):
    """Scales its input by what a router says, and keeps how much in an attribute."""

    balance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router, self.inner = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        self.balance = share.mean(0).square().sum()
        return self.inner(x) * share[:, :1]


class Experts(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.second, self.third = Expert(), Expert()  # type: ignore[assignment]

    def blocks(self) -> list[Expert]:
        return [self.second, self.third]  # type: ignore[list-item]


class SumsAttributesOfLayers(Experts):
    """As mixtures of experts keep their auxiliary losses."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result * (1 + sum(block.balance for block in self.blocks()))


class LooksAtAttributesOfLayers(Experts):
    """One in a later layer, one as a number, one in the log."""

    def forward(self, x: Tensor) -> Tensor:
        second, third = self.blocks()
        hidden = third(second(self.first(x)) + second.balance)
        return self.last(hidden) * (1 + float(third.balance))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("balance", self.blocks()[1].balance)
        return loss


class CollectsByHooks(Experts):
    """As `transformers` collects router logits: by hooks on parts of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[Tensor] = []
        for block in self.blocks():
            block.router.register_forward_hook(self.collect)

    def collect(self, _: nn.Module, args: Any, output: Tensor) -> None:
        self.collected.append(output * args[0].mean())

    def forward(self, x: Tensor) -> Tensor:
        self.collected.clear()
        result = super().forward(x)
        return result + torch.stack(self.collected).logsumexp(-1).mean()


class ChangesByHooks(CollectsByHooks):
    """One of its hooks changes what the part returns, so it cannot wait for the layer's end."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks():
            block.inner.register_forward_hook(lambda _, args, output: output.tanh())


class CallsInTurn(Habit):
    """Two layers work on each other's results several times, as refinement steps do: they stay on
    one stage, whatever is asked of an even cut.
    """

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(3):
            hidden = hidden + self.third(self.second(hidden).relu()) * 0.5
        return self.last(hidden)


class WritesWhereItMayTurn(Habit):
    """A running mean is kept, and used, where the code may take another way."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.mean() > 100:
            hidden = hidden * 2
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean(0) * 0.1)
            recent = torch.zeros(2, WIDTH)
            recent[1] = hidden[0]
        hidden = self.third(self.second(hidden)) - self.mean
        return self.last(hidden * self.mean.norm() + recent.sum(0))


class AsksWhatLearns(Habit):
    """The use of a result depends on whether it requires a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        results = [x]
        for layer in (self.first, self.second, self.third):
            results += [layer(results[-1] * 2), results[-1].detach()]
            results[-2:] = reversed(results[-2:])
        learning = [value.square().mean() for value in results if value.requires_grad]
        leaves = sum(value.is_leaf for value in results)
        made = sum(value.grad_fn is not None for value in results)
        return self.last(results[-1]) + torch.stack(learning).sum() * leaves + made


class ChannelsLast(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.start = nn.Linear(NUM_FEATURES, 4 * 36)
        self.norm = nn.LayerNorm(4)
        self.last = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.start(x).view(-1, 4, 6, 6).contiguous(memory_format=torch.channels_last)
        for conv in self.convs:
            hidden = hidden + conv(hidden).relu()
        hidden = self.norm(hidden.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.last(hidden.mean((2, 3)))


class CopiesForLayout(ChannelsLast):
    """Asks for another layout, which the meta device takes for the one that there is; so it does
    not know that the one tensor is a copy of the other.
    """

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.start(x).view(-1, 4, 6, 6).contiguous(memory_format=torch.channels_last)
        first = self.convs[0](hidden)
        copied = first.contiguous()
        copied.mul_(0.5)
        second = self.convs[1](copied.to(memory_format=torch.channels_last))
        return self.last((self.convs[2](second + first) + copied).mean((2, 3)))


def times(factor: float, gradients: Any) -> Any:
    (gradient,) = gradients
    return (factor * gradient,)


class HasHooksOnBackwards(Habit):
    """Hooks on the backward of layers change gradients; others change what layers get and give."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_full_backward_pre_hook(lambda _, given: times(2, given))
        self.second.register_full_backward_hook(lambda _, made, given: times(0.5, made))
        self.second.register_forward_hook(lambda _, args, output: 1.5 * output)
        self.third.register_full_backward_hook(lambda _, made, given: times(3, made))
        self.third.register_forward_pre_hook(lambda _, args: (args[0] + 0.1,))


class MakesWeightsByHooks(Habit):
    """The older norms of weights, and pruning."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.spectral_norm(self.first)
        nn.utils.weight_norm(self.second)
        prune.l1_unstructured(self.third, "weight", 0.4)
        nn.utils.parametrizations.spectral_norm(self.last)


class EvaluatesInAStep(Habit):
    """Looks at what the model would answer, at the end of a step."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", "second", "third"):
            setattr(self, name, nn.Sequential(getattr(self, name), nn.Dropout(0.3)))

    def evaluated(self) -> Iterable[nn.Module]:
        return [self]

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if not self.training:
            return result
        for module in self.evaluated():
            module.eval()
        with torch.no_grad():
            without_dropout = super().forward(x)
        for module in self.evaluated():
            module.train()
        return result + 0.1 * without_dropout


class EvaluatesPartsInAStep(EvaluatesInAStep):
    def evaluated(self) -> Iterable[nn.Module]:
        return [self.first, self.second, self.third]


class FreezesItsPart(nn.Module):
    """On one stage only: the others do not run it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.one.bias.requires_grad_(False)
        self.one.weight.requires_grad_(self.training)
        return cast(Tensor, self.two(self.one(x).tanh()))


class SwitchesWhatLearns(Habit):
    """Stages waited for each other, as the flags of their parameters differed."""

    def __init__(self) -> None:
        super().__init__()
        self.second = FreezesItsPart()  # type: ignore[assignment]

    def configure_layers(self) -> list[nn.Module]:
        return [self.first, self.second, self.third, self.last]


class RegistersAHookLate(Habit):
    """While training runs: what ran on fake tensors before is not what runs now."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.third.register_full_backward_hook(lambda _, made, given: times(0.5, made))


class PassesAPackedSequence(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(NUM_FEATURES // 2, WIDTH, batch_first=True)
        self.second = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.last = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(len(x)) % 2 + 1
        packed = nn.utils.rnn.pack_padded_sequence(
            x.view(len(x), 2, -1), lengths, batch_first=True, enforce_sorted=False
        )
        _, (state, _) = self.second(self.first(packed)[0])
        result: Tensor = self.last(state[-1])
        return result


class ReplacesParameters(Habit):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for layer in (self.second, self.third):
            doubled = {name: 2 * value for name, value in layer.named_parameters()}
            hidden = torch.func.functional_call(layer, doubled, (hidden,))
        result: Tensor = self.last(hidden)
        return result


HABITS: dict[str, Callable[[], Classifier]] = {
    habit.__name__: habit
    for habit in (
        HasHooksOnBackwards,
        MakesWeightsByHooks,
        WritesAParameter,
        WritesAParameterBehind,
        LooksAtAParameter,
        MomentumAtTheHead,
        NormWithoutParameters,
        RunningBuffer,
        FunctionalNorm,
        DropsLayers,
        DropsLayersByPython,
        ChecksValues,
        NeedsRealValues,
        CustomFunctions,
        Reentrant,
        ReturnsAnObject,
        PassesWhatIsNotUsed,
        CollectsFeatures,
        NumbersByTorch,
        CallsOneLayerAgain,
        TwoViews,
        FewLayers,
        TiesFewLayers,
        DropoutOnBothSides,
        WritesToViews,
        ScaledParameters,
        AsksWhatLearns,
        CollectsStates,
        SumsAttributesOfLayers,
        LooksAtAttributesOfLayers,
        CollectsByHooks,
        ReplacesParameters,
        EvaluatesInAStep,
        EvaluatesPartsInAStep,
        ChangesByHooks,
        CallsInTurn,
        WritesWhereItMayTurn,
        ChannelsLast,
        CopiesForLayout,
        SwitchesWhatLearns,
        RegistersAHookLate,
        PassesAPackedSequence,
    )
}


def build(name: str) -> Classifier:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return HABITS[name]()


def train_all(num_stages: int, names: list[str]) -> dict[str, list[Trained | str]]:
    found: dict[str, list[Trained | str]] = {}
    for name in names:
        found[name] = []
        for how in ways(name, num_stages):
            try:
                found[name].append(fit(build(name), points(3), how))
            except LayerError as error:
                found[name].append(str(error))
    return found


def ways(name: str, num_stages: int) -> list[Pipelined]:
    # Without a split the first microbatches are measured.
    if num_stages == 1 or name in ("PassesWhatIsNotUsed", "CollectsFeatures"):
        return [Pipelined()]
    if num_stages == 2:
        return [Pipelined("uniform"), Pipelined("uniform", "gpipe")]
    if name == "MomentumAtTheHead":
        # The outer stages have no layers, and step the averages as the others do.
        return [Pipelined([0, 5, 0])]
    return [Pipelined("uniform")]


def test_models_as_others_write_them_train_the_same_on_any_number_of_stages() -> None:
    names = list(HABITS)
    (alone,) = run_ranks(train_all, 1, 1, names, timeout=300.0)
    wrong = []
    for num_stages in (2, 3):
        for of_rank in run_ranks(train_all, num_stages, num_stages, names, timeout=300.0):
            for name in names:
                (expected,) = alone[name]
                for how, found in zip(ways(name, num_stages), of_rank[name], strict=True):
                    what = f"{name} on {num_stages} stages, {how.schedule}"
                    if isinstance(found, str) or isinstance(expected, str):
                        wrong.append(f"{what}: {found if isinstance(found, str) else expected}")
                        continue
                    try:
                        has_order = len(expected.layers) > 1
                        # What reads values does not show its order before the first step.
                        has_order &= name != "NeedsRealValues"
                        layers = expected.layers if has_order else found.layers
                        assert_same_bits(
                            found._replace(optimizer_state={}),
                            expected._replace(layers=layers),
                            what,
                        )
                    except AssertionError as error:
                        wrong.append(str(error).splitlines()[0])
    assert not wrong, "\n".join(sorted(set(wrong)))


# --- what following leaves behind, and how often the step runs ---

STEPS = 0
"""How many steps have run, as a user's script may count them."""


class Counter:
    def __init__(self) -> None:
        self.count = 0
        self.seen: list[Any] = []


class LeavesTraces(Habit):
    losses: list[float] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        global STEPS
        STEPS += 1
        self.counter.count += 1
        loss = super().training_step(batch, batch_idx)
        self.losses.append(1.0)
        return loss


def count_traces(devices: int) -> tuple[int, int, list[float]]:
    LeavesTraces.losses = []
    module = LeavesTraces()
    before = STEPS
    trainer = quiet_trainer(
        {"pipeshift": {"partition": "uniform", "microbatches": 2}, "devices": devices},
        max_steps=3,
    )
    trainer.fit(module, points(3))
    return STEPS - before, module.counter.count, LeavesTraces.losses


def test_the_code_of_a_step_runs_once_for_each_microbatch_on_every_stage() -> None:
    for number in (1, 2):
        assert run_ranks(count_traces, number, number) == [(6, 6, [1.0] * 6)] * number


# --- steps that call few layers or none ---


class Sparing(Habit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            return None
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("samples", float(len(batch[0])))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[0].sum()


def spare(devices: int) -> tuple[dict[str, Tensor], float, list[float]]:
    torch.manual_seed(3)
    module = Sparing()
    trainer = quiet_trainer(
        {"pipeshift": {"partition": "uniform", "microbatches": 2}, "devices": devices},
        max_epochs=1,
    )
    trainer.fit(module, points(3), points(3))
    logged = float(trainer.callback_metrics["samples"])
    state = {name: value.clone() for name, value in module.state_dict().items()}
    sums: Any = trainer.predict(module, points(3))
    return state, logged, [float(value) for value in sums]


def test_steps_that_call_no_layer() -> None:
    (expected,) = run_ranks(spare, 1, 1)
    for found in run_ranks(spare, 2, 2):
        assert found[1:] == expected[1:]
        assert all(torch.equal(found[0][name], value) for name, value in expected[0].items())


def test_lightning_module_is_what_is_trained() -> None:
    assert all(isinstance(build(name), L.LightningModule) for name in HABITS)


class HasHookOnContainer(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Sequential(self.second, self.third)
        self.pair.register_full_backward_hook(lambda _, made, given: times(0.5, made))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.pair(self.first(x)))
        return result


def error_of(make: Callable[[], Any]) -> str:
    # A stage that fails first is named by the others, with its error.
    with pytest.raises((LayerError, StageFailedError)) as caught:
        fit(make(), points(2), Pipelined("uniform"))
    return str(caught.value)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (HasHookOnContainer, "Register the hook on its layers"),
]


@pytest.mark.parametrize(("make", "advice"), REFUSED)
def test_what_does_not_work_is_an_error_with_advice(make: Callable[[], Any], advice: str) -> None:
    assert all(advice in message for message in run_ranks(error_of, 2, make))
