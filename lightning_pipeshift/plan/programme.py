"""Cuts and recomputation together, exactly: a mixed integer linear programme.

:mod:`dynamic` and :mod:`recomputation` are faster, and rest on each stage's choice being its own.
A policy of memory for which stages share something (a host's memory, the way there) is a few more
variables and rows here, and breaks that. Until then each tests the other.

Indices: s a stage of S, l a layer of L, b a boundary (in front of layer b). Variables:

- ``y[s, l]`` for s < S - 1, binary: layer l lies on stage s or before it. So ``x[s, l] = y[s, l] -
  y[s - 1, l]`` says that it lies on s (all lie on the last stage or before it, none before the
  first), and ``c[s, b] = y[s, b - 1] - y[s, b]`` that stage s ends at b; both are expressions, no
  variables.
- ``z[s, l]``, binary: stage s recomputes layer l. Only where that frees memory.
- ``n[s]`` for s < S - 1, from 0 to 1: stage s has layers.
- ``T``: the pace.

Constraints:

1. ``x[s, l] >= 0``: what lies on s or before it lies on s + 1 or before it.
2. ``c[s, b] >= 0`` for 0 < b < L: the layers lie in order.
3. ``c[s, b] = 0`` where b is not allowed.
4. ``n[s] >= x[s, l]``. Nothing else keeps n up, and it costs: it is 1 for stages with layers only.
5. ``z[s, l] <= x[s, l]``.
6. ``sum over l of held[s, l] x[s, l] - freed[s, l] z[s, l] <= room[s]``, with ``held = static +
   in flight * saved`` and ``freed = (in flight - 1) * saved - in flight * input``
   (:meth:`Workload.memory_bytes`).
7. ``slot[s] + sum over l of forward[s, l] z[s, l] <= T``, with ``slot[s] = sum over l of
   (forward + backward)[s, l] x[s, l] + extra[s] n[s]`` (n is 1 on the last stage).
8. ``sum over b of payload[s, b] c[s, b] <= T``, and the same for the gradients.

Objective: ``sum of all slots and links + (microbatches - 1) T``, which is
:meth:`Workload.estimate`, and next to nothing for each second of recomputation: of equal cuts the
one that recomputes less.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from lightning_pipeshift.plan.recomputation import bytes_freed
from lightning_pipeshift.plan.workload import Cut, Numbers, Workload

# What a second of recomputation counts in the objective, in seconds of a step.
_NEXT_TO_NOTHING = 1e-7

# HiGHS takes 1e-6 for equal, whatever the unit. In this one that is nothing.
_STEP_UNITS = 1e4


def joint_optimum(workload: Workload, time_limit: float = 60.0) -> Cut | None:
    """The cut and recomputation with the least :meth:`Workload.estimate` of those that fit.

    Args:
        workload: the layers, the stages in their order, and the boundaries that may be cut.
        time_limit: seconds; what is the best by then is returned.

    Returns ``None`` where nothing fits, or where nothing was found in time.
    """
    num_stages, num_layers = workload.num_stages, workload.num_layers
    freed = bytes_freed(workload)
    again = np.nonzero(freed)
    num_y, num_z = (num_stages - 1) * num_layers, len(again[0])
    num_variables = num_y + num_z + (num_stages - 1) + 1

    # Matrices that take the variables to what has a name above. What is constant in it is apart.
    y = sparse.eye_array(num_y, num_variables)
    z = sparse.eye_array(num_z, num_variables, k=num_y)
    n = sparse.eye_array(num_stages - 1, num_variables, k=num_y + num_z)
    pace = sparse.eye_array(1, num_variables, k=num_variables - 1)
    no_layers = sparse.csr_array((num_layers, num_variables))
    x = sparse.csr_array(sparse.vstack([y, no_layers]) - sparse.vstack([no_layers, y]))
    x_constant = np.zeros((num_stages, num_layers))
    x_constant[-1] = 1.0
    ends = sparse.eye_array(num_layers + 1, num_layers, k=-1)
    ends = ends - sparse.eye_array(num_layers + 1, num_layers)
    c = sparse.csr_array(sparse.kron(sparse.eye_array(num_stages - 1), ends) @ y)
    c_constant = np.zeros((num_stages - 1, num_layers + 1))
    c_constant[:, 0] = 1.0

    seconds = workload.forward + workload.backward
    extra = workload.forward_extra + workload.backward_extra
    unit = max(float(seconds.mean(axis=0).sum() + extra.sum()), 1e-30) / _STEP_UNITS
    slots = _per_stage(seconds / unit) @ x + sparse.vstack(
        [sparse.diags_array(extra[:-1] / unit) @ n, sparse.csr_array((1, num_variables))]
    )
    slots_constant = (seconds * x_constant).sum(axis=1) / unit
    slots_constant[-1] += extra[-1] / unit
    recomputed = _per_stage(workload.forward / unit, again) @ z
    links, links_constant = [], []
    for travel in (workload.payload_seconds, workload.gradient_seconds):
        links.append(_per_stage(travel / unit) @ c)
        links_constant.append((travel * c_constant).sum(axis=1) / unit)

    rows: list[Any] = []
    lows: list[Numbers] = []
    highs: list[Numbers] = []

    def require(matrix: Any, low: Any, high: Any) -> None:
        rows.append(matrix)
        lows.append(np.broadcast_to(low, matrix.shape[:1]))
        highs.append(np.broadcast_to(high, matrix.shape[:1]))

    require(x, -x_constant.ravel(), np.inf)
    inner = np.ones((num_stages - 1, num_layers + 1), dtype=bool)
    inner[:, [0, -1]] = False
    may = [workload.allowed is None or b in workload.allowed for b in range(num_layers + 1)]
    require(c[inner.ravel()], 0.0, np.where(may * inner, 1.0, 0.0)[inner])
    of_stage = sparse.kron(sparse.eye_array(num_stages - 1), np.ones((num_layers, 1)))
    require(of_stage @ n - x[:num_y], 0.0, np.inf)
    own = (again[0] * num_layers + again[1]).astype(int)
    require(x[own] - z, -x_constant[again], np.inf)
    known = np.flatnonzero(np.isfinite(workload.room_bytes))
    room = workload.room_bytes[known]
    held = workload.static_bytes + np.array(workload.in_flight)[:, None] * workload.saved_bytes
    peaks = (_per_stage(held) @ x - _per_stage(freed, again) @ z)[known]
    left = room - (held * x_constant).sum(axis=1)[known]
    size = np.maximum(held.mean(axis=1)[known], 1e-30) / 1e3
    require(sparse.diags_array(1 / size) @ peaks, -np.inf, left / size)
    everywhere = np.ones((num_stages, 1))
    require(everywhere @ pace - slots - recomputed, slots_constant, np.inf)
    for link, constant in zip(links, links_constant, strict=True):
        require(everywhere[1:] @ pace - link, constant, np.inf)

    objective = slots.sum(axis=0) + links[0].sum(axis=0) + links[1].sum(axis=0)
    objective = objective + _NEXT_TO_NOTHING * recomputed.sum(axis=0)
    objective[-1] = workload.microbatches - 1
    integrality = np.ones(num_variables)
    integrality[num_y + num_z :] = 0
    highest = np.ones(num_variables)
    highest[-1] = np.inf
    result = milp(
        objective,
        constraints=LinearConstraint(
            sparse.vstack(rows, format="csc"), np.concatenate(lows), np.concatenate(highs)
        ),
        bounds=Bounds(0.0, highest),
        integrality=integrality,
        options={"time_limit": time_limit, "mip_rel_gap": 0.0},
    )
    if result.x is None:
        return None
    before = result.x[:num_y].reshape(num_stages - 1, num_layers).round().sum(axis=1).astype(int)
    bounds = [0, *before.tolist(), num_layers]
    chosen = np.flatnonzero(result.x[num_y : num_y + num_z] > 0.5)
    return Cut(
        tuple(end - begin for begin, end in pairwise(bounds)),
        frozenset(int(again[1][index]) for index in chosen),
    )


def _per_stage(table: Numbers, entries: Any = None) -> Any:
    """A matrix that adds up, for each stage, its row of the table times a variable each.

    Args:
        table: (S, K).
        entries: those that there are variables for, as of ``np.nonzero``; ``None``: all.
    """
    if entries is None:
        entries = np.indices(table.shape).reshape(2, -1)
    stages, columns = entries
    places = (stages, np.arange(len(stages)))
    return sparse.csr_array((table[stages, columns], places), shape=(len(table), len(stages)))
