"""The project of an Accelerator: names, folders and URLs of saved states, and their maximum number."""

from __future__ import annotations

import os
import re
import secrets
import warnings
from dataclasses import dataclass
from pathlib import Path

from trainwright.checkpoint.format.staging import remove_folder
from trainwright.checkpoint.remote import RemoteIndex, fetch_checkpoint, fetch_newest, find_remote, remote_names
from trainwright.checkpoint.run_folder import RunFolder
from trainwright.core.errors import CheckpointError, ConfigurationError, TrainwrightWarning
from trainwright.core.host.folders import is_url, last_part, local_folder, parent_url

_NAME = re.compile(r"checkpoint_(\d+)")


@dataclass(slots=True)
class ProjectConfiguration:
    """Folders of an `Accelerator`'s saved states and trackers, and the number of states to keep.

    Args:
        project_dir: Folder of the project, or its URL, such as `s3://bucket/run`. Default: None.
        logging_dir: Folder of the trackers. Default: None, which is `project_dir`.
        automatic_checkpoint_naming: `save_state()` writes `project_dir/checkpoints/checkpoint_{iteration}`, and
            `load_state()` without a folder reads the newest valid state. Default: False.
        total_limit: Maximum number of automatically named states. Older states are deleted once a new state is on the
            disk, or uploaded. In a remote folder, only states that this run has uploaded are deleted. Default: None,
            which deletes no state.
        iteration: Number of the next automatically named state. Default: 0.
        save_on_each_node: Must be False, because one folder contains the state of all nodes. Default: False.
        async_save: `save_state` returns once the tensors are copied to host memory. A thread then writes and uploads
            the state. The next save, `load_state` and the end of the script wait for this thread. Default: False.

    Raises:
        ConfigurationError: `total_limit` is less than 1, `save_on_each_node` is True, or `project_dir` is missing with
            `automatic_checkpoint_naming`.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False
    async_save: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ConfigurationError(f"total_limit={self.total_limit!r}: write a whole number of at least 1, or None.")
        if self.save_on_each_node:
            raise ConfigurationError(
                "save_on_each_node=True is not supported: all nodes write into one folder, on a file system that they "
                "share. Remove save_on_each_node."
            )
        if self.automatic_checkpoint_naming and self.project_dir is None:
            raise ConfigurationError("automatic_checkpoint_naming=True needs project_dir=, the folder of the project.")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the folder of the project. The trackers use this folder, too, unless `logging_dir` is set."""
        self.project_dir = None if project_dir is None else os.fspath(project_dir)
        self.logging_dir = self.project_dir if self.logging_dir is None else self.logging_dir


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

    @property
    def _root(self) -> Path:
        project = self.configuration.project_dir
        return Path() if project is None or is_url(project) else Path(project)

    @property
    def folder(self) -> str:
        """The folder or URL of automatically named states."""
        project = self.configuration.project_dir
        return f"{project.rstrip('/')}/checkpoints" if is_url(project) else os.fspath(self._root / "checkpoints")

    def on_disk(self, place: str) -> Path:
        """Return the local path to which the state at a path or URL is written."""
        if not is_url(place):
            return Path(place)
        return local_folder(self._root / "checkpoints", parent_url(place)) / last_part(place)

    def target(self, output_dir: str | os.PathLike[str] | None) -> str:
        """Return the path or URL of the next save. With automatic naming, `output_dir` must be None. Not collective."""
        project = self.configuration
        if not project.automatic_checkpoint_naming:
            if output_dir is None:
                raise ConfigurationError(
                    "save_state() needs a folder. Pass output_dir='…', or "
                    "ProjectConfiguration(project_dir='…', automatic_checkpoint_naming=True)."
                )
            return os.fspath(output_dir)
        if output_dir is not None:
            raise ConfigurationError(
                f"save_state(output_dir={os.fspath(output_dir)!r}) and automatic_checkpoint_naming=True both name the "
                "folder. Leave one out."
            )
        return f"{self.folder}/checkpoint_{project.iteration}"

    def check(self, place: str) -> None:
        """Check before a save that an automatic name is free and a remote folder is available. Main rank only.

        Raises:
            CheckpointError: The service cannot be reached, or denies access.
            ConfigurationError: The name is taken.
            MissingPackageError: The package of the service is not installed.
        """
        automatic = self.configuration.automatic_checkpoint_naming
        if is_url(place):
            url, name = parent_url(place), last_part(place)
            is_there = name in remote_names(url)
            is_taken = is_there and automatic and any(last_part(found.url) == name for found in find_remote(url))
        else:
            is_taken = automatic and Path(place).exists()
        if is_taken:
            raise ConfigurationError(
                f"{place} exists already. Call load_state() to continue from the newest state, or pass "
                "ProjectConfiguration(iteration=…), the number of the next one."
            )

    def check_source(self, input_dir: str | os.PathLike[str] | None) -> None:
        """Check that a folder to load from was passed, or that automatic naming determines it."""
        if input_dir is None and not self.configuration.automatic_checkpoint_naming:
            raise ConfigurationError(
                "load_state() needs a folder. Pass input_dir='…', or "
                "ProjectConfiguration(project_dir='…', automatic_checkpoint_naming=True)."
            )

    def fetch(self, url: str | None) -> str | None:
        """Download the state at `url`, and return its local path. Main rank only.

        If `url` is None, return the newest automatically named state. The result is None if there is no valid state.

        Raises:
            CheckpointError: The state is damaged, or the service cannot be reached.
            MissingPackageError: The package of the service is not installed.
        """
        if url is None:
            local = RunFolder(self.on_disk(f"{self.folder}/newest").parent).newest()
            newest = fetch_newest(self.folder, self._root / "downloaded", than=local) if is_url(self.folder) else None
            if newest is None and local is not None:
                newest = local.path
            return None if newest is None else os.fspath(newest)
        try:
            return os.fspath(fetch_checkpoint(url, self._root / "downloaded"))
        except FileNotFoundError:
            return None

    def published(self, place: str, path: Path) -> None:
        """Upload the state in `path` if `place` is a URL, and delete states beyond the limit. Main rank only.

        If the upload fails, the state remains on this machine, and earlier uploads are not changed.
        """
        index = RemoteIndex(parent_url(place), run=self.run_id) if is_url(place) else None
        if index is not None:
            index.upload(path, replace=True)
        limit = self.configuration.total_limit
        if not self.configuration.automatic_checkpoint_naming or limit is None:
            return
        for name in _beyond(limit, [one.name for one in path.parent.iterdir()]):
            remove_folder(path.parent / name)
        if index is None:
            return
        try:
            index.delete_unfinished()
            for name in _beyond(limit, [entry.name for entry in index.entries()]):
                index.delete(name)
        except CheckpointError as error:
            warnings.warn(f"an earlier state was not deleted: {error}", TrainwrightWarning, stacklevel=2)

    def continues(self, run_id: str, name: str) -> None:
        """Adopt the loaded state's run identifier, and count automatic names from `name`, the state's name."""
        self.run_id = run_id or self.run_id
        found = _NAME.fullmatch(name)
        if found is not None and self.configuration.automatic_checkpoint_naming:
            self.configuration.iteration = int(found[1]) + 1


def _beyond(limit: int, names: list[str]) -> list[str]:
    """Return all automatic names except the `limit` names with the highest numbers."""
    numbers = {int(found[1]): name for name in names if (found := _NAME.fullmatch(name))}
    return [numbers[number] for number in sorted(numbers)[:-limit]]
