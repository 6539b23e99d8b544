"""Find, verify and read the checkpoint that a stage starts from."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args

from trainwright.callbacks.roles import Saver
from trainwright.checkpoint import Snapshot
from trainwright.checkpoint.format.layout import PARTS, Kind
from trainwright.checkpoint.format.manifests import FoundCheckpoint, HashFiles, hash_files, open_checkpoint, scan
from trainwright.checkpoint.format.reader import check_checkpoint, read_checkpoint
from trainwright.checkpoint.remote import find_remote
from trainwright.checkpoint.retention import IndexEntry, RunIndex
from trainwright.checkpoint.run_folder import OnDamaged, RunFolder, open_valid
from trainwright.checkpoint.task_objects import TASK_OBJECTS, equal_objects, objects_named_in_errors
from trainwright.core import errors
from trainwright.core.errors import CheckpointError, ConfigurationError, TrainwrightWarning, nearest
from trainwright.core.host.folders import is_url
from trainwright.core.run import Stage
from trainwright.processes.process_group import Processes
from trainwright.trainer.checkpoints import remote_saves
from trainwright.trainer.checkpoints.auto_resume import Attempt
from trainwright.trainer.checkpoints.shown import ShownCheckpoint
from trainwright.trainer.run import StageRun

WEIGHTS = ("trainer", "model")  # the weights, and the entries that tasks and callbacks added
# Values of allow_missing: parts of a checkpoint, and entries of its trainer part.
PARTS_TO_MISS = ("optimizer", "rng")
ENTRIES_TO_MISS = ("schedulers", "scaler", "callbacks", "loggers", "datamodule")


class Default(Enum):
    """Default of `ckpt_path` in methods where None means the task's current weights."""

    BEST = "the best checkpoint, if there is one and no task is given"

    def __repr__(self) -> str:
        return "Default.BEST"


