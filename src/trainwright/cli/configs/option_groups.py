"""Groups of the Trainer's arguments in the help of a command."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

# Title → a sentence, and the arguments of the Trainer in the order of the help.
TRAINER_GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Trainer, devices": (
        "Devices, processes, strategy and precision.",
        ("accelerator", "devices", "num_nodes", "strategy", "precision", "sync_batchnorm", "compile", "launcher"),
    ),
    "Trainer, training length": (
        "Limits of a fit.",
        (
            "max_epochs",
            "max_steps",
            "max_time",
            "max_samples",
            "max_tokens",
            "min_epochs",
            "min_steps",
            "fast_dev_run",
        ),
    ),
    "Trainer, optimization": (
        "Steps of the optimizer and their gradients.",
        (
            "accumulate_grad_batches",
            "gradient_clip_val",
            "gradient_clip_algorithm",
            "on_nonfinite",
            "max_rollbacks",
            "max_skipped",
            "detect_anomaly",
            "deterministic",
            "benchmark",
        ),
    ),
    "Trainer, data": (
        "Numbers of batches, their order, and their distribution over ranks.",
        (
            "limit_train_batches",
            "limit_val_batches",
            "limit_test_batches",
            "limit_predict_batches",
            "overfit_batches",
            "seed",
            "per_sample_rng",
            "use_distributed_sampler",
            "uneven_batches",
            "reload_dataloaders_every_n_epochs",
        ),
    ),
    "Trainer, validation": (
        "When and how to validate.",
        ("val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps", "inference_mode"),
    ),
    "Trainer, callbacks and logging": (
        "Callbacks, loggers, displays and profilers.",
        (
            "callbacks",
            "logger",
            "log_every_n_steps",
            "enable_autolog_hparams",
            "enable_progress_bar",
            "enable_model_summary",
            "profiler",
            "barebones",
        ),
    ),
    "Trainer, checkpoints and interruptions": (
        "Folder and saving of the state, and the reaction to signals.",
        (
            "default_root_dir",
            "enable_checkpointing",
            "async_save",
            "on_save_error",
            "preemption_grace",
            "auto_requeue",
            "on_interrupt",
        ),
    ),
    "Trainer, compatibility": (
        "Arguments of Lightning that are accepted at their defaults only.",
        ("plugins", "model_registry"),
    ),
}


def group_trainer_options(parser: ArgumentParser) -> None:
    """Divide the options of the Trainer in a parser into `TRAINER_GROUPS`.

    Options that no group lists are not moved. Call this function after `add_class_arguments(Trainer, "trainer")`.
    """
    assert parser.groups is not None
    # argparse (Python 3.11 to 3.13) has no public way to move an option into another group.
    trainer_actions = parser.groups["trainer"]._group_actions
    actions = {action.dest: action for action in trainer_actions}
    for title, (text, names) in TRAINER_GROUPS.items():
        group = parser.add_argument_group(title, text)
        for name in names:
            # jsonargparse adds `--trainer.NAME.help` for an argument that takes a class.
            for dest in (f"trainer.{name}", f"trainer.{name}.help"):
                if dest in actions:
                    trainer_actions.remove(actions[dest])
                    group._group_actions.append(actions[dest])
