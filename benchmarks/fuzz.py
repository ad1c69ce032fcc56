"""Damaged and hostile files: every one is refused with an error of ours, or is loaded rightly.

    python -m benchmarks.fuzz --json benchmarks/results/fuzz.json
    python -m benchmarks.fuzz --kinds plan request --count 100000 --seed 7

Takes a good file of each kind that PipeShift reads, changes it at random (bits, bytes, pieces, and
for documents their values), and loads it. Loading must end within seconds, in bounded memory, with
an error of PipeShift's own or with what is right: the tensors that were saved, or a document that
reads the same after it was written once more. ``folder, signed`` is one whose checksums were made
to fit, as an attacker would: it has no right content, but must not do harm either.

Loading happens in copies of the process, so a crash is found as well. What fails is kept in a
folder, which is printed.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measuring import arguments, print_table, save
from lightning_pipeshift import PipeShiftCheckpointIO
from lightning_pipeshift.checkpoint import atomic
from lightning_pipeshift.errors import PipeShiftError
from lightning_pipeshift.plan.document.files import (
    load_cluster,
    load_profile,
    save_cluster,
    save_profile,
)
from lightning_pipeshift.plan.document.plan import LayerRecord, Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.inputs.saved_tensors import SavedTensor
from lightning_pipeshift.step.control_files import moves_of

MOST_SECONDS = 5.0
MOST_BYTES = 1 << 30
# Values that documents have in places where nobody expects them.
ODD: list[Any] = [
    None, True, -1, 0, 10**12, 10**400, -0.0, 1e308, float("nan"), float("inf"), "", "..",
    "/etc/passwd", "a/../b", "\x1b[2J\0", "x" * 10_000, [], {}, [[[]]], {"a": None}, [1] * 1000,
]  # fmt: skip

Load = Callable[[Path], None]


class WrongLoadError(Exception):
    """A changed file was loaded as if it were another good one."""


# --- changing files ---


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The bytes with one to four random changes."""
    changed = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        size = len(changed)
        at = chance.randrange(size) if size else 0
        length = min(chance.choice([1, 2, 4, 8, 64, 1024]), size - at)
        kind = chance.randrange(7)
        if kind == 0 and size:
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[at : at + length] = chance.randbytes(length)
        elif kind == 2:
            del changed[at : at + length]
        elif kind == 3:
            changed[at:at] = changed[at : at + length]
        elif kind == 4:
            other = chance.randrange(size) if size else 0
            changed[at : at + length] = changed[other : other + length]
        elif kind == 5:
            odd = chance.choice([0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1])
            changed[at : at + 8] = struct.pack("<Q", odd)
        elif chance.random() < 0.2:
            del changed[at:]
    return bytes(changed)


def rewritten(content: bytes, chance: random.Random) -> bytes:
    """A JSON document with values and names that do not belong there."""
    value = json.loads(content)
    for _ in range(chance.choice([1, 1, 2])):
        value = _with_odd_value(value, chance)
    return json.dumps(value).encode()


def _with_odd_value(value: Any, chance: random.Random) -> Any:
    if not isinstance(value, dict | list) or not value or chance.random() < 0.2:
        return chance.choice(ODD)
    if isinstance(value, list):
        at = chance.randrange(len(value))
        return [*value[:at], _with_odd_value(value[at], chance), *value[at + 1 :]]
    name = chance.choice(list(value))
    if chance.random() < 0.1:
        others = {key: each for key, each in value.items() if key != name}
        return others | chance.choice([{}, {"unknown": 1}, {"..": value[name]}])
    return value | {name: _with_odd_value(value[name], chance)}


def changed_document(content: bytes, chance: random.Random) -> bytes:
    """A document, changed in one way or the other."""
    try:
        return (rewritten if chance.random() < 0.5 else damaged)(content, chance)
    except ValueError:  # a cluster is YAML, which json does not read
        return damaged(content, chance)


# --- good files, and whether what is loaded is right ---


def _tensors() -> dict[str, torch.Tensor]:
    return {f"layer.{i}.weight": torch.arange(64.0) + i for i in range(6)}


def _checkpoint() -> dict[str, Any]:
    tensors = _tensors()
    return {
        "epoch": 3,
        "global_step": 12,
        "state_dict": tensors,
        "optimizer_states": [
            {
                "state": {
                    i: {"step": torch.tensor(4.0), "exp_avg": value * 2}
                    for i, value in enumerate(tensors.values())
                },
                "param_groups": [{"lr": 0.1, "params": list(range(len(tensors)))}],
            }
        ],
        "callbacks": {"ModelCheckpoint": {"best": "a.ckpt", "score": torch.arange(3.0)}},
    }


