"""How slow a network is too slow for two workstations, by the planner.

    python -m benchmarks.slow_network

Calculates what ``examples/plan_a_cluster.py`` prints; nothing is measured.
"""

from __future__ import annotations

from benchmarks.measuring import arguments, print_table, save
from examples.plan_a_cluster import MEGABITS, step_seconds


def main() -> None:
    options = arguments(__doc__).parse_args()
    found = {megabits: step_seconds(megabits) for megabits in MEGABITS}
    fastest = found[MEGABITS[-1]][0]
    figures = {
        str(megabits): {"step_seconds": seconds, "pace": fastest / seconds}
        for megabits, (seconds, _) in found.items()
    }
    print_table(
        "Steps by network",
        ["Mbit/s", "step, s", "pace"],
        [[name, each["step_seconds"], each["pace"]] for name, each in figures.items()],
    )
    save(options.json, figures)


if __name__ == "__main__":
    main()
