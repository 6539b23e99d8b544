"""Replace another library by Trainwright, in one process: its modules and its metadata."""

from __future__ import annotations

import multiprocessing.spawn
import re
import runpy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

from trainwright.core.errors import ConfigurationError


class ReplacedModule(ModuleType):
    """Base class of modules with the name of another library's module."""

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle recognizes only modules of the class ModuleType. Tasks in `__main__` refer to `pl` and `L`.
        return import_module, (self.__name__,)


class Replacement(DistributionFinder, Loader, ABC):
    """Replacement of a library by Trainwright until `remove`. Also a context manager.

    It provides the library's modules, and the metadata by which other libraries check its version.

    Attributes:
        packages: top-level packages of the library.
        distributions: names of the distributions, normalized: `"pytorch-lightning"`.
        version: the version that Trainwright replaces.
        home_page: the library's page. Libraries check it to exclude another distribution of the same name.
    """

    packages: ClassVar[Sequence[str]]
    distributions: ClassVar[Sequence[str]]
    version: ClassVar[str]
    home_page: ClassVar[str]

    @classmethod
    def active(cls) -> Self | None:
        """Return the replacement of this class in this process, or None."""
        return next((finder for finder in sys.meta_path if isinstance(finder, cls)), None)

    def start(self, advice: str) -> Self:
        """Let later imports of the library return modules of Trainwright, also in spawned processes.

        Args:
            advice: end of the error message, after "lightning is imported already, by this script or by a library".

        Raises:
            ConfigurationError: the library is imported already.
        """
        for package in self.packages:
            if package in sys.modules:
                raise ConfigurationError(f"{package} is imported already, by this script or by a library {advice}")
        sys.meta_path.insert(0, self)
        _repeat_in_spawned_processes()
        return self

    def remove(self) -> None:
        """Restore the installed library for later imports. Names that scripts have already imported do not change."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            for name in list(sys.modules):
                if name.partition(".")[0] in self.packages:
                    del sys.modules[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    @abstractmethod
    def is_package(self, fullname: str) -> bool | None:
        """Return whether a module has sub-modules, or None if the module does not exist."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the specification of a module of the library, or None for any other module."""
        del path, target
        if fullname.partition(".")[0] not in self.packages:
            return None
        is_package = self.is_package(fullname)
        return None if is_package is None else ModuleSpec(fullname, self, is_package=is_package)

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        """Return the metadata of the distribution that the context names. Empty for another distribution, or none."""
        if context is None or context.name is None:
            return []
        name = re.sub(r"[-_.]+", "-", context.name).lower()  # the normal form of PEP 503
        return [_Metadata(name, self.version, self.home_page)] if name in self.distributions else []


class _Metadata(Distribution):
    """The metadata of a replaced distribution."""

    def __init__(self, name: str, version: str, home_page: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nHome-page: {home_page}\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


def active_replacements() -> list[Callable[[], object]]:
    """Return the classes of this process's replacements, for `repeat` in another process, which unpickles them."""
    return [type(finder) for finder in sys.meta_path if isinstance(finder, Replacement)]


def repeat(replacements: Iterable[Callable[[], Any]]) -> None:
    """Start replacements that `active_replacements` returned in another process."""
    for replacement in replacements:
        if not any(type(finder) is replacement for finder in sys.meta_path):
            sys.meta_path.insert(0, replacement())
            _repeat_in_spawned_processes()


def is_replaced(package: str) -> bool:
    """Return whether Trainwright replaces a package in this process."""
    return any(isinstance(finder, Replacement) and package in finder.packages for finder in sys.meta_path)


class _RepeatWhenUnpickled:
    """An object whose unpickling repeats this process's replacements in another process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return repeat, (active_replacements(),)


def _repeat_in_spawned_processes() -> None:
    """Repeat the replacements in processes that multiprocessing spawns, such as the workers of a DataLoader."""
    original = multiprocessing.spawn.get_preparation_data
    if getattr(original, "repeats_replacements", False):
        return

    # A spawned process unpickles this dict before it imports the script. multiprocessing has no other hook before that
    # import, and scripts import the replaced library.
    def get_preparation_data(name: str) -> dict[str, Any]:
        data = original(name)
        if active_replacements():
            data["trainwright"] = _RepeatWhenUnpickled()
        return data

    get_preparation_data.repeats_replacements = True  # type: ignore[attr-defined]  # mark it, so that it is set once
    multiprocessing.spawn.get_preparation_data = get_preparation_data


def run_script(arguments: Sequence[str], replace: Callable[[], object], library: str) -> None:
    """Run a script, or with `-m` a module, with its command-line arguments, on Trainwright instead of a library.

    Args:
        arguments: the script and its arguments, or `-m`, the module and its arguments.
        replace: `as_accelerate` or `as_lightning`.
        library: the library's name, for the help.
    """
    program = f"python -m trainwright.{replace.__name__}"
    if not arguments or arguments[0] in ("-h", "--help") or list(arguments) == ["-m"]:
        sys.exit(
            f"usage: {program} script.py [arguments]\n"
            f"       {program} -m module [arguments]\n\n"
            f"Run a script with Trainwright instead of {library}."
        )
    if arguments[0] != "-m" and not Path(arguments[0]).is_file():
        sys.exit(
            f"{program}: the script {arguments[0]!r} does not exist. Several processes are started by: trainwright "
            f"launch --num_processes 2 -m trainwright.{replace.__name__} script.py"
        )
    replace()
    if arguments[0] == "-m":
        sys.argv[:] = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = list(arguments)
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")
