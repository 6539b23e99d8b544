"""Which checkpoints a run wrote: the only ones that it may ever delete."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainwright.checkpoint.disk.durable import make_folder, replace_file
from trainwright.checkpoint.disk.untrusted import check_relative, inside, load_json, read_bytes, reading
from trainwright.checkpoint.format.layout import (
    MAX_MANIFEST_BYTES,
    PARTS,
    PLAIN_VERSION,
    RUN_INDEX,
    Kind,
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
from trainwright.core.host.folders import alone_in


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One checkpoint of a run: the name of its folder, which run wrote it, and values of its manifest."""

    name: str
    step: int
    created: str
    kind: Kind
    metrics: Mapping[str, float] = field(default_factory=dict)
    run: str = ""


class RunIndex:
    """The list of the checkpoints that a run wrote, stored in `folder/index.json`.

    Names in it are relative, so that the folder can be moved. Entries of other runs are kept. One process of a run uses
    it; every change is on the disk before the method returns. A damaged index is built again from the manifests of the
    checkpoints, with a `TrainwrightWarning`.

    Args:
        folder: the run's checkpoint folder; made at the first `add`.
        run: the run's own id, the same after a resume; runs that share a folder need different ones.

    Raises:
        CheckpointError: `index.json` is of a newer format, or names something outside the folder.
    """

    def __init__(self, folder: Path | str, *, run: str = "") -> None:
        self.folder = Path(folder)
        self.run = run
        self._load()  # fails now rather than at the first save

    @classmethod
    def of_newest_run(cls, folder: Path | str) -> RunIndex | None:
        """Return the index of the run whose checkpoint in `folder` is the newest, or None if there is none."""
        there = [entry for entry in cls(folder)._load() if (Path(folder) / entry.name).is_dir()]
        newest = max(there, key=lambda entry: (entry.created, entry.step), default=None)
        return None if newest is None else cls(folder, run=newest.run)

    @property
    def path(self) -> Path:
        """Where the index is kept."""
        return self.folder / RUN_INDEX

    def entries(self) -> list[IndexEntry]:
        """Return this run's checkpoints that still exist, by step and then by time of writing."""
        mine = [entry for entry in self._load() if entry.run == self.run and (self.folder / entry.name).is_dir()]
        return sorted(mine, key=lambda entry: (entry.step, entry.created, entry.name))

    def add(self, checkpoint: Path | str) -> IndexEntry:
        """Add a checkpoint that this run has written into the folder; returns its entry."""
        checkpoint = Path(checkpoint)
        if checkpoint.parent.resolve() != self.folder.resolve():
            raise CheckpointError(f"{checkpoint} does not lie in {self.folder}; this index cannot hold it.")
        manifest = read_manifest(checkpoint)
        entry = IndexEntry(
            check_relative(checkpoint.name, "the index"),
            manifest.step,
            manifest.created,
            manifest.kind,
            dict(manifest.metrics),
            self.run,
        )
        with self._alone():
            self._store([*(known for known in self._load() if known.name != entry.name), entry])
        return entry

    def delete(self, name: str) -> None:
        """Delete one of this run's checkpoints from the disk and from the index.

        A checkpoint that is not the one that was added is not deleted: that is a `CheckpointError`. If it is missing,
        only its entry is deleted.
        """
        entries = self._load()
        entry = next((known for known in entries if known.name == name and known.run == self.run), None)
        if entry is None:
            raise CheckpointError(
                f"{name!r} is not among the checkpoints that this run wrote into {self.folder}; it is not deleted."
            )
        target = self.folder / entry.name
        if target.is_symlink() or (target.exists() and read_manifest(target).created != entry.created):
            raise CheckpointError(f"{target} is no longer the checkpoint that this run wrote; it is not deleted.")
        if target.is_dir():
            with contextlib.suppress(FileNotFoundError):  # another process that resumed this run was faster
                remove_folder(target)
        with self._alone():
            self._store([known for known in self._load() if (known.name, known.run) != (entry.name, entry.run)])

    def ranked(self, monitor: str, mode: Literal["min", "max"] = "min") -> list[IndexEntry]:
        """Return this run's checkpoints that have the metric `monitor`, the best first. NaN is last; of equal ones the
        earlier is first.
        """
        if mode not in ("min", "max"):
            raise CheckpointError(f"mode={mode!r}, expected 'min' or 'max'.")
        sign = 1.0 if mode == "min" else -1.0

        def rank(entry: IndexEntry) -> tuple[bool, float]:
            value = entry.metrics[monitor]
            return (True, 0.0) if math.isnan(value) else (False, sign * value)

        return sorted((entry for entry in self.entries() if monitor in entry.metrics), key=rank)

    def best(self, monitor: str, mode: Literal["min", "max"] = "min") -> IndexEntry | None:
        """Return the first of `ranked`, or None if no checkpoint has the metric."""
        return next(iter(self.ranked(monitor, mode)), None)

    def last(self) -> IndexEntry | None:
        """Return the checkpoint with the highest step, or None."""
        return next(iter(reversed(self.entries())), None)

    def _load(self) -> list[IndexEntry]:
        if not self.path.is_file():
            return []
        origin = str(inside(self.folder, RUN_INDEX, str(self.folder)))
        data = b""
        try:
            data = read_bytes(self.path, max_bytes=MAX_MANIFEST_BYTES)
            return _parse(data, origin)
        except (NewerFormatError, _OutsideError):
            raise
        except CheckpointError as error:
            entries = rebuilt(self.folder, _runs_named(data))
            warnings.warn(
                f"{error} It is made again from the manifests of the {len(entries)} checkpoint(s) beside it whose run "
                "is known; others stay and are no longer managed.",
                TrainwrightWarning,
                stacklevel=4,
            )
            with contextlib.suppress(OSError):  # who may only read goes on without
                self._store(entries)
            return entries

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other runs that share the folder from changing the index meanwhile; waits for those that do."""
        make_folder(self.folder)
        with alone_in(self.folder):
            yield

    def _store(self, entries: list[IndexEntry]) -> None:
        # JSON has no NaN; text keeps it readable and exact.
        items = [
            asdict(entry) | {"metrics": {name: repr(float(value)) for name, value in entry.metrics.items()}}
            for entry in entries
        ]
        replace_file(self.path, sealed({"format_version": PLAIN_VERSION, "checkpoints": items}))


def rebuilt(folder: Path, runs: Mapping[tuple[str, str], str]) -> list[IndexEntry]:
    """Return the entries of the checkpoints in a folder, from their manifests. `runs` gives the run by name and time of
    writing for checkpoints that do not store it (of kind `"weights"`).
    """
    entries = []
    for found in find_checkpoints(folder):
        name, manifest = found.path.name, found.manifest
        if found.path.is_symlink() or name.startswith("."):
            continue
        try:
            run = read_checkpoint(found.path, parts=("trainer",)).trainer.get("run_id")
        except CheckpointError:
            run = None  # nobody can say whose it is; nobody deletes it then
        run = run or runs.get((name, manifest.created))
        if run is not None:
            entries.append(
                IndexEntry(name, manifest.step, manifest.created, manifest.kind, dict(manifest.metrics), run)
            )
    return entries


def _runs_named(data: bytes) -> dict[tuple[str, str], str]:
    """Return what a damaged index can still be believed: the runs of checkpoints that it names and dates rightly."""
    try:
        with reading(RUN_INDEX):
            items = load_json(data, RUN_INDEX)["checkpoints"]
            return {(str(item["name"]), str(item["created"])): str(item["run"]) for item in items}
    except CheckpointError:  # what cannot be read is not used
        return {}


class _OutsideError(CheckpointError):
    """An index names something outside its folder, which no damage explains."""


def _parse(data: bytes, origin: str) -> list[IndexEntry]:
    """Return the entries of an index: a sealed one, or one from before indices were sealed.

    Damage is a `CheckpointError`; its subclasses `NewerFormatError` and `_OutsideError` are no damage.
    """
    fits = seal_fits(data)
    if not fits:
        check_not_newer(data, origin)
    with reading(origin, "is damaged"):
        values = load_json(data, origin)
        if not isinstance(values, dict):
            raise CheckpointError(f"{origin}: expected a JSON object, got {type(values).__name__}.")
        if not fits and set(values) != {"format_version", "checkpoints"}:
            raise CheckpointError(f"{origin} is damaged: its seal does not match.")
        version = check_format_version(values.get("format_version"), origin)
        today = upgraded({"index": values}, version)["index"]
        return [_entry(item, origin) for item in today["checkpoints"]]


def _entry(item: Any, origin: str) -> IndexEntry:
    try:
        name = check_relative(item["name"], origin)
    except CheckpointError as error:
        raise _OutsideError(str(error)) from error
    if "/" in name or name.startswith("."):
        raise _OutsideError(f"{origin} names {name!r}, which is no checkpoint in its folder. It is refused.")
    if item["kind"] not in PARTS:
        raise ValueError(f"unknown kind {item['kind']!r}")
    metrics = {str(metric): float(value) for metric, value in item["metrics"].items()}
    return IndexEntry(name, int(item["step"]), str(item["created"]), item["kind"], metrics, str(item["run"]))
