"""Where a stage's loaders come from, and the prepared data of training and of evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.foreign_names import check_owner
from trainwright.core.hooks import TaskHooks
from trainwright.core.signatures import overrides
from trainwright.core.state import Group, TrainState
from trainwright.core.task import TaskModule
from trainwright.data import CombinedLoader, DataModule, iterate_groups, prepare_loader, resolve_limit
from trainwright.data.combined import leaves_of
from trainwright.data.loader import holds_loaders
from trainwright.data.prepared import PreparedLoader
from trainwright.data.workers import Workers
from trainwright.strategies.strategy import Strategy

_METHODS = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
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
    def of(cls, stage: str, datamodule: Any, **loaders: Any) -> Sources:
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
        method = _METHODS[kind]
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
        method = _METHODS[kind]
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


@dataclass(frozen=True)
class Ranks:
    """What preparing a loader needs to know of the run: `dp_rank` of `dp_size`, the seed, how ranks agree, workers."""

    dp_rank: int
    dp_size: int
    seed: int
    use_distributed_sampler: bool
    uneven: Any
    agree: Callable[[list[int]], list[list[int]]] | None
    lockstep_evaluation: bool = False
    per_sample_rng: bool = False
    workers: Workers | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any], strategy: Strategy, seed: int, workers: Workers) -> Ranks:
        """Return it for this rank of a run: `arguments` are the Trainer's, `strategy` knows the other ranks."""
        return cls(
            dp_rank=strategy.dp_rank,
            dp_size=strategy.dp_size,
            seed=seed,
            use_distributed_sampler=arguments["use_distributed_sampler"],
            uneven=arguments["uneven_batches"],
            agree=strategy.gather_integers_by_data_rank,
            lockstep_evaluation=strategy.capabilities.lockstep_evaluation,
            per_sample_rng=arguments["per_sample_rng"],
            workers=workers,
        )

    def prepare(self, loader: Any, stage: Any, shuffle: bool | None = None) -> PreparedLoader:
        """Prepare one loader for this rank."""
        return prepare_loader(
            loader,
            stage=stage,
            rank=self.dp_rank,
            world=self.dp_size,
            seed=self.seed,
            use_distributed_sampler=self.use_distributed_sampler,
            uneven=self.uneven if stage == "train" else "pad",  # an evaluation counts every sample
            agree=self.agree if self.dp_size > 1 else None,
            lockstep=None if stage == "train" else self.lockstep_evaluation,
            shuffle=shuffle,
            per_sample_rng=self.per_sample_rng,
            workers=self.workers,
        )


class TrainData:
    """The training data of a run: groups of micro-batches, from any place in an epoch.

    Args:
        loader: the user's loader, or a list or dict of them to be combined.
        ranks: see `Ranks`.
        limit: `limit_train_batches`.
        overfit: only so much of the data, in its own order (`overfit_batches`); 0: all.

    Attributes:
        given: the loader as the user made it.
    """

    def __init__(self, loader: Any, ranks: Ranks, *, limit: int | float | None, overfit: int | float) -> None:
        self.given = loader
        if isinstance(loader, (list, tuple, dict)) and holds_loaders(loader):
            loader = CombinedLoader(loader, mode="max_size_cycle")
        if overfit and ranks.dp_rank == 0:
            _warn_of_shuffling(loader, overfit)
        self.loader = ranks.prepare(loader, "train", shuffle=False if overfit else None)
        self._limit, self._name = (overfit, "overfit_batches") if overfit else (limit, _LIMITS["train"])
        self.num_batches: int | None = None

    def begin_epoch(self, epoch: int, resume: Mapping[str, int] | None = None) -> None:
        """Turn to an epoch; `resume` is the place where it was left. Collective when ranks have own loaders."""
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
        name, states = self.loader.settings.name, place.get("loaders") or []
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
        ranks: see `Ranks`.
        limit: the stage's `limit_*_batches`, for each loader separately.

    Attributes:
        given: the loaders as the user made them.
    """

    def __init__(self, loaders: Any, kind: str, ranks: Ranks, *, limit: int | float | None) -> None:
        self.given = loaders
        if isinstance(loaders, CombinedLoader) and loaders.mode == "sequential":
            loaders = loaders.iterables
        several = isinstance(loaders, (list, tuple, dict)) and holds_loaders(loaders)
        items = list(loaders.values() if isinstance(loaders, dict) else loaders) if several else [loaders]
        self.is_list = several
        self.loaders = [ranks.prepare(item, kind) for item in items]
        self.limits: list[int | None] = []
        for loader in self.loaders:
            loader.set_epoch(0)
            self.limits.append(resolve_limit(limit, loader.num_batches, _LIMITS[kind]))

    def close(self) -> None:
        """End the loaders' workers."""
        for loader in self.loaders:
            loader.close()

    @property
    def num_batches(self) -> list[int | float]:
        """Batches of each loader on one rank; infinite when unknown."""
        return [float("inf") if limit is None else limit for limit in self.limits]


def _warn_of_shuffling(loader: Any, overfit: int | float) -> None:
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


def _refuse_empty(loader: Any, name: str) -> None:
    if isinstance(loader, CombinedLoader):
        loader = loader.flattened
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
