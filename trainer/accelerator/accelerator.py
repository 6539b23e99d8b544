"""The front door for people who keep their own loop: the Trainer's strategies, loaders and precisions, one by one.

accelerator = Accelerator(gradient_accumulation_steps=4)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.bigmodels.saving import save_model
from trainwright.core.errors import ConfigurationError, TaskError, TrainwrightWarning
from trainwright.core.host.memory import release_memory
from trainwright.core.names.known_arguments import known_arguments
from trainwright.core.process import detect
from trainwright.core.tree import iterate_tensors
from trainwright.processes.collectives import gather, pad_across_processes, reduce
from trainwright.processes.partial_state import PartialState
from trainwright.strategies.launcher_variables import read_launcher_variables
from trainwright.strategies.select import select_for_loop
from trainwright.strategies.strategy import Strategy
from trainwright.trainer.accelerator.accelerated_loader import AcceleratedLoader
from trainwright.trainer.accelerator.accelerated_model import AcceleratedModel, unwrapped
from trainwright.trainer.accelerator.accelerated_optimizer import AcceleratedOptimizer
from trainwright.trainer.accelerator.accelerator_state import LoopObjects, load_loop, save_loop
from trainwright.trainer.accelerator.accumulation import Accumulation, GradientAccumulationPlugin
from trainwright.trainer.accelerator.gathering import gather_objects, gather_real
from trainwright.trainer.accelerator.item_counts import ItemCounts
from trainwright.trainer.accelerator.loss_scale import LossScale
from trainwright.trainer.accelerator.pickling import picklable_state, restore_prepared
from trainwright.trainer.accelerator.prepare import PreparesObjects
from trainwright.trainer.accelerator.scheduler import AcceleratedScheduler
from trainwright.trainer.accelerator.settings import (
    accumulation_of,
    checked_folder,
    compare_precision,
    read_settings,
    refuse_attribute,
    refuse_option,
    refuse_unknown,
)

T = TypeVar("T")


class Accelerator(PreparesObjects):
    """Joins the processes, and makes a loop's objects ready for them.

    The names are those of Hugging Face's Accelerate. `backward(loss)` divides by `gradient_accumulation_steps` as it
    does there; `backward(loss, num_items=n)` makes a step's gradient the mean over everything it consumed. A rank that
    runs out of data before others adds nothing, and a schedule advances once per optimizer step, whatever the number
    of processes. Without a launcher it is one process; `torchrun --nproc-per-node 2 script.py` makes two.

    Args:
        device_placement: move models and batches to this process's device.
        split_batches: only False: a loader's batch size is that of one process.
        mixed_precision: `"no"`, `"fp16"` or `"bf16"`.
        gradient_accumulation_steps: micro-batches of one optimizer step.
        gradient_accumulation_plugin: the number of steps, and the divisor of a short last group.
        cpu: use the CPU although there is an accelerator.
        step_scheduler_with_optimizer: False: every call of a scheduler's `step` counts.
        kwargs_handlers: `DistributedDataParallelKwargs`, for several processes.
        strategy: `"auto"` (one process: `"single"`, several: `"ddp"`), or a strategy that serves loops of others.
        seed: of the order of the data. Default: torch's initial seed on the first process.

    Arguments of Accelerate that are served elsewhere are accepted as None.

    Where the arguments say nothing, the variables of `accelerate launch` count (`ACCELERATE_MIXED_PRECISION`,
    `ACCELERATE_GRADIENT_ACCUMULATION_STEPS`, `ACCELERATE_USE_CPU`); others that ask for something are warned of.

    The first construction joins the other processes (collective).

    Raises:
        ConfigurationError: an argument that is unknown or not served, naming what is.
    """

    @known_arguments(refuse_unknown)
    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        *,
        step_scheduler_with_optimizer: bool = True,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        kwargs_handlers: Sequence[Any] | None = None,
        strategy: str | Strategy = "auto",
        seed: int | None = None,
    ) -> None:
        mixed_precision, gradient_accumulation_steps, cpu = read_launcher_variables(
            mixed_precision, gradient_accumulation_steps, gradient_accumulation_plugin, cpu, warns=detect().rank == 0
        )
        accumulates = accumulation_of(gradient_accumulation_steps, gradient_accumulation_plugin)
        settings = read_settings(split_batches, mixed_precision, cpu, kwargs_handlers, strategy)
        self.state = PartialState(cpu=cpu)
        self.strategy = settings.strategy
        self._strategy_argument, self._handlers = strategy, tuple(kwargs_handlers or ())
        self.strategy.setup(self.state.topology)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self._precision = settings.precision
        has_context = settings.precision.autocast_dtype is not None
        # Made anew for each use: torch's autocast keeps in itself what it has to restore, and must not nest in itself.
        self._make_context: Callable[[], Any] | None = None
        if has_context:
            self._make_context = partial(settings.precision.forward_context, self.device.type)
        self._scale = LossScale(self.device.type) if settings.precision.scaled else None
        self._accumulation = Accumulation(
            accumulates.num_steps or 1, accumulates.short_group, warns=self.state.is_main_process
        )
        self._items = ItemCounts(self._accumulation, self.strategy, scaled=self._scale is not None)
        self._syncs_each_batch = accumulates.sync_each_batch or self.strategy.sync_each_batch
        self._seed = seed
        self._models: list[nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[AcceleratedLoader] = []
        self._prepared: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._others: list[Any] = []
        self._trigger = False
        compare_precision(self, self.mixed_precision, warns=self.state.is_main_process)

    # Where it runs

    @property
    def device(self) -> torch.device:
        """What this process computes on."""
        return self.state.device

    @property
    def mixed_precision(self) -> str:
        """`"no"`, `"fp16"` or `"bf16"`."""
        names: dict[torch.dtype | None, str] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
        return names.get(self._precision.autocast_dtype, "no")

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one optimizer step; may be set between two passes over the data."""
        return self._accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self._accumulation.num_steps = value

    @property
    def sync_gradients(self) -> bool:
        """Whether an optimizer steps after the present micro-batch."""
        return self._accumulation.sync_gradients

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer left its last step out because of fp16 gradients that are not finite."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def __getstate__(self) -> dict[str, Any]:
        return picklable_state(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if "strategy" not in state:
            self.strategy = select_for_loop(
                self._strategy_argument, self._handlers, cpu=self.state.device.type == "cpu", precision=self._precision
            )
            self.strategy.setup(self.state.topology)
            self._items = ItemCounts(self._accumulation, self.strategy, scaled=self._scale is not None)
        restore_prepared(self)

    def __getattr__(self, name: str) -> Any:
        """Return what `PartialState` has: `num_processes`, `is_main_process`, `wait_for_everyone`, `print`, …"""
        if name.startswith("_") or "state" not in vars(self):
            raise AttributeError(name)
        try:
            return getattr(self.state, name)
        except AttributeError:
            raise refuse_attribute(name, [*dir(type(self)), *dir(self.state)]) from None

    # The step

    def backward(
        self, loss: torch.Tensor, *, num_items: int | float | torch.Tensor | None = None, **kwargs: object
    ) -> None:
        """Run backward of the loss's share in its optimizer step. Collective in the last micro-batch of a group.

        Without `num_items` the loss is divided by `gradient_accumulation_steps`, in a short last group too, which is
        warned of once: scripts that weigh their losses themselves count on it. With `num_items` the step's gradient is
        the mean over all items of its micro-batches on all processes, whatever their number in each: in the last
        micro-batch counts are summed over processes and the gradients so far are divided once, in place.

        Args:
            loss: Scalar with a graph; the mean over the micro-batch, or over its `num_items`.
            num_items: Number of items (tokens, samples) that `loss` is the mean over; a tensor on the device is not
                read. Pass it for every micro-batch of a step, in one call each, or for none. Default: None.
            kwargs: Arguments of `torch.Tensor.backward`.

        Raises:
            TaskError: The loss has no graph, or `num_items` is not a count, comes twice for one micro-batch, or for
                some of a step's alone.
        """
        if not loss.requires_grad:
            raise TaskError(
                "backward() was given a loss without a graph (requires_grad is False): nothing could be learned from "
                "it. Compute it from the model's outputs, without detach(), .item() or torch.no_grad()."
            )
        if loss.numel() != 1 and not kwargs:
            raise TaskError(f"backward() was given a loss of shape {tuple(loss.shape)}. Take its mean() or sum().")
        if num_items is not None:
            loss = self._items.weigh(loss, num_items, self._accumulated_parameters)
        else:
            if self._items.has_open_steps:
                self._items.refuse_plain()
            loss = self._accumulation.divide(loss)
        if self._scale is not None:
            loss = self._scale.scale(loss, starts_group=self._accumulation.starts_group)
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]  # torch has no types here

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-batch: gradients are added up, and exchanged and stepped on when it is the last of its group.

        Args:
            models: those that are trained inside, with one forward and backward each.
        """
        accumulation = self._accumulation
        outer, accumulation.models = accumulation.models, models
        try:
            accumulation.begin_micro_batch(models, self._accumulated_parameters)
            with ExitStack() as stack:
                if not (accumulation.sync_gradients or self._syncs_each_batch):
                    for model in models:
                        stack.enter_context(self.no_sync(model))
                yield
            accumulation.end_micro_batch(models)
        finally:
            accumulation.models = outer

    def _accumulated_parameters(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients the present group adds up: of its models, and of their optimizers."""
        models = self._accumulation.models
        found = {id(p): p for model in models or self._models for p in model.parameters()}
        for optimizer in self._optimizers:
            held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
            if not models or not held.keys().isdisjoint(found):
                found |= held
        return list(found.values())

    def no_sync(self, model: nn.Module) -> Any:
        """Return a context in which backward leaves gradients on this rank, until one outside of it.

        Args:
            model: what was prepared, or what it was prepared from.
        """
        prepared = self._prepared.get(id(model), model)
        return self.strategy.no_sync(prepared.engine if isinstance(prepared, AcceleratedModel) else model)

    def autocast(self) -> Any:
        """Return a context for computation outside of a model in the mixed precision."""
        return nullcontext() if self._make_context is None else self._make_context()

    def unscale_gradients(self, optimizer: Optimizer | Iterable[Optimizer] | None = None) -> None:
        """Divide the gradients of optimizers (all unless told) by the loss scale, once per step."""
        if self._scale is None:
            return
        chosen = self._optimizers if optimizer is None else optimizer
        for one in [chosen] if isinstance(chosen, Optimizer) else list(chosen):
            self._scale.unscale(one.optimizer if isinstance(one, AcceleratedOptimizer) else one)

    def _unscale_those_of(self, parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Unscale the optimizers that hold some of the parameters: others may be in the midst of a group."""
        found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self._scale is not None:
            wanted = set(map(id, found))
            for optimizer in self._optimizers:
                if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"]):
                    self.unscale_gradients(optimizer)
        return found

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scale gradients down so that their total norm is at most `max_norm`; call it when `sync_gradients`.

        Returns:
            The norm before (0-dim, on the device, alike on every rank). Does not wait for the device.
        """
        return nn.utils.clip_grad_norm_(self._unscale_those_of(parameters), max_norm, norm_type)

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each element of gradients to ± `clip_value`; call it when `sync_gradients`."""
        nn.utils.clip_grad_value_(self._unscale_those_of(parameters), clip_value)

    def set_trigger(self) -> None:
        """Note on this rank that something has happened of which all shall hear at `check_trigger`."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Tell whether any rank has called `set_trigger` since the last time. Collective, on the host."""
        found = self.state.joined().any(self._trigger)
        self._trigger = False
        return found

    # Between the processes

    def gather(self, tensor: object) -> Any:
        """Return every rank's tensors, one after the other along the first dimension. Collective; see `gather`.

        While a prepared loader is read, ranks may have different numbers of rows (of the last batch): the rows of all
        ranks follow each other, those of a batch that pads a rank without data last. `gather_for_metrics` leaves them
        out.

        Raises:
            TypeError: a leaf is not a tensor.
            ConfigurationError: dtypes or shapes differ, in more than rows or outside of a loader; on every rank.
        """
        if self._accumulation.place is None:
            return gather(tensor)
        return gather_real(tensor, False, self.state.joined(), "gather")

    def gather_for_metrics(self, input_data: object, use_gather_object: bool = False) -> Any:
        """Return every rank's results for the present micro-batch of the loader that is being read. Collective.

        Padding is left out, also the rows of `loss.repeat(batch_size)` that exceed a short last batch. Ranks may have
        different numbers of rows: the rows of all passes together are the data set's, each once.

        Args:
            input_data: tensors (with rows) in lists, tuples, dicts; or other objects, in a list.
            use_gather_object: gather picklable objects: the lists of all ranks, one after the other.
        """
        place = self._accumulation.place
        padding = place is not None and place.weight == 0
        if place is not None and place.num_rows is not None:
            input_data = self._accumulation.loader.trim_rows(input_data)
        if use_gather_object or next(iterate_tensors(input_data), None) is None:
            values = input_data if isinstance(input_data, (list, tuple)) else [input_data]
            return gather_objects([] if padding else list(values), self.state.joined())
        return gather_real(input_data, padding, self.state.joined())

    def reduce(self, tensor: object, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or mean of every rank's tensors, times `scale`. Collective; see `reduce`."""
        return reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: object, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Return tensors as long in one dimension as the longest of all ranks. Collective."""
        return pad_across_processes(tensor, dim, pad_index, pad_first)

    # Saving and letting go

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's own model out of what was prepared, compiled or wrapped by torch, in any order.

        Args:
            model: What `prepare` returned, or `torch.compile` of it, DistributedDataParallel or DataParallel.
            keep_fp32_wrapper: Makes no difference: the model's own forward was never changed. Default: True.
            keep_torch_compile: Return a compiled module where one was around the model; `model` itself is left as it
                is. Default: True.
        """
        del keep_fp32_wrapper
        return unwrapped(model, keep_torch_compile=keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole state dict of a model by its own names."""
        return dict(self.unwrap_model(model, keep_torch_compile=False).state_dict())

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights on the main process, offloaded and quantized ones too; see `save_model`."""
        if self.state.is_main_process:
            save_model(
                self.unwrap_model(model, keep_torch_compile=False), save_directory, max_shard_size, safe_serialization
            )

    def register_for_checkpointing(self, *objects: object) -> None:
        """Have `save_state` and `load_state` take further objects along, the same on every rank.

        Raises:
            ConfigurationError: one has no `state_dict` and `load_state_dict`.
        """
        for one in objects:
            if not all(callable(getattr(one, name, None)) for name in ("state_dict", "load_state_dict")):
                raise ConfigurationError(f"{type(one).__name__} has no state_dict and load_state_dict. Define both.")
        self._others.extend(objects)

    @known_arguments(partial(refuse_option, "save_state"))
    def save_state(self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True) -> str:
        """Write everything that was prepared as a checkpoint, in the place of one that is there. Collective; blocks.

        Weights, optimizers, schedules, the loss scale, the place in the data, all ranks' generators and registered
        objects: a loop that loads it goes on to the last bit. Call it between two optimizer steps, on every rank.

        Args:
            output_dir: The folder; it has to be given.
            safe_serialization: False is warned of: weights are written as safetensors, never pickled. Default: True.

        Returns:
            The folder.

        Raises:
            CheckpointError: something is there that is no checkpoint, or cannot be saved.
            ConfigurationError: no folder was given, or an option that is unknown; or the loop stands within a group of
                micro-batches.
        """
        output_dir = checked_folder("save_state", "output_dir", output_dir)
        self._accumulation.refuse_open_group()
        if not safe_serialization:
            warnings.warn(
                "save_state(safe_serialization=False): weights are written as safetensors all the same, never pickled; "
                "load_state reads them.",
                TrainwrightWarning,
                stacklevel=2,
            )
        save_loop(Path(output_dir), self._objects(), self._loader_options.seed, self.state.joined())
        return os.fspath(output_dir)

    @known_arguments(partial(refuse_option, "load_state"))
    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Put back what `save_state` wrote into the same objects, prepared anew. Every rank reads the folder.

        The next pass over each loader goes on where it stood, also on another number of processes; `skip_first_batches`
        may be used, and need not.

        Args:
            input_dir: The folder; it has to be given.
            load_kwargs: Options of `torch.load`, which is not used; only None or an empty mapping. Default: None.

        Raises:
            FileNotFoundError: nothing is there.
            CheckpointError: it is damaged, of another loop, or of data in another order.
            ConfigurationError: no folder was given, or an option that is unknown.
        """
        if load_kwargs:
            refuse_option("load_state", "load_kwargs")
        input_dir = checked_folder("load_state", "input_dir", input_dir)
        load_loop(Path(input_dir), self._objects(), self._loader_options.seed, self.state.joined())

    def _objects(self) -> LoopObjects:
        models = [self.unwrap_model(model, keep_torch_compile=False) for model in self._models]
        return LoopObjects(
            models, self._optimizers, self._schedulers, self._dataloaders, self._scale, self._others, self.device
        )

    def free_memory(self, *objects: object) -> list[Any]:
        """Forget everything that was prepared, and give memory back; returns a None for each of `objects`.

        The loop's own references must go too: `model, optimizer = accelerator.free_memory(model, optimizer)`.
        """
        for loader in self._dataloaders:
            loader.prepared.close()
        for kept in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            kept.clear()
        self._prepared.clear()
        self._scale = None if self._scale is None else LossScale(self.device.type)
        self._accumulation = self._accumulation.restarted()
        self._items = ItemCounts(self._accumulation, self.strategy, scaled=self._scale is not None)
        found: list[Any] = [None] * len(objects)
        del objects
        release_memory()
        return found

    def end_training(self) -> None:
        """Leave the other processes, at the end of a script; does not wait for them."""
        self.state.destroy_process_group()

    def clear(self, *objects: object) -> list[Any]:
        """Do what `free_memory` does."""
        return self.free_memory(*objects)
