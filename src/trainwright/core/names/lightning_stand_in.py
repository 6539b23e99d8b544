"""Replace Lightning by Trainwright, in one process."""

from __future__ import annotations

import functools
import os
import re
from abc import ABCMeta
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.constants import LIGHTNING_VERSION
from trainwright.core.names.foreign_names import answer_for, canonical, own_name
from trainwright.core.names.lightning_modules import CLUSTER_ENVIRONMENTS, NAMES
from trainwright.core.names.replacement import ReplacedModule, Replacement

_AVAILABLE = re.compile(r"_(\w+?)_AVAILABLE")  # `_RICH_AVAILABLE` of lightning.pytorch.utilities.imports


def as_lightning() -> LightningReplacement:
    """Replace Lightning by Trainwright in this process.

    `import lightning`, `import pytorch_lightning` and imports of their modules then return the names of Trainwright:
    `lightning.LightningModule` and `pytorch_lightning.LightningModule` are `trainwright.TaskModule`. Libraries whose
    classes derive from Lightning's use Trainwright. Lightning need not be installed. A name without a counterpart can
    be imported and sub-classed. Calling it raises a ConfigurationError with the replacement. Call this function before
    importing these libraries. A second call has no effect. `python -m trainwright.as_lightning script.py …` runs a
    script this way. The end of the result's `with` block, or its method `remove()`, restores the installed Lightning.

    Raises:
        ConfigurationError: Lightning is imported already.
    """
    return LightningReplacement.active() or LightningReplacement().start(
        "that is built on it. Call trainwright.as_lightning() before they are imported, or start the script with "
        "python -m trainwright.as_lightning."
    )


class LightningReplacement(Replacement):
    """Replacement of Lightning by Trainwright until `remove`. Also a context manager.

    It provides Lightning's modules, and the metadata by which libraries check Lightning's version.
    """

    packages = ("lightning", "pytorch_lightning", "lightning_fabric")
    distributions = ("lightning", "pytorch-lightning", "lightning-fabric")
    version = LIGHTNING_VERSION
    home_page = "https://github.com/Lightning-AI/lightning"

    def is_package(self, fullname: str) -> bool | None:
        """Return whether a module has sub-modules, or None if the module does not exist."""
        path = canonical(fullname)
        return any(name.startswith(f"{path}.") for name in NAMES) if path in NAMES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module whose names are found when they are read."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Let `torch.load` read checkpoints. `create_module` returns a complete module."""
        # Not in `as_lightning()`, which must not import torch. A program with a checkpoint imports Lightning first.
        _load_folders()

    def remove(self) -> None:
        """Let later imports find the installed library. Names that scripts have already imported do not change."""
        super().remove()
        torch: Any = import_module("torch")
        torch.load = getattr(torch.load, "without_folders", torch.load)


class _Module(ReplacedModule):
    """A module of Lightning with the names of Trainwright."""

    def __getattr__(self, name: str) -> Any:
        value = self._find(name)
        setattr(self, name, value)  # the next access does not call this function
        return value

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._names()]

    def _names(self) -> list[str]:
        return NAMES[canonical(self.__name__)].split()

    def _find(self, name: str) -> Any:
        path = canonical(self.__name__)
        if name == "__all__":
            return [listed for listed in self._names() if not listed.startswith("_")]
        if name == "__version__" and path in ("lightning", "lightning.pytorch", "lightning.fabric"):
            return LIGHTNING_VERSION
        if f"{path}.{name}" in NAMES:
            return import_module(f"{self.__name__}.{name}")
        if name in self._names():
            return _counterpart(path, name)
        if path.endswith(".imports") and (match := _AVAILABLE.fullmatch(name)) is not None:
            return find_spec(match[1].lower()) is not None
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name)


def _load_folders() -> None:
    """Let `torch.load` read a checkpoint folder as the dict that a checkpoint file of Lightning contains."""
    torch: Any = import_module("torch")
    original = torch.load
    if hasattr(original, "without_folders"):
        return

    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        # torch.load of a folder is an error, so this changes no other result.
        if isinstance(f, (str, os.PathLike)) and os.path.isdir(f):
            return import_module("trainwright.checkpoint.load_task").load_as_lightning(f, map_location)
        return original(f, map_location, *args, **kwargs)

    load.without_folders = original  # type: ignore[attr-defined]  # for `remove`
    torch.load = load


def only_loads(plugin: object) -> bool:
    """Return whether a plugin is a TorchCheckpointIO that overrides loading, and neither saving nor removing."""
    cls: Any = type(plugin)
    return isinstance(cls, _Absent) and bool(cls.only_loads())


def is_cluster_environment(plugin: object) -> bool:
    """Return whether a plugin is a sub-class of a cluster environment, with its own world size and rank."""
    cls: Any = type(plugin)
    return isinstance(cls, _Absent) and bool(cls.is_own_environment())


def _counterpart(module: str, name: str) -> Any:
    """Return Trainwright's object for a name of Lightning, or a class that raises an error when it is used."""
    own = own_name(f"{module}.{name}")
    if own is not None:
        home, _, attribute = own.rpartition(".")
        return getattr(import_module(home), attribute)
    if name not in _absent:
        _absent[name] = _Absent(name, (), {"__module__": module})
    return _absent[name]


_absent: dict[str, _Absent] = {}  # by the name alone, so that a class is the same in all modules that have it


class _Absent(ABCMeta):
    """Class of the classes that represent names of Lightning without a counterpart.

    Libraries import such names at their top, annotate with them, call `isinstance` and derive classes from them,
    whether or not they use them. So these are allowed, and a call or another use is an error. The base ABCMeta lets
    them be combined with abstract classes.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.only_loads() or cls.is_own_environment() or cls._is_own_accelerator():
            return super().__call__(*args, **kwargs)
        raise ConfigurationError(cls._advice())

    def only_loads(cls) -> bool:
        """Return whether this is a TorchCheckpointIO that overrides loading, and neither saving nor removing.

        Checkpoints of Trainwright can be loaded without it, so the Trainer accepts it.
        """
        own = [each for each in cls.__mro__ if each not in _absent.values()]
        saves = any({"save_checkpoint", "remove_checkpoint"} & vars(each).keys() for each in own)
        return cls in own and cls._lightning_bases() == ["TorchCheckpointIO"] and not saves

    def is_own_environment(cls) -> bool:
        """Return whether this is a sub-class of a cluster environment that defines `world_size` and `global_rank`.

        The Trainer accepts it if both agree with the launcher's environment variables.
        """
        known = cls._lightning_bases()
        defines_both = hasattr(cls, "world_size") and hasattr(cls, "global_rank")
        return bool(known) and set(known) <= set(CLUSTER_ENVIRONMENTS.split()) and defines_both

    def _is_own_accelerator(cls) -> bool:
        """Return whether this is a sub-class of Accelerator. Libraries create one to register its name.

        `Trainer(accelerator=…)` does not accept it.
        """
        return cls not in _absent.values() and cls._lightning_bases() == ["Accelerator"]

    def _lightning_bases(cls) -> list[str]:
        """Return the names of the classes without a counterpart from which this class derives, or that it is."""
        return [each.__name__ for each in cls.__mro__ if each in _absent.values()]

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(cls._advice() if not name.startswith("__") else name, name=name)

    def __getitem__(cls, item: object) -> type:  # of annotations: `Loop[int]`
        return cls

    def _advice(cls) -> str:
        known = next(each for each in cls.__mro__ if each in _absent.values())  # `cls`, or a base of it
        return answer_for(f"{known.__module__}.{known.__name__}")
