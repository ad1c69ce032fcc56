"""Chooses the numbers of virtual machines and of microbatches, where the user leaves them to the
planner.

They change the bits of a run's results, so they are chosen once, before its first batch. All
virtual machines get equal shares of the batch, unless the user has given others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from lightning_pipeshift.errors import BudgetError, ConfigurationError, PlanError, without_stack
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.policies import Policy
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.inputs.topology import Topology, topology_of
from lightning_pipeshift.plan.search.grouping_search import fewest
from lightning_pipeshift.plan.search.groupings import candidate_counts
from lightning_pipeshift.plan.search.options import Options
from lightning_pipeshift.plan.search.planner import arrange
from lightning_pipeshift.plan.search.request import Arrangement, PlanRequest
from lightning_pipeshift.text import count_text


@dataclass(frozen=True, slots=True)
class RunNumbers:
    """The numbers of virtual machines and microbatches that a checkpoint holds."""

    virtual_machines: int
    microbatches: int


@dataclass(frozen=True, slots=True)
class ChosenNumbers:
    """A planner's choice.

    Args:
        topology: the ranks of each virtual machine.
        microbatches: the number of slices of a virtual machine's batch.
        message: the choice and its reason, for the user.
    """

    topology: Topology
    microbatches: int
    message: str


def choose_numbers(
    profile: Profile,
    cluster: Cluster,
    options: Options,
    topology: Topology,
    batch_samples: float,
    policy: Policy | None = None,
    saved: RunNumbers | None = None,
) -> ChosenNumbers:
    """The numbers with the most samples per second, by the simulator. Of numbers that are nearly
    as good, the smallest.

    Args:
        profile: of the model.
        cluster: the machines.
        options: the user's; ``"auto"`` in them leaves a number to the planner.
        topology: the virtual machines for any other number of them.
        batch_samples: of a virtual machine's batch.
        policy: decides how saved tensors are handled; ``None`` without ``MemoryCompression``.
        saved: the numbers of the checkpoint with which a run continues: these are kept.

    Raises:
        ConfigurationError: the saved numbers are not possible on these machines.
        PlanError: no numbers have a plan that fits in memory.
        BudgetError: likewise, with a policy.
    """
    request = replace(options.request(batch_samples, policy), may_share=False)
    if options.virtual_machines != "auto":
        request = replace(
            request,
            virtual_machines=topology.ranks,
            may_reorder=options.may_reorder,
        )
    elif saved is not None:
        request = replace(request, virtual_machines=saved.virtual_machines)
    if saved is not None and not isinstance(options.microbatches, int):
        request = replace(request, microbatches=saved.microbatches)
    found: dict[int, Arrangement] = {}
    errors: list[PlanError | BudgetError] = []
    for each in _requests(request, cluster, options, saved):
        try:
            best = arrange(profile, cluster, each)
            found[len(best.ranks)] = best
        except (PlanError, BudgetError) as error:
            errors.append(without_stack(error))
    if not found and saved is not None:
        raise ConfigurationError(
            f"The checkpoint is of a run with {_machines(saved.virtual_machines)} and"
            f" microbatches={saved.microbatches}, which the planner chose. A run that continues it"
            f" keeps these numbers, as results depend on them; but on these {cluster.num_ranks}"
            f" devices they are not possible: {str(errors[0]).rstrip('.')}. Use other devices, or"
            " give numbers of your own instead of 'auto': then the results are no longer those of"
            " one run."
        ) from errors[0]
    if not found:
        raise errors[0]
    rates = {count: best.samples_per_second for count, best in found.items()}
    count = fewest(rates, request.effort.worth_changing)
    ranks = Topology(found[count].ranks)
    if options.virtual_machines != "auto":
        ranks = topology
    elif options.is_asynchronous:
        # What the first rank decides travels down from the first stage on.
        ranks = topology_of(count, cluster.devices, options.depths)
    microbatches = found[count].microbatches
    if options.microbatches is None and saved is None:
        microbatches = options.num_microbatches(ranks.stages_per_vm)
    samples = None if saved is not None else batch_samples
    return ChosenNumbers(
        ranks, microbatches, _message(ranks, microbatches, options, rates, samples)
    )


def _requests(
    request: PlanRequest, cluster: Cluster, options: Options, saved: RunNumbers | None
) -> Iterator[PlanRequest]:
    """One request for each number of virtual machines."""
    is_usual = options.microbatches is None and saved is None
    counts = candidate_counts(cluster.devices, request.effort)
    if request.num_virtual_machines is not None:
        counts = (request.num_virtual_machines,)
    elif cluster.num_ranks > request.effort.stages and not is_usual:
        # One search for all numbers leaves out those that cannot be the best.
        yield request
        return
    for count in counts:
        each = request
        if request.ranks is None:
            each = replace(each, virtual_machines=count)
        if is_usual:
            depth = math.ceil(cluster.num_ranks / count)
            each = replace(each, microbatches=options.num_microbatches([depth]))
        yield each


def _message(
    topology: Topology,
    microbatches: int,
    options: Options,
    rates: Mapping[int, float],
    samples: float | None,
) -> str:
    """The choice and its reason.

    Args:
        topology: the ranks of each virtual machine.
        microbatches: the number of slices.
        options: the user's.
        rates: samples per second, by the number of virtual machines.
        samples: of a virtual machine's batch; ``None`` if the numbers are a checkpoint's.
    """
    count = topology.num_virtual_machines
    words = []
    if options.virtual_machines == "auto":
        ranks = ", ".join(str(list(machine)) for machine in topology.ranks)
        words.append(f"virtual_machines='auto' is {count} (ranks {ranks})")
    if options.microbatches == "auto":
        words.append(f"microbatches='auto' is {microbatches}")
    elif options.microbatches is None and microbatches > 1:
        words.append(f"microbatches={microbatches} is the default for so many stages")
    if samples is None:
        return f"{' and '.join(words)}, as in the run that saved the checkpoint."
    others = [
        f"{rates[other]:.4g} with {_machines(other)}" for other in sorted(rates) if other != count
    ]
    compared = ", ".join([f"{rates[count]:.4g} samples per second", *others])
    return (
        f"{' and '.join(words)}: by a short measurement of layers, devices and links,"
        f" {compared}. A step has {samples * count:g} samples. Checkpoints hold these numbers; to"
        " repeat the run without one, give them instead of 'auto'."
    )


def _machines(count: int) -> str:
    return count_text(count, "virtual machine")
