"""What a stage reads: where its loaders come from, the prepared data of training and of evaluation, and all of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.hooks import TaskHooks
from trainwright.core.names.foreign_names import check_owner
from trainwright.core.signatures import overrides
from trainwright.core.state import Group, TrainState
from trainwright.core.task import TaskModule
from trainwright.data import CombinedLoader, DataModule, LoaderOptions, iterate_groups, prepare_loader, resolve_limit
from trainwright.data.combined import leaves_of
from trainwright.data.loader import holds_loaders
from trainwright.data.loader_options import LOADER_METHODS
from trainwright.data.workers import Workers
from trainwright.strategies.engine import Engine
from trainwright.trainer.configuration.arguments import TrainerArguments
from trainwright.trainer.configuration.checks import has_step
from trainwright.trainer.configuration.settings import Settings
from trainwright.trainer.history import History

EvaluationKind = Literal["validate", "test", "predict"]

_LIMITS = {
    "train": "limit_train_batches",
    "validate": "limit_val_batches",
    "test": "limit_test_batches",
    "predict": "limit_predict_batches",
}


@dataclass
class Sources:
    """What a stage was given to read from; the task's own `*_dataloader` methods come last.

    Attributes:
        given: stage → loader(s) handed to the Trainer.
        datamodule: or a data module.
    """

    given: dict[str, Any]
    datamodule: DataModule | None = None

    @classmethod
    def of(cls, stage: str, datamodule: object, **loaders: object) -> Sources:
        """Sort out loaders and a data module; a data module in a loader's place is one too.

        Raises:
            ConfigurationError: both were given, or the data module is none.
        """
        given = {name: loader for name, loader in loaders.items() if loader is not None}
        for name, loader in list(given.items()):
            if isinstance(loader, DataModule):
                datamodule = given.pop(name) if datamodule is None else datamodule
        for loader in given.values():
            check_owner(loader)
            if isinstance(loader, TaskModule):
                raise ConfigurationError(f"{stage}() was given a task in the place of a loader: the task comes first.")
        if datamodule is not None:
            if given:
                raise ConfigurationError(f"{stage}() was given a data module and loaders. Give it one or the other.")
            if not isinstance(datamodule, DataModule):
                check_owner(datamodule)
                raise ConfigurationError(
                    f"datamodule={type(datamodule).__name__} is no trainwright.DataModule. Sub-class DataModule."
                )
        return cls(given, datamodule)

    def has(self, kind: str, task: TaskModule) -> bool:
        """Tell whether there is a loader of this kind, without making it."""
        method = LOADER_METHODS[kind]
        if kind in self.given:
            return True
        if self.datamodule is not None and overrides(self.datamodule, method, DataModule):
            return True
        return overrides(task, method, TaskHooks)

    def make(self, kind: str, task: TaskModule) -> Any:
        """Return the user's loader(s) of this kind.

        Raises:
            ConfigurationError: there is none.
        """
        method = LOADER_METHODS[kind]
        if kind in self.given:
            return self.given[kind]
        for owner, base in ((self.datamodule, DataModule), (task, TaskHooks)):
            if owner is not None and overrides(owner, method, base):
                loader = getattr(owner, method)()
                if loader is None:
                    raise ConfigurationError(f"{type(owner).__name__}.{method} returned None. Return a loader.")
                return loader
        raise ConfigurationError(
            f"no {kind} data: pass {_argument(kind, kind)}=…, a data module, or define {method} in "
            f"{type(task).__name__}."
        )

    def check_lengths(self, stage: str) -> None:
        """Check that no loader that was handed to the Trainer is empty; those that methods return are not made yet.

        Raises:
            ConfigurationError: one is, by its own length.
        """
        for kind, loader in self.given.items():
            _refuse_empty(loader, _argument(stage, kind))


def loader_options(arguments: TrainerArguments, engine: Engine, seed: int, workers: Workers) -> LoaderOptions:
    """Return how a run's loaders are prepared on this rank, those of training first of all."""
    ranks = engine.data_ranks
    return LoaderOptions(
        rank=ranks.reader,
        world=ranks.num_readers,
        seed=seed,
        use_distributed_sampler=arguments.use_distributed_sampler,
        uneven=arguments.uneven_batches,
        lockstep_evaluation=engine.capabilities.lockstep_evaluation,
        agree=(lambda values: engine.data_ranks.gather_of_readers(values)) if ranks.num_readers > 1 else None,
        per_sample_rng=arguments.per_sample_rng,
        workers=workers,
    )


