"""Local SGD in user-written loops: each rank trains a replica, and replicas are averaged after a number of steps."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from types import TracebackType
from typing import Self

from torch import nn

from trainwright.accelerator.accelerator import Accelerator
from trainwright.accelerator.gradient_state import check_steps
from trainwright.core.errors import ConfigurationError
from trainwright.strategies.ddp.replicas import average_replicas


class LocalSGD:
    """Context manager that averages a model's parameters over processes instead of the gradients of every step.

    Parameters are averaged at every `local_sgd_steps`-th call of `step` and at the end of the block. Each average
    copies rank 0's buffers to all ranks. Within the block, gradients, their norms and the mean over `num_items` are
    those of one rank. With one process, the block has no effect.

        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch))
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    local_sgd.step()

    Every call of `step` counts, as in Accelerate. Above, `sync_gradients` makes them optimizer steps. Calls that
    average are collective, and so is the end of the block, unless an error ends it.

    Args:
        accelerator: The Accelerator that has prepared the model.
        model: The prepared model.
        local_sgd_steps: Calls of `step` from one average to the next, ≥ 1. Default: 8.
        enabled: False: the block has no effect, whatever the other arguments are. Default: True.

    Attributes:
        enabled: The argument. Always False with one data-parallel rank.
        num_steps: Number of calls of `step`.

    Raises:
        ConfigurationError: The block is enabled, and `local_sgd_steps` is not a whole number of at least 1, the
            strategy does not keep a full replica on every rank, or the mixed precision is fp16.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int = 8, enabled: bool = True
    ) -> None:
        if enabled:
            check_steps("local_sgd_steps", local_sgd_steps)
            _check(accelerator)
        self.enabled = enabled and accelerator.engine.data_ranks.size > 1
        self.num_steps = 0
        self._accelerator = accelerator
        self._model = model
        self._local_sgd_steps = local_sgd_steps
        self._block = ExitStack()  # restores the averaging of gradients at the end of the block

    def __enter__(self) -> Self:
        """Stop averaging gradients.

        Raises:
            ConfigurationError: The model averages its gradients in every backward.
        """
        if self.enabled:
            context = self._accelerator.no_sync(self._model)
            if isinstance(context, nullcontext):  # what `Engine.no_sync` returns for such a model
                raise ConfigurationError(
                    f"LocalSGD: averaging the gradients of {type(self._model).__name__} cannot be switched off. Pass "
                    "a model that prepare() returned and that has parameters to train, without "
                    "DistributedDataParallelKwargs(static_graph=True)."
                )
            self._block.enter_context(context)
            gradients = self._accelerator.engine.gradients
            # Norms and the mean over `num_items` are then those of this rank.
            self._block.callback(setattr, gradients, "averaged", gradients.averaged)
            gradients.averaged = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Average the parameters, unless an error ends the block. Resume averaging of gradients."""
        self._block.close()
        if self.enabled and kind is None:
            self._average()

    def step(self) -> None:
        """Count a call, and average the parameters at every `local_sgd_steps`-th call."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self._local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        model = self._model
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        average_replicas(self._accelerator.engine.data_ranks, trained, model.buffers())


def _check(accelerator: Accelerator) -> None:
    """Check that replicas can be trained separately and averaged."""
    name = type(accelerator.strategy).__name__
    engine = accelerator.engine
    if not engine.capabilities.independent_steps:
        raise ConfigurationError(
            f"LocalSGD averages full replicas, one on each process, which {name} does not keep. Use strategy='ddp', "
            "or LocalSGD(enabled=False)."
        )
    if not engine.gradients.averaged:
        raise ConfigurationError(
            f"LocalSGD was used in a loop whose replicas are averaged already, by {name} or an outer LocalSGD block. "
            "Use only one of them."
        )
    if accelerator.mixed_precision == "fp16" and engine.data_ranks.size > 1:
        raise ConfigurationError(
            "LocalSGD with mixed_precision='fp16': each process would skip different steps and have a different loss "
            "scale. Use mixed_precision='bf16'."
        )
