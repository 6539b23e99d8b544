"""Base class of profilers, the profiler that records nothing, and the short names of all profilers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.foreign_names import check_owner
from trainwright.core.registry import Registry

if TYPE_CHECKING:
    import torch


class Profiler:
    """Base class of profilers. Sub-classes override `start`, `stop` and `summary`.

    A Trainer calls `setup` when a stage begins, `start` and `stop` around each action (such as a hook, or the fetch of
    a batch), `end_step` after each optimizer step (in evaluations after each batch), `close` before the process group
    is closed, and then `describe` and `teardown`. Call `start` and `stop` from one thread only.

    Args:
        dirpath: Folder of the profiler's files. Default: None, which is `default_root_dir` of the Trainer.
        filename: Part of the names of the files. Default: None, which is `"profile"`. If both are None, the summary of
            rank 0 is printed. Otherwise it is written to `{stage}-{filename}.txt`; with several processes each rank
            writes `{stage}-{filename}-{rank}.txt`. Without a Trainer the names have no stage.

    Attributes:
        enabled: False if nothing is recorded. The Trainer then calls only `setup` and `close`.
    """

    enabled = True

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        self.dirpath = None if dirpath is None else Path(dirpath).expanduser()
        self.filename = filename
        self.stage: str | None = None
        self.rank = 0
        self.world_size = 1
        self._root = Path(".")
        self._open: list[Any] = []  # open actions with a `name`, the innermost last; see `_innermost`

    def setup(self, stage: str, rank: int = 0, world_size: int = 1, root: str | Path = ".") -> None:
        """Prepare for a stage, and discard the records of earlier stages.

        Args:
            stage: `"fit"`, `"validate"`, `"test"` or `"predict"`.
            rank, world_size: rank of this process, and number of processes.
            root: Folder of the files without a `dirpath`.
        """
        self.stage = stage
        self.rank = rank
        self.world_size = world_size
        self._root = Path(root)

    def start(self, action_name: str) -> None:
        """Start recording an action."""

    def stop(self, action_name: str) -> None:
        """Stop recording an action. Simple and AdvancedProfiler raise ValueError if it was not started."""

    @contextmanager
    def profile(self, action_name: str) -> Iterator[None]:
        """Record the actions in a `with` block under `action_name`."""
        self.start(action_name)
        try:
            yield
        finally:
            self.stop(action_name)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that records each call of `function` under `name`."""
        start = self.start
        stop = self.stop

        def recorded(*args: Any, **kwargs: Any) -> Any:
            start(name)
            try:
                return function(*args, **kwargs)
            finally:
                stop(name)

        # As of a bound method: `HookTable.only_read` reads the owner. In `vars`, because type checkers do not accept a
        # new attribute of a function.
        vars(recorded)["__self__"] = getattr(function, "__self__", None)
        return recorded

    def _innermost(self, name: str) -> int:
        """Return the index of the innermost open action `name`, or raise ValueError if it was not started."""
        for index in reversed(range(len(self._open))):
            if self._open[index].name == name:
                return index
        raise ValueError(f"stop({name!r}): the action was not started.")

    def end_step(self) -> None:
        """Record the end of a training step, or of a batch of an evaluation."""

    def close(self) -> None:
        """Stop recording, and write the files of this rank. May be called several times."""

    def summary(self) -> str:
        """Return what was recorded as text; empty if there is nothing to report."""
        return ""

    def describe(self, show: Callable[[str], Any] = print) -> None:
        """Write the summary to a file, or show rank 0's if `dirpath` and `filename` are None. Show the file names.

        Does nothing if the summary is empty.

        Args:
            show: Function that receives each text. Default: `print`.
        """
        text = self.summary()
        if not text:
            return
        is_main = self.rank == 0
        path = self.path(".txt") if self.world_size > 1 else self._folder / f"{self._name}.txt"
        if self.dirpath is not None or self.filename is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        elif is_main:
            show(text)
        files = {path.name} if path.exists() else set()
        for ending in (".*", "-*"):  # further files of this rank, such as traces
            files |= {file.name for file in path.parent.glob(self.path(ending).name)}
        if files and is_main:
            show(f"Files of the profiler in {path.parent}: {', '.join(sorted(files))}")

    def watch(self, model: torch.nn.Module) -> None:
        """Override to mark the modules of the model that a stage runs. Does nothing by default."""

    def teardown(self, stage: str) -> None:
        """Release everything at the end of a stage."""

    def path(self, ending: str, part: str | int | None = None) -> Path:
        """Return the path of the file `{stage}-{filename}-{part}{ending}`. Default of `part`: this rank."""
        part = self.rank if part is None else part
        return self._folder / f"{self._name}-{part}{ending}"

    @property
    def _folder(self) -> Path:
        return self.dirpath or self._root

    @property
    def _name(self) -> str:
        name = self.filename or "profile"
        return name if self.stage is None else f"{self.stage}-{name}"


class PassThroughProfiler(Profiler):
    """Profiler that records nothing, for a Trainer without a profiler."""

    enabled = False


PROFILERS: Registry[type[Profiler]] = Registry(
    "profiler",
    {
        "advanced": "trainwright.profilers.actions:AdvancedProfiler",
        "pytorch": "trainwright.profilers.pytorch:PyTorchProfiler",
        "simple": "trainwright.profilers.actions:SimpleProfiler",
    },
)


def resolve_profiler(value: object) -> Profiler:
    """Return the profiler for the Trainer's argument: a short name, a Profiler, or None, which records nothing.

    Raises:
        ConfigurationError: The name is unknown, or the object is of another class.
    """
    if value is None:
        return PassThroughProfiler()
    if isinstance(value, Profiler):
        return value
    if isinstance(value, str):
        return PROFILERS.get(value)()
    check_owner(value)
    raise ConfigurationError(
        f"profiler={value!r}: expected 'simple', 'advanced', 'pytorch', a trainwright.profilers.Profiler or None."
    )
