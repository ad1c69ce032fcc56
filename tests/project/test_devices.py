"""Nobody but ``devices/`` knows which accelerator there is: CUDA is mentioned there, where NCCL is
chosen, and in what users read.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_pipeshift

ROOT = Path(next(iter(lightning_pipeshift.__path__)))

NCCL = "runtime/comm/backends.py"

# What else mentions CUDA, and why.
EXCEPTIONS = {
    "model/parameters/recorded_code.py cuda": "a method of torch's tensors",
}


def mentions(source: str) -> Iterator[tuple[str, int]]:
    """The names and strings in a file's code that contain the word, but for text in sentences, with
    the lines.
    """
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names = [node.name]
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if " " not in node.value.strip() else []
        for name in names:
            if "cuda" in name.lower():
                yield name, getattr(node, "lineno", 0)


def test_only_the_devices_folder_mentions_cuda() -> None:
    found = {
        f"{path} {name}": line
        for path, source in (
            (file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))
            for file in sorted(ROOT.rglob("*.py"))
        )
        if not path.startswith("devices/") and path != NCCL
        for name, line in mentions(source)
    }
    new = [f"{use} (line {line})" for use, line in found.items() if use not in EXCEPTIONS]
    assert not new, "Ask lightning_pipeshift/devices/ instead:\n" + "\n".join(new)
    assert set(EXCEPTIONS) <= set(found), "exceptions that are no longer needed"


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.synchronize()",
        "from torch import cuda",
        "import torch.cuda as device",
        "device.type == 'cuda'",
        "x.is_cuda",
        "class CudaMarker: ...",
        "f'cuda:{index}'",
    ],
)
def test_a_mention_is_found(source: str) -> None:
    assert list(mentions(source))


def test_text_is_none() -> None:
    assert not list(mentions('"""A GPU of CUDA."""\nraise ValueError(f"CUDA says {error}")'))
