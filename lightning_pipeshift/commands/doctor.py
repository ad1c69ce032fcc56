"""``pipeshift doctor``: what is here before a first run, and what to do about it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from lightning_pipeshift.commands import lanes
from lightning_pipeshift.commands.host_findings import Finding, host_findings
from lightning_pipeshift.commands.link_findings import link_findings
from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.files import printable
from lightning_pipeshift.host import host_names, network_host

_TIMEOUT: Final = timedelta(seconds=60)
_ALONE: Final = Finding(
    "network",
    "not looked at: this process is alone",
    "on each host: `torchrun --nnodes 2 --nproc-per-node 1 --node-rank 0|1 --master-addr HOST"
    " --master-port 29500 -m lightning_pipeshift doctor`",
)


def main(arguments: Sequence[str]) -> None:
    """Runs ``pipeshift doctor``, alone or on every rank that torchrun has started."""
    argparse.ArgumentParser(
        prog="pipeshift doctor",
        description="Shows the devices, the software and the limits of this host, and what to do "
        "about each. Under torchrun it looks at all hosts, their clocks and the links between "
        "them.",
        epilog=lanes.parser().format_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(list(arguments))
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        print(report({host_names([network_host()])[0]: host_findings()}, [_ALONE]))
        return
    try:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"The ranks do not find each other: {error}. Look whether MASTER_ADDR"
            f" ({os.environ.get('MASTER_ADDR')}) is the first host's address, whether a firewall"
            f" closes the port MASTER_PORT ({os.environ.get('MASTER_PORT')}), and whether"
            " GLOO_SOCKET_IFNAME names the interface between the hosts."
        ) from error
    try:
        count = dist.get_world_size()
        identities: list[str] = [""] * count
        dist.all_gather_object(identities, network_host())
        names = host_names(identities)
        found: list[list[Finding]] = [[] for _ in range(count)]
        dist.all_gather_object(found, host_findings())
        links = link_findings(names)
        if dist.get_rank() == 0:
            # One rank speaks for each host.
            print(report(dict(zip(reversed(names), reversed(found), strict=True)), links))
    finally:
        dist.destroy_process_group()


def report(hosts: dict[str, list[Finding]], links: list[Finding]) -> str:
    """The text that the command prints: lines with something to do are marked.

    Args:
        hosts: the findings of each host, by its name.
        links: those between the ranks.
    """
    lines = []
    for name, findings in (*sorted(hosts.items()), ("between the ranks", links)):
        lines += ["", f"── {name} ".ljust(100, "─")]
        width = max((len(each.what) for each in findings), default=0)
        for each in findings:
            lines.append(f"{'!' if each.advice else ' '} {each.what:<{width}}  {each.found}")
            if each.advice:
                lines.append(f"  {'':<{width}}  → {each.advice}")
    todo = sum(bool(each.advice) for part in (*hosts.values(), links) for each in part)
    end = f"Do what stands below the lines with `!` ({todo} in all)." if todo else "All is well."
    lines += ["", end]
    return printable("\n".join(lines[1:]))
