"""Behaviour that programs and attacks by others have found missing, and the tests of each finding.

Findings are numbered: S, wrong in silence; P, breaks ordinary ported programs; A, under attack.
"""

FINDINGS = {
    "S1": ("silent/test_saves_leave_training_its_cores",),
    "S2": ("silent/test_best_weights_after_fit",),
    "S3": ("silent/test_stop_in_mid_epoch",),
    "S4": ("silent/test_outputs_rest",),
    "S5": ("silent/test_fraction_of_no_batch",),
    "S6": ("silent/test_schedule_of_a_dummy_optimizer",),
    "S7": ("silent/test_sync_each_batch_in_own_loops",),
    "S8": ("silent/test_accumulation_in_own_loops",),
    "S9": ("silent/test_several_optimizers_on_one_loss",),
    "S10": ("silent/test_put_off_and_switched_off",),
    "S11": ("silent/test_weights_only",),
    "S12": ("silent/test_sizes_of_estimates",),
    "S13": ("silent/test_buffers_beside_streamed_weights",),
    "S14": ("silent/test_said_and_not_heard",),
    "S15": ("silent/test_learning_rate_finder",),
    "S16": ("silent/test_one_value_one_name",),
    "S17": ("silent/test_a_real_model_costs_no_more",),
    "P1": ("porting/test_model_argument",),
    "P2": ("porting/test_hooks_get_what_they_declare",),
    "P3": ("porting/test_callbacks_log",),
    "P4": ("porting/test_predictions_of_none",),
    "P5": ("porting/test_log_without_a_trainer",),
    "P6": ("porting/test_attributes_named_as_hooks",),
    "P7": ("porting/test_loggers_before_a_fit",),
    "P8": ("porting/test_load_hooks",),
    "P9": ("porting/test_saving_after_an_end_within_a_step",),
    "P10": ("porting/test_metrics_are_there_when_read",),
    "P11": ("porting/test_lightnings_defaults",),
    "P12": ("porting/test_manual_optimizers",),
    "P13": ("porting/test_several_loaders",),
    "P14": (
        "porting/test_every_name_has_a_verdict",
        "porting/test_task_names",
        "porting/test_trainer_attributes",
    ),
    "P15": ("porting/test_hyperparameters_of_any_kind",),
    "P16": ("porting/test_loading_in_inference_mode",),
    "P17": ("porting/test_checkpoint_folder_as_offload_folder",),
    "P18": ("porting/test_accelerator_objects",),
    "P19": ("porting/test_hints_lead_somewhere",),
    "P20": ("porting/test_ctrl_c",),
    "P21": ("porting/test_signals_before_fit",),
    "P22": ("porting/test_gather_of_unequal_batches",),
    "P23": ("porting/test_rebuilt_groups_resume",),
    "P24": ("porting/test_saving_after_an_end_within_a_step",),
    "P25": ("porting/test_cli_in_a_script",),
    "P26": ("porting/test_mistakes_on_the_command_line",),
    "P27": ("porting/test_best_in_a_new_process",),
    "P28": ("porting/test_methods_that_resemble_hooks",),
    "P29": ("porting/test_other_libraries_names",),
    "P30": ("porting/test_errors_that_help",),
    "P31": ("porting/test_small_untruths",),
    "P32": ("porting/test_small_differences",),
    "A1": ("attack/test_every_process_ends",),
    "A2": ("attack/test_shared_containers_are_bounded",),
    "A3": ("attack/test_expanded_tensors_are_bounded",),
    "A4": ("attack/test_links_to_themselves",),
    "A5": ("attack/test_every_error_of_a_reader_is_ours",),
    "A6": ("attack/test_sizes_are_asked_before_parsing",),
    "A7": ("attack/test_shards_are_compared_in_near_linear_time",),
    "A8": ("attack/test_the_run_index_is_sealed",),
    "A9": (
        "attack/test_a_killed_conversion_leaves_nothing",
        "attack/test_litter",
    ),
    "A10": ("attack/test_what_cannot_be_is_told_in_one_line",),
    "A11": ("attack/test_bounds",),
}

