"""Tests with many cases of one thing, of which the test command asks every n-th; `.ci/run` asks the rest after it.

    pytest                   # every n-th case of these tests, and all others
    pytest --cases rest      # only what the line above leaves out
    pytest --cases all
"""

from __future__ import annotations

from collections.abc import Iterable

ONE_IN = {
    "cli/test_calibrate.py::test_two_ranks_write_a_file_that_plans_are_priced_by": 0,
    "cli/test_demo.py::test_a_launcher_that_is_stopped_takes_its_ranks_along": 2,
    "cli/test_demo.py::test_a_mesh_must_fit_the_ranks_of_the_launcher": 0,
    "cli/test_demo.py::test_a_rank_of_a_launcher_is_used": 0,
    "cli/test_demo.py::test_a_rank_that_dies_ends_the_job": 0,
    "cli/test_demo.py::test_the_ranks_lose_what_one_device_loses": 0,
    "comm/test_adjoint.py::test_gradients_in_traces_are_those_of_eager_mode": 0,
    "comm/test_comm_tensor.py::test_a_traced_collective_does_what_it_says_on_fresh_inputs": 8,
    "comm/test_functional.py::test_every_collective_gives_what_a_plain_computation_gives": 11,
    "comm/test_functional.py::test_simulated_ranks_get_the_same": 3,
    "comm/test_traces.py::test_a_compiled_function_notices_another_group": 4,
    "comm/test_traces.py::test_a_program_traced_without_a_process_group_runs_where_there_is_one": 2,
    "comm/test_traces.py::test_a_trace_has_ops_with_plain_constants_each_waited_for": 5,
    "docs/test_docs.py::test_a_page_does_what_it_says[docs/calibrate.md]": 0,
    "docs/test_docs.py::test_a_page_does_what_it_says[docs/several-hosts.md]": 0,
    "expand/choose/test_places.py::test_micro_batches_train_as_on_one_device": 0,
    "expand/choose/test_program.py::test_a_chosen_program_is_never_dearer_than_by_op": 2,
    "expand/choose/test_program.py::test_a_chosen_program_trains_as_one_device": 6,
    "expand/kept/test_library.py::test_other_processes_with_other_hash_seeds": 0,
    "expand/kept/test_round_trip.py::test_what_is_loaded_is_what_was_saved": 5,
    "expand/places/test_kept.py::test_eager_steps_go_on_where_a_compiled_one_ended": 3,
    "expand/places/test_places.py::test_new_values_have_the_places_of_their_parameters": 2,
    "expand/places/test_places.py::test_training_is_that_of_one_device": 8,
    "expand/test_any_rows.py::test_a_gpt_trains_by_any_rows": 4,
    "expand/test_any_rows.py::test_a_zoo_of_ops_trains_by_any_rows": 2,
    "expand/test_any_rows.py::test_steps_of_many_kinds_train_by_any_rows": 3,
    "expand/test_blocks.py::test_calls_of_a_kind_are_stamped": 2,
    "expand/test_blocks.py::test_what_cannot_be_shown_is_traced": 3,
    "expand/test_bucket.py::test_a_training_in_buckets_is_that_on_one_device": 3,
    "expand/test_closed_over.py::test_they_are_trained": 3,
    "expand/test_decompose.py::test_a_convolution_of_an_empty_batch_has_the_bias_gradient_of_its_block": 0,
    "expand/test_decompose.py::test_look_ups_are_those_of_one_device": 3,
    "expand/test_decompose.py::test_norms_are_those_of_one_device": 6,
    "expand/test_decompose.py::test_norms_with_empty_blocks_are_those_of_one_device": 3,
    "expand/test_decompose.py::test_of_norms_only_sums_are_sent": 2,
    "expand/test_decompose.py::test_ops_that_refuse_empty_blocks_are_not_called_on_them": 3,
    "expand/test_decompose.py::test_scans_are_those_of_one_device": 2,
    "expand/test_errors.py::test_steps_that_cannot_be_compiled": 3,
    "expand/test_functions.py::test_attention_with_and_without_masks": 5,
    "expand/test_fuzz.py::test_random_programs_compiled": 2,
    "expand/test_identity.py::test_an_optimiser_made_before_trains_the_model": 2,
    "expand/test_in_place.py::test_writes_are_those_of_one_device": 2,
    "expand/test_keep_products.py::test_the_step_is_that_of_one_device": 2,
    "expand/test_memory.py::test_a_rank_needs_what_its_program_says": 6,
    "expand/test_memory_budget.py::test_results_are_the_same_to_the_bit": 0,
    "expand/test_packed.py::test_a_compiled_step_trains_as_on_one_device": 4,
    "expand/test_passes.py::test_each_pass_and_every_pair_is_verified": 2,
    "expand/test_pins.py::test_a_pinned_step_trains_as_one_device": 7,
    "expand/test_pins.py::test_a_step_with_constraints_trains_as_one_device": 3,
    "expand/test_place_reductions.py::test_many_random_programs_keep_their_numbers_and_never_cost_more": 0,
    "expand/test_precision.py::test_training_in_mixed_precision_is_that_of_one_device": 3,
    "expand/test_program.py::test_tensor_parallel_sends_what_megatron_sends": 3,
    "expand/test_program.py::test_uneven_batches_send_no_more": 3,
    "expand/test_random.py::test_all_ways_train_alike": 3,
    "expand/test_random.py::test_dropout_trains_alike_on_any_mesh": 3,
    "expand/test_regions.py::test_numbers_are_those_of_the_ops_one_by_one": 2,
    "expand/test_simulated.py::test_64_ranks": 0,
    "expand/test_simulated.py::test_even_uneven_and_empty_shards": 3,
    "expand/test_sizes.py::test_functions_of_sizes_are_captured_once": 3,
    "expand/test_steps.py::test_a_kind_of_step_trains_as_on_one_device": 4,
    "expand/test_stock_models.py::test_a_stock_model_trains": 3,
    "expand/test_train.py::test_a_gpt_trains_as_on_one_device": 6,
    "expand/test_train.py::test_a_training_resumes": 2,
    "expand/test_train.py::test_batch_norm_sees_the_global_batch": 3,
    "expand/test_train.py::test_optimisers_step_as_on_one_device": 6,
    "expand/test_train.py::test_options_may_change_between_steps": 2,
    "expand/test_train.py::test_steps_of_many_kinds": 4,
    "mesh/test_device_mesh.py::test_a_pickled_mesh_is_found_in_the_tables_of_another_process": 0,
    "mesh/test_topology.py::test_a_pickled_topology_is_found_under_another_hash_seed": 0,
    "parallel/test_fully_shard.py::test_beside_tensor_parallelism": 3,
    "parallel/test_fully_shard.py::test_gradients_of_several_passes_add_up": 3,
    "parallel/test_losses.py::test_it_is_the_loss_of_one_device": 2,
    "parallel/test_styles.py::test_a_compiled_step_takes_the_same_plan": 6,
    "parallel/test_styles.py::test_a_plan_trains_as_one_device": 2,
    "sim/test_ways.py::test_compiled_cases_give_the_same_bits_three_ways": 0,
    "tensor/eager/test_autograd.py::test_second_derivatives_are_those_of_one_device": 2,
    "tensor/eager/test_dispatch.py::test_ops_on_partials_see_the_reduced_value": 2,
    "tensor/eager/test_dispatch.py::test_writes_are_those_of_one_device": 2,
    "tensor/eager/test_dtensor.py::test_ops_and_their_gradients_are_those_of_one_device": 2,
    "tensor/eager/test_optim.py::test_steps_are_those_of_one_device": 4,
    "tensor/modes/test_deterministic.py::test_a_train_step_gives_the_same_bits_everywhere": 3,
    "tensor/recipes/test_convolutions.py::test_programs_give_what_one_device_gives": 4,
    "tensor/recipes/test_pooling.py::test_programs_pool_as_one_device": 2,
    "tensor/recipes/test_random.py::test_any_mesh_draws_what_one_rank_draws": 4,
    "tensor/recipes/test_random.py::test_matrices": 4,
    "tensor/recipes/test_vocabulary.py::test_a_loss_with_sharded_classes_is_the_loss": 3,
    "tensor/redistribute/test_packed.py::test_every_pair_keeps_the_tensor_and_counts_its_bytes": 3,
    "tensor/redistribute/test_plan.py::test_bytes_are_at_the_bound_or_near_it": 2,
    "tensor/redistribute/test_plan.py::test_plans_are_as_cheap_as_brute_force": 3,
    "tensor/redistribute/test_plan.py::test_plans_are_the_same_in_another_process": 0,
    "tensor/redistribute/test_plan.py::test_uneven_blocks_of_several_axes_keep_their_values": 3,
    "tensor/redistribute/test_redistribute.py::test_redistribute_is_the_identity_and_so_is_its_gradient": 2,
    "tensor/redistribute/test_redistribute.py::test_redistribute_keeps_the_tensor": 3,
    "tensor/redistribute/test_redistribute.py::test_rows_that_stay_together_move_together": 3,
    "tensor/rules/test_norms.py::test_they_are_those_of_one_device": 2,
    "tensor/rules/test_not_gathered.py::test_elements_are_those_of_one_device": 3,
    "tensor/rules/test_products.py::test_so_are_their_second_derivatives": 2,
    "tensor/rules/test_products.py::test_they_are_those_of_one_device": 2,
    "tensor/rules/test_scans.py::test_they_are_those_of_one_device": 2,
    "tensor/test_fuzz.py::test_random_programs": 2,
    "tensor/test_oracle.py::test_rows_hold_for_more_samples_of_torch": 0,
    "tensor/test_packed.py::test_an_op_gives_what_one_device_gives": 2,
    "tensor/test_sweep.py::test_more_ops_of_torch_give_what_they_give_on_one_device": 0,
    "tensor/test_traps.py::test_losses_are_those_of_one_device": 2,
}
"""By test, or by case: one in how many is asked by the test command, of those in order from the first. 0: none."""


def is_sampled(ids: Iterable[str]) -> list[bool]:
    """Whether the test command asks a case, for the ids of all cases in order, without the folder `tests/`."""
    seen: dict[str, int] = {}
    return [_is_asked(name, seen) for name in ids]


def _is_asked(name: str, seen: dict[str, int]) -> bool:
    key = name if name in ONE_IN else name.partition("[")[0]
    n = seen[key] = seen.get(key, -1) + 1
    return key not in ONE_IN or (ONE_IN[key] > 0 and n % ONE_IN[key] == 0)
