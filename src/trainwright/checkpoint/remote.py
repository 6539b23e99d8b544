"""Checkpoints on `s3://`, `gs://`, `memory://` and every other file system that fsspec supports.

A remote checkpoint has the layout of a local one. Object stores cannot rename a folder. Instead, the manifest is
uploaded last and deleted first, and a folder without a manifest is not a checkpoint.

fsspec is installed with torch. If the package for a service (s3fs, gcsfs, ...) is missing, the error names it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from trainwright.checkpoint.disk.durable import (
    CHUNK_BYTES,
    FileEntry,
    HashingFile,
    hidden,
    make_folder,
    rename,
    sync_folder,
    write_file,
)
from trainwright.checkpoint.disk.untrusted import check_relative, dump_json, inside, load_json
from trainwright.checkpoint.format.layout import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    PARTS,
    PLAIN_VERSION,
    Kind,
    Manifest,
    check_format_version,
    upgraded,
)
from trainwright.checkpoint.format.manifests import FoundCheckpoint, read_manifest, verify
from trainwright.checkpoint.format.staging import remove_folder
from trainwright.checkpoint.service_requests import answer, service_errors
from trainwright.core.errors import (
    CheckpointError,
    MissingPackageError,
    TrainwrightWarning,
    require_package,
)
from trainwright.core.host.folders import is_url, last_part, local_folder, mark_in_use

# Schemes of services with buckets. Their packages create a missing bucket when asked to create a folder in it.
_BUCKET_SCHEMES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}
_RUN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_DELETE_INDEX = "Delete it to continue. The uploads remain, and no run deletes them."


class DamagedRemoteError(CheckpointError):
    """Remote checkpoint whose files are missing or do not match its manifest."""


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint:
    """A complete checkpoint on a remote file system, and its manifest. The files have not been verified."""

    url: str
    manifest: Manifest


def upload_checkpoint(
    local: Path | str, url: str, *, replace: bool = False, storage_options: Mapping[str, Any] | None = None
) -> str:
    """Upload a local checkpoint into the remote folder `url`, under the name of the local folder.

    The manifest is uploaded last, after the uploaded files were compared with it. Nothing is uploaded if the remote
    checkpoint has the same manifest. Files of an interrupted upload are overwritten. Call this function on one process.
    Blocks on the network.

    Args:
        local: the checkpoint's folder.
        url: the remote folder, such as `s3://bucket/run`.
        replace: first delete a different remote checkpoint with this name. Default: False, which raises.
        storage_options: options for fsspec, such as credentials. They are never stored.

    Returns:
        The checkpoint's URL.

    Raises:
        FileNotFoundError: `local` does not exist.
        CheckpointError: `local` is damaged or changes, another remote checkpoint has this name, or the service fails.
        MissingPackageError: the service's package is not installed.
    """
    local = Path(local)
    manifest = read_manifest(local)
    problems = verify(local, hashes=False)
    if problems:
        raise CheckpointError(f"{local} is damaged and is not uploaded: {'; '.join(problems)}.")
    manifest_bytes = (local / MANIFEST).read_bytes()
    remote = _Remote(_join(url, local.name), storage_options)
    remote_manifest_bytes = remote.read(MANIFEST, MAX_MANIFEST_BYTES)
    if remote_manifest_bytes == manifest_bytes:
        return remote.url
    if remote_manifest_bytes is not None:
        if not replace:
            raise CheckpointError(f"{remote.url} holds another checkpoint. Choose another name, or pass replace=True.")
        remote.delete_tree()
    for part in manifest.parts.values():
        for relative, entry in part.files.items():
            remote.send(inside(local, relative, MANIFEST), relative, entry)
    remote.write(MANIFEST, manifest_bytes)
    return remote.url


def find_remote(url: str, *, storage_options: Mapping[str, Any] | None = None) -> list[RemoteCheckpoint]:
    """Return the complete checkpoints directly below `url`, by step and then by time of writing.

    A folder without a valid manifest is skipped. If `url` does not exist, the list is empty. Blocks on the network.
    Raises a CheckpointError if the service fails.
    """
    found = []
    for name in _Remote(url, storage_options).folders():
        remote = _Remote(_join(url, name), storage_options)
        data = remote.read(MANIFEST, MAX_MANIFEST_BYTES)
        if data is None:
            continue
        try:
            manifest = Manifest.from_bytes(data, f"{remote.url}/{MANIFEST}")
        except CheckpointError:
            continue  # incomplete or not a checkpoint; a download by name raises the reason
        found.append(RemoteCheckpoint(remote.url, manifest))
    return sorted(found, key=lambda item: (item.manifest.step, item.manifest.created, item.url))


def download_checkpoint(url: str, into: Path | str, *, storage_options: Mapping[str, Any] | None = None) -> Path:
    """Download the remote checkpoint `url` into the local folder `into`, under the remote name.

    Sizes and hashes are compared with the manifest before the folder gets its name. Nothing is downloaded if `into`
    already has a valid copy. Call this function on one process. Blocks on the network and the disk.

    Raises:
        FileNotFoundError: `url` has no complete checkpoint.
        CheckpointError: the checkpoint is damaged, something else has its name in `into`, or the service fails.
        MissingPackageError: the service's package is not installed.
    """
    remote = _Remote(url, storage_options)
    data = remote.read(MANIFEST, MAX_MANIFEST_BYTES)
    if data is None:
        raise FileNotFoundError(f"there is no checkpoint {remote.url}, or its upload did not finish.")
    manifest = Manifest.from_bytes(data, f"{remote.url}/{MANIFEST}")
    target = Path(into) / _last(remote.url)
    if os.path.lexists(target):
        if _is_valid_copy(target, data):
            return target
        raise CheckpointError(f"{target} exists and is not {remote.url}; it is not replaced. Choose another folder.")
    make_folder(target.parent)
    temporary = hidden(target, "tmp")
    try:
        make_folder(temporary)
        with mark_in_use(temporary):
            _fetch_all(remote, manifest, temporary)
            write_file(temporary / MANIFEST, data)
            sync_folder(temporary)
            rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def fetch_checkpoint(url: str, root: Path, *, storage_options: Mapping[str, Any] | None = None) -> Path:
    """Return a local copy of the remote checkpoint `url` below `root`. Download it if it is missing or damaged.

    The copy is `root/{name of the URL}/{hash of the manifest}/{checkpoint's name}`, so that a changed checkpoint is
    downloaded again. See `download_checkpoint` for the errors.
    """
    data = _Remote(url, storage_options).read(MANIFEST, MAX_MANIFEST_BYTES)
    # Without a manifest, `download_checkpoint` raises a FileNotFoundError.
    digest = xxhash.xxh3_64(data or b"").hexdigest()
    folder = local_folder(root, url) / digest
    target = folder / _last(url)
    if target.is_dir():
        if _is_valid_copy(target, data):
            return target
        remove_folder(target)
    return download_checkpoint(url, folder, storage_options=storage_options)


def _is_valid_copy(folder: Path, manifest: bytes | None) -> bool:
    """Return whether a folder has this manifest and all files that it lists. Reads the files, to hash them."""
    path = folder / MANIFEST
    return path.is_file() and path.read_bytes() == manifest and not verify(folder)


def fetch_newest(
    url: str, root: Path, *, than: FoundCheckpoint | None = None, kind: Kind | None = None, skip_damaged: bool = True
) -> Path | None:
    """Return a local copy of the newest valid checkpoint directly below `url`; see `fetch_checkpoint`.

    Args:
        url: the remote folder.
        root: the folder of the downloads.
        than: a local checkpoint. Return None if no valid remote checkpoint is newer. Default: None, no such limit.
        kind: `"full"` skips checkpoints with weights only, which cannot be resumed. Default: None, any kind.
        skip_damaged: skip a damaged checkpoint with a warning. Default: True; False raises its error.
    """
    found = [item for item in find_remote(url) if kind is None or item.manifest.kind == kind]
    for item in sorted(found, key=lambda item: (item.manifest.created, item.manifest.step), reverse=True):
        if than is not None and than.manifest.created >= item.manifest.created:
            return None
        try:
            return fetch_checkpoint(item.url, root)
        except DamagedRemoteError as error:
            if not skip_damaged:
                raise
            warnings.warn(f"{error} Falling back to an older checkpoint.", TrainwrightWarning, stacklevel=2)
    return None


def remote_names(url: str, *, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the names of all folders directly below `url`. Empty if `url` does not exist."""
    return _Remote(url, storage_options).folders()


