"""Save a run's configuration when training starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.callbacks.callback import Callback
from trainwright.cli.configs.saved_config import CONFIG_NAME, resolved_yaml, save_config
from trainwright.core.errors import ConfigurationError
from trainwright.core.run import Run, Stage
from trainwright.core.task import TaskModule

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace


class SaveConfigCallback(Callback):
    """Callback that writes the settings of a run, with all defaults, into `trainer.default_root_dir` when `fit` begins.
    The file can be read with `--config`. A file of that name that was not written by a run is kept: the settings are
    then written to `config.resolved.yaml`.

    Args:
        parser: the parser of the settings.
        config: the settings.
        config_filename: the file's name. Default: `"config.yaml"`.
        overwrite: replace a file that was not written by a run. Default: False.
        multifile: not supported; one file is written. Default: False.
        save_to_log_dir: write the file; False: only `save_config` is called. Default: True.

    Raises:
        ConfigurationError: `multifile=True`.
    """

    def __init__(
        self,
        parser: ArgumentParser,
        config: Namespace,
        config_filename: str = CONFIG_NAME,
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        if multifile:
            raise ConfigurationError(
                "SaveConfigCallback(multifile=True): only one file is written. Remove the argument."
            )
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
        """Save the configuration elsewhere, such as in a logger; called on the main process. Default: nothing."""
