"""Remember the arguments that a task or data module was built with."""

from __future__ import annotations

import argparse
import copy
import enum
import inspect
import math
import types
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigurationError


class Hyperparameters(dict[str, Any]):
    """A dict whose entries can also be read and written as attributes: `hparams.lr`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyper-parameter {name!r}; there are: {', '.join(self) or 'none'}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Hyperparameters:
        return Hyperparameters({key: copy.deepcopy(value, memo) for key, value in self.items()})


class HyperparametersMixin:
    """Gives a class `save_hyperparameters()` and `hparams`."""

    _hparams: Hyperparameters
    _hparams_initial: Hyperparameters
    _hparams_log: bool
    _hparams_name: str | None

    @property
    def hparams(self) -> Hyperparameters:
        """The saved hyper-parameters; empty before `save_hyperparameters`. Changes to it are kept in checkpoints."""
        found: Hyperparameters | None = vars(self).get("_hparams")
        if found is None:
            found = Hyperparameters()
            object.__setattr__(self, "_hparams", found)  # also before nn.Module.__init__ has run
        return found

    @property
    def hparams_initial(self) -> Hyperparameters:
        """A copy of the hyper-parameters as they were when they were saved."""
        initial: Hyperparameters | None = vars(self).get("_hparams_initial")
        return copy.deepcopy(initial) if initial is not None else Hyperparameters()

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Collection[str] | str | None = None,
        frame: types.FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Save the arguments of `__init__` (or the named ones) in `self.hparams`, in checkpoints and in the loggers.

        Call it in `__init__`. With a base class that calls it, the arguments of the sub-class's `__init__` are saved
        too.

        Args:
            args: names of the arguments to keep; all when none is given. The entries of one mapping, or of one
                `argparse.Namespace`, are taken as they are; if it is an argument of `__init__`, loading a task from a
                checkpoint hands it over as that argument.
            ignore: names to leave out.
            frame: the frame of `__init__`; the caller's unless told.
            logger: also hand them to the loggers when training starts.

        Raises:
            ConfigurationError: a value that JSON cannot hold (a module, a tensor, a function), or would give back as
                another type (an enumeration, a named tuple), naming the argument.
        """
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        caller = frame or inspect.currentframe()
        arguments = _init_arguments(self, caller if frame is not None or caller is None else caller.f_back)
        origin = None
        if len(args) == 1 and isinstance(args[0], (Mapping, argparse.Namespace)):
            whole = args[0]
            origin = next((name for name, value in arguments.items() if value is whole), None)
            found = dict(whole) if isinstance(whole, Mapping) else dict(vars(whole))
        else:
            found = arguments
            unknown = [name for name in args if name not in found]
            if unknown:
                raise ConfigurationError(
                    f"save_hyperparameters({', '.join(map(repr, args))}): {type(self).__name__}.__init__ has no "
                    f"argument {unknown[0]!r}; it has: {', '.join(found) or 'none'}."
                )
            if args:
                found = {name: found[name] for name in args}
        found = {name: value for name, value in found.items() if name not in ignored}
        for name, value in found.items():
            _require_jsonable(value, name)
        self.hparams.update(found)
        object.__setattr__(self, "_hparams_name", origin)
        object.__setattr__(self, "_hparams_initial", copy.deepcopy(self.hparams))
        object.__setattr__(self, "_hparams_log", logger)


def _init_arguments(obj: object, frame: types.FrameType | None) -> dict[str, Any]:
    """Collect the arguments of every `__init__` of `obj` on the stack; those of the outermost (sub-)class win."""
    found: dict[str, Any] = {}
    while frame is not None and frame.f_code.co_name == "__init__":
        values = inspect.getargvalues(frame)
        if not values.args or values.locals.get(values.args[0]) is not obj:
            break
        arguments = {name: values.locals[name] for name in values.args[1:] if name in values.locals}
        code = frame.f_code
        keyword_only = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
        arguments |= {name: values.locals[name] for name in keyword_only if name in values.locals}
        if values.keywords:
            arguments |= values.locals.get(values.keywords, {})
        found |= arguments
        frame = frame.f_back
    found.pop("__class__", None)
    return found


def _require_jsonable(value: Any, path: str) -> None:
    kind = type(value)
    if isinstance(value, float) and math.isnan(value):
        raise ConfigurationError(f"save_hyperparameters: {path} is NaN, which JSON cannot hold.")
    # Exact types: a checkpoint gives back no other. NumPy's own numbers and texts are Python's with a name.
    if value is None or kind in _PLAIN or (isinstance(value, (float, str)) and kind.__module__ == "numpy"):
        return
    if kind in (list, tuple):
        for index, item in enumerate(value):
            _require_jsonable(item, f"{path}[{index}]")
        return
    if kind in (dict, OrderedDict):
        for key, item in value.items():
            if type(key) is not str:
                raise ConfigurationError(f"save_hyperparameters: {path} has the key {key!r}; keys must be text.")
            _require_jsonable(item, f"{path}.{key}")
        return
    name = path.partition(".")[0].partition("[")[0]
    raise ConfigurationError(
        f"save_hyperparameters: {path} is a {kind.__name__}, which JSON cannot hold{_in_plain_words(value)}. "
        f"Leave it out with save_hyperparameters(ignore=[{name!r}]), or pass numbers, text, lists and dicts."
    )


_PLAIN = (bool, int, float, str, type(Path()))


def _in_plain_words(value: Any) -> str:
    """Say what plain value stands for one whose type a checkpoint would not give back."""
    if isinstance(value, enum.Enum):
        return f" as what it is; its value is {value.value!r}"
    if isinstance(value, argparse.Namespace):
        return " as what it is; vars() makes a dict of it, and save_hyperparameters(namespace) takes its entries"
    for kind in (dict, list, tuple, str, int, float):
        if isinstance(value, kind):
            return f" as what it is; {kind.__name__}() makes a plain one of it"
    return ""