# The tests of later findings (T) stand where they belong in the tree; a page answers what differs on purpose.
TESTS_ELSEWHERE = {
    "T1": ("trainer/test_metric_names.py::test_scores_and_schedules_do_not_depend_on_the_logging_interval",),
    "T2": ("trainer/test_metric_names.py::test_a_name_means_what_the_table_says_whatever_the_logging_interval",),
    "T3": ("trainer/test_end_of_fit.py::test_the_last_state_is_on_disk",),
    "T4": ("trainer/test_logging.py::test_evaluations_after_a_fit_add_to_its_log_and_stand_after_it",),
    "T5": ("trainer/test_metric_names.py::test_names_mean_the_same_on_two_ranks",),
    "T6": ("strategies/fsdp/test_fsdp.py::test_a_step_of_an_evaluation_runs_once_for_each_batch",),
    "T7": ("trainer/test_module_modes.py::test_freezing_and_unfreezing_return_the_task",),
    "T8": (
        "outside_trials/silent/test_accumulation_in_own_loops.py::test_the_next_pass_continues_a_group_that_was_left",
    ),
    "T9": (
        "accelerator/test_accelerator_traps.py::test_repeated_losses_of_a_short_last_batch_count_once_for_each_sample",
    ),
    "T10": (
        "accelerator/test_accelerator_traps.py::test_two_accelerators_of_different_precision_are_warned_of",
        "accelerator/test_accelerator_traps.py::test_a_step_without_any_item_is_warned_of_once",
        "accelerator/test_accelerator_traps.py::test_an_optimizer_of_another_model_is_warned_of",
    ),
    "T11": ("accelerator/test_accelerator_traps.py::test_a_pass_draws_from_the_generator_what_a_plain_loader_draws",),
    "T12": (
        "processes/test_exit.py::test_a_finished_program_ends_with_0_while_gloos_threads_are_held_back",
        "processes/test_exit.py::test_none_of_many_finished_programs_ends_with_another_code",
    ),
    "T13": (
        "callbacks/test_in_a_trainer.py::test_a_checkpoint_is_scored_by_what_later_callbacks_log_at_the_same_event",
    ),
    "T14": ("outside_trials/porting/test_load_hooks.py::test_a_hook_sees_at_a_save_what_it_sees_at_a_load",),
    "T15": (
        "outside_trials/porting/test_trainer_attributes.py"
        "::test_folders_are_text_and_the_strategy_answers_to_lightnings_names",
        "outside_trials/porting/test_trainer_attributes.py::test_the_last_batch_of_an_epoch_is_known_while_it_runs",
    ),
    "T16": (
        "trainer/test_logging.py::test_what_is_logged_at_the_start_of_training_belongs_to_the_first_epoch",
        "docs/migration.md",
    ),
    "T17": (
        "accelerator/test_accelerator_traps.py::test_a_prepared_loader_is_a_data_loader_with_accelerate_s_attributes",
    ),
    "T18": ("bigmodels/test_device_map.py::test_only_the_tied_layer_of_a_head_is_placed_before_its_turn",),
    "T19": (
        "accelerator/test_accelerator_state.py::test_a_saved_state_is_a_checkpoint_of_weights",
        "accelerator/test_accelerator_state.py::test_a_state_of_accelerate_is_named_with_what_reads_it",
    ),
    "T20": ("bigmodels/test_loading.py::test_a_small_model_on_the_disk_is_read_ahead_once",),
    "T21": ("cli/test_migrate.py::test_forms_of_imports",),
    "T22": (
        "trainer/test_run.py::test_a_verb_within_a_fit_is_refused_and_the_fit_goes_on",
        "trainer/test_run.py::test_another_trainer_does_not_take_a_task_that_is_being_fitted",
    ),
    "T23": (
        "checkpoint/test_optimizer.py::test_states_of_any_dtype_and_kind_are_restored_as_they_were_saved",
        "strategies/fsdp/test_sharded_checkpoints.py"
        "::test_states_of_other_dtypes_than_the_parameters_continue_bit_for_bit",
    ),
    "T24": (
        "trainer/test_checkpoints_and_resume.py"
        "::test_a_folder_that_was_moved_or_copied_or_is_a_link_is_continued_as_the_same",
    ),
    "T25": ("trainer/test_loaders.py::test_an_evaluation_of_fewer_batches_than_the_declared_length_warns",),
    "T26": (
        "trainer/test_loaders.py::test_the_length_of_data_is_read_in_each_epoch",
        "trainer/test_loaders.py::test_all_ranks_read_the_length_of_data_in_each_epoch",
    ),
    "T27": ("trainer/test_interruption.py::test_a_signal_before_and_after_training_ends_the_fit_in_order",),
    "T28": ("loggers/test_csv_logger.py::test_a_row_that_is_torn_while_the_logger_runs_is_not_read_as_a_value",),
    "T29": (
        "trainer/test_checkpoints_and_resume.py"
        "::test_a_new_run_in_the_folder_of_one_whose_clock_was_ahead_is_resumed_by_its_own_checkpoint",
    ),
    "T30": ("trainer/test_async_save.py::test_a_fit_that_saves_leaves_optimizers_of_other_fits_alone",),
    "T31": (
        "requirements/test_only_own_checkpoints_are_deleted.py"
        "::test_two_processes_that_resume_one_run_give_their_last_checkpoints_names_of_their_own",
    ),
    "T32": ("callbacks/test_progress_bar.py::test_a_fit_trains_on_where_standard_output_cannot_be_written",),
    "T33": (
        "trainer/test_bad_input.py::test_a_sparse_buffer_that_cannot_be_saved_is_named",
        "trainer/test_bad_input.py::test_an_integer_that_no_float_holds_is_named",
        "core/test_hyperparameters.py::test_a_value_that_contains_itself_is_named",
        "loggers/test_metric_buffer.py::test_a_name_that_no_file_can_hold_is_refused",
    ),
    "T34": ("cli/test_checkpoint_commands.py::test_control_characters_in_a_name_do_not_reach_the_terminal",),
    "T35": (
        "requirements/test_ranks_agree.py::test_a_collective_call_of_one_rank_alone_is_named",
        "requirements/test_ranks_agree.py::test_a_data_set_whose_length_differs_by_rank_is_refused_on_every_rank",
    ),
    "T36": (
        "trainer/test_async_save.py"
        "::test_a_preempted_run_drops_a_write_that_outlasts_the_grace_and_keeps_the_earlier_checkpoint",
        "trainer/test_async_save.py::test_the_training_thread_never_waits_for_the_disk",
    ),
    "T37": ("requirements/test_memory_of_a_second_fit.py::test_later_fits_fault_no_pages_of_gradients_in_again",),
}
