"""The texts in a module of Python."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def text_of(node: ast.Constant | ast.JoinedStr) -> str:
    """A text as it stands in the code, with "0" for what is put into it."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "0" for part in parts)


def is_docstring(node: ast.AST) -> bool:
    """Whether a statement is a text by itself: the docstring of something."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def texts_in(node: ast.AST) -> Iterator[str]:
    """All texts in code but docstrings."""
    if is_docstring(node):
        return
    if isinstance(node, ast.Constant | ast.JoinedStr):
        yield text_of(node)
        return
    for child in ast.iter_child_nodes(node):
        yield from texts_in(child)
