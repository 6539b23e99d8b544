"""Save a checkpoint when an exception ends the run."""

from __future__ import annotations

from pathlib import Path

from trainwright.callbacks.callback import Callback, Order
from trainwright.callbacks.checkpoint_name import FileExtension, check_template
from trainwright.core.errors import ConfigurationError, Preempted
from trainwright.core.host.folders import is_url
from trainwright.core.run import Run, SaveRequest
from trainwright.core.task import TaskModule


class OnExceptionCheckpoint(Callback):
    """Callback that writes a checkpoint from the main process when an exception (including Ctrl-C) ends `fit`.

    It does not communicate with other ranks, so it cannot hang. It saves the state of one process after the last
    completed step, unless an optimizer was stepping (see `Run.emergency_save`). A checkpoint of the same name is
    replaced. No other checkpoint is deleted.

    Args:
        dirpath: folder of the checkpoint.
        filename: name of the checkpoint, which is a folder. Default: `"on_exception"`. `FILE_EXTENSION` is appended,
            which is empty, and `.ckpt` under `as_lightning()`.

    Raises:
        ConfigurationError: `filename` is not a valid folder name, or `dirpath` is a URL.
    """

    order = Order.LAST
    FILE_EXTENSION: str = FileExtension()  # type: ignore[assignment]  # a descriptor; sub-classes may set a text

    def __init__(self, dirpath: str | Path, filename: str = "on_exception") -> None:
        check_template(filename, "OnExceptionCheckpoint")
        if is_url(dirpath):
            raise ConfigurationError(
                f"OnExceptionCheckpoint(dirpath={dirpath!r}): expected a local folder. Pass one, or use "
                f"ModelCheckpoint(dirpath={dirpath!r}, save_on_exception=True)."
            )
        self.dirpath = str(Path(dirpath).expanduser().absolute())
        self.filename = filename

    @property
    def state_key(self) -> str:
        return f"OnExceptionCheckpoint(filename={self.filename!r})"

    @property
    def ckpt_path(self) -> str:
        """The path of the checkpoint."""
        return str(Path(self.dirpath, self._name))

    @property
    def _name(self) -> str:
        return f"{self.filename}{self.FILE_EXTENSION}"

    def on_exception(self, trainer: Run, task: TaskModule, exception: BaseException) -> None:
        if isinstance(exception, Preempted):  # the Trainer has already saved
            return
        if trainer.stage == "fit" and not trainer.fast_dev_run and trainer.is_global_zero:
            trainer.emergency_save(
                SaveRequest(self._name, folder=Path(self.dirpath), metrics=dict(trainer.callback_metrics))
            )
