"""The README and the pages of ``docs``: their code runs, their commands exist, their links lead
somewhere.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from benchmarks import pictures
from lightning_pipeshift.testing.ranks import run_ranks
from tests import ROOT
from tests.project.pages import commands, features, reader
from tests.project.pages.blocks import Block, blocks_of

PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
)
LANGUAGES = {"python", "bash", "yaml", "json", "text", "ini", "dockerfile", ""}


def run_python(name: str) -> None:
    """Runs a page's Python in this rank."""
    reader.become()
    sys.path.insert(0, str(Path.cwd()))
    importlib.import_module(name)
    reader.finish()


def num_ranks(block: Block) -> int | None:
    """The devices that a block's Trainer has; None if it makes none."""
    found = re.search(r"devices=(\d+)", block.text)
    nodes = re.search(r"num_nodes=(\d+)", block.text)
    return int(found[1]) * (int(nodes[1]) if nodes else 1) if found else None


def run_python_of(blocks: Sequence[Block], folder: Path) -> None:
    """Runs a page's Python: once for each number of devices, with what needs no device."""
    testing = [block for block in blocks if re.search(r"^def test_", block.text, re.MULTILINE)]
    counts = {num_ranks(block) for block in blocks if block not in testing}
    for count in sorted(count or 1 for count in counts if count or counts == {None}):
        chosen = [
            block for block in blocks if block not in testing and num_ranks(block) in (count, None)
        ]
        name = written(chosen, folder, f"page_on_{count}")
        run_ranks(run_python, count, name, cwd=folder)
    for block in testing:
        name = written([block], folder, f"page_line_{block.line}")
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(folder)
            module = importlib.import_module(name)
            for test in [value for key, value in vars(module).items() if key.startswith("test_")]:
                test()


def written(blocks: Sequence[Block], folder: Path, name: str) -> str:
    """Writes a module of some blocks, each at its line of the page."""
    lines = ["from tests.project.pages.reader import *; model, data = MyModel(), MyDataModule()"]
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.text.replace('accelerator="gpu"', 'accelerator="cpu"').rstrip().split("\n")
    (folder / f"{name}.py").write_text("\n".join(lines) + "\n")
    return name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_page_shows_runs(path: Path, tmp_path: Path) -> None:
    blocks = list(blocks_of(path))
    assert {block.language for block in blocks} <= LANGUAGES
    reader.prepare(tmp_path, ROOT)
    for block in blocks:
        if block.language == "python":
            compile(block.text, f"{path.name}:{block.line}", "exec")
        if block.language == "yaml":
            yaml.safe_load(block.text)
        if block.title:
            (tmp_path / block.title).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.title).write_text(block.text)
    run_python_of(
        [b for b in blocks if b.language == "python" and not (b.title or b.reason)], tmp_path
    )
    for block in blocks:
        if block.language == "bash" and not block.title:
            try:
                (commands.look_at if block.reason else commands.run_block)(block.text, tmp_path)
            except Exception as error:
                raise AssertionError(f"{path.name}, line {block.line}: {error}") from error


def test_the_page_on_lightning_is_that_of_the_tests() -> None:
    rows = features.features()
    assert {row.group for row in rows} == set(features.GROUPS)
    assert features.PAGE.read_text() == features.page(features.PAGE.read_text(), rows), (
        "run python -m tests.project.pages.features"
    )


def test_a_mark_is_a_row_and_a_group_must_be_known() -> None:
    source = "@pytest.mark.feature('Data', 'a `b`')\n@other\ndef test_it(): ...\ndef test_no(): ..."
    (row,) = features.features_in(source, "test_x.py")
    assert row == ("Data", "a `b`", "test_x.py", "test_it")
    assert "| a `b` | `test_x.py::test_it` |" in features.page(features.PAGE.read_text(), [row])
    with pytest.raises(ValueError, match="'Date' is none of"):
        list(features.features_in(source.replace("'Data'", "'Date'"), "test_x.py"))


def test_the_picture_is_what_its_script_draws() -> None:
    assert pictures.PICTURE.read_text() == pictures.svg()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
