"""Hooks that a task may define, as methods without effect. Names, order and arguments are those of Lightning 2.6.

A group is the micro-batches of one optimizer step. The list shows the hooks of a `fit` in order, with the methods of
`TaskModule` among them. `on_sanity_check_start` and `on_sanity_check_end` are hooks of callbacks only. For each other
hook, callbacks are called before the task.

    configure_callbacks, prepare_data, setup, configure_model, configure_optimizers, on_fit_start,
    on_sanity_check_start { on_validation_* } on_sanity_check_end,
    on_train_start, then for each epoch
        on_train_epoch_start, then for each micro-batch
            on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer, on_train_batch_start,
            training_step,
            in the first micro-batch of a group: on_before_zero_grad, optimizer_zero_grad,
            on_before_backward, backward, on_after_backward,
            in the last micro-batch of a group: on_before_optimizer_step, configure_gradient_clipping, optimizer_step,
            lr_scheduler_step,
            on_train_batch_end
        validation when it is due { on_validation_* }, on_train_epoch_end, on_save_checkpoint when a checkpoint is due
    on_train_end, on_fit_end, teardown

The hooks of an evaluation, here with the names of a validation:

    on_validation_model_eval, on_validation_start, on_validation_epoch_start, then for each batch
        on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer, on_validation_batch_start,
        validation_step, on_validation_batch_end
    on_validation_epoch_end, on_validation_end, on_validation_model_train

Hooks that are not overridden are never called.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from trainwright.core.tree import Batch, move

StepOutput: TypeAlias = Any
"""Result of a task's step. Training: a loss, a mapping with the key `"loss"`, or None. Evaluation: any value."""


