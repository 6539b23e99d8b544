"""The index of the checkpoints that a run wrote. A run only deletes checkpoints in its index."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainwright.checkpoint.disk.durable import make_folder, rename, replace_file
from trainwright.checkpoint.disk.untrusted import check_relative, inside, load_json, read_bytes, reading
from trainwright.checkpoint.format.layout import (
    EARLIER_RUN_INDEX,
    MAX_MANIFEST_BYTES,
    PARTS,
    PLAIN_VERSION,
    RUN_INDEX,
    Kind,
    Manifest,
    NewerFormatError,
    check_format_version,
    check_not_newer,
    seal_fits,
    sealed,
    upgraded,
)
from trainwright.checkpoint.format.manifests import find_checkpoints, read_manifest
from trainwright.checkpoint.format.reader import read_checkpoint
from trainwright.checkpoint.format.staging import remove_folder
from trainwright.core.errors import CheckpointError, TrainwrightWarning
from trainwright.core.host.folders import lock_folder


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One checkpoint of a run.

    Attributes:
        name: name of the checkpoint's folder.
        step, created, kind, metrics: values from the checkpoint's manifest; see `Manifest`.
        run: id of the run that wrote the checkpoint.
    """

    name: str
    step: int
    created: str
    kind: Kind
    metrics: Mapping[str, float] = field(default_factory=dict)
    run: str = ""


