"""Between a running Trainer and a checkpoint's parts: collect everything, put everything back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from trainwright.checkpoint import Snapshot, clean_stale
from trainwright.checkpoint.disk.damage import reading
from trainwright.checkpoint.disk.quiet_thread import leaves_cores
from trainwright.checkpoint.format.layout import PARTS
from trainwright.checkpoint.format.manifests import FoundCheckpoint
from trainwright.checkpoint.format.reader import read_opened
from trainwright.checkpoint.format.writer import go_on_from
from trainwright.core.errors import CheckpointError, ConfigurationError, TrainwrightWarning
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.rng import rng_state, set_rng_state
from trainwright.core.run import Stage
from trainwright.core.state import TrainState
from trainwright.loggers.epoch_state import load_objects_state, merge, objects_state
from trainwright.trainer.checkpoints.job import left_by_earlier
from trainwright.trainer.checkpoints.load_request import WEIGHTS, LoadRequest, choose
from trainwright.trainer.checkpoints.saved_entries import Entries
from trainwright.trainer.checkpoints.shared_hashing import SharedHashing
from trainwright.trainer.checkpoints.shown_checkpoint import ShownCheckpoint
from trainwright.trainer.run import StageRun

_OWN_KEYS = ("epoch", "global_step", "state_dict")  # what hooks find in a checkpoint besides their own entries


def half_done(run: StageRun) -> str | None:
    """Return why the present state is not that of the last completed step, in words; None when it is.

    Within a step it is, as long as no optimizer has begun to step.
    """
    if run.loop.at_step_boundary:
        return None
    if run.loop.stepping or run.strategy.has_begun or not run.strategy.capabilities.state_rests:
        return "an optimizer was stepping, so that the weights may be half updated"
    if run.data.made is not None and run.data.made.loader.stateful:
        return "its loader, which keeps its own place, had read on for a step that was not completed"
    return None


def capture(run: StageRun, *, weights_only: bool = False, metrics: dict[str, float] | None = None) -> Snapshot:
    """Collect everything a resume needs. Collective: the generators and loaders of all ranks are gathered.

    Returns:
        The snapshot; its tensors are the live ones, so that it must be written or copied before training goes on.
    """
    run.strategy.begin_save()
    of_ranks = [] if weights_only else run.strategy.processes.gather_object(_own_state(run))
    return _collect(run, of_ranks, weights_only=weights_only, metrics=metrics or dict(run.callback_metrics))


def num_bytes_here(run: StageRun) -> int:
    """Return about how many bytes the tensors of a checkpoint have on this rank's host; not collective."""
    states = [state for optimizer in run.optimizers for state in optimizer.state.values()]
    kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    tensors = {id(tensor): tensor for tensor in (*run.task.parameters(), *run.task.buffers(), *kept)}
    on_host = [tensor for tensor in tensors.values() if tensor.device.type == "cpu"]
    # A DTensor counts with the rank's own piece; its class is not imported for the sake of those who have none.
    return sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in on_host)


def capture_alone(run: StageRun, metrics: dict[str, float]) -> Snapshot:
    """Collect what this rank has without asking the others, for use in an exception path.

    With other ranks, whose generators a resume would need, that is the weights only.

    Raises:
        CheckpointError: the weights lie in pieces on several ranks.
    """
    alone = run.world_size == 1
    if not alone and not run.strategy.capabilities.whole_weights:
        raise CheckpointError(
            f"the weights lie in pieces on {run.world_size} ranks, and a rank cannot collect them when another may "
            "have failed. The earlier checkpoints are whole."
        )
    return _collect(run, [_own_state(run)] if alone else [], weights_only=not alone, metrics=metrics)


def _own_state(run: StageRun) -> dict[str, Any]:
    """What a resume needs of each rank."""
    metrics = {"logged": run.metrics.state_dict(), "objects": objects_state(run.task)}
    return {"rng": rng_state(run.strategy.device), "loader": run.data.loader_state(), "metrics": metrics}


