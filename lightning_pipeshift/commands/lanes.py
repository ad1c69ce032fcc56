"""``pipeshift doctor --lanes``: prints, checks or runs what makes a Linux host carry urgent packets
first.

The host's packets leave in the order of their lanes (HTB, Linux's hierarchical token bucket): what
a lane does not use, the next one gets. Each lane has a floor, so none starves. Imports neither
torch nor Lightning.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from lightning_pipeshift.commands.brief_errors import brief_errors
from lightning_pipeshift.errors import ConfigurationError, explained
from lightning_pipeshift.plan.inputs.traffic import TrafficClass, with_marks

_DEVICES: Final = Path("/sys/class/net")
# HTB's handle and classes. A lane's class is numbered from 10 on.
_ROOT, _LINK, _FIRST = "1:", "1:1", 10
_UNITS: Final = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# HTB wants a burst of at least what passes between two ticks of the kernel's clock, at 100 Hz.
_TICK_SECONDS: Final = 0.01
_LEAST_BURST_BYTES: Final = 16 * 1024


def parse_rate(text: str) -> float:
    """A rate in bits per second.

    Args:
        text: as ``tc`` writes it, ``"10gbit"`` or ``"200mbit"``.

    Raises:
        ConfigurationError: it is not a rate.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", text.strip().lower())
    if found is None or not float(found[1]):
        raise ConfigurationError(
            f"the rate {text!r}: write a number and a unit, as in 10gbit, 200mbit or 500kbit"
        )
    return float(found[1]) * _UNITS[found[2]]


def rate_of(device: str, given: str | None) -> float:
    """The rate of a network device in bits per second.

    Args:
        device: its name.
        given: by the user; ``None``: as the device reports it.

    Raises:
        ConfigurationError: there is no such device, or it does not report a rate.
    """
    if not (_DEVICES / device).exists():
        known = sorted(path.name for path in _DEVICES.glob("*") if path.name != "lo")
        raise ConfigurationError(
            f"there is no network device {device!r} here; there are {', '.join(known) or 'none'}"
        )
    if given is not None:
        return parse_rate(given)
    try:
        megabits = int((_DEVICES / device / "speed").read_text())
    except (OSError, ValueError):
        megabits = -1
    if megabits <= 0:
        raise ConfigurationError(
            f"the device {device!r} does not report the rate of its link: pass it, as in --rate"
            " 10gbit. A rate above the link's own makes the network card's queue decide, which"
            " knows no lanes."
        )
    return megabits * 1e6


def commands(
    device: str, bits_per_second: float, floor: float, classes: Sequence[TrafficClass]
) -> list[str]:
    """The ``tc`` commands that make a host honour the lanes.

    Args:
        device: the name of the network device.
        bits_per_second: of its link.
        floor: the part of the link that each lane, and all other traffic, has for certain.
        classes: of the lanes, the most urgent first; the last one comes after other traffic.
    """
    burst = max(_LEAST_BURST_BYTES, round(bits_per_second / 8 * _TICK_SECONDS))
    whole = f"{bits_per_second:.0f}bit"
    # What has no mark comes before bulk, as it would on any network.
    entries: list[TrafficClass | None] = [*classes[:-1], None, classes[-1]]
    other = _FIRST + len(classes) - 1
    found = [_removal(device), f"tc qdisc add dev {device} root handle {_ROOT} htb default {other}"]
    found.append(
        f"tc class add dev {device} parent {_ROOT} classid {_LINK} htb"
        f" rate {whole} ceil {whole} burst {burst} cburst {burst}"
    )
    for place, traffic in enumerate(entries):
        found.append(
            f"tc class add dev {device} parent {_LINK} classid 1:{_FIRST + place} htb"
            f" rate {bits_per_second * floor:.0f}bit ceil {whole} prio {place}"
            f" burst {burst} cburst {burst}"
        )
        if traffic is not None:
            found += [
                f"tc filter add dev {device} parent {_ROOT} protocol {protocol} prio"
                f" {2 * place + number} u32 match {field} {traffic.tos:#04x} 0xfc"
                f" flowid 1:{_FIRST + place}"
                for number, (protocol, field) in enumerate(
                    [("ip", "ip tos"), ("ipv6", "ip6 priority")], start=1
                )
            ]
    return found


def _removal(device: str) -> str:
    """Fails where the device has the system's own queue."""
    return f"tc qdisc del dev {device} root"


