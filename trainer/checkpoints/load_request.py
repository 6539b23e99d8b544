"""Which checkpoint a stage starts from, and how much of it: what was asked for, and the folder that it comes to."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Literal, get_args

from trainwright.callbacks.roles import Saver
from trainwright.checkpoint.disk.hashing import HashFiles
from trainwright.checkpoint.format.layout import PARTS, Kind
from trainwright.checkpoint.format.manifests import FoundCheckpoint, open_checkpoint
from trainwright.checkpoint.format.reader import check_opened
from trainwright.checkpoint.run_folder import OnDamaged, open_valid
from trainwright.core.errors import CheckpointError, ConfigurationError, TrainwrightWarning, nearest
from trainwright.core.host.folders import is_url
from trainwright.core.run import Stage
from trainwright.trainer.checkpoints import remote_saves
from trainwright.trainer.checkpoints.saved_best import rank_saved
from trainwright.trainer.run import StageRun

WEIGHTS = ("trainer", "model")  # the parts that hold weights, and what tasks and callbacks saved beside them
# What a resumed run may be told to go on without: parts of a checkpoint, and entries of its trainer part.
PARTS_TO_MISS = ("optimizer", "rng")
ENTRIES_TO_MISS = ("schedulers", "scaler", "callbacks", "loggers", "datamodule")


class Default(Enum):
    """The value of a `ckpt_path` that was not given, for the verbs in which None says something."""

    BEST = "the best checkpoint, where there is one and no task is given"

    def __repr__(self) -> str:
        return "Default.BEST"


CkptPath = str | Path | None | Literal[Default.BEST]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What a user wants loaded; see the arguments of `Trainer.fit`.

    Attributes:
        ckpt_path: a path or URL, `"last"`, `"best"` or None.
        on_damaged: `"error"`, `"fall_back"`, or None: fall back for `"last"` only.
        allow_missing: what a resume may go on without.
        strict: whether weights that are missing or left over are an error; None: the task's `strict_loading`.
        weights_only: begin a new run from the weights instead of resuming.
        implied: nobody named the checkpoint: without one the present weights are used, and a line says which are.
        opened: what is at `ckpt_path`, once `check_early` has opened it.
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
        """Return the request that `validate`, `test` and `predict` make: without a task the best checkpoint."""
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
        """Return the request that these arguments of `fit` make.

        Raises:
            ConfigurationError: an unknown choice, or a part without which nothing can be resumed.
        """
        if on_damaged is not None and on_damaged not in get_args(OnDamaged):
            raise ConfigurationError(f"on_damaged={on_damaged!r} is unknown. Use 'error' or 'fall_back'.")
        names = (allow_missing,) if isinstance(allow_missing, str) else tuple(allow_missing)
        known = (*PARTS_TO_MISS, *ENTRIES_TO_MISS)
        for name in names:
            if name in WEIGHTS:
                raise ConfigurationError(
                    f"allow_missing={list(names)!r}: nothing can be resumed without the part {name!r}. To begin a new "
                    "run from a checkpoint's weights, pass load_weights_only=True."
                )
            if name not in known:
                raise ConfigurationError(
                    f"allow_missing={list(names)!r}: {name!r} is unknown.{nearest(name, known)} Known: "
                    f"{', '.join(known)}."
                )
        return cls(ckpt_path, on_damaged, names, strict, weights_only)

    def resumes(self, stage: Stage) -> bool:
        """Tell whether the stage goes on with a run, for which weights alone are not enough."""
        return stage == "fit" and not self.weights_only

    def parts(self, stage: Stage) -> tuple[str, ...]:
        """Return the parts that the stage reads."""
        return PARTS["full"] if self.resumes(stage) else WEIGHTS

    @property
    def parts_to_miss(self) -> tuple[str, ...]:
        """The parts among `allow_missing`."""
        return tuple(name for name in self.allow_missing if name in PARTS_TO_MISS)


def check_early(request: LoadRequest, stage: Stage) -> LoadRequest:
    """Find out what is wrong with an explicit path before a process or device is touched; reads its manifest only.

    Returns:
        The request, with what was opened.

    Raises:
        FileNotFoundError, CheckpointError: see `choose`.
    """
    if request.ckpt_path in (None, "last", "best") or is_url(request.ckpt_path):
        return request  # what is elsewhere is fetched by one process, and checked then
    path = Path(str(request.ckpt_path)).expanduser()
    try:
        opened = open_checkpoint(path)
    except CheckpointError:
        if request.on_damaged != "fall_back" or not path.is_dir():
            raise
        return request  # `choose` falls back, and says so once
    _check_kind(request, stage, opened)
    return replace(request, opened=opened if opened.path == path else None)  # a hidden one gets its name back


def choose(run: StageRun, request: LoadRequest, stage: Stage, hash_files: HashFiles) -> FoundCheckpoint | None:
    """Return the checkpoint that a request comes to, its files verified. For one process.

    Every byte of the parts that the stage needs is read once, by `hash_files`, so that nobody has to hash them again.
    What lies elsewhere is downloaded into `default_root_dir/downloaded` first.

    Raises:
        FileNotFoundError: there is none.
        ConfigurationError: `"best"`, and neither this Trainer nor an earlier run in its folder has one.
        CheckpointError: it is damaged, lacks a part, or holds weights only and is to be resumed.
    """
    if request.ckpt_path is None:
        return None
    kind: Kind | None = "full" if request.resumes(stage) else None
    parts, allow_missing = request.parts(stage), request.parts_to_miss
    place: str | Path = request.ckpt_path
    if place == "last":
        local = run.folder.newest(
            accepts=lambda found: kind in (None, found.manifest.kind),
            parts=parts,
            allow_missing=allow_missing,
            on_damaged=request.on_damaged or "fall_back",
            hash_files=hash_files,
        )
        newer = remote_saves.newer_than(run, local, kind)
        if newer is None and local is None:
            raise FileNotFoundError(
                f"{stage}(ckpt_path='last'): no valid checkpoint in {run.checkpoint_dir}. Pass its path, or leave "
                "ckpt_path out to start from scratch."
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
                "for those that the task has now."
            )
        return best
    found = open_valid(
        remote_saves.fetch(run, place) if is_url(place) else Path(str(place)).expanduser(),
        opened=request.opened,
        kind=kind,
        parts=parts,
        allow_missing=allow_missing,
        on_damaged=request.on_damaged or "error",
        hash_files=hash_files,
    )
    _check_kind(request, stage, found)
    return found


def monitored_saver(run: StageRun) -> Saver | None:
    """Return the first callback that has kept a best checkpoint by a metric, or None."""
    return next((saver for saver in run.savers if saver.monitor is not None and saver.best_model_path), None)


def _best(run: StageRun, request: LoadRequest, stage: Stage, hash_files: HashFiles) -> FoundCheckpoint:
    """Return the best checkpoint, or the best one that is whole if asked for.

    It is that of this Trainer's ModelCheckpoint. A Trainer that has not trained takes it from the index of the run
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
            parts, allow_missing = request.parts(stage), request.parts_to_miss
            check_opened(found, parts=parts, allow_missing=allow_missing, hash_files=hash_files)
            _check_kind(request, stage, found)
        except (CheckpointError, FileNotFoundError) as error:
            if request.on_damaged != "fall_back":
                raise
            flaws.append(str(error))
            continue
        if flaws:
            text = f"{' '.join(flaws)} Falling back to {name}, the best that is whole."
            warnings.warn(text, TrainwrightWarning, stacklevel=2)
        return found
    raise CheckpointError(f"{stage}(ckpt_path='best'): none of the best checkpoints is whole. {' '.join(flaws)}")


def _check_kind(request: LoadRequest, stage: Stage, found: FoundCheckpoint) -> None:
    if request.resumes(stage) and found.manifest.kind == "weights":
        raise CheckpointError(
            f"{found.path} holds weights only, so that a run cannot be resumed from it. Pass load_weights_only=True to "
            "begin a new run from its weights, or resume from a full checkpoint."
        )
