"""Options for preparing a loader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainwright.core.errors import ConfigurationError
from trainwright.data.workers import Workers, WorkerStart

Stage = Literal["train", "validate", "test", "predict"]
Uneven = Literal["pad", "stop", "error"]
Agree = Callable[[list[int]], list[list[int]]]  # this rank's integers → those of every rank, in rank order

# The hook of a task or data module that returns the loader of each stage.
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
        stage: `"train"`, `"validate"`, `"test"` or `"predict"`. In the last three, the default sampler of a loader with
            `shuffle=True` only shuffles if there is one rank, or with the option `shuffle=True`. Default: `"train"`.
        rank: this data-parallel rank. Default: 0.
        world: number of data-parallel ranks. Default: 1.
        seed: seed of the order, equal on every rank. The DataLoader's `generator` only seeds workers. Default: 0.
        use_distributed_sampler: divide data over ranks. With False each rank's loader is independent. Default: True.
        uneven: `"pad"`, `"stop"` or `"error"`, for ranks with different numbers of batches; see
            `trainwright.data.prepared`. Default: `"pad"`.
        lockstep: give all ranks the same number of batches. Default: None, which is True in training, and in evaluation
            the value of `lockstep_evaluation`.
        lockstep_evaluation: see `lockstep`. Needed if every forward is collective. Default: False.
        agree: function that gathers a short list of integers from every rank, in rank order, on the host. With None and
            several ranks, undivided loaders must have the same number of batches on every rank. Default: None.
        lend: function that gathers a batch, or None, from every rank, in rank order, on the host. Ranks without any
            batch of their own get their padding through it. Default: None, where such a rank is an error.
        shuffle: True shuffles, if the loader has the default sampler. False uses the order of the data, also if the
            loader has its own sampler. Default: None, the loader's setting.
        per_sample_rng: seed `random`, numpy's global generator and torch's CPU generator by (seed, epoch, index) before
            each sample is fetched, and by the batch's first index before a batch is collated. Generators of this
            process are restored. Costs about 20 µs per sample. For data with indices only. Default: False.
        completes_rounds: give all ranks equal numbers of samples: complete an incomplete last round with samples from
            the epoch's beginning, as Accelerate does, or drop it if the loader drops incomplete batches. Loaders that
            are not divided by index are not changed. Default: False.
        split_batches: divide each batch of a DataLoader over the ranks. Default: False.
        workers: registry of the loaders' worker processes. Registered workers ignore SIGUSR1 and the first SIGTERM,
            and the caller ends them with `workers.close()`. Default: None, where torch ends the worker processes.
        name: name of the loader for messages. Default: None, the name of the stage's hook.

    Raises:
        ConfigurationError: `stage`, `uneven` or `rank` is invalid.
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
    lend: Callable[[Any], list[Any]] | None = None
    shuffle: bool | None = None
    per_sample_rng: bool = False
    completes_rounds: bool = False
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
        """True if all ranks get the same number of batches."""
        if self.lockstep is not None:
            return self.lockstep
        return self.stage == "train" or self.lockstep_evaluation

    @property
    def title(self) -> str:
        """The loader's name in messages."""
        return self.name or LOADER_METHODS[self.stage]

    def evaluating(self, stage: Stage) -> LoaderOptions:
        """Return the options of an evaluation in the same run, with the policy "pad"."""
        return replace(self, stage=stage, uneven="pad")

    def worker_start(self, own: Callable[[int], None] | None) -> Callable[[int], None] | None:
        """Return the `worker_init_fn` of the prepared loader. `own` is that of the user's loader.

        If `workers` is set, a `WorkerStart` that calls `own`; otherwise `own` itself, which may be None.
        """
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
            f"batch_size={batch_size} is not divisible by num_processes={num_processes}: split_batches=True needs it. "
            f"Use {max(1, batch_size // num_processes) * num_processes}."
        )
