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


class Trained(NamedTuple):
    """The result of a training run."""

    layers: list[nn.Module]
    """With their last weights."""
    optimizers: list[torch.optim.Optimizer]
    """One for each layer that has trained parameters, in their order."""
    losses: list[Tensor]
    """Of each minibatch, not divided by the number of accumulated ones."""


def train(
    model_layers: Sequence[nn.Module],
    split: Sequence[int],
    minibatches: Sequence[tuple[Any, Any]],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    loss: Callable[[Any, Any], Tensor],
    schedule: str = "async",
    num_accumulated: int = 1,
    drains: Iterable[int] = (),
    moves: Sequence[tuple[int, Sequence[int]]] = (),
    lr_of: Callable[[int], float] | None = None,
    epochs: Iterable[int] = (),
) -> Trained:
    """Trains copies of the layers, and returns them.

    Args:
        model_layers: called one after another. A parameter that several of them share has the
            versions of that one whose weights are oldest, and its gradients are added up from the
            last layer to the first.
        split: the number of layers of each stage.
        minibatches: inputs and targets.
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
    owners = [(0, _owners(split)), *((begin, _owners(other)) for begin, other in moves)]
    trained = [{n: p for n, p in layer.named_parameters() if p.requires_grad} for layer in layers]
    first_of: dict[nn.Parameter, int] = {}
    for number, weights in enumerate(trained):
        for parameter in weights.values():
            first_of.setdefault(parameter, number)
    owned = [[p for p, first in first_of.items() if first == n] for n in range(len(layers))]
    optimizers = [make_optimizer(parameters) for parameters in owned if parameters]
    versions = {parameter: [parameter.detach().clone()] for parameter in first_of}
    losses = []
    for minibatch, (value, target) in enumerate(minibatches):
        version_of: dict[nn.Parameter, int] = {}
        for number, weights in enumerate(trained):
            if schedule == "async-2bw":
                # Each epoch begins with the newest weights.
                begin = max(first for first in (0, *epochs) if first <= minibatch)
                version = max(bisect_left(ends, begin), bisect_left(ends, minibatch) - 1)
            else:
                first = emptied[bisect_right(emptied, minibatch) - 1]
                places = [(begin, of_layer[number]) for begin, of_layer in owners]
                version = bisect_right(ends, _newest(minibatch, places, len(split), first))
            for parameter in weights.values():
                version_of[parameter] = min(version, version_of.get(parameter, version))
        used: list[tuple[nn.Parameter, Tensor]] = []
        for layer, parameters in zip(layers, trained, strict=True):
            leaves_of: dict[str, Tensor] = {
                name: versions[p][version_of[p]].clone().requires_grad_()
                for name, p in parameters.items()
            }
            used += zip(parameters.values(), leaves_of.values(), strict=True)
            value = functional_call(layer, leaves_of, (value,), tie_weights=False)
        found = loss(value, target)
        losses.append(found.detach())
        leaves = [leaf for _, leaf in used]
        gradients = torch.autograd.grad(found / num_accumulated, leaves, allow_unused=True)
        sums: dict[nn.Parameter, Tensor] = {}
        for (parameter, _), gradient in reversed(list(zip(used, gradients, strict=True))):
            if gradient is not None:
                sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
        for parameter, gradient in sums.items():
            before = parameter.grad
            parameter.grad = gradient if before is None else before + gradient
        if minibatch in ends:
            for optimizer in optimizers:
                if lr_of is not None:
                    for group in optimizer.param_groups:
                        group["lr"] = lr_of(minibatch)
                optimizer.step()
                optimizer.zero_grad()
            for parameter, made in versions.items():
                made.append(parameter.detach().clone())
    return Trained(layers, optimizers, losses)


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