def _fetch_all(remote: _Remote, manifest: Manifest, folder: Path) -> None:
    """Download the files that the manifest lists into `folder`, and sync the folders in it."""
    for part in manifest.parts.values():
        for relative, entry in part.files.items():
            make_folder((folder / relative).parent)
            remote.fetch(relative, folder / relative, entry)
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """One checkpoint in a `RemoteIndex`.

    Attributes:
        name: name of the checkpoint's folder.
        step, created, kind: values from the checkpoint's manifest; see `Manifest`. `created` distinguishes checkpoints
            of the same name.
    """

    name: str
    step: int
    created: str
    kind: Kind


class RemoteIndex:
    """The index of the checkpoints that one run has uploaded below a URL. The run deletes only these checkpoints.

    The index is the file `index.{run}.json` below the URL. Each run has its own index, because objects cannot be
    locked. An entry is written before its upload begins, so that an interrupted upload can be deleted later.

    Args:
        url: the remote folder.
        run: the run's id, which a resume does not change. Consists of letters, digits, `.`, `_` and `-`.
        storage_options: options for fsspec.
    """

    def __init__(self, url: str, *, run: str, storage_options: Mapping[str, Any] | None = None) -> None:
        if _RUN_NAME.fullmatch(run) is None:
            raise CheckpointError(f"run={run!r}: expected letters, digits, '.', '_' and '-', not beginning with '.'.")
        self.url = url.rstrip("/")
        self.run = run
        self._options = storage_options
        self._home = _Remote(self.url, storage_options)  # the folder with the index and the checkpoints
        self._file = f"index.{run}.json"
        self._load()  # an error of the index is raised now rather than at the first upload

    def upload(self, local: Path | str, *, replace: bool = False) -> str:
        """Add a checkpoint to the index, upload it (see `upload_checkpoint`), and return its URL.

        `replace=True` replaces an earlier upload of this run with the same name. An upload of another run raises.
        """
        local = Path(local)
        manifest = read_manifest(local)
        entry = RemoteEntry(check_relative(local.name, "the index"), manifest.step, manifest.created, manifest.kind)
        old = _named(self._load(), entry.name)
        # Three cases: another checkpoint of this run has the name, no upload of this run has it, or this checkpoint was
        # uploaded before, maybe incompletely, and is uploaded again.
        if old is not None and old.created != entry.created:
            if not replace:
                raise CheckpointError(
                    f"{self.url}/{entry.name} is an earlier checkpoint of this run. Pass replace=True to replace it."
                )
            self.delete(entry.name)
        elif old is None:
            uploaded = self._manifest(entry.name)
            if uploaded is not None and uploaded.created != entry.created:
                raise CheckpointError(f"{self.url}/{entry.name} was not uploaded by this run; it is not replaced.")
        others = [known for known in self._load() if known.name != entry.name]
        # Before the upload, so that `delete_unfinished` can delete it after a crash.
        self._store([*others, entry])
        return upload_checkpoint(local, self.url, storage_options=self._options)

    def entries(self) -> list[RemoteEntry]:
        """Return this run's uploads, including unfinished ones, by step and then by time of writing."""
        return sorted(self._load(), key=lambda entry: (entry.step, entry.created, entry.name))

    def delete(self, name: str) -> None:
        """Delete one of this run's uploads, manifest first, and its index entry.

        Raises:
            CheckpointError: this run has not uploaded `name`, or another run has replaced it. Nothing is deleted.
        """
        entries = self._load()
        entry = _named(entries, name)
        if entry is None:
            raise CheckpointError(f"{name!r} is not among this run's uploads to {self.url}; it is not deleted.")
        uploaded = self._manifest(name)
        if uploaded is not None and uploaded.created != entry.created:
            raise CheckpointError(f"{self.url}/{name} is no longer what this run uploaded; it is not deleted.")
        # The entry is removed last, so that an interrupted deletion can be repeated.
        _Remote(_join(self.url, name), self._options).delete_tree()
        self._store([known for known in entries if known is not entry])

    def delete_unfinished(self) -> list[str]:
        """Delete this run's unfinished uploads, which have no manifest, and return their names.

        Call it before the first upload of a process, since it would also delete an upload that is running.
        """
        unfinished = [entry.name for entry in self.entries() if self._manifest(entry.name) is None]
        for name in unfinished:
            self.delete(name)
        return unfinished

    def keep_last(self, num: int) -> list[str]:
        """Delete this run's uploads except the `num` uploads with the highest steps. Return the deleted names."""
        if num < 0:
            raise CheckpointError(f"keep_last({num}): expected 0 or more.")
        entries = self.entries()
        num_surplus = max(len(entries) - num, 0)
        surplus = [entry.name for entry in entries[:num_surplus]]
        for name in surplus:
            self.delete(name)
        return surplus

    def _manifest(self, name: str) -> Manifest | None:
        """Return the manifest of the remote checkpoint `name`, or None if there is none or its upload is unfinished."""
        remote = _Remote(_join(self.url, name), self._options)
        data = remote.read(MANIFEST, MAX_MANIFEST_BYTES)
        if data is None:
            return None
        return Manifest.from_bytes(data, f"{remote.url}/{MANIFEST}")

    def _load(self) -> list[RemoteEntry]:
        """Return the entries of the index. Raise a CheckpointError if it is damaged."""
        data = self._home.read(self._file, MAX_MANIFEST_BYTES)
        if data is None:
            return []
        origin = f"{self.url}/{self._file}"
        values = load_json(data, origin)
        if not isinstance(values, dict):
            kind = type(values).__name__
            raise CheckpointError(f"{origin} is damaged: expected a JSON object, got {kind}. {_DELETE_INDEX}")
        version = check_format_version(values.get("format_version"), origin)
        try:
            index = upgraded({"remote_index": values}, version)["remote_index"]
            return [_entry(item, origin) for item in index["checkpoints"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{origin} is damaged: {error!r}. {_DELETE_INDEX}") from error

    def _store(self, entries: list[RemoteEntry]) -> None:
        values = {"format_version": PLAIN_VERSION, "checkpoints": [asdict(entry) for entry in entries]}
        self._home.write(self._file, dump_json(values, indent=2).encode() + b"\n")


def _named(entries: list[RemoteEntry], name: str) -> RemoteEntry | None:
    """Return the entry with a name, or None."""
    return next((entry for entry in entries if entry.name == name), None)


def _entry(item: Any, origin: str) -> RemoteEntry:
    """Return an entry from its JSON object. `_load` converts its other errors than `CheckpointError`."""
    name = check_relative(item["name"], origin)
    if "/" in name or name.startswith("."):
        raise CheckpointError(f"{origin} names {name!r}, which is not a checkpoint in its folder.")
    if item["kind"] not in PARTS:
        raise ValueError(f"unknown kind {item['kind']!r}")
    return RemoteEntry(name, int(item["step"]), str(item["created"]), item["kind"])


class _Remote:
    """A remote folder. Its methods convert errors of the service to `CheckpointError`s that contain the URL."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None) -> None:
        if not is_url(url):
            raise CheckpointError(f"{url!r} is not a URL. Write one such as s3://bucket/run or memory://run.")
        self.url = url.rstrip("/")
        # fsspec chains protocols, as in "simplecache::s3://bucket/run". The last one is the service.
        scheme = self.url.rpartition("::")[2].partition("://")[0]
        self._in_bucket = scheme in _BUCKET_SCHEMES  # True: needs no folders, but the bucket must exist
        fsspec = require_package("fsspec", purpose="a remote checkpoint")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, **dict(storage_options or {}))
        except ImportError as error:
            # fsspec's message names the package of the service, as in "Install s3fs to access S3".
            raise MissingPackageError(f"{self.url}: {error}. Install this package with pip.") from error
        except ValueError as error:
            raise CheckpointError(f"{self.url}: {error}") from error

    def _path(self, relative: str) -> str:
        """Return the path of a file in this folder, as fsspec's file system expects it."""
        return f"{self._root.rstrip('/')}/{relative}"

    def _service_errors(self, verb: str, relative: str = "") -> AbstractContextManager[None]:
        return service_errors(_join(self.url, relative), verb)

    def read(self, relative: str, max_bytes: int) -> bytes | None:
        """Return a small file's bytes, or None if it does not exist. Raise a CheckpointError if it is longer."""
        try:
            with self._service_errors("read", relative):
                # Other processes write here too, so that cached listings may be outdated.
                self._fs.invalidate_cache()
                data = answer(lambda: self._read(relative, max_bytes + 1))
        except FileNotFoundError:
            return None
        if len(data) > max_bytes:
            raise CheckpointError(
                f"{self.url}/{relative} is longer than {max_bytes} bytes; it is damaged or has another format."
            )
        return data

    def _read(self, relative: str, size: int) -> bytes:
        with self._fs.open(self._path(relative), "rb") as file:
            data: bytes = file.read(size)
        return data

    def write(self, relative: str, data: bytes) -> None:
        """Write a small file in one operation."""
        with self._service_errors("write", relative):
            self._make_folder(self._root)
            answer(lambda: self._fs.pipe_file(self._path(relative), data))

    def send(self, local: Path, relative: str, entry: FileEntry) -> None:
        """Upload a file. Compare the sent bytes and the remote size with the manifest's `entry`."""
        digest = xxhash.xxh3_128()
        with self._service_errors("write", relative):
            self._make_folder(self._path(relative).rpartition("/")[0])
            with open(local, "rb") as source, self._fs.open(self._path(relative), "wb") as target:
                for chunk in _chunks(source):
                    digest.update(chunk)
                    target.write(chunk)
            self._fs.invalidate_cache()
            size = int(answer(lambda: self._fs.info(self._path(relative)))["size"])
        if digest.hexdigest() != entry.xxh3_128:
            raise CheckpointError(f"{local} has changed: its hash is not the one in {MANIFEST}. It is not uploaded.")
        if size != entry.size:
            raise CheckpointError(f"{self.url}/{relative} arrived with {size} bytes, expected {entry.size}.")

    def fetch(self, relative: str, local: Path, entry: FileEntry) -> None:
        """Download a file, and compare its size and hash with the manifest's `entry`."""
        try:
            with (
                self._service_errors("read", relative),
                self._fs.open(self._path(relative), "rb") as source,
                HashingFile(local) as target,
            ):
                for chunk in _chunks(source):
                    target.write(chunk)
        except FileNotFoundError as error:
            raise DamagedRemoteError(f"{self.url} is damaged: {relative} is missing. Use another one.") from error
        if target.entry != entry:
            raise DamagedRemoteError(
                f"{self.url} is damaged: {relative} has {target.entry.size} bytes and the hash "
                f"{target.entry.xxh3_128}, expected {entry.size} and {entry.xxh3_128}. Use another checkpoint."
            )

    def folders(self) -> list[str]:
        """Return the names of the folders directly in this folder. Empty if this folder does not exist.

        A missing bucket raises a CheckpointError.
        """
        try:
            with self._service_errors("list"):
                self._fs.invalidate_cache()
                listed = answer(lambda: self._fs.ls(self._root, detail=True))
        except FileNotFoundError:
            self._require_bucket()
            return []
        return sorted(_last(str(item["name"])) for item in listed if item["type"] == "directory")

    def _make_folder(self, path: str) -> None:
        """Create a folder and missing parents. In a bucket, folders exist with their files."""
        if not self._in_bucket:
            answer(lambda: self._fs.makedirs(path, exist_ok=True))

    def _require_bucket(self) -> None:
        """Raise a CheckpointError if the bucket does not exist, which a listing does not tell from an empty folder."""
        if not self._in_bucket:
            return
        bucket = self._root.partition("/")[0]
        try:
            # Other errors are ignored: credentials may be limited to the folder.
            with contextlib.suppress(CheckpointError), self._service_errors("list"):
                answer(lambda: self._fs.ls(bucket))
        except FileNotFoundError as error:
            problem = f"{self.url}: the bucket {bucket!r} does not exist. Create it, or correct the URL."
            raise CheckpointError(problem) from error

    def delete_tree(self) -> None:
        """Delete this folder if it exists, manifest first, so that an interrupted deletion leaves no checkpoint."""
        # On object stores a folder ceases to exist with its last object, so that any request may not find it.
        with contextlib.suppress(FileNotFoundError), self._service_errors("delete"):
            self._fs.invalidate_cache()
            if answer(lambda: self._fs.exists(self._path(MANIFEST))):
                answer(lambda: self._fs.rm_file(self._path(MANIFEST)))
            if answer(lambda: self._fs.exists(self._root)):
                self._fs.rm(self._root, recursive=True)
            self._fs.invalidate_cache()


def _chunks(file: Any) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _join(url: str, name: str) -> str:
    """Return the URL of `name` in the folder `url`. An empty name returns `url`."""
    return f"{url.rstrip('/')}/{name}".rstrip("/")


def _last(url: str) -> str:
    """Return the last name in a URL. Raise a CheckpointError if it cannot be the name of a local folder."""
    return check_relative(last_part(url), url)
