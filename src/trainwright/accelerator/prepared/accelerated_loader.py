"""Loaders of user-written training loops, which yield each rank's part of the data on its device."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from trainwright.accelerator.gradient_state import LoopGroups
from trainwright.accelerator.handlers import EvenBatches
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.names.constants import RNGType
from trainwright.core.process import detect
from trainwright.core.state import Group
from trainwright.core.tree import batch_size, iterate_tensors, map_tensors
from trainwright.data.batch_shards import SkippableLoader, check_number
from trainwright.data.groups import iterate_groups
from trainwright.data.loader_options import LoaderOptions
from trainwright.data.prepared import PreparedLoader
from trainwright.processes.random_states import synchronize_rng_states
from trainwright.strategies.passes import FULL, MicroBatch, Pass

_LOG = logging.getLogger("trainwright")


def divided_options(options: LoaderOptions, loader: object, even_batches: EvenBatches) -> LoaderOptions:
    """Return the options with which `even_batches` divides a loader over ranks.

    | `even_batches` | `lockstep` | `completes_rounds` |
    |---|---|---|
    | True | True | True |
    | `"pad"` | True | False |
    | False | False | True if the loader drops incomplete batches |
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    drops_last = getattr(loader, "drop_last", False) or getattr(batch_sampler, "drop_last", False)
    completes_rounds = even_batches is True
    if even_batches is False and drops_last:
        # As in Accelerate, such a loader drops an incomplete last round, too. Otherwise, ranks that train without
        # join_uneven_inputs would wait for each other forever.
        completes_rounds = True
    return replace(options, lockstep=bool(even_batches), completes_rounds=completes_rounds)


