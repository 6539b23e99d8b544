"""Checkpoints of user-written training loops, in the usual layout: one rank writes them, all ranks read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.accelerator.accelerated_loader import AcceleratedLoader
from trainwright.accelerator.accelerated_optimizer import AcceleratedOptimizer
from trainwright.accelerator.loss_scale import LossScale
from trainwright.accelerator.scheduler import AcceleratedScheduler
from trainwright.checkpoint import Snapshot, read_checkpoint, write_checkpoint
from trainwright.checkpoint.format.model import load_plain_state
from trainwright.checkpoint.format.optimizer import load_named_optimizer_state, named_optimizer_state
from trainwright.core.errors import CheckpointError, ConfigurationError
from trainwright.core.rng import rng_state, set_rng_state
from trainwright.core.state import TrainState
from trainwright.processes.process_group import Processes

_ENTRY = "loop"  # of the trainer part


@dataclass(frozen=True, slots=True)
class LoopObjects:
    """The objects of a loop that have a state.

    Attributes:
        models: the user's own, unwrapped.
        optimizers, schedulers, loaders: as they were prepared.
        scale: of the loss in fp16.
        others: the user's objects with `state_dict` and `load_state_dict`, the same on every rank.
        device: whose generators are saved.
    """

    models: Sequence[nn.Module]
    optimizers: Sequence[AcceleratedOptimizer]
    schedulers: Sequence[AcceleratedScheduler]
    loaders: Sequence[AcceleratedLoader]
    scale: LossScale | None
    others: Sequence[Any]
    device: torch.device

    @property
    def counts(self) -> dict[str, int]:
        """The number of objects of each kind."""
        kinds = ("models", "optimizers", "schedulers", "loaders", "others")
        return {kind: len(getattr(self, kind)) for kind in kinds}

    def named_model(self, index: int) -> tuple[str, nn.Module]:
        """Return a model and the prefix of its weights' names, which is empty if it is the only model."""
        return ("" if len(self.models) == 1 else f"model_{index}."), self.models[index]

    def parameter_names(self) -> dict[torch.Tensor, str]:
        """Return the name in a checkpoint of each parameter of all models."""
        found: dict[torch.Tensor, str] = {}
        for index in range(len(self.models)):
            prefix, model = self.named_model(index)
            for name, parameter in model.named_parameters():
                found.setdefault(parameter, prefix + name)
        for number, optimizer in enumerate(self.optimizers):  # of no model: a temperature, for example
            for i, group in enumerate(optimizer.param_groups):
                for j, parameter in enumerate(group["params"]):
                    found.setdefault(parameter, f"optimizer_{number}.group_{i}.parameter_{j}")
        return found


def save_loop(path: Path, objects: LoopObjects, seed: int, processes: Processes) -> None:
    """Write the state of a loop as a checkpoint, which replaces an existing one. Collective; blocks on the disk.

    Raises:
        CheckpointError: `path` exists and is not a checkpoint, or a value cannot be saved; on every rank.
        ConfigurationError: the loop is within a group of micro-batches.
    """
    own = {"rng": rng_state(objects.device), "loaders": [loader.state_dict() for loader in objects.loaders]}
    of_ranks = processes.gather_object(own)

    def write() -> None:
        names = objects.parameter_names()
        weights: dict[str, Any] = {}
        for index in range(len(objects.models)):
            prefix, model = objects.named_model(index)
            weights |= {prefix + name: value for name, value in model.state_dict().items()}
        entry: dict[str, Any] = {
            "counts": objects.counts,
            "schedulers": [scheduler.state_dict() for scheduler in objects.schedulers],
            "scale": None if objects.scale is None else objects.scale.state_dict(),
            "others": [other.state_dict() for other in objects.others],
            "loaders": [of_rank["loaders"] for of_rank in of_ranks],
            "steps": [optimizer.num_steps for optimizer in objects.optimizers],
            "seed": seed,
        }
        steps = max(entry["steps"], default=0)
        snapshot = Snapshot(
            state=TrainState(step=steps).to_dict(),
            model=weights,
            optimizers=[named_optimizer_state(one.optimizer, names) for one in objects.optimizers],
            trainer={_ENTRY: entry},
            rng=[of_rank["rng"] for of_rank in of_ranks],
            world_size=processes.world_size,
        )
        write_checkpoint(path, snapshot)

    processes.on_main_rank(write, f"write {path}")


def load_loop(path: Path, objects: LoopObjects, seed: int, processes: Processes) -> None:
    """Restore the state of a loop. Every rank reads the same folder; nothing is communicated.

    Raises:
        FileNotFoundError: `path` does not exist.
        CheckpointError: it is damaged, or belongs to another loop.
    """
    if (path / "random_states_0.pkl").is_file():
        raise CheckpointError(
            f"{path} is a folder of Accelerate's save_state, which load_state does not read. Load its weights with "
            "load_checkpoint_in_model(model, path); the optimizer and the position in the data start from scratch."
        )
    snapshot = read_checkpoint(path, copy_model=False)
    entry = snapshot.trainer.get(_ENTRY)
    if entry is None or snapshot.model is None:
        raise CheckpointError(
            f"{path} is a checkpoint of a Trainer, not of Accelerator.save_state. Load its weights with "
            "load_checkpoint_in_model(model, path), or continue with Trainer.fit(ckpt_path=…)."
        )
    _check(path, entry, objects, seed, processes.world_size)
    for index in range(len(objects.models)):
        prefix, model = objects.named_model(index)
        weights = {name.removeprefix(prefix): v for name, v in snapshot.model.items() if name.startswith(prefix)}
        load_plain_state(model, weights)
    names = objects.parameter_names()
    for optimizer, state, steps in zip(objects.optimizers, snapshot.optimizers, entry["steps"], strict=True):
        load_named_optimizer_state(optimizer.optimizer, state, names)
        optimizer.num_steps = steps
    for kind in ("schedulers", "others"):
        for one, state in zip(getattr(objects, kind), entry[kind], strict=True):
            one.load_state_dict(state)
    if objects.scale is not None and entry["scale"] is not None:
        objects.scale.load_state_dict(entry["scale"])
    same_ranks = len(entry["loaders"]) == processes.world_size
    for loader, state in zip(objects.loaders, entry["loaders"][processes.rank if same_ranks else 0], strict=True):
        loader.load_state_dict(state)
    if same_ranks:
        set_rng_state(snapshot.rng[processes.rank], objects.device)


def _check(path: Path, entry: dict[str, Any], objects: LoopObjects, seed: int, world_size: int) -> None:
    """Check that a checkpoint fits, before anything is changed."""
    if objects.loaders and entry["seed"] != seed:
        raise CheckpointError(
            f"{path} was written with seed={entry['seed']}, and the data of this loop has the order of seed={seed}. "
            f"Pass Accelerator(seed={entry['seed']})."
        )
    for kind, count in objects.counts.items():
        if count != entry["counts"][kind]:
            raise CheckpointError(
                f"{path} holds the state of {entry['counts'][kind]} {kind}, but {count} are prepared or registered. "
                "Prepare and register the same as when it was saved, in the same order."
            )
    wrote = len(entry["loaders"])
    if wrote != world_size and any(state["loader"] is not None for state in entry["loaders"][0]):
        raise ConfigurationError(
            f"{path} was written by {wrote} processes, each with the state of its own loader, which cannot be divided "
            f"among {world_size}. Start as many, or use map-style data, whose position is counted in samples."
        )
