"""The metadata of the package for an index and an installer, and its contents."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from setuptools.command.egg_info import FileList

import lightning_pipeshift
from tests import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# The tools of developers are those that constraints.txt pins, not a range.
WITH_LOWEST_VERSIONS = ("test",)


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_the_version_is_the_same_everywhere() -> None:
    version = project()["version"]
    assert version == lightning_pipeshift.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text()


def requirements() -> Iterator[Requirement]:
    declared = project()
    lines = list(declared["dependencies"])
    for extra in WITH_LOWEST_VERSIONS:
        lines += declared["optional-dependencies"][extra]
    for requirement in map(Requirement, lines):
        if requirement.name != declared["name"]:
            yield requirement


def test_the_lowest_versions_allowed_are_those_that_were_tested() -> None:
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    tested = {canonicalize_name(name): Version(version) for name, version in pins}
    allowed = {
        canonicalize_name(requirement.name): Version(bound.version)
        for requirement in requirements()
        for bound in requirement.specifier
        if bound.operator == ">="
    }
    assert len(allowed) == len(list(requirements())), "each has a lowest version"
    assert allowed == tested


def targets(text: str) -> list[str]:
    """The targets of links in a page of Markdown."""
    patterns = [
        r"\]\(\s*<?([^)\s>]+)",  # [text](target), ![text](target)
        r"^ {0,3}\[[^\]]+\]:\s*<?([^\s>]+)",  # [name]: target
        r"\b(?:href|src)\s*=\s*[\"']([^\"']+)",
    ]
    return [found for pattern in patterns for found in re.findall(pattern, text, re.MULTILINE)]


def test_the_page_of_an_index_has_no_relative_links() -> None:
    """It shows the README alone: a link to another file of the repository leads nowhere."""
    page = (ROOT / project()["readme"]).read_text()
    relative = [target for target in targets(page) if not re.match(r"https?://|mailto:|#", target)]
    assert not relative, "name the file instead: `docs/compatibility.md`"


@pytest.mark.parametrize(
    "line",
    ["[a](b.md)", "![a](b.png)", "[a](<b.md>)", '[a](b.md "c")', "[a]: b.md", '<img src="b.png">'],
)
def test_a_link_is_found(line: str) -> None:
    assert targets(f"some text\n{line}\n")[0].startswith("b.")


def test_the_source_distribution_has_every_file(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a clone, which tells the files of the repository from others")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    kept = {name for name in listed.stdout.split("\0") if (ROOT / name).is_file()}
    assert "lightning_pipeshift/testing/ranks.py" in kept
    monkeypatch.chdir(ROOT)
    distributed = FileList()
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        if line and not line.startswith("#"):
            distributed.process_template_line(line)
    assert not kept - set(distributed.files), "add them to MANIFEST.in"