class RunIndex:
    """The list of the checkpoints that a run wrote, stored in `folder/.index.json`.

    An `index.json` of an earlier version is read, and renamed at the first change. The folder can be moved, because
    names are relative. The file may have entries of other runs, which are preserved: changes lock the folder and read
    the file again. Use the index in one process of a run. Every change is on the disk when the method returns. A
    damaged index is rebuilt from the manifests of the checkpoints, with a `TrainwrightWarning`.

    Args:
        folder: the run's checkpoint folder. The first `add` creates it.
        run: the run's id, which a resume does not change. Runs that share a folder need different ids.

    Raises:
        CheckpointError: the index has a newer format, or names a path outside the folder.
    """

    def __init__(self, folder: Path | str, *, run: str = "") -> None:
        self.folder = Path(folder)
        self.run = run
        self._load()  # an error of the index is raised now rather than at the first save

    @classmethod
    def of_newest_run(cls, folder: Path | str) -> RunIndex | None:
        """Return the index for the run that wrote the newest checkpoint in `folder`, or None without checkpoints.

        Only checkpoints in the index file are considered.
        """
        existing = [entry for entry in cls(folder)._load() if (Path(folder) / entry.name).is_dir()]
        newest = max(existing, key=lambda entry: (entry.created, entry.step), default=None)
        return None if newest is None else cls(folder, run=newest.run)

    @property
    def path(self) -> Path:
        """The file of the index."""
        return self.folder / RUN_INDEX

    def entries(self) -> list[IndexEntry]:
        """Return this run's checkpoints that still exist, by step and then by time of writing."""
        entries = [entry for entry in self._load() if entry.run == self.run and (self.folder / entry.name).is_dir()]
        return sorted(entries, key=lambda entry: (entry.step, entry.created, entry.name))

    def add(self, checkpoint: Path | str) -> IndexEntry:
        """Add a checkpoint that this run has written into the folder, and return its entry.

        An earlier entry of the same name, also of another run, is replaced.

        Raises:
            FileNotFoundError: `checkpoint` does not exist.
            CheckpointError: `checkpoint` is not in the folder, or its manifest is damaged.
        """
        checkpoint = Path(checkpoint)
        if checkpoint.parent.resolve() != self.folder.resolve():
            raise CheckpointError(f"{checkpoint} is not in {self.folder}, the folder of this index.")
        manifest = read_manifest(checkpoint)
        check_relative(checkpoint.name, "the index")
        entry = _entry_of(checkpoint.name, manifest, self.run)
        with self._locked():
            # Read under the lock, since other runs in the folder add entries, too.
            others = [known for known in self._load() if known.name != entry.name]
            self._store([*others, entry])
        return entry

    def delete(self, name: str) -> None:
        """Delete one of this run's checkpoints from the disk and from the index.

        If the checkpoint's folder is missing, only the entry in the index is deleted.

        Raises:
            CheckpointError: `name` is not a checkpoint of this run, or another one has replaced it. Nothing is deleted.
        """
        entries = self._load()
        entry = next((known for known in entries if known.name == name and known.run == self.run), None)
        if entry is None:
            raise CheckpointError(
                f"{name!r} is not among the checkpoints that this run wrote into {self.folder}; it is not deleted."
            )
        target = self.folder / entry.name
        is_replaced = target.exists() and read_manifest(target).created != entry.created
        if target.is_symlink() or is_replaced:
            raise CheckpointError(f"{target} is no longer the checkpoint that this run wrote; it is not deleted.")
        # The entry is removed last: after a crash, an entry without a folder is ignored, but a folder without an entry
        # would never be deleted.
        if target.is_dir():
            with contextlib.suppress(FileNotFoundError):  # another process of this run may have deleted it
                remove_folder(target)
        with self._locked():
            others = [known for known in self._load() if (known.name, known.run) != (entry.name, entry.run)]
            self._store(others)

    def ranked(self, monitor: str, mode: Literal["min", "max"] = "min") -> list[IndexEntry]:
        """Return this run's checkpoints that have the metric `monitor`, best first.

        Checkpoints whose value is NaN come last. Checkpoints with equal values are sorted by step, lowest first. Raises
        a CheckpointError for another `mode`.
        """
        if mode not in ("min", "max"):
            raise CheckpointError(f"mode={mode!r}, expected 'min' or 'max'.")
        sign = 1.0 if mode == "min" else -1.0

        def rank(entry: IndexEntry) -> tuple[bool, float]:
            value = entry.metrics[monitor]
            # False sorts before True. NaN cannot be sorted, so that 0.0 replaces it.
            if math.isnan(value):
                return True, 0.0
            return False, sign * value

        candidates = [entry for entry in self.entries() if monitor in entry.metrics]
        return sorted(candidates, key=rank)

    def best(self, monitor: str, mode: Literal["min", "max"] = "min") -> IndexEntry | None:
        """Return the first checkpoint of `ranked`, or None if no checkpoint has the metric `monitor`."""
        return next(iter(self.ranked(monitor, mode)), None)

    def last(self) -> IndexEntry | None:
        """Return this run's checkpoint with the highest step, or None without checkpoints."""
        entries = self.entries()
        return entries[-1] if entries else None

    def _load(self) -> list[IndexEntry]:
        """Return the entries of all runs. Rebuild and store a damaged index."""
        path = self._stored_path()
        if not path.is_file():
            return []
        origin = str(inside(self.folder, path.name, str(self.folder)))
        data = b""  # remains empty if the file cannot be read
        try:
            data = read_bytes(path, max_bytes=MAX_MANIFEST_BYTES)
            return _parse(data, origin)
        except (NewerFormatError, _OutsideError):
            raise
        except CheckpointError as error:
            entries = rebuilt(self.folder, _runs_named(data))
            warnings.warn(
                f"{error} It is rebuilt from the manifests of the {len(entries)} checkpoint(s) in its folder whose run "
                "is known. Other checkpoints are not deleted automatically any more.",
                TrainwrightWarning,
                stacklevel=4,
            )
            with contextlib.suppress(OSError):  # the folder may be read-only
                self._store(entries)
            return entries

    def _stored_path(self) -> Path:
        """Return the file that has the index: `path`, or the file of an earlier version."""
        earlier = self.folder / EARLIER_RUN_INDEX
        if earlier.is_file() and not self.path.is_file():
            return earlier
        return self.path

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Return a context that locks the folder, for a change: `_load`, then `_store`."""
        make_folder(self.folder)
        with lock_folder(self.folder):
            yield

    def _store(self, entries: list[IndexEntry]) -> None:
        """Replace the index by the entries of all runs."""
        items = []
        for entry in entries:
            item = asdict(entry)
            # JSON has no NaN, so that metrics are stored as text, which is exact.
            item["metrics"] = {name: repr(float(value)) for name, value in entry.metrics.items()}
            items.append(item)
        stored = self._stored_path()
        if stored != self.path:  # the file of an earlier version
            rename(stored, self.path)
        replace_file(self.path, sealed({"format_version": PLAIN_VERSION, "checkpoints": items}))


def _entry_of(name: str, manifest: Manifest, run: str) -> IndexEntry:
    return IndexEntry(name, manifest.step, manifest.created, manifest.kind, dict(manifest.metrics), run)


def rebuilt(folder: Path, runs: Mapping[tuple[str, str], str]) -> list[IndexEntry]:
    """Return the entries of the checkpoints in a folder, from their manifests.

    Args:
        folder: the folder.
        runs: run ids by (name, time of writing), for checkpoints that do not store the id of their run.
    """
    entries = []
    for found in find_checkpoints(folder):
        name = found.path.name
        if found.path.is_symlink() or name.startswith("."):
            continue
        try:
            run = read_checkpoint(found, parts=("trainer",)).trainer.get("run_id")
        except CheckpointError:
            run = None
        if not run:
            run = runs.get((name, found.manifest.created))
        # Without an entry, no run deletes the checkpoint.
        if run is not None:
            entries.append(_entry_of(name, found.manifest, run))
    return entries


def _runs_named(data: bytes) -> dict[tuple[str, str], str]:
    """Return the run ids in a damaged index by (name, time of writing). Empty if the index cannot be parsed."""
    runs = {}
    try:
        with reading(RUN_INDEX):
            for item in load_json(data, RUN_INDEX)["checkpoints"]:
                runs[str(item["name"]), str(item["created"])] = str(item["run"])
    except CheckpointError:  # too damaged
        return {}
    return runs


class _OutsideError(CheckpointError):
    """Raised for an index that names a path outside its folder, which is not accidental damage."""


def _parse(data: bytes, origin: str) -> list[IndexEntry]:
    """Return the entries in the bytes of an index. Raise a CheckpointError that names `origin` if it is damaged."""
    is_intact = seal_fits(data)
    if not is_intact:
        check_not_newer(data, origin)  # a newer format may have another seal
    with reading(origin, "is damaged"):
        values = load_json(data, origin)
        if not isinstance(values, dict):
            raise CheckpointError(f"{origin}: expected a JSON object, got {type(values).__name__}.")
        # Early versions wrote these two entries only, and no seal.
        if not is_intact and set(values) != {"format_version", "checkpoints"}:
            raise CheckpointError(f"{origin} is damaged: its seal does not match.")
        version = check_format_version(values.get("format_version"), origin)
        index = upgraded({"index": values}, version)["index"]
        return [_entry(item, origin) for item in index["checkpoints"]]


def _entry(item: Any, origin: str) -> IndexEntry:
    """Return an entry from its JSON object. Other errors than `_OutsideError` are converted by `reading`."""
    try:
        name = check_relative(item["name"], origin)
    except CheckpointError as error:
        raise _OutsideError(str(error)) from error
    if "/" in name or name.startswith("."):
        raise _OutsideError(f"{origin} names {name!r}, which is not a checkpoint in its folder.")
    if item["kind"] not in PARTS:
        raise ValueError(f"unknown kind {item['kind']!r}")
    metrics = {str(metric): float(value) for metric, value in item["metrics"].items()}
    return IndexEntry(name, int(item["step"]), str(item["created"]), item["kind"], metrics, str(item["run"]))
