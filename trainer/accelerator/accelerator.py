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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError, TaskError
from trainwright.core.memory import release_memory
from trainwright.core.tree import iterate_tensors
from trainwright.strategies.offload.saving import save_model
from trainwright.strategies.processes.collectives import gather, gather_object, pad_across_processes, reduce
from trainwright.strategies.processes.partial_state import PartialState
from trainwright.trainer.accelerator.accumulation import Accumulation
from trainwright.trainer.accelerator.gathering import gather_real
from trainwright.trainer.accelerator.loader import AcceleratedLoader
from trainwright.trainer.accelerator.loss_scale import LossScale
from trainwright.trainer.accelerator.model import AcceleratedModel
from trainwright.trainer.accelerator.optimizer import AcceleratedOptimizer
from trainwright.trainer.accelerator.prepare import PreparesObjects
from trainwright.trainer.accelerator.scheduler import AcceleratedScheduler
from trainwright.trainer.accelerator.settings import read_settings, refuse_attribute
from trainwright.trainer.accelerator.state import LoopObjects, load_loop, save_loop

T = TypeVar("T")


class Accelerator(PreparesObjects):
    """Joins the processes, and makes a loop's objects ready for them.

    The names are those of Hugging Face's Accelerate. A step's gradient is the mean over everything it consumed: the
    last group of micro-batches is divided by its own length, a rank that runs out of data before others adds nothing,
    and a schedule advances once per optimizer step, whatever the number of processes. Without a launcher it is one
    process; `torchrun --nproc-per-node 2 script.py` makes two.

    Args:
        device_placement: move models and batches to this process's device.
        split_batches: only False: a loader's batch size is that of one process.
        mixed_precision: `"no"`, `"fp16"` or `"bf16"`.
        gradient_accumulation_steps: micro-batches of one optimizer step.
        cpu: use the CPU although there is an accelerator.
        step_scheduler_with_optimizer: False: every call of a scheduler's `step` counts.
        kwargs_handlers: `DistributedDataParallelKwargs`, for several processes.
        strategy: `"auto"` (one process: `"single"`, several: `"ddp"`), or a strategy that serves loops of others.
        seed: of the order of the data; torch's initial seed on the first process unless told.
        unknown: arguments of Accelerate that are served elsewhere; None is accepted.

    The first construction joins the other processes (collective).

    Raises:
        ConfigurationError: an argument that is unknown or not served, naming what is.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        *,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        strategy: Any = "auto",
        seed: int | None = None,
        **unknown: Any,
    ) -> None:
        settings = read_settings(
            split_batches, mixed_precision, gradient_accumulation_steps, cpu, kwargs_handlers, strategy, unknown
        )
        self.state = PartialState(cpu=cpu)
        self.strategy = settings.strategy
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
        self._accumulation = Accumulation(gradient_accumulation_steps)
        self._seed = seed
        self._models: list[nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[AcceleratedLoader] = []
        self._prepared: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._others: list[Any] = []
        self._trigger = False

    # Where it runs

    @property
    def device(self) -> torch.device:
        """What this process computes on."""
        return self.state.device

    @property
    def mixed_precision(self) -> str:
        """`"no"`, `"fp16"` or `"bf16"`."""
        return {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(self._precision.autocast_dtype, "no")  # type: ignore[arg-type]

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

    def __getattr__(self, name: str) -> Any:
        """Return what `PartialState` has: `num_processes`, `is_main_process`, `wait_for_everyone`, `print`, …"""
        if name.startswith("_") or "state" not in vars(self):
            raise AttributeError(name)
        try:
            return getattr(self.state, name)
        except AttributeError:
            raise refuse_attribute(name, [*dir(type(self)), *dir(self.state)]) from None

    # The step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward of what the loss weighs in its optimizer step. Collective when the group's last one.

        Args:
            loss: mean over the micro-batch, a scalar with a graph.
            kwargs: of `torch.Tensor.backward`.

        Raises:
            TaskError: the loss has no graph.
        """
        if not loss.requires_grad:
            raise TaskError(
                "backward() was given a loss without a graph (requires_grad is False): nothing could be learned from "
                "it. Compute it from the model's outputs, without detach(), .item() or torch.no_grad()."
            )
        weight = self._accumulation.weight
        if weight != 1:
            loss = loss * weight
        if self._scale is not None:
            loss = self._scale.scale(loss, starts_group=self._accumulation.starts_group)
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]  # torch has no types here

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-batch: gradients are added up, and exchanged and stepped on when it is the last of its group.

        Args:
            models: those that are trained inside, with one forward and backward each.
        """
        self._accumulation.begin_micro_batch()
        with ExitStack() as stack:
            if not self.sync_gradients:
                for model in models:
                    stack.enter_context(self.no_sync(model))
            yield

    def no_sync(self, model: nn.Module) -> Any:
        """Return a context in which backward leaves gradients on this rank, until one outside of it.

        Args:
            model: what was prepared, or what it was prepared from.
        """
        return self.strategy.hold_back(getattr(self._prepared.get(id(model), model), "engine", model))

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

    def gather(self, tensor: Any) -> Any:
        """Return every rank's tensors, one after the other along the first dimension. Collective; see `gather`."""
        return gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return every rank's results for the present micro-batch of the loader that is being read. Collective.

        Padding is left out, and ranks may have different numbers of rows: the rows of all passes together are the data
        set's, each once.

        Args:
            input_data: tensors (with rows) in lists, tuples, dicts; or other objects, in a list.
            use_gather_object: gather picklable objects: the lists of all ranks, one after the other.
        """
        place = self._accumulation.place
        padding = place is not None and place.weight == 0
        if use_gather_object or next(iterate_tensors(input_data), None) is None:
            values = input_data if isinstance(input_data, (list, tuple)) else [input_data]
            return gather_object([] if padding else list(values))
        return gather_real(input_data, padding, self.state.joined())

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or mean of every rank's tensors, times `scale`. Collective; see `reduce`."""
        return reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Return tensors as long in one dimension as the longest of all ranks. Collective."""
        return pad_across_processes(tensor, dim, pad_index, pad_first)

    # Saving and letting go

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's own model, whose forward was never changed: `keep_fp32_wrapper` makes no difference."""
        del keep_fp32_wrapper
        inner: Any = (
            model.module if isinstance(model, (AcceleratedModel, nn.parallel.DistributedDataParallel)) else model
        )
        found: nn.Module = inner if keep_torch_compile else getattr(inner, "_orig_mod", inner)
        return found

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

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have `save_state` and `load_state` take further objects along, the same on every rank.

        Raises:
            ConfigurationError: one has no `state_dict` and `load_state_dict`.
        """
        for one in objects:
            if not all(callable(getattr(one, name, None)) for name in ("state_dict", "load_state_dict")):
                raise ConfigurationError(f"{type(one).__name__} has no state_dict and load_state_dict. Define both.")
        self._others.extend(objects)

    def save_state(self, output_dir: str | os.PathLike[str]) -> str:
        """Write everything that was prepared as a checkpoint, in the place of one that is there. Collective; blocks.

        Weights, optimizers, schedules, the loss scale, the place in the data, all ranks' generators and registered
        objects: a loop that loads it goes on to the last bit. Call it between two optimizer steps, on every rank.

        Returns:
            The folder.

        Raises:
            CheckpointError: something is there that is no checkpoint, or cannot be saved.
            ConfigurationError: the loop stands within a group of micro-batches.
        """
        save_loop(Path(output_dir), self._objects(), self._ranks.seed, self.state.joined())
        return os.fspath(output_dir)

    def load_state(self, input_dir: str | os.PathLike[str]) -> None:
        """Put back what `save_state` wrote into the same objects, prepared anew. Every rank reads the folder.

        The next pass over each loader goes on where it stood, also on another number of processes; `skip_first_batches`
        may be used, and need not.

        Raises:
            FileNotFoundError: nothing is there.
            CheckpointError: it is damaged, of another loop, or of data in another order.
        """
        load_loop(Path(input_dir), self._objects(), self._ranks.seed, self.state.joined())

    def _objects(self) -> LoopObjects:
        models = [self.unwrap_model(model, keep_torch_compile=False) for model in self._models]
        return LoopObjects(
            models, self._optimizers, self._schedulers, self._dataloaders, self._scale, self._others, self.device
        )

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forget everything that was prepared, and give memory back; returns a None for each of `objects`.

        The loop's own references must go too: `model, optimizer = accelerator.free_memory(model, optimizer)`.
        """
        for loader in self._dataloaders:
            loader.prepared.close()
        for kept in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            kept.clear()
        self._prepared.clear()
        self._accumulation = Accumulation(self._accumulation.num_steps)
        self._scale = None if self._scale is None else LossScale(self.device.type)
        found: list[Any] = [None] * len(objects)
        del objects
        release_memory()
        return found

    def end_training(self) -> None:
        """Leave the other processes, at the end of a script; does not wait for them."""
        self.state.destroy_process_group()

    def clear(self, *objects: Any) -> list[Any]:
        """Do what `free_memory` does."""
        return self.free_memory(*objects)
