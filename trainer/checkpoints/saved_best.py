"""Find the best checkpoints of the run that last wrote into a folder, for a process that has not trained it."""

from __future__ import annotations

import math
from pathlib import Path

from trainwright.checkpoint.remote import find_remote
from trainwright.checkpoint.retention import IndexEntry, RunIndex
from trainwright.core.errors import ConfigurationError
from trainwright.trainer.run import StageRun


def rank_saved(run: StageRun) -> list[str]:
    """Return the paths or URLs of a finished run's checkpoints, the best first.

    They come from the index in the folder of this Trainer's first ModelCheckpoint, ranked by its `monitor` and `mode`.
    Without a monitor the newest is the best. Checkpoints of several runs are not mixed: the run that wrote last counts.

    Raises:
        ConfigurationError: no ModelCheckpoint says what is best, or nothing in its folder has the metric.
        CheckpointError: the index is damaged.
    """
    saver = run.saver
    if saver is None:
        raise ConfigurationError(
            "ckpt_path='best': no ModelCheckpoint says which metric decides. Pass "
            "callbacks=[ModelCheckpoint(monitor=…)] as the run that saved them did, or a checkpoint's path."
        )
    monitor: str | None = saver.monitor
    remote: str | None = saver.remote
    place = remote if remote is not None else str(run.checkpoint_dir)
    entries = _in_folder(run.checkpoint_dir) if remote is None else _in_remote(remote)
    if monitor is not None:
        entries = [entry for entry in entries if monitor in entry.metrics]
    if not entries:
        having = "" if monitor is None else f" with the metric {monitor!r}"
        raise ConfigurationError(
            f"ckpt_path='best': there is no checkpoint{having} in {place}. Train first, set default_root_dir or the "
            "ModelCheckpoint's dirpath to the folder of the run that saved it, or pass a checkpoint's path."
        )
    if monitor is None:
        ranked = sorted(entries, key=lambda entry: (entry.created, entry.step), reverse=True)
    else:
        sign = -1.0 if saver.mode == "max" else 1.0
        ranked = sorted(entries, key=lambda entry: _rank(entry.metrics[monitor], sign))
    return [f"{place.rstrip('/')}/{entry.name}" for entry in ranked]


def _rank(value: float, sign: float) -> tuple[bool, float]:
    return (True, 0.0) if math.isnan(value) else (False, sign * value)


def _in_folder(folder: Path) -> list[IndexEntry]:
    index = RunIndex.of_newest_run(folder)
    return [] if index is None else index.entries()


def _in_remote(url: str) -> list[IndexEntry]:
    return [
        IndexEntry(item.url.rstrip("/").rpartition("/")[2], m.step, m.created, m.kind, dict(m.metrics))
        for item in find_remote(url)
        for m in (item.manifest,)
    ]
