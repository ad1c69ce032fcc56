"""Which ranks form each virtual machine, by the user's options and the devices of the ranks."""

from __future__ import annotations

import torch.distributed as dist

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.host import host_names
from lightning_pipeshift.lightning.job import RankPlace
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Device
from lightning_pipeshift.plan.inputs.topology import Topology, topology_of
from lightning_pipeshift.plan.search.options import Options
from lightning_pipeshift.runtime.comm.backends import device_of
from lightning_pipeshift.runtime.comm.lane import gathered
from lightning_pipeshift.runtime.comm.waits import Watched
from lightning_pipeshift.runtime.planning.probe import found_here, with_speeds


class Grouping:
    """Groups the ranks of a job, with the same result in each of its runs.

    Args:
        options: the user's.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.hosts: list[str] | None = None
        """The name of each rank's host; ``None`` before the ranks are connected."""
        self.chosen: Topology | None = None
        """The planner's choice, if it was left to it: overrides the options."""
        # Measured only once: with other speeds a later run might get other virtual machines, and
        # would have to connect the ranks again.
        self._measured: list[Device] | None = None

    def topology(self, place: RankPlace, watched: Watched) -> Topology:
        """Returns the ranks of each virtual machine, in stage order. Every rank calls this.

        Args:
            place: this process.
            watched: makes a context that a failure of another rank ends.

        Raises:
            ConfigurationError: the ranks are not those that the options want.
            PlanError: the devices are not those of the plan.
        """
        devices = gathered(device_of(place.device), dist.group.WORLD, watched)
        hosts = self.hosts = host_names([device.host for device in devices])
        if self._options.groups_devices:
            # Two devices of one kind, as every CPU is here, may be of very different speeds. The
            # ranks have just waited for each other: all compute at once, as in training.
            if self._measured is None:
                mine = found_here(place.device, devices[place.rank])
                self._measured = with_speeds(gathered(mine, dist.group.WORLD, watched))
            devices = self._measured
        plan = self._options.plan
        num_planned = sum(map(len, plan.ranks)) if plan is not None else 0
        if num_planned and num_planned != len(devices):
            raise PlanError(
                f"The plan is for {num_planned} devices (its field 'ranks'), and this run has"
                f" {len(devices)}. Use that number of devices, or make a plan for those there are."
            )
        topology = self.chosen or topology_of(self._options.ranks, devices, self._options.depths)
        if plan is not None:
            _check_kinds(plan, topology, devices, hosts)
        return topology


def _check_kinds(plan: Plan, topology: Topology, devices: list[Device], hosts: list[str]) -> None:
    for ranks, kinds in zip(topology.ranks, plan.kinds, strict=False):
        for stage, (rank, kind) in enumerate(zip(ranks, kinds, strict=True)):
            if devices[rank].kind != kind:
                raise PlanError(
                    f"The plan was made for another cluster: for stage {stage} it has a "
                    f"{kind!r}, and rank {rank} is a {devices[rank].kind!r} (host "
                    f"{hosts[rank]!r}). Make a plan here with `pipeshift plan`, or "
                    "remove its field 'kinds' if you know that it is suitable."
                )
