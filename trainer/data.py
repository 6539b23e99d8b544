"""The data of a stage: sources, training data and evaluation data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainwright.core.errors import ConfigurationError, TaskError, TrainwrightWarning
from trainwright.core.hooks import TaskHooks
from trainwright.core.names.foreign_names import check_owner
from trainwright.core.signatures import overrides
from trainwright.core.state import Group, TrainState
from trainwright.core.task import TaskModule
from trainwright.data.combined import CombinedLoader, leaves_of, members_of
from trainwright.data.datamodule import DataModule
from trainwright.data.groups import iterate_groups, resolve_limit
from trainwright.data.loader import holds_loaders, prepare_loader
from trainwright.data.loader_options import LOADER_METHODS, LoaderOptions
from trainwright.data.workers import Workers
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.engine import Engine
from trainwright.trainer.configuration.arguments import TrainerArguments
from trainwright.trainer.configuration.checks import has_step
from trainwright.trainer.configuration.settings import Settings
from trainwright.trainer.run_state import RunProgress

EvaluationKind = Literal["validate", "test", "predict"]

# Kind of loaders → argument of the Trainer that limits their batches, for messages.
_LIMITS = {
    "train": "limit_train_batches",
    "validate": "limit_val_batches",
    "test": "limit_test_batches",
    "predict": "limit_predict_batches",
}


@dataclass
class Sources:
    """Data sources of a stage. The task's `*_dataloader` methods are used if neither source has a loader.

    Attributes:
        loaders: loaders passed to the Trainer's method, by kind: `"train"`, `"validate"`, `"test"` or `"predict"`.
        datamodule: the data module, or None.
    """

    loaders: dict[str, Any]
    datamodule: DataModule | None = None

    @classmethod
    def of(cls, stage: str, datamodule: object, **loaders: object) -> Sources:
        """Return the sources for the arguments of a stage. A data module may also be passed as a loader.

        Args:
            stage: name of the Trainer's method, for messages.
            datamodule: the argument of this name, or None.
            **loaders: the arguments with loaders by their kinds, such as `train=…, validate=None`.

        Raises:
            ConfigurationError: both loaders and a data module were passed, or one of them has a wrong type.
        """
        passed: dict[str, Any] = {}
        for kind, loader in loaders.items():
            if isinstance(loader, DataModule) and datamodule is None:
                datamodule = loader
            elif loader is not None:
                passed[kind] = loader
        for loader in passed.values():
            check_owner(loader)
            if isinstance(loader, TaskModule):
                raise ConfigurationError(
                    f"{stage}() received a task where a loader was expected. Pass the task as the first argument."
                )
        if datamodule is not None:
            if passed:
                raise ConfigurationError(f"{stage}() received both a data module and loaders. Pass only one of them.")
            if not isinstance(datamodule, DataModule):
                check_owner(datamodule)
                raise ConfigurationError(
                    f"datamodule is a {type(datamodule).__name__}, not a trainwright.DataModule. Sub-class DataModule."
                )
        return cls(passed, datamodule)

    def has(self, kind: str, task: TaskModule) -> bool:
        """Return whether a loader of this kind is available, without creating it."""
        method = LOADER_METHODS[kind]
        if kind in self.loaders:
            return True
        if self.datamodule is not None and overrides(self.datamodule, method, DataModule):
            return True
        return overrides(task, method, TaskHooks)

    def make(self, kind: str, task: TaskModule) -> Any:
        """Return the user's loader(s) of this kind. May call a `*_dataloader` method, which creates a new loader.

        Raises:
            ConfigurationError: no source has such a loader, or a `*_dataloader` method returned None.
        """
        method = LOADER_METHODS[kind]
        if kind in self.loaders:
            return self.loaders[kind]
        for owner, base in ((self.datamodule, DataModule), (task, TaskHooks)):
            if owner is not None and overrides(owner, method, base):
                loader = getattr(owner, method)()
                if loader is None:
                    raise ConfigurationError(f"{type(owner).__name__}.{method} returned None. Return a loader.")
                return loader
        raise ConfigurationError(
            f"no {kind} data: pass {_argument(kind, kind)}=… or a data module, or define {method} in "
            f"{type(task).__name__}."
        )

    def check_lengths(self, stage: str) -> None:
        """Check that the loaders passed to the Trainer are not empty.

        Raises:
            ConfigurationError: a loader has length 0.
        """
        for kind, loader in self.loaders.items():
            _refuse_empty(loader, _argument(stage, kind))


def loader_options(
    arguments: TrainerArguments, engine: Engine, seed: int, workers: Workers, *, evaluates: bool
) -> LoaderOptions:
    """Return the options that prepare a run's loaders on this rank, for training or for evaluations."""

    def current_ranks() -> DataRanks:  # at each call, because a final save may replace them (`Engine.reunited`)
        return engine.evaluation_ranks if evaluates else engine.data_ranks

    ranks = current_ranks()

    def gather_numbers(values: list[int]) -> list[list[int]]:
        return current_ranks().gather_of_readers(values)

    def gather_batches(batch: Any) -> list[Any]:
        batches = current_ranks().gather(batch)
        # The `parts` ranks that split one sequence are consecutive and have the same batch. Keep one of each.
        return batches[:: ranks.parts]

    # `reader` and `num_readers` count the ranks that read different data.
    return LoaderOptions(
        rank=ranks.reader,
        world=ranks.num_readers,
        seed=seed,
        use_distributed_sampler=arguments.use_distributed_sampler,
        uneven=arguments.uneven_batches,
        lockstep_evaluation=engine.capabilities.lockstep_evaluation,
        agree=gather_numbers if ranks.num_readers > 1 else None,
        lend=gather_batches,
        per_sample_rng=arguments.per_sample_rng,
        workers=workers,
    )


