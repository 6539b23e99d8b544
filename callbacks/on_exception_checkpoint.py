"""Save a checkpoint when an exception ends the run."""

from __future__ import annotations

from pathlib import Path

from trainwright.callbacks.callback import Callback, Order
from trainwright.callbacks.checkpoint_name import check_template
from trainwright.core.errors import ConfigurationError, Preempted
from trainwright.core.host.folders import is_url
from trainwright.core.run import Run, SaveRequest
from trainwright.core.task import TaskModule


class OnExceptionCheckpoint(Callback):
    """Callback that writes a checkpoint from the main process when an exception (including Ctrl-C) ends `fit`.

    It does not communicate with other ranks, so it cannot hang; it saves only what one process holds, as of the last
    completed step, unless an optimizer was stepping (see `Run.emergency_save`). An earlier checkpoint of the same name
    is replaced; none is deleted.

    Args:
        dirpath: folder of the checkpoint.
        filename: its name, without extension: a checkpoint is a folder. Default: `"on_exception"`.

    Raises:
        ConfigurationError: a name that is not a valid folder name, or a `dirpath` that is a URL.
    """

    order = Order.LAST

    def __init__(self, dirpath: str | Path, filename: str = "on_exception") -> None:
        check_template(filename, "OnExceptionCheckpoint")
        if is_url(dirpath):
            raise ConfigurationError(
                f"OnExceptionCheckpoint(dirpath={dirpath!r}) writes to this machine's disk. Give a folder, or use "
                "ModelCheckpoint with that dirpath and save_on_exception=True."
            )
        self.dirpath = Path(dirpath).expanduser().absolute()
        self.filename = filename

    @property
    def state_key(self) -> str:
        return f"OnExceptionCheckpoint(filename={self.filename!r})"

    @property
    def ckpt_path(self) -> str:
        """The path of the checkpoint."""
        return str(self.dirpath / self.filename)

    def on_exception(self, trainer: Run, task: TaskModule, exception: BaseException) -> None:
        if isinstance(exception, Preempted):  # the Trainer has already saved
            return
        if trainer.stage == "fit" and not trainer.fast_dev_run and trainer.is_global_zero:
            trainer.emergency_save(
                SaveRequest(self.filename, folder=self.dirpath, metrics=dict(trainer.callback_metrics))
            )
