"""Runs the commands of a page as its reader's shell would, in forked processes.

A fresh interpreter takes six seconds to import torch and Lightning, so ``pipeshift`` and
``torchrun`` call here what they call there. What is not run is at least looked at: ``bash -n``
reads it, and the options of ``pipeshift`` commands have to be in their help.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from lightning_pipeshift.testing.ranks import run_ranks
from tests import ROOT
from tests.project.pages import reader

# Commands whose figures or options need no rank but the one that runs them.
_ALONE = {"check", "export", "move", "doctor", "timeline"}


class CommandError(AssertionError):
    """A page shows a command that does not work."""


def commands_of(text: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The commands of a block with the environment that it has set before them."""
    environment: dict[str, str] = {}
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in joined.split("\n"):
        own = dict(environment)
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word in ("&&", ";", "&"):
                if words[:1] == ["export"]:
                    environment |= dict(each.split("=", 1) for each in words[1:])
                elif words:
                    yield words, own
                own, words = dict(environment), []
            elif not words and re.match(r"[A-Z_]+=", word):
                name, _, value = word.partition("=")
                own[name] = value
            else:
                words.append(word)


def run_block(text: str, folder: Path) -> None:
    """Runs the commands of a block.

    Raises:
        CommandError: one is unknown, or does not exist.
        RanksFailed: one has failed.
    """
    nodes: list[list[str]] = []
    for words, environment in commands_of(text):
        words = [os.path.expandvars(word) for word in words]
        if words[0] == "torchrun":
            nodes.append(words)
            options = _torchrun(words)
            # The block has the line of each host: the job runs when the last one is there.
            if len(nodes) == int(options.nnodes):
                num_ranks = int(options.nnodes) * int(options.nproc_per_node)
                per_host = str(options.nproc_per_node)
                environment |= {"GLOO_SOCKET_IFNAME": "lo", "RANKS_PER_HOST": per_host}
                _run(script, num_ranks, [options.training_script], environment, folder)
                nodes.clear()
        elif words[0] == "pipeshift":
            _run(pipeshift, _num_ranks(words), words[1:], environment, folder)
        elif words[:1] == ["python"]:
            _look_at_python(words[1:])
        else:
            raise CommandError(f"`{shlex.join(words)}`: say why it is not run, in a comment")
    if nodes:
        raise CommandError(f"{len(nodes)} lines of torchrun, and not one for each host")


def look_at(text: str, folder: Path) -> None:
    """Looks at a block that is not run."""
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    if done.returncode:
        raise CommandError(done.stderr)
    for words, _ in commands_of(text):
        if words[0] == "pipeshift" and len(words) > 1:
            _look_at_options(words, folder)
        elif words[0] == "python":
            _look_at_python(words[1:])
        elif words[0] == "torchrun":
            _torchrun(words)


def _look_at_options(words: list[str], folder: Path) -> None:
    (shown,) = run_ranks(helped, 1, words[1], cwd=folder)
    for word in words[2:]:
        option = word.split("=")[0]
        if option.startswith("--") and not re.search(rf"{re.escape(option)}\b", shown):
            raise CommandError(f"`pipeshift {words[1]}` has no option {option}")


def _look_at_python(words: list[str]) -> None:
    """A script of the repository: it is there, and has these options. Examples are run by their
    own tests, and benchmarks take minutes.
    """
    if words[:1] == ["-m"]:
        path = ROOT / f"{words[1].replace('.', '/')}.py"
        if words[1] in ("pytest", "build", "venv", "pip"):
            return
        words = words[1:]
    else:
        path = ROOT / words[0]
    if not path.is_file():
        raise CommandError(f"there is no {path.relative_to(ROOT)}")
    source = path.read_text()
    ast.parse(source)
    for word in words[1:]:
        name = word.split("=")[0].removeprefix("--")
        if word.startswith("--") and not re.search(rf"\b{name.replace('-', '[-_]')}\b", source):
            raise CommandError(f"{path.relative_to(ROOT)} has no option --{name}")


def _torchrun(words: list[str]):
    from torch.distributed.run import get_args_parser

    return get_args_parser().parse_args(words[1:])


def _num_ranks(words: list[str]) -> int:
    if words[1] in _ALONE or "--cluster" in words or "--help" in words:
        return 1
    return 2  # the reader's configuration


def _run(
    function, num_ranks: int, words: list[str], environment: Mapping[str, str], folder: Path
) -> None:
    run_ranks(function, num_ranks, words, cwd=folder, env=environment)


# --- in a rank ---


def pipeshift(words: list[str]) -> None:
    """The ``pipeshift`` command."""
    import pipeshift_command

    sys.path.insert(0, os.getcwd())
    sys.argv = ["pipeshift", *words]
    with contextlib.suppress(SystemExit) as _:
        try:
            pipeshift_command.main()
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise RuntimeError(f"exit code {ended.code}") from ended
            raise


def script(words: list[str]) -> None:
    """A script, as ``python`` and ``torchrun`` run it."""
    host, local_rank = divmod(int(os.environ["RANK"]), int(os.environ["RANKS_PER_HOST"]))
    os.environ |= {
        "LOCAL_RANK": str(local_rank),
        "NODE_RANK": str(host),
        "GROUP_RANK": str(host),
        "LOCAL_WORLD_SIZE": os.environ["RANKS_PER_HOST"],
    }
    reader.become()
    sys.path.insert(0, os.getcwd())
    sys.argv = words
    text = Path(words[0]).read_text().replace('accelerator="gpu"', 'accelerator="cpu"')
    exec(compile(text, words[0], "exec"), {"__name__": "__main__"})


def helped(command: str) -> str:
    """The help of a ``pipeshift`` command."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        pipeshift([command, "--help"])
    return said.getvalue()