def _collect(
    run: StageRun, of_ranks: list[dict[str, Any]], *, weights_only: bool, metrics: dict[str, float]
) -> Snapshot:
    task, strategy = run.task, run.strategy
    by_data_rank = strategy.data_ranks.pick(of_ranks) if of_ranks else []
    shown: dict[str, Any] = {
        "epoch": run.state.epoch,
        "global_step": run.state.step,
        "state_dict": strategy.state.model_state(),
    }
    with run.metrics.closed_in("on_save_checkpoint"):
        run.fire("on_save_checkpoint", shown)
    model = shown["state_dict"]
    trainer: dict[str, Any] = {
        **task.saved_hyperparameters(),
        "task": {key: value for key, value in shown.items() if key not in _OWN_KEYS},
    }
    if not weights_only:
        trainer |= {
            "callbacks": {c.state_key: state for c in run.callbacks if (state := c.state_dict())},
            "schedulers": run.schedules.state_dict(),
            "strategy": strategy.state_dict(),
            "data": _place_in_data(run, by_data_rank),
            "loggers": run.logging.state_dict() if run.logging is not None else [],
            "datamodule": run.datamodule.state_dict() if run.datamodule is not None else {},
            **(
                {}
                if (data := run.datamodule) is None
                else {"datamodule_hyper_parameters": data.saved_hyperparameters()}
            ),
            "left_out": run.history.left_out(),
            "metrics": [of_rank["metrics"] for of_rank in by_data_rank],
            "frozen": _frozen(task),
            "seed": run.history.seed,
            "run_id": run.history.run_id,
            "job": run.attempt.key,
            "precision": strategy.precision.name,
        }
        if strategy.data_ranks.size != run.world_size:  # ranks that work on one batch together draw the same numbers
            trainer["data_ranks"] = list(strategy.data_ranks.members)
        if not run.loop.at_step_boundary:
            trainer["within_step"] = True
    optimizers = [] if weights_only else strategy.state.optimizer_states()
    if strategy.state.saves_pieces:
        model, optimizers = strategy.state.in_pieces((model, optimizers))
    return Snapshot(
        state=run.progress(),
        model=model,
        optimizers=optimizers,
        trainer=trainer,
        rng=[of_rank["rng"] for of_rank in of_ranks],
        metrics=metrics,
        world_size=run.world_size,
        kind="weights" if weights_only else "full",
        in_pieces=strategy.state.saves_pieces,
        overlaps=strategy.capabilities.state_rests
        and leaves_cores(strategy.device, strategy.processes.topology.local_world_size),
    )


def _frozen(task: torch.nn.Module) -> list[str]:
    return sorted(plain_name(name) for name, parameter in task.named_parameters() if not parameter.requires_grad)


