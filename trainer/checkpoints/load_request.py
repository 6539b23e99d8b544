"""A request to load a checkpoint, its early check, and a checkpoint that was read but not yet loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args

from trainwright.checkpoint import Snapshot
from trainwright.checkpoint.format.layout import PARTS
from trainwright.checkpoint.format.manifests import FoundCheckpoint, open_checkpoint
from trainwright.checkpoint.format.reader import read_checkpoint
from trainwright.checkpoint.run_folder import OnDamaged
from trainwright.checkpoint.task_objects import TASK_OBJECTS, equal_objects, objects_named_in_errors
from trainwright.core.errors import CheckpointError, ConfigurationError, nearest
from trainwright.core.host.folders import is_url
from trainwright.core.run import Stage
from trainwright.trainer.checkpoints.shown import ShownCheckpoint
from trainwright.trainer.hooks import StageHooks

WEIGHTS = ("trainer", "model")  # the weights, and the entries that tasks and callbacks added
# Values of `allow_missing`: parts of a checkpoint, and entries of its trainer part.
PARTS_TO_MISS = ("optimizer", "rng")
ENTRIES_TO_MISS = ("schedulers", "scaler", "callbacks", "loggers", "datamodule")


class Default(Enum):
    """Default of `ckpt_path` in `validate`, `test` and `predict`, where None means the task's current weights."""

    BEST = "the best checkpoint, if there is one and no task is given"

    def __repr__(self) -> str:
        return "Default.BEST"


CkptPath = str | Path | None | Literal[Default.BEST]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request to load a checkpoint; see the arguments of `Trainer.fit`.

    Attributes:
        ckpt_path: a path or URL, `"last"`, `"best"` or None.
        on_damaged: `"error"`, `"fall_back"` to an older or worse checkpoint, or None, which falls back for `"last"`
            only.
        allow_missing: parts and entries that a resumed checkpoint may lack.
        strict: raise an error for missing or unexpected weights. Default: None, the task's `strict_loading`.
        weights_only: begin a new run from the weights instead of resuming.
        implied: the user named no checkpoint. If no checkpoint exists, the current weights are used.
        opened: the checkpoint at `ckpt_path`, opened by `check_early`. None before that, and for requests that are
            resolved later: a URL, `"last"` or `"best"`.
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

    def check_kind(self, stage: Stage, found: FoundCheckpoint) -> None:
        """Check that a stage that resumes a run has a full checkpoint.

        Raises:
            CheckpointError: the checkpoint holds weights only.
        """
        if self.resumes(stage) and found.manifest.kind == "weights":
            raise CheckpointError(
                f"{found.path} holds weights only, so a run cannot be resumed from it. Pass load_weights_only=True to "
                "begin a new run from its weights, or resume from a full checkpoint."
            )


def check_early(request: LoadRequest, stage: Stage) -> LoadRequest:
    """Check an explicit path before processes and devices are used. Reads only the manifest.

    Returns:
        The request, with the opened checkpoint.

    Raises:
        FileNotFoundError: the path has no checkpoint.
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
        return request  # the search falls back and warns once
    request.check_kind(stage, opened)
    if opened.path != path:  # a save that replaces it was interrupted: the search gives the hidden copy its name again
        return request
    return replace(request, opened=opened)


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

    def show(self, hooks: StageHooks) -> None:
        """Call `on_load_checkpoint` of the task and callbacks, which may change the weights. Call it before loading."""
        objects = self.snapshot.trainer.get(TASK_OBJECTS, {})
        self.shown.update(equal_objects(hooks.task, objects))
        with objects_named_in_errors(hooks.task, objects):
            hooks.fire("on_load_checkpoint", self.shown)


def _shown(found: FoundCheckpoint, snapshot: Snapshot) -> ShownCheckpoint:
    """Return the dict for `on_load_checkpoint`. Its entries other than weights are read when a hook reads them."""
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
