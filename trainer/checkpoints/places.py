"""The folders and URLs of a run's checkpoints, and their uploads and downloads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.callbacks.roles import Saver
from trainwright.checkpoint.format.layout import Kind
from trainwright.checkpoint.format.manifests import FoundCheckpoint
from trainwright.checkpoint.remote import RemoteIndex, fetch_checkpoint, fetch_newest, remote_names
from trainwright.checkpoint.run_folder import RunFolder
from trainwright.core.errors import CheckpointError
from trainwright.core.host.folders import is_url, last_part, local_folder, parent_url
from trainwright.core.run import SaveRequest
from trainwright.trainer.hooks import StageHooks
from trainwright.trainer.run_state import RunProgress

CHECKPOINTS = "checkpoints"  # name of the folder of checkpoints
DOWNLOADS = "downloaded"  # below `default_root_dir`


class CheckpointPlaces:
    """The folders and URLs of a run's checkpoints.

    Args:
        root: `default_root_dir`.
        hooks: provides each ModelCheckpoint, whose folder and URL come first.
        progress: provides the run's identity, which protects the checkpoints of other runs.

    Attributes:
        default_folder: folder of checkpoints if the ModelCheckpoint has none. `StageRun.set_up` may change it, with
            the folder of a logger.
    """

    def __init__(self, root: Path, hooks: StageHooks, progress: RunProgress) -> None:
        self.default_folder = root / CHECKPOINTS
        self._root = root
        self._hooks = hooks
        self._progress = progress

    @property
    def folder(self) -> Path:
        """Folder of checkpoints that are saved without a folder of their own."""
        saver = self._hooks.saver
        if saver is None:
            return self.default_folder
        # `dirpath` may be a URL. `local_dirpath` is None until the callback is set up.
        chosen = saver.local_dirpath or saver.dirpath
        return Path(chosen) if chosen else self.default_folder

    @property
    def run_folder(self) -> RunFolder:
        """This run's checkpoints in `folder`."""
        return self.in_folder(self.folder)

    def in_folder(self, folder: Path) -> RunFolder:
        """Return this run's checkpoints in a folder."""
        return RunFolder(folder, run=self._progress.run_id)

    def of_request(self, request: SaveRequest) -> Path:
        """Return the path of a requested checkpoint."""
        folder = self.folder if request.folder is None else Path(request.folder)
        return folder / request.name

    def is_best(self, path: Path) -> bool:
        """Return whether a checkpoint is the best one of the first ModelCheckpoint."""
        saver = self._hooks.saver
        return saver is not None and path.name == Path(saver.best_model_path).name

    # Remote folders

    @property
    def remote(self) -> str | None:
        """URL that the first ModelCheckpoint uploads to, or None."""
        return None if self._hooks.saver is None else self._hooks.saver.remote

    def local_path(self, url: str) -> Path:
        """Return the local path of the checkpoint that is uploaded to `url`."""
        return local_folder(self._root.absolute() / CHECKPOINTS, parent_url(url)) / last_part(url)

    def upload(self, path: Path, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        """Upload the checkpoint `path` to `url`, replacing a checkpoint of this run at that URL."""
        self._remote_index(parent_url(url), storage_options).upload(path, replace=True)

    def upload_requested(self, path: Path, request: SaveRequest) -> list[str]:
        """Upload a published checkpoint, then delete the remote checkpoints that it replaces. Blocks. Not collective.

        Args:
            path: the local checkpoint.
            request: the save request. Its `remote` is the URL of the target folder.

        Returns:
            Messages about checkpoints that could not be deleted.

        Raises:
            CheckpointError: the upload failed. The target still holds its earlier checkpoint, or no manifest, so that
                no incomplete checkpoint is read.
        """
        assert request.remote is not None  # checked by the caller
        index = self._remote_index(request.remote)
        index.upload(path, replace=True)
        uploaded = {entry.name for entry in index.entries()}
        complaints = []
        for name in request.remove:
            if name in uploaded:
                try:
                    index.delete(name)
                except CheckpointError as error:
                    complaints.append(f"an earlier checkpoint was not deleted: {error}")
        return complaints

    def finish_uploads(self, resumed: Path | None) -> None:
        """Delete unfinished uploads of a killed process of this run. Called on rank 0 after a resume.

        Args:
            resumed: a checkpoint in the ModelCheckpoint's local folder to upload if it is missing remotely, or None.
        """
        savers = self._hooks.all_of(Saver)  # type: ignore[type-abstract]  # a protocol serves as a role
        for remote in sorted({saver.remote for saver in savers if saver.remote is not None}):
            self._remote_index(remote).delete_unfinished()
        if resumed is not None and self.remote is not None:
            self._remote_index(self.remote).upload(resumed, replace=True)

    def fetch(self, url: str) -> Path:
        """Return a local copy of the remote checkpoint `url`. Existing downloads are reused.

        Raises:
            FileNotFoundError, CheckpointError, MissingPackageError: see `download_checkpoint`.
        """
        return fetch_checkpoint(url, self._root / DOWNLOADS)

    def fetch_newer(self, local: FoundCheckpoint | None, kind: Kind | None, *, skip_damaged: bool) -> Path | None:
        """Return a local copy of the newest valid checkpoint in the remote folder; see `fetch_newest`.

        Args:
            local: the newest local checkpoint, or None.
            kind: `"full"` or `"weights"`; None for both.
            skip_damaged: use an older checkpoint if the newest is damaged, instead of raising an error.

        Returns:
            None if no remote folder is set, it contains no valid checkpoint, or `local` is at least as new.
        """
        if self.remote is None:
            return None
        return fetch_newest(self.remote, self._root / DOWNLOADS, than=local, kind=kind, skip_damaged=skip_damaged)

    def remote_names(self) -> list[str]:
        """Return the names of all folders in the remote folder. Empty without a remote folder."""
        return [] if self.remote is None else remote_names(self.remote)

    def on_this_machine(self, place: str) -> Path:
        """Return the local checkpoint for a path or URL. The original of an upload is preferred to a download."""
        if not is_url(place):
            return Path(place)
        original = self.folder / last_part(place)
        return original if original.is_dir() else self.fetch(place)

    def _remote_index(self, url: str, storage_options: Mapping[str, Any] | None = None) -> RemoteIndex:
        return RemoteIndex(url, run=self._progress.run_id, storage_options=storage_options)