class TrainData:
    """The training data of a run: groups of micro-batches, from any place in an epoch.

    Args:
        loader: the user's loader, or a list or dict of them to be combined.
        options: of the run's training data.
        limit: `limit_train_batches`.
        overfit: only so much of the data, in its own order (`overfit_batches`); 0: all.

    Attributes:
        given: the loader as the user made it.
    """

    def __init__(
        self, loader: object, options: LoaderOptions, *, limit: int | float | None, overfit: int | float
    ) -> None:
        self.given = loader
        if isinstance(loader, (list, tuple, dict)) and holds_loaders(loader):
            loader = CombinedLoader(loader, mode="max_size_cycle")
        if overfit and options.rank == 0:
            _warn_of_shuffling(loader, overfit)
        self.loader = prepare_loader(loader, replace(options, shuffle=False) if overfit else options)
        self._limit, self._name = (overfit, "overfit_batches") if overfit else (limit, _LIMITS["train"])
        self.num_batches: int | None = None

    def begin_epoch(self, epoch: int, resume: Mapping[str, int] | None = None) -> None:
        """Turn to an epoch; `resume` is the place where it was left. Collective when ranks have own loaders."""
        self.loader.end_pass()
        self.loader.set_epoch(epoch, resume)
        self.num_batches = resolve_limit(self._limit, self.loader.num_batches, self._name)

    def groups(self, state: TrainState, accumulate: int) -> Iterator[Group]:
        """Return the groups that are left of the epoch that `begin_epoch` chose."""
        return iterate_groups(
            self.loader, accumulate=accumulate, limit=self.num_batches, start_batch=state.batch_in_epoch
        )

    def state_dict(self, state: TrainState) -> dict[str, Any]:
        """Return the place in the data, JSON-able, the same on every rank."""
        place = {"position": self.loader.position(state.batch_in_epoch), "epoch": state.epoch}
        facts = self.loader.facts()
        return {**place, "order": facts} if facts else place

    def keep_state(self) -> None:
        """Have `loader.state_dict` say where it stands also after `close`."""
        self.loader.freeze_state()

    def close(self) -> None:
        """End the loader's workers."""
        self.loader.close()

    def check_resume(self, place: Mapping[str, Any], num_ranks: int) -> None:
        """Check that training can go on from a checkpoint's place in the data, before anything is fetched.

        Args:
            place: see `load_place`.
            num_ranks: of this run.

        Raises:
            ConfigurationError: it cannot; says what to do.
        """
        name, states = self.loader.options.title, place.get("loaders") or []
        in_epoch = place["position"] is not None
        before, now = place.get("order"), self.loader.facts()
        if in_epoch and before is not None and before != now and place["position"]["batch"]:
            warnings.warn(
                f"{name} has {_listed(now)}, and the checkpoint stands in the middle of an epoch of {_listed(before)}: "
                "what is left of the epoch comes in another order, so that some samples are seen twice in it and "
                "others not at all. Resume with the data and the sampler as they were, or from a checkpoint at an "
                "epoch's end.",
                TrainwrightWarning,
                stacklevel=2,
            )
        if not self.loader.stateful or not states or len(states) == num_ranks:
            self.loader.check_resume(place["position"]["batch"] if in_epoch else 0, has_state=bool(states))
        elif in_epoch:
            raise ConfigurationError(
                f"{name} keeps its own place, so that the checkpoint holds the place of each of {len(states)} rank(s), "
                f"which cannot be divided among {num_ranks}. Resume with {len(states)} rank(s), or from a checkpoint "
                "at an epoch's end, or read a map-style data set: its place is counted in samples, for any number."
            )
        else:
            warnings.warn(
                f"{name} keeps its own state, which {len(states)} rank(s) have left and {num_ranks} cannot take over. "
                "The next epoch begins with fresh loaders.",
                TrainwrightWarning,
                stacklevel=2,
            )

    def load_place(self, place: Mapping[str, Any], rank: int, num_ranks: int) -> None:
        """Give a loader that keeps its own place back what this rank's had; call it after `check_resume`.

        Args:
            place: what `state_dict` returned, with `loaders`, the states of all ranks' loaders, if they keep any; its
                `position` is None at the start of an epoch.
            rank, num_ranks: global.
        """
        states = place.get("loaders") or []
        if self.loader.stateful and len(states) == num_ranks:
            self.loader.load_state_dict(states[rank], at_epoch_start=place["position"] is None)