class TrainData:
    """The training data of a run. Iterates over groups, from any position in an epoch.

    A group is the micro-batches of one optimizer step. Call `begin_epoch` before `groups`.

    Args:
        loader: the user's loader, or a list or dict of loaders to combine.
        options: loader options of the run.
        limit: `limit_train_batches`; None for all batches.
        overfit: `overfit_batches`: number or fraction of batches to use without shuffling, instead of `limit`. 0 keeps
            `limit` and the shuffling.

    Attributes:
        user_loaders: the loader, or the list or dict of loaders, that the user has passed or a method has returned.
        loader: the prepared loader of this rank.
        num_batches: micro-batches of an epoch on this rank, after the limit. Set by `begin_epoch`; None if unknown, and
            before the first call.

    Raises:
        ConfigurationError: `loader` cannot be prepared.
    """

    def __init__(
        self, loader: object, options: LoaderOptions, *, limit: int | float | None, overfit: int | float
    ) -> None:
        self.user_loaders = loader
        if holds_loaders(loader):  # each batch has one of every loader; shorter loaders start again
            loader = CombinedLoader(loader, mode="max_size_cycle")
        self._limit = limit
        self._limit_name = _LIMITS["train"]
        if overfit:
            options = _in_order(loader, options, overfit)
            self._limit = overfit
            self._limit_name = "overfit_batches"
        self.loader = prepare_loader(loader, options)
        self.num_batches: int | None = None

    def begin_epoch(self, epoch: int, resume: Mapping[str, int] | None = None) -> None:
        """Begin an epoch. Collective if ranks have their own loaders.

        Args:
            epoch: 0-based index of the epoch.
            resume: the `position` of a `state_dict` to continue from. Default: None, the first batch.
        """
        self.loader.end_pass()
        self.loader.set_epoch(epoch, resume)
        self.num_batches = resolve_limit(self._limit, self.loader.num_batches, self._limit_name)

    def groups(self, state: TrainState, accumulate: int) -> Iterator[Group]:
        """Return the groups of the current epoch from `state.batch_in_epoch`, with `accumulate` micro-batches each."""
        return iterate_groups(
            self.loader, accumulate=accumulate, limit=self.num_batches, start_batch=state.batch_in_epoch
        )

    def state_dict(self, state: TrainState) -> dict[str, Any]:
        """Return the position in the data, serializable as JSON and the same on every rank.

        For example `{"position": {"batch": 3, "samples": 24}, "epoch": 1, "order": {"samples": 100, "shuffle": True}}`.
        `order` has the values that the position depends on (see `PreparedLoader.facts`), and is omitted without such
        values.
        """
        place: dict[str, Any] = {"position": self.loader.position(state.batch_in_epoch), "epoch": state.epoch}
        facts = self.loader.facts()
        if facts:
            place["order"] = facts
        return place

    def keep_state(self) -> None:
        """Store the state of a stateful loader, so that `loader.state_dict` returns it after `close`."""
        self.loader.freeze_state()

    def close(self) -> None:
        """End the loader's workers."""
        self.loader.close()

    def check_resume(self, place: Mapping[str, Any], num_ranks: int) -> None:
        """Check that training can continue from a checkpoint's position in the data, before anything is loaded.

        Warns if the rest of the epoch has another order, or if a stateful loader starts from scratch.

        Args:
            place: see `load_place`.
            num_ranks: number of ranks that read different data in this run.

        Raises:
            ConfigurationError: training cannot continue from that position.
        """
        name = self.loader.options.title
        states = place.get("loaders") or []  # of a stateful loader: one for each rank that read different data
        position = place["position"]  # None at the start of an epoch
        saved_order = place.get("order")
        order = self.loader.facts()
        is_mid_epoch = position is not None and position["batch"] > 0
        if is_mid_epoch and saved_order is not None and saved_order != order:
            warnings.warn(
                f"{name} has {_listed(order)}, but the checkpoint was written in the middle of an epoch with "
                f"{_listed(saved_order)}. The rest of the epoch has a different order, so some samples are repeated "
                "and others are missing. Resume with the same data and sampler, or from a checkpoint at the end of an "
                "epoch.",
                TrainwrightWarning,
                stacklevel=2,
            )
        states_fit = not states or len(states) == num_ranks
        if not self.loader.stateful or states_fit:
            first_batch = 0 if position is None else position["batch"]
            self.loader.check_resume(first_batch, has_state=bool(states))
        elif position is not None:
            raise ConfigurationError(
                f"{name} is stateful, so the checkpoint holds one loader state for each of {len(states)} rank(s), "
                f"which cannot be divided among {num_ranks}. Resume with {len(states)} rank(s) or from a checkpoint "
                "at the end of an epoch, or use a map-style data set, which can be resumed with any number of ranks."
            )
        else:
            warnings.warn(
                f"{name} is stateful, and the loader states of {len(states)} rank(s) cannot be divided among "
                f"{num_ranks}. The next epoch begins with fresh loaders.",
                TrainwrightWarning,
                stacklevel=2,
            )

    def load_place(self, place: Mapping[str, Any], rank: int, num_ranks: int) -> None:
        """Restore the state of this rank's stateful loader. Call `check_resume` first.

        Does nothing if the loader is not stateful, or if the checkpoint has states of another number of ranks.

        Args:
            place: the result of `state_dict`, with the states of all ranks' stateful loaders under `loaders`. Its
                `position` is None at the start of an epoch, where `Loads.resume` has set it to None.
            rank: index of this rank among the ranks that read different data.
            num_ranks: number of ranks that read different data.
        """
        states = place.get("loaders") or []
        if self.loader.stateful and len(states) == num_ranks:
            self.loader.load_state_dict(states[rank], at_epoch_start=place["position"] is None)


