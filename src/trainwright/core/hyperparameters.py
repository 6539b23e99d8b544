"""Save the arguments with which a task or data module was built."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import enum
import inspect
import operator
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainwright.core.errors import ConfigurationError, TrainwrightWarning

# Keys of a checkpoint's trainer part.
HYPER_PARAMETERS = "hyper_parameters"
HYPER_PARAMETERS_NAME = "hyper_parameters_name"  # the argument that held the entries
HYPER_PARAMETERS_ENUMS = "hyper_parameters_enums"  # see `without_enums`
HYPER_PARAMETERS_LEFT_OUT = "hyper_parameters_left_out"  # argument that must be passed to load → what it was


class Hyperparameters(dict[str, Any]):
    """Dict whose entries can also be read and written as attributes: `hparams.lr`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyper-parameter {name!r}; there are: {', '.join(self) or 'none'}") from None

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Hyperparameters:
        return Hyperparameters({key: copy.deepcopy(value, memo) for key, value in self.items()})


class HyperparametersMixin:
    """Mixin with `save_hyperparameters()` and `hparams`."""

    CHECKPOINT_HYPER_PARAMS_KEY = HYPER_PARAMETERS
    CHECKPOINT_HYPER_PARAMS_NAME = HYPER_PARAMETERS_NAME

    _hparams: Hyperparameters
    _hparams_initial: Hyperparameters
    _hparams_log: bool = True
    _hparams_name: str | None
    _hparams_left_out: dict[str, str]
    _hparams_given: set[str]  # arguments whose value is not the default

    @property
    def hparams(self) -> Hyperparameters:
        """The saved hyper-parameters. Empty before `save_hyperparameters`. Checkpoints contain the current values."""
        found: Hyperparameters | None = vars(self).get("_hparams")
        if found is None:
            found = Hyperparameters()
            object.__setattr__(self, "_hparams", found)  # also before nn.Module.__init__ has run
        return found

    @property
    def hparams_initial(self) -> Hyperparameters:
        """A copy of `hparams` at the last `save_hyperparameters`. Values that a checkpoint cannot contain, such as
        modules, are not copied.
        """
        return copy_hparams(vars(self).get("_hparams_initial") or {})

    def saved_hyperparameters(self, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the entries of a checkpoint for the hyper-parameters. Warns once of values that cannot be saved.

        Args:
            values: the values to save. Default: None, which is `hparams`.
        """
        kept, left_out = kept_and_left_out(self.hparams if values is None else values)
        plain, enums = without_enums(kept)
        self._warn_of(left_out, f"{type(self).__name__}.hparams: {{}}; the checkpoint is written without it.")
        name = vars(self).get("_hparams_name")
        given = vars(self).get("_hparams_given") or ()
        left_out = {key: reason for key, reason in left_out.items() if key in given}
        return {
            HYPER_PARAMETERS: plain,
            **({} if name is None else {HYPER_PARAMETERS_NAME: name}),
            **({HYPER_PARAMETERS_ENUMS: enums} if enums else {}),
            **({HYPER_PARAMETERS_LEFT_OUT: left_out} if left_out else {}),
        }

    def _warn_of(self, left_out: dict[str, str], text: str) -> None:
        """Warn once about each hyper-parameter of `left_out` with `text`, in which its descriptions replace `{}`."""
        told: dict[str, str] = vars(self).get("_hparams_left_out") or {}
        new = [reason for name, reason in left_out.items() if name not in told]
        if new:
            warnings.warn(text.replace("{}", "; ".join(new), 1), TrainwrightWarning, stacklevel=3)
        object.__setattr__(self, "_hparams_left_out", left_out)

    def remove_ignored_hparams(self, ignore_list: Collection[str]) -> None:
        """Remove these names from `hparams` and `hparams_initial`, and thus from checkpoints and loggers."""
        for name in ignore_list:
            self.hparams.pop(name, None)
            (vars(self).get("_hparams_initial") or {}).pop(name, None)

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Collection[str] | str | None = None,
        frame: types.FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Save the arguments of `__init__` (or the named ones) in `self.hparams`, in checkpoints and in the loggers.

        Call this method in `__init__`, or in `__post_init__` of a dataclass. If a base class calls it, arguments of the
        subclass's `__init__` are saved, too.

        Args:
            args: names of the arguments to save, or one mapping or `argparse.Namespace`, whose entries are saved.
                Default: all arguments. If the mapping is an argument of `__init__`, `load_from_checkpoint` passes its
                entries as this argument.
            ignore: names to skip. They are also removed if a base class saved them. Default: None.
            frame: the stack frame of `__init__`. Default: None, the frame of the caller.
            logger: also pass hyper-parameters to the loggers when training starts. Default: True.

        Checkpoints save numbers (also of NumPy), text, paths, dates, dtypes, devices, enumerations, sets, lists,
        tuples, dicts, and containers of OmegaConf with their interpolations resolved. Other values (a module, a
        tensor, a function), and values that would be restored as another type (a named tuple), are in `self.hparams`,
        but omitted from checkpoints and loggers with a warning. `load_from_checkpoint` requires them, unless they are
        defaults of `__init__`.

        Raises:
            ConfigurationError: a name in `args` is not an argument of `__init__`.
        """
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        caller = frame or inspect.currentframe()
        arguments = _init_arguments(self, caller if frame is not None or caller is None else caller.f_back)
        origin = None
        defaults: dict[str, Any] = {}
        if len(args) == 1 and isinstance(args[0], (Mapping, argparse.Namespace)):
            whole = args[0]
            origin = next((name for name, value in arguments.items() if value is whole), None)
            found = dict(whole) if isinstance(whole, Mapping) else dict(vars(whole))
        else:
            found = arguments
            defaults = _defaults(type(self))
            strange = [type(name).__name__ for name in args if not isinstance(name, str)]
            if strange:
                raise ConfigurationError(
                    f"save_hyperparameters received a {strange[0]}. Pass names of arguments of __init__, or one "
                    "mapping or argparse.Namespace."
                )
            unknown = [name for name in args if name not in found]
            if unknown:
                raise ConfigurationError(
                    f"save_hyperparameters({', '.join(map(repr, args))}): {type(self).__name__}.__init__ has no "
                    f"argument {unknown[0]!r}; it has: {', '.join(found) or 'none'}."
                )
            if args:
                found = {name: found[name] for name in args}
        found = {name: value for name, value in found.items() if name not in ignored}
        self.remove_ignored_hparams(ignored)
        self.hparams.update(found)
        given = {name for name, value in found.items() if name not in defaults or value is not defaults[name]}
        object.__setattr__(self, "_hparams_given", given | (vars(self).get("_hparams_given") or set()))
        _, left_out = kept_and_left_out(self.hparams)
        self._warn_of(
            left_out,
            "save_hyperparameters: {}. self.hparams holds it, checkpoints and loggers do not; pass it to "
            f"load_from_checkpoint. To suppress this warning: ignore={list(left_out)!r}.",
        )
        object.__setattr__(self, "_hparams_name", origin)
        object.__setattr__(self, "_hparams_initial", copy_hparams(self.hparams))
        object.__setattr__(self, "_hparams_log", logger)


def _init_arguments(obj: object, frame: types.FrameType | None) -> dict[str, Any]:
    """Collect the arguments of all `__init__` of `obj` on the stack. For equal names, the sub-class has precedence."""
    found: dict[str, Any] = {}
    while frame is not None and frame.f_code.co_name in ("__init__", "__post_init__"):
        values = inspect.getargvalues(frame)
        if not values.args or values.locals.get(values.args[0]) is not obj:
            break
        if frame.f_code.co_name == "__post_init__":  # called by the `__init__` of a dataclass, which has the arguments
            frame = frame.f_back
            continue
        arguments = {name: values.locals[name] for name in values.args[1:] if name in values.locals}
        code = frame.f_code
        keyword_only = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
        arguments |= {name: values.locals[name] for name in keyword_only if name in values.locals}
        if values.keywords:
            arguments |= values.locals.get(values.keywords, {})
        found |= arguments
        frame = frame.f_back
    found.pop("__class__", None)
    for field in dataclasses.fields(obj) if dataclasses.is_dataclass(obj) else ():
        # The argument holds a marker if the factory made the value.
        if field.name in found and field.default_factory is not dataclasses.MISSING:
            found[field.name] = getattr(obj, field.name)
    return found


def _defaults(cls: type) -> dict[str, Any]:
    """Return the defaults of the arguments of all `__init__` of a class. The sub-class has precedence."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters
            found |= {name: parameter.default for name, parameter in parameters.items()}
    return found


def differ(value: object, other: object) -> bool:
    """Return whether two hyper-parameters differ in type or value. NaN equals NaN."""
    return type(value) is not type(other) or (value != other and repr(value) != repr(other))


def config_as_data(value: object) -> Any:
    """Return a container of OmegaConf as nested dicts and lists with resolved interpolations. None for other values."""
    omegaconf: Any = sys.modules.get("omegaconf")  # imported if such a container exists
    if omegaconf is None or not omegaconf.OmegaConf.is_config(value):
        return None
    return omegaconf.OmegaConf.to_container(value, resolve=True)


def copy_hparams(values: Mapping[str, Any]) -> Hyperparameters:
    """Return a copy of hyper-parameters. Values that a checkpoint cannot contain, such as modules, are not copied."""
    kept, _ = kept_and_left_out(values)
    return Hyperparameters({**values, **copy.deepcopy(kept)})


def kept_and_left_out(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the hyper-parameters that a checkpoint can contain, and by name a description of each of the others."""
    reasons = {}
    for name, value in values.items():
        try:
            reasons[name] = _reason(value, name)
        except RecursionError:
            raise ConfigurationError(
                f"the hyper-parameter {name!r} contains itself, or is nested too deeply. Remove that reference."
            ) from None
    kept = {name: value for name, value in values.items() if reasons[name] is None}
    return kept, {name: reason for name, reason in reasons.items() if reason is not None}


def without_enums(tree: Any, path: tuple[str | int, ...] = ()) -> tuple[Any, list[list[Any]]]:
    """Return nested hyper-parameters with names of enumeration members and data of OmegaConf's containers instead.

    Also return their positions: `[[key, index, …], "module:class"]`, path in the tree and class, JSON-compatible.
    """
    data = config_as_data(tree)
    if data is not None:
        plain, places = without_enums(data, path)
        return plain, [*places, [list(path), _CONFIG]]  # members inside are restored first
    if isinstance(tree, enum.Enum):
        return tree.name, [[list(path), f"{type(tree).__module__}:{type(tree).__qualname__}"]]
    if type(tree) not in _NESTS:
        return tree, []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    parts = {key: without_enums(item, (*path, key)) for key, item in items}
    places = [place for _, found in parts.values() for place in found]
    plain = {key: part for key, (part, _) in parts.items()}
    return (type(tree)(plain) if isinstance(tree, dict) else type(tree)(plain.values())), places


def with_enums(tree: Any, places: Sequence[Any]) -> tuple[Any, dict[str, str]]:
    """Restore what `without_enums` replaced. Nothing is imported for this, and nothing of a checkpoint is called.

    Returns:
        The hyper-parameters, and by name a description of each that is omitted because it cannot be restored.
    """
    lost: dict[str, str] = {}
    for path, home in places:
        name = reduce(operator.getitem, path, tree)
        if home == _CONFIG and "${" in repr(name):
            lost[str(path[0])] = f"{path[0]} holds '${{', which OmegaConf would evaluate"
            continue
        if home == _CONFIG:
            if (omegaconf := sys.modules.get("omegaconf")) is not None:  # otherwise it stays plain data
                tree = _replaced(tree, path, omegaconf.OmegaConf.create(name, flags={"allow_objects": True}))
            continue
        member = _find_member(home, name)
        if member is None:
            lost[str(path[0])] = f"{name} of the enumeration {home}, which is not imported"
        else:
            tree = _replaced(tree, path, member)
    return {name: value for name, value in tree.items() if name not in lost}, lost


def of_checkpoint(trainer: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """Return the result of `with_enums` for a checkpoint's trainer part."""
    return with_enums(dict(trainer.get(HYPER_PARAMETERS) or {}), trainer.get(HYPER_PARAMETERS_ENUMS) or ())


def _replaced(tree: Any, path: Sequence[Any], value: object) -> Any:
    if not path:
        return value
    key, inner = path[0], _replaced(tree[path[0]], path[1:], value)
    if isinstance(tree, tuple):
        return (*tree[:key], inner, *tree[key + 1 :])
    tree[key] = inner
    return tree


def _find_member(home: str, name: str) -> enum.Enum | None:
    module, _, qualified = home.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = vars(found).get(part) if isinstance(found, (types.ModuleType, type)) else None
    if not isinstance(found, type) or not issubclass(found, enum.Enum):
        return None
    return found.__members__.get(name)


def _reason(value: Any, path: str) -> str | None:
    """Return why a checkpoint cannot contain a value, for example `"model is a Linear"`. None if it can."""
    kind = type(value)
    # Exact types: a checkpoint restores no others. NumPy's own numbers and texts are Python's with a name.
    if value is None or kind in _PLAIN or (isinstance(value, np.generic) and value.dtype.kind in _NUMPY_KINDS):
        return None
    if isinstance(value, enum.Enum):
        return None if value.name in kind.__members__ else f"{path} is a combination of members of {kind.__name__}"
    if kind in (set, frozenset):
        odd = next((item for item in value if type(item) not in _PLAIN), None)
        return None if odd is None else f"{path} holds a {type(odd).__name__}"
    if kind in (list, tuple):
        reasons = (_reason(item, f"{path}[{index}]") for index, item in enumerate(value))
        return next((reason for reason in reasons if reason is not None), None)
    if kind in (dict, OrderedDict):
        odd = next((key for key in value if type(key) is not str), None)
        if odd is not None:
            return f"{path} has the key {odd!r}, and keys must be text"
        reasons = (_reason(item, f"{path}.{key}") for key, item in value.items())
        return next((reason for reason in reasons if reason is not None), None)
    try:
        data = config_as_data(value)
    except Exception as error:  # noqa: BLE001 - an interpolation may call any function
        return f"{path} cannot be resolved: {' '.join(str(error).split())}"
    return f"{path} is a {kind.__name__}{_in_plain_words(value)}" if data is None else _reason(data, path)


_CONFIG = "omegaconf:OmegaConf"  # where `without_enums` replaced a container of OmegaConf
_NUMPY_KINDS = "biufcmMU"  # numbers, dates and text
_NESTS = (dict, OrderedDict, list, tuple)
_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(Path()), torch.dtype, torch.device),
    *(datetime.timedelta, datetime.date),
)


def _in_plain_words(value: object) -> str:
    """Return a note on converting a value to a plain type that a checkpoint restores. Empty if there is none."""
    if isinstance(value, argparse.Namespace):
        return " (vars() makes a dict of it, and save_hyperparameters(namespace) takes its entries)"
    for kind in (dict, list, tuple, str, int, float):
        if isinstance(value, kind):
            return f" ({kind.__name__}() makes a plain one of it)"
    return ""
