"""The names that user code uses: in the code that runs, and in the functions that it calls."""

from __future__ import annotations

import dis
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

LIBRARIES = frozenset(
    {"lightning", "lightning_fabric", "lightning_pipeshift", "logging", "pytorch_lightning"}
    | {"torch"}
)
_INSTALLED = tuple({os.path.dirname(os.__file__), *(x for x in sys.path if "-packages" in x)})
_JUMPS = frozenset([*dis.hasjrel, *dis.hasjabs])
Names = frozenset[str]


@cache
def is_user_code(module: str) -> bool:
    """Whether a module of Python, by its name, is user code: neither installed nor ours."""
    if module.partition(".")[0] in LIBRARIES:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if not isinstance(file, str):
        # Of a notebook, say.
        return module == "__main__"
    return not file.startswith(_INSTALLED)


def stack() -> Iterator[tuple[types.CodeType, int]]:
    """The user code that runs now: its code, and at which instruction."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if is_user_code(frame.f_globals.get("__name__", "")):
            yield frame.f_code, frame.f_lasti
        frame = frame.f_back


def modules_of_stack() -> Iterator[str]:
    """The modules of Python whose code runs now."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        yield frame.f_globals.get("__name__", "")
        frame = frame.f_back


def reached(begins: Iterable[str]) -> set[str]:
    """The modules of user code that code of others can get to: by what these have, and by imports
    inside of functions. So what else the process has loaded does not count.
    """
    by_last: dict[str, list[str]] = {}
    for name in list(sys.modules):
        if is_user_code(name):
            by_last.setdefault(name.rpartition(".")[2], []).append(name)
    found: set[str] = set()
    todo = list(begins)
    while todo:
        name = todo.pop()
        module = sys.modules.get(name)
        if name in found or not isinstance(module, types.ModuleType) or not is_user_code(name):
            continue
        found.add(name)
        for x in list(vars(module).values()):
            if isinstance(x, types.ModuleType):
                todo.append(x.__name__)
                continue
            is_named = isinstance(x, type | types.FunctionType)
            todo.append((x if is_named else type(x)).__module__)
            parts = list(vars(x).values()) if isinstance(x, type) else [x]
            for function in (each for part in parts for each in functions_in(part)):
                for each in _imports_of(function.__code__):
                    # An import may be relative: then the name is only the end of the module's.
                    package = [name.rpartition(".")[0]]
                    todo += by_last.get(each.rpartition(".")[2], ()) if each else package
    return found


def by_name(spaces: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """All objects that have each name, from several namespaces."""
    found: dict[str, list[Any]] = {}
    for space in spaces:
        for name, x in list(space.items()):
            found.setdefault(name, []).append(x)
    return found


def functions_in(x: Any) -> Iterator[types.FunctionType]:
    """The functions of user code that something in a class or a module stands for."""
    if isinstance(x, type):
        x = vars(x).get("__init__") if is_user_code(x.__module__) else None
    if isinstance(x, types.FunctionType) and is_user_code(x.__module__):
        yield x
    for name in ("fget", "fset", "__func__", "__wrapped__", "func"):
        inner = vars(x).get(name) if isinstance(x, types.FunctionType) else getattr(x, name, None)
        if isinstance(inner, types.FunctionType):
            yield from functions_in(inner)


def with_called(names: set[str], known: Mapping[str, list[Any]]) -> set[str]:
    """Names, with those in all functions and methods of these names."""
    found, todo = set(names), list(names)
    while todo:
        for x in known.get(todo.pop(), ()):
            for function in functions_in(x):
                new = names_of(function.__code__) - found
                found |= new
                todo += new
    return found


@cache
def _imports_of(code: types.CodeType) -> Names:
    """The modules that code imports when it runs; "" for its own package."""
    found = {x.argval for x in dis.get_instructions(code) if x.opname == "IMPORT_NAME"}
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            found |= _imports_of(each)
    return frozenset(found)


@cache
def names_of(code: types.CodeType) -> Names:
    """The names in code: of globals, attributes, variables of enclosing functions, and texts that
    may be names.
    """
    found = {*code.co_names, *code.co_freevars}
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            found |= names_of(each)
        elif isinstance(each, str) and each.isidentifier():
            found.add(each)
    return frozenset(found)


@cache
def names_from(code: types.CodeType, offset: int, is_later: bool) -> Names:
    """:func:`names_of` the instructions behind the begin of a statement, or up to its end."""
    instructions = list(dis.get_instructions(code))
    later = instructions_from(code, offset)
    if len(later) == len(instructions):
        return names_of(code)
    chosen = later if is_later else [x for x in instructions if x.offset <= offset]
    found: set[str] = set()
    for one in chosen:
        if isinstance(one.argval, str) and one.argval.isidentifier():
            found.add(one.argval)
        elif isinstance(one.argval, types.CodeType):
            found |= names_of(one.argval)
    return frozenset(found)


@cache
def instructions_from(code: types.CodeType, offset: int) -> list[dis.Instruction]:
    """The instructions from the begin of a statement on, given the offset of one in it: what it
    calls at its end is got first. All of them if they lead back.
    """
    instructions = list(dis.get_instructions(code))
    ends = ("STORE_", "POP_", "RESUME")
    begins = [x.offset for x in instructions if x.offset < offset and x.opname.startswith(ends)]
    later = [x for x in instructions if x.offset > max(begins, default=-1)]
    leads_back = any(x.opcode in _JUMPS and x.argval < x.offset for x in later)
    return instructions if leads_back else later
