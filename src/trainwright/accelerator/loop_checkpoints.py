"""Checkpoints of user-written training loops, with the same layout as checkpoints of the Trainer."""

from __future__ import annotations

import math
import os
import shlex
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainwright.accelerator.prepared.accelerated_loader import AcceleratedLoader
from trainwright.accelerator.prepared.accelerated_optimizer import AcceleratedOptimizer, AcceleratedScheduler
from trainwright.accelerator.project import StateFolders
from trainwright.checkpoint import AsyncWriter, Snapshot, read_checkpoint
from trainwright.checkpoint.disk.durable import hidden, make_folder
from trainwright.checkpoint.format.staging import remove_folder
from trainwright.core.errors import CheckpointError, ConfigurationError, TrainwrightWarning
from trainwright.core.host.folders import is_url
from trainwright.core.rng import rng_state, set_rng_state
from trainwright.core.state import TrainState, class_names, compare_classes, scheduler_state
from trainwright.processes.process_group import Processes
from trainwright.strategies.engine import Engine
from trainwright.strategies.state import FullState
from trainwright.strategies.state_writer import SaveTarget, StateWriter
from trainwright.strategies.steps.loss_scale import LossScale

_ENTRY = "loop"  # key of the values that only a loop saves, in the checkpoint's trainer part

SaveHook = Callable[[list[nn.Module], list[Any], str], Any]
LoadHook = Callable[[list[nn.Module], str], Any]


@dataclass(frozen=True, slots=True)
class LoopObjects:
    """The objects of a user-written training loop whose state is saved.

    Attributes:
        models: The user's models, without wrappers.
        optimizers, schedulers, loaders: The results of `prepare`. Default: `()` for schedulers and loaders.
        scale: Loss scale of fp16. Default: None, which means that the loss is not scaled.
        registered: The user's objects with `state_dict` and `load_state_dict`, with equal states on every rank.
            Default: `()`.
        seed: Seed of the data order. Default: 0.
        use_seed: Function that `load` calls with the seed of the loaded state. Default: None, because the user has
            passed a seed. A state with another seed is then an error if the order of a loader depends on the seed.
        with_weights: Save and load the weights of the models. Default: True.
    """

    models: Sequence[nn.Module]
    optimizers: Sequence[AcceleratedOptimizer]
    schedulers: Sequence[AcceleratedScheduler] = ()
    loaders: Sequence[AcceleratedLoader] = ()
    scale: LossScale | None = None
    registered: Sequence[Any] = ()
    seed: int = 0
    use_seed: Callable[[int], None] | None = None
    with_weights: bool = True

    @property
    def counts(self) -> dict[str, int]:
        """The number of objects of each kind, by the names that checkpoints and errors use."""
        return {
            "models": len(self.models),
            "optimizers": len(self.optimizers),
            "schedulers": len(self.schedulers),
            "loaders": len(self.loaders),
            "others": len(self.registered),
        }

    def prefix(self, index: int) -> str:
        """Return the prefix of a model's weights in a checkpoint. Empty if there is only one model."""
        # A Trainer's checkpoint has one model and no prefix. So a loop and a Trainer read each other's checkpoints.
        if len(self.models) == 1:
            return ""
        return f"model_{index}."

    def weights_of(self, index: int, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return the weights of one model, by the model's own names, out of the weights of all models."""
        prefix = self.prefix(index)
        return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}

    def state(self, engine: Engine) -> FullState:
        """Return the state of all models and optimizers. It refers to their tensors."""
        if len(self.models) == 1:
            module = self.models[0]
        else:  # a module whose names are those of `prefix`
            module = nn.Module()
            for index, model in enumerate(self.models):
                module.add_module(f"model_{index}", model)
        optimizers = [optimizer.optimizer for optimizer in self.optimizers]
        return engine.make_state(module, optimizers, self._names_outside(module))

    def _names_outside(self, module: nn.Module) -> dict[torch.Tensor, str]:
        """Return names for the optimizers' parameters that belong to no model, such as a temperature."""
        in_models = set(module.parameters())
        names = {}
        for optimizer_index, optimizer in enumerate(self.optimizers):
            for group_index, group in enumerate(optimizer.param_groups):
                for index, parameter in enumerate(group["params"]):
                    if parameter not in in_models:
                        names[parameter] = f"optimizer_{optimizer_index}.group_{group_index}.parameter_{index}"
        return names