class DataHooks:
    """Hooks for data that a task or a data module may define."""

    def prepare_data(self) -> None:
        """Download or write data, on one process per node, before `setup`. Other processes lack attributes set here."""

    def setup(self, stage: str) -> None:
        """Prepare for the stage `"fit"`, `"validate"`, `"test"` or `"predict"`. Called on every rank."""

    def teardown(self, stage: str) -> None:
        """Clean up after a stage. Called on every rank."""

    def train_dataloader(self) -> Any:
        """Return the training loader, or a list, dict or `CombinedLoader` of several loaders."""

    def val_dataloader(self) -> Any:
        """Return the validation loader, or a list of validation loaders."""

    def test_dataloader(self) -> Any:
        """Return the test loader, or a list of test loaders."""

    def predict_dataloader(self) -> Any:
        """Return the prediction loader, or a list of prediction loaders."""

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Any:
        """Change a batch on the host before it is moved."""
        return batch

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to `device`. Override it for containers other than lists, tuples, mappings and dataclasses."""
        return move(batch, device)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Any:
        """Change a batch on the device, for example with augmentations that run there."""
        return batch


class TaskHooks(DataHooks):
    """Hooks of a task. Override the hooks that you need."""

    # Once per run
    def on_fit_start(self) -> None:
        """Run when `fit` begins, after everything is set up."""

    def on_fit_end(self) -> None:
        """Run when `fit` ends."""

    def on_train_start(self) -> None:
        """Run before the first epoch, after the sanity check."""

    def on_train_end(self) -> None:
        """Run after the last epoch."""

    def on_validation_start(self) -> None:
        """Run before a validation."""

    def on_validation_end(self) -> None:
        """Run after a validation."""

    def on_test_start(self) -> None:
        """Run before testing."""

    def on_test_end(self) -> None:
        """Run after testing."""

    def on_predict_start(self) -> None:
        """Run before predicting."""

    def on_predict_end(self) -> None:
        """Run after predicting."""

    # Once per epoch
    def on_train_epoch_start(self) -> None:
        """Run before a training epoch."""

    def on_train_epoch_end(self) -> None:
        """Run after a training epoch and its validation. Metrics of the epoch may still be logged."""

    def on_validation_epoch_start(self) -> None:
        """Run before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Run after the last validation batch. Metrics of the epoch may still be logged."""

    def on_test_epoch_start(self) -> None:
        """Run before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Run after the last test batch. Metrics of the epoch may still be logged."""

    def on_predict_epoch_start(self) -> None:
        """Run before the first prediction batch."""

    def on_predict_epoch_end(self) -> None:
        """Run after the last prediction batch."""

    # Once per batch
    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        """Run before a training micro-batch, which is on the device. Return -1 to skip the rest of the epoch."""

    def on_train_batch_end(self, outputs: StepOutput, batch: Batch, batch_idx: int) -> None:
        """Run after a training micro-batch. For the last micro-batch of a group, this is after the optimizer step."""

    def on_validation_batch_start(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run before a validation batch."""

    def on_validation_batch_end(
        self, outputs: StepOutput, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run after a validation batch."""

    def on_test_batch_start(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run before a test batch."""

    def on_test_batch_end(self, outputs: StepOutput, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run after a test batch."""

    def on_predict_batch_start(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run before a prediction batch."""

    def on_predict_batch_end(self, outputs: StepOutput, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run after a prediction batch."""

    # Optimization
    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Run before gradients are cleared, between training_step and backward of a group's first micro-batch."""

    def on_before_backward(self, loss: torch.Tensor) -> None:
        """Run before backward. `loss` has been multiplied by the micro-batch's weight in its group."""

    def on_after_backward(self) -> None:
        """Run after backward of a micro-batch. Gradients include those of earlier micro-batches of the group."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Run before each optimizer's step. Gradients are accumulated and unscaled, but not clipped yet."""

    # Modes
    def on_validation_model_eval(self) -> None:
        """Run when modules are put into evaluation mode for a validation."""

    def on_validation_model_train(self) -> None:
        """Run when the modes of modules are restored after a validation."""

    def on_test_model_eval(self) -> None:
        """Run when modules are put into evaluation mode for testing."""

    def on_test_model_train(self) -> None:
        """Run when the modes of modules are restored after testing."""

    def on_predict_model_eval(self) -> None:
        """Run when modules are put into evaluation mode for predicting."""

    def on_predict_model_train(self) -> None:
        """Run when the modes of modules are restored after predicting."""

    # Checkpoints
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add entries (numbers, text, lists, dicts, tensors) to `checkpoint` before it is written.

        `checkpoint["state_dict"]` and `["hyper_parameters"]` may be changed. Other entries of Lightning are read-only.
        """

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read the entries that `on_save_checkpoint` added.

        Called after the task is built, before weights and optimizers are loaded. `checkpoint["state_dict"]` may be
        changed. `epoch`, `global_step`, `hyper_parameters`, `optimizer_states`, `lr_schedulers` and `callbacks` are
        read-only. An entry that is not loaded is missing.
        """


# Name of a hook of an older Lightning, or of another library → the hook that replaces it. Used in error messages.
RENAMED_HOOKS: dict[str, str] = {
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_begin": "on_train_epoch_start",
    "on_train_begin": "on_train_start",
    "on_step_begin": "on_train_step_start",
    "on_step_end": "on_train_step_end",
    "on_batch_begin": "on_train_batch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_init_start": "setup",
    "on_init_end": "setup",
    "configure_sharded_model": "configure_model",
    "on_train_dataloader": "train_dataloader",
    "on_val_dataloader": "val_dataloader",
}

_EPOCH_END = (
    "it was removed from Lightning in 2.0, which collected every output in memory for it. Collect what you need of a "
    "step in your own list (self.outputs.append(...) in {step}), use it in {hook}(self), and clear the list there; or "
    "log with self.log(..., on_epoch=True)."
)
_STEP_END = (
    "it was removed from Lightning in 2.0, as it belonged to DataParallel. Move its body to the end of {step}; code "
    "that runs after the step belongs in {hook}(self, outputs, batch, batch_idx)."
)
# A kind of step as in `training_step`, and as in `on_train_epoch_end`.
_KINDS = (("training", "train"), ("validation", "validation"), ("test", "test"), ("predict", "predict"))
# Name of a hook without a successor of the same meaning → advice for the error message.
REMOVED_HOOKS: dict[str, str] = {
    **{f"{step}_epoch_end": _EPOCH_END.format(step=f"{step}_step", hook=f"on_{on}_epoch_end") for step, on in _KINDS},
    **{f"{step}_step_end": _STEP_END.format(step=f"{step}_step", hook=f"on_{on}_batch_end") for step, on in _KINDS},
    "tbptt_split_batch": "truncated backpropagation is written in training_step, in manual optimization.",
    "get_progress_bar_dict": "log(..., prog_bar=True) shows a value in the progress bar.",
}
