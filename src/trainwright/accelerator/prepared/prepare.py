"""Preparation of the objects of a user-written training loop: models, optimizers, schedulers and loaders."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from trainwright.accelerator.gradient_state import LoopGroups
from trainwright.accelerator.handlers import DataLoaderConfiguration
from trainwright.accelerator.megatron.megatron_schedule import MegatronLMDummyDataLoader, MegatronLMDummyScheduler
from trainwright.accelerator.prepared.accelerated_loader import (
    AcceleratedLoader,
    SkippedStart,
    divided_options,
    stateful_loader_class,
)
from trainwright.accelerator.prepared.accelerated_model import AcceleratedModel
from trainwright.accelerator.prepared.accelerated_optimizer import (
    AcceleratedOptimizer,
    AcceleratedScheduler,
    is_scheduler,
)
from trainwright.accelerator.prepared.dispatched import DispatchedLoader
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.names.constants import RNGType
from trainwright.core.run import SchedulerConfig
from trainwright.core.tree import is_sharded, move_module
from trainwright.data.combined import CombinedLoader
from trainwright.data.iterable import ShardedIterable, is_divided
from trainwright.data.loader import copy_loader, prepare_loader
from trainwright.data.loader_options import LoaderOptions
from trainwright.data.prepared import PreparedLoader
from trainwright.processes.collectives import same_on_all_ranks
from trainwright.processes.partial_state import PartialState
from trainwright.strategies.engine import Engine, Prepared, PreparedModel, RunGroup
from trainwright.strategies.steps.gradients import parameters_of
from trainwright.strategies.steps.loss_scale import LossScale

if TYPE_CHECKING:
    from trainwright.accelerator.megatron.megatron_loop import MegatronLoop

T = TypeVar("T")


@dataclass(slots=True)
class LoopPlan:
    """Settings of a user-written loop that `Engine.prepare` reads. The fields are those of `TrainingPlan`."""

    lr_scheduler_configs: list[SchedulerConfig]
    accumulate_grad_batches: int
    train_batch_size: int | None
    estimated_stepping_batches: int | float = math.inf  # the length of the user's loop is unknown


@dataclass(frozen=True, slots=True)
class _NewModel:
    """A model that no Accelerator has prepared.

    Attributes:
        index: Index of the model among the arguments.
        model: The user's model.
        moves: Move the model to the device.
    """

    index: int
    model: nn.Module
    moves: bool


class _ParameterFacts(NamedTuple):
    """Description of a parameter that must be equal on all ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_trained: bool


