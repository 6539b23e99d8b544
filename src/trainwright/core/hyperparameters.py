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
DATAMODULE_HYPER_PARAMETERS = "datamodule_hyper_parameters"
# Name of the `__init__` argument whose entries are the hyper-parameters, as after `save_hyperparameters(config)`.
# Missing if the hyper-parameters are the arguments themselves.
HYPER_PARAMETERS_NAME = "hyper_parameters_name"
HYPER_PARAMETERS_ENUMS = "hyper_parameters_enums"  # places of enumerations and OmegaConf, see `to_plain_data`
# Dict of the omitted hyper-parameters that load_from_checkpoint requires: name → description for the error message.
HYPER_PARAMETERS_LEFT_OUT = "hyper_parameters_left_out"

_CONFIG = "omegaconf:OmegaConf"  # class in the places of `to_plain_data` for containers of OmegaConf
_NUMPY_KINDS = "biufcmMU"  # `dtype.kind` of NumPy's scalars: bool, numbers, time differences, dates and text
_NESTS = (dict, OrderedDict, list, tuple)
_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(Path()), torch.dtype, torch.device),
    *(datetime.timedelta, datetime.date),
)


class Hyperparameters(dict[str, Any]):
    """Dict whose entries can also be read and written as attributes: `hparams.lr`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyper-parameter {name!r}. Known: {', '.join(self) or 'none'}") from None

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value

    # A container of OmegaConf equals a plain dict with the same entries, but not an instance of a sub-class of dict.
    def __eq__(self, other: object) -> bool:
        return dict(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __deepcopy__(self, memo: dict[int, Any]) -> Hyperparameters:
        return Hyperparameters({key: copy.deepcopy(value, memo) for key, value in self.items()})


class HyperparametersMixin:
    """Mixin with `save_hyperparameters()` and `hparams`."""

    CHECKPOINT_HYPER_PARAMS_KEY = HYPER_PARAMETERS
    CHECKPOINT_HYPER_PARAMS_NAME = HYPER_PARAMETERS_NAME

    # Set on the instance by `save_hyperparameters`, which may run before nn.Module.__init__. All are therefore written
    # with object.__setattr__, and read with `vars(self).get`, because they are missing until then.
    _hparams: Hyperparameters
    _hparams_initial: Hyperparameters  # copy of `_hparams` at the last call
    _hparams_log: bool = True  # the argument `logger` of the last call
    _hparams_name: str | None  # see HYPER_PARAMETERS_NAME; None if the last call received no mapping
    _hparams_not_default: set[str]  # names whose saved value is not the default of `__init__`, of all calls
    _hparams_left_out: dict[str, str]  # descriptions by name of the last `_warn_of`

    @property
    def hparams(self) -> Hyperparameters:
        """The saved hyper-parameters. Empty before `save_hyperparameters`. Checkpoints contain the current values."""
        hparams: Hyperparameters | None = vars(self).get("_hparams")
        if hparams is None:
            hparams = Hyperparameters()
            object.__setattr__(self, "_hparams", hparams)
        return hparams

    @property
    def hparams_initial(self) -> Hyperparameters:
        """A copy of `hparams` at the last `save_hyperparameters`. Values that a checkpoint cannot contain, such as
        modules, are not copied.
        """
        return copy_hparams(vars(self).get("_hparams_initial") or {})

    def saved_hyperparameters(self, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the entries of a checkpoint for the hyper-parameters. Warns once about values that cannot be saved.

        Args:
            values: the values to save. Default: None, which is `hparams`.

        Raises:
            ConfigurationError: a value contains itself.
        """
        kept, left_out = kept_and_left_out(self.hparams if values is None else values)
        self._warn_of(left_out, f"{type(self).__name__}.hparams", "; the checkpoint is written without it.")
        plain, places = to_plain_data(kept)
        entries: dict[str, Any] = {HYPER_PARAMETERS: plain}
        name = vars(self).get("_hparams_name")
        if name is not None:
            entries[HYPER_PARAMETERS_NAME] = name
        if places:
            entries[HYPER_PARAMETERS_ENUMS] = places
        # Other omitted values are the defaults of `__init__`, which load_from_checkpoint uses again.
        not_default = vars(self).get("_hparams_not_default") or ()
        required = {key: reason for key, reason in left_out.items() if key in not_default}
        if required:
            entries[HYPER_PARAMETERS_LEFT_OUT] = required
        return entries

    def _warn_of(self, left_out: dict[str, str], where: str, consequence: str) -> None:
        """Warn about hyper-parameters that checkpoints omit, unless the last call has warned about them.

        The warning is `where`, the descriptions in `left_out`, and `consequence`.
        """
        known: dict[str, str] = vars(self).get("_hparams_left_out") or {}
        new = [reason for name, reason in left_out.items() if name not in known]
        if new:
            warnings.warn(f"{where}: {'; '.join(new)}{consequence}", TrainwrightWarning, stacklevel=3)
        object.__setattr__(self, "_hparams_left_out", left_out)

    def remove_ignored_hparams(self, ignore_list: Collection[str]) -> None:
        """Remove these names from `hparams` and `hparams_initial`, and thus from checkpoints and loggers."""
        for name in ignore_list:
            self.hparams.pop(name, None)
            initial: dict[str, Any] = vars(self).get("_hparams_initial") or {}
            initial.pop(name, None)

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

        Checkpoints save numbers (also of NumPy), text, paths, dates without a time, dtypes, devices, enumerations,
        sets, lists, tuples, dicts, and containers of OmegaConf with their interpolations resolved. Other values (a
        module, a tensor, a function), and values that would be restored as another type (a named tuple), are in
        `self.hparams`, but omitted from checkpoints and loggers with a warning. `load_from_checkpoint` requires them,
        unless they are defaults of `__init__`.

        Raises:
            ConfigurationError: a name in `args` is not an argument of `__init__`, `args` has another type, or a value
                contains itself.
        """
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        arguments = _init_arguments(self, frame or sys._getframe(1))
        name_of_mapping = None
        # Entries of a mapping have no defaults in `__init__`, so that all of them count as different from the defaults.
        defaults: dict[str, Any] = {}
        if len(args) == 1 and isinstance(args[0], (Mapping, argparse.Namespace)):
            mapping = args[0]
            name_of_mapping = next((name for name, value in arguments.items() if value is mapping), None)
            values = dict(mapping if isinstance(mapping, Mapping) else vars(mapping))
        else:
            self._check_names(args, arguments)
            values = {name: arguments[name] for name in args} if args else arguments
            defaults = _defaults(type(self))
        values = {name: value for name, value in values.items() if name not in ignored}
        self.remove_ignored_hparams(ignored)
        self.hparams.update(values)
        not_default: set[str] = set(vars(self).get("_hparams_not_default") or ())
        for name, value in values.items():
            # Compare identity: `==` of an array or a tensor is not a bool.
            if name not in defaults or value is not defaults[name]:
                not_default.add(name)
        _, left_out = kept_and_left_out(self.hparams)
        self._warn_of(
            left_out,
            "save_hyperparameters",
            ". self.hparams holds it, checkpoints and loggers do not; pass it to load_from_checkpoint. To suppress "
            f"this warning: ignore={list(left_out)!r}.",
        )
        object.__setattr__(self, "_hparams_not_default", not_default)
        object.__setattr__(self, "_hparams_name", name_of_mapping)
        object.__setattr__(self, "_hparams_initial", copy_hparams(self.hparams))
        object.__setattr__(self, "_hparams_log", logger)

    def _check_names(self, names: Sequence[Any], arguments: Collection[str]) -> None:
        """Raise a ConfigurationError if one of `names` is not the name of an argument."""
        others = [type(name).__name__ for name in names if not isinstance(name, str)]
        if others:
            raise ConfigurationError(
                f"save_hyperparameters received a {others[0]}. Pass names of arguments of __init__, or one "
                "mapping or argparse.Namespace."
            )
        missing = [name for name in names if name not in arguments]
        if missing:
            raise ConfigurationError(
                f"save_hyperparameters({', '.join(map(repr, names))}): {type(self).__name__}.__init__ has no "
                f"argument {missing[0]!r}; it has: {', '.join(arguments) or 'none'}."
            )


def _init_arguments(obj: object, frame: types.FrameType | None) -> dict[str, Any]:
    """Collect the arguments of all `__init__` of `obj` on the stack. For equal names, the sub-class has precedence.

    An argument that `__init__` has assigned again has its new value. `*args` are omitted.
    """
    collected: dict[str, Any] = {}
    # From the base class that calls `save_hyperparameters` outward to the sub-class, whose values therefore replace
    # those of the base class.
    while frame is not None and frame.f_code.co_name in ("__init__", "__post_init__"):
        names, _, name_of_kwargs, local_values = inspect.getargvalues(frame)
        is_method_of_obj = bool(names) and local_values.get(names[0]) is obj
        if not is_method_of_obj:
            break
        # `__post_init__` is called by the `__init__` of a dataclass, which has the arguments.
        if frame.f_code.co_name == "__init__":
            # `names` includes keyword-only arguments. A name is missing in the values after `del name`.
            collected |= {name: local_values[name] for name in names[1:] if name in local_values}
            if name_of_kwargs:
                collected |= local_values.get(name_of_kwargs, {})
        frame = frame.f_back
    if not dataclasses.is_dataclass(obj):
        return collected
    for field in dataclasses.fields(obj):
        # If the default factory made the value, the argument is the dataclass's placeholder: read the attribute.
        if field.name in collected and field.default_factory is not dataclasses.MISSING:
            collected[field.name] = getattr(obj, field.name)
    return collected


def _defaults(cls: type) -> dict[str, Any]:
    """Return the defaults of the arguments of all `__init__` of a class. The sub-class has precedence.

    Arguments without a default have the marker `inspect.Parameter.empty`, which is not the value of any argument.
    """
    defaults: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters
            defaults |= {name: parameter.default for name, parameter in parameters.items()}
    return defaults


def differ(value: object, other: object) -> bool:
    """Return whether two hyper-parameters differ in type or value. NaN equals NaN."""
    if type(value) is not type(other):
        return True
    # NaN != NaN, also inside containers, but their texts are equal.
    return value != other and repr(value) != repr(other)


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
    """Return the hyper-parameters that a checkpoint can contain, and by name a description of each of the others.

    Raises:
        ConfigurationError: a value contains itself, or is nested more deeply than Python's recursion limit.
    """
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


def to_plain_data(tree: Any, path: tuple[str | int, ...] = ()) -> tuple[Any, list[list[Any]]]:
    """Replace enumeration members by their names, and containers of OmegaConf by dicts and lists.

    Args:
        tree: nested hyper-parameters, which are not changed.
        path: position of `tree` in the tree of the first call.

    Returns:
        The tree with replaced values, and the places of the replaced values for `from_plain_data`. A place is
        `[[key, index, …], "module:class"]`: path in the tree and class, JSON-compatible. For example,
        `{"stages": [Color.RED]}` results in `{"stages": ["RED"]}` and `[[["stages", 0], "my_module:Color"]]`.
    """
    data = config_as_data(tree)
    if data is not None:
        plain, places = to_plain_data(data, path)
        return plain, [*places, [list(path), _CONFIG]]  # last, so that members inside are restored first
    if isinstance(tree, enum.Enum):
        return tree.name, [[list(path), f"{type(tree).__module__}:{type(tree).__qualname__}"]]
    if type(tree) not in _NESTS:
        return tree, []
    parts: dict[str | int, Any] = {}  # by key, or by index for a list or tuple
    places = []
    for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
        plain, inner_places = to_plain_data(item, (*path, key))
        parts[key] = plain
        places += inner_places
    return type(tree)(parts if isinstance(tree, dict) else parts.values()), places


def from_plain_data(tree: Any, places: Sequence[Any]) -> tuple[Any, dict[str, str]]:
    """Restore the values that `to_plain_data` replaced. Imports nothing, and calls nothing that a checkpoint names.

    Returns:
        The hyper-parameters, and by name a description of each that is omitted because it cannot be restored.
    """
    lost: dict[str, str] = {}
    for path, class_path in places:  # the first key of a path is the hyper-parameter's name
        plain = reduce(operator.getitem, path, tree)  # tree[path[0]][path[1]]…
        if class_path == _CONFIG:
            omegaconf: Any = sys.modules.get("omegaconf")
            if "${" in repr(plain):
                # Interpolations are resolved before a checkpoint is written. Text that looks like one is not evaluated.
                lost[str(path[0])] = f"{path[0]} holds '${{', which OmegaConf would evaluate"
            elif omegaconf is not None:  # without OmegaConf it remains a dict or list
                # allow_objects: OmegaConf supports fewer types than a checkpoint, for example no dtypes.
                config = omegaconf.OmegaConf.create(plain, flags={"allow_objects": True})
                tree = _with_value(tree, path, config)
            continue
        member = _find_member(class_path, plain)
        if member is None:
            lost[str(path[0])] = f"{plain} of the enumeration {class_path}, which is not imported"
        else:
            tree = _with_value(tree, path, member)
    return {name: value for name, value in tree.items() if name not in lost}, lost


def read_hyperparameters(trainer: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """Return the hyper-parameters in a checkpoint's trainer part, and descriptions of those that cannot be restored."""
    return from_plain_data(dict(trainer.get(HYPER_PARAMETERS) or {}), trainer.get(HYPER_PARAMETERS_ENUMS) or ())


