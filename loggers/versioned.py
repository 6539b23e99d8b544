"""Loggers that write into a separate folder for each run: `save_dir/name/version_N`."""

from __future__ import annotations

import contextlib
import copy
import os
import re
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from trainwright.core.errors import ConfigurationError, require_package
from trainwright.core.names.replacement import is_replaced
from trainwright.loggers.hyperparams import plain
from trainwright.loggers.logger import Logger, RunInfo

WHERE = frozenset({"step", "time", "epoch"})
"""Columns with the position of a row; the loop sends `epoch` with everything it logs, so it is not a separate curve."""
DEFAULT_NAME = "trainwright_logs"
LIGHTNING_NAME = "lightning_logs"  # Lightning's default, where its programs look for files
_NUMBERED = re.compile(r"version_(\d+)")


class VersionedLogger(Logger):
    """Base class of loggers with a folder for each run.

    `start` creates the folder `save_dir/name/version_N`, where N is one more than the largest existing number. For a
    run with a name it creates `save_dir/name/<run name>` (with `_1`, `_2`, … if taken). With `version`, that folder is
    used, whatever it contains.

    The steps of a curve always increase. A resumed run (see `load_state_dict`) first removes entries that were logged
    after its checkpoint. Any other run in a folder with a log warns and removes later values from the curves that it
    logs. Other curves are continued. If a value of the same step exists, for example of an earlier test, both values
    are kept.

    Evaluation steps have logs of their own, in the sub-folders `validate` and `test` of the folder of log files. They
    are continued and replaced in the same way.

    Args:
        save_dir: parent folder, where `~` and environment variables such as `$HOME` are replaced. Default: None, the
            run's root folder.
        name: sub-folder for the experiment; an empty name means none. Default: `"trainwright_logs"`, which is
            `lightning_logs` under `as_lightning()`.
        version: an int N for `version_N`, or the name of a folder. Default: None, which creates a version.
        prefix: text before the name of each metric, followed by a dash. Default: `""`.
        sub_dir: a sub-folder of the version's folder for log files. Default: None.

    Raises:
        ConfigurationError: `save_dir` is a URL, or a name leads out of its folder.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = DEFAULT_NAME,
        version: int | str | None = None,
        prefix: str = "",
        *,
        sub_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(prefix=prefix)
        for argument, value in (("name", name), ("version", version), ("sub_dir", sub_dir)):
            if value is not None and not isinstance(value, int):
                check_below(os.fspath(value), f"{type(self).__name__}({argument}={os.fspath(value)!r})")
        if save_dir is not None and "://" in os.fspath(save_dir):
            # A Path would turn it into a local folder such as `s3:`.
            raise ConfigurationError(
                f"{type(self).__name__}(save_dir={os.fspath(save_dir)!r}): log files are written to a local folder, "
                "not to a URL. Write a path, and copy the folder after the run."
            )
        self._save_dir = None if save_dir is None else Path(os.path.expandvars(save_dir)).expanduser()
        if name == DEFAULT_NAME and is_replaced("lightning"):
            name = LIGHTNING_NAME
        self._name = name or ""
        self._version = version
        self._is_version_fixed = version is not None
        self._sub_dir = Path(sub_dir) if sub_dir is not None else None
        self._last_step: int | None = None  # the largest step that was logged; None before the first
        # Set by `load_state_dict`: rows up to this step belong to the run that is continued. None for a new run.
        self._keep_until: int | None = None
        self._continues = False  # True if the folder contains a log and this run has not logged yet
        # The last step of each curve of an earlier run, until this run logs the curve.
        self._previous: dict[str, int] = {}
        self._hyperparams: dict[str, Any] = {}  # of all calls, as in `hparams.yaml`
        self._of_evaluations: dict[str, VersionedLogger] = {}  # loggers of evaluation steps by stage
        # Stages whose logs may have rows from after the checkpoint of a resumed run. Opening the log removes them.
        self._with_later_rows: set[str] = set()

    _OPEN: ClassVar[tuple[str, ...]] = ()
    """Names of attributes with open files. They are None in a copy, which opens its own files."""

    @classmethod
    def in_folder(cls, root_dir: Path, project: str | None = None, **options: Any) -> Logger:
        """Return a logger that writes below a folder, or into `root_dir/project` if there is a project."""
        if project is None:
            return cls(root_dir, **options)
        return cls(root_dir, None, project, **options)

    @property
    def name(self) -> str:
        """The experiment's sub-folder."""
        return self._name

    @property
    def version(self) -> int | str | None:
        """The version. If `save_dir` is known, the first access starts the logger and creates the version's folder."""
        if self._version is None and self._save_dir is not None and self._run is None:
            self._begin()
        return self._version

    @property
    def is_version_known(self) -> bool:
        """True if the version was passed or its folder has been created. This access creates nothing."""
        return self._version is not None

    @property
    def save_dir(self) -> str | None:
        """The parent folder; None if it depends on a run that has not begun."""
        if self._save_dir is not None:
            return str(self._save_dir)
        if self._run is not None:
            return str(self._run.root_dir)
        return None

    @property
    def root_dir(self) -> str | None:
        """The folder of all versions, `save_dir/name`."""
        if self.save_dir is None:
            return None
        return str(Path(self.save_dir, self.name or ""))

    @property
    def version_dir(self) -> str | None:
        """The folder of this version; None until it is known."""
        version = self.version
        root = self.root_dir
        if root is None or version is None:
            return None
        folder = f"version_{version}" if isinstance(version, int) else version
        return str(Path(root, folder))

    @property
    def log_dir(self) -> str | None:
        """The folder of log files: the version's, or `sub_dir` in it; None until it is known."""
        version_dir = self.version_dir
        if version_dir is None or self._sub_dir is None:
            return version_dir
        return str(Path(version_dir, self._sub_dir))

    def share_version(self, version: int | str) -> None:
        """Use the version of another logger of the same run, unless this logger already has one."""
        if self._version is None:
            self._version = version

    def start(self, run: RunInfo) -> None:
        """Create the version's folder, and check whether it contains a log to continue."""
        if self._run is not None:
            return
        super().start(run)
        if self._version is None:
            assert self.root_dir is not None  # known once a run is
            self._version = claim_version(Path(self.root_dir), run.run_name)
        folder = self._folder()
        folder.mkdir(parents=True, exist_ok=True)
        self._continues = self.has_log(folder)

    def finish(self, status: str) -> None:
        """Flush and close. A logger that is started again continues in the same folder."""
        if self._run is None:
            return
        try:
            for log in self._of_evaluations.values():
                log.finish(status)
            self.flush()
        finally:
            self._of_evaluations = {}
            self._close()
            if self._save_dir is None:
                self._save_dir = self._run.root_dir  # `log_dir` stays known
            self._keep_until = None
            self._previous = {}
            self._run = None

    @abstractmethod
    def has_log(self, folder: Path) -> bool:
        """Return whether `folder` contains log files of this class."""

    @abstractmethod
    def last_steps(self) -> dict[str, int]:
        """Return the last step of each curve in the folder's log."""

    @abstractmethod
    def remove_from(self, step: int, names: Collection[str] | None = None) -> None:
        """Remove values at `step` or later from the folder's log, of the curves `names`. Default: None, all curves."""

    def _close(self) -> None:
        """Close open files."""

    def _folder(self) -> Path:
        folder = self.log_dir
        assert folder is not None  # known once the logger is started
        return Path(folder)

    def advance(self, step: int, names: Collection[str]) -> None:
        """Prepare to log values of `names` at `step`: remove conflicting values of an earlier run."""
        if self._continues:
            self._continues = False
            if self._keep_until is not None:
                self.remove_from(self._keep_until + 1)
            else:
                self._previous = self.last_steps()
        if self._previous:
            overlapping: list[str] = []
            for name in names:
                if name not in self._previous or name in WHERE:
                    continue
                previous_step = self._previous.pop(name)
                if previous_step > step:
                    overlapping.append(name)
            if overlapping:
                self.remove_from(step, overlapping)
                self.warn_once(
                    f"{type(self).__name__} writes into {self.log_dir}, which holds the log of an earlier fit or run; "
                    f"its values of {', '.join(sorted(overlapping))} from step {step} on are replaced. Leave `version` "
                    "unset for a new folder."
                )
        if self._last_step is None or step > self._last_step:
            self._last_step = step

    def log_evaluation_step(self, metrics: Mapping[str, float], step: int, stage: str) -> None:
        """Record values in the log of the stage's evaluation steps, which the first call opens."""
        if stage not in self._of_evaluations:
            self._of_evaluations[stage] = self._open_for(stage, step)
        self._of_evaluations[stage].log_metrics(metrics, step)

    def _open_for(self, stage: str, step: int) -> VersionedLogger:
        assert self._run is not None
        log = copy.copy(self)  # by `__getstate__`, so without open files and not started
        log._close()  # clears pending rows
        log._sub_dir = Path(self._sub_dir or "", stage)
        log._of_evaluations = {}
        log._previous = {}
        # `step` is the first evaluation step after the checkpoint of a resumed run. Rows from this step on were logged
        # after the checkpoint.
        log._keep_until = step - 1 if stage in self._with_later_rows else None
        self._with_later_rows.discard(stage)
        log.start(self._run)
        return log

    def columns(self, metrics: Mapping[str, Any], *own: str) -> dict[str, Any]:
        """Return `metrics` with prefixed names. Omit names in `own`, the file's own columns, with a warning."""
        row = self.prefixed(metrics)
        for name in own:
            if name in row:
                del row[name]
                self.warn_once(
                    f"{type(self).__name__} skips the metric {name!r}, because its file has its own column of that "
                    "name. Log it under another name, or set a prefix."
                )
        return row

    def write_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Add `params` to earlier hyper-parameters, and write all of them to `hparams.yaml`."""
        yaml = require_package("yaml", purpose=type(self).__name__, install="pyyaml")
        self._hyperparams.update(plain(params))
        write_atomically(self._folder() / "hparams.yaml", yaml.safe_dump(self._hyperparams, sort_keys=False))

    def state_dict(self) -> dict[str, Any]:
        """Return the version and the last step logged; None before they are known."""
        return {"version": self._version, "last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the version in `state`, unless another version was requested, from the last step in `state`. Later
        entries are removed when the run first logs. If this logger has created another folder, it is deleted if empty.
        """
        version = state.get("version")
        if version is not None and version != self._version and not self._is_version_fixed:
            self._change_version(version)
        if version is None or version == self._version:
            self._last_step = state.get("last_step")
            self._keep_until = self._last_step
            self._with_later_rows = {"validate", "test"}

    def _change_version(self, version: int | str) -> None:
        """Continue in the folder of `version`. Delete the previous folder of this logger if it is empty."""
        run = self._run
        previous_dir = None if self._version is None else self.version_dir
        if run is not None:
            self._close()
            self._run = None
        if previous_dir is not None:
            for folder in (Path(previous_dir, self._sub_dir or ""), Path(previous_dir)):
                with contextlib.suppress(OSError):  # not empty: another logger shares it, or files were written
                    folder.rmdir()
        self._version = version
        if run is not None:
            self.start(run)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run": None, "_of_evaluations": {}, **dict.fromkeys(self._OPEN)}