def _place_in_data(run: StageRun, of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    place, loaders = run.data.state_dict(), [of_rank["loader"] for of_rank in of_ranks]
    return place if None in loaders else {**place, "loaders": loaders}


def find_checkpoint(run: StageRun, request: LoadRequest, stage: Stage) -> FoundCheckpoint | None:
    """Return what a request comes to, on every rank: rank 0 chooses, and all hash a share of its files. Collective.

    Raises:
        FileNotFoundError, ConfigurationError, CheckpointError: see `choose` and `on_main_rank`.
    """
    processes = run.strategy.processes
    hashing = SharedHashing(processes)
    return processes.on_main_rank(
        lambda: choose(run, request, stage, hashing.hash_files), "find a checkpoint to load", hashing
    )


def open_for(run: StageRun, stage: Stage, load: LoadRequest) -> Opened | None:
    """Find the checkpoint that a stage starts from and read it, on every rank; None without one. Collective.

    Raises:
        FileNotFoundError, ConfigurationError, CheckpointError: see `find_checkpoint`, `check_fits` and `Opened.at`.
    """
    if stage == "fit" and run.is_main and not run.is_trial and run.checkpoint_dir.is_dir():
        clean_stale(run.checkpoint_dir)  # what a run that was killed while it wrote has left
    found = run.broadcast(left_by_earlier(run.attempt, run.folder) if run.is_main else None)
    if found is not None:
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
    """A checkpoint that has been read, not yet loaded.

    Attributes:
        found: what `choose` returned; its manifest is not parsed again, nor are its files hashed again.
        request: what is to be loaded, and what may be missing.
        snapshot: its parts; tensors are mapped to the files.
        shown: what the hooks see, and may change the weights of.
    """

    found: FoundCheckpoint
    request: LoadRequest
    snapshot: Snapshot
    shown: ShownCheckpoint

    @classmethod
    def read(cls, found: FoundCheckpoint, request: LoadRequest, *, full: bool) -> Opened:
        """Read a checkpoint: all of it (`full`), or what a task needs for its weights.

        Raises:
            CheckpointError: a part is missing.
        """
        if full:
            allow_missing = request.parts_to_miss
            snapshot = read_opened(found, parts=PARTS["full"], allow_missing=allow_missing, copy_model=False)
        else:
            snapshot = read_opened(found, parts=WEIGHTS, copy_model=False)
        if snapshot.model is None:
            raise CheckpointError(f"{found.path} holds no weights.")
        return cls(found, request, snapshot, _shown(found, snapshot))

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.found.path

    def show(self, run: StageRun) -> None:
        """Let the task and the callbacks read back what they added, and change weights before they are loaded."""
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
            "optimizer_states": lambda: read_opened(found, parts=("optimizer",)).optimizers,
        }
    return ShownCheckpoint(trainer.get("task", {}), snapshot.model, read)


def restore(run: StageRun, opened: Opened) -> None:
    """Put a checkpoint's whole state into a prepared run. Every rank reads the same folder; nothing is communicated.

    Callbacks get their states before optimizers do. An optimizer whose groups differ from the saved ones is restored
    after `on_fit_start`, since a callback may make them there.

    Raises:
        CheckpointError: a part is missing, or does not fit this task.
    """
    snapshot, path, request = opened.snapshot, opened.path, opened.request
    saved = Entries(snapshot.trainer, path, request.allow_missing)
    restore_weights(run, opened)
    run.state.load_dict(snapshot.state)
    go_on_from(opened.found.manifest.created)
    run.shown.load(snapshot.metrics)
    saved.restore_callbacks(run)
    _restore_optimizers_and_schedules(run, opened, saved)
    saved.restore_strategy(run)
    data, seed = saved.take("data", {}), saved.take("seed", None)
    if data:  # a converted checkpoint stands at the start of an epoch and keeps no order of its own
        run.history.seed = seed
        run.data.load_state_dict(data)
    run.history.add_left_out(snapshot.trainer.get("left_out", {}))  # a converted checkpoint has none
    run.history.run_id = saved.take("run_id", "")
    saved.restore_loggers(run)
    saved.restore_datamodule(run)
    if run.state.batch_in_epoch > 0 and not run.state.epoch_done:
        run.loop.to_restore.append(partial(_restore_metrics, run, snapshot.trainer.get("metrics", []), path))
        run.loop.to_restore.append(partial(_compare_frozen, run, snapshot.trainer.get("frozen"), path))
    ranks = snapshot.trainer.get("data_ranks")  # only there if they are not all ranks
    states = [snapshot.rng[rank] for rank in ranks] if ranks and snapshot.rng else snapshot.rng
    if snapshot.trainer.get("within_step"):
        warnings.warn(
            f"{path} was written after step {run.state.step} when the next one had begun: that one is done anew, and "
            "what it had drawn from generators, put into buffers and logged by then remains.",
            TrainwrightWarning,
            stacklevel=2,
        )
    if len(states) == run.strategy.data_ranks.size:
        run.loop.to_restore.append(
            partial(_set_generators, path, states[run.strategy.data_ranks.rank], run.strategy.device)
        )
    elif "rng" not in snapshot.missing:
        wrote = _processes_text(snapshot.world_size, len(ranks) if ranks else snapshot.world_size)
        moved = (
            f"was written by {wrote} and is resumed by {_processes_text(run.world_size, run.strategy.data_ranks.size)}"
        )
        warnings.warn(
            f"{path} {moved if snapshot.rng else 'holds no state of them'}: the random number generators start anew."
            f"{' The order of the data goes on exactly.' if data else ''}",
            TrainwrightWarning,
            stacklevel=2,
        )


