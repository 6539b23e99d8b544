"""Save the settings of a run, with all defaults, as a configuration file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

CONFIG_NAME = "config.yaml"
_MARK = "# What this run was started with, every default filled in; written by `trainwright fit`.\n"
_NOT_SERIALIZABLE = "Unable to serialize instance"  # how jsonargparse 4.53 writes a default such as a lambda


def resolved_yaml(parser: ArgumentParser, settings: Namespace) -> str:
    """Return the settings as YAML for `--config`. A default that YAML cannot represent (a lambda that creates an
    optimizer) is omitted, so that the default applies again.
    """
    import yaml

    kept = settings.clone()
    kept.pop("config", None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=rf"\s*{_NOT_SERIALIZABLE}")
        text = parser.dump(kept, skip_unset=False)
    return yaml.safe_dump(_without_unserializable(yaml.safe_load(text)), sort_keys=False)


def _without_unserializable(value: object) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_unserializable(item)
            for key, item in value.items()
            if not (isinstance(item, str) and item.startswith(_NOT_SERIALIZABLE))
        }
    if isinstance(value, list):
        return [_without_unserializable(item) for item in value]
    return value


def save_config(text: str, folder: Path, *, name: str = CONFIG_NAME, overwrite: bool = False) -> Path:
    """Write a resolved configuration into the run's folder, by one rename, and return its path. A file of that name
    that was not written by a run (the user's own `config.yaml`, if the run's folder is the project's) is kept, unless
    `overwrite`, and the resolved one is written under another name.
    """
    target = folder / name
    if not overwrite and target.exists() and not target.read_text().startswith(_MARK):
        target = target.with_suffix(f".resolved{target.suffix}")
    folder.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.tmp")
    staging.write_text(_MARK + text)
    staging.replace(target)
    return target
