"""Checkpoints on `s3://`, `gs://`, `memory://` and whatever else fsspec reaches.

A remote checkpoint is a folder of objects with the layout of a local one. There is no rename to publish it by, so that
the manifest does: it goes up last and comes down first in a deletion, and a folder without it is no checkpoint.

fsspec comes with torch; the packages for the single services (s3fs, gcsfs, ...) are named when they are missing.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
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
from trainwright.core.errors import CheckpointError, MissingPackageError, TrainwrightError, require_package
from trainwright.core.host.folders import held, is_url, last_part, local_folder

# How services word that they do not let somebody in; they have no exception in common.
_REFUSED = re.compile(
    r"credential|permission|forbidden|access.?denied|unauthori|not authori|\b40[13]\b|anonymous", re.I
)
_RUN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint:
    """A complete checkpoint on a remote file system, and what its manifest says; its files have not been verified."""

    url: str
    manifest: Manifest


def upload_checkpoint(
    local: Path | str, url: str, *, replace: bool = False, storage_options: Mapping[str, Any] | None = None
) -> str:
    """Copy a published checkpoint below `url`, under its own name; files first, manifest last.

    Every file is hashed as it is read, and its remote size is compared, before the manifest is uploaded. A remote
    checkpoint with the same manifest is left as it is. One process calls it; it blocks on the network.

    Args:
        local: the checkpoint's folder.
        url: the remote folder, such as `s3://bucket/run`.
        replace: delete another checkpoint of the same name first; otherwise that is an error.
        storage_options: for fsspec, such as credentials; never stored.

    Returns:
        The checkpoint's URL.

    Raises:
        FileNotFoundError: nothing is at `local`.
        CheckpointError: the local checkpoint is damaged or changes, another one has its name, or the service fails.
        MissingPackageError: the service's package is not installed.
    """
    local = Path(local)
    manifest = read_manifest(local)
    problems = verify(local, hashes=False)
    if problems:
        raise CheckpointError(f"{local} is damaged and is not uploaded: {'; '.join(problems)}.")
    sealed = (local / MANIFEST).read_bytes()
    remote = _Remote(_join(url, local.name), storage_options)
    there = remote.read(MANIFEST, MAX_MANIFEST_BYTES)
    if there == sealed:
        return remote.url
    if there is not None:
        if not replace:
            raise CheckpointError(f"{remote.url} holds another checkpoint. Choose another name, or pass replace=True.")
        remote.delete_tree()
    for part in manifest.parts.values():
        for relative, entry in part.files.items():
            remote.send(inside(local, relative, MANIFEST), relative, entry)
    remote.write(MANIFEST, sealed)
    return remote.url


def find_remote(url: str, *, storage_options: Mapping[str, Any] | None = None) -> list[RemoteCheckpoint]:
    """Return the complete checkpoints directly below `url`, by step and then by time of writing.

    A folder without a valid manifest is skipped. A `url` that does not exist has none. Blocks on the network: one
    listing, and one manifest per folder. Errors of the service are those of `upload_checkpoint`.
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
            continue  # cut short or not ours; who asks for it by name hears why
        found.append(RemoteCheckpoint(remote.url, manifest))
    return sorted(found, key=lambda item: (item.manifest.step, item.manifest.created, item.url))


def newest_remote(
    url: str, *, than: FoundCheckpoint | None = None, kind: Kind | None = None
) -> RemoteCheckpoint | None:
    """Return the complete checkpoint directly below `url` that was written last; see `find_remote`.

    Args:
        url: the remote folder.
        than: a local checkpoint. None is returned if it is the same or was written later.
        kind: `"full"` skips checkpoints that cannot be resumed.
    """
    found = [item for item in find_remote(url) if kind is None or item.manifest.kind == kind]
    last = max(found, key=lambda item: (item.manifest.created, item.manifest.step), default=None)
    is_older = last is not None and than is not None and than.manifest.created >= last.manifest.created
    return None if is_older else last


