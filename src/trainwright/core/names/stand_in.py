"""Replace Hugging Face's accelerate by Trainwright, in one process."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.constants import ACCELERATE_VERSION

_NAME = "accelerate"


def as_accelerate() -> AccelerateReplacement:
    """Replace Hugging Face's accelerate by Trainwright in this process.

    `import accelerate` and imports of its modules then return the names of Trainwright. Libraries that train through
    accelerate (transformers, peft, trl, diffusers) use Trainwright. accelerate need not be installed. Call this
    function before importing these libraries. A second call has no effect. `python -m trainwright.as_accelerate
    script.py …` runs a script this way. The end of the result's `with` block, or its method `remove()`, restores the
    installed accelerate.

    Raises:
        ConfigurationError: accelerate is imported already.
    """
    present = _present()
    if present is not None:
        return present
    if _NAME in sys.modules:
        raise ConfigurationError(
            "accelerate is imported already, by this script or by a library such as transformers. Call "
            "trainwright.as_accelerate() before they are imported, or start the script with "
            "python -m trainwright.as_accelerate."
        )
    stand_in = AccelerateReplacement()
    sys.meta_path.insert(0, stand_in)
    return stand_in


def is_active() -> bool:
    """Return whether Trainwright replaces accelerate in this process."""
    return _present() is not None


def _present() -> AccelerateReplacement | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, AccelerateReplacement)), None)


class _Module(ModuleType):
    """A module of accelerate with the names of Trainwright's module."""

    def __getattr__(self, name: str) -> Any:
        if name == "__version__" and self.__name__ == _NAME:
            return ACCELERATE_VERSION
        return getattr(import_module(_own(self.__name__)), name)


class AccelerateReplacement(DistributionFinder, Loader):
    """Replacement of accelerate by Trainwright until `remove`. Also a context manager.

    It provides accelerate's modules, and the metadata by which libraries check accelerate's version.
    """

    def remove(self) -> None:
        """Let later imports find the installed accelerate. Names that scripts have already imported do not change."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            for name in [name for name, module in sys.modules.items() if isinstance(module, _Module)]:
                del sys.modules[name]

    def __enter__(self) -> AccelerateReplacement:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        del path, target
        own = find_spec(_own(fullname)) if fullname.partition(".")[0] == _NAME else None
        return own and ModuleSpec(fullname, self, is_package=own.submodule_search_locations is not None)

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        return [] if context is None or context.name != _NAME else [_AccelerateMetadata()]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        import_module(_own(module.__name__))

    def get_code(self, fullname: str) -> Any:
        """Return the code of Trainwright's module, for `-m accelerate.commands.env`."""
        spec = find_spec(_own(fullname))
        assert isinstance(spec, ModuleSpec)
        return spec.loader.get_code(spec.name)  # type: ignore[union-attr]  # a module in a file has a file's loader


class _AccelerateMetadata(Distribution):
    """The metadata of accelerate, with the version that Trainwright replaces."""

    def read_text(self, filename: str) -> str | None:
        texts = {"METADATA": f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {ACCELERATE_VERSION}\n"}
        return texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(path)


def _own(name: str) -> str:
    return "trainwright" + name.removeprefix(_NAME)


def run_script(arguments: Sequence[str]) -> None:
    """Run a script, or with `-m` a module, with its command-line arguments, on Trainwright instead of accelerate."""
    if not arguments or arguments[0] in ("-h", "--help") or list(arguments) == ["-m"]:
        sys.exit(
            "usage: python -m trainwright.as_accelerate script.py [arguments]\n"
            "       python -m trainwright.as_accelerate -m module [arguments]\n\n"
            "Run a script with Trainwright instead of Hugging Face's accelerate."
        )
    if arguments[0] != "-m" and not Path(arguments[0]).is_file():
        sys.exit(
            f"python -m trainwright.as_accelerate: the script {arguments[0]!r} does not exist. Several processes are "
            "started by: trainwright launch --num_processes 2 -m trainwright.as_accelerate script.py"
        )
    as_accelerate()
    if arguments[0] == "-m":
        sys.argv[:] = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = list(arguments)
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")
