"""Options of other frameworks' strategies that do not exist here, with what replaces each."""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.core.names.known_arguments import Refuse

OF_LIGHTNING = {
    "accelerator": "Trainer(accelerator=…) says it",
    "parallel_devices": "Trainer(devices=…) says it",
    "cluster_environment": "launchers are found by themselves, or Trainer(launcher=…) says it",
    "checkpoint_io": "checkpoints have one layout under every strategy, which every number of ranks reads",
    "precision_plugin": "Trainer(precision=…) says it",
}
"""Those that all strategies of Lightning take."""


def refuse_removed(owner: str, reasons: Mapping[str, str], *, of: str | None = None) -> Refuse:
    """Return a function that raises a ConfigurationError for an option that a strategy does not have.

    Args:
        owner: The name of its class.
        reasons: Option of another framework → what replaces it.
        of: The name of what it is not an option of. Default: None, which is `owner`.
    """

    def refuse(name: str, value: object, known: list[str]) -> None:
        if name in reasons:
            raise ConfigurationError(f"{name}={value!r} is no option of {of or owner}: {reasons[name]}. Leave it out.")
        own = [one for one in known if one != "self"]
        raise ConfigurationError(f"{owner} has no argument {name!r}.{nearest(name, own)} It takes: {', '.join(own)}.")

    return refuse
