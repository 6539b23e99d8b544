"""Attributes of Lightning's callbacks that do not exist here, and their replacements."""

from __future__ import annotations


def _each(names: str, answer: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), answer)


ABSENT = {
    "to_yaml": "best_k_models holds the same as a dict; the folder's .index.json holds it on disk.",
    "file_exists": "Use pathlib.Path(path).is_dir().",
    "check_monitor_top_k": "Compare with best_k_models; override on_validation_end to decide otherwise.",
    **_each("mode_dict order_dict monitor_op", "mode says which values are better: 'min' or 'max'."),
    "summarize": "trainwright.callbacks.model_summary.summarize(task) returns the rows and totals.",
    **_each(
        "avg_fn n_averaged momenta swa_end update_parameters transfer_weights reset_momenta "
        "reset_batch_norm_and_save_state pl_module_contains_batch_norm",
        "state_dict() holds the average and the number of averaged weights; avg_fn is an argument of the constructor.",
    ),
    "trainer": "The Trainer is the first argument of every hook.",
    **_each(
        "total_train_batches total_val_batches total_val_batches_current_dataloader "
        "total_test_batches_current_dataloader total_predict_batches_current_dataloader",
        "trainer.num_training_batches, .num_val_batches, .num_test_batches and .num_predict_batches are the totals.",
    ),
    **_each(
        "train_description sanity_check_description validation_description test_description predict_description",
        "Override open(kind, description, total, done), which is given the description.",
    ),
    **_each("has_dataloader_changed reset_dataloader_idx_tracker", "dataloader_idx is an argument of the hooks."),
    **_each(
        "init_train_tqdm init_validation_tqdm init_sanity_tqdm init_test_tqdm init_predict_tqdm train_progress_bar "
        "val_progress_bar val_sanity_check_bar test_progress_bar predict_progress_bar train_progress_bar_id "
        "val_progress_bar_id val_sanity_progress_bar_id test_progress_bar_id BAR_FORMAT "
        "configure_columns refresh progress theme",
        "Override open, draw and close of the progress bar, which create, update and end a bar of either kind.",
    ),
}
"""Attribute → what to do; read by `Callback` where an attribute is missing."""