class EvaluationData:
    """The loaders of one evaluation and the number of batches to run of each.

    Args:
        loaders: one loader, or a list or dict of loaders.
        kind: `"validate"`, `"test"` or `"predict"`.
        options: loader options of the run's training data, from which those of the evaluation are derived.
        limit: the `limit_*_batches` argument, applied to each loader separately.
        epoch: the epoch of the training.

    Attributes:
        user_loaders: the loaders that the user has passed or a method has returned.
        is_list: True if these are a list or dict of loaders, also if it contains only one.
        loaders: the prepared loaders of this rank.
        limits: batches to run of each loader; None if the length of the loader is unknown. Set by `begin`.
    """

    def __init__(
        self, loaders: object, kind: EvaluationKind, options: LoaderOptions, *, limit: int | float | None, epoch: int
    ) -> None:
        self.user_loaders = loaders
        if isinstance(loaders, CombinedLoader) and loaders.mode == "sequential":  # the same as its list of loaders
            loaders = loaders.iterables
        self.is_list = holds_loaders(loaders)
        items = members_of(loaders) if holds_loaders(loaders) else [loaders]
        self.loaders = [prepare_loader(item, options.evaluating(kind)) for item in items]
        self._limit = limit
        self._limit_name = _LIMITS[kind]
        self.limits: list[int | None] = []
        self.begin(epoch)

    def begin(self, epoch: int) -> None:
        """Begin an evaluation in an epoch of the training, and read the lengths of the data. Collective.

        Call it before each evaluation, because a sampler may depend on the epoch, and callbacks may have changed the
        data and so its length.
        """
        for loader in self.loaders:
            loader.set_epoch(epoch)
        self.limits = [resolve_limit(self._limit, loader.num_batches, self._limit_name) for loader in self.loaders]

    def close(self) -> None:
        """End the loaders' workers."""
        for loader in self.loaders:
            loader.close()

    @property
    def num_batches(self) -> list[int | float]:
        """Batches to run of each loader on this rank; infinite if unknown."""
        return [float("inf") if limit is None else limit for limit in self.limits]