def _compare_frozen(run: StageRun, before: list[str] | None, path: Path) -> None:
    """Warn where an epoch goes on with other parameters learning than those that learned when it was left."""
    names = {plain_name(name) for name, _ in run.task.named_parameters()}
    differ = [] if before is None else sorted({*before} & names ^ {*_frozen(run.task)})
    if differ:
        kind = "learned" if differ[0] not in (before or []) else "was frozen"
        warnings.warn(
            f"{path} was written in the middle of an epoch in which {differ[0]!r} {kind}, and in this run that is "
            f"otherwise ({len(differ)} such parameters). The task is built anew for a resume, and on_train_epoch_start "
            "is not called again in the epoch that goes on: set requires_grad in on_train_start too, by the epoch.",
            TrainwrightWarning,
            stacklevel=2,
        )


def _set_generators(path: Path, states: dict[str, Any], device: torch.device) -> None:
    with reading(path, "holds states of generators that make no sense"):
        set_rng_state(states, device)


def _processes_text(world_size: int, dp_size: int) -> str:
    """Return how many processes there are, and between how many the data is divided if these are fewer."""
    return f"{world_size} process(es)" + (f", {dp_size} for the data" if dp_size != world_size else "")


def _restore_metrics(run: StageRun, of_ranks: list[dict[str, Any]], path: Path) -> None:
    """Go on with what the epoch has aggregated so far; called once it is begun, on every rank."""
    device, rank = run.strategy.device, run.strategy.data_ranks.rank
    if len(of_ranks) == run.strategy.data_ranks.size:
        run.metrics.load_state_dict(of_ranks[rank]["logged"], device)
        lost = load_objects_state(run.task, of_ranks[rank]["objects"], device)
    else:
        lost = sorted({name for of_rank in of_ranks for name in of_rank["objects"]})
        keys = {key: None for of_rank in of_ranks for key in of_rank["logged"]}
        held = {key: [of_rank["logged"][key] for of_rank in of_ranks if key in of_rank["logged"]] for key in keys}
        if rank == 0:  # what all have aggregated is added up with what each adds from now on
            run.metrics.load_state_dict({key: merge(states) for key, states in held.items()}, device)
    if lost and run.is_main:
        warnings.warn(
            f"{path}: the metric objects {', '.join(lost)} begin the epoch anew: they are not in this task, or the "
            "number of processes has changed.",
            TrainwrightWarning,
            stacklevel=2,
        )


def _restore_optimizers_and_schedules(run: StageRun, opened: Opened, saved: Entries) -> None:
    """Restore them now, or once callbacks have made the parameter groups that the checkpoint has (`on_fit_start`)."""

    def load() -> None:
        fresh = _restore_optimizers(run, opened.snapshot, opened.path, opened.request)
        _restore_schedules(run, saved, fresh)

    snapshot, own = opened.snapshot, run.optimizers
    if run.hooks.on_fit_start and len(snapshot.optimizers) == len(own):
        pairs = zip(snapshot.optimizers, own, strict=True)
        if any(len(state.get("param_groups", [])) != len(optimizer.param_groups) for state, optimizer in pairs):
            run.loop.restore_after_fit_start = load
            return
    load()


