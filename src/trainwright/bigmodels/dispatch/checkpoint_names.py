"""Comparison of the names in a model and in a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import NamedTuple

from trainwright.bigmodels.dispatch.model_weights import PathLike, Weight
from trainwright.core.errors import CheckpointError, TrainwrightWarning
from trainwright.core.names.hidden_names import plain_name

_SHOWN = 10  # names in a message


class LoadedKeys(NamedTuple):
    """Names that exist only in the model or only in the checkpoint. Both lists are empty if all names match."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def match(weights: Sequence[Weight], stored: Collection[str]) -> LoadedKeys:
    """Set the `source` of each weight to its name in the checkpoint, and return the names that are on only one side.

    `stored` are the names in the checkpoint. A weight that is stored under one of its names is not missing.
    """
    missing: list[str] = []
    known: set[str] = set()  # all names under which weights of the model may be stored
    for weight in weights:
        names = []  # possible names of this weight
        for name in weight.names:
            names.append(name)
            # Checkpoints do not contain the prefixes that torch.compile adds to names.
            if plain_name(name) != name:
                names.append(plain_name(name))
        known.update(names)
        present = [name for name in names if name in stored]
        # The last name, as in load_state_dict, which copies the value of each name into the shared tensor.
        weight.source = present[-1] if present else None
        if not present:
            missing.append(weight.names[0])
    unexpected = [name for name in stored if name not in known]
    return LoadedKeys(missing, unexpected)


def report(keys: LoadedKeys, empty: list[str], checkpoint: PathLike, strict: bool) -> None:
    """Warn, or with `strict` raise CheckpointError, if names differ.

    `empty` are the names of missing weights that have no values in the model either.
    """
    if not keys.missing_keys and not keys.unexpected_keys:
        return
    parts = []
    if keys.missing_keys:
        parts.append(f"missing in the checkpoint: {shortened(keys.missing_keys)}")
    if keys.unexpected_keys:
        parts.append(f"not in the model: {shortened(keys.unexpected_keys)}")
    message = f"{checkpoint} does not have the names of the model; {'; '.join(parts)}."
    if strict:
        raise CheckpointError(f"{message} Pass strict=False to load the others.")
    consequence = "Missing weights keep their values."
    if empty:
        consequence = (
            f"{shortened(empty)}, on the meta device, have no values: load them before the model is used, or it "
            "computes with uninitialized memory."
        )
    warnings.warn(f"{message} {consequence}", TrainwrightWarning, stacklevel=4)


def shortened(names: Sequence[str]) -> str:
    """Return up to 10 names for a message, and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name) for name in names[:_SHOWN]) + more
