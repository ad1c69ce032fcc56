"""Imports run one way: plan <- timeline <- compat <- devices <- model <- runtime <- values <- step
<- the Lightning-facing top. And they leave torch and Lightning as they are, for those who import
the package and train without it.

The direction is read from the source and not from what is loaded, so that imports inside functions,
and for type checkers only, count.
"""

import ast
import importlib
from pathlib import Path

import pytest

import lightning_pipeshift
from lightning_pipeshift.testing.ranks import launch_script

PACKAGE = "lightning_pipeshift"
ROOT = Path(next(iter(lightning_pipeshift.__path__)))
FLOORS = ("plan", "timeline", "compat", "devices", "model", "runtime", "values", "step")
TOP = len(FLOORS)
# Modules that are on the top, although the folder that they are in is further below.
ON_TOP = {("compat", "lightning_private")}
OPEN_TO_ALL = {"documents", "errors", "files", "host", "text"}
# What a floor may not import, although it lies below all of the house.
_LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
_TORCH = {"torch", "torchmetrics"}
FOREIGN = {
    FLOORS.index(name): _LIGHTNING | (_TORCH if name in ("plan", "timeline") else set())
    for name in FLOORS
}


def floor(parts):
    """The floor of a module of the package, from its name's parts; None for what is open to all."""
    if parts[1:2] and parts[1] in OPEN_TO_ALL:
        return None
    if parts[1:3] in ON_TOP:
        return TOP
    return FLOORS.index(parts[1]) if parts[1:2] and parts[1] in FLOORS else TOP


def imported(tree, package):
    """Every module that a source imports, as the parts of its name, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield tuple(alias.name.split(".")), node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                # `from lightning_pipeshift import plan` imports the module, not the package alone.
                yield (*base, alias.name), node.lineno


def violations(source, path):
    """The forbidden imports of a file, given by its path inside the package."""
    package = (PACKAGE, *Path(path).parts[:-1])
    here = floor((*package, Path(path).stem))
    if here is None:
        here = 0
    found = []
    for parts, line in imported(ast.parse(source), package):
        if parts[0] == PACKAGE:
            there = floor(parts)
            upward = there is not None and there > here
        else:
            upward = parts[0] in FOREIGN.get(here, ())
        if upward:
            found.append(f"{path}:{line} imports {'.'.join(parts)}")
    return found


def test_no_file_imports_upward():
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 10
    found = []
    for file in files:
        found += violations(file.read_text(encoding="utf-8"), file.relative_to(ROOT).as_posix())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("plan/a.py", "import torch"),
        ("plan/a.py", "import torch.distributed as dist"),
        ("plan/a.py", "from torch import Tensor"),
        ("plan/a.py", "def f():\n    import lightning as L"),
        ("plan/a.py", "if TYPE_CHECKING:\n    from lightning.pytorch import Trainer"),
        ("plan/a.py", "from lightning_pipeshift.model.saved.layer import NamedLayer"),
        ("plan/a.py", "from lightning_pipeshift import runtime"),
        ("plan/a.py", "from lightning_pipeshift import Plan"),
        ("plan/a.py", "import lightning_pipeshift"),
        ("plan/a.py", "from ..model import gate"),
        ("plan/a.py", "from .. import runtime"),
        ("model/a.py", "from lightning_pipeshift.runtime.executor import Executor"),
        ("model/a.py", "from lightning_pipeshift.lightning.strategy import PipeShiftStrategy"),
        ("devices/a.py", "from lightning_pipeshift.model.saved.layer import NamedLayer"),
        ("devices/a.py", "import lightning"),
        ("compat/a.py", "from lightning_pipeshift.devices.streams import side_stream"),
        ("model/a.py", "import lightning"),
        ("runtime/a.py", "from lightning_pipeshift.lightning.callbacks import LayerMigration"),
        ("runtime/a.py", "from pytorch_lightning import Trainer"),
        ("plan/a.py", "from lightning_pipeshift.compat.torch_private import pytree"),
        ("plan/a.py", "from lightning_pipeshift.compat import torch_private"),
        ("plan/a.py", "from lightning_pipeshift.timeline.recording import Recording"),
        ("timeline/a.py", "import torch"),
        ("timeline/a.py", "from lightning_pipeshift.runtime import recording"),
        ("model/a.py", "from lightning_pipeshift.compat.lightning_private import is_local_path"),
        ("runtime/a.py", "from lightning_pipeshift.compat import lightning_private"),
        ("compat/a.py", "import lightning"),
        ("compat/a.py", "from lightning_pipeshift.model.saved.layer import NamedLayer"),
        ("errors.py", "import torch"),
        ("errors.py", "from lightning_pipeshift.lightning.strategy import PipeShiftStrategy"),
    ],
)
def test_an_upward_import_is_found(path, source):
    assert violations(source, path)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("plan/a.py", "from lightning_pipeshift.errors import PlanError"),
        ("plan/a.py", "from lightning_pipeshift import errors"),
        ("plan/a.py", "from lightning_pipeshift.plan.schedule.actions import Action"),
        ("plan/a.py", "from .action import Action"),
        ("plan/a.py", "import json"),
        ("timeline/a.py", "from lightning_pipeshift.plan.schedule.actions import Action"),
        ("model/a.py", "import torch\nfrom lightning_pipeshift.plan import action"),
        (
            "runtime/a.py",
            "import torch\nfrom lightning_pipeshift.model.saved.layer import NamedLayer",
        ),
        ("runtime/a.py", "from ..model import gate"),
        ("model/a.py", "from lightning_pipeshift.devices.streams import side_stream"),
        ("devices/a.py", "from lightning_pipeshift.compat.torch_private import schema_of"),
        ("model/a.py", "from lightning_pipeshift.compat.torch_private import pytree"),
        ("runtime/a.py", "from lightning_pipeshift.compat.lightning_names import trainer_of"),
        ("compat/torch_private.py", "import torch"),
        ("compat/lightning_private.py", "import lightning"),
        (
            "lightning/strategy.py",
            "from lightning_pipeshift.compat.lightning_private import is_local_path",
        ),
        (
            "lightning/strategy.py",
            "import lightning\nfrom lightning_pipeshift.runtime import executor",
        ),
        (
            "lightning/callbacks/a.py",
            "import lightning\nfrom lightning_pipeshift.plan import action",
        ),
        ("__init__.py", "from lightning_pipeshift.lightning.strategy import PipeShiftStrategy"),
    ],
)
def test_a_downward_import_is_none(path, source):
    assert not violations(source, path)


REPLACED = """
import inspect
import sys
import warnings
import lightning.pytorch as L
import lightning.pytorch.cli, torch.distributed.checkpoint, torchmetrics
from lightning.pytorch.demos.boring_classes import BoringModel