def check_below(path: str, what: str) -> None:
    """Check that a path is relative and has no `..`. `what` names the path in the ConfigurationError."""
    steps = path.replace("\\", "/").split("/")
    if os.path.isabs(path) or ".." in steps:
        raise ConfigurationError(
            f"{what} points outside of the logger's folder. Use a name below it, and put its parent folders into "
            "save_dir."
        )


def claim_version(root_dir: Path, run_name: str | None = None) -> int | str:
    """Create a new folder in `root_dir` and return its version: a number, or the run's name with a suffix if taken."""
    if run_name:
        check_below(run_name, f"run_name={run_name!r}")
    root_dir.mkdir(parents=True, exist_ok=True)
    number = 0 if run_name else _next_number(root_dir)
    while True:
        if run_name:
            name = run_name if number == 0 else f"{run_name}_{number}"
        else:
            name = f"version_{number}"
        try:
            (root_dir / name).mkdir()
        except FileExistsError:  # of an earlier run, or of one that starts at the same time
            number += 1
        else:
            return name if run_name else number


def _next_number(root_dir: Path) -> int:
    number = 0
    for path in root_dir.iterdir():
        match = _NUMBERED.fullmatch(path.name)
        if match is not None:
            number = max(number, int(match[1]) + 1)
    return number


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically. Other processes read the old or the new content, also after a crash."""
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def cut_torn_line(path: Path) -> None:
    """Remove an incomplete last line that a crash has left, so that the next entry starts on a new line."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        complete_bytes = sum(len(line) for line in file if line.endswith(b"\n"))
        file.truncate(complete_bytes)


def rows_without(rows: Iterable[dict[str, Any]], step: int, names: Collection[str] | None) -> Iterator[dict[str, Any]]:
    """Yield rows without values at `step` or later (only those in `names`, if passed). Empty rows are omitted."""
    for row in rows:
        if int(row["step"]) >= step:
            row = {name: value for name, value in row.items() if names is not None and name not in names}
        if not WHERE.issuperset(row):
            yield row
