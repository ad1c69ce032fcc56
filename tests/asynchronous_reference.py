"""What an asynchronous pipeline has to train, in plain PyTorch: one process, no pipeline.

The whole model runs one minibatch after another. Each layer uses the version of its weights that
its stage would use, by the staleness of PipeDream (SOSP 2019) and of PipeDream-2BW (ICML 2021). A
stage by stage run gives the same bits: what a minibatch's gradient depends on are the weights that
it used, and what an update depends on are its gradients.

In call ``k`` stage ``s`` of ``N`` runs the forward of minibatch ``k``, and then the backward of
minibatch ``k - (N - 1 - s)``, which ends with an update. So the last minibatch whose backward comes
before the forward of ``k`` is ``k - N + s``.
"""

from __future__ import annotations

import copy
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

Gradients = dict[nn.Parameter, Tensor]


class Trained(NamedTuple):
    """The result of a training run."""

    layers: list[nn.Module]
    """With their last weights."""
    optimizers: list[torch.optim.Optimizer]
    """One for each layer that has trained parameters, in their order."""
    losses: list[Tensor]
    """Of each minibatch (and virtual machine), not divided by the number of accumulated ones."""


Split = Sequence[int]
"""The number of layers of each stage."""


def train(
    model_layers: Sequence[nn.Module],
    split: Split | Sequence[Split],
    minibatches: Sequence[Any],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    loss: Callable[[Any, Any], Tensor],
    schedule: str = "async",
    num_accumulated: int = 1,
    drains: Iterable[int] = (),
    moves: Sequence[tuple[int, Any]] = (),
    lr_of: Callable[[int], float] | None = None,
    epochs: Iterable[int] = (),
) -> Trained:
    """Trains copies of the layers, and returns them.

    Args:
        model_layers: called one after another. A parameter that several of them share has the
            versions of that one whose weights are oldest, and its gradients are added up from the
            last layer to the first.
        split: of the pipeline, or of each virtual machine's.
        minibatches: inputs and targets; with several virtual machines, those of each.
        make_optimizer: of a layer's trained parameters; of shared ones, the first layer's.
        loss: of the last layer's output and the targets.
        schedule: ``"async"`` or ``"async-2bw"``.
        num_accumulated: the number of minibatches whose gradients are summed for an update. The
            loss of each is divided by it.
        drains: the minibatches before which the pipeline is drained (for a validation or a
            checkpoint).
        moves: minibatches in ascending order, and the split that is in force from each on.
        lr_of: the learning rate that is in force when a minibatch's forward begins on the first
            stage. An update has that of its last minibatch. ``None``: the optimizers' own.
        epochs: the first minibatches of the epochs after the first. The pipeline is drained before
            them, the update before them has the minibatches that are left, and ``"async-2bw"``
            begins again with one version of the weights.
    """
    layers, epochs = copy.deepcopy(list(model_layers)), list(epochs)
    ends = _ends_of_groups(num_accumulated, sorted({0, *epochs, len(minibatches)}))
    emptied = sorted({0, *drains, *epochs})
    num_machines = len(split) if isinstance(split[0], Sequence) else 1
    splits = [(0, split), *moves]
    trained = [{n: p for n, p in layer.named_parameters() if p.requires_grad} for layer in layers]
    first_of: dict[nn.Parameter, int] = {}
    for number, weights in enumerate(trained):
        for parameter in weights.values():
            first_of.setdefault(parameter, number)
    owned = [[p for p, first in first_of.items() if first == n] for n in range(len(layers))]
    optimizers = [make_optimizer(parameters) for parameters in owned if parameters]
    versions = {parameter: [parameter.detach().clone()] for parameter in first_of}

    def version_of(layer: int, minibatch: int, machine: int) -> int:
        if schedule == "async-2bw":
            # Each epoch begins with the newest weights.
            begin = max(first for first in (0, *epochs) if first <= minibatch)
            return max(bisect_left(ends, begin), bisect_left(ends, minibatch) - 1)
        own: list[tuple[int, Split]] = [
            (begin, one[machine] if isinstance(one[0], Sequence) else one) for begin, one in splits
        ]
        places = [(begin, _owners(one)[layer]) for begin, one in own]
        first = emptied[bisect_right(emptied, minibatch) - 1]
        return bisect_right(ends, _newest(minibatch, places, len(own[0][1]), first))

    def run(minibatch: int, machine: int, value: Any, target: Any) -> tuple[Tensor, Gradients]:
        """The loss, and its gradients."""
        used: dict[nn.Parameter, int] = {}
        for number, weights in enumerate(trained):
            version = version_of(number, minibatch, machine)
            for parameter in weights.values():
                used[parameter] = min(version, used.get(parameter, version))
        leaves: list[tuple[nn.Parameter, Tensor]] = []
        for layer, weights in zip(layers, trained, strict=True):
            own: dict[str, Tensor] = {
                name: versions[p][used[p]].clone().requires_grad_() for name, p in weights.items()
            }
            leaves += zip(weights.values(), own.values(), strict=True)
            value = functional_call(layer, own, (value,), tie_weights=False)
        found = loss(value, target)
        gradients = torch.autograd.grad(
            found / num_accumulated, [leaf for _, leaf in leaves], allow_unused=True
        )
        sums: Gradients = {}
        for (parameter, _), gradient in reversed(list(zip(leaves, gradients, strict=True))):
            _add(sums, parameter, gradient)
        return found.detach(), sums

    losses = []
    accumulated: list[Gradients] = [{} for _ in range(num_machines)]
    for minibatch, given in enumerate(minibatches):
        for machine, (value, target) in enumerate(given if num_machines > 1 else [given]):
            found, gradients = run(minibatch, machine, value, target)
            losses.append(found)
            for parameter, gradient in gradients.items():
                _add(accumulated[machine], parameter, gradient)
        if minibatch in ends:
            total: Gradients = {}
            for parameter, gradient in [pair for one in accumulated for pair in one.items()]:
                _add(total, parameter, gradient)
            for parameter, gradient in total.items():
                parameter.grad = gradient / num_machines
            for one in accumulated:
                one.clear()
            for optimizer in optimizers:
                if lr_of is not None:
                    for group in optimizer.param_groups:
                        group["lr"] = lr_of(minibatch)
                optimizer.step()
                optimizer.zero_grad()
            for parameter, made in versions.items():
                made.append(parameter.detach().clone())
    return Trained(layers, optimizers, losses)


