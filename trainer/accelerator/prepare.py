"""How an Accelerator makes a loop's objects ready: each once, whoever has prepared it before."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.data import CombinedLoader, LoaderOptions, prepare_loader
from trainwright.processes.partial_state import PartialState
from trainwright.strategies.strategy import Strategy
from trainwright.trainer.accelerator.accelerated_loader import AcceleratedLoader, SkippedStart
from trainwright.trainer.accelerator.accelerated_model import AcceleratedModel
from trainwright.trainer.accelerator.accelerated_optimizer import AcceleratedOptimizer
from trainwright.trainer.accelerator.accumulation import Accumulation
from trainwright.trainer.accelerator.loss_scale import LossScale
from trainwright.trainer.accelerator.scheduler import AcceleratedScheduler, holds_optimizer, is_scheduler

T = TypeVar("T")


class PreparesObjects:
    """What `Accelerator.prepare` and its kin do; a part of `Accelerator`."""

    state: PartialState
    strategy: Strategy
    device_placement: bool
    step_scheduler_with_optimizer: bool
    _seed: int | None
    _make_context: Callable[[], AbstractContextManager[Any]] | None
    _scale: LossScale | None
    _accumulation: Accumulation
    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]
    _schedulers: list[AcceleratedScheduler]
    _dataloaders: list[AcceleratedLoader]
    _prepared: WeakValueDictionary[int, Any]

    @functools.cached_property
    def _loader_options(self) -> LoaderOptions:
        """How data is divided. Collective at its first use, by which a script has seeded torch."""
        ranks = self.strategy.data_ranks
        own = torch.initial_seed() if self._seed is None else self._seed
        return LoaderOptions(
            rank=ranks.rank,
            world=ranks.size,
            seed=self.state.joined().broadcast_object(own),
            agree=ranks.gather_integers if ranks.size > 1 else None,
            name="the loader",
        )

    def prepare(self, *args: object, device_placement: Sequence[bool | None] | bool | None = None) -> Any:
        """Return each argument made ready: models, optimizers, DataLoaders and schedulers; others as they are.

        Collective under several processes: every rank prepares the same objects, in the same order. What was prepared
        already is returned as it is.

        Args:
            args: in any order; a scheduler follows the optimizer it was made for.
            device_placement: for each argument or for all, in the place of the constructor's.
        """
        placements = (
            list(device_placement) if isinstance(device_placement, Sequence) else [device_placement] * len(args)
        )
        if len(placements) != len(args):
            raise ConfigurationError(
                f"device_placement has {len(placements)} entries for {len(args)} objects. Give as many, or one."
            )
        found = list(args)
        for prepares in (self._prepare_own, self._prepare_follower):
            for i, value in enumerate(found):
                found[i] = prepares(value, placements[i])
        if any(isinstance(value, nn.Module) for value in found):
            _warn_of_other_parameters(found, self._models, self._optimizers)
        return found[0] if len(found) == 1 else tuple(found)

    def _prepare_own(self, value: object, placement: bool | None) -> Any:
        if isinstance(value, nn.Module):
            return self.prepare_model(value, placement)
        if isinstance(value, SkippedStart) and self._own(value) is value.loader:
            return value
        if isinstance(value, (DataLoader, CombinedLoader, AcceleratedLoader, SkippedStart)):
            return self.prepare_data_loader(value, placement)
        return self.prepare_optimizer(value) if isinstance(value, Optimizer) else value

    def _prepare_follower(self, value: object, placement: bool | None) -> Any:
        follows = isinstance(value, AcceleratedScheduler) or is_scheduler(value)
        return self.prepare_scheduler(value) if follows else value

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Return what the loop calls in the model's place; the model itself where nothing has to be around it.

        Collective under several processes: all start from rank 0's weights.

        Args:
            model: its parameters stay the same objects.
            device_placement: move it to the device; a model that `dispatch_model` has placed stays as it is.
            evaluation_mode: it will not be trained: processes are not joined by its backward.
        """
        placed = self.device_placement if device_placement is None else device_placement
        own = self._own(model)
        if own is model and isinstance(model, AcceleratedModel):
            return model
        if isinstance(model, AcceleratedModel) and model.engine is not own:  # joined once, by another Accelerator
            model.release()
            return self._once(own, lambda: self._kept(self._around(own, model.engine)))
        return self._once(own, lambda: self._kept(self._make_model(own, placed, evaluation_mode)))

    def _make_model(self, model: nn.Module, placed: bool, evaluation_mode: bool) -> nn.Module:
        several = self.state.num_processes > 1 and not evaluation_mode
        dispatched = len(set(getattr(model, "hf_device_map", {}).values())) > 1
        if several and (dispatched or not placed):
            raise ConfigurationError(
                "several processes train a model that each of them has whole on its device: it cannot be spread over "
                "several by a device map, nor be left where it is by device_placement=False. Start one process, or "
                "pass evaluation_mode=True to prepare_model if it is not trained."
            )
        if placed and not dispatched and not evaluation_mode:
            engine = self.strategy.prepare_model(model)
        else:
            engine = model.to(self.state.device) if placed and not dispatched else model
        return self._around(model, engine)

    def _kept(self, model: nn.Module) -> nn.Module:
        self._models.append(model)
        return model

    def _around(self, model: nn.Module, engine: nn.Module) -> nn.Module:
        plain = engine is model and self._make_context is None
        if plain:
            return model
        return AcceleratedModel(model, engine, self._make_context, self.strategy.clearer)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Return the optimizer such that it steps once per group of micro-batches. Not collective."""
        own = self._own(optimizer)
        if isinstance(own, AcceleratedOptimizer):
            return own

        def make() -> AcceleratedOptimizer:
            self._optimizers.append(AcceleratedOptimizer(own, self._accumulation, self._scale))
            return self._optimizers[-1]

        return self._once(own, make)

    def prepare_scheduler(self, scheduler: object) -> AcceleratedScheduler:
        """Return the schedule such that it advances with the optimizer it was made for. Not collective."""
        own = self._own(scheduler)
        if isinstance(own, AcceleratedScheduler):
            return own

        def make() -> AcceleratedScheduler:
            steps = [optimizer for optimizer in self._optimizers if holds_optimizer(own, optimizer)]
            of_steps = self.step_scheduler_with_optimizer
            found = AcceleratedScheduler(
                own, steps or self._optimizers, self._accumulation, steps_with_optimizer=of_steps
            )
            self._schedulers.append(found)
            return found

        return self._once(own, make)

    def prepare_data_loader(self, data_loader: object, device_placement: bool | None = None) -> AcceleratedLoader:
        """Return a loader of this process's share of the data; see `prepare_loader` for what becomes of it.

        Args:
            data_loader: a DataLoader, a list of batches, or another iterable of batches that says how it is divided.
            device_placement: move batches to the device.
        """
        placed = self.device_placement if device_placement is None else device_placement
        own = self._own(data_loader)
        if isinstance(own, AcceleratedLoader):
            return own

        def make() -> AcceleratedLoader:
            mover = self.strategy.batch_mover() if placed else None
            found = AcceleratedLoader(prepare_loader(own, self._loader_options), self._accumulation, mover)
            self._dataloaders.append(found)
            return found

        return self._once(own, make)

    def _once(self, value: object, make: Callable[[], T]) -> T:
        """Return what was made of an object before; else make it."""
        if id(value) not in self._prepared:  # what is there holds its object: no other can have the address
            self._prepared[id(value)] = make()
        return cast(T, self._prepared[id(value)])

    def _own(self, value: object) -> Any:
        """Return what a prepared object was prepared from, unless it is one of ours; any other as it is.

        What another Accelerator has prepared, or this one before `free_memory`, knows nothing of this one's groups.
        """
        if isinstance(value, SkippedStart):
            value = value.loader
        raw = prepared_from(value)
        return value if raw is None or self._prepared.get(id(raw)) is value else raw

    def skip_first_batches(self, dataloader: AcceleratedLoader, num_batches: int = 0) -> SkippedStart:
        """Return a prepared loader whose first pass begins later; nothing that is skipped is fetched."""
        return self.prepare_data_loader(dataloader).skip(num_batches)


def prepared_from(value: object) -> Any:
    """Return the user's own object that was prepared; None for what was not."""
    if isinstance(value, AcceleratedModel):
        return value.module
    if isinstance(value, AcceleratedOptimizer):
        return value.optimizer
    if isinstance(value, AcceleratedScheduler):
        return value.scheduler
    return value.prepared.raw if isinstance(value, AcceleratedLoader) else None


def _warn_of_other_parameters(
    prepared: Sequence[object], models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> None:
    """Warn of an optimizer without a parameter of a prepared model, beside a model that no optimizer trains."""

    def held(*optimizers: Optimizer) -> set[int]:
        return {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}

    trained = held(*optimizers)
    ids = [{id(p) for p in model.parameters() if p.requires_grad} for model in models]
    if not any(of_model and trained.isdisjoint(of_model) for of_model in ids):
        return
    for one in prepared:
        if isinstance(one, AcceleratedOptimizer) and held(one).isdisjoint(set().union(*ids)):
            warnings.warn(
                f"{type(one.optimizer).__name__} holds no parameter of a prepared model: its steps change nothing in "
                "them. Make it from the parameters of the model that is prepared.",
                TrainwrightWarning,
                stacklevel=3,
            )