def make_checkpoint(path: Path) -> None:
    PipeShiftCheckpointIO().save_checkpoint(_checkpoint(), path)


def make_folder(path: Path) -> None:
    io = PipeShiftCheckpointIO(sharded=True)
    io.connect(dist.group.WORLD)
    io.save_checkpoint(_checkpoint(), path)


def load_checkpoint(path: Path) -> None:
    if _plain(PipeShiftCheckpointIO().load_checkpoint(path)) != _plain(_checkpoint()):
        raise WrongLoadError("other values than those that were saved")


def load_anything(path: Path) -> None:
    PipeShiftCheckpointIO().load_checkpoint(path)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def make_plan(path: Path) -> None:
    layers = tuple(LayerRecord(f"layer.{i}", 100 * i, 0.1 * i, 64) for i in range(6))
    Plan(layers, Placement(((2, 4), (3, 3))), "1f1b", 8, recompute=((1,), ())).save(path)


def load_plan(path: Path) -> None:
    plan = Plan.load(path)
    str(plan)
    _require_same(Plan.from_json(plan.to_json()), plan)


def make_cluster(path: Path) -> None:
    devices = [Device("alpha", "a", 1.0, 8 << 30)] * 3 + [Device("beta", "b", 0.5)] * 2
    links = {("alpha", "beta"): Link(1e-3, 1e8)}
    save_cluster(Cluster(tuple(devices), Link(1e-6, 1e10), Link(1e-4, 1e9), links), path)


def load_this_cluster(path: Path) -> None:
    cluster = load_cluster(path)
    again = path.with_name("again.yaml")
    save_cluster(cluster, again)
    _require_same(load_cluster(again), cluster)


def make_profile(path: Path) -> None:
    tensor = SavedTensor(0, 64, (4, 4), "torch.float32", "layer")
    layers = tuple(
        LayerProfile(f"layer.{i}", 100, 100, 200, 64, 64, 64, 64, (tensor,)) for i in range(4)
    )
    save_profile(Profile(layers, {"a": KindProfile((0.1,) * 4, (0.2,) * 4)}, 4.0, 2), path)


def load_this_profile(path: Path) -> None:
    profile = load_profile(path)
    again = path.with_name("again.json")
    save_profile(profile, again)
    _require_same(load_profile(again), profile)


def _require_same(found: Any, expected: Any) -> None:
    # By their text, in which what is not a number is the same as itself.
    if repr(found) != repr(expected):
        raise WrongLoadError("it does not read the same after it was written once more")


def make_request(path: Path) -> None:
    moves = [{"layer": "layer.1", "stage": 1}, {"layer": "b", "stage": 0, "virtual_machine": 1}]
    path.write_text(json.dumps({"moves": moves}))


def load_request(path: Path) -> None:
    for move in moves_of(path):
        if not (isinstance(move.layer, str) and isinstance(move.stage, int)):
            raise WrongLoadError(f"{move!r}")


# --- one kind after the other ---


def change_file(
    change: Callable[[bytes, random.Random], bytes],
) -> Callable[[Path, random.Random], None]:
    def on(path: Path, chance: random.Random) -> None:
        path.write_bytes(change(path.read_bytes(), chance))

    return on


def change_folder(path: Path, chance: random.Random) -> None:
    files = sorted(file for file in path.rglob("*") if file.is_file())
    file = chance.choice(files)
    file.write_bytes(changed_document(file.read_bytes(), chance))


def change_signed_folder(path: Path, chance: random.Random) -> None:
    """Whose author has made the checksums fit."""
    data = next(each for each in path.iterdir() if each.is_dir())
    name = chance.choice(["index.json", "index.json", "checkpoint.pt", "__0_0.distcp"])
    file = data / name
    file.write_bytes(changed_document(file.read_bytes(), chance))
    atomic.write_marker(path, data.name)


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path, random.Random], None], Load]] = {
    "checkpoint": (make_checkpoint, change_file(damaged), load_checkpoint),
    "folder": (make_folder, change_folder, load_checkpoint),
    "folder, signed": (make_folder, change_signed_folder, load_anything),
    "plan": (make_plan, change_file(changed_document), load_plan),
    "cluster": (make_cluster, change_file(changed_document), load_this_cluster),
    "profile": (make_profile, change_file(changed_document), load_this_profile),
    "request": (make_request, change_file(changed_document), load_request),
}