class AcceleratedLoader(SkippableLoader):
    """A prepared loader. It can be iterated any number of times.

    How data is divided over ranks is an option: see `even_batches` of `DataLoaderConfiguration`. Other attributes are
    those of the user's loader.

    Args:
        given: The user's loader.
        prepared: Loader that returns the same number of micro-batches on every rank.
        groups: The loop's groups. The loader reports each pass to them.
        mover: Function that moves a batch to the device. None: batches are not moved.
        rng_types: Generators that are synchronized over processes before each pass. Default: None.
        continues: Continue at the position of a loaded state. Default: None, which also logs a line.
        models: The Accelerator's list of prepared models, which grows with later ones. See `_evaluates`. Default: `()`.

    Attributes:
        given, prepared: The arguments. `prepared.raw` may be a copy of the user's loader with other data or sizes.
    """

    _is_accelerate_prepared = True  # Accelerate's mark, which programs read

    def __init__(
        self,
        given: object,
        prepared: PreparedLoader,
        groups: LoopGroups,
        mover: Callable[[Any], Any] | None,
        rng_types: Sequence[str | RNGType] | None = None,
        continues: bool | None = None,
        models: Sequence[nn.Module] = (),
    ) -> None:
        self.given = given
        self.prepared = prepared
        self._mover = mover
        self._rng_types = rng_types
        self._groups = groups
        self._continues = continues
        self._models = models
        self._epoch = 0  # of the next pass
        # `load_state_dict` sets these three for a state that was saved within a pass. The pass that continues at the
        # state's position resets `_interrupted` to None.
        self._interrupted: dict[str, Any] | None = None  # the loaded state, until its pass continues
        self._replays = False  # the pass fetches the batches before its position, and drops them
        self._trained_at_load = False  # a prepared model was in training mode when the state was loaded
        self._reading: Pass | None = None  # the innermost pass that has begun and not ended
        self._newest: Pass | None = None  # the newest pass, finished or not

    def __len__(self) -> int:
        """Return the number of micro-batches of one pass, equal on every rank unless `even_batches` is False."""
        num_batches = self._num_batches
        if num_batches is None:
            raise TypeError(f"{type(self.prepared.raw).__name__} has no length")
        return num_batches

    @property
    def even_batches(self) -> bool:
        """True if all ranks get the same number of micro-batches. False: each rank ends after its own data."""
        return self.prepared.ends_together or self.prepared.options.in_lockstep

    @contextmanager
    def divided(self, even_batches: EvenBatches) -> Iterator[None]:
        """Return a context in which passes divide data in another way. Not collective."""
        outer_options = self.prepared.options
        self.prepared.use(divided_options(outer_options, self.given, even_batches))
        try:
            yield
        finally:
            self.prepared.use(outer_options)

    @property
    def _num_batches(self) -> int | None:
        """Number of this rank's micro-batches in one pass, including padding. None if it is unknown."""
        if self.even_batches:
            return self.prepared.num_batches
        counts = self.prepared.counts
        if counts is None:
            return None
        options = self.prepared.options
        if options.uneven == "stop":  # all ranks end with the first one
            return min(counts)
        return counts[options.rank]

    @property
    def total_batch_size(self) -> int:
        """Samples of one micro-batch over all processes. An unknown batch size counts as 1."""
        return (self._full_rows or 1) * self.prepared.options.world

    @property
    def total_dataset_length(self) -> int:
        """Samples of the data set."""
        return len(self.prepared.raw.dataset)

    @property
    def remainder(self) -> int:
        """Samples of a pass's last micro-batch on all processes. 0 if it is full. -1 if unknown or dropped."""
        raw = self.prepared.raw
        if not isinstance(raw, DataLoader) or not isinstance(raw.dataset, Sized):
            return -1
        # A DataLoader with a batch sampler of the user has drop_last=False.
        if raw.drop_last or getattr(raw.batch_sampler, "drop_last", False):
            return -1
        return self.total_dataset_length % self.total_batch_size

    @property
    def end_of_dataloader(self) -> bool:
        """True once the newest pass has returned its last micro-batch."""
        return self._newest is not None and self._newest.ends_data

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (0-based) of the next pass, which determines its order. Each pass increments it."""
        self._epoch = epoch

    def skip(self, num_batches: int) -> SkippedStart:
        """Return a loader that skips the first `num_batches` micro-batches of each pass.

        Skipped micro-batches are not fetched. Exception: an iterable data set without seek is read from its beginning.
        """
        check_number("num_batches", num_batches)
        return SkippedStart(self, num_batches)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own iterators
        """Return an iterator over this rank's micro-batches of the next epoch.

        Nothing happens before the first micro-batch is requested, which is collective with `rng_types`, and for data
        without length.
        """
        return self.begin_pass(None)

    def begin_pass(self, first: int | None) -> Iterator[Any]:
        """Iterate over the next epoch from micro-batch `first`. None: from the position of a loaded state, or 0.

        An evaluation before the interrupted pass continues reads the epoch from its beginning. It does not increment
        the epoch.
        """
        # A generator: an iterator that is never read must not begin a pass. tqdm.auto creates one in its constructor.
        if self._rng_types is not None:
            synchronize_rng_states(self._rng_types, _generator_of(self.prepared.raw))
        postpones = self._interrupted is not None and self._evaluates()
        position = self._take_position(first, postpones=postpones)
        if position is not None and self._replays:
            # The data cannot begin at the position. `_batches` reads it from its beginning, and skips as for `first`.
            first = position["batch"]
            position = None
        self.prepared.set_epoch(self._epoch, position)
        if not postpones:
            self._epoch += 1
        if position is not None:
            yield from self._batches(position["batch"], reads_from=position["batch"])
            return
        raw = self.prepared.raw
        if isinstance(raw, DataLoader) and raw.generator is None:
            # torch's own loader draws a seed for each pass. With this draw, the loop's later random numbers are those
            # of a loop without an Accelerator. A pass that continues has drawn its seed before the save.
            torch.empty((), dtype=torch.int64).random_()
        start = first or 0
        yield from self._batches(start, reads_from=start if self.prepared.can_seek else 0)

    def _evaluates(self) -> bool:
        """Return whether the pass that begins now is an evaluation: autograd or the models' mode show it."""
        if not torch.is_grad_enabled():
            return True
        # Evaluation mode alone does not show it: models of from_pretrained are in this mode until the loop calls
        # train(), maybe in its first step. But a loop that trained at the load has switched to evaluation since.
        return self._trained_at_load and not self._in_training_mode()

    def _in_training_mode(self) -> bool:
        return any(model.training for model in self._models)

    def _take_position(self, first: int | None, *, postpones: bool) -> dict[str, int] | None:
        """Return the position at which the interrupted pass continues now. None: the pass begins at `first`, or 0.

        Unless the pass only postpones the interrupted one, later passes do not continue at the position any more.
        """
        interrupted = self._interrupted
        if interrupted is None:
            return None
        if postpones:
            text = "An evaluation reads the epoch from its beginning. The next pass that trains continues."
            self._report(interrupted, text)
            return None
        position: dict[str, int] = interrupted["position"]
        is_same_epoch = self._epoch == interrupted["epoch"]  # another one after `set_epoch`
        if not is_same_epoch:
            self._report(interrupted, f"The loop begins epoch {self._epoch} instead of continuing.")
        elif first is None:
            self._report(interrupted, "This pass continues there, so the loop must not skip batches itself.")
        self._interrupted = None
        # skip_first_batches(loader, n) with the position's n names the same pass. Another n is the loop's decision.
        is_same_start = first is None or first == position["batch"]
        if not is_same_epoch or not is_same_start:
            return None
        if interrupted["loader"] is not None:
            self.prepared.load_state_dict(interrupted["loader"])
        return position

    def _report(self, interrupted: dict[str, Any], text: str) -> None:
        """Log a line about a loaded position on rank 0, unless the user has set whether passes continue."""
        if self._continues is not None or detect().rank != 0:
            return
        # A line of level INFO would not be shown, and a loop that skips batches by itself would lose data unseen.
        _LOG.warning(
            "The loaded state was saved after batch %d of epoch %d. %s "
            "DataLoaderConfiguration(use_stateful_dataloader=True) continues without this line; with False every "
            "epoch begins at its first batch.",
            interrupted["position"]["batch"],
            interrupted["epoch"],
            text,
        )

    def _batches(self, first: int, *, reads_from: int) -> Iterator[Any]:
        """Yield micro-batches from `first` on. Those from `reads_from` to `first` are fetched and dropped."""
        prepared = self.prepared
        trains = torch.is_grad_enabled() and self._in_training_mode()
        outer = self._reading  # a loop may evaluate on the same loader within its training
        reading = Pass(self, first, trains)
        self._reading = reading
        self._newest = reading
        self._groups.begin_pass(reading)
        num_batches = self._num_batches
        # Only this rank's last batch may have fewer rows than the others. If the number of batches is unknown, each
        # batch may be the last one.
        num_surely_full = 0
        if prepared.counts is not None:
            num_surely_full = prepared.counts[prepared.options.rank] - 1
        # Groups of one batch: an Accelerator forms its groups of micro-batches later, in `accumulate`.
        try:
            if self.even_batches:
                groups = iterate_groups(prepared, start_batch=reads_from)
            else:  # each rank ends after its own data, and does not wait for the others
                groups = iterate_groups(prepared, start_batch=reads_from, limit=num_batches, world=1)
            for group in groups:
                index = group.first_idx
                if index < first:
                    continue  # the loop skips it, and has not received it
                batch = group.batches.pop()  # only the loop holds it, and may free it
                num_left: int | None = None
                if group.is_last:
                    num_left = 0
                elif num_batches is not None:
                    num_left = num_batches - index - 1
                is_full = index < num_surely_full and group.weights is None  # the usual case, which must be fast
                reading.deliver(FULL if is_full else self._micro_batch(group, batch), num_left)
                if self._mover is not None:
                    batch = self._mover(batch)
                yield batch
                del batch
            reading.is_exhausted = True
        finally:
            self._groups.end_pass(reading)
            if self._reading is reading:  # False if a newer pass has begun, and the garbage collector closes this one
                self._reading = outer

    def _micro_batch(self, group: Group, batch: object) -> MicroBatch:
        """Return the information about the only batch of a group."""
        is_padding = group.weights == [0.0]
        num_real = group.num_real
        num_rows = self._num_rows(batch, group.first_idx)
        if self.prepared.options.completes_rounds:
            # Repeated samples weigh as much as others. Only gathered results omit them.
            if is_padding:
                num_rows = 0
            is_padding = False
            num_real = None
        if not is_padding and num_real is None and num_rows is None:
            return FULL
        return MicroBatch(is_padding, num_real, num_rows)

    def _num_rows(self, batch: object, index: int) -> int | None:
        """Return the number of samples of this rank's batch that are not repeated.

        None if the batch is full, or if its size is unknown.
        """
        prepared = self.prepared
        real_rows = prepared.real_rows(index)
        if real_rows is not None:  # the round was completed with repeated samples
            return real_rows
        full = self._full_rows
        in_round = prepared.samples_in_round(index)
        if full is None or in_round == full * prepared.real_ranks(index):  # the batches of all ranks are full
            return None
        if in_round is not None and prepared.options.world == 1:
            return in_round
        # With several ranks, the samples of the round do not show which rank's batch is short.
        has_tensors = next(iterate_tensors(batch), None) is not None
        return batch_size(batch) if has_tensors else None

    def trim_rows(self, tree: object, num_rows: int) -> Any:
        """Return results for a micro-batch of `num_rows` samples without further rows.

        Only tensors and lists with as many rows as a full batch, such as `loss.repeat(batch_size)`, are trimmed.
        """
        full = self._full_rows
        if full is None or num_rows >= full:
            return tree
        if isinstance(tree, list) and len(tree) == full:
            has_tensors = next(iterate_tensors(tree), None) is not None
            if not has_tensors:
                return tree[:num_rows]

        def trim(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() and len(tensor) == full:
                return tensor[:num_rows]
            return tensor

        return map_tensors(trim, tree)

    @property
    def _full_rows(self) -> int | None:
        """Samples of one of this rank's full batches, or None if unknown."""
        prepared = self.prepared
        if prepared.batch_size is not None:
            return prepared.batch_size
        sampler = getattr(prepared.raw, "batch_sampler", None)
        size: int | None = getattr(sampler, "batch_size", None)
        if size is not None and prepared.options.split_batches:
            size //= prepared.options.world
        return size

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position in the data, after the last micro-batch that the loop has begun.

        For example, `{"epoch": 3, "position": {"batch": 5, "samples": 40}, "loader": None}`: 5 micro-batches of epoch 3
        have begun. `position` is None between two passes, and `epoch` is then that of the next pass. `loader` is the
        state of a loader that stores its position itself, or else None.

        A loop without `accumulate` has begun all micro-batches that it has received.

        Raises:
            ConfigurationError: A group of micro-batches is not complete, whose gradients would not be saved. Or the
                loop has fetched batches ahead, and the data has its own state, which cannot go back.
        """
        self._groups.refuse_open()
        if self._interrupted is not None:  # no pass has continued since the load, only evaluations
            return self._interrupted
        state: dict[str, Any] = {"epoch": self._epoch, "position": None, "loader": None}
        reading = self._reading
        num_held = 0 if reading is None else self._groups.num_held(reading)
        if reading is not None and (num_held or not reading.ends_data):
            state["epoch"] = self._epoch - 1  # the pass has incremented it at its start
            state["position"] = self.prepared.position(reading.position - num_held)
        if self.prepared.stateful:
            if num_held:
                raise ConfigurationError(
                    f"save_state() was called while the loop holds {num_held} batch(es) that it has received but not "
                    "trained. The loader's own state is after these batches, so that a resumed run would skip them. "
                    "Call it when all received batches were trained."
                )
            state["loader"] = self.prepared.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a position. The next pass that trains begins at this position, unless `continues` is False.

        A data set that can neither seek nor restore its own position is read from its beginning up to the position if
        `continues` is True. With None, the epoch restarts with a warning.
        """
        position = state["position"]
        loader_state = state["loader"]
        self._epoch = state["epoch"]
        self._interrupted = None
        self._replays = False
        if position is None:  # the state was saved between two passes
            if loader_state is not None:
                self.prepared.load_state_dict(loader_state, at_epoch_start=True)
            return
        if self._continues is False:
            return
        # The loader's own state is loaded when the pass continues, because evaluations may read the loader before.
        try:
            self.prepared.check_resume(position["batch"], has_state=loader_state is not None)
        except ConfigurationError as error:
            if not self._continues:
                warnings.warn(
                    f"{error} The epoch restarts. To skip the batches that were already used, call "
                    f"skip_first_batches(loader, {position['batch']}), or pass "
                    "DataLoaderConfiguration(use_stateful_dataloader=True) to fetch them again.",
                    TrainwrightWarning,
                    stacklevel=2,
                )
                return
            self._replays = True
        self._interrupted = dict(state)
        self._trained_at_load = self._in_training_mode()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "prepared" not in vars(self):
            raise AttributeError(name)
        return getattr(self.prepared.raw, name)


@functools.cache
def stateful_loader_class() -> type[AcceleratedLoader]:
    """Return the class for `use_stateful_dataloader=True`, of which torchdata's `StatefulDataLoader` is a base class.

    Programs check the base class before they call `state_dict`. No method of it is used. Without torchdata, return
    `AcceleratedLoader`.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return AcceleratedLoader

    class StatefulLoader(AcceleratedLoader, StatefulDataLoader):  # type: ignore[misc]  # torchdata's types differ
        """An `AcceleratedLoader` that is an instance of `StatefulDataLoader`."""

        def __reduce__(self) -> tuple[Callable[[], AcceleratedLoader], tuple[()], dict[str, Any]]:
            return _new_stateful_loader, (), dict(vars(self))

    return StatefulLoader


def _new_stateful_loader() -> AcceleratedLoader:
    # Pickle finds no class by name that a function has created, and the constructor needs parts that may contain the
    # loader. The loader must exist before they are unpickled.
    return object.__new__(stateful_loader_class())


def _generator_of(loader: object) -> torch.Generator | None:
    """Return the generator of a user's loader, or of its sampler or data set."""
    parts = [loader]
    for name in ("sampler", "batch_sampler", "dataset"):
        parts.append(getattr(loader, name, None))
    for part in parts:
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
    return None


class SkippedStart(SkippableLoader):
    """A prepared loader that skips the first `num_batches` micro-batches of each epoch.

    It has no separate epoch counter. Each pass advances the epoch of `loader`.
    """

    def __init__(self, loader: AcceleratedLoader, num_batches: int) -> None:
        self.loader = loader
        self._num_skipped = num_batches

    def __len__(self) -> int:
        """Return the number of micro-batches of a pass."""
        return max(0, len(self.loader) - self._num_skipped)

    def skip(self, num_batches: int) -> SkippedStart:
        """Return a loader that skips the first `num_batches` micro-batches of each pass of `loader`."""
        return self.loader.skip(num_batches)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own iterators
        # None for 0: without batches to skip, the pass may continue at the position of a loaded state.
        return self.loader.begin_pass(self._num_skipped or None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self.loader, name)
