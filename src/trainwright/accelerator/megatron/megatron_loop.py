"""User-written loops under `MegatronLMPlugin`: one call of the model runs all micro-batches of a step."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainwright.accelerator.megatron.megatron_schedule import MegatronLMDummyScheduler, MegatronSchedule
from trainwright.accelerator.megatron.train_steps import AbstractTrainStep, GPTTrainStep, make_train_step
from trainwright.core.errors import ConfigurationError
from trainwright.core.tree import map_tensors
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.engine import Engine
from trainwright.strategies.megatron.pipelined_loop import PipelineOutput, loss_of_output
from trainwright.strategies.megatron.plugin import MegatronLMPlugin
from trainwright.strategies.megatron.step import Part, divide
from trainwright.strategies.shards import full_output
from trainwright.strategies.steps.gradients import GradientClip, parameters_of

B = TypeVar("B")
T = TypeVar("T")
# The newest loop, under the key "loop". Weak, so that a loop that the script no longer references is freed.
_newest: weakref.WeakValueDictionary[str, MegatronLoop] = weakref.WeakValueDictionary()


class MegatronLoop:
    """A user-written loop under `MegatronLMPlugin`.

    Args:
        plugin: The plugin. Its fields for steps and schedules may be set until the model is called.
        engine: The engine, after its start.
        forward_backward: `Accelerator.forward_backward`.
        num_steps: `gradient_accumulation_steps` of the Accelerator. Must be 1.

    Raises:
        ConfigurationError: `num_steps` is more than 1.
    """

    def __init__(
        self, plugin: MegatronLMPlugin, engine: Engine, forward_backward: Callable[..., torch.Tensor], num_steps: int
    ) -> None:
        if num_steps > 1:
            raise ConfigurationError(
                f"gradient_accumulation_steps={num_steps} with a MegatronLMPlugin, whose step consists of its "
                "num_micro_batches. Use MegatronLMPlugin(num_micro_batches=…)."
            )
        self.plugin = plugin
        self._engine = engine
        self._forward_backward = forward_backward
        self._is_direct = False  # calls of the model only run its forward; see `direct`
        self._clipped: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers with the hook of `clip`
        # The training step of each model, once the model was called. Only with the plugin's custom functions.
        self._steps: weakref.WeakKeyDictionary[nn.Module, AbstractTrainStep] = weakref.WeakKeyDictionary()
        _newest["loop"] = self

    @property
    def data_ranks(self) -> DataRanks:
        """The data-parallel ranks of the run."""
        return self._engine.data_ranks

    def enlarge(self, loader: T) -> T:
        """Return a DataLoader whose batches have the rows of all micro-batches of a step.

        Return other loaders, and all loaders with one micro-batch, unchanged. The plugin receives the sizes of batches
        if they are not set.
        """
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
            return loader
        sampler = loader.batch_sampler
        num_micro_batches = self.plugin.num_micro_batches or 1
        micro_batch_size = getattr(sampler, "batch_size", None)
        if micro_batch_size is not None and "global_batch_size" not in vars(self.plugin):
            self.plugin.set_training_args(micro_batch_size, self.data_ranks.size)
        if num_micro_batches == 1:
            return loader
        if micro_batch_size is None:
            raise ConfigurationError(
                f"{type(sampler).__name__} has no batch_size, which num_micro_batches={num_micro_batches} multiplies. "
                "Use torch's BatchSampler, or a DataLoader with batch_size=None that returns batches of all "
                "micro-batches."
            )
        larger_sampler = copy.copy(sampler)
        vars(larger_sampler)["batch_size"] = micro_batch_size * num_micro_batches
        larger_loader = copy.copy(loader)
        # DataLoader refuses to set its attributes after __init__. `given` is the user's loader.
        vars(larger_loader).update(batch_sampler=larger_sampler, given=loader)
        if loader.batch_size is not None:
            vars(larger_loader)["batch_size"] = micro_batch_size * num_micro_batches
        return larger_loader

    def clip(self, optimizer: Optimizer) -> None:
        """Register a hook that clips gradients before each step, if the plugin sets `gradient_clipping`."""
        if not self.plugin.gradient_clipping or optimizer in self._clipped:
            return
        self._clipped.add(optimizer)
        clip = GradientClip(self.plugin.gradient_clipping)

        def before_step(stepped: Optimizer, *_: object) -> None:
            self._engine.gradients.clip(parameters_of([stepped]), clip)

        optimizer.register_step_pre_hook(before_step)

    def schedule(self, dummy: MegatronLMDummyScheduler, optimizer: Optimizer, *, per_process: bool) -> None:
        """Let a placeholder act as the schedule that the plugin describes.

        Args:
            per_process: Divide the placeholder's numbers of steps by the number of data-parallel ranks.
        """
        ranks = self.data_ranks.size if per_process else 1
        total = (dummy.total_num_steps or 0) // ranks
        warmup = dummy.warmup_num_steps // ranks
        dummy.stand_for(MegatronSchedule(optimizer, self.plugin, total, warmup))

    def direct(self, step: Callable[[B], T]) -> Callable[[B], T]:
        """Return a function that calls `step`. Calls of the model in `step` only run the model's forward."""

        def run(batch: B) -> T:
            was_direct = self._is_direct
            self._is_direct = True
            try:
                return step(batch)
            finally:
                self._is_direct = was_direct

        return run

    def run(self, model: nn.Module, call: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Run a prepared model's forward, and in training also its backward. Return the output. Collective.

        In training, the output has the mean loss of all micro-batches, and their logits with `return_logits`. Its
        backward adds no gradients to the model, because they exist already. In evaluation, the output receives the mean
        loss over ranks, if the model returns a loss.
        """
        if self._is_direct:
            return call(*args, **kwargs)
        if model.training and torch.is_grad_enabled():
            return self._train(model, call, args, kwargs)
        return self._evaluate(model, call, args, kwargs)

    def _evaluate(
        self, model: nn.Module, call: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Any:
        with torch.no_grad():
            loss, output = self._forward(model, call, args, kwargs)
        if loss is None:
            return output
        if not isinstance(output, dict):
            output = PipelineOutput(logits=output)
        output["loss"] = self.data_ranks.all_gather(loss.detach()).mean()
        return output

    def _train(
        self, model: nn.Module, call: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> PipelineOutput:
        parts = divide((args, kwargs), self.plugin.num_micro_batches or 1)
        logits_of_parts: list[torch.Tensor] = []

        def loss_of_part(part: Part) -> torch.Tensor:
            part_args, part_kwargs = part.data
            loss, output = self._forward(model, call, part_args, part_kwargs)
            if loss is None:
                loss = loss_of_output(output, type(model).__name__)
            logits = output.get("logits") if isinstance(output, dict) else output
            if self.plugin.return_logits and isinstance(logits, torch.Tensor):
                logits_of_parts.append(full_output(logits).detach())
            return loss * part.weight * len(parts)  # `forward_backward` divides by the number of parts

        loss = self._forward_backward(loss_of_part, parts)
        loss = self.data_ranks.all_gather(full_output(loss)).mean()  # in a pipeline, all ranks have this mean already
        # The loss has a graph of its own, so that `accelerator.backward(loss)` of the user's loop has no effect.
        whole_output = PipelineOutput(loss=loss.detach().requires_grad_())
        if self.plugin.return_logits:
            whole_output["logits"] = torch.cat(logits_of_parts) if logits_of_parts else None
        return whole_output

    def _forward(
        self, model: nn.Module, call: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[torch.Tensor | None, Any]:
        """Run a forward. Return the micro-batch's loss (None if the model returns none) and the output."""
        plugin = self.plugin
        has_custom_step = (
            plugin.custom_train_step_class or plugin.custom_get_batch_function or plugin.custom_loss_function
        )
        if not has_custom_step:
            output = call(*args, **kwargs)
            loss = output.get("loss") if isinstance(output, dict) else None
            return (None if loss is None else full_output(loss)), output
        if args:
            raise ConfigurationError(
                f"{type(model).__name__} received {len(args)} positional argument(s), but the plugin's custom "
                "functions read a batch of named arguments. Call model(**batch)."
            )
        if model not in self._steps:
            self._steps[model] = make_train_step(plugin, model)
        train_step = self._steps[model]
        forward = call
        if isinstance(train_step, GPTTrainStep):
            forward = partial(train_step.call_model, call, plugin.return_logits)
        result, loss_func = train_step.forward_step(iter([kwargs]), forward)
        loss, entries = loss_func(result)
        return loss, PipelineOutput(entries)


def avg_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the means of losses over the data-parallel ranks, as one tensor. Collective over these ranks.

    Args:
        losses: Losses of this rank (0-dim).
    """
    stacked = torch.stack([loss.detach().reshape(()) for loss in losses])
    return _data_ranks().all_gather(stacked).mean(0)


def gather_across_data_parallel_groups(tensor: object) -> Any:
    """Concatenate the tensors of all data-parallel ranks along the first dimension. Collective over these ranks.

    Args:
        tensor: A tensor, or lists, tuples and dicts of tensors. Each tensor has the same shape on every rank.
    """
    ranks = _data_ranks()

    def gather(one: torch.Tensor) -> torch.Tensor:
        rows = one if one.dim() else one[None]
        return ranks.all_gather(rows).flatten(0, 1)  # (ranks, rows, …) → (all rows, …)

    return map_tensors(gather, tensor)


def _data_ranks() -> DataRanks:
    """Return the data-parallel ranks of the newest loop."""
    loop = _newest.get("loop")
    if loop is None:
        raise ConfigurationError("no Accelerator has a MegatronLMPlugin. Pass Accelerator(megatron_lm_plugin=…).")
    return loop.data_ranks
