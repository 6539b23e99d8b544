"""Warnings of a stage that does not use the weights or hyper-parameters that were trained."""

from __future__ import annotations

import reprlib
import weakref
from collections.abc import Callable

from trainwright.core import hyperparameters
from trainwright.trainer.checkpoints.load_request import Opened
from trainwright.trainer.run import StageRun


def watch_trained_weights(run: StageRun) -> Callable[[], None]:
    """Return a function that warns if the task's trained weights have been replaced since this call."""
    # References must not keep the earlier weights in memory.
    trained = {name: weakref.ref(weight) for name, weight in run.task.named_parameters() if weight.requires_grad}

    def warn_if_replaced() -> None:
        weights = run.task.named_parameters()
        names = [name for name, weight in weights if name in trained and trained[name]() is not weight]
        if names:
            run.warn(
                f"{run.status.stage}: setup or configure_model of {type(run.task).__name__} has replaced {len(names)} "
                f"trained weights by new ones: {', '.join(names[:4])}. Create layers once (`if self.net is None: …`), "
                'or load a checkpoint with ckpt_path="last".'
            )

    return warn_if_replaced


def warn_of_other_hyperparameters(run: StageRun, opened: Opened) -> None:
    """Warn if the task's hyper-parameters differ from those of the checkpoint that an evaluation loads."""
    if opened.request.implied:
        return  # the task itself has saved it
    saved, _ = hyperparameters.of_checkpoint(opened.snapshot.trainer)
    own, _ = hyperparameters.kept_and_left_out(run.task.hparams)
    others = [
        f"{name} is {reprlib.repr(own[name])}, and was {reprlib.repr(saved[name])}"
        for name in own
        if name in saved and hyperparameters.differ(own[name], saved[name])
    ]
    if others:
        run.warn(
            f"{run.status.stage}: {type(run.task).__name__} has other hyper-parameters than {opened.path}: "
            f"{'; '.join(others)}. The task's own are used. Pass those of the checkpoint, or create the task by "
            "load_from_checkpoint."
        )