class LoopCheckpoints:
    """Writer and reader of checkpoints of a user-written training loop.

    Args:
        engine: The engine, after its start.
        folders: Folders of the saved states.

    Attributes:
        folders: The argument.
        save_hooks, load_hooks: Registered hooks, by the id of their handle, in the order of registration.
    """

    def __init__(self, engine: Engine, folders: StateFolders) -> None:
        self.folders = folders
        self._engine = engine
        self._writer = AsyncWriter() if folders.configuration.async_save else None  # None: saves block
        self._states = StateWriter(engine, self._writer)
        self.save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self.load_hooks: OrderedDict[int, LoadHook] = OrderedDict()

    def for_engine(self, engine: Engine) -> LoopCheckpoints:
        """Return the checkpoints of the same loop with another engine, with the same folders and hooks.

        Call `close` of this object first.
        """
        checkpoints = LoopCheckpoints(engine, self.folders)
        # The same dicts, so that handles of earlier hooks still remove them.
        checkpoints.save_hooks = self.save_hooks
        checkpoints.load_hooks = self.load_hooks
        return checkpoints

    def add_save_hook(self, hook: SaveHook) -> RemovableHandle:
        """Let later saves call a function first. Return a handle that removes it."""
        handle = RemovableHandle(self.save_hooks)
        self.save_hooks[handle.id] = hook
        return handle

    def add_load_hook(self, hook: LoadHook) -> RemovableHandle:
        """Let later loads call a function first. Return a handle that removes it."""
        handle = RemovableHandle(self.load_hooks)
        self.load_hooks[handle.id] = hook
        return handle

    # Saving

    def save(self, output_dir: str | os.PathLike[str] | None, objects: LoopObjects, *, alone: bool = False) -> str:
        """Write the state of a loop as a checkpoint, which replaces an existing one. Collective unless `alone`.

        Blocks on the disk and the network. With `async_save`, blocks only until the tensors are copied.

        Args:
            output_dir: Path or URL of the checkpoint. None for automatic naming.
            objects: The objects to save.
            alone: Write the state of this rank without communication, on the main rank of a replicated strategy. The
                state is that of a loop with one process: it lacks the generators of other ranks. Default: False.

        Returns:
            The path or URL of the checkpoint.

        Raises:
            CheckpointError: The path exists and is not a checkpoint, a value cannot be saved, the upload failed, or an
                earlier save failed. Raised on every rank.
            ConfigurationError: A group of micro-batches is not complete, a position in the data cannot be saved, or a
                save hook has put another object into its list.
        """
        engine = self._engine
        processes = Processes() if alone else engine.processes
        place: str = processes.on_main_rank(
            partial(self.folders.next_place, output_dir), f"look for {output_dir or self.folders.folder}"
        )
        path = self.folders.on_disk(place)
        self.folders.count_from(path.name)  # even if the save fails: its number may be on the disk
        if not alone:
            engine.begin_save()
        # Before tensors are gathered, because it raises an error if a group of micro-batches is not complete.
        positions = [loader.state_dict() for loader in objects.loaders]
        state = objects.state(engine)
        weights = state.model_state() if objects.with_weights else {}
        optimizers = state.optimizer_states()
        hook_folder = self._call_save_hooks(path, objects, weights, processes)
        in_shards = state.saves_shards
        if in_shards:
            # One call for both: a tensor that both contain must become the same object.
            weights, optimizers = state.shards_of((weights, optimizers))
        registered = [one.state_dict() for one in objects.registered]
        # After all code of the user, which may draw random numbers: the resumed loop continues with those after it.
        of_ranks = processes.gather_object((rng_state(engine.device), positions))
        steps = [optimizer.num_steps for optimizer in objects.optimizers]
        entry = {
            "counts": objects.counts,
            "others": registered,
            "other_classes": class_names(objects.registered),
            "loaders": [positions_of_rank for _, positions_of_rank in of_ranks],
            "steps": steps,
            "seed": objects.seed,
        }
        snapshot = Snapshot(
            state=TrainState(step=max(steps, default=0)).to_dict(),
            model=weights,
            optimizers=optimizers,
            trainer=self._trainer_part(objects, entry),
            rng=[generators for generators, _ in of_ranks],
            world_size=processes.world_size,
            in_shards=in_shards,
            extra=hook_folder,
        )
        target = SaveTarget(path, metrics={}, then=partial(self.folders.upload_and_prune, place))
        try:
            self._states.save(snapshot, [target], before=self.wait, alone=alone)
        except BaseException:
            if hook_folder is not None and hook_folder.is_dir():
                remove_folder(hook_folder)
            raise
        return place

    def _trainer_part(self, objects: LoopObjects, entry: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint's values besides tensors: those that a Trainer reads, and the loop's own."""
        strategy = self._engine.state_dict()
        if objects.scale is not None:
            strategy = strategy | {"scaler": objects.scale.state_dict()}
        return {
            "callbacks": {},
            "schedulers": [scheduler_state(scheduler) for scheduler in objects.schedulers],
            "schedule_classes": class_names(one.scheduler for one in objects.schedulers),
            "strategy": strategy,
            "data": {},  # a Trainer begins an epoch
            "loggers": [],
            "datamodule": {},
            "seed": objects.seed,
            "run_id": self.folders.run_id,
            "precision": self._engine.precision.name,
            _ENTRY: entry,
        }

    def _call_save_hooks(
        self, path: Path, objects: LoopObjects, weights: dict[str, Any], processes: Processes
    ) -> Path | None:
        """Call the save hooks. Return the folder with the files that the hooks have written.

        State dicts that a hook removes from its list are not saved. What it changes in a state dict is saved.

        Raises:
            ConfigurationError: A hook has put another object into its list.
        """
        if not self.save_hooks:
            return None

        def make() -> Path:
            folder = hidden(path, "tmp")
            make_folder(folder, sync=False)
            return folder

        folder: Path = processes.on_main_rank(make, f"make a folder beside {path}")
        models = list(objects.models)
        state_dicts = [objects.weights_of(index, weights) for index in range(len(models))]
        to_save = list(state_dicts)  # the hooks may remove items
        try:
            for hook in list(self.save_hooks.values()):
                hook(models, to_save, str(folder))
            for item in to_save:
                if not _contains(state_dicts, item):
                    raise ConfigurationError(
                        "a hook of register_save_state_pre_hook has put another object into its list of state dicts. "
                        "Change a state dict in place, or remove it from the list."
                    )
        except BaseException:
            if folder.is_dir():
                remove_folder(folder)
            raise
        processes.barrier()  # every rank has written its files
        # The caller's dict receives the result. The prefix of a model is that of its place in the complete list.
        weights.clear()
        for index, state_dict in enumerate(state_dicts):
            if _contains(to_save, state_dict):
                prefix = objects.prefix(index)
                weights.update({f"{prefix}{name}": value for name, value in state_dict.items()})
        return folder

    def wait(self) -> None:
        """Wait until all saves are on the disk.

        Raises:
            CheckpointError: A save could not be written.
        """
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Call `wait`, and free the host memory of saves."""
        if self._writer is not None:
            self._writer.close()

    # Loading

    def source(self, input_dir: str | os.PathLike[str] | None) -> Path:
        """Return the local folder to load from. None means the newest valid state. Collective for None and for URLs.

        A local folder is returned unchanged, even if it does not exist.

        Raises:
            CheckpointError: The state at a URL is damaged, or the service cannot be reached.
            ConfigurationError: No folder was passed, and automatic naming is off.
            FileNotFoundError: No valid state exists. Raised on every rank.
        """
        self.folders.check_source(input_dir)
        if input_dir is not None and not is_url(input_dir):
            return Path(input_dir)

        def fetch() -> str | None:
            self.wait()  # the newest state may still be written
            return self.folders.fetch(input_dir)

        place = input_dir or self.folders.folder
        local_path = self._engine.processes.on_main_rank(fetch, f"fetch a state from {place}")
        if local_path is None:
            raise FileNotFoundError(f"there is no valid state in {place}. Pass input_dir=, or save a state first.")
        return Path(local_path)

    def load(self, path: Path, objects: LoopObjects) -> None:
        """Restore the state of a loop, also from a checkpoint of a Trainer. Every rank reads the same folder.

        Raises:
            FileNotFoundError: `path` does not exist.
            CheckpointError: The checkpoint is damaged, or belongs to another loop. No object has been changed, except
                by load hooks.
        """
        processes = self._engine.processes
        if self._writer is not None:
            processes.on_main_rank(self.wait, f"write the last state before {path} is read")
        if (path / "random_states_0.pkl").is_file():
            raise CheckpointError(
                f"{path} is a folder of Accelerate's save_state, which load_state does not read. Convert "
                f"it with `trainwright checkpoint convert {shlex.quote(str(path))} TARGET`, which keeps optimizers and "
                "schedules, and load TARGET. load_checkpoint_in_model(model, path) loads weights alone."
            )
        snapshot = read_checkpoint(path, copy_model=False, allow_missing=["model"])
        entry = snapshot.trainer.get(_ENTRY)  # None in a checkpoint of a Trainer
        state = objects.state(self._engine)
        models = list(objects.models) if objects.with_weights else []  # the models to load; hooks may remove some
        # Everything is checked before anything is changed.
        _check_objects(path, snapshot, objects)
        if entry is not None:
            _check_entry(path, entry, objects, processes.world_size)
        if not self.load_hooks:  # a hook may remove a model whose weights do not fit, and load others itself
            self._weights_to_load(snapshot, objects, models)
        for optimizer, saved in zip(state.optimizers, snapshot.optimizers, strict=True):
            state.check_optimizer_state(optimizer, saved)

        for hook in list(self.load_hooks.values()):
            hook(models, str(path))
        for model_state, weights in self._weights_to_load(snapshot, objects, models):
            model_state.load_model_state(weights)
        self._engine.weights_changed()
        for optimizer, saved in zip(state.optimizers, snapshot.optimizers, strict=True):
            state.load_optimizer_state(optimizer, saved)
        for scheduler, saved in zip(objects.schedulers, snapshot.trainer.get("schedulers", []), strict=True):
            scheduler.load_state_dict(saved)
        scale = snapshot.trainer.get("strategy", {}).get("scaler")
        if objects.scale is not None and scale is not None:
            objects.scale.load_state_dict(scale)
        self.folders.adopt_run(snapshot.trainer.get("run_id", ""), path, is_main=self._engine.is_main)
        if entry is None:
            for optimizer_of_loop in objects.optimizers:
                optimizer_of_loop.num_steps = int(snapshot.state.get("step", 0))
            warnings.warn(_warning_of_missing_entry(path, snapshot, objects), TrainwrightWarning, stacklevel=3)
        else:
            self._load_entry(entry, objects)
        # After all code of the user, which may draw random numbers.
        if snapshot.world_size == processes.world_size and snapshot.rng:
            set_rng_state(snapshot.rng[processes.rank], self._engine.device)

    def _load_entry(self, entry: dict[str, Any], objects: LoopObjects) -> None:
        """Restore what only a loop has saved: registered objects, numbers of steps and the positions of loaders."""
        processes = self._engine.processes
        for registered, saved in zip(objects.registered, entry["others"], strict=True):
            registered.load_state_dict(saved)
        for optimizer, steps in zip(objects.optimizers, entry["steps"], strict=True):
            optimizer.num_steps = steps
        if objects.use_seed is not None:
            objects.use_seed(entry["seed"])  # before the loaders, whose positions are valid in the order of this seed
        # `entry["loaders"]` has a list for each rank of the save, with a position for each loader. Positions count
        # samples of all ranks, so those of rank 0 are right for any number of ranks. The state of a data set belongs to
        # one rank; `_check_entry` refuses it for another number of ranks.
        has_same_ranks = len(entry["loaders"]) == processes.world_size
        positions = entry["loaders"][processes.rank if has_same_ranks else 0]
        for loader, position in zip(objects.loaders, positions, strict=True):
            loader.load_state_dict(position)

    def _weights_to_load(
        self, snapshot: Snapshot, objects: LoopObjects, models: Sequence[nn.Module]
    ) -> list[tuple[FullState, dict[str, Any]]]:
        """Return the states of `models` with their weights in a checkpoint. Raise an error if weights do not fit.

        `models` are some of `objects.models`, whose places determine the prefixes.
        """
        to_load = []
        for index, model in enumerate(objects.models):
            if not _contains(models, model):
                continue
            weights = objects.weights_of(index, snapshot.model or {})
            state = self._engine.make_state(model, [])
            state.check_model_state(weights)
            to_load.append((state, weights))
        return to_load


def _contains(objects: Iterable[object], searched: object) -> bool:
    """Return whether `searched` itself is among `objects`. The operator `in` would compare tensors by value."""
    return any(one is searched for one in objects)


def _check_objects(path: Path, snapshot: Snapshot, objects: LoopObjects) -> None:
    """Check that a checkpoint of a loop or of a Trainer has the state of these objects, apart from tensors."""
    TrainState().load_dict(snapshot.state)  # raises an error if a counter is damaged
    entry = snapshot.trainer.get(_ENTRY)
    if entry is None:
        counts = {
            "models": 1,
            "optimizers": len(snapshot.optimizers),
            "schedulers": len(snapshot.trainer.get("schedulers", [])),
        }
    else:
        counts = entry["counts"]
    for kind, count in counts.items():
        if objects.counts[kind] != count:
            raise CheckpointError(
                f"{path} holds the state of {count} {kind}, but {objects.counts[kind]} are prepared or registered. "
                "Prepare and register the same as when it was saved, in the same order; load_checkpoint_in_model "
                "loads weights alone."
            )
    schedules = [one.scheduler for one in objects.schedulers]
    compare_classes("learning-rate schedule", schedules, snapshot.trainer.get("schedule_classes"), path)


def _check_entry(path: Path, entry: dict[str, Any], objects: LoopObjects, world_size: int) -> None:
    """Check that what a loop has saved besides tensors is valid for these objects and ranks."""
    compare_classes("registered object", objects.registered, entry.get("other_classes"), path)
    _check_counts(path, entry["steps"])
    for positions in entry["loaders"]:
        for position in positions:
            _check_counts(path, [position["epoch"], position["position"]])
    saved_seed = entry["seed"]
    if _needs_other_seed(objects, saved_seed):
        raise CheckpointError(
            f"{path} was written with seed={saved_seed}, and the data of this loop has the order of "
            f"seed={objects.seed}. Pass Accelerator(seed={saved_seed})."
        )
    saved_world_size = len(entry["loaders"])
    has_loader_states = any(position["loader"] is not None for position in entry["loaders"][0])
    if saved_world_size != world_size and has_loader_states:
        raise ConfigurationError(
            f"{path} was written by {saved_world_size} processes, each with the state of its own loader, which cannot "
            f"be divided among {world_size}. Start {saved_world_size} processes, or use map-style data, whose position "
            "is counted in samples."
        )


def _warning_of_missing_entry(path: Path, snapshot: Snapshot, objects: LoopObjects) -> str:
    """Return the warning for a checkpoint without `_ENTRY`: of a Trainer, or converted from another program's."""
    program = snapshot.trainer.get("converted_from")
    origin = "is a checkpoint of a Trainer" if program is None else f"was converted from a checkpoint ({program})"
    text = f"{path} {origin}: weights, optimizers, schedules and generators are restored, and loaders begin an epoch."
    if objects.registered:
        text += " Registered objects are not restored."
    return text


def _needs_other_seed(objects: LoopObjects, saved: int) -> bool:
    """Return whether the user has passed another seed than the saved one, and a loader's order depends on it."""
    if objects.use_seed is None and objects.seed != saved:
        return any(loader.prepared.order_needs_seed for loader in objects.loaders)
    return False


def _check_counts(path: Path, counts: object) -> None:
    """Check that all numbers in a tree of counts are finite and not negative."""
    if isinstance(counts, (list, tuple)):
        for one in counts:
            _check_counts(path, one)
    elif isinstance(counts, dict):
        for one in counts.values():
            _check_counts(path, one)
    elif isinstance(counts, (int, float)) and not 0 <= counts < math.inf:
        raise CheckpointError(f"{path} is damaged: its counts of steps or samples contain {counts}.")
