"""The tests that ``core="values"`` cannot run yet, each with its kind.

With ``PIPESHIFT_CORE=values`` in the environment, all other tests run on that core, and these are
left out. ``pytest --listed`` runs these only: one that passes belongs in the list no longer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath

ON_VALUES = os.environ.get("PIPESHIFT_CORE") == "values"
"""Whether tests run on it that do not name their core."""

KINDS = {
    "memory": "MemoryCompression, and memory plans",
    "late": "updates of layers that go on beside the next step",
    "device": "copies to a GPU that nobody waits for, and memory that processes share",
    "copies": "copies of layers that need a gradient, and that no step calls",
    "compiled": "code that has to be compiled",
    "data": "`x.data = y` with values in a step",
    "kept": "averages in a step, and functions that are given layers",
}
"""What is not there yet, or belongs to the other core."""

# By kind and file; all tests of a file where none is named.
_IN_END_TO_END: dict[str, dict[str, tuple[str, ...]]] = {
    "memory": {
        "asynchronous_memory": (
            "a_budget_follows_layers_that_move",
            "a_budget_is_kept_on_every_stage_and_costs_no_bit",
            "a_budget_that_nothing_can_meet_says_what_would",
            "a_move_frees_weights_and_optimizer_state_at_the_old_owner",
            "gradients_of_tied_weights_on_their_way_are_what_the_planner_counts",
            "no_policy_changes_a_bit[async-moving]",
            "no_policy_changes_a_bit[async-2bw-moving]",
            "the_budget_counts_every_version_of_the_weights",
            "tied_weights_and_a_parameter_of_code_between_layers",
            "what_code_between_layers_saves_moves_too_once_it_is_measured",
            "with_little_memory_layers_move_in_parts_or_not_at_all",
        ),
        "checkpointed_dropout": (),
        "memory_command": (
            "a_plan_that_moves_tensors_is_made_and_run",
            "every_tensor_is_shown_and_each_stage",
        ),
        "memory_compression": ("no_policy_changes_a_bit",),
        "memory_peaks": (
            "the_first_plan_counts_code_around_layers_and_shared_weights",
            "what_lives_is_within_the_budget",
        ),
        "memory_trial": (),
        "pipeline_timeline": ("tensors_that_are_swapped_are_recorded",),
        "waiting_weights": ("a_model_with_a_tied_head",),
    },
    "late": {
        "late_updates": (
            "an_update_has_the_options_of_its_own_step_with_every_optimizer",
            "layers_move_between_late_updates",
            *(
                f"models_of_every_kind_train_the_same_bits[{name}]"
                for name in (
                    "gpt2",
                    "buffers_of_its_own",
                    "parameter_groups",
                    "frozen_front",
                    "masked_tokens",
                    "hooks",
                )
            ),
            *(
                f"options_of_the_trainer[{name}]"
                for name in ("plugins", "precision0", "precision1")
            ),
        ),
        "pipeline_timeline": ("rings_and_lanes_of_several_virtual_machines_are_recorded",),
    },
    "device": {
        "shared_memory": (
            "a_shared_gradient_crosses_once_in_each_direction",
            "buffers_are_used_again",
            "memory_that_is_only_copied_is_not_taken_for_shared",
            "the_bits_are_those_of_one_stage",
        ),
        "waits": ("a_step_waits_once_and_while_the_device_has_work",),
    },
    "copies": {
        "averages": (
            "a_run_goes_on_from_a_checkpoint_on_another_split[AveragedModel-False]",
            "a_run_goes_on_from_a_checkpoint_on_another_split[copy as a module-False]",
            "a_run_goes_on_from_a_checkpoint_on_another_split[copy as a module-True]",
            "a_run_goes_on_from_a_checkpoint_on_another_split[evaluated copy-True]",
            "a_run_goes_on_from_a_checkpoint_on_another_split[flat copy as a module-False]",
            "a_second_run_goes_on_with_the_averages[AveragedModel]",
            "three_stages_and_moving_layers_give_the_bits_of_one[AveragedModel]",
            "three_stages_and_moving_layers_give_the_bits_of_one[copy as a module]",
            "three_stages_and_moving_layers_give_the_bits_of_one[evaluated copy]",
            "three_stages_and_moving_layers_give_the_bits_of_one[flat copy as a module]",
            "two_stages_give_the_bits_of_one[AveragedModel]",
            "two_stages_give_the_bits_of_one[copy as a module]",
            "two_stages_give_the_bits_of_one[evaluated copy]",
            "two_stages_give_the_bits_of_one[flat copy as a module]",
        ),
    },
    "compiled": {
        "compiled": ("every_split_and_policy_trains_the_same[HasConditions]",),
    },
    "data": {
        "averages": (
            "a_run_goes_on_from_a_checkpoint_on_another_split[momentum in the step-False]",
            "three_stages_and_moving_layers_give_the_bits_of_one[momentum in the step]",
            "two_stages_give_the_bits_of_one[momentum in the step]",
        ),
    },
    "kept": {
        "averages": (
            "a_run_goes_on_from_a_checkpoint_on_another_split[dict in the step-False]",
            "three_stages_and_moving_layers_give_the_bits_of_one[dict in the step]",
            "two_stages_give_the_bits_of_one[dict in the step]",
        ),
    },
}
_IN_PROJECT: dict[str, dict[str, tuple[str, ...]]] = {
    "device": {"gpu_script": ("the_rehearsal_runs_every_line_of_every_part",)},
    "memory": {"examples": ("the_budget_of_the_memory_example_is_kept",)},
}
LISTED = {
    f"tests/{folder}/test_{file}.py{f'::test_{name}' if name else ''}": kind
    for folder, kinds in (("end_to_end", _IN_END_TO_END), ("project", _IN_PROJECT))
    for kind, files in kinds.items()
    for file, names in files.items()
    for name in names or ("",)
}
"""Node ids, or the part of them in front of a ``[`` or a ``::``, and the kind of each."""

MODELS = {"MomentumAtTheHead": "data"}
"""Models that a test of many models leaves out, and why."""


def entry_of(node_id: str, listed: dict[str, str]) -> str | None:
    """The entry of a test in a list like :data:`LISTED`; ``None`` if it has none."""
    parts = [node_id[: match.start()] for match in re.finditer(r"\[|::", node_id)]
    return next((part for part in (*parts, node_id) if part in listed), None)


def unused(listed: Iterable[str], used: set[str], collected: Sequence[str]) -> list[str]:
    """The entries that match no test, of files that were collected as a whole.

    Args:
        listed: the entries.
        used: those that match a test.
        collected: what pytest was given: files, folders, or tests, below the root.
    """
    whole = [path for path in collected if "::" not in path]
    return [
        entry
        for entry in listed
        if entry not in used
        and any(PurePath(entry.partition("::")[0]).is_relative_to(path) for path in whole)
    ]
