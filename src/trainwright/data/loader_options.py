"""Options for preparing a loader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from trainwright.core.errors import ConfigurationError
from trainwright.data.workers import Workers, WorkerStart

Stage = Literal["train", "validate", "test", "predict"]
Uneven = Literal["pad", "stop", "error"]
Agree = Callable[[list[int]], list[list[int]]]

LOADER_METHODS = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """Options for preparing loaders for one data-parallel rank.

    Args:
        stage: `"train"` (default), `"validate"`, `"test"` or `"predict"`. Evaluation is never shuffled, unless the
            user's own loader shuffles and there is one rank. Default: `"train"`.
        rank: this rank on the data axis. Default: 0.
        world: number of data-parallel ranks. Default: 1.
        seed: seed of the order; the same on every rank. A `generator` of the user's DataLoader keeps seeding its
            workers but does not change the order. Default: 0.
        use_distributed_sampler: False: each rank's loader is independent and data is not divided. Default: True.
        uneven: policy for ranks with different numbers of batches; see `trainwright.data.prepared`. Default:
            `"pad"`.
        lockstep: all ranks do the same number of rounds; None (default): in training, and in evaluation with
            `lockstep_evaluation`. Default: None.
        lockstep_evaluation: every forward is collective, so that evaluations run in lock step too. Default: False.
        agree: gathers a short list of integers from every rank, in rank order, over the host. None (default) with
            several ranks: the caller guarantees that undivided loaders have the same number of batches on every rank.
            Default: None.
        shuffle: overrides whether a default sampler shuffles; None (default): as in the loader. Default: None.
        per_sample_rng: the values of `random`, numpy's global generator and torch's CPU generator while a sample is
            fetched depend on (seed, epoch, the sample's index) alone, and while a batch is collated on its first
            sample; this process's generators are not changed. Costs about 20 µs per sample. For data with indices only.
            Default: False.
        split_batches: a loader's batch size is that of all ranks: each rank gets its part of each batch. For
            DataLoaders with batches. Default: False.
        workers: registry of the loaders' workers, which ignore the signals that end a run; the caller ends them with
            `close`. Default: None.
        name: name of the loader, for messages; None (default): that of the stage's hook. Default: None.

    Raises:
        ConfigurationError: an unknown stage, policy or rank.
    """

    stage: Stage = "train"
    rank: int = 0
    world: int = 1
    seed: int = 0
    use_distributed_sampler: bool = True
    uneven: Uneven = "pad"
    lockstep: bool | None = None
    lockstep_evaluation: bool = False
    agree: Agree | None = None
    shuffle: bool | None = None
    per_sample_rng: bool = False
    split_batches: bool = False
    workers: Workers | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.stage not in LOADER_METHODS:
            raise ConfigurationError(f"stage={self.stage!r} is not one of 'train', 'validate', 'test', 'predict'.")
        if self.uneven not in ("pad", "stop", "error"):
            raise ConfigurationError(f"uneven={self.uneven!r} is not one of 'pad', 'stop', 'error'.")
        if not 0 <= self.rank < self.world:
            raise ConfigurationError(f"rank={self.rank} is not in [0, world={self.world}).")

    @property
    def in_lockstep(self) -> bool:
        """True if all ranks do the same number of rounds."""
        if self.lockstep is not None:
            return self.lockstep
        return self.stage == "train" or self.lockstep_evaluation

    @property
    def title(self) -> str:
        """The loader's name in messages."""
        return self.name or LOADER_METHODS[self.stage]

    def evaluating(self, stage: Stage) -> LoaderOptions:
        """Return the options of an evaluation in the same run, which counts every sample."""
        return replace(self, stage=stage, uneven="pad")

    def worker_start(self, own: Callable[[int], None] | None) -> Callable[[int], None] | None:
        """Return the function that a worker calls first, which calls the user's own function."""
        return WorkerStart(own) if self.workers is not None else own


def check_divisible(batch_size: int | None, num_processes: int) -> None:
    """Check that a batch can be divided into equal parts.

    Raises:
        ConfigurationError: the batch size is unknown or not divisible.
    """
    if batch_size is None:
        raise ConfigurationError("split_batches=True needs a batch sampler with the attribute batch_size.")
    if batch_size % num_processes:
        raise ConfigurationError(
            f"batch_size={batch_size} is not divisible by num_processes={num_processes}: split_batches=True needs it."
        )
