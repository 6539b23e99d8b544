"""The project of an Accelerator: names, folders and URLs of saved states, and their maximum number."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import warnings
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path

from trainwright.checkpoint.format.manifests import open_checkpoint
from trainwright.checkpoint.remote import RemoteEntry, RemoteIndex, fetch_checkpoint, fetch_newest, remote_names
from trainwright.checkpoint.retention import IndexEntry
from trainwright.checkpoint.run_folder import RunFolder
from trainwright.core.errors import CheckpointError, ConfigurationError, TrainwrightWarning
from trainwright.core.host.folders import is_url, last_part, local_folder, parent_url
from trainwright.core.names.hidden_names import names_in

_NAME = re.compile(r"checkpoint_(\d+)")  # an automatic name


@dataclass(slots=True)
class ProjectConfiguration:
    """Folders of an `Accelerator`'s saved states and trackers, and the number of states to keep.

    Args:
        project_dir: Folder of the project, or its URL, such as `s3://bucket/run`. Default: None, which is
            `Accelerator(project_dir=…)`.
        logging_dir: Folder of the trackers. Default: None, which is `project_dir`.
        automatic_checkpoint_naming: `save_state()` writes `project_dir/checkpoints/checkpoint_{iteration}`, and
            `load_state()` without a folder reads the newest valid state. Default: False.
        total_limit: Maximum number of automatically named states of this run. Older states are deleted once a new state
            is on the disk, or uploaded. States of other runs in the folder are not deleted. `load_state` continues the
            run of the loaded state. Default: None, which deletes no state.
        iteration: Number of the next automatically named state. If the folder already holds this number or a greater
            one, the next state gets the number after the greatest one, with a warning. Default: 0.
        save_on_each_node: Must be False, because one folder contains the state of all nodes. Default: False.
        async_save: `save_state` returns once the tensors are copied to host memory. A thread then writes and uploads
            the state. The next save, `load_state` and the end of the script wait for this thread. Default: False.

    Raises:
        ConfigurationError: `total_limit` is less than 1, `save_on_each_node` is True, or `iteration_checkpoints` or
            `save_every_n_steps` is set: the loop decides when to call `save_state`.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False
    async_save: bool = False
    iteration_checkpoints: InitVar[bool] = False
    save_every_n_steps: InitVar[int | None] = None

    def __post_init__(self, iteration_checkpoints: bool, save_every_n_steps: int | None) -> None:
        if iteration_checkpoints or save_every_n_steps is not None:
            raise ConfigurationError(
                "ProjectConfiguration does not save by itself. Remove iteration_checkpoints and save_every_n_steps, "
                "call accelerator.save_state() in the loop (if step % n == 0), and number the states by "
                "automatic_checkpoint_naming=True."
            )
        if self.total_limit is not None and self.total_limit < 1:
            raise ConfigurationError(f"total_limit={self.total_limit!r}: write a whole number of at least 1, or None.")
        if self.save_on_each_node:
            raise ConfigurationError(
                "save_on_each_node=True is not supported: all nodes write into one folder, on a file system that they "
                "share. Remove save_on_each_node."
            )
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the folder of the project. The trackers use this folder, too, unless `logging_dir` is set.

        A folder of the trackers that an earlier call has set stays.
        """
        self.project_dir = None if project_dir is None else os.fspath(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir


class StateFolders:
    """Local and remote paths of the saved states of a user-written training loop.

    A state at a URL is written below `project_dir/checkpoints`, or below `checkpoints` if `project_dir` is a URL or
    None, and uploaded from there. Downloads are stored below the sibling folder `downloaded`. With several nodes, both
    folders must be on a shared file system.

    Attributes:
        configuration: Options of names and the number of states.
        run_id: Identifier of the run. Only uploads of this run are replaced or deleted. Initially random.
    """

    def __init__(self, configuration: ProjectConfiguration) -> None:
        self.configuration = configuration
        self.run_id = secrets.token_hex(8)
        self._is_prepared = False  # the first automatic save has removed unfinished states of killed processes
        # URLs that this process has reached. A save asks the service again only when it uploads, so that a loop with
        # asynchronous saves does not wait for the service each time.
        self._reached: set[str] = set()
        self._has_loaded = False  # a state was loaded, so that earlier states in the folder are expected

    @property
    def _root(self) -> Path:
        """The local folder of the project. The current folder if the project has none, or is a URL."""
        project = self.configuration.project_dir
        if project is None or is_url(project):
            return Path()
        return Path(project)

    @property
    def folder(self) -> str:
        """The folder or URL of automatically named states."""
        project = self.configuration.project_dir
        if is_url(project):
            return f"{project.rstrip('/')}/checkpoints"
        return os.fspath(self._root / "checkpoints")

    @property
    def _local_folder(self) -> Path:
        """The local folder of automatically named states, also if they are uploaded."""
        return self.on_disk(f"{self.folder}/any").parent

    def on_disk(self, place: str) -> Path:
        """Return the local path to which the state at a path or URL is written."""
        if not is_url(place):
            return Path(place)
        return local_folder(self._root / "checkpoints", parent_url(place)) / last_part(place)

    def check_target(self, output_dir: str | os.PathLike[str] | None) -> None:
        """Check that a folder to save to was passed, or that automatic naming determines it. Not collective."""
        if output_dir is None and not self.configuration.automatic_checkpoint_naming:
            raise ConfigurationError(
                "save_state() needs a folder. Pass output_dir='…', or "
                "ProjectConfiguration(project_dir='…', automatic_checkpoint_naming=True)."
            )
        if output_dir is not None and self.configuration.automatic_checkpoint_naming:
            raise ConfigurationError(
                f"save_state(output_dir={os.fspath(output_dir)!r}) and automatic_checkpoint_naming=True both name the "
                "folder. Leave one out."
            )

    def newest_place(self, output_dir: str | os.PathLike[str] | None) -> str:
        """Return the path or URL of the newest save, complete or in progress. There must be one. Not collective."""
        if output_dir is not None:
            return os.fspath(output_dir)
        return f"{self.folder}/checkpoint_{self._free_number() - 1}"

    def next_place(self, output_dir: str | os.PathLike[str] | None) -> str:
        """Return the path or URL of the next save. Main rank only.

        An automatic number is greater than the numbers of all states in the folder, of any run, valid or damaged.

        Raises:
            CheckpointError: The service of a URL cannot be reached, or denies access. Checked in the first save to the
                folder of `output_dir`.
            MissingPackageError: The package of the service is not installed.
        """
        if output_dir is not None:
            place = os.fspath(output_dir)
            if is_url(place) and parent_url(place) not in self._reached:
                remote_names(parent_url(place))  # raises an error before the state is written
                self._reached.add(parent_url(place))
            return place
        if not self._is_prepared:
            RunFolder(self._local_folder).prepare()  # a killed process may have left an unfinished state
            self._is_prepared = True
        wanted = self.configuration.iteration
        number = self._free_number()
        if number != wanted and not self._has_loaded:  # a loaded run may have left a damaged or unfinished state
            warnings.warn(
                f"{self.folder} holds states up to checkpoint_{number - 1}, which this process has not written. The "
                f"next state is checkpoint_{number}. total_limit deletes states of this run only. To continue the "
                "earlier run, call load_state() before the first save.",
                TrainwrightWarning,
                stacklevel=2,
            )
        return f"{self.folder}/checkpoint_{number}"

    def _free_number(self) -> int:
        """Return the first number that is greater than those of all automatic names, and at least `iteration`.

        The names are those in the remote and the local folder, including names of states that are being written.
        """
        names = set(names_in(self._local_folder))
        if is_url(self.folder):
            names.update(remote_names(self.folder))
        number = self.configuration.iteration
        for name in names:
            number = max(number, _number_after(name))
        return number

    def check_source(self, input_dir: str | os.PathLike[str] | None) -> None:
        """Check that a folder to load from was passed, or that automatic naming determines it."""
        if input_dir is None and not self.configuration.automatic_checkpoint_naming:
            raise ConfigurationError(
                "load_state() needs a folder. Pass input_dir='…', or "
                "ProjectConfiguration(project_dir='…', automatic_checkpoint_naming=True)."
            )

    def fetch(self, url: str | None) -> str | None:
        """Download the state at `url`, and return its local path. Main rank only.

        If `url` is None, return the newest automatically named state. Returns None if no state is valid.

        Raises:
            CheckpointError: The state is damaged, or the service cannot be reached.
            MissingPackageError: The package of the service is not installed.
        """
        downloaded = self._root / "downloaded"
        if url is not None:
            try:
                return os.fspath(fetch_checkpoint(url, downloaded))
            except FileNotFoundError:
                return None
        local = RunFolder(self._local_folder).newest()
        if is_url(self.folder):
            # A state whose upload failed is on this machine only, and may be newer than all uploads.
            newest_upload = fetch_newest(self.folder, downloaded, than=local)
            if newest_upload is not None:
                return os.fspath(newest_upload)
        return None if local is None else os.fspath(local.path)

    def upload_and_prune(self, place: str, path: Path) -> None:
        """Upload the state in `path` if `place` is a URL, and delete states beyond the limit. Main rank only.

        Only states of this run are deleted, and never the state in `path`. If the upload fails, the state remains on
        this machine, and earlier uploads are not changed.
        """
        remote = RemoteIndex(parent_url(place), run=self.run_id) if is_url(place) else None
        if remote is not None:
            remote.upload(path, replace=True)
        if not self.configuration.automatic_checkpoint_naming:
            return
        local = RunFolder(path.parent, run=self.run_id).index
        local.add(path)
        if self.configuration.total_limit is None:
            return
        try:
            for name in self._beyond_limit(local.entries(), path.name):
                local.delete(name)
            if remote is not None:
                remote.delete_unfinished()
                for name in self._beyond_limit(remote.entries(), path.name):
                    remote.delete(name)
        except (CheckpointError, OSError) as error:
            warnings.warn(f"an earlier state was not deleted: {error}", TrainwrightWarning, stacklevel=2)

    def _beyond_limit(self, entries: Sequence[IndexEntry] | Sequence[RemoteEntry], newest: str) -> list[str]:
        """Return the names of the states to delete: the oldest ones, all but `newest` and `total_limit - 1` others.

        States with other names than automatic ones are not counted.
        """
        assert self.configuration.total_limit is not None
        older = [entry for entry in entries if entry.name != newest and _number_after(entry.name) > 0]
        older.sort(key=lambda entry: entry.created)
        num_deleted = max(0, len(older) - (self.configuration.total_limit - 1))
        return [entry.name for entry in older[:num_deleted]]

    def adopt_run(self, run_id: str, path: Path, *, is_main: bool) -> None:
        """Adopt the run of a loaded state, and count automatic names from the state's name. Not collective.

        Args:
            run_id: Identifier of the state's run. Empty for states of early versions.
            path: The state's local folder.
            is_main: True on the main rank, which adds the state to the run's index if a killed process has not.
        """
        self.run_id = run_id or self.run_id
        self._has_loaded = True
        self.count_from(path.name)
        is_in_our_folder = path.resolve().parent == self._local_folder.resolve()
        if is_main and is_in_our_folder and self.configuration.automatic_checkpoint_naming:
            with contextlib.suppress(OSError):  # the folder may be read-only
                RunFolder(path.parent, run=self.run_id).enter(open_checkpoint(path))

    def count_from(self, name: str) -> None:
        """Set the number of the next automatic name to one more than the number in `name`, if naming is automatic.

        Other names than automatic ones have no effect.
        """
        number = _number_after(name)
        if number > 0 and self.configuration.automatic_checkpoint_naming:
            self.configuration.iteration = number


def _number_after(name: str) -> int:
    """Return one more than the number in an automatic name. 0 for any other name."""
    match = _NAME.fullmatch(name)
    return 0 if match is None else int(match[1]) + 1