class EvaluationData:
    """The loaders of one evaluation and how many batches of each are run.

    Args:
        loaders: one loader, or a list or dict of them.
        kind: `"validate"`, `"test"` or `"predict"`.
        options: of the run's training data; an evaluation's are made of them.
        limit: the stage's `limit_*_batches`, for each loader separately.

    Attributes:
        given: the loaders as the user made them.
    """

    def __init__(
        self, loaders: object, kind: EvaluationKind, options: LoaderOptions, *, limit: int | float | None
    ) -> None:
        self.given = loaders
        if isinstance(loaders, CombinedLoader) and loaders.mode == "sequential":
            loaders = loaders.iterables
        items = [loaders]
        self.is_list = isinstance(loaders, (list, tuple, dict)) and holds_loaders(loaders)
        if self.is_list and isinstance(loaders, (list, tuple, dict)):
            items = list(loaders.values() if isinstance(loaders, dict) else loaders)
        self.loaders = [prepare_loader(item, options.evaluating(kind)) for item in items]
        self._limit, self._name = limit, _LIMITS[kind]
        self.limits: list[int | None] = []
        self.begin()

    def begin(self) -> None:
        """Begin an evaluation: read the lengths of the data. Collective."""
        for loader in self.loaders:
            loader.set_epoch(0)
        self.limits = [resolve_limit(self._limit, loader.num_batches, self._name) for loader in self.loaders]

    def close(self) -> None:
        """End the loaders' workers."""
        for loader in self.loaders:
            loader.close()

    @property
    def num_batches(self) -> list[int | float]:
        """Batches of each loader on one rank; infinite when unknown."""
        return [float("inf") if limit is None else limit for limit in self.limits]


def _warn_of_shuffling(loader: object, overfit: int | float) -> None:
    leaves = leaves_of(getattr(loader, "iterables", loader))
    if any("RandomSampler" in type(getattr(leaf, "sampler", None)).__name__ for leaf in leaves):
        warnings.warn(
            f"overfit_batches={overfit!r} reads the same batches in every epoch: the training loader's shuffle=True is "
            "switched off. Leave shuffle out to silence this.",
            TrainwrightWarning,
            stacklevel=2,
        )


def _listed(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in facts.items()) or "an order of its own"


def _argument(stage: str, kind: str) -> str:
    """Return what the Trainer's method for `stage` calls its loaders of this kind."""
    return "train_dataloaders" if kind == "train" else "val_dataloaders" if stage == "fit" else "dataloaders"


def _refuse_empty(loader: object, name: str) -> None:
    if isinstance(loader, CombinedLoader):
        loader = loader.flattened
    if not isinstance(loader, Sized):
        return
    try:
        length = len(loader)
    except TypeError:
        return
    if length == 0:
        raise ConfigurationError(
            f"{name}: an empty {type(loader).__name__}, in which there is nothing to read. Check the data set, "
            "batch_size and drop_last."
        )
    if isinstance(loader, (list, tuple, dict)) and holds_loaders(loader):
        for member in loader.values() if isinstance(loader, dict) else loader:
            _refuse_empty(member, name)