def _copy(good: Path, path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    if good.is_dir():
        shutil.copytree(good, path)
    else:
        shutil.copyfile(good, path)


class _TooLongError(BaseException):
    """Not an Exception, which loading might catch."""


def _too_long(*_: Any) -> None:
    raise _TooLongError


def try_one(kind: str, good: Path, path: Path, seed: int, limit_seconds: float) -> str:
    """Changes a copy of a good file, and loads it: what comes of that, in a word or a sentence."""
    _, change, load = KINDS[kind]
    _copy(good, path)
    change(path, random.Random(seed))
    signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, limit_seconds)
    try:
        load(path)
    except PipeShiftError as error:
        # Printing it must work as well.
        return "refused" if len(str(error)) < 5000 else f"an error of {len(str(error))} characters"
    except _TooLongError:
        return f"still loading after {limit_seconds:g} s"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:200]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "loaded"


def run_kind(
    kind: str, count: int, seed: int, folder: Path, limit_seconds: float = MOST_SECONDS
) -> dict[str, Any]:
    """Tries so many changes of one kind of file.

    Returns:
        how many were refused and loaded, the seeds of the others with what came of them, and the
        longest time in seconds.
    """
    good = folder / f"good {kind}"
    KINDS[kind][0](good)
    if problem := _loads(kind, good):
        raise RuntimeError(f"the good file of kind {kind!r} is not loaded: {problem}")
    outcomes: dict[str, int] = {}
    problems: dict[int, str] = {}
    longest = 0.0
    done = 0
    while done < count:
        # Where it is, and its longest time, seen by this process whatever happens to the copy.
        shared = mmap.mmap(-1, 16)
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            _in_copy(kind, good, folder, range(done, count), seed, limit_seconds, shared, write)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            while True:
                try:
                    number, outcome = pickle.load(pipe)
                except EOFError:
                    break
                done = number + 1
                if outcome in ("refused", "loaded"):
                    outcomes[outcome] = outcomes.get(outcome, 0) + 1
                else:
                    problems[seed + number] = outcome
        _, status = os.waitpid(child, 0)
        longest = max(longest, struct.unpack_from("<d", shared, 8)[0])
        if done < count:
            number = struct.unpack_from("<q", shared, 0)[0]
            problems[seed + number] = f"the process died ({status})"
            done = number + 1
    return {**outcomes, "problems": problems, "longest_seconds": longest}


def _loads(kind: str, good: Path) -> str:
    try:
        KINDS[kind][2](good)
    except Exception as error:
        return repr(error)
    return ""


def _in_copy(
    kind: str,
    good: Path,
    folder: Path,
    numbers: range,
    seed: int,
    limit_seconds: float,
    shared: mmap.mmap,
    write: int,
) -> None:
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, used + MOST_BYTES))
        path = folder / f"changed {kind}"
        with os.fdopen(write, "wb") as pipe:
            for number in numbers:
                struct.pack_into("<q", shared, 0, number)
                begun = time.perf_counter()
                outcome = try_one(kind, good, path, seed + number, limit_seconds)
                longest = struct.unpack_from("<d", shared, 8)[0]
                struct.pack_into("<d", shared, 8, max(longest, time.perf_counter() - begun))
                pickle.dump((number, outcome), pipe)
                pipe.flush()
    finally:
        os._exit(0)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    figures: dict[str, Any] = {}
    for kind in options.kinds:
        figures[kind] = run_kind(kind, options.count, options.seed, folder)
        print(f"{kind}: {figures[kind]}", flush=True)
        for seed in list(figures[kind]["problems"])[:3]:
            kept = folder / f"{kind} {seed}"
            _copy(folder / f"good {kind}", kept)
            KINDS[kind][1](kept, random.Random(seed))
            print(f"  kept as {kept}")
    rows = [
        [
            kind,
            of.get("refused", 0),
            of.get("loaded", 0),
            len(of["problems"]),
            of["longest_seconds"],
        ]
        for kind, of in figures.items()
    ]
    print_table(
        f"{options.count} changed files of each kind",
        ["kind", "refused", "loaded rightly", "problems", "longest s"],
        rows,
    )
    save(options.json, {"count": options.count, "seed": options.seed, "kinds": figures})


if __name__ == "__main__":
    main()
