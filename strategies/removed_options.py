"""Arguments of others' strategies that there are none of here, and who does what they did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainwright.core.errors import ConfigurationError, nearest

OF_LIGHTNING = {
    "accelerator": "Trainer(accelerator=…) says it",
    "parallel_devices": "Trainer(devices=…) says it",
    "cluster_environment": "launchers are found by themselves, or Trainer(launcher=…) says it",
    "checkpoint_io": "checkpoints have one layout under every strategy, which every number of ranks reads",
    "precision_plugin": "Trainer(precision=…) says it",
}
"""Those that all strategies of Lightning take."""


def refuse_options(
    owner: str, options: Mapping[str, Any], known: Iterable[str], reasons: Mapping[str, str], *, of: str | None = None
) -> None:
    """Raise for arguments that a strategy does not take.

    Args:
        owner: its class's name.
        options: what it was given besides its own.
        known: its own.
        reasons: by argument, who does what it did elsewhere.
        of: what it is no option of; `owner` unless told.

    Raises:
        ConfigurationError: there is any.
    """
    for name, value in options.items():
        if name in reasons:
            raise ConfigurationError(f"{name}={value!r} is no option of {of or owner}: {reasons[name]}. Leave it out.")
        raise ConfigurationError(
            f"{owner} has no argument {name!r}.{nearest(name, known)} It takes: {', '.join(known)}."
        )