def download_checkpoint(url: str, into: Path | str, *, storage_options: Mapping[str, Any] | None = None) -> Path:
    """Copy the remote checkpoint `url` into the local folder `into`, under its own name.

    Sizes and hashes are compared with the manifest as the bytes arrive, and the folder appears by one rename. A valid
    local copy with the same manifest is left as it is. One process calls it; it blocks on the network and the disk.

    Raises:
        FileNotFoundError: there is no complete checkpoint at `url`.
        CheckpointError: it is damaged, something else is at the local name, or the service fails.
        MissingPackageError: the service's package is not installed.
    """
    remote = _Remote(url, storage_options)
    data = remote.read(MANIFEST, MAX_MANIFEST_BYTES)
    if data is None:
        raise FileNotFoundError(f"there is no checkpoint {remote.url}, or one whose upload never finished.")
    manifest = Manifest.from_bytes(data, f"{remote.url}/{MANIFEST}")
    target = Path(into) / _last(remote.url)
    if os.path.lexists(target):
        if (target / MANIFEST).is_file() and (target / MANIFEST).read_bytes() == data and not verify(target):
            return target
        raise CheckpointError(f"{target} exists and is not that checkpoint; it is not replaced. Choose another folder.")
    make_folder(target.parent)
    temporary = hidden(target, "tmp")
    try:
        make_folder(temporary)
        with held(temporary):
            _fetch_all(remote, manifest, temporary)
            write_file(temporary / MANIFEST, data)
            sync_folder(temporary)
            rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def fetch_checkpoint(url: str, root: Path, *, storage_options: Mapping[str, Any] | None = None) -> Path:
    """Return a local copy of the remote checkpoint `url` below `root`, and download it if it is missing or damaged.

    The content at `url` may change; every content has a folder of its own, named after its manifest.
    """
    data = _Remote(url, storage_options).read(MANIFEST, MAX_MANIFEST_BYTES)
    digest = xxhash.xxh3_64(data or b"").hexdigest()
    folder = local_folder(root, url) / digest
    target = folder / _last(url)
    if target.is_dir() and verify(target):
        remove_folder(target)
    return download_checkpoint(url, folder, storage_options=storage_options)