def _in_order(loader: object, options: LoaderOptions, overfit: int | float) -> LoaderOptions:
    """Return the options that read the data in its order, and warn of a sampler that they ignore."""
    leaves = leaves_of(getattr(loader, "iterables", loader))
    names = [type(leaf.sampler).__name__ for leaf in leaves if hasattr(leaf, "sampler")]
    # torch gives a DataLoader of an iterable data set an _InfiniteConstantSampler, which has no order to ignore.
    ignored = [name for name in names if name not in ("SequentialSampler", "_InfiniteConstantSampler")]
    if ignored and options.rank == 0:
        warnings.warn(
            f"overfit_batches={overfit!r} reads the same batches in every epoch, so {options.title}'s shuffle=True or "
            f"sampler ({ignored[0]}) is ignored. Set shuffle=False to silence this warning.",
            TrainwrightWarning,
            stacklevel=2,
        )
    return replace(options, shuffle=False)


def _listed(facts: Mapping[str, Any]) -> str:
    """Return the description of an order as text, such as `samples=100, shuffle=True`."""
    return ", ".join(f"{key}={value}" for key, value in facts.items()) or "an unknown order"


def _argument(stage: str, kind: str) -> str:
    """Return the name of the Trainer method's argument for loaders of this kind."""
    if kind == "train":
        return "train_dataloaders"
    return "val_dataloaders" if stage == "fit" else "dataloaders"


def _refuse_empty(loader: object, name: str) -> None:
    """Raise an error if a loader, or one in a container of loaders, has length 0. `name` is that of the argument."""
    if isinstance(loader, CombinedLoader):
        loader = loader.flattened
    if not isinstance(loader, Sized):
        return
    try:
        length = len(loader)
    except TypeError:  # a DataLoader of an iterable data set without a length
        return
    if length == 0:
        raise ConfigurationError(
            f"{name}: the {type(loader).__name__} is empty. Check the data set, batch_size and drop_last."
        )
    if holds_loaders(loader):
        for member in members_of(loader):
            _refuse_empty(member, name)


