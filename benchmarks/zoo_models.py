"""Which models of timm, torchvision and transformers the sweep trains, and how each is built.

Random initialisation from a fixed seed, small inputs, and dropout and stochastic depth on wherever
the library takes a rate. The models themselves are as their authors wrote them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import zoo_transformers

LIBRARIES = ("timm", "torchvision", "transformers")
BATCH_SIZE = 4
NUM_CLASSES = 10
DROP_RATE = 0.1
# Of which a step takes seconds on a core.
MOST_PARAMETERS = 200_000_000

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model of a library, with all that its construction depends on.

    Args:
        library: one of :data:`LIBRARIES`.
        family: what it stands for: a module of timm or torchvision, a model type of transformers.
        name: the library's name of it.
        options: how it is built, as found by :func:`settle`.
    """

    library: str
    family: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Built:
    """A model with something to train on.

    Args:
        model: with dropout, in train mode.
        loss: of the model and a batch.
        batches: made with a seed of the case's own.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Batch], Tensor]
    batches: Callable[[int], list[Batch]]


def cases(library: str, match: str | None = None) -> list[Case]:
    """The smallest member of every family, or those whose family or name matches.

    Args:
        library: one of :data:`LIBRARIES`.
        match: a regular expression; it is looked for in ``family/name``.
    """
    found = {"timm": _timm_cases, "torchvision": _torchvision_cases, "transformers": _hf_cases}
    wanted = re.compile(match or "")
    return [case for case in found[library](wanted) if wanted.search(f"{case.family}/{case.name}")]


def build(case: Case, drops: bool = True) -> Built:
    """Builds a case that has been settled: the same weights and batches in every process.

    Args:
        case: with its options.
        drops: whether dropout, stochastic depth and the like are on.
    """
    builders = {"timm": _build_timm, "torchvision": _build_torchvision, "transformers": _build_hf}
    with seeded(case):
        built = builders[case.library](case)
    built.model.train()
    if not drops:
        turn_drops_off(built.model)
    return built


def settle(case: Case) -> Case:
    """The case with the smallest input that the model takes: tried on a plain training step.

    Raises:
        RuntimeError: none of the inputs could be trained on; it names the last error.
    """
    options = {"timm": _timm_options, "torchvision": _image_options, "transformers": _hf_options}
    error: Exception = ValueError("it could not be shrunk")
    for choice in options[case.library](case):
        candidate = Case(case.library, case.family, case.name, choice)
        try:
            built = build(candidate)
            size = sum(parameter.numel() for parameter in built.model.parameters())
            if size > MOST_PARAMETERS:
                error = ValueError(f"{size / 1e6:.0f} M parameters are too many for a sweep")
                break
            loss = built.loss(built.model, built.batches(1)[0])
            loss.backward()
        except Exception as caught:
            error = caught
            continue
        if not loss.isfinite():
            error = ValueError(f"the loss is {loss.item()}")
            continue
        return candidate
    kind = type(error).__name__
    raise RuntimeError(f"no plain training step works: {kind}: {error}") from error


@contextlib.contextmanager
def seeded(case: Case) -> Iterator[None]:
    """Random numbers that depend on the case alone."""
    import numpy as np

    seed = zlib.crc32(f"{case.library}/{case.name}".encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    yield


def turn_drops_off(model: nn.Module) -> None:
    """Sets every rate of dropout, stochastic depth, masking and layer drop to zero: in modules, and
    in the configurations that models of transformers look at when they run.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        for name, value in list(vars(config).items()) if config is not None else ():
            if isinstance(value, float) and ("drop" in name or "prob" in name):
                setattr(config, name, 0.0)
        if "Drop" in type(module).__name__ or type(module).__name__ == "StochasticDepth":
            for name in ("p", "drop_prob", "inplace"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        for name, value in list(vars(module).items()):
            if "drop" in name.lower() and isinstance(value, float):
                setattr(module, name, 0.0)


def loss_of(output: Any, labels: Tensor | None = None) -> Tensor:
    """A loss that depends on everything a model returns: its own, cross entropy of logits, or the
    mean squares.

    Args:
        output: of any structure.
        labels: classes, for an output that is logits of a batch.
    """
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.dim() == 0:
        return own
    if isinstance(output, Tensor) and output.dim() == 2 and labels is not None:
        return F.cross_entropy(output.float(), labels)
    squares = [value.float().square().mean() for value in _tensors(output) if value.requires_grad]
    if not squares:
        raise ValueError("nothing that the model returns has a gradient")
    return torch.stack(squares).sum()


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.numel():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)


