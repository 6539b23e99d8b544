"""Declaration of an engine's options, which plugins, `trainwright launch` and the check of variables read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from trainwright.core.names.kwargs_handler import from_variable

BY_TABLE = ""  # the table determines the name


@dataclass(frozen=True, slots=True)
class EngineOption:
    """One option of an engine.

    Attributes:
        name: Field of the plugin. For options that only the launcher reads, the name of the flag.
        help: Help text of the flag, one sentence.
        read: Converts the text of the flag or variable. Raises ValueError for an invalid text.
        flag: Name of the option of `trainwright launch`. None: no flag sets the option.
        variable: Environment variable. None: no variable sets it.
        choices: The values that the launcher accepts. Empty: any.
        other: Advice for values that are not in `choices`.
        path: Keys of the option in the engine's own configuration, if it has one.
        refusal: Advice for values that the plugin does not support. Empty: all values are supported.
        harmless: Values that are accepted in spite of `refusal` or `not_launched`.
        not_launched: Reason for which the launcher does not support the option. Empty: the flag is accepted without
            effect. None: the launcher supports it.
        needs_switch: False if the flag may be passed without the flag that selects the engine.
    """

    name: str
    help: str = ""
    read: Callable[[str], Any] = str
    flag: str | None = BY_TABLE
    variable: str | None = BY_TABLE
    choices: tuple[str, ...] = ()
    other: str = ""
    path: tuple[str, ...] = ()
    refusal: str = ""
    harmless: tuple[object, ...] = ()
    not_launched: str | None = None
    needs_switch: bool = True


@dataclass(frozen=True)
class OptionTable:
    """The options of an engine.

    Attributes:
        title: Heading in the launcher's `--help`.
        section: Key of the mapping in the launcher's YAML files that contains the options.
        flag: Names of the flags. `{}` is replaced by the name of the option.
        variable: Names of the variables. `{}` is replaced by the name of the option in capitals.
        rows: The options.
        switch: Flag that selects the engine. Empty: the options are not those of an engine.
        argument: Argument of the Accelerator that receives the plugin.
    """

    title: str
    section: str
    flag: str
    variable: str
    rows: tuple[EngineOption, ...]
    switch: str = ""
    argument: str = ""

    @cached_property
    def options(self) -> dict[str, EngineOption]:
        """The options by name, each with its flag and its variable."""
        found = {}
        for row in self.rows:
            flag = self.flag.format(row.name) if row.flag == BY_TABLE else row.flag
            variable = self.variable.format(row.name.upper()) if row.variable == BY_TABLE else row.variable
            found[row.name] = replace(row, flag=flag, variable=variable)
        return found

    @property
    def names(self) -> list[str]:
        """Names of the options, and of their flags where they differ."""
        found = []
        for option in self.options.values():
            found.append(option.name)
            if option.flag not in (None, option.name):
                found.append(str(option.flag))
        return found

    def find(self, name: str) -> EngineOption | None:
        """Return the option with this name or this flag, or None."""
        for option in self.options.values():
            if name in (option.name, option.flag):
                return option
        return None

    @property
    def switch_variable(self) -> str:
        """Environment variable that selects the engine."""
        return f"ACCELERATE_{self.switch.upper()}"

    @property
    def variables(self) -> list[str]:
        """Environment variables of the options."""
        return [option.variable for option in self.options.values() if option.variable is not None]

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Beginnings of the variables of the options, known or misspelled."""
        prefix = self.variable.format("")
        return (prefix, *(name for name in self.variables if not name.startswith(prefix)))

    def field(self, name: str, read: Callable[[str], Any] | None = None) -> Any:
        """Return the field of a plugin. Its default is the value of the option's variable.

        Args:
            name: Name of the option.
            read: Converts the text of the variable. Default: None, as for the flag.
        """
        option = self.options[name]
        assert option.variable is not None  # only the launcher reads an option without a variable
        further = {"refusal": option.refusal, "harmless": option.harmless}
        return from_variable(option.variable, read or option.read, **further)

    def paths(self) -> dict[str, tuple[str, ...]]:
        """Return the path in the engine's own configuration of each option that has one."""
        return {option.name: option.path for option in self.rows if option.path}