class StageData:
    """What a stage reads.

    Args:
        sources: where loaders come from.
        task: whose own loaders come last; None: nothing is read.
        engine: knows the ranks that the data is dealt to.
        settings: with the limits of what is read.
        history: says where training stands.

    Attributes:
        workers: the loader workers of the stage.
        made: the training data, if it was made.
        evaluations: the evaluation data that was made, by kind.
        on_made: receives training and evaluation data when it is made. Default: None.
        place: where a checkpoint says that training stands in its data, until an epoch has taken it.
    """

    def __init__(
        self, sources: Sources, task: TaskModule | None, engine: Engine, settings: Settings, history: History
    ) -> None:
        self.sources = sources
        self._given_task, self._engine, self._settings, self._history = task, engine, settings, history
        self.workers = Workers()
        self.made: TrainData | None = None
        self.evaluations: dict[str, EvaluationData] = {}
        self.place: dict[str, Any] | None = None
        self.on_made: Callable[[TrainData | EvaluationData], None] | None = None

    def _options(self) -> LoaderOptions:
        seed = self._history.seed
        assert seed is not None  # chosen when the processes joined
        return loader_options(self._settings.arguments, self._engine, seed, self.workers)

    @property
    def _task(self) -> TaskModule:
        assert self._given_task is not None  # a stage has one
        return self._given_task

    def train(self) -> TrainData:
        """Return the prepared training data; made at the first asking."""
        if self.made is None:
            self.made = TrainData(
                self.sources.make("train", self._task),
                self._options(),
                limit=self._settings.limit_batches["train"],
                overfit=self._settings.arguments.overfit_batches,
            )
            if self.on_made is not None:
                self.on_made(self.made)
            place = self.place
            if place is not None:
                self.made.check_resume(place, self._engine.data_ranks.num_readers)
            self.made.begin_epoch(self._history.state.epoch, place and place["position"])
        return self.made

    def evaluation(self, kind: EvaluationKind) -> EvaluationData:
        """Return the prepared data of `"validate"`, `"test"` or `"predict"`; made at the first asking."""
        data = self.evaluations.get(kind)
        if data is None:
            loaders = self.sources.make(kind, self._task)
            limit = self._settings.limit_batches[kind]
            data = self.evaluations[kind] = EvaluationData(loaders, kind, self._options(), limit=limit)
            if self.on_made is not None:
                self.on_made(data)
        return data

    @property
    def has_validation(self) -> bool:
        """Whether `fit` validates at all: a validation_step, a loader, and a limit above 0."""
        task, limit = self._task, self._settings.limit_batches["validate"]
        return has_step(task, "validation_step") and self.sources.has("validate", task) and (limit is None or limit > 0)

    def given(self, kind: str) -> Any:
        """Return what an evaluation reads, as the user made it; None before it is made."""
        return self.evaluations[kind].given if kind in self.evaluations else None

    def forget(self) -> None:
        """Drop the loaders, so that they are made anew when they are asked for."""
        self.made = None
        self.evaluations.clear()

    def take_place(self) -> Mapping[str, int] | None:
        """Return the place in the epoch that a checkpoint gave, once; give a loader that keeps its own place that."""
        place, data, self.place = self.place, self.train(), None
        if place is None:
            return None
        data.load_place(place, self._engine.data_ranks.reader, self._engine.data_ranks.num_readers)
        found: Mapping[str, int] | None = place["position"]
        if found is not None:
            self._history.state.batch_in_epoch = found["batch"]
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the training data, for a checkpoint; the same on every rank."""
        return {} if self.made is None else self.made.state_dict(self._history.state)

    def loader_state(self) -> dict[str, Any] | None:
        """Return the state of this rank's training loader; None when it keeps none of its own."""
        return None if self.made is None or not self.made.loader.stateful else self.made.loader.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take back what `state_dict` returned; used by the next epoch."""
        self.made = None  # made anew with the run's own seed
        self.place = dict(saved) or None

    def close(self, *, keep_state: bool) -> None:
        """End loader workers: the traceback of an error, or a Trainer that is kept, would keep them too."""
        if self.made is not None and keep_state:
            self.made.keep_state()
        self.workers.close()
        if self.made is not None:
            self.made.close()
        for data in self.evaluations.values():
            data.close()


def half_of_a_validation(sources: Sources, task: TaskModule, limit: int | float | None) -> str | None:
    """Say what a fit lacks to validate of which its user has prepared the other half; None: both halves or neither.

    Args:
        sources: what the fit was given to read.
        task: its task.
        limit: `limit_val_batches`; 0: validation was switched off.
    """
    steps, data, name = has_step(task, "validation_step"), sources.has("validate", task), type(task).__name__
    if steps == data or limit == 0:
        return None
    if data:
        lacks = f"{name} has no validation_step. Define validation_step(self, batch, batch_idx)"
    else:
        lacks = f"there is no data for {name}.validation_step. Pass val_dataloaders"
    return f"this fit does not validate: {lacks}, or limit_val_batches=0 to leave validation out."
