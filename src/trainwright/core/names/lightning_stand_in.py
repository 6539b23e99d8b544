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
    # The argument completes the error message "lightning is imported already, by this script or by a library …".
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
        if path not in NAMES:
            return None
        return any(name.startswith(f"{path}.") for name in NAMES)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module whose names are found when they are read."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Let `torch.load` read checkpoint folders. The module itself is already complete; see `create_module`."""
        # Not in `as_lightning()`, which must not import torch. A program with a checkpoint imports Lightning first.
        _load_folders()

    def remove(self) -> None:
        """Restore the installed library for later imports. Names that scripts have already imported do not change."""
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
        """Return the value of a name of this module, or raise an AttributeError."""
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
        own_module, _, attribute = own.rpartition(".")
        return getattr(import_module(own_module), attribute)
    if name not in _absent:
        _absent[name] = _Absent(name, (), {"__module__": module})
    return _absent[name]


# The classes without a counterpart. The key is the name without its module, so that a class is the same object in all
# modules from which it can be imported.
_absent: dict[str, _Absent] = {}


class _Absent(ABCMeta):
    """Metaclass of the classes that represent names of Lightning without a counterpart, and of their sub-classes.

    Libraries import such names at the top of a module, annotate with them, call `isinstance` and derive classes from
    them, also in programs that do not need these classes. Therefore all of this is allowed. A call, and access to an
    attribute, raise an error. The base ABCMeta allows a sub-class to have abstract base classes, too.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.only_loads() or cls.is_own_environment() or cls._is_own_accelerator():
            return super().__call__(*args, **kwargs)
        raise ConfigurationError(cls._advice())

    def only_loads(cls) -> bool:
        """Return whether this is a TorchCheckpointIO that overrides loading, and neither saving nor removing.

        Checkpoints of Trainwright can be loaded without it, so the Trainer accepts it.
        """
        if cls in _absent.values() or cls._lightning_bases() != ["TorchCheckpointIO"]:
            return False
        for base in cls.__mro__:
            if base not in _absent.values() and {"save_checkpoint", "remove_checkpoint"} & vars(base).keys():
                return False
        return True

    def is_own_environment(cls) -> bool:
        """Return whether this is a sub-class of a cluster environment that defines `world_size` and `global_rank`.

        The Trainer accepts it if both agree with the launcher's environment variables.
        """
        bases = cls._lightning_bases()
        has_only_environments = bool(bases) and set(bases) <= set(CLUSTER_ENVIRONMENTS.split())
        # The classes of Lightning themselves have no attributes here; see `__getattr__`.
        return has_only_environments and hasattr(cls, "world_size") and hasattr(cls, "global_rank")

    def _is_own_accelerator(cls) -> bool:
        """Return whether this is a sub-class of Accelerator. Libraries create one to register its name.

        `Trainer(accelerator=…)` does not accept it.
        """
        return cls not in _absent.values() and cls._lightning_bases() == ["Accelerator"]

    def _lightning_bases(cls) -> list[str]:
        """Return the names of the classes of Lightning among this class and its base classes."""
        return [base.__name__ for base in cls.__mro__ if base in _absent.values()]

    def __getattr__(cls, name: str) -> NoReturn:
        # Python and tools look up special names in every class: these need no advice.
        raise AttributeError(name if name.startswith("__") else cls._advice(), name=name)

    def __getitem__(cls, item: object) -> type:  # in annotations: `Loop[int]`
        return cls

    def _advice(cls) -> str:
        """Return a sentence with the replacement of the class of Lightning that this class is, or derives from."""
        lightning_class = next(base for base in cls.__mro__ if base in _absent.values())
        return answer_for(f"{lightning_class.__module__}.{lightning_class.__name__}")