class PreparedObjects:
    """The objects that an Accelerator has prepared. An object that is passed again gets its earlier result.

    Args:
        state: The state of the processes.
        engine: The engine, after its start.
        groups: The loop's groups of micro-batches.
        scale: Scale of an fp16 loss. None: the loss is not scaled.
        make_context: Function that creates the context of a model's forward. None: no context.
        loaders: Options of loaders, which are read whenever a loader is prepared.
        seed: Seed of the order of data. Default: None, which is torch's initial seed on the first process.
        rng_types, schedule_steps: See `Accelerator`. Default: None.
        megatron: The loop under a Megatron-LM plugin. Default: None.

    Attributes:
        models, optimizers, schedulers, dataloaders: The results of `prepare`, in the order of preparation. Other
            objects hold the same lists, which grow with each preparation.
        loader_config: The argument `loaders`. The Accelerator may replace it.
        megatron: The argument.
        run_group: `PreparedModel.run_group` of the first model that has one, or None.
        seed: The argument. Once a loader has been prepared, the seed of all processes.
    """

    def __init__(
        self,
        state: PartialState,
        engine: Engine,
        groups: LoopGroups,
        scale: LossScale | None,
        make_context: Callable[[], AbstractContextManager[Any]] | None,
        loaders: DataLoaderConfiguration,
        seed: int | None = None,
        rng_types: Sequence[str | RNGType] | None = None,
        schedule_steps: Literal["once", "per_process"] | None = None,
        megatron: MegatronLoop | None = None,
    ) -> None:
        self._state = state
        self._engine = engine
        self._groups = groups
        self._scale = scale
        self._make_context = make_context
        self.loader_config = loaders
        self.seed = seed
        self._rng_types = rng_types
        self._schedule_steps = schedule_steps
        self.megatron = megatron
        self.run_group: RunGroup | None = None
        self.models: list[nn.Module] = []
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.dataloaders: list[AcceleratedLoader] = []

    def __getstate__(self) -> dict[str, Any]:
        # Without the cached properties: another process has other ids, and `rank_options` holds connections.
        return {name: value for name, value in vars(self).items() if name not in ("_known", "rank_options")}

    @functools.cached_property
    def _known(self) -> WeakValueDictionary[int, Any]:
        """The prepared objects by the id of the user's object, which may not be hashable or weakly referenceable.

        It is created at its first use, because the lists are empty or incomplete while an Accelerator is unpickled.
        """
        known: WeakValueDictionary[int, Any] = WeakValueDictionary()
        for prepared in (*self.models, *self.optimizers, *self.schedulers, *self.dataloaders):
            original = original_of(prepared)
            if original is None:  # a model that the loop calls as it is
                original = prepared
            known[id(original)] = prepared
        return known

    def __bool__(self) -> bool:
        """Return whether an object has been prepared and still exists."""
        return bool(self._known)

    @functools.cached_property
    def rank_options(self) -> LoaderOptions:
        """Settings that are the same for all loaders.

        The first use is collective: it sets the seed of all processes, taking torch's if none was set.
        """
        ranks = self._engine.data_ranks
        seed = torch.initial_seed() if self.seed is None else self.seed
        self.seed = self._state.joined().broadcast_object(seed)
        return LoaderOptions(
            rank=ranks.reader,
            world=ranks.num_readers,
            seed=self.seed,
            agree=ranks.gather_of_readers if ranks.num_readers > 1 else None,
            name="the loader",
        )

    def use_seed(self, seed: int) -> None:
        """Give all loaders, also later ones, the order of another seed, from their next pass on. Not collective."""
        self.seed = seed
        if "rank_options" in vars(self):
            self.rank_options = replace(self.rank_options, seed=seed)
        for loader in self.dataloaders:
            loader.prepared.use(replace(loader.prepared.options, seed=seed))

    def _loader_options(self, loader: object) -> LoaderOptions:
        """Return the settings for dividing a loader over ranks, with the present options of loaders."""
        options = replace(self.rank_options, split_batches=self.loader_config.split_batches)
        return divided_options(options, loader, self.loader_config.even_batches)

    def release(self) -> None:
        """End the workers of loaders. Afterwards, a process can train the user's models directly and alone."""
        for loader in self.dataloaders:
            loader.prepared.close()
        for model in self.models:
            if isinstance(model, AcceleratedModel):
                model.release()

    def prepare(self, values: Sequence[object], placements: Sequence[bool], *, steps_with_optimizer: bool) -> list[Any]:
        """Prepare models, optimizers, schedulers and data loaders. Return other objects unchanged.

        `values` may have any order. `placements` contains True for each value that is moved to the device. With
        `steps_with_optimizer=False`, every call of a scheduler's `step` advances the scheduler. Collective.
        """
        results = list(values)
        megatron_parts = itertools.count()
        for i, (value, placed) in enumerate(zip(values, placements, strict=True)):
            if isinstance(value, SkippedStart) and self._original(value) is value.loader:
                continue  # the result of `skip_first_batches` on a loader of this Accelerator
            if isinstance(value, (DataLoader, CombinedLoader, AcceleratedLoader, SkippedStart)):
                results[i] = self.loader(value, placed=placed)
            elif isinstance(value, MegatronLMDummyDataLoader):
                loader = value.loader(next(megatron_parts))
                results[i] = None if loader is None else _without_end(self.loader(loader, placed=placed))
            elif isinstance(value, Optimizer):
                results[i] = self._wrapped_optimizer(value)
        # The models after the loaders and optimizers: the engine prepares models and all optimizers together, and reads
        # the batch size of the first loader. The schedules after the models: the engine completes DummySchedulers.
        models = {i: value for i, value in enumerate(values) if isinstance(value, nn.Module)}
        schedules = [value for value in values if is_scheduler(value)]
        prepared_models = self.prepare_models(models.values(), [placements[i] for i in models], schedules=schedules)
        for i, model in zip(models, prepared_models, strict=True):
            results[i] = model
        for i, value in enumerate(results):
            if isinstance(value, AcceleratedScheduler) or is_scheduler(value):
                results[i] = self.scheduler(value, steps_with_optimizer=steps_with_optimizer)
        if models:
            _warn_of_other_parameters(results, self.models, self.optimizers)
        return results

    def prepare_models(
        self,
        models: Iterable[nn.Module],
        placements: Sequence[bool],
        *,
        schedules: Sequence[Any] = (),
        evaluation_mode: bool = False,
    ) -> list[nn.Module]:
        """Return the module that the loop calls instead of each model; see `Accelerator.prepare_model`."""
        results: list[nn.Module] = []
        new: list[_NewModel] = []
        for i, (model, placed) in enumerate(zip(models, placements, strict=True)):
            original = self._original(model)
            results.append(original)
            if original is model and isinstance(model, AcceleratedModel):
                continue  # a result of this Accelerator
            if id(original) in self._known:
                results[i] = self._known[id(original)]
            elif any(is_sharded(parameter) for parameter in original.parameters()):
                raise ConfigurationError(
                    f"{type(original).__name__} was sharded by another Accelerator. Prepare and train it with that "
                    "one, or create the model again."
                )
            elif isinstance(model, AcceleratedModel) and model.prepared.call is not original:
                # Another Accelerator has joined the processes for this model, which is done once.
                model.release()
                results[i] = self._once(original, self.models, partial(self._wrapped_model, original, model.prepared))
            else:
                is_dispatched = self._check_placement(original, placed, evaluation_mode)
                new.append(_NewModel(i, original, moves=placed and not is_dispatched))
        for_engine = [one for one in new if one.moves and not evaluation_mode]
        trained = [one.model for one in for_engine]
        if trained:
            if self._state.num_processes > 1:
                self._compare(trained)
            self._engine.precision.convert(trained, self._engine.device, self._engine.conversions)
        # Also without new models: the engine then prepares the optimizers and completes the schedules.
        models_of_engine = self._prepare_by_engine(trained, schedules).models
        by_index = {one.index: prepared for one, prepared in zip(for_engine, models_of_engine, strict=True)}
        for one in new:
            if one.index in by_index:
                prepared = by_index[one.index]
            elif one.moves:  # in evaluation mode
                prepared = PreparedModel.unchanged(move_module(one.model, self._state.device))
            else:  # the user or a device map has placed it
                prepared = PreparedModel.unchanged(one.model)
            self.run_group = self.run_group or prepared.run_group
            results[one.index] = self._once(one.model, self.models, partial(self._wrapped_model, one.model, prepared))
        return results

    def _prepare_by_engine(self, models: Sequence[nn.Module], schedules: Sequence[Any] = ()) -> Prepared:
        """Let the engine prepare new models, and all optimizers so far. Collective."""
        configs = [SchedulerConfig(schedule, interval="step") for schedule in schedules]
        # The first loader is the training data.
        train_batch_size = self.dataloaders[0].prepared.batch_size if self.dataloaders else None
        plan = LoopPlan(configs, self._groups.num_steps, train_batch_size)
        prepared = self._engine.prepare(models, [optimizer.given for optimizer in self.optimizers], plan)
        for optimizer, stepped in zip(self.optimizers, prepared.optimizers, strict=True):
            optimizer.optimizer = stepped
            if self.megatron is not None:
                self.megatron.clip(stepped)
        return prepared

    def _compare(self, models: Sequence[nn.Module]) -> None:
        """Raise an error on every rank if the ranks prepare different models. Collective."""
        processes = self._state.joined()
        descriptions = []
        for model in models:
            facts = [
                _ParameterFacts(name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad)
                for name, parameter in model.named_parameters()
            ]
            descriptions.append(facts)
        if same_on_all_ranks(processes, ("prepare", descriptions)):
            return
        of_ranks = processes.gather_object(descriptions)
        rank = next(rank for rank, of_rank in enumerate(of_ranks) if of_rank != of_ranks[0])
        parameters_of_rank_0 = itertools.chain.from_iterable(of_ranks[0])
        parameters_of_rank = itertools.chain.from_iterable(of_ranks[rank])
        first_difference: tuple[_ParameterFacts | None, _ParameterFacts | None] = (None, None)
        for pair in itertools.zip_longest(parameters_of_rank_0, parameters_of_rank):
            if pair[0] != pair[1]:
                first_difference = pair
                break
        on_rank_0 = _text(first_difference[0])
        on_rank = _text(first_difference[1])
        raise ConfigurationError(
            f"ranks prepare different models: parameter {on_rank_0} on rank 0, and {on_rank} on rank {rank}. "
            "Create the same models on every rank, and pass them to prepare() in the same order."
        )

    def _check_placement(self, model: nn.Module, placed: bool, evaluation_mode: bool) -> bool:
        """Return whether `dispatch_model` has placed the model over several devices.

        Raises:
            ConfigurationError: Several processes would train such a model, or one that is not on the process's device.
        """
        is_dispatched = len(set(getattr(model, "hf_device_map", {}).values())) > 1
        is_trained_by_several = self._state.num_processes > 1 and not evaluation_mode
        if is_trained_by_several and (is_dispatched or not placed):
            raise ConfigurationError(
                "with several processes, each process trains the full model on one device, so a device map over "
                "several devices and device_placement=False are not supported. Start one process, or pass "
                "evaluation_mode=True to prepare_model if the model is not trained."
            )
        return is_dispatched

    def _wrapped_model(self, model: nn.Module, prepared: PreparedModel) -> nn.Module:
        """Return the wrapper of a model. Return the model if calls of it need no wrapper."""
        call = self._engine.compile_model(model, prepared.call)
        if self.megatron is not None:
            call = partial(self.megatron.run, model, call)
        if call is model and self._make_context is None:
            model._is_accelerate_prepared = True  # type: ignore[assignment]  # as `AcceleratedModel` has it
            return model
        return AcceleratedModel(
            model, prepared, call, self._make_context, self._engine.explain_error, self._engine.no_sync
        )

    def inner_of(self, model: object) -> Any:
        """Return the engine's wrapper of a prepared model, or the optimizer that a prepared optimizer steps.

        `model` may be the user's object, too. Other objects are returned unchanged.
        """
        prepared = self._known.get(id(model), model)
        if isinstance(prepared, AcceleratedOptimizer):
            return prepared.optimizer
        if isinstance(prepared, AcceleratedModel):
            return prepared.prepared.call
        return model

    def optimizer(self, optimizer: Optimizer) -> AcceleratedOptimizer:
        """Prepare an optimizer; see `Accelerator.prepare_optimizer`."""
        wrapped = self._wrapped_optimizer(optimizer)
        self._prepare_by_engine([])
        return wrapped

    def _wrapped_optimizer(self, optimizer: Optimizer) -> AcceleratedOptimizer:
        original = self._original(optimizer)
        if isinstance(original, AcceleratedOptimizer):
            return original

        def make() -> AcceleratedOptimizer:
            return AcceleratedOptimizer(original, scaler=self._scale, groups=self._groups)

        return self._once(original, self.optimizers, make)

    def scheduler(self, scheduler: object, *, steps_with_optimizer: bool) -> AcceleratedScheduler:
        """Prepare a schedule, which advances with its optimizer's steps or with each call of `step`."""
        original = self._original(scheduler)
        if isinstance(original, AcceleratedScheduler):
            return original

        def make() -> AcceleratedScheduler:
            scheduled = getattr(original, "optimizer", None)  # the user may have passed a prepared optimizer
            own_optimizers = [one for one in self.optimizers if scheduled in (one, one.optimizer)]
            # A schedule of an optimizer that is not prepared advances with all prepared ones.
            optimizers = own_optimizers or self.optimizers
            if self.megatron is not None and isinstance(original, MegatronLMDummyScheduler):
                per_process = self._schedule_steps == "per_process"
                self.megatron.schedule(original, optimizers[0].optimizer, per_process=per_process)
            num_advances = 1
            if isinstance(original, LRScheduler) and steps_with_optimizer:
                num_advances = self._advances_per_step()
            return AcceleratedScheduler(
                original,
                optimizers,
                steps_with_optimizer,
                self.loader_config.split_batches,
                groups=self._groups,
                further=num_advances - 1,
            )

        return self._once(original, self.schedulers, make)

    def _advances_per_step(self) -> int:
        """Return the number of advances of a schedule per optimizer step. Warn if it is not that of Accelerate."""
        in_accelerate = 1 if self.loader_config.split_batches else self._state.num_processes
        is_first = self._state.is_main_process and not self.schedulers  # one warning is enough
        if in_accelerate > 1 and self._schedule_steps is None and is_first:
            warnings.warn(
                f"a schedule advances once per optimizer step here, and {in_accelerate} times in Accelerate, once for "
                "each process. A schedule whose length was multiplied by the number of processes, or counted before "
                "prepare() divided the loader, needs Accelerator(schedule_steps='per_process'). To keep one advance "
                "per step and silence this warning, pass schedule_steps='once'.",
                TrainwrightWarning,
                stacklevel=5,
            )
        return in_accelerate if self._schedule_steps == "per_process" else 1

    def loader(self, loader: object, *, placed: bool, slice_fn: Callable[..., Any] | None = None) -> AcceleratedLoader:
        """Return a loader of this process's part of the data; see `prepare_loader` and `DispatchedLoader`."""
        original = self._original(loader)
        if isinstance(original, AcceleratedLoader):
            return original

        def make() -> AcceleratedLoader:
            options = self._loader_options(original)
            # `raw` is the loader that is read: `original`, or a copy of it with other batch sizes or data.
            raw = original if self.megatron is None else self.megatron.enlarge(original)
            if self._is_read_by_every_process(original):
                raw = copy_loader(raw, dataset=ShardedIterable(raw.dataset))
            if self._dispatches(original):
                prepared: PreparedLoader = DispatchedLoader(raw, options, self._state.joined(), slice_fn)
            else:
                prepared = prepare_loader(raw, options)
            continues = self.loader_config.use_stateful_dataloader
            loader_class = stateful_loader_class() if continues else AcceleratedLoader
            return loader_class(
                original,
                prepared,
                self._groups,
                mover=self._engine.batch_mover() if placed else None,
                rng_types=self._rng_types,
                continues=continues,
                models=self.models,
            )

        return self._once(original, self.dataloaders, make)

    def _dispatches(self, loader: object) -> bool:
        """Return whether only the first process reads a loader."""
        if self._state.num_processes == 1 or self.loader_config.dispatch_batches is False:
            return False
        return self.loader_config.dispatch_batches or _is_undivided(loader)

    def _is_read_by_every_process(self, loader: object) -> bool:
        """Return whether every process reads a whole iterable data set and keeps only its own batches."""
        if self._state.num_processes == 1 or self.loader_config.dispatch_batches is not False:
            return False
        return _is_undivided(loader)

    def _once(self, original: object, results: list[T], make: Callable[[], T]) -> T:
        """Return the earlier result for an object. Without an earlier result, create one and append it to `results`."""
        if id(original) not in self._known:  # a result keeps its object alive, so that no other object has its id
            result = make()
            self._known[id(original)] = result
            results.append(result)
        return cast(T, self._known[id(original)])

    def _original(self, value: object) -> Any:
        """Return the user's object for an object that another Accelerator prepared, or that `free_memory` released.

        Other objects, including the results of this Accelerator, are returned unchanged.
        """
        if isinstance(value, SkippedStart):
            value = value.loader
        original = original_of(value)
        is_ours = self._known.get(id(original)) is value
        return value if original is None or is_ours else original


