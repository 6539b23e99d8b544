"""Save a run's configuration when it starts to train, and let a sub-class put it elsewhere too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainwright.callbacks.callback import Callback
from trainwright.cli.configs.saved_config import CONFIG_NAME, resolved_yaml, save_config
from trainwright.core.errors import ConfigurationError
from trainwright.core.run import Run, Stage
from trainwright.core.task import TaskModule


class SaveConfigCallback(Callback):
    """Write the settings of a run, every default filled in, into `trainer.default_root_dir` when `fit` begins.

    The file reads back with `--config`. A file of that name which no run has written is left alone: the settings then
    go beside it, into `config.resolved.yaml`.

    Args:
        parser: that of the settings.
        config: the settings.
        config_filename: the file's name. Default: `"config.yaml"`.
        overwrite: replace also a file that no run has written. Default: False.
        multifile: not served; one file is written.
        save_to_log_dir: write the file; False: only `save_config` is called. Default: True.

    Raises:
        ConfigurationError: `multifile=True`.
    """

    def __init__(
        self,
        parser: Any,
        config: Any,
        config_filename: str = CONFIG_NAME,
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        if multifile:
            raise ConfigurationError("SaveConfigCallback(multifile=True): one file is written. Leave it out.")
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.overwrite = overwrite
        self.save_to_log_dir = save_to_log_dir

    def setup(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        if stage != "fit" or not trainer.is_global_zero:
            return
        if self.save_to_log_dir:
            text = resolved_yaml(self.parser, self.config)
            save_config(text, Path(trainer.default_root_dir), name=self.config_filename, overwrite=self.overwrite)
        self.save_config(trainer, task, stage)

    def save_config(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        """Put the configuration elsewhere too, such as into a logger; called on the main process. Default: nothing."""