def missing(device: str, classes: Sequence[TrafficClass]) -> list[str]:
    """The reasons why a host does not honour the lanes; empty if it does.

    Args:
        device: the name of the network device.
        classes: of the lanes.
    """
    roots = [
        one
        for one in json.loads(_tc(f"tc -j qdisc show dev {device}") or "[]")
        if one.get("root") and one.get("kind") == "htb"
    ]
    if not roots:
        return [f"{device} has no HTB at its root"]
    filters = _tc(f"tc filter show dev {device} parent {_ROOT}")
    priority_of = {
        found[1]: int(found[2])
        for found in re.finditer(
            r"class htb (1:\w+) .*?prio (\d+)", _tc(f"tc class show dev {device}")
        )
    }
    lacking, last = [], -1
    for traffic in classes:
        # A filter's flow, and then the value and mask of the header's first word.
        mark = rf"match 00{traffic.tos:02x}0000/00fc0000"
        found = re.search(rf"flowid (1:\w+)[^\n]*\n\s*{mark}", filters)
        if found is None:
            lacking.append(f"no filter of {device} matches the mark of lane {traffic.name}")
        elif priority_of.get(found[1], -1) <= last:
            lacking.append(f"on {device}, lane {traffic.name} does not come after more urgent ones")
        else:
            last = priority_of[found[1]]
    return lacking


def _tc(command: str) -> str:
    if shutil.which("tc") is None:
        raise ConfigurationError(
            "the program `tc` is not here: install iproute2, or run this command on the host"
            " that is to be changed"
        )
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigurationError(
            f"`{command}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}. The"
            " kernel needs sch_htb and cls_u32, and changes need root."
        )
    return done.stdout


def _mark(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not value.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not LANE=DSCP, as in pipeline=46")
    return name, int(value)


def parser() -> argparse.ArgumentParser:
    """That of the options, for the help of ``pipeshift doctor``, too."""
    made = argparse.ArgumentParser(
        prog="pipeshift doctor",
        description="Prints the tc commands (HTB) that make this Linux host send the packets of"
        " urgent lanes first, and says whether it already does. Changes nothing without --apply."
        " Switches on the way have settings of their own for the same marks.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--lanes", dest="dev", required=True, metavar="DEVICE", help="eth0 for example"
    )
    made.add_argument("--rate", help="of its link, 10gbit for example; by default as it reports")
    made.add_argument(
        "--floor",
        type=float,
        default=0.02,
        help="the part of the link that each lane has for certain (default: %(default)s)",
    )
    made.add_argument(
        "--mark",
        type=_mark,
        action="append",
        default=[],
        metavar="LANE=DSCP",
        help="another mark for a lane, as in Communication(lane_marks=...)",
    )
    made.add_argument("--apply", action="store_true", help="run the commands (as root)")
    return made


def main() -> None:
    """Runs the command, by ``sys.argv``."""
    with brief_errors():
        print(report(**vars(parser().parse_args(sys.argv[2:]))))


def report(
    dev: str, rate: str | None, floor: float, mark: Sequence[tuple[str, int]], apply: bool
) -> str:
    """The text that the command prints.

    Args:
        dev: the name of the network device.
        rate: that of its link, as text.
        floor: see :func:`commands`.
        mark: other marks, by lane.
        apply: whether the commands are run.

    Raises:
        ConfigurationError: an argument is not allowed, or a command failed.
    """
    marks: Mapping[str, int] = dict(mark)
    classes = with_marks(marks)
    most = 1 / (len(classes) + 1)
    if not 0 < floor <= most:
        raise ConfigurationError(
            f"--floor {floor:g}: allowed is more than 0 and at most {most:.3f}, as there are"
            f" {len(classes)} lanes and other traffic"
        )
    lines = commands(dev, rate_of(dev, rate), floor, classes)
    if apply:
        with suppress(ConfigurationError):
            _tc(lines[0])
        for line in lines[1:]:
            _tc(line)
    lacking = missing(dev, classes) if shutil.which("tc") else ["the program `tc` is not here"]
    state = "honours the lanes" if not lacking else f"does not honour the lanes: {lacking[0]}"
    table = [f"#   {one.name:<12} DSCP {one.dscp:<3} {one.carries}" for one in classes]
    return "\n".join(
        [
            f"# {dev} {state}.",
            "# Lanes, the most urgent first; traffic without a mark comes before the last:",
            explained("\n".join(table)),
            *(["# Done:"] if apply else ["# To make it so, on each host, as root (or --apply):"]),
            *lines,
            f"# To undo it: {_removal(dev)}",
        ]
    )