def _is_undivided(loader: object) -> bool:
    """Return whether a loader reads an iterable data set that does not declare how it is divided over processes."""
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
        return False
    return not is_divided(loader.dataset)


def _text(parameter: _ParameterFacts | None) -> str:
    """Describe a parameter for an error. None stands for a missing parameter."""
    if parameter is None:
        return "nothing"
    frozen = "" if parameter.is_trained else ", frozen"
    return f"{parameter.name!r} ({'×'.join(map(str, parameter.shape))}, {parameter.dtype}{frozen})"


def original_of(value: object) -> Any:
    """Return the user's object from which an object was prepared, or None for an object that is not prepared."""
    if isinstance(value, AcceleratedModel):
        return value.module
    if isinstance(value, AcceleratedOptimizer):
        return value.given
    if isinstance(value, AcceleratedScheduler):
        return value.scheduler
    if isinstance(value, AcceleratedLoader):
        return value.given
    return None


def _without_end(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of one epoch after the other."""
    while True:
        yield from loader


def _warn_of_other_parameters(
    prepared: Sequence[object], models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> None:
    """Warn of each optimizer without a parameter of a prepared model, if a prepared model has no optimizer.

    Args:
        prepared: The results of this call of `prepare`, whose optimizers are checked.
        models, optimizers: All prepared models and optimizers.
    """
    in_optimizers = set(parameters_of(optimizers))
    in_models: set[torch.Tensor] = set()
    a_model_has_no_optimizer = False
    for model in models:
        trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
        in_models.update(trained)
        if trained and in_optimizers.isdisjoint(trained):
            a_model_has_no_optimizer = True
    if not a_model_has_no_optimizer:
        return
    for one in prepared:
        if not isinstance(one, AcceleratedOptimizer):
            continue
        if one.optimizer is not one.given:  # the engine has replaced it by one with the models' parameters
            continue
        if in_models.isdisjoint(parameters_of([one])):
            warnings.warn(
                f"{type(one.optimizer).__name__} holds no parameter of a prepared model: its steps do not change the "
                "models. Create it from the parameters of the model that is passed to prepare().",
                TrainwrightWarning,
                stacklevel=3,
            )