def _image_batches(shape: Sequence[int]) -> Callable[[int], list[Batch]]:
    def make(num: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(7)
        return [
            {
                "pixels": torch.randn(BATCH_SIZE, *shape, generator=generator),
                "labels": torch.randint(NUM_CLASSES, (BATCH_SIZE,), generator=generator),
            }
            for _ in range(num)
        ]

    return make


def _image_loss(model: nn.Module, batch: Batch) -> Tensor:
    return loss_of(model(batch["pixels"]), batch["labels"])


# --- timm ---


def _timm_cases(wanted: re.Pattern[str]) -> list[Case]:
    import timm

    found = []
    for family in timm.list_modules():
        # Models named for tests are of one block.
        names = [n for n in timm.list_models(module=family) if not n.startswith("test_")]
        if not names or not any(wanted.search(f"{family}/{name}") for name in names):
            continue
        # A pattern that names a model means that one, and not its family's smallest.
        named = [name for name in names if wanted.pattern and wanted.search(f"/{name}")]
        if len(named) == len(names) or wanted.search(f"{family}/"):
            named = []
        for name in named or [_smallest_of(family, names, f"timm-{timm.__version__}")]:
            found.append(Case("timm", family, name))
    return found


def _smallest_of(family: str, names: Sequence[str], version: str) -> str:
    """The name with the fewest parameters. What was found is kept in the user's cache, as it takes
    minutes for a whole library.
    """
    import timm

    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pipeshift-zoo"
    path = root / f"{version}.json"
    known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    if known.get(family) not in names:
        sizes = {}
        for name in names:
            try:
                with torch.device("meta"):
                    model = timm.create_model(name, pretrained=False)
            except Exception:  # most of its like can be made on the meta device
                continue
            sizes[name] = sum(parameter.numel() for parameter in model.parameters())
        known[family] = min(sizes, key=lambda name: sizes[name]) if sizes else names[0]
        root.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    return known[family]


def _timm_options(case: Case) -> Iterator[dict[str, Any]]:
    import timm

    default = timm.get_pretrained_cfg(case.name)
    own = max(default.input_size[1:]) if default is not None else 224
    for size in dict.fromkeys([64, 96, 128, 192, 224, 256, own]):
        for resizes in (True, False):
            # Not all models take both rates.
            for rates in (("drop_rate", "drop_path_rate"), ("drop_path_rate",), ("drop_rate",), ()):
                options = {"size": size, "rates": list(rates), "resizes": resizes}
                try:
                    with torch.device("meta"):
                        _create_timm(case.name, options)
                except TypeError:
                    continue
                except Exception:  # the meta device's own, or a size that does not fit: try it
                    pass
                yield options
                break


def _create_timm(name: str, options: Mapping[str, Any]) -> nn.Module:
    import timm

    arguments: dict[str, Any] = dict.fromkeys(options["rates"], DROP_RATE)
    if options["resizes"]:
        arguments["img_size"] = options["size"]
    model: nn.Module = timm.create_model(
        name, pretrained=False, num_classes=NUM_CLASSES, **arguments
    )
    return model


def _build_timm(case: Case) -> Built:
    size = case.options["size"]
    model = _create_timm(case.name, case.options)
    return Built(model, _image_loss, _image_batches((3, size, size)))


# --- torchvision ---


def _torchvision_cases(wanted: re.Pattern[str]) -> list[Case]:
    from torchvision import models

    families: dict[str, list[str]] = {}
    for name in models.list_models():
        builder = models.get_model_builder(name)
        if "quantization" in builder.__module__:
            continue  # their weights are integers, which nobody trains
        families.setdefault(builder.__module__.removeprefix("torchvision.models."), []).append(name)
    found = []
    for family, names in sorted(families.items()):
        names = [name for name in names if wanted.search(f"{family}/{name}")]
        if names:
            found.append(Case("torchvision", family, min(names, key=_size_in_torchvision)))
    return found


def _size_in_torchvision(name: str) -> int:
    """The number of parameters, as the library's table of weights has it."""
    from torchvision import models

    return max(int(weights.meta["num_params"]) for weights in models.get_model_weights(name))


def _create_torchvision(name: str) -> nn.Module:
    import inspect

    from torchvision import models

    accepted = inspect.signature(models.get_model_builder(name)).parameters
    arguments: dict[str, Any] = {"weights": None}
    if "weights_backbone" in accepted:
        arguments["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        arguments["init_weights"] = False  # theirs takes half a minute
    if name.startswith(("fasterrcnn", "maskrcnn", "keypointrcnn", "retinanet", "fcos")):
        # They resize what they are given, to 800 pixels by default.
        arguments |= {"min_size": 128, "max_size": 128}
    model: nn.Module = models.get_model(name, **arguments)
    return model


def _image_options(case: Case) -> Iterator[dict[str, Any]]:
    for size in (64, 96, 128, 224, 299):
        yield {"size": size}


def _build_torchvision(case: Case) -> Built:
    size = case.options["size"]
    model = _create_torchvision(case.name)
    if case.family.startswith("detection"):
        return Built(model, _detection_loss, _detection_batches(size))
    if case.family.startswith("optical_flow"):
        return Built(model, _flow_loss, _image_batches((2, 3, 128, 128)))
    if case.family.startswith("video"):
        frames = 16 if "mvit" in case.family else 8
        return Built(model, _image_loss, _image_batches((3, frames, size, size)))
    return Built(model, _image_loss, _image_batches((3, size, size)))


def _flow_loss(model: nn.Module, batch: Batch) -> Tensor:
    return loss_of(model(batch["pixels"][:, 0], batch["pixels"][:, 1]))


def _detection_loss(model: nn.Module, batch: Batch) -> Tensor:
    targets = [
        {"boxes": boxes, "labels": labels}
        for boxes, labels in zip(batch["boxes"], batch["labels"], strict=True)
    ]
    if "keypoints" in batch:
        for target, keypoints in zip(targets, batch["keypoints"], strict=True):
            target["keypoints"] = keypoints
    if "masks" in batch:
        for target, masks in zip(targets, batch["masks"], strict=True):
            target["masks"] = masks
    losses = model(list(batch["pixels"]), targets)
    return torch.stack(list(losses.values())).sum()


def _detection_batches(size: int) -> Callable[[int], list[Batch]]:
    def make(num: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(7)
        batches = []
        for _ in range(num):
            corners = torch.rand(BATCH_SIZE, 2, 2, generator=generator) * size / 2
            boxes = torch.cat([corners, corners + size / 4], dim=2)
            points = torch.rand(BATCH_SIZE, 2, 17, 2, generator=generator) * size
            batches.append(
                {
                    "pixels": torch.rand(BATCH_SIZE, 3, size, size, generator=generator),
                    "boxes": boxes,
                    "labels": torch.ones(BATCH_SIZE, 2, dtype=torch.int64),
                    "keypoints": torch.cat([points, torch.ones(BATCH_SIZE, 2, 17, 1)], dim=3),
                    "masks": torch.ones(BATCH_SIZE, 2, size, size, dtype=torch.uint8),
                }
            )
        return batches

    return make


# --- transformers ---


def _hf_cases(wanted: re.Pattern[str]) -> list[Case]:
    types = zoo_transformers.model_types()
    return [Case("transformers", family, name) for family, name in sorted(types.items())]


def _hf_options(case: Case) -> Iterator[dict[str, Any]]:
    for choice in zoo_transformers.choices():
        if zoo_transformers.is_small(case.family, case.name, choice):
            yield choice


def _build_hf(case: Case) -> Built:
    model = zoo_transformers.create(case.family, case.name, case.options, DROP_RATE)

    def batches(num: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(7)
        return [zoo_transformers.batch_of(model, BATCH_SIZE, generator) for _ in range(num)]

    return Built(model, lambda model, batch: loss_of(model(**batch)), batches)
