"""Replace Hugging Face's accelerate by Trainwright, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from trainwright.core.names import replacement
from trainwright.core.names.constants import ACCELERATE_VERSION
from trainwright.core.names.replacement import ReplacedModule, Replacement

_NAME = "accelerate"
_TEST_HELPERS = "accelerate.test_utils"


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
    # The argument completes the error message "accelerate is imported already, by this script or by a library …".
    return AccelerateReplacement.active() or AccelerateReplacement().start(
        "such as transformers. Call trainwright.as_accelerate() before they are imported, or start the script with "
        "python -m trainwright.as_accelerate."
    )


def is_active() -> bool:
    """Return whether Trainwright replaces accelerate in this process."""
    return AccelerateReplacement.active() is not None


class _Module(ReplacedModule):
    """A module of accelerate with the names of Trainwright's module."""

    def __getattr__(self, name: str) -> Any:
        if name == "__version__" and self.__name__ == _NAME:
            return ACCELERATE_VERSION
        return getattr(import_module(_own(self.__name__)), name)


class AccelerateReplacement(Replacement):
    """Replacement of accelerate by Trainwright until `remove`. Also a context manager.

    It provides accelerate's modules, and the metadata by which libraries check accelerate's version.
    """

    packages = (_NAME,)
    distributions = (_NAME,)
    version = ACCELERATE_VERSION
    home_page = "https://github.com/huggingface/accelerate"

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the specification of a module of accelerate, or None for any other module.

        For `accelerate.test_utils`, it is that of the installed accelerate, or None if accelerate is not installed.
        """
        if fullname.startswith(f"{_TEST_HELPERS}."):
            return None  # Python finds it in the folder of the package `_TEST_HELPERS`, which the lines below return.
        if fullname != _TEST_HELPERS:
            return super().find_spec(fullname, path, target)
        # Trainwright has no test helpers. Scripts and tests import those of the installed accelerate, which then import
        # Trainwright's names.
        installed = PathFinder.find_spec(_NAME)
        folders = None if installed is None else installed.submodule_search_locations
        return None if folders is None else PathFinder.find_spec(fullname, folders)

    def is_package(self, fullname: str) -> bool | None:
        """Return whether a module has sub-modules, or None if the module does not exist."""
        spec = find_spec(_own(fullname))
        return None if spec is None else spec.submodule_search_locations is not None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module, which looks up each name in Trainwright's module when the name is read."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Import Trainwright's module, so that an error in it is raised by the import statement."""
        import_module(_own(module.__name__))

    def get_code(self, fullname: str) -> Any:
        """Return the code of Trainwright's module, for `-m accelerate.commands.env`."""
        spec = find_spec(_own(fullname))
        assert isinstance(spec, ModuleSpec)
        return spec.loader.get_code(spec.name)  # type: ignore[union-attr]  # a module in a file has a file's loader


def _own(name: str) -> str:
    """Return the name of Trainwright's module: `accelerate.utils` → `trainwright.utils`."""
    return "trainwright" + name.removeprefix(_NAME)


def run_script(arguments: Sequence[str]) -> None:
    """Run a script, or with `-m` a module, with its command-line arguments, on Trainwright instead of accelerate."""
    replacement.run_script(arguments, as_accelerate, "Hugging Face's accelerate")