OTHERS = ("torch", "lightning", "torchmetrics")
CODE = (type, property, staticmethod, classmethod)

def parts():
    "The functions and classes of the others' modules and classes, by name."
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in OTHERS:
            for attribute, value in list(vars(module).items()):
                found[name, attribute] = value
                if isinstance(value, type) and value.__module__.split(".")[0] in OTHERS:
                    for member, held in list(vars(value).items()):
                        found[value.__module__, value.__qualname__, member] = held
    return {
        name: part
        for name, part in found.items()
        if inspect.isroutine(part) or isinstance(part, CODE)
    }

warnings.simplefilter("ignore")
before = parts()
assert ("lightning.pytorch.trainer.trainer", "Trainer", "fit") in before
modules = set(sys.modules)
import lightning_pipeshift
print("loaded:", sorted(set(sys.modules) - modules))
import lightning_pipeshift.commands.cli, lightning_pipeshift.testing
how = {"accelerator": "cpu", "logger": False}
strategies = ["pipeshift", lightning_pipeshift.PipeShiftStrategy(), "auto"]
trainers = [L.Trainer(strategy=strategy, **how) for strategy in strategies]
trainers[2].validate(BoringModel(), verbose=False)
after = parts()
print("replaced:", [name for name in before if after.get(name) is not before[name]])
"""


def test_importing_loads_one_module_and_replaces_nothing_of_torch_and_lightning():
    """So that an ordinary Trainer runs Lightning's own code; ``Trainer(strategy="pipeshift")``,
    too. And so that the import is quick: all else is loaded with the first name that is used.
    """
    output = launch_script(REPLACED).output
    assert "loaded: ['lightning_pipeshift']\n" in output
    assert "replaced: []\n" in output


def test_public_names_are_the_same_for_python_and_for_type_checkers():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    for_checkers = {
        alias.name: str(node.module)
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(for_checkers) == sorted(lightning_pipeshift.__all__)
    assert set(lightning_pipeshift.__all__) <= set(dir(lightning_pipeshift))
    for name, module in for_checkers.items():
        assert getattr(lightning_pipeshift, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(ImportError, match="'Pipeline'"):
        exec("from lightning_pipeshift import Pipeline")
    with pytest.raises(AttributeError, match="no attribute 'Pipeline'"):
        lightning_pipeshift.Pipeline  # noqa: B018


MOST_LINES, MOST_METHODS = 450, 20
# The methods of these are those of a library's class.
HOOKS = {"StrategyHooks"}


def _public_methods(cls):
    """The names of a class's public methods, but for its properties."""
    for method in cls.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            names = {ast.unparse(each) for each in method.decorator_list}
            if not any(name == "property" or name.endswith(".setter") for name in names):
                yield method.name


def test_no_module_or_class_is_large():
    found = []
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        where = path.relative_to(ROOT)
        if text.count("\n") > MOST_LINES:
            found.append(f"{where}: more than {MOST_LINES} lines")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ClassDef) or node.name in HOOKS:
                continue
            if len(list(_public_methods(node))) > MOST_METHODS:
                found.append(f"{where}: {node.name} has more than {MOST_METHODS} methods")
    assert not found


def _room(parts):
    """The folder of a module, from the parts of its name after the package's."""
    folder = ROOT.joinpath(*parts)
    return "/".join(parts if folder.is_dir() else parts[:-1])


def test_rooms_import_each_other_in_no_circle():
    imports: dict[str, dict[str, None]] = {}
    for path in ROOT.rglob("*.py"):
        own = _room(path.relative_to(ROOT).with_suffix("").parts)
        found = imports.setdefault(own, {})
        for node in ast.walk(ast.parse(path.read_text())):
            name = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if name.startswith(f"{PACKAGE}."):
                found[_room(name.split(".")[1:])] = None
        found.pop(own, None)
    # What is open to all is in the top folder, as is what imports all.
    imports.pop("")
    order: list[str] = []
    while len(order) < len(imports):
        free = [
            room
            for room, others in imports.items()
            if room not in order and not set(others) - {"", *order}
        ]
        left = {room: [*imports[room]] for room in imports if room not in order}
        assert free, f"a circle among {left}"
        order += free
