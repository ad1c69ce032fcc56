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
    "migration": "layers that change their owners in the middle of a step, or with their ranks",
    "memory": "MemoryCompression, and memory plans",
    "recomputation": "plans that recompute layers",
    "measured": "times of layers, and what is chosen by them: cuts, orders of ranks, warnings",
    "late": "updates of layers that go on beside the next step",
    "evaluation": "stages that evaluate successive batches at once, and keep none",
    "device": "copies to a GPU that nobody waits for, and memory that processes share",
    "copies": "copies of layers that need a gradient, and that no step calls",
    "compiled": "code that has to be compiled",
    "data": "`x.data = y` with values in a step",
    "kept": "averages in a step, and functions that are given layers",
    "anomaly": "the layer and the microbatch of the first value that is no number",
    "layers": "small models of which the other core makes fewer layers, as examples show",
    "trace": "the other core's own errors, and what it shows of a step that it has followed",
}
"""What is not there yet, or belongs to the other core."""

# By kind and file; all tests of a file where none is named.
_IN_END_TO_END: dict[str, dict[str, tuple[str, ...]]] = {
    "migration": {
        "asynchronous": (
            "a_decision_is_announced_when_its_last_part_is_in_force",
            "a_decision_that_is_refused_is_not_announced",
            "a_run_resumed_in_an_epoch_ends_with_the_same_bits[async-2bw]",
            "an_average_at_the_end_of_epochs_is_that_of_the_reference",
            "layers_leave_a_slow_stage_by_measured_times[partition1-True]",
            "layers_of_several_virtual_machines_move",
            "nobody_waits_for_others_to_hear_of_a_decision",
            "over_slow_links_layers_move_in_parts",
            "shared_parameters_are_as_old_as_on_their_first_stage",
            "the_best_move_that_keeps_shared_weights_where_they_are[partition1-True]",
            "the_bits_of_the_reference",
            "the_old_owner_frees_what_has_moved_and_a_move_too_late_is_said",
            "two_versions_of_the_weights_have_the_same_bits_on_every_split",
            "what_is_asked_for_meanwhile_replaces_the_parts_that_have_not_begun",
        ),
        "asynchronous_faults": (),
        "asynchronous_interruptions": (),
        "changing_plans": (
            "one_step_runs_on_two_owners",
            "random_moves_change_no_bit",
        ),
        "migration_faults": (
            "a_layer_waits_for_its_own_weights_alone",
            "a_rank_that_dies[new, in_a_backward]",
            "a_rank_that_dies[new, in_a_forward]",
            "a_rank_that_dies[old, in_a_backward]",
            "a_rank_that_dies[old, in_a_forward]",
            "a_rank_that_dies[third, in_a_backward]",
            "a_rank_that_dies[third, in_a_forward]",
            "a_rank_that_raises[new, in_a_backward, 1]",
            "a_rank_that_raises[new, in_a_forward, 1]",
            "a_rank_that_raises[new, in_the_state, 1]",
            "a_rank_that_raises[old, before_the_state, 1]",
            "a_rank_that_raises[old, in_a_backward, 1]",
            "a_rank_that_raises[old, in_a_forward, 1]",
            "a_rank_that_raises[third, in_a_forward, 1]",
            "the_old_owner_computes_while_weights_leave",
            "the_old_owner_lets_go_when_the_new_one_has_said_that_it_has_everything",
            "the_step_does_not_wait_for_the_optimizers_state",
            "weights_leave_before_the_step_that_needs_them",
        ),
        "stage_orders": (
            "orders_that_are_refused",
            "places_change_where_each_pair_of_neighbours_has_a_group",
        ),
    },
    "memory": {
        "asynchronous_memory": (
            "a_budget_follows_layers_that_move",
            "a_budget_is_kept_on_every_stage_and_costs_no_bit",
            "a_budget_that_nothing_can_meet_says_what_would",
            "a_move_frees_weights_and_optimizer_state_at_the_old_owner",
            "a_stage_holds_what_the_planner_counts[async-1-num_versions0-planned]",
            "a_stage_holds_what_the_planner_counts[async-2-num_versions1-planned]",
            "a_stage_holds_what_the_planner_counts[async-2bw-4-num_versions3-planned]",
            "a_stage_holds_what_the_planner_counts[async-3-num_versions2-planned]",
            "gradients_of_tied_weights_on_their_way_are_what_the_planner_counts",
            "no_policy_changes_a_bit",
            "one_stage_and_two_virtual_machines",
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
        "memory_compression": (
            "a_budget_is_kept_on_every_stage_and_costs_no_bit",
            "a_budget_that_nothing_can_meet_says_what_would",
            "a_device_that_runs_out_of_memory_names_layer_stage_and_budget",
            "a_longer_batch_than_planned_for_makes_room_on_the_host",
            "a_policy_of_ones_own",
            "eight_bits_are_nearly_the_same_and_said_to_be_not_lossless",
            "every_byte_that_autograd_saves_is_counted",
            "no_policy_changes_a_bit",
            "what_is_modified_after_it_was_saved_is_still_torchs_error",
            "what_passes_between_stages_is_part_of_what_they_hold",
        ),
        "memory_peaks": (
            "code_around_layers_counts",
            "nothing_waits_for_the_garbage_collector[how3-0.9-100-1]",
            "nothing_waits_for_the_garbage_collector[how3-0.9-100-2]",
            "the_first_plan_counts_code_around_layers_and_shared_weights",
            "what_lives_is_within_the_budget",
        ),
        "memory_trial": (),
        "optimizer_state": (),
        "pipeline_timeline": ("tensors_that_are_swapped_are_recorded",),
        "waiting_weights": (),
    },
    "recomputation": {
        "memory_peaks": (
            "nothing_waits_for_the_garbage_collector[how1-None-0-1]",
            "nothing_waits_for_the_garbage_collector[how1-None-0-2]",
            "nothing_waits_for_the_garbage_collector[how2-None-100-1]",
            "nothing_waits_for_the_garbage_collector[how2-None-100-2]",
        ),
        "one_device": ("a_backward_that_would_not_be_called_is_refused[strategy1]",),
        "planning_command": ("a_plan_names_ranks_and_what_is_recomputed",),
        "step_group": ("a_step_finds_one_replica[how1]",),
    },
    "measured": {
        "asynchronous": (
            "layers_leave_a_slow_stage_by_measured_times[auto-False]",
            "predictions_are_of_measured_steps_and_the_same_on_all_ranks",
            "the_best_move_that_keeps_shared_weights_where_they_are[auto-False]",
        ),
        "changing_plans": ("layers_that_no_step_calls_are_no_work",),
        "slow_links": (),
        "pipeline_timeline": ("a_rank_that_gets_slow_is_named_in_one_warning",),
        "planning_command": (
            "measured_planned_and_not_trained",
            "two_devices_that_become_two_virtual_machines_train_on_as_many_samples",
        ),
        "stage_orders": (
            "a_first_order_that_makes_steps_slower_is_undone",
            "an_order_that_is_best_stays",
            "each_virtual_machine_has_an_order_of_its_own",
            "ranks_change_places_when_the_first_steps_have_been_measured",
            "the_first_plan_has_the_best_order",
        ),
    },
    "late": {
        "late_updates": (
            "an_update_has_the_options_of_its_own_step_with_every_optimizer",
            "hooks_between_two_steps_see_and_change_updated_parameters",
            "layers_move_between_late_updates",
            "models_of_every_kind_train_the_same_bits",
            "nothing_saves_a_model_of_which_some_layers_are_updated",
            "options_of_the_trainer",
            "the_modules_own_code_sees_updated_parameters",
        ),
        "pipeline_timeline": ("rings_and_lanes_of_several_virtual_machines_are_recorded",),
    },
    "evaluation": {
        "evaluation": ("stages_work_on_successive_batches_at_once",),
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
        "compiled": (
            "every_split_and_policy_trains_the_same[HasConditions]",
            "layers_are_compiled_once_and_not_their_gates",
        ),
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
            "three_stages_and_moving_layers_give_the_bits_of_one[called again]",
            "three_stages_and_moving_layers_give_the_bits_of_one[dict in the step]",
            "two_stages_give_the_bits_of_one[called again]",
            "two_stages_give_the_bits_of_one[dict in the step]",
        ),
    },
    "anomaly": {
        "anomaly": (
            "infinite_values_are_told_and_go_on",
            "on_one_stage",
            "the_first_that_is_no_number_is_named",
        ),
    },
    "trace": {
        "bad_input": (
            "what_no_stage_would_train_is_refused_with_any_schedule[TrainsAStranger]",
            "a_cut_across_which_values_would_travel_back",
            "a_model_that_cannot_be_a_pipeline[ManualOptimization]",
            "layers_inside_one_stage_are_held_to_the_same_rules",
        ),
        "branches": (
            "a_step_is_followed_again_for_another_branch_only",
            "what_no_stage_can_know_in_time_is_an_error[how1]",
            "what_a_list_or_an_object_may_lack_is_said_once[DrawsAtBothEnds-draw-how2-1]",
            "what_a_list_or_an_object_may_lack_is_said_once[KeepsItsLosses-losses-how2-1]",
            "what_a_list_or_an_object_may_lack_is_said_once[ScalesByItsMeter-meter-how2-1]",
            "what_a_list_or_an_object_may_lack_is_said_once[DrawsAtBothEnds-draw-how1-1]",
            "what_a_list_or_an_object_may_lack_is_said_once[KeepsItsLosses-losses-how1-1]",
            "what_a_list_or_an_object_may_lack_is_said_once[ScalesByItsMeter-meter-how1-1]",
        ),
        "shown": (
            "every_rank_writes_its_profilers_report",
            "sums_over_virtual_machines_are_timed",
            "the_stages_are_shown_where_the_model_is",
        ),
        "testing": (
            "a_clean_model",
            "a_model_that_is_never_the_same",
            "the_command_says_what_differs",
            "what_differs_is_named[logged value-found2]",
            "what_differs_is_named[loss-found1]",
            "what_differs_is_named[optimizer state-None]",
            "what_is_refused_is_told_with_the_reason",
            "what_one_stage_refuses_is_not_split",
        ),
        "unmodified": ("following_leaves_no_trace",),
    },
}
_IN_PROJECT: dict[str, dict[str, tuple[str, ...]]] = {
    "device": {"gpu_script": ("the_rehearsal_runs_every_line_of_every_part",)},
    "layers": {
        "examples": (
            "the_command_trains_from_the_config_file",
            "the_script_trains_shows_its_plan_and_loads_its_checkpoint_in_plain_pytorch",
            "two_hosts_find_each_other",
        ),
        "pages": ("what_a_page_shows_runs[docs/guides.md]",),
    },
    "measured": {
        "examples": ("uneven_machines_are_cut_by_their_speeds",),
        "pages": ("what_a_page_shows_runs[docs/plans.md]",),
    },
    "memory": {"examples": ("the_budget_of_the_memory_example_is_kept",)},
    "migration": {"examples": ("layers_leave_a_machine_that_gets_slow",)},
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
