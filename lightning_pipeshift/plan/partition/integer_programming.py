"""Cuts and recomputation together, exactly: a mixed integer linear programme.

``dynamic_programming`` and ``recomputation`` find the same results some hundred times faster, so
the planner uses them, unless it is asked for ``solver="milp"``. But they require that the choices
of stages are independent. A memory policy with resources that stages share (the host's memory, the
link to it) would violate that, and would need only a few more variables and rows here. Each
implementation tests the other.

Indices: s a stage of S, l a layer of L, b a boundary (before layer b). Variables:

- ``y[s, l]`` for s < S - 1, binary: layer l is on stage s or an earlier one. So ``x[s, l] =
  y[s, l] - y[s - 1, l]`` is 1 if it is on s (with ``y[S - 1, l] = 1`` and ``y[-1, l] = 0``), and
  ``c[s, b] = y[s, b - 1] - y[s, b]`` is 1 if stage s ends at b (with ``y[s, -1] = 1`` and
  ``y[s, L] = 0``).
- ``z[s, l]``, binary: stage s recomputes layer l. Only where that frees memory.
- ``n[s]`` for s < S - 1, from 0 to 1: stage s has layers.
- ``T``: the pace.

Constraints:

1. ``x[s, l] >= 0``: a layer on s or an earlier stage is on s + 1 or an earlier stage, too.
2. ``c[s, b] >= 0`` for 0 < b < L: the layers are in order.
3. ``c[s, b] <= 0`` if b is not allowed.
4. ``n[s] >= x[s, l]``. As n has a cost, it is 1 only for stages with layers.
5. ``z[s, l] <= x[s, l]``.
6. ``sum over l of held[s, l] x[s, l] - freed[s, l] z[s, l] + sum over b of received[b] c[s - 1, b]
   + sent[s, b] c[s, b] + momentary[k] x[s, k] <= usable[s] - batches[s]`` for each layer k, with
   ``held = fixed + in flight * saved``, ``freed = (in flight - 1) * saved - in flight * input +
   outside``, and the memory of a stage's messages if it begins and ends at b
   (:meth:`Workload.memory_bytes`).
7. ``slot[s] + sum over l of forward[s, l] z[s, l] <= T``, with ``slot[s] = sum over l of
   (forward + backward)[s, l] x[s, l] + extra[s] n[s]`` (n is 1 on the last stage).
8. ``sum over b of payload[s, b] c[s, b] <= T``, and the same for the gradients.
9. In an asynchronous pipeline, for stages a < b: ``slots and links from a to b + recomputation on b
   <= (b - a + 1) T`` (:func:`steady_pace`).

Objective: ``passes * sum of all slots and links + paces * T``, which is
:meth:`Workload.estimate`, plus a tiny weight for each second of recomputation: among equal cuts,
the one that recomputes less is chosen.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.cost.workload import Cut, Numbers, Workload

# The weight of a second of recomputation in the objective, in seconds of a step.
_NEXT_TO_NOTHING = 1e-7

# The scale of times and bytes for the solver: it treats 1e-6 as zero, in any unit.
_SIZE = 1e3

_TIMED_OUT = 1

log = logging.getLogger(__name__)

MOST_PLACES = 128
"""The largest product of stages and layers for which users may ask for the integer programme."""


def require_small(num_stages: int, num_layers: int) -> None:
    """Raises PlanError for a pipeline that takes too long to solve."""
    if num_stages * num_layers > MOST_PLACES:
        raise PlanError(
            f"solver='milp' for {num_layers} layers on {num_stages} stages: the integer programme"
            f" is for at most {MOST_PLACES} layers times stages. Use solver='search', whose cuts"
            " are nearly as good, or more virtual machines of fewer stages"
        )


def optimal_cut(workload: Workload) -> Cut:
    """As :func:`joint_optimum`. Raises PlanError if the pipeline is too large, if nothing fits, or
    if nothing was found in time.
    """
    require_small(workload.num_stages, workload.num_layers)
    cut = joint_optimum(workload)
    if cut is None:
        raise PlanError(
            "solver='milp' has found no cut that fits in memory within a minute; solver='search'"
            " says what is lacking"
        )
    return cut


def joint_optimum(workload: Workload, time_limit: float = 60.0) -> Cut | None:
    """The cut and recomputation with the least :meth:`Workload.estimate` of those that fit.

    Args:
        workload: the layers, the stages in their order, and the boundaries that may be cut.
        time_limit: seconds; the best solution so far is then returned, with a warning that it may
            not be the best.

    Returns ``None`` if nothing fits, or nothing was found in time.
    """
    freed = np.maximum(workload.freed_bytes, 0.0)
    again = np.nonzero(freed)
    names = _Names.of(workload, again)
    objective, constraints = _formulated(workload, freed, again, names)
    num_whole = names.y.num_rows + names.z.num_rows
    num_free = names.n.num_rows + 1
    # HiGHS's presolve sometimes fails, and reports that a feasible problem is infeasible.
    for presolve in (True, False):
        result = milp(
            objective,
            constraints=constraints,
            integrality=np.repeat([1, 0], [num_whole, num_free]),
            bounds=Bounds(0.0, np.append(np.ones(num_whole + num_free - 1), np.inf)),
            options={"time_limit": time_limit, "mip_rel_gap": 0.0, "presolve": presolve},
        )
        if result.x is not None:
            cut = _cut_of(workload, result.x, names, again)
            if workload.fits(cut) and workload.is_allowed(cut):
                if result.status == _TIMED_OUT:
                    log.warning(
                        "PipeShift: solver='milp' has not proven within %g s that its cut is the"
                        " best: another may be up to %.1f %% faster, in closed form.",
                        time_limit,
                        100 * result.mip_gap,
                    )
                return cut
        if result.status == _TIMED_OUT:
            break
    return None


def _formulated(
    workload: Workload, freed: Numbers, again: Any, names: _Names
) -> tuple[Numbers, list[LinearConstraint]]:
    """The objective and the constraints, as above."""
    num_stages, num_layers = workload.num_stages, workload.num_layers
    x, c, z, n, pace = names.x, names.c, names.z, names.n, names.pace
    seconds = workload.forward + workload.backward
    extra = workload.forward_extra + workload.backward_extra
    unit = (float(seconds.mean(axis=0).sum() + extra.sum()) or 1.0) / _SIZE
    runs = n.and_then(np.ones(1))
    slots = x.times(_per_stage(seconds / unit)) + runs.times(np.diag(extra / unit))
    recomputed = z.times(_per_stage(workload.forward / unit, again))
    payloads = c.times(_per_stage(workload.payload_seconds / unit))
    gradients = c.times(_per_stage(workload.gradient_seconds / unit))
    held = workload.kept_bytes
    # Messages: a row for what the stage before each link holds, and one for the stage after it.
    sends = c.times(_per_stage(workload.message_bytes[:-1, 0]))
    receives = c.times(_per_stage(np.tile(workload.message_bytes[0, :, 0], (num_stages - 1, 1))))
    peaks = (
        x.times(_per_stage(held))
        - z.times(_per_stage(freed, again))
        + sends.times(np.eye(num_stages, num_stages - 1))
        + receives.times(np.eye(num_stages, num_stages - 1, k=-1))
    )
    byte = _SIZE / (float(held.mean(axis=0).sum()) or 1.0)

    boundaries = np.tile(np.arange(num_layers + 1), num_stages - 1)
    inner = np.flatnonzero((boundaries > 0) & (boundaries < num_layers))
    may = [workload.allowed is None or b in workload.allowed for b in boundaries[inner].tolist()]
    layers_of = np.kron(np.eye(num_stages - 1), np.ones((num_layers, 1)))
    own = again[0] * num_layers + again[1]
    known = np.repeat(np.flatnonzero(np.isfinite(workload.usable_bytes)), num_layers)
    runs_one = np.tile(np.arange(num_layers), len(known) // num_layers)
    momentary = np.diag(workload.momentary_bytes[runs_one])
    # The most for any range, so layers that share weights may have room together and be refused.
    shared_bytes = np.triu(workload.shared_bytes).max()
    room = (workload.usable_bytes - workload.batches_bytes - shared_bytes)[known]
    each_stage, each_link = np.ones((num_stages, 1)), np.ones((num_stages - 1, 1))
    windows = [
        (stage, further)
        for further in range(1, num_stages)
        for stage in range(num_stages - further)
        if workload.objective.is_pace
    ]
    constraints = [
        x.between(0.0, np.inf),  # 1
        c.rows(inner).between(0.0, np.array(may, float)),  # 2 and 3
        (n.times(layers_of) - x.rows(np.arange(len(layers_of)))).between(0.0, np.inf),  # 4
        (x.rows(own) - z).between(0.0, np.inf),  # 5
        (peaks.rows(known) + x.rows(known * num_layers + runs_one).times(momentary))
        .times(np.eye(len(known)) * byte)
        .between(-np.inf, room * byte),  # 6
        (pace.times(each_stage) - slots - recomputed).between(0.0, np.inf),  # 7
        (pace.times(each_link) - payloads).between(0.0, np.inf),  # 8
        (pace.times(each_link) - gradients).between(0.0, np.inf),
        *(  # 9
            (
                pace.times([[further + 1]])
                - slots.rows(np.arange(stage, stage + further + 1)).total()
                - recomputed.rows([stage + further])
                - (payloads + gradients).rows(np.arange(stage, stage + further)).total()
            ).between(0.0, np.inf)
            for stage, further in windows
        ),
    ]
    passes, paces = workload.objective
    objective = (
        passes * (slots.summed() + payloads.summed() + gradients.summed())
        + paces * pace.summed()
        + _NEXT_TO_NOTHING * recomputed.summed()
    )
    return objective, [constraint for constraint in constraints if constraint.A.shape[0]]


def _cut_of(workload: Workload, values: Numbers, names: _Names, again: Any) -> Cut:
    before = values[: names.y.num_rows].reshape(-1, workload.num_layers).round().sum(axis=1)
    bounds = [0, *before.astype(int).tolist(), workload.num_layers]
    recomputed = values[names.y.num_rows :][: names.z.num_rows] > 0.5
    return Cut(
        tuple(end - begin for begin, end in pairwise(bounds)),
        frozenset(again[1][recomputed].tolist()),
    )


@dataclass(frozen=True)
class _Rows:
    """Affine expressions of the variables, one in each row."""

    matrix: Any
    constant: Numbers

    @property
    def num_rows(self) -> int:
        return len(self.constant)

    def __add__(self, other: _Rows) -> _Rows:
        return _Rows(self.matrix + other.matrix, self.constant + other.constant)

    def __sub__(self, other: _Rows) -> _Rows:
        return _Rows(self.matrix - other.matrix, self.constant - other.constant)

    def times(self, factors: Any) -> _Rows:
        """Sums of the rows: one for each row of factors."""
        return _Rows(sparse.csr_array(factors) @ self.matrix, factors @ self.constant)

    def and_then(self, constant: Numbers) -> _Rows:
        """These rows, followed by constants."""
        nothing = sparse.csr_array((len(constant), self.matrix.shape[1]))
        return _Rows(
            sparse.csr_array(sparse.vstack([self.matrix, nothing])),
            np.concatenate([self.constant, constant]),
        )

    def rows(self, chosen: Any) -> _Rows:
        return _Rows(self.matrix[chosen], self.constant[chosen])

    def total(self) -> _Rows:
        return self.times(np.ones((1, self.num_rows)))

    def summed(self) -> Numbers:
        """The factors of the variables in the sum of all."""
        factors: Numbers = self.matrix.sum(axis=0)
        return factors

    def between(self, low: Any, high: Any) -> LinearConstraint:
        return LinearConstraint(self.matrix, low - self.constant, high - self.constant)


@dataclass(frozen=True)
class _Names:
    """The variables with a name in the module's docstring: x is (S * L) rows, c is (S - 1) * (L +
    1).
    """

    y: _Rows
    z: _Rows
    n: _Rows
    pace: _Rows
    x: _Rows
    c: _Rows

    @classmethod
    def of(cls, workload: Workload, again: Any) -> _Names:
        """The variables of a workload: y, z, n and the pace, concatenated."""
        num_links, num_layers = workload.num_stages - 1, workload.num_layers
        lengths = [num_links * num_layers, len(again[0]), num_links, 1]
        variables = sparse.csr_array(sparse.identity(sum(lengths)))
        y, z, n, pace = (
            _Rows(variables[end - length : end], np.zeros(length))
            for length, end in zip(lengths, np.cumsum(lengths).tolist(), strict=True)
        )
        # No layer is before the first stage, and every layer is on the last stage or before it.
        # (Negative rows count from the end.)
        order = np.concatenate([np.arange(-num_layers, 0), np.arange(num_links * num_layers)])
        earlier = y.and_then(np.zeros(num_layers)).rows(order)
        x = y.and_then(np.ones(num_layers)) - earlier
        step = np.eye(num_layers + 1, num_layers, k=-1) - np.eye(num_layers + 1, num_layers)
        first = np.tile(np.eye(1, num_layers + 1)[0], num_links)
        c = y.times(sparse.kron(np.eye(num_links), step))
        c = _Rows(c.matrix, first)
        return cls(y, z, n, pace, x, c)


def _per_stage(table: Numbers, entries: Any = None) -> Any:
    """A matrix that adds up, for each stage, its row of the table times a variable each.

    Args:
        table: (S, K).
        entries: those with variables, as from ``np.nonzero``; ``None``: all.
    """
    stages, columns = np.indices(table.shape).reshape(2, -1) if entries is None else entries
    places = (stages, np.arange(len(stages)))
    return sparse.csr_array((table[stages, columns], places), shape=(len(table), len(stages)))