class StageData:
    """The data of a stage, created at first use.

    Args:
        sources: data sources.
        task: the task. Its `*_dataloader` methods are used if `sources` has no loader. None for stages without data.
        engine: provides the data ranks.
        settings: provides the batch limits.
        progress: provides the seed and the training progress.

    Attributes:
        sources, datamodule: the data sources, and their data module or None.
        workers: the loader workers of the stage.
        train_data: the training data. `train` creates it; None before that and after `forget`.
        evaluations: the evaluation data by kind. `evaluation` creates an entry.
        shown: the user's loaders, by kind, that the Trainer's attributes return and no stage reads. `show` adds them
            after a search.
        on_created: called with training and evaluation data after its creation. Set by the profiler. Default: None.
        place: the position in the training data from a checkpoint (see `TrainData.state_dict`). `load_state_dict` sets
            it, and `enter_saved_position` clears it at the start of the next epoch. Its `position` is None if that
            epoch begins at its first batch.
    """

    def __init__(
        self, sources: Sources, task: TaskModule | None, engine: Engine, settings: Settings, progress: RunProgress
    ) -> None:
        self.sources = sources
        self.datamodule = sources.datamodule
        self._given_task = task
        self._engine = engine
        self._settings = settings
        self._progress = progress
        self.workers = Workers()
        self.train_data: TrainData | None = None
        self.evaluations: dict[str, EvaluationData] = {}
        self.shown: dict[str, Any] = {}
        self.place: dict[str, Any] | None = None
        self._created_in: dict[str, int] = {}  # kind of the loaders → epoch in which the user's method created them
        self.on_created: Callable[[TrainData | EvaluationData], None] | None = None

    def _options(self, *, evaluates: bool) -> LoaderOptions:
        seed = self._progress.seed
        assert seed is not None  # set by `StageRun.join`
        return loader_options(self._settings.arguments, self._engine, seed, self.workers, evaluates=evaluates)

    def _make_loaders(self, kind: str) -> Any:
        """Return the user's loaders, created with the `current_epoch` of the uninterrupted run.

        After a resume, this is the epoch in which the interrupted run created them, unless a reload was due since.
        """
        state = self._progress.state
        current_epoch = state.epoch
        epoch = self._created_in.get(kind, current_epoch)
        # Example with reload_dataloaders_every_n_epochs=2, where reloads are due in epochs 2 and 4:
        # - A resume in the middle of epoch 5: the run has created its loaders in epoch 4, and they are created as in
        #   epoch 4 again.
        # - A resume from the end of epoch 3, which begins epoch 4: the run has created its loaders in epoch 2, but the
        #   next reload is due now. They are created as in epoch 4.
        reload_every = self._settings.arguments.reload_dataloaders_every_n_epochs
        last_reload = 0
        if reload_every > 0:
            last_reload = current_epoch - current_epoch % reload_every
        if epoch < last_reload:
            epoch = current_epoch
        self._created_in[kind] = epoch
        state.epoch = epoch  # the user's method may read it
        try:
            return self.sources.make(kind, self._task)
        finally:
            state.epoch = current_epoch

    @property
    def _task(self) -> TaskModule:
        if self._given_task is None:  # an attribute of the Trainer was read
            raise TaskError("this Trainer has no task yet. Pass one to trainer.fit(task, …) or trainer.test(task, …).")
        return self._given_task

    def train(self) -> TrainData:
        """Return the training data. The first call creates it, as does the first call after `forget`.

        After `load_state_dict`, it begins at the position from the checkpoint. Creating it is collective if ranks have
        their own loaders.

        Raises:
            ConfigurationError: there is no training data, or training cannot continue from that position.
        """
        if self.train_data is None:
            self.train_data = TrainData(
                self._make_loaders("train"),
                self._options(evaluates=False),
                limit=self._settings.limit_batches["train"],
                overfit=self._settings.arguments.overfit_batches,
            )
            if self.on_created is not None:
                self.on_created(self.train_data)
            position = None
            if self.place is not None:
                self.train_data.check_resume(self.place, self._engine.data_ranks.num_readers)
                position = self.place["position"]
            self.train_data.begin_epoch(self._progress.state.epoch, position)
        return self.train_data

    def evaluation(self, kind: EvaluationKind) -> EvaluationData:
        """Return the data of `"validate"`, `"test"` or `"predict"`. The first call creates it, and is collective."""
        data = self.evaluations.get(kind)
        if data is None:
            loaders = self._make_loaders(kind)
            limit = self._settings.limit_batches[kind]
            options = self._options(evaluates=True)
            overfit = self._settings.arguments.overfit_batches
            if kind == "validate" and overfit:
                options = _in_order(loaders, options.evaluating(kind), overfit)
            data = EvaluationData(loaders, kind, options, limit=limit, epoch=self._progress.state.epoch)
            self.evaluations[kind] = data
            if self.on_created is not None:
                self.on_created(data)
        return data

    @property
    def has_validation(self) -> bool:
        """True if `fit` validates: the task has a validation_step and a loader, and the limit is above 0."""
        limit = self._settings.limit_batches["validate"]
        if limit is not None and limit <= 0:
            return False
        return has_step(self._task, "validation_step") and self.sources.has("validate", self._task)

    def user_loaders(self, kind: str) -> Any:
        """Return the user's loaders of this kind for the Trainer's attributes; None before they are created."""
        data = self.train_data if kind == "train" else self.evaluations.get(kind)
        if data is None:
            return self.shown.get(kind)
        return data.user_loaders

    def show(self, kind: str) -> None:
        """Create the user's loaders of this kind only for the Trainer's attributes, after a search."""
        self.shown[kind] = self.sources.make(kind, self._task)

    def forget(self) -> None:
        """Discard the loaders. The next use creates new ones."""
        self.train_data = None
        self.evaluations.clear()
        self._created_in.clear()

    def enter_saved_position(self) -> Mapping[str, int] | None:
        """Set the training data to the position from a checkpoint, and clear that position.

        Restores the state of a stateful loader and `state.batch_in_epoch`. Returns the position for
        `TrainData.begin_epoch`. None means the start of an epoch.
        """
        place = self.place
        data = self.train()
        self.place = None
        if place is None:
            return None
        data.load_place(place, self._engine.data_ranks.reader, self._engine.data_ranks.num_readers)
        position: Mapping[str, int] | None = place["position"]
        if position is not None:
            self._progress.state.batch_in_epoch = position["batch"]
        return position

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training data for a checkpoint. It is the same on every rank.

        Empty before the training data is created. The keys are those of `TrainData.state_dict` and `made_in`, the epoch
        in which the user's method has created the loaders of each kind, such as `{"train": 0, "validate": 2}`.
        """
        if self.train_data is None:
            return {}
        return {**self.train_data.state_dict(self._progress.state), "made_in": dict(self._created_in)}

    def loader_state(self) -> dict[str, Any] | None:
        """Return the state of this rank's training loader; None if it is not stateful."""
        if self.train_data is None or not self.train_data.loader.stateful:
            return None
        return self.train_data.loader.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the result of `state_dict`. The next epoch starts there, or at its first batch if `saved` is empty."""
        self.train_data = None  # the next use creates it with the seed of the restored run
        self.place = dict(saved) or None  # a copy, because `Loads.resume` changes it
        self._created_in = dict(saved.get("made_in", {}))  # an older checkpoint has none

    def close(self, *, keep_state: bool) -> None:
        """End the loader workers, which a traceback or the Trainer could otherwise keep alive by a reference.

        Args:
            keep_state: store the state of a stateful loader first, so that a save after the stage can read it.
        """
        if self.train_data is not None and keep_state:
            self.train_data.keep_state()
        self.workers.close()
        if self.train_data is not None:
            self.train_data.close()
        for data in self.evaluations.values():
            data.close()


def incomplete_validation(sources: Sources, task: TaskModule, limit: int | float | None) -> str | None:
    """Return a warning if a fit has a validation_step without data or data without a validation_step, else None.

    Args:
        sources: data sources of the fit.
        task: the task of the fit.
        limit: `limit_val_batches`; 0 disables validation.
    """
    has_validation_step = has_step(task, "validation_step")
    has_data = sources.has("validate", task)
    name = type(task).__name__
    if has_validation_step == has_data or limit == 0:
        return None
    if has_data:
        lacks = f"{name} has no validation_step. Define validation_step(self, batch, batch_idx)"
    else:
        lacks = f"there is no data for {name}.validation_step. Pass val_dataloaders"
    return f"this fit does not validate: {lacks}, or set limit_val_batches=0 to disable validation."
