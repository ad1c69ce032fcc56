"""The ``pipeshift`` command.

It is not in the package, because importing the package imports torch and Lightning, which takes
several seconds: ``pipeshift --help`` and ``pipeshift move``, ``timeline`` and ``doctor --lanes``
need neither, nor does ``plan`` for machines that are described in a file.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types

HELP = """\
usage: pipeshift [-h] [--debug] COMMAND ...

Trains one model across different machines.

commands:
  fit, validate, test, predict
             run a Trainer, as the commands of the same names of a LightningCLI do
  check      train a few steps on one stage and on several, and compare the bits
  plan       measure the model and the devices, and plan without training, or show where
             each device's memory goes
  export     make one file, with the weights of the whole model, of a checkpoint
  move       show which stage owns which layers in a run that is under way, and move some
  timeline   show a step that a run has recorded, and what its plan expected, or write a page
             about the run: plans, step times, stages, memory, lanes
  doctor     look at devices, hosts and the network between them before a run, and make a
             host's network carry urgent packets first

options:
  -h, --help  show this help
  --debug     show the tracebacks of errors

`pipeshift COMMAND --help` shows a command's arguments.
"""


def main() -> None:
    """Runs the command that ``sys.argv`` gives."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    if arguments[:1] in (["-h"], ["--help"]):
        print(HELP, end="")
        return
    if arguments[:1] == ["move"]:
        _leave_out_package_code()
        from lightning_pipeshift.commands.running import main as run
    elif arguments[:1] == ["timeline"]:
        _leave_out_package_code()
        from lightning_pipeshift.commands.timeline import main as run
    elif arguments[:1] == ["doctor"] and _names(arguments, "--lanes"):
        _leave_out_package_code()
        from lightning_pipeshift.commands.lanes import main as run
    elif arguments[:1] == ["plan"] and _names(arguments, "--cluster", "--profile", "-h", "--help"):
        _leave_out_package_code()
        from lightning_pipeshift.commands.planning import command as run
    else:
        from lightning_pipeshift.commands.cli import main as run
    try:
        run()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`head`) has enough. Python would write again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _names(arguments: list[str], *options: str) -> bool:
    """Whether one of some options is among the arguments."""
    return any(word.split("=")[0] in options for word in arguments)


def _leave_out_package_code() -> None:
    """Lets modules of the package be imported without what its ``__init__.py`` imports."""
    name = "lightning_pipeshift"
    if name in sys.modules:
        return
    specification = importlib.util.find_spec(name)
    if specification is not None and specification.submodule_search_locations is not None:
        package = types.ModuleType(name)
        package.__path__ = list(specification.submodule_search_locations)
        sys.modules[name] = package
