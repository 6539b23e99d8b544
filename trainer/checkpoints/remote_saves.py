"""Upload and download of a run's remote checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.checkpoint.format.layout import Kind
from trainwright.checkpoint.format.manifests import FoundCheckpoint
from trainwright.checkpoint.remote import RemoteIndex, fetch_checkpoint, fetch_newest, remote_names
from trainwright.core.errors import CheckpointError
from trainwright.core.host.folders import is_url, last_part, local_folder, parent_url
from trainwright.core.run import SaveRequest
from trainwright.trainer.run import StageRun

DOWNLOADS = "downloaded"  # below `default_root_dir`


def upload(path: Path, request: SaveRequest, run_id: str) -> list[str]:
    """Upload a published checkpoint, then delete the remote checkpoints that it replaces. One process calls it. Blocks.

    Args:
        path: the local checkpoint.
        request: the save request. Its `remote` is the URL of the target folder.
        run_id: the run whose uploads may be replaced and deleted.

    Returns:
        Messages about checkpoints that could not be deleted.

    Raises:
        CheckpointError: the upload failed. The target still holds its earlier checkpoint, or no manifest, so that no
            incomplete checkpoint is read.
    """
    assert request.remote is not None  # checked by the caller
    index = RemoteIndex(request.remote, run=run_id)
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


def tidy(run: StageRun, path: Path | None) -> None:
    """Delete unfinished uploads of a killed process of this run. Called on rank 0 after a resume.

    Args:
        run: the run, after a resume.
        path: a checkpoint in the ModelCheckpoint's local folder to upload if it is missing remotely, or None.
    """
    for remote in sorted({saver.remote for saver in run.savers if saver.remote is not None}):
        RemoteIndex(remote, run=run.history.run_id).delete_unfinished()
    target = None if run.saver is None else run.saver.remote
    if path is not None and target is not None:
        RemoteIndex(target, run=run.history.run_id).upload(path, replace=True)


def local_path(run: StageRun, url: str) -> Path:
    """Return the local path of the checkpoint that is uploaded to `url`."""
    return local_folder(run.settings.root.absolute() / "checkpoints", parent_url(url)) / last_part(url)


def upload_to(run: StageRun, path: Path, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
    """Upload the checkpoint `path` to `url`, replacing a checkpoint of this run at that URL."""
    RemoteIndex(parent_url(url), run=run.history.run_id, storage_options=storage_options).upload(path, replace=True)


def fetch(run: StageRun, url: str) -> Path:
    """Return a local copy of the remote checkpoint `url`. Existing downloads are reused.

    Raises:
        FileNotFoundError, CheckpointError, MissingPackageError: see `download_checkpoint`.
    """
    return fetch_checkpoint(url, run.settings.root / DOWNLOADS)


def fetch_newer(run: StageRun, local: FoundCheckpoint | None, kind: Kind | None, *, skip_damaged: bool) -> Path | None:
    """Return a local copy of the newest valid checkpoint of the ModelCheckpoint's remote folder; see `fetch_newest`.

    Returns:
        None if there is no remote folder, it contains no valid checkpoint, or `local` is at least as new.
    """
    remote = None if run.saver is None else run.saver.remote
    if remote is None:
        return None
    return fetch_newest(remote, run.settings.root / DOWNLOADS, than=local, kind=kind, skip_damaged=skip_damaged)


def saved_names(run: StageRun) -> list[str]:
    """Return the names of all folders in the ModelCheckpoint's remote folder. Empty if there is no remote folder."""
    remote = None if run.saver is None else run.saver.remote
    return [] if remote is None else remote_names(remote)


def on_this_machine(run: StageRun, path: str) -> Path:
    """Return the local checkpoint for a path or URL. For a URL, the uploaded original is preferred to a download."""
    if not is_url(path):
        return Path(path)
    ours = run.checkpoint_dir / last_part(path)
    return ours if ours.is_dir() else fetch(run, path)
