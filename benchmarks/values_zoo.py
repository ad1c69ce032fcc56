"""Other people's models on the new core: are the bits on several stages those of a plain loop?

    python -m benchmarks.values_zoo --library transformers --json FILE
    python -m benchmarks.values_zoo --library timm torchvision --stages 3 --match 'vit|resnet'
    python -m benchmarks.values_zoo --library transformers --match '^gpt2/' --show

The models of ``benchmarks.zoo``, with dropout off. Each trains for two steps of two microbatches
with SGD, in a plain loop and with the core's engine, whose stages are threads of one process (see
``tests.unit.step.together``). The layers are those that the strategy finds; every stage owns as
many, in their order. Losses, gradients (and which parameters have none), parameters, and the
buffers of layers are compared bit by bit. What another stage owns is NaN: whoever uses it gets
other numbers. A model that draws random numbers without dropout is compared with the core on one
stage.

One process does one model, so that one that dies or takes too long does not end the sweep. How a
model is built is taken from the results of ``benchmarks.zoo`` where it is known.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import random
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import zoo_models, zoo_transformers
from benchmarks.measuring import arguments, print_table, save
from benchmarks.zoo_models import Batch, Built, Case
from lightning_pipeshift.model.parameters.layers import find_layers
from lightning_pipeshift.plan.schedule.schedules import schedule_named
from lightning_pipeshift.step.engine import Engine
from lightning_pipeshift.step.suspension import seed_generators
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.value import Value
from tests.unit.step.together import StageError, Stages, is_refusal

CPU = torch.device("cpu")
RESULTS = Path(__file__).parent / "results"
SCHEDULES = ("1f1b", "gpipe")
"""Of the two steps."""
NUM_MICROBATCHES = 2
LEARNING_RATE = 0.01
AT_LEAST_LAYERS = 8
LOADS_MOST = {
    "timm": "timm.models",
    "torchvision": "torchvision.models",
    "transformers": "transformers.models.bart.modeling_bart",
}
"""The module of each library that imports most of what its models have in common."""


@dataclass(frozen=True)
class Verdict:
    """How a model has fared.

    Args:
        library: of the model.
        name: its family and name.
        kind: ``"same"``, ``"differs"``, ``"refused"`` (PipeShift says so, with advice), ``"fails"``
            or ``"not built"`` (a plain loop fails, too).
        reason: one line.
        text: the trace of an error.
        num_layers: how many layers it has.
        draws: whether it draws random numbers, and was compared with the core on one stage.
        seconds: how long it took.
    """

    library: str
    name: str
    kind: str
    reason: str = ""
    text: str = ""
    num_layers: int = 0
    draws: bool = False
    seconds: float = 0.0


class _Module(nn.Module):
    """A model with its loss, in place of a LightningModule."""

    def __init__(self, built: Built) -> None:
        super().__init__()
        self.model = built.model
        self._loss = built.loss

    def step(self, batch: Batch, turn: int) -> Tensor:
        return self._loss(self.model, batch)


Trained = dict[str, Tensor | None]
"""What a run gave, by names that tell the step."""


def plainly(module: _Module, batches: Sequence[Batch]) -> tuple[Trained, bool]:
    """Trains in a plain loop; returns whether random numbers were drawn, too."""
    found: Trained = {}
    draws = False
    for step in range(len(SCHEDULES)):
        for turn, batch in enumerate(_of_step(batches, step)):
            seed_generators(CPU, "step", 0, step, turn)
            before = _generators()
            loss = module.step(batch, turn)
            draws = draws or _generators() != before
            (loss / NUM_MICROBATCHES).backward()
            found[f"{step}: loss {turn}"] = loss.detach().clone()
        _end_step(found, step, dict(module.named_parameters()))
    found.update((f"buffer {name}", buffer) for name, buffer in module.named_buffers())
    return found, draws


def on_stages(case: Case, batches: Sequence[Batch], num_stages: int) -> list[Trained]:
    """Trains on stages that own as many layers each.

    Raises:
        StageError: a stage failed, or none can go on.
    """
    stages = Stages(num_stages, seed=0)
    modules = [_Module(zoo_models.build(case, drops=False)) for _ in range(num_stages)]
    cores = []
    for stage, module in enumerate(modules):
        layers = list(find_layers(module, AT_LEAST_LAYERS).values())
        owners = [at * num_stages // len(layers) for at in range(len(layers))]
        core = Core(module, layers, partial(_owner, owners), stages.mailboxes[stage], CPU)
        with torch.no_grad():
            for tensor, owner in core.parameter_owners.items():
                if owner != stage and tensor.is_floating_point():
                    tensor.fill_(float("nan"))
        cores.append(core)

    def work(stage: int) -> Trained:
        core, module = cores[stage], modules[stage]
        found: Trained = {}
        for step, schedule in enumerate(SCHEDULES):
            row = schedule_named(schedule)(num_stages, NUM_MICROBATCHES)[stage]
            step_batches = _of_step(batches, step)
            losses = Engine(core).run(step, step_batches, module.step, row)
            for turn, loss in enumerate(losses):
                here = _here(loss, stage)
                if here is not None:
                    found[f"{step}: loss {turn}"] = here
            _end_step(found, step, core.held())
        for name, buffer in module.named_buffers():
            if core.parameter_owners.get(buffer) == stage:
                found[f"buffer {name}"] = _here(buffer, stage)
        return found

    return stages.run_on(cores, work)


def _owner(owners: Sequence[int], number: int, turn: int) -> int:
    return owners[number]


def _of_step(batches: Sequence[Batch], step: int) -> list[Batch]:
    chosen = batches[step * NUM_MICROBATCHES : (step + 1) * NUM_MICROBATCHES]
    return [{name: x.clone() for name, x in batch.items()} for batch in chosen]


def _end_step(found: Trained, step: int, held: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in held.items():
            gradient = parameter.grad
            found[f"{step}: gradient of {name}"] = None if gradient is None else gradient.clone()
            if gradient is not None:
                parameter -= LEARNING_RATE * gradient
            found[f"{step}: parameter {name}"] = parameter.detach().clone()
            parameter.grad = None


def _here(tensor: Tensor, stage: int) -> Tensor | None:
    if isinstance(tensor, Value):
        here = tensor.account.tensor if tensor.account.owner == stage else None
        return None if here is None else here.detach().clone()
    return tensor.detach().clone()


def _generators() -> tuple[Any, ...]:
    numbers = torch.get_rng_state().numpy().tobytes(), random.getstate()
    return *numbers, repr(np.random.get_state())


def differences(expected: Trained, found: Sequence[Trained]) -> list[str]:
    """What is not the same, in the order of the run."""
    merged: Trained = {}
    for each in found:
        merged.update(each)
    names = [name for name in expected if name in merged or not name.startswith("buffer ")]
    return [name for name in names if not _same(expected[name], merged.get(name, ...))]


def _same(one: Tensor | None, other: Any) -> bool:
    if one is None or not isinstance(other, Tensor):
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()


def check(
    case: Case, num_stages: int, most_parameters: int, is_built: Callable[[], None] = lambda: None
) -> Verdict:
    """Trains one model; calls ``is_built`` behind the plain loop."""
    name = f"{case.family}/{case.name}"
    try:
        case = case if case.options else zoo_models.settle(case)
        built = zoo_models.build(case, drops=False)
        module = _Module(built)
        size = sum(parameter.numel() for parameter in module.parameters())
        if size > most_parameters:
            return Verdict(case.library, name, "not built", f"{size / 1e6:.0f} M parameters")
        batches = built.batches(len(SCHEDULES) * NUM_MICROBATCHES)
        expected, draws = plainly(module, batches)
    except Exception as error:
        return Verdict(case.library, name, "not built", _line_of(error), _trace_of(error))
    is_built()
    num_layers = len(find_layers(module, AT_LEAST_LAYERS))
    kind, reason, text = "same", "", ""
    try:
        if draws:
            (expected,) = on_stages(case, batches, 1)
        wrong = differences(expected, on_stages(case, batches, num_stages))
        if wrong:
            kind, reason = "differs", f"{len(wrong)} of {len(expected)}: {', '.join(wrong[:3])}"
    except StageError as error:
        kind = "refused" if is_refusal(error.cause) else "fails"
        reason, text = _line_of(error.cause), _trace_of(error.cause)
    except Exception as error:
        kind, reason, text = "fails", _line_of(error), _trace_of(error)
    return Verdict(case.library, name, kind, reason, text, num_layers, draws)


def _line_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:400]


def _trace_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-6000:]


# --- the sweep ---


def known(library: str) -> list[Case]:
    """The models that a sweep of ``benchmarks.zoo`` has built, and how."""
    path = RESULTS / f"zoo_{library}.json"
    models = json.loads(path.read_text())["figures"]["models"] if path.exists() else []
    return [Case(library, x["family"], x["name"], x["options"]) for x in models if x["built"]]


def cases(library: str, match: str | None, only_known: bool) -> list[Case]:
    """The models of a library; those that are known to be built come first."""
    found = known(library)
    if not only_known:
        others = zoo_models.cases(library, match)
        if library == "transformers":
            others += [Case(library, *pair) for pair in zoo_transformers.more_heads()]
        done = {(case.family, case.name) for case in found}
        found += [case for case in others if (case.family, case.name) not in done]
    return [case for case in found if re.search(match or "", f"{case.family}/{case.name}")]


def apart(case: Case, num_stages: int, most_parameters: int, limit_seconds: float) -> Verdict:
    """Checks a model in a process of its own."""
    begin = time.monotonic()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    has_built = context.Event()

    def body() -> None:
        torch.set_num_threads(1)
        sender.send(check(case, num_stages, most_parameters, has_built.set))

    process = context.Process(target=body, daemon=True)
    process.start()
    sender.close()
    name = f"{case.family}/{case.name}"
    found = Verdict(case.library, name, "fails", f"it takes longer than {limit_seconds:.0f} s")
    try:
        if receiver.poll(limit_seconds):
            found = receiver.recv()
        elif not has_built.is_set():
            found = replace(found, kind="not built", reason=f"a plain loop: {found.reason}")
    except EOFError:
        process.join()
        found = replace(found, reason=f"its process ended with {process.exitcode}")
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.join()
    return replace(found, seconds=round(time.monotonic() - begin, 1))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--library", nargs="+", required=True, choices=zoo_models.LIBRARIES)
    parser.add_argument("--match", help="a regular expression, looked for in family/name")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--limit-seconds", type=float, default=60.0, help="for each model")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no model after so long"
    )
    parser.add_argument(
        "--most-parameters", type=int, default=40_000_000, help="leave out what is larger"
    )
    parser.add_argument(
        "--known", action="store_true", help="only models that benchmarks.zoo has built"
    )
    parser.add_argument("--show", action="store_true", help="print the traces of errors")
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="in a random order")
    parser.add_argument(
        "--go-on", action="store_true", help="keep what the --json FILE has, and do the others"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.monotonic()
    verdicts: list[Verdict] = []
    if options.go_on and options.json is not None and options.json.exists():
        before = json.loads(options.json.read_text())["figures"]["models"]
        verdicts = [Verdict(**model) for model in before]
    done = {(x.library, x.name) for x in verdicts}
    for library in options.library:
        # The process of each model has it then.
        importlib.import_module(LOADS_MOST[library])
    todo = [
        case for library in options.library for case in cases(library, options.match, options.known)
    ]
    if options.shuffle is not None:
        random.Random(options.shuffle).shuffle(todo)
    for case in todo:
        if (case.library, f"{case.family}/{case.name}") in done:
            continue
        if time.monotonic() - begin > options.seconds:
            break
        found = apart(case, options.stages, options.most_parameters, options.limit_seconds)
        verdicts.append(found)
        print(
            f"{found.library} {found.name}: {found.kind} {found.reason} ({found.seconds} s)",
            flush=True,
        )
        if options.show and found.text:
            print(found.text, flush=True)
        if options.json is not None:
            # A sweep takes long: what is done is there, whatever becomes of the rest. The traces
            # are not: they are long.
            verdicts[-1] = replace(found, text="")
            save(options.json, _figures(verdicts, options.stages), says_so=False)
    print_table(
        f"On {options.stages} stages, beside a plain loop",
        ["model", "layers", "verdict", "reason"],
        [[x.name, x.num_layers, x.kind, x.reason[:100]] for x in verdicts],
    )
    reasons = Counter((x.kind, _common(x.reason)) for x in verdicts if x.kind != "same")
    print_table(
        "Causes",
        ["models", "verdict", "reason"],
        [[count, kind, reason] for (kind, reason), count in reasons.most_common()],
    )
    print_table("Summary", ["verdict", "models"], list(_counts(verdicts).items()))
    save(options.json, _figures(verdicts, options.stages))


def _common(reason: str) -> str:
    return re.sub(r"\([^()]*:\d+\)|`[^`]*`|\d+", "_", reason)[:110]


def _counts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    return dict(Counter(x.kind for x in verdicts).most_common())


def _figures(verdicts: Sequence[Verdict], num_stages: int) -> dict[str, Any]:
    return {
        "stages": num_stages,
        "summary": _counts(verdicts),
        "models": [{name: x for name, x in asdict(each).items() if x} for each in verdicts],
    }


if __name__ == "__main__":
    main()
