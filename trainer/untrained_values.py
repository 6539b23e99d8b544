"""Warnings for stages that use other weights or hyper-parameters than those that were trained."""

from __future__ import annotations

import reprlib
from collections.abc import Callable

from torch.nn import Parameter

from trainwright.core.hyperparameters import differ, kept_and_left_out, read_hyperparameters
from trainwright.core.run import Stage
from trainwright.trainer.checkpoints.load_request import Opened
from trainwright.trainer.hooks import StageHooks


def watch_trained_weights(hooks: StageHooks, stage: Stage) -> Callable[[], None]:
    """Return a function that warns if the task's trained weights have been replaced since this call.

    Call the returned function once, after `configure_model`.
    """
    # Not weak references: torch cannot swap a tensor that has one, and so could not move the weights to some devices.
    trained: dict[str, Parameter] = {}
    for name, weight in hooks.task.named_parameters():
        if weight.requires_grad:
            trained[name] = weight

    def warn_if_replaced() -> None:
        names: list[str] = []
        for name, weight in hooks.task.named_parameters():
            if name in trained and trained[name] is not weight:
                names.append(name)
        trained.clear()  # replaced weights are not kept in memory
        if names:
            hooks.warn(
                f"{stage}: setup or configure_model of {type(hooks.task).__name__} has replaced {len(names)} "
                f"trained weights by new ones: {', '.join(names[:4])}. Create layers once (`if self.net is None: …`), "
                'or load a checkpoint with ckpt_path="last".'
            )

    return warn_if_replaced


def warn_of_other_hyperparameters(hooks: StageHooks, stage: Stage, opened: Opened) -> None:
    """Warn if the task's hyper-parameters differ from those of the checkpoint that an evaluation loads."""
    if opened.request.implied:
        return  # no task was passed to the method, so the checkpoint is one of this task
    of_checkpoint, _ = read_hyperparameters(opened.snapshot.trainer)
    of_task, _ = kept_and_left_out(hooks.task.hparams)
    differences: list[str] = []
    for name, value in of_task.items():
        # A hyper-parameter that only one of them has is new or was removed, so it is not compared.
        if name in of_checkpoint and differ(value, of_checkpoint[name]):
            differences.append(f"{name} is {reprlib.repr(value)}, and was {reprlib.repr(of_checkpoint[name])}")
    if differences:
        hooks.warn(
            f"{stage}: {type(hooks.task).__name__} has other hyper-parameters than {opened.path}: "
            f"{'; '.join(differences)}. The task's own are used. Pass those of the checkpoint, or create the task by "
            "load_from_checkpoint."
        )
