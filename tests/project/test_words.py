""" "Virtual machine" is explained where a reader meets it first: on each page, in each command's
help, and in messages.
"""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_pipeshift import errors
from lightning_pipeshift.commands import check, planning, running
from lightning_pipeshift.errors import explained
from lightning_pipeshift.plan.document.moves import Move
from lightning_pipeshift.step.control_files import Request
from lightning_pipeshift.text import print_at_once
from lightning_pipeshift.timeline.chrome_trace import events_of
from lightning_pipeshift.timeline.recording import Recording
from lightning_pipeshift.timeline.text import draw
from tests import ROOT
from tests.project.texts import is_docstring, text_of
from tests.unit.timeline.test_timeline import rank

PACKAGE = ROOT / "lightning_pipeshift"
USE = re.compile(r"\bvirtual\s+machines?\*{0,2}(?: \d+(?:(?:, | and | to )\d+)*)?", re.IGNORECASE)
EXPLANATION = re.compile(r"\s\((?:one\s+)?replicas?\s+of\s+the\s+pipeline[);]")

# Other texts of these files become part of a message, and what puts it out explains it.
PARTS = {
    "commands/planning.py": "of a help text whose first use is before it",
    "lightning/run_tables.py": "of a log, see `run.py`",
    "model/random/random_streams.py": "of a seed, which nobody reads",
    "plan/search/auto_numbers.py": "of a log",
    "plan/search/measurements.py": "of errors",
    "plan/document/text_plan.py": "of a drawing, whose first use is explained",
    "plan/search/given_partition.py": "of errors",
    "plan/inputs/topology.py": "of errors and logs: a rank's name",
    "plan/inputs/traffic.py": "of a table of lanes",
    "runtime/offload/stage_memory.py": "of errors: a stage's name",
    "runtime/planning/make_plan.py": "of errors",
    "step/checksum.py": "of errors",
    "step/control_files.py": "of an answer",
    "timeline/chrome_trace.py": "of a track's name; that of the first track is explained",
    "timeline/slow_ranks.py": "of a log, and of `pipeshift timeline` below its tables",
    "timeline/text.py": "of a drawing",
}


def is_explained(text: str) -> bool:
    """Whether the first use has its explanation, if there is one."""
    use = USE.search(text)
    return use is None or EXPLANATION.match(text, use.end()) is not None


def page(path: Path) -> str:
    """A page of the documentation, with the part of another file that it includes."""
    text = path.read_text()
    for name, part in re.findall(r'^--8<-- "(.+?):(\w+)"$', text, re.MULTILINE):
        included = re.search(
            rf"\[start:{part}\] -->(.*?)<!-- --8<-- \[end:{part}\]",
            (ROOT / name).read_text(),
            re.DOTALL,
        )
        assert included is not None
        text = text.replace(f'--8<-- "{name}:{part}"', included[1])
    return text


PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_first_use_on_a_page_is_explained(path: Path) -> None:
    assert is_explained(page(path))


def test_pages_use_it() -> None:
    assert sum(USE.search(page(path)) is not None for path in PAGES) > 10


def unexplained(source: str) -> Iterator[str]:
    """The texts of a module with a first use that nothing around them explains: neither an error
    of the package nor :func:`explained`. Docstrings and comments do not count.
    """
    own = {name for name, kind in vars(errors).items() if isinstance(kind, type)} | {"explained"}

    def walk(node: ast.AST, is_inside: bool) -> Iterator[str]:
        if is_docstring(node):
            return
        if isinstance(node, ast.Constant | ast.JoinedStr):
            text = text_of(node)
            if not (is_inside or is_explained(text)):
                yield text
            return
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            is_inside = is_inside or called in own
        for child in ast.iter_child_nodes(node):
            yield from walk(child, is_inside)

    yield from walk(ast.parse(source), False)


def test_messages_are_explained_or_part_of_what_explains_them() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if next(unexplained(path.read_text()), None) is not None
    }
    assert found == set(PARTS), "use `explained`, or say here where the message is explained"


def test_what_counts_as_a_message() -> None:
    source = '"""A virtual machine."""\nprint("the virtual machines")\n'
    assert list(unexplained(source)) == ["the virtual machines"]
    assert list(unexplained('raise PlanError(f"virtual machine {vm} is it")')) == []
    assert list(unexplained('raise OSError(f"virtual machine {vm} is it")')) != []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a virtual machine is it", "a virtual machine (one replica of the pipeline) is it"),
        ("virtual machine 12: no", "virtual machine 12 (one replica of the pipeline): no"),
        ("Virtual machines 0, 2 and 3.", "Virtual machines 0, 2 and 3 (replicas of the pipeline)."),
        (
            "virtual machines 0 to 3, virtual machine 4",
            "virtual machines 0 to 3 (replicas of the pipeline), virtual machine 4",
        ),
        (
            "a virtual machine's batch; each virtual machine has one",
            "a virtual machine's batch; each virtual machine (one replica of the pipeline) has one",
        ),
        ("virtual_machines=2 and no machine", "virtual_machines=2 and no machine"),
    ],
)
def test_the_explanation_follows_the_first_use(text: str, shown: str) -> None:
    assert explained(text) == explained(shown) == shown


def test_errors_explain_it_once_also_in_other_processes() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in kinds:
        if issubclass(kind, errors.PipeShiftError):
            error = kind("virtual machine 1 has no stage")
            assert str(error) == "virtual machine 1 (one replica of the pipeline) has no stage"
            assert str(pickle.loads(pickle.dumps(error))) == str(error)
            assert str(kind(f"{error}, as virtual machine 2")).count("pipeline") == 1


def test_what_is_printed_at_once_explains_it(capfd: pytest.CaptureFixture[str]) -> None:
    print_at_once("Stage 0 of virtual machine 1 (rank 2) is gone.")
    assert is_explained(capfd.readouterr().err)


@pytest.mark.parametrize(
    "command",
    [
        running.move,
        check.main,
        planning.main,
    ],
)
def test_helps_explain_it(command: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        command(["--help"])
    printed = capsys.readouterr().out
    assert "usage:" in printed
    assert is_explained(printed)


def test_timelines_explain_it() -> None:
    record = Recording(4, 1, (rank(0, "F0:0-1 B0:1-3"), replace(rank(1, "F0:0-1 B0:1-3"), vm=1)))
    drawing = draw(record)
    assert USE.search(drawing)
    assert is_explained(drawing)
    names = [e["args"]["name"] for e in events_of(record) if e["name"] == "process_name"]
    assert is_explained(names[0])
    assert USE.search(names[0])


def test_answers_to_requests_explain_it() -> None:
    move = Move(layer="a", stage=1, virtual_machine=0)
    assert is_explained(str(Request(id="1", moves=(move,))))


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_the_first_pages_say_what_sees_a_microbatch(name: str) -> None:
    text = (ROOT / name).read_text()
    for word in ("microbatch", "BatchNorm", "contrastive losses", "mixup"):
        assert word in text