def _with_value(tree: Any, path: Sequence[Any], value: object) -> Any:
    """Return `tree` with `value` at a path. Dicts and lists are changed in place, and tuples are replaced."""
    if not path:
        return value
    key = path[0]
    inner = _with_value(tree[key], path[1:], value)
    if isinstance(tree, tuple):
        return (*tree[:key], inner, *tree[key + 1 :])
    tree[key] = inner
    return tree


def _find_member(class_path: str, name: str) -> enum.Enum | None:
    """Return a member of an enumeration that is already imported, or None. `class_path` is `"module:class"`."""
    module_name, _, qualified_name = class_path.partition(":")
    owner: Any = sys.modules.get(module_name)
    for part in qualified_name.split("."):
        # Read `vars` instead of `getattr`, which may call a module's `__getattr__` and thus import something.
        owner = vars(owner).get(part) if isinstance(owner, (types.ModuleType, type)) else None
    if not isinstance(owner, type) or not issubclass(owner, enum.Enum):
        return None
    return owner.__members__.get(name)


def _reason(value: Any, path: str) -> str | None:
    """Return why a checkpoint cannot contain a value, for example `"model is a Linear"`. None if it can."""
    kind = type(value)
    # Compare exact types, because a checkpoint would restore an instance of a sub-class as one of the base class.
    is_numpy_scalar = isinstance(value, np.generic) and value.dtype.kind in _NUMPY_KINDS
    if value is None or kind in _PLAIN or is_numpy_scalar:
        return None
    if isinstance(value, enum.Enum):  # a combination of flags, as `re.I | re.M`, is not a member
        return None if value.name in kind.__members__ else f"{path} is a combination of members of {kind.__name__}"
    if kind in (set, frozenset):
        for item in value:
            if item is not None and type(item) not in _PLAIN:
                return f"{path} holds a {type(item).__name__}"
        return None
    if kind in (list, tuple):
        reasons = (_reason(item, f"{path}[{index}]") for index, item in enumerate(value))
        return next((reason for reason in reasons if reason is not None), None)
    if kind in (dict, OrderedDict):
        for key, item in value.items():
            if key is not None and type(key) is not str:
                return f"{path} has the key {key!r}, and keys must be text"
            reason = _reason(item, f"{path}.{key}")
            if reason is not None:
                return reason
        return None
    try:
        data = config_as_data(value)
    except Exception as error:  # noqa: BLE001 - an interpolation may call any function
        return f"{path} cannot be resolved: {' '.join(str(error).split())}"
    if data is not None:
        return _reason(data, path)
    return f"{path} is a {kind.__name__}{_conversion_hint(value)}"


def _conversion_hint(value: object) -> str:
    """Return a note on converting a value to a plain type that a checkpoint restores. Empty if there is none."""
    if isinstance(value, argparse.Namespace):
        return " (vars() makes a dict of it, and save_hyperparameters(namespace) takes its entries)"
    for kind in (dict, list, tuple, str, int, float):
        if isinstance(value, kind):
            return f" ({kind.__name__}() makes a plain one of it)"
    return ""
