"""An attribute that a search may set: its location, and the error if it does not exist."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.core.hyperparameters import HyperparametersMixin


class TunedAttribute:
    """Attribute of the task, of the data module, or of their `hparams`, under one of several names.

    Args:
        names: possible names. The first that exists is used.
        task: the task.
        datamodule: the data module, or None.
        purpose: the argument that names the attribute, for messages.
        kind: type of the attributes that the message lists.

    Raises:
        ConfigurationError: the attribute does not exist. The message lists attributes of type `kind`.
    """

    def __init__(
        self,
        names: Iterable[str],
        task: HyperparametersMixin,
        datamodule: HyperparametersMixin | None,
        *,
        purpose: str,
        kind: type[int] | type[float],
    ) -> None:
        names = list(names)
        owners = [task] if datamodule is None else [task, datamodule]
        for name in names:
            # The objects and the `hparams` that contain the name. `set` sets it in all of them.
            self._attributes = [owner for owner in owners if _has(owner, name)]
            self._hparams = [owner.hparams for owner in owners if name in owner.hparams]
            if self._attributes or self._hparams:
                self.name = name
                return
        raise ConfigurationError(_missing(names, owners, purpose, kind))

    def get(self) -> Any:
        """Return the value: the task's, else the data module's, else the one in `hparams`."""
        if self._attributes:
            return getattr(self._attributes[0], self.name)
        return self._hparams[0][self.name]

    def set(self, value: object) -> None:
        """Set the attribute on every object that has it.

        Raises:
            ConfigurationError: an object refuses the value.
        """
        for owner in self._attributes:
            try:
                setattr(owner, self.name, value)
            except AttributeError as error:
                raise ConfigurationError(
                    f"{type(owner).__name__}.{self.name} cannot be set: {error}. Make it an attribute."
                ) from None
        for hparams in self._hparams:
            hparams[self.name] = value


def _has(owner: object, name: str) -> bool:
    """Return whether an object has, under a name, an own attribute of any type, a property with a setter, or a number
    in its class.
    """
    if name in vars(owner):
        return True
    of_class = getattr(type(owner), name, None)
    if isinstance(of_class, property):
        # A property without a setter returns a value from elsewhere, usually from hparams.
        return of_class.fset is not None
    return isinstance(of_class, (int, float))


def _missing(names: list[str], owners: list[HyperparametersMixin], purpose: str, kind: type) -> str:
    """Return the error text for an attribute that no owner has."""
    candidates: dict[str, str] = {}  # name → "Task.hparams.lr = 0.1"
    for owner in owners:
        owner_name = type(owner).__name__
        for prefix, values in ((owner_name, vars(owner)), (f"{owner_name}.hparams", owner.hparams)):
            for name, value in values.items():
                # The exact type, because a bool is an int.
                if type(value) is kind and not name.startswith("_"):
                    candidates[name] = f"{prefix}.{name} = {value!r}"
    wanted = " or ".join(map(repr, names))
    owner_names = [type(owner).__name__ for owner in owners]
    subject = f"neither {' nor '.join(owner_names)} has" if len(owners) > 1 else f"{owner_names[0]} has no"
    if candidates:
        listed = f"Attributes of type {kind.__name__}: {', '.join(candidates.values())}."
    else:
        subject_has_none = "Neither has" if len(owners) > 1 else "It has no"
        listed = f"{subject_has_none} attributes of type {kind.__name__}."
    return (
        f"{purpose}: {subject} {wanted}, as an attribute or in hparams.{nearest(names[0], candidates)} {listed} Name "
        f"the right one, or create the loader (or optimizer) from self.{names[0]}."
    )