CkptPath = str | Path | None | Literal[Default.BEST]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request to load a checkpoint; see the arguments of `Trainer.fit`.

    Attributes:
        ckpt_path: a path or URL, `"last"`, `"best"` or None.
        on_damaged: `"error"`, `"fall_back"`, or None, which falls back for `"last"` only.
        allow_missing: parts and entries that a resumed checkpoint may lack.
        strict: raise an error for missing or unexpected weights. Default: None, the task's `strict_loading`.
        weights_only: begin a new run from the weights instead of resuming.
        implied: the user named no checkpoint. If no checkpoint exists, the current weights are used.
        opened: the checkpoint at `ckpt_path`, opened by `check_early`.
    """

    ckpt_path: str | Path | None = None
    on_damaged: OnDamaged | None = None
    allow_missing: tuple[str, ...] = ()
    strict: bool | None = None
    weights_only: bool = False
    implied: bool = False
    opened: FoundCheckpoint | None = None

    @classmethod
    def for_evaluation(cls, ckpt_path: CkptPath, *, task_given: bool) -> LoadRequest:
        """Return the request of `validate`, `test` or `predict`.

        `Default.BEST` means the current weights of the given task, or the best checkpoint if no task is given.
        """
        if ckpt_path is not Default.BEST:
            return cls(ckpt_path)
        return cls(None) if task_given else cls("best", on_damaged="fall_back", implied=True)

    @classmethod
    def checked(
        cls,
        ckpt_path: str | Path | None,
        *,
        on_damaged: OnDamaged | None,
        allow_missing: Iterable[str],
        strict: bool | None,
        weights_only: bool,
    ) -> LoadRequest:
        """Return the request for these arguments of `fit`.

        Raises:
            ConfigurationError: a value is unknown, or `allow_missing` names a part that a resume needs.
        """
        if on_damaged is not None and on_damaged not in get_args(OnDamaged):
            raise ConfigurationError(f"on_damaged={on_damaged!r} is unknown. Use 'error' or 'fall_back'.")
        names = (allow_missing,) if isinstance(allow_missing, str) else tuple(allow_missing)
        known = (*PARTS_TO_MISS, *ENTRIES_TO_MISS)
        for name in names:
            if name in WEIGHTS:
                raise ConfigurationError(
                    f"allow_missing={list(names)!r}: a resume needs the part {name!r}. To begin a new run from a "
                    "checkpoint's weights, pass load_weights_only=True."
                )
            if name not in known:
                raise ConfigurationError(
                    f"allow_missing={list(names)!r}: {name!r} is unknown.{nearest(name, known)} Known: "
                    f"{', '.join(known)}."
                )
        return cls(ckpt_path, on_damaged, names, strict, weights_only)

    def resumes(self, stage: Stage) -> bool:
        """Return whether the stage resumes a run, which needs a full checkpoint."""
        return stage == "fit" and not self.weights_only

    def parts(self, stage: Stage) -> tuple[str, ...]:
        """Return the parts that the stage reads."""
        return PARTS["full"] if self.resumes(stage) else WEIGHTS

    @property
    def allowed_missing_parts(self) -> tuple[str, ...]:
        """Entries of `allow_missing` that are parts of a checkpoint."""
        return tuple(name for name in self.allow_missing if name in PARTS_TO_MISS)


def check_early(request: LoadRequest, stage: Stage) -> LoadRequest:
    """Check an explicit path before processes and devices are used. Reads only the manifest.

    Returns:
        The request, with the opened checkpoint.

    Raises:
        FileNotFoundError: there is no checkpoint at the path.
        CheckpointError: its manifest is damaged and must not be skipped, or `fit` would resume from weights only.
    """
    if request.ckpt_path in (None, "last", "best") or is_url(request.ckpt_path):
        return request  # one process downloads or chooses it later and checks it then
    path = Path(str(request.ckpt_path)).expanduser()
    try:
        opened = open_checkpoint(path)
    except CheckpointError:
        if request.on_damaged != "fall_back" or not path.is_dir():
            raise
        return request  # `choose` falls back and warns once
    _check_kind(request, stage, opened)
    return replace(request, opened=opened if opened.path == path else None)  # `choose` restores a hidden one's name


def choose(run: StageRun, request: LoadRequest, stage: Stage, hash_files: HashFiles) -> FoundCheckpoint | None:
    """Return the requested checkpoint after verifying its files. Called on one process.

    `hash_files` hashes the files of the parts that the stage needs. Remote checkpoints are downloaded into
    `default_root_dir/downloaded` first. The path of `"last"` or `"best"` is printed. Returns None to use the current
    weights: none is requested, or `fit` with `"last"` or an implied request finds none.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ConfigurationError: `"best"` was requested, but neither this Trainer nor an earlier run in its folder has a best
            checkpoint.
        CheckpointError: the checkpoint is damaged, lacks a part, or holds weights only but a resume was requested.
    """
    found = _choose(run, request, stage, hash_files)
    # An implied request and a start from weights alone print the path elsewhere.
    is_named = request.ckpt_path in ("last", "best") and not (request.implied or request.weights_only)
    if found is not None and is_named:
        run.print(f'trainwright: ckpt_path="{request.ckpt_path}" is {found.path}.')
    return found


def _choose(run: StageRun, request: LoadRequest, stage: Stage, hash_files: HashFiles) -> FoundCheckpoint | None:
    if request.ckpt_path is None:
        return None
    kind: Kind | None = "full" if request.resumes(stage) else None
    parts, allow_missing = request.parts(stage), request.allowed_missing_parts
    place: str | Path = request.ckpt_path
    if place == "last":
        local = run.folder.newest(
            accepts=lambda found: kind in (None, found.manifest.kind),
            parts=parts,
            allow_missing=allow_missing,
            on_damaged=request.on_damaged or "fall_back",
            hash_files=hash_files,
        )
        newer = remote_saves.fetch_newer(run, local, kind, skip_damaged=request.on_damaged != "error")
        if newer is None and local is None:
            if stage == "fit" and not any(scan(run.checkpoint_dir)) and not remote_saves.saved_names(run):
                warnings.warn(
                    f"fit(ckpt_path='last'): {run.checkpoint_dir} has no checkpoint. Training starts from scratch.",
                    TrainwrightWarning,
                    stacklevel=2,
                )
                return None
            raise errors.CheckpointNotFoundError(
                f"{stage}(ckpt_path='last'): no valid checkpoint in {run.checkpoint_dir}. Pass a path or None."
            )
        if newer is None:
            return local
        place = newer
    if place == "best":
        saver = monitored_saver(run)
        if request.implied and saver is None:
            return None
        best = _best(run, request, stage, hash_files)
        if request.implied and saver is not None:
            run.print(
                f"trainwright: {stage} uses the best weights by {saver.monitor!r}, {best.path}. Pass ckpt_path=None "
                "to use the task's current weights."
            )
        return best
    path = remote_saves.fetch(run, place) if is_url(place) else Path(str(place)).expanduser()
    found = open_valid(
        request.opened or path,
        kind=kind,
        parts=parts,
        allow_missing=allow_missing,
        on_damaged=request.on_damaged or "error",
        hash_files=hash_files,
    )
    _check_kind(request, stage, found)
    return found


def monitored_saver(run: StageRun) -> Saver | None:
    """Return the first ModelCheckpoint that monitors a metric and has a best checkpoint, or None."""
    return next((saver for saver in run.savers if saver.monitor is not None and saver.best_model_path), None)


def _best(run: StageRun, request: LoadRequest, stage: Stage, hash_files: HashFiles) -> FoundCheckpoint:
    """Return the best checkpoint, or with `on_damaged="fall_back"` the best checkpoint that is not damaged.

    This Trainer's ModelCheckpoint defines the best checkpoint. A Trainer that has not trained uses the index of the run
    whose checkpoints are in the same folder.
    """
    saver = monitored_saver(run) or run.saver
    best = "" if saver is None else saver.best_model_path
    if saver is not None and best:
        scores = saver.best_k_models
        ranked = sorted(scores, key=scores.__getitem__, reverse=saver.mode == "max")
    elif run.state.step:
        raise ConfigurationError(
            f"{stage}(ckpt_path='best'): no ModelCheckpoint of this Trainer has a best checkpoint yet. Pass a path."
        )
    else:
        best, *ranked = rank_saved(run)
    flaws: list[str] = []
    for name in dict.fromkeys([best, *ranked]):
        try:
            found = open_checkpoint(remote_saves.on_this_machine(run, name))
            parts, allow_missing = request.parts(stage), request.allowed_missing_parts
            check_checkpoint(found, parts=parts, allow_missing=allow_missing, hash_files=hash_files)
            _check_kind(request, stage, found)
        except (CheckpointError, FileNotFoundError) as error:
            if request.on_damaged != "fall_back":
                raise
            flaws.append(str(error))
            continue
        if flaws:
            text = f"{' '.join(flaws)} Falling back to {name}, the best valid checkpoint."
            warnings.warn(text, TrainwrightWarning, stacklevel=2)
        return found
    raise CheckpointError(f"{stage}(ckpt_path='best'): none of the best checkpoints is valid. {' '.join(flaws)}")


def _check_kind(request: LoadRequest, stage: Stage, found: FoundCheckpoint) -> None:
    if request.resumes(stage) and found.manifest.kind == "weights":
        raise CheckpointError(
            f"{found.path} holds weights only, so a run cannot be resumed from it. Pass load_weights_only=True to "
            "begin a new run from its weights, or resume from a full checkpoint."
        )


def find_checkpoint(run: StageRun, request: LoadRequest, stage: Stage) -> FoundCheckpoint | None:
    """Return the requested checkpoint on every rank. Rank 0 chooses it; all ranks hash its files. Collective.

    Raises:
        FileNotFoundError, ConfigurationError, CheckpointError: see `choose` and `on_main_rank`.
    """
    processes = run.engine.processes
    hashing = SharedHashing(processes)
    return processes.on_main_rank(
        lambda: choose(run, request, stage, hashing.hash_files), "find a checkpoint to load", hashing
    )


def left_by_earlier(attempt: Attempt, folder: RunFolder) -> FoundCheckpoint | None:
    """Return the newest valid full checkpoint in `folder` of an earlier attempt of this fit, or None.

    Launchers restart a job for another attempt (see `auto_resume`).

    Warns:
        TrainwrightWarning: a damaged checkpoint was skipped.
    """
    if attempt.key is None or attempt.number == 0:
        return None

    def is_of_this_fit(found: FoundCheckpoint) -> bool:
        full = found.manifest.kind == "full"
        return full and read_checkpoint(found, verify=False, parts=("trainer",)).trainer.get("job") == attempt.key

    return folder.newest(accepts=is_of_this_fit)


class SharedHashing:
    """Distribution of file hashing over all ranks.

    Rank 0 calls `hash_files` any number of times and then `dismiss`. The other ranks call `serve`.

    Args:
        processes: the processes of the run.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def hash_files(self, paths: Sequence[Path]) -> list[str]:
        """Return the hash of each file. Collective: rank 0 calls this method while the other ranks run `serve`.

        Raises:
            CheckpointError: a rank cannot read one of its files.
        """
        shares = fair_shares([path.stat().st_size for path in paths], self._processes.world_size)
        self._processes.broadcast_object([[str(paths[i]) for i in share] for share in shares])
        answers = self._processes.gather_object(_hash_share([paths[i] for i in shares[0]]))
        found = [""] * len(paths)
        for rank, (share, answer) in enumerate(zip(shares, answers, strict=True)):
            if isinstance(answer, str):
                raise CheckpointError(
                    f"rank {rank} cannot read a checkpoint file that rank 0 can read: {answer}. Use a folder that all "
                    "ranks share."
                )
            for i, value in zip(share, answer, strict=True):
                found[i] = value
        return found

    def serve(self) -> None:
        """Hash the files that are assigned to this rank. Collective; blocks until rank 0 calls `dismiss`."""
        while (shares := self._processes.broadcast_object(None)) is not None:
            share = [Path(name) for name in shares[self._processes.rank]]
            self._processes.gather_object(_hash_share(share))

    def dismiss(self) -> None:
        """End `serve` on the other ranks. Collective: rank 0 calls this method while the other ranks run `serve`."""
        self._processes.broadcast_object(None)


