"""Save the settings of a run, with all defaults, as a configuration file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.callbacks.callback import Callback
from trainwright.core.errors import ConfigurationError
from trainwright.core.run import Run, Stage
from trainwright.core.task import TaskModule

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace


CONFIG_NAME = "config.yaml"
_MARK = "# What this run was started with, every default filled in; written by `trainwright fit`.\n"
_NOT_SERIALIZABLE = "Unable to serialize instance"  # how jsonargparse 4.53 writes a default such as a lambda


def resolved_yaml(parser: ArgumentParser, settings: Namespace) -> str:
    """Return the settings as YAML for `--config`.

    Defaults that YAML cannot represent, such as a lambda, are omitted and apply again when the file is read.
    """
    import yaml

    kept = settings.clone()
    kept.pop("config", None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=rf"\s*{_NOT_SERIALIZABLE}")
        text = parser.dump(kept, skip_unset=False)
    return yaml.safe_dump(_without_unserializable(yaml.safe_load(text)), sort_keys=False)


def _without_unserializable(value: object) -> Any:
    """Return the YAML data without the texts that stand for values that could not be written, at any depth."""
    if isinstance(value, dict):
        kept_items = {}
        for key, item in value.items():
            if not _is_unserializable(item):
                kept_items[key] = _without_unserializable(item)
        return kept_items
    if isinstance(value, list):
        return [_without_unserializable(item) for item in value if not _is_unserializable(item)]
    return value


def _is_unserializable(value: object) -> bool:
    return isinstance(value, str) and value.startswith(_NOT_SERIALIZABLE)


def save_config(text: str, folder: Path, *, name: str = CONFIG_NAME, overwrite: bool = False) -> Path:
    """Write a resolved configuration into the run's folder atomically, and return its path.

    An existing file that was not written by a run, such as the user's own `config.yaml`, is not replaced unless
    `overwrite=True`. The configuration is then written to another file, such as `config.resolved.yaml`.
    """
    target = folder / name
    if not overwrite:
        while _is_of_user(target):
            target = target.with_suffix(f".resolved{target.suffix}")
    folder.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.tmp")
    staging.write_text(_MARK + text)
    staging.replace(target)
    return target


def _is_of_user(file: Path) -> bool:
    return file.exists() and not file.read_text().startswith(_MARK)


class SaveConfigCallback(Callback):
    """Callback that writes the settings of a run, with all defaults, into `trainer.default_root_dir` when `fit` begins.

    Pass the file to `--config` to repeat the run. If a file of this name exists that was not written by a run, the
    settings are written to `config.resolved.yaml` instead.

    Args:
        parser: the parser of the settings.
        config: the settings.
        config_filename: the file's name. Default: `"config.yaml"`.
        overwrite: replace a file that was not written by a run. Default: False.
        multifile: not supported, because only one file is written. Default: False.
        save_to_log_dir: write the file. False only calls `save_config`. Default: True.

    Attributes:
        already_saved: The settings of a fit have been written.

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
        self.already_saved = False

    def setup(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        if stage != "fit" or not trainer.is_global_zero:
            return
        if self.save_to_log_dir:
            text = resolved_yaml(self.parser, self.config)
            save_config(text, Path(trainer.default_root_dir), name=self.config_filename, overwrite=self.overwrite)
        self.save_config(trainer, task, stage)
        self.already_saved = True

    def save_config(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        """Save the configuration elsewhere, such as in a logger. Called on the main process. Empty by default."""