def _restore_optimizers(run: StageRun, snapshot: Snapshot, path: Path, request: LoadRequest) -> list[Optimizer]:
    """Give the optimizers their state back; return those that start anew, which only a user's word allows."""
    saved, own = snapshot.optimizers, run.optimizers
    if "optimizer" in snapshot.missing:
        return own
    allowed = "optimizer" in request.allow_missing
    if len(saved) != len(own):
        text = f"{path} holds {len(saved)} optimizer(s), but configure_optimizers returned {len(own)}."
        if not allowed:
            raise CheckpointError(
                f"{text} Return as many, in the same order, or pass allow_missing=['optimizer'] to start them anew."
            )
        warnings.warn(f"{text} They start anew.", TrainwrightWarning, stacklevel=3)
        return own
    fresh = []
    for optimizer, state in zip(own, saved, strict=True):
        try:
            run.strategy.state.load_optimizer_state(optimizer, state)
        except CheckpointError as error:
            if not allowed:
                raise
            fresh.append(optimizer)
            text = f"{path}: {error} {type(optimizer).__name__} starts anew."
            warnings.warn(text, TrainwrightWarning, stacklevel=3)
    return fresh


def _restore_schedules(run: StageRun, saved: Entries, fresh: list[Optimizer]) -> None:
    """Give the learning-rate schedules their state back, and let optimizers that start anew have their rates."""
    states, configs = saved.take("schedulers", []), run.lr_scheduler_configs
    if len(states) != len(configs):
        saved.lacks(
            "schedulers",
            f"holds {len(states)} learning-rate schedule(s), but configure_optimizers returned {len(configs)}",
            "return as many, in the same order",
        )
        return
    run.schedules.load_state_dict(states)
    for config in configs:
        optimizer = next((each for each in fresh if each is getattr(config.scheduler, "optimizer", None)), None)
        if optimizer is not None:
            # Most schedules go on from the rate that stands in the optimizer, which is that of step 0 in a new one.
            for group, rate in zip(optimizer.param_groups, config.scheduler.get_last_lr(), strict=True):
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate


def restore_weights(run: StageRun, opened: Opened) -> None:
    """Load the weights of a checkpoint that the hooks have seen."""
    shown, path, request = opened.shown, opened.path, opened.request
    strict = run.task.strict_loading if request.strict is None else request.strict
    missing, left_over = run.strategy.state.load_model_state(shown["state_dict"], strict=strict)
    run.strategy.weights_changed()
    # A task that sets strict_loading=False does so for good; an argument is about this one checkpoint.
    if request.strict is False and (missing or left_over):
        texts = [f"{title}: {', '.join(names[:10])}{', …' if len(names) > 10 else ''}" for title, names in (
            (f"{len(missing)} weights of the task are not in it", missing),
            (f"{len(left_over)} of its weights are not in the task", left_over),
        ) if names]  # fmt: skip
        warnings.warn(f"{path} was loaded in part. {'; '.join(texts)}.", TrainwrightWarning, stacklevel=2)


def begin_from_weights(run: StageRun, opened: Opened) -> None:
    """Load the weights alone, and stand at the start of a new run."""
    restore_weights(run, opened)
    run.state.load_dict(TrainState().to_dict())
    run.print(f"trainwright: a new run begins at step 0 from the weights of {opened.path}")


def check_fits(run: StageRun, found: FoundCheckpoint) -> None:
    """Check that a resumed run has something left to do or nothing; a bound behind the checkpoint is an error.

    Raises:
        ConfigurationError: `max_epochs` is below the epochs that the checkpoint has finished.
    """
    epoch, bound = found.manifest.epoch, run.settings.limits.max_epochs
    if bound is not None and epoch > bound:
        raise ConfigurationError(f"{found.path} is in epoch {epoch}, but max_epochs={bound}. Increase max_epochs.")
