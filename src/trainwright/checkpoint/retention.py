"""Which checkpoints a run wrote: the only ones that it may ever delete."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainwright.checkpoint.durable import alone_in, make_folder, replace_file
from trainwright.checkpoint.layout import (
    MAX_MANIFEST_BYTES,
    PARTS,
    RUN_INDEX,
    Kind,
    check_relative,
    dump_json,
    inside,
    read_json,
)
from trainwright.checkpoint.reader import read_manifest
from trainwright.checkpoint.staging import remove_folder
from trainwright.checkpoint.upgrade import PLAIN_VERSION, check_format_version, upgraded
from trainwright.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One checkpoint of a run.

    Attributes:
        name: its folder's name in the run's checkpoint folder.
        step: completed optimizer steps.
        created: from its manifest; tells it from a later one of the same name.
        kind: `"full"` or `"weights"`.
        metrics: as in its manifest.
        run: which run wrote it.
    """

    name: str
    step: int
    created: str
    kind: Kind
    metrics: Mapping[str, float] = field(default_factory=dict)
    run: str = ""


class RunIndex:
    """The list of the checkpoints that this run wrote, kept in `folder/index.json`.

    Names in it are relative, so that the folder can be moved. Entries of other runs in the same folder are kept and
    never touched. One process of a run uses it; every change is on the disk before the method returns.

    Args:
        folder: the run's checkpoint folder; made at the first `add`.
        run: the run's own id, the same after a resume; runs that share a folder need different ones.

    Raises:
        CheckpointError: `index.json` is damaged, of a newer format, or names something outside the folder.
    """

    def __init__(self, folder: Path | str, *, run: str = "") -> None:
        self.folder = Path(folder)
        self.run = run
        self._load()  # fails now rather than at the first save

    @property
    def path(self) -> Path:
        """Where the index is kept."""
        return self.folder / RUN_INDEX

    def entries(self) -> list[IndexEntry]:
        """Return this run's checkpoints that still exist, by step and then by time of writing."""
        mine = [entry for entry in self._load() if entry.run == self.run and (self.folder / entry.name).is_dir()]
        return sorted(mine, key=lambda entry: (entry.step, entry.created, entry.name))

    def add(self, checkpoint: Path | str) -> IndexEntry:
        """Take up a checkpoint that this run has just written into the folder; returns its entry.

        Raises:
            FileNotFoundError, CheckpointError: it is not there, damaged, or not directly in the folder.
        """
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

        What lies under the name is compared with what was added: a checkpoint that somebody else has put there since
        is left alone. One that is gone already only leaves the index.

        Raises:
            CheckpointError: this run did not write it, or something else lies there now. Nothing is deleted.
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
            remove_folder(target)
        with self._alone():
            self._store([known for known in self._load() if (known.name, known.run) != (entry.name, entry.run)])

    def ranked(self, monitor: str, mode: Literal["min", "max"] = "min") -> list[IndexEntry]:
        """Return this run's checkpoints that have the metric `monitor`, the best first.

        NaN ranks behind every number; of equal ones the earlier is the better.
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
        values = read_json(self.path, max_bytes=MAX_MANIFEST_BYTES)
        if not isinstance(values, dict):
            raise CheckpointError(f"{origin}: expected a JSON object, got {type(values).__name__}.")
        version = check_format_version(values.get("format_version"), origin)
        try:
            today = upgraded({"index": values}, version)["index"]
            return [_entry(item, origin) for item in today["checkpoints"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{origin} is damaged: {error!r}. If you remove it, the checkpoints stay and are no longer managed."
            ) from error

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other runs that share the folder from changing the index meanwhile; waits for those that do."""
        make_folder(self.folder)
        with alone_in(self.folder):
            yield

    def _store(self, entries: list[IndexEntry]) -> None:
        items = [
            {
                "name": entry.name,
                "step": entry.step,
                "created": entry.created,
                "kind": entry.kind,
                "run": entry.run,
                # JSON has no NaN; text keeps it readable and exact.
                "metrics": {name: repr(float(value)) for name, value in entry.metrics.items()},
            }
            for entry in entries
        ]
        text = dump_json({"format_version": PLAIN_VERSION, "checkpoints": items}, indent=2)
        replace_file(self.path, text.encode() + b"\n")


def _entry(item: Any, origin: str) -> IndexEntry:
    name = check_relative(item["name"], origin)
    if "/" in name or name.startswith("."):
        raise CheckpointError(f"{origin} names {name!r}, which is no checkpoint in its folder. It is refused.")
    if item["kind"] not in PARTS:
        raise ValueError(f"unknown kind {item['kind']!r}")
    metrics = {str(metric): float(value) for metric, value in item["metrics"].items()}
    return IndexEntry(name, int(item["step"]), str(item["created"]), item["kind"], metrics, str(item["run"]))