def remote_names(url: str, *, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the names of all folders directly below `url`, checkpoints or not; none if it does not exist."""
    return _Remote(url, storage_options).folders()


def _fetch_all(remote: _Remote, manifest: Manifest, folder: Path) -> None:
    for part in manifest.parts.values():
        for relative, entry in part.files.items():
            make_folder((folder / relative).parent)
            remote.fetch(relative, folder / relative, entry)
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """One checkpoint that a run has uploaded; `created` tells it from a later one of the same name."""

    name: str
    step: int
    created: str
    kind: Kind


class RemoteIndex:
    """The checkpoints that one run has uploaded below a URL: the only ones that it may delete there.

    Stored beside them in `index.{run}.json`, one file per run, since objects cannot be locked. An entry is written
    before the upload begins, so that an upload that a crash interrupted can still be deleted.

    Args:
        url: the remote folder.
        run: the run's own id, the same after a resume: letters, digits, `.`, `_` and `-`.
        storage_options: for fsspec.
    """

    def __init__(self, url: str, *, run: str, storage_options: Mapping[str, Any] | None = None) -> None:
        if _RUN_NAME.fullmatch(run) is None:
            raise CheckpointError(f"run={run!r}: expected letters, digits, '.', '_' and '-', not beginning with '.'.")
        self.url = url.rstrip("/")
        self.run = run
        self._options = storage_options
        self._home = _Remote(self.url, storage_options)
        self._file = f"index.{run}.json"
        self._load()  # fails now rather than at the first upload

    def upload(self, local: Path | str, *, replace: bool = False) -> str:
        """Upload a checkpoint (see `upload_checkpoint`) and take it into the index; returns its URL.

        With `replace`, only one that this run has uploaded itself is replaced.
        """
        local = Path(local)
        manifest = read_manifest(local)
        entry = RemoteEntry(check_relative(local.name, "the index"), manifest.step, manifest.created, manifest.kind)
        entries = self._load()
        old = next((known for known in entries if known.name == entry.name), None)
        if old is not None and old.created != entry.created:
            if not replace:
                raise CheckpointError(
                    f"{self.url}/{entry.name} is an earlier checkpoint of this run; pass replace=True."
                )
            self.delete(entry.name)
        elif old is None:
            there = self._manifest(entry.name)
            if there is not None and there.created != entry.created:
                raise CheckpointError(f"{self.url}/{entry.name} was not uploaded by this run; it is not replaced.")
        self._store([*(known for known in self._load() if known.name != entry.name), entry])
        return upload_checkpoint(local, self.url, storage_options=self._options)

    def entries(self) -> list[RemoteEntry]:
        """Return this run's uploads, half ones included, by step and then by time of writing."""
        return sorted(self._load(), key=lambda entry: (entry.step, entry.created, entry.name))

    def delete(self, name: str) -> None:
        """Delete one of this run's uploads, its manifest first, and its entry. Nothing is deleted if another run
        uploaded it.
        """
        entries = self._load()
        entry = next((known for known in entries if known.name == name), None)
        if entry is None:
            raise CheckpointError(f"{name!r} is not among this run's uploads to {self.url}; it is not deleted.")
        there = self._manifest(name)
        if there is not None and there.created != entry.created:
            raise CheckpointError(f"{self.url}/{name} is no longer what this run uploaded; it is not deleted.")
        _Remote(_join(self.url, name), self._options).delete_tree()
        self._store([known for known in entries if known is not entry])

    def delete_unfinished(self) -> list[str]:
        """Delete uploads that this run never finished, and return their names. Call it before the first upload of a
        session.
        """
        gone = [entry.name for entry in self.entries() if self._manifest(entry.name) is None]
        for name in gone:
            self.delete(name)
        return gone

    def keep_last(self, num: int) -> list[str]:
        """Delete all of this run's uploads except the `num` with the highest steps; returns the deleted names."""
        if num < 0:
            raise CheckpointError(f"keep_last({num}): expected 0 or more.")
        entries = self.entries()
        gone = [entry.name for entry in entries[: max(len(entries) - num, 0)]]
        for name in gone:
            self.delete(name)
        return gone

    def _manifest(self, name: str) -> Manifest | None:
        remote = _Remote(_join(self.url, name), self._options)
        data = remote.read(MANIFEST, MAX_MANIFEST_BYTES)
        return None if data is None else Manifest.from_bytes(data, f"{remote.url}/{MANIFEST}")

    def _load(self) -> list[RemoteEntry]:
        data = self._home.read(self._file, MAX_MANIFEST_BYTES)
        if data is None:
            return []
        origin = f"{self.url}/{self._file}"
        values = load_json(data, origin)
        if not isinstance(values, dict):
            raise CheckpointError(f"{origin}: expected a JSON object, got {type(values).__name__}.")
        version = check_format_version(values.get("format_version"), origin)
        try:
            today = upgraded({"remote_index": values}, version)["remote_index"]
            return [_entry(item, origin) for item in today["checkpoints"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{origin} is damaged: {error!r}. If you remove it, the checkpoints stay and are no longer managed."
            ) from error

    def _store(self, entries: list[RemoteEntry]) -> None:
        values = {"format_version": PLAIN_VERSION, "checkpoints": [asdict(entry) for entry in entries]}
        self._home.write(self._file, dump_json(values, indent=2).encode() + b"\n")


def _entry(item: Any, origin: str) -> RemoteEntry:
    name = check_relative(item["name"], origin)
    if "/" in name or name.startswith("."):
        raise CheckpointError(f"{origin} names {name!r}, which is no checkpoint in its folder. It is refused.")
    if item["kind"] not in PARTS:
        raise ValueError(f"unknown kind {item['kind']!r}")
    return RemoteEntry(name, int(item["step"]), str(item["created"]), item["kind"])


class _Remote:
    """One remote folder. What the service raises comes out as a `CheckpointError` that names the URL."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None) -> None:
        if not is_url(url):
            raise CheckpointError(f"{url!r} is no URL: expected one such as s3://bucket/run or memory://run.")
        self.url = url.rstrip("/")
        fsspec = require_package("fsspec", purpose="a remote checkpoint")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, **dict(storage_options or {}))
        except ImportError as error:
            # fsspec's own message names the package of the service, as in "Install s3fs to access S3".
            raise MissingPackageError(f"{self.url}: {error}. It is a package of its own: pip install it.") from error
        except ValueError as error:
            raise CheckpointError(f"{self.url}: {error}") from error

    def _path(self, relative: str) -> str:
        return f"{self._root.rstrip('/')}/{relative}"

    @contextlib.contextmanager
    def _told(self, verb: str, relative: str = "") -> Iterator[None]:
        """Turn what a service raises into an error of ours; what is not there stays a FileNotFoundError."""
        try:
            yield
        except (FileNotFoundError, TrainwrightError):
            raise
        except Exception as error:
            # Services have exceptions of their own, which need not be OSErrors (botocore, aiohttp, ftplib).
            where, problem = _join(self.url, relative), f"{type(error).__name__}: {error}"
            hint = ""
            if _REFUSED.search(problem):
                scheme = self.url.partition(":")[0]
                hint = (
                    f" The service knows no credentials of this machine, or they do not suffice: set them up as the "
                    f"fsspec package of {scheme}:// wants them."
                )
            raise CheckpointError(f"could not {verb} {where}: {problem}.{hint}") from error

    def read(self, relative: str, limit: int) -> bytes | None:
        """Return a small file's bytes; None if there is none."""
        try:
            with self._told("read", relative):
                # Others write here too: what a listing said a moment ago may be over.
                self._fs.invalidate_cache()
                with self._fs.open(self._path(relative), "rb") as file:
                    data: bytes = file.read(limit + 1)
        except FileNotFoundError:
            return None
        if len(data) > limit:
            raise CheckpointError(f"{self.url}/{relative} is longer than {limit} bytes; it is not ours.")
        return data

    def write(self, relative: str, data: bytes) -> None:
        """Put a small file, whole."""
        with self._told("write", relative):
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(self._path(relative), data)

    def send(self, local: Path, relative: str, entry: FileEntry) -> None:
        """Copy a file up and check that what went up is what the manifest says."""
        digest = xxhash.xxh3_128()
        with self._told("write", relative):
            self._fs.makedirs(self._path(relative).rpartition("/")[0], exist_ok=True)
            with open(local, "rb") as source, self._fs.open(self._path(relative), "wb") as target:
                for piece in _pieces(source):
                    digest.update(piece)
                    target.write(piece)
            self._fs.invalidate_cache()
            size = int(self._fs.info(self._path(relative))["size"])
        if digest.hexdigest() != entry.xxh3_128:
            raise CheckpointError(f"{local} has changed: its hash is not the one in {MANIFEST}. It is not uploaded.")
        if size != entry.size:
            raise CheckpointError(f"{self.url}/{relative} arrived with {size} bytes, expected {entry.size}.")

    def fetch(self, relative: str, local: Path, entry: FileEntry) -> None:
        """Copy a file down into a new one and check it against the manifest."""
        try:
            with (
                self._told("read", relative),
                self._fs.open(self._path(relative), "rb") as source,
                HashingFile(local) as target,
            ):
                for piece in _pieces(source):
                    target.write(piece)
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.url} is damaged: {relative} is missing.") from error
        if target.entry != entry:
            raise CheckpointError(
                f"{self.url} is damaged: {relative} has {target.entry.size} bytes and the hash "
                f"{target.entry.xxh3_128}, expected {entry.size} and {entry.xxh3_128}."
            )

    def folders(self) -> list[str]:
        """Return the names of the folders directly in this one."""
        try:
            with self._told("list"):
                self._fs.invalidate_cache()
                listed = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return sorted(_last(str(item["name"])) for item in listed if item["type"] == "directory")

    def delete_tree(self) -> None:
        """Delete everything in this folder, the manifest first: what is left of a broken deletion is no checkpoint."""
        # On object stores a folder is gone with its last object.
        with contextlib.suppress(FileNotFoundError), self._told("delete"):
            self._fs.invalidate_cache()
            if self._fs.exists(self._path(MANIFEST)):
                self._fs.rm_file(self._path(MANIFEST))
            if self._fs.exists(self._root):
                self._fs.rm(self._root, recursive=True)
            self._fs.invalidate_cache()


def _pieces(file: Any) -> Iterator[bytes]:
    while piece := file.read(CHUNK_BYTES):
        yield piece


def _join(url: str, name: str) -> str:
    return f"{url.rstrip('/')}/{name}".rstrip("/")


def _last(url: str) -> str:
    return check_relative(last_part(url), url)