def _add(sums: Gradients, parameter: nn.Parameter, gradient: Tensor | None) -> None:
    if gradient is not None:
        sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient


def _newest(minibatch: int, places: Sequence[tuple[int, int]], num_stages: int, first: int) -> int:
    """The last minibatch whose update is in the weights that a layer uses for another one.

    A layer that has moved has its new owner's staleness at once, if that is larger. If it is
    smaller, the new owner has to wait for the old owner's last update: until that is there, it uses
    what the old owner would have used.

    Args:
        minibatch: the one whose forward uses the weights.
        places: from which minibatch on the layer is on which stage.
        num_stages: of the pipeline.
        first: the first minibatch since the pipeline was empty; all before it have been updated.
    """
    (_, stage), *later = places
    newest = max(first - 1, minibatch - num_stages + stage)
    for begin, stage in later:
        target = max(first - 1, minibatch - num_stages + stage)
        if begin <= minibatch and newest >= min(begin - 1, target):
            newest = target
    return newest


def _ends_of_groups(num_accumulated: int, epochs: list[int]) -> list[int]:
    """The last minibatch of each update, given the first ones of all epochs, and the end."""
    ends = []
    for begin, end in itertools.pairwise(epochs):
        ends += [*range(begin + num_accumulated - 1, end - 1, num_accumulated), end - 1]
    return ends


def _owners(split: Sequence[int]) -> list[int]:
    """The stage of each layer."""
    return [stage for stage, count in enumerate(split) for _ in range(count)]