def fair_shares(sizes: Sequence[int], num: int) -> list[list[int]]:
    """Divide file indices among `num` ranks so that each has about the same number of bytes."""
    shares: list[list[int]] = [[] for _ in range(num)]
    loads = [0] * num
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        least = loads.index(min(loads))
        shares[least].append(i)
        loads[least] += sizes[i]
    return shares


def _hash_share(paths: Sequence[Path]) -> list[str] | str:
    try:
        return hash_files(paths)
    except OSError as error:
        return f"{type(error).__name__}: {error}"


def open_for(run: StageRun, stage: Stage, load: LoadRequest) -> Opened | None:
    """Find and read the checkpoint that a stage starts from, on every rank. Return None without a checkpoint.
    Collective.

    Raises:
        FileNotFoundError, ConfigurationError, CheckpointError: see `find_checkpoint`, `check_fits` and `Opened.read`.
    """
    if stage == "fit" and run.is_main and not run.status.is_trial and run.checkpoint_dir.is_dir():
        run.folder.prepare()
    found = run.broadcast(left_by_earlier(run.resume.attempt, run.folder) if run.is_main else None)
    if found is not None:
        run.print(f"trainwright: start {run.resume.attempt.number + 1} of this job resumes {found.path}.")
        load = replace(load, ckpt_path=found.path, weights_only=False)
    elif load.ckpt_path is not None:
        found = find_checkpoint(run, load, stage)
    if found is None:
        return None
    if load.resumes(stage):
        check_fits(run, found)
    return Opened.read(found, load, full=load.resumes(stage))


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint that was read but not yet loaded.

    Attributes:
        found: the verified checkpoint.
        request: the load request.
        snapshot: the parts of the checkpoint, with memory-mapped tensors.
        shown: the dict that `on_load_checkpoint` receives. Hooks may change its weights.
    """

    found: FoundCheckpoint
    request: LoadRequest
    snapshot: Snapshot
    shown: ShownCheckpoint

    @classmethod
    def read(cls, found: FoundCheckpoint, request: LoadRequest, *, full: bool) -> Opened:
        """Read a full checkpoint (`full`), or only its weights.

        Raises:
            CheckpointError: a part is missing.
        """
        if full:
            allow_missing = request.allowed_missing_parts
            snapshot = read_checkpoint(
                found, verify=False, parts=PARTS["full"], allow_missing=allow_missing, copy_model=False
            )
        else:
            snapshot = read_checkpoint(found, verify=False, parts=WEIGHTS, copy_model=False)
        if snapshot.model is None:
            raise CheckpointError(f"{found.path} holds no weights. Use another checkpoint.")
        return cls(found, request, snapshot, _shown(found, snapshot))

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return self.found.path

    def show(self, run: StageRun) -> None:
        """Call `on_load_checkpoint` of the task and callbacks, which may change the weights."""
        objects = self.snapshot.trainer.get(TASK_OBJECTS, {})
        self.shown.update(equal_objects(run.task, objects))
        with objects_named_in_errors(run.task, objects):
            run.fire("on_load_checkpoint", self.shown)


def _shown(found: FoundCheckpoint, snapshot: Snapshot) -> ShownCheckpoint:
    trainer = snapshot.trainer
    read: dict[str, Callable[[], Any]] = {
        "epoch": lambda: snapshot.state.get("epoch", 0),
        "global_step": lambda: snapshot.state.get("step", 0),
        "hyper_parameters": lambda: trainer.get("hyper_parameters", {}),
    }
    if snapshot.kind == "full":
        read |= {
            "callbacks": lambda: trainer.get("callbacks", {}),
            "lr_schedulers": lambda: trainer.get("schedulers", []),
            "optimizer_states": lambda: read_checkpoint(found, verify=False, parts=("optimizer",)).optimizers,
        }
    advice = "pass allow_missing=[...] to fit to start parts from scratch"
    return ShownCheckpoint("on_load_checkpoint", trainer.get("task", {}), snapshot.model, read, advice=advice)


def check_fits(run: StageRun, found: FoundCheckpoint) -> None:
    """Check that the checkpoint has not completed more epochs than the fit may run.

    Raises:
        ConfigurationError: `max_epochs` is less than the number of epochs that the checkpoint has completed.
    """
    epoch, bound = found.manifest.epoch, run.settings.limits.max_epochs
    if bound is not None and epoch > bound:
        raise ConfigurationError(f"{found.path} is in epoch {epoch}, but max_epochs={bound}. Increase max_epochs.")


def rank_saved(run: StageRun) -> list[str]:
    """Return the paths or URLs of a finished run's checkpoints, the best first.

    The paths come from the index in the folder of this Trainer's first ModelCheckpoint, ranked by that callback's
    `monitor` and `mode`. Without a monitor the newest checkpoint is the best. If the folder has checkpoints of several
    runs, the newest run is used.

    Raises:
        ConfigurationError: there is no ModelCheckpoint, or no checkpoint in its folder has the metric.
        CheckpointError: the index is damaged.
    """
    saver = run.saver
    if saver is None:
        raise ConfigurationError(
            "ckpt_path='best': no ModelCheckpoint defines the best checkpoint. Pass "
            "callbacks=[ModelCheckpoint(monitor=…)] as in the run that saved it, or a checkpoint's path."
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
