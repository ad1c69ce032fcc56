"""Private names of torch, torchmetrics, Lightning and NumPy are used in ``compat/``, and nowhere
else: there each has a reason, and a test that it does what the package relies on.

The uses are read from the source. What the package overrides in classes of these libraries is read
from the classes.
"""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_pipeshift

PACKAGE = "lightning_pipeshift"
ROOT = Path(next(iter(lightning_pipeshift.__path__)))

# Private in form, but documented by Python as public.
DOCUMENTED = {"_asdict", "_fields", "_replace", "_exit", "_current_frames", "_getframe"}

LIBRARIES = {"torch", "lightning", "torchmetrics", "numpy"}

# Private names that are used outside of compat/: "file name", and why.
EXCEPTIONS: dict[str, str] = {}

# Private methods of a library's class that one of ours overrides. They cannot move: the library
# finds them on the object.
OVERRIDDEN = {
    "StrategyHooks._configure_launcher": "every strategy of Lightning's sets its launcher here",
    "_OverStages._after_closure": "precision plugins have no other hook between a step's closure"
    " and the optimizer",
    "_ScalerOverStages._check_inf_per_device": "for optimizers whose kernels unscale, the scaler"
    " calls this instead of the public `unscale_`",
    "StepGroup._allgather_base": "what `all_gather_into_tensor` calls in older torch",
    "StepGroup._reduce_scatter_base": "what `reduce_scatter_tensor` calls in older torch",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def defined(tree: ast.AST) -> Iterator[str]:
    """The private names that a file's own code defines: functions, classes, variables, attributes
    of ``self``, and slots.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            yield node.attr
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            yield from ast.literal_eval(node.value)


def foreign_imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Private names, and parts of modules' names, that are imported from other packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")
            if node.level or module[0] == PACKAGE:
                continue
            names = [*module, *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        else:
            continue
        for name in names:
            if is_private(name):
                yield name, node.lineno


def accesses(tree: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """Private attributes that are read or set, and whether on the object itself (``self._x``)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            base = node.value
            if isinstance(base, ast.Call) and isinstance(base.func, ast.Name):
                base = base.func
            is_own = isinstance(base, ast.Name) and base.id in ("self", "cls", "super")
            yield node.attr, node.lineno, is_own


def texts(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Strings that may be private names: of attributes (``getattr(x, "_y")``), of operations."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.removeprefix("aten::")
            if is_private(name) and name.isidentifier():
                yield node.value, node.lineno


def used_in(tree: ast.AST) -> set[str]:
    """All private names that a file of compat/ uses, but for those that it defines itself."""
    found = {name for name, _ in foreign_imports(tree)}
    found |= {name for name, *_ in accesses(tree)}
    found |= {name for name, _ in texts(tree)}
    return found - set(defined(tree))


def uses(source: str, own: set[str], of_libraries: set[str]) -> list[tuple[str, int]]:
    """The private names of libraries that a file uses, with the lines.

    Args:
        source: the file's text.
        own: the private names that the package defines.
        of_libraries: those that are known to be a library's (what compat/ uses). A name may be
            both: then it is the package's on ``self``, and the library's elsewhere.
    """
    tree = ast.parse(source)
    found = list(foreign_imports(tree))
    for name, line, is_own in accesses(tree):
        if name not in own or (name in of_libraries and not is_own):
            found.append((name, line))
    for name, line in texts(tree):
        is_foreign = name in of_libraries and name not in own
        if is_foreign or name.startswith("aten::"):
            found.append((name, line))
    return [(name, line) for name, line in found if name not in DOCUMENTED]


def files() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(ROOT.rglob("*.py"))
    }


def names() -> tuple[set[str], set[str]]:
    """The private names that the package defines, and those of libraries that compat/ uses."""
    own: set[str] = set()
    of_libraries: set[str] = set()
    for path, source in files().items():
        if path.startswith("compat/"):
            of_libraries |= used_in(ast.parse(source))
        else:
            own.update(filter(is_private, defined(ast.parse(source))))
    return own, of_libraries


def test_private_names_of_libraries_are_used_in_compat_only() -> None:
    own, of_libraries = names()
    assert {"_cdata", "_buffers", "_signal_connector", "_forward_cache"} <= of_libraries
    found = {
        f"{path} {name}": line
        for path, source in files().items()
        if not path.startswith("compat/")
        for name, line in uses(source, own, of_libraries)
    }
    new = [f"{use} (line {line})" for use, line in found.items() if use not in EXCEPTIONS]
    assert not new, (
        "Put each behind a function of lightning_pipeshift/compat/, with a test in"
        " tests/unit/compat/, or use a public name:\n" + "\n".join(new)
    )
    assert set(EXCEPTIONS) <= set(found), "exceptions that are no longer needed"


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C.DisableTorchFunction()",
        "from torch.utils import _pytree",
        "from torch.utils._pytree import tree_map",
        "import torch.utils._pytree as pytree",
        "def f():\n    from lightning.pytorch.trainer.connectors import _x",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_store()",
        "trainer._signal_connector.received_sigterm = True",
        "metric._computed = None",
        "class A(Strategy):\n    def f(self):\n        return self._lightning_module",
        "getattr(module, '_trainer')",
        "vars(module)['_forward_hooks']",
        "name == 'aten::_local_scalar_dense'",
        "module._buffers",
        "tensor._version",
    ],
)
def test_a_use_is_found(source: str) -> None:
    # The package has names `_buffers` and `_version` of its own, too.
    of_libraries = {"_trainer", "_forward_hooks", "_buffers", "_version"}
    assert uses(source, {"_buffers", "_version"}, of_libraries)


@pytest.mark.parametrize(
    "source",
    [
        "from lightning_pipeshift.plan.inputs import _x",
        "from .plan import _x",
        "from __future__ import annotations",
        "class A:\n    def f(self):\n        return self._buffers",
        "class A(B):\n    def f(self):\n        return super()._buffers()",
        "other._own",
        "_, x = pair",
        "os._exit(1)",
        "pair._replace(a=1)",
        "text = '_unknown'",
        "__slots__ = ('_version',)",
    ],
)
def test_what_is_none_is_not_found(source: str) -> None:
    own = {"_own", "_buffers", "_version"}
    assert not uses(source, own, {"_buffers", "_version"})


def classes() -> Iterator[type]:
    """The classes of the package, those inside of functions left out."""
    for module in pkgutil.walk_packages([str(ROOT)], f"{PACKAGE}."):
        if module.name.endswith("__main__"):
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(value) and value.__module__ == module.name:
                yield value


def overridden(kind: type) -> Iterator[str]:
    """The private methods of libraries' classes that a class overrides."""
    bases = [base for base in kind.__mro__ if base.__module__.split(".")[0] in LIBRARIES]
    for name, value in vars(kind).items():
        is_method = is_private(name) and inspect.isfunction(value)
        if is_method and any(name in vars(base) for base in bases):
            yield f"{kind.__name__}.{name}"


def test_what_is_overridden_is_listed() -> None:
    assert {name for kind in classes() for name in overridden(kind)} == set(OVERRIDDEN)
