"""Training through an engine of DeepSpeed: optimizer states, gradients and parameters in pieces (ZeRO).

The engine runs backward, averages, clips and steps; groups of micro-batches, their weights and checkpoints are this
framework's. Source: Rajbhandari et al., "ZeRO" (2020), "ZeRO-Infinity" (2021).
"""

from __future__ import annotations

import datetime
import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trainwright.callbacks.hook_table import HookTable
from trainwright.core.duration import Duration
from trainwright.core.errors import ConfigurationError, TaskError
from trainwright.core.hidden_names import plain_name
from trainwright.core.process import Topology
from trainwright.core.run import Run
from trainwright.core.task import TaskModule
from trainwright.core.tree import map_tensors
from trainwright.strategies.capabilities import Capabilities
from trainwright.strategies.data_parallel import DataParallel
from trainwright.strategies.deepspeed.accelerate_names import read_accelerate_config
from trainwright.strategies.deepspeed.adagrad import keep_own_adagrad
from trainwright.strategies.deepspeed.checks import (
    TrainedParameters,
    check_optimizers,
    check_task,
    check_unbuilt,
    keep_groups,
)
from trainwright.strategies.deepspeed.config import EngineConfig, for_building, for_engine
from trainwright.strategies.deepspeed.disk import keep_unaligned_gradients
from trainwright.strategies.deepspeed.facts import collect_facts
from trainwright.strategies.deepspeed.frozen import FrozenEngines
from trainwright.strategies.deepspeed.library import join, leave, load_library, quiet_imports
from trainwright.strategies.deepspeed.options import read_options
from trainwright.strategies.deepspeed.pieces import FlatPieces, ParameterPieces, Pieces
from trainwright.strategies.deepspeed.placeholders import DummyOptim, DummyScheduler, refuse_schedule_of_dummy
from trainwright.strategies.deepspeed.state import EngineState, as_torch
from trainwright.strategies.deepspeed.traces import Traces
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.gradients import GradientClip, clip_gradients, parameters_of
from trainwright.strategies.non_finite import NonFinite
from trainwright.strategies.precision import Precision
from trainwright.strategies.saves_pieces import state_dict_type_name
from trainwright.strategies.step_module import StepModule
from trainwright.strategies.strategy import MakeOptimizers
from trainwright.strategies.transfer import make_transfer
from trainwright.strategies.units import matching, replace_parameters


class DeepSpeedStrategy(DataParallel):
    """Trains a task through DeepSpeed's ZeRO.

    Args:
        config: DeepSpeed's own configuration, a dict or the path of a JSON file. `"auto"` in it takes what arguments,
            model and data say. None: what the options make.
        state_dict_type: `"sharded"`: each rank writes its pieces of a checkpoint; `"full"`: rank 0 gathers the whole on
            its host and writes it.
        logging_level: of DeepSpeed's messages.
        timeout, hang_timeout, process_group_backend: see `DDPStrategy`.
        options: those of `ZeroOptions`, by Lightning's names. With a `config` only those that are given count.

    Attributes:
        engine: DeepSpeed's engine during a stage that has one; None otherwise.
        resolved_config: the configuration with every `"auto"` filled in, once a stage has an engine.

    Raises:
        ConfigurationError: an option that is unknown or impossible, or `config` says otherwise.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | None = None,
        *,
        state_dict_type: str = "sharded",
        logging_level: int = logging.WARNING,
        timeout: float | datetime.timedelta | Duration | str | None = None,
        hang_timeout: float | datetime.timedelta | Duration | str | None = "auto",
        process_group_backend: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(timeout=timeout, hang_timeout=hang_timeout, process_group_backend=process_group_backend)
        self.state_dict_type = state_dict_type_name(state_dict_type)
        self.logging_level = logging_level
        self.options = read_options(options)
        self._source = (config, self.options, dict(options))
        self.config = EngineConfig(*self._source)
        self.stage = stage = self.config.stage
        gathers = stage == 3 or bool(self.options.frozen_modules)
        self.capabilities = Capabilities(
            gradients="full" if stage == 0 else "hidden",
            manual_optimization=False,
            lockstep_evaluation=gathers,
            whole_weights=stage == 0,
            weight_averages=stage == 0,
            lone_steps=False,
            closures=False,
            inference_mode=not gathers,  # weights that are gathered in it could not be trained on
            owns_optimizer_step=True,
            state_rests=False,
        )
        self.engine: Any = None
        self.resolved_config: dict[str, Any] = {}
        self._library: Any = None
        self._pieces: Pieces | None = None
        self._held: EngineState | None = None
        self._traces: Traces | None = None
        self._frozen: FrozenEngines | None = None
        self._boundary = True
        self._trained: TrainedParameters | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **arguments: Any) -> Self:
        """Make the strategy from Hugging Face Accelerate's `deepspeed_config`, or the arguments of its DeepSpeedPlugin.

        Raises:
            ConfigurationError: see `read_accelerate_config`.
        """
        return cls(**read_accelerate_config(config), **arguments)

    # Before a run

    def configure(self, settings: EngineSettings) -> None:
        super().configure(settings)
        if settings.compile_options is not None:
            raise ConfigurationError(
                "compile= with DeepSpeed, whose engine gathers parameters within a step. Call compile() on modules in "
                "configure_model instead, or use strategy='fsdp'."
            )
        self.config = EngineConfig(*self._source)  # a strategy may be given to one Trainer after the other
        self.config.check_hardware(settings.device_type, settings.num_processes)
        self.config.set_precision(settings.precision, settings.device_type)

    def check_run(self, *, accumulate_grad_batches: int, clip: GradientClip | None) -> None:
        self.config.check_run(accumulate_grad_batches, clip)

    def setup(self, topology: Topology) -> None:
        library = load_library(self.device_type, self.logging_level)
        super().setup(topology)
        self._library = library
        join(library, topology)

    # Model and optimizers

    def prepare(self, task: TaskModule, make_optimizers: MakeOptimizers | None) -> list[Optimizer]:
        self.task = task
        check_task(task, trains=make_optimizers is not None)
        check_unbuilt(task, self.config)
        with self.precision.default_dtype(), self._building():
            task.configure_model()
        if self.when_built is not None:
            self.when_built()
        if self.precision.param_dtype is not None:
            task.to(self.precision.param_dtype)
        if self.stage < 3:
            task.to(self.device)
        for parameter in task.parameters():
            parameter.data = parameter.data.contiguous()  # DeepSpeed broadcasts no others
        for buffer in task.buffers():
            buffer.data = buffer.data.to(self.device)  # at stage 3 the engine moves one parameter after the other
            dist.broadcast(buffer, src=0)
        optimizers = make_optimizers() if make_optimizers is not None else []
        if make_optimizers is not None:
            check_optimizers(optimizers, task, self.config, self.precision)
            optimizers = [self._start_engine(optimizers[0])]
        elif self.stage == 3:
            self._start_engine(None)
        else:
            for parameter in task.parameters():
                dist.broadcast(parameter.detach(), src=0)
        self.optimizers = optimizers
        self._context = self._forward_context()
        return optimizers

    def _building(self) -> AbstractContextManager[Any]:
        """Return the context in which stage 3 cuts modules as soon as each of them is built."""
        if self.stage < 3:
            return nullcontext()
        device = self.config.offload("offload_param")
        context: AbstractContextManager[Any] = self._library.zero.Init(
            config_dict_or_path=for_building(self.config.content), remote_device=None if device == "none" else device
        )
        return context

    def _start_engine(self, optimizer: Optimizer | None) -> Any:
        """Let an engine take the task's parameters; returns the optimizer that it steps. Collective."""
        task, run = self.task, self.task.trainer
        names = {parameter: plain_name(name) for name, parameter in task.named_parameters()}
        given = _groups_of(optimizer)
        members = [[names[p] for p in group["params"]] for group in given]
        facts = collect_facts(run, self.config.content, optimizer, dp_size=self.dp_size)
        self.resolved_config = self.config.resolved(facts, trains=optimizer is not None)
        dtypes = {id(parameter): parameter.dtype for parameter in task.parameters()}
        root = StepModule(task)
        self._traces = Traces(root)
        for module in self._leaf_modules():
            self._library.utils.set_z3_leaf_module(module, True)
        config = for_engine(self.resolved_config)
        is_own = optimizer is not None and not isinstance(optimizer, DummyOptim)
        self._frozen = FrozenEngines(task, self.options.frozen_modules)
        with quiet_imports():
            self._frozen.start(self._library, config)
        with quiet_imports(), self._frozen.taken_out():
            self.engine, _, _, schedule = self._library.initialize(
                model=root,
                optimizer=optimizer if is_own else None,
                model_parameters=None if is_own or optimizer is None else given,
                config=config,
                dist_init_required=False,
            )
        keep_unaligned_gradients(self.engine.optimizer)
        keep_own_adagrad(self.engine)
        self._traces.note()
        self.engine.lr_scheduler = None  # the Trainer steps it, once per unit
        self._take_schedule(schedule, run)
        real = None if optimizer is None else self.engine.basic_optimizer
        if real is not None:
            keep_groups(real, type(task).__name__)
        groups = given if is_own else [] if real is None else list(real.param_groups)
        self._hold(list(zip(groups, members, strict=True)), dtypes, trains=real is not None)
        self._step = self.engine
        self._eval_step = self.engine if self.stage == 3 else None
        return real

    def _hold(
        self, groups: list[tuple[dict[str, Any], list[str]]], dtypes: dict[int, torch.dtype], *, trains: bool
    ) -> None:
        """Find out where the engine has put what was the task's."""
        if trains and self.stage > 0:
            self._trained = TrainedParameters(self.task)
            kind = ParameterPieces if self.stage == 3 else FlatPieces
            self._pieces = kind(self.engine.optimizer, self.device)
        if self.stage > 0:
            self._held = EngineState(
                self._library,
                self.task,
                self._pieces,
                groups,
                is_main=self.is_main,
                dtypes=dtypes,
                keeps_float32=self.precision.param_dtype is None,
            )

    def _leaf_modules(self) -> list[nn.Module]:
        names = self.options.moe_leaf_modules
        if not names:
            return []
        if self.stage < 3:
            raise ConfigurationError(
                f"moe_leaf_modules={names!r} at stage={self.stage}: modules are gathered at stage 3 only. Leave it out."
            )
        return matching(self.task, names, "moe_leaf_modules")

    def _take_schedule(self, schedule: Any, run: Run) -> None:
        """Let what stands for DeepSpeed's scheduler hand on to it."""
        for config in run.lr_scheduler_configs:
            refuse_schedule_of_dummy(config.scheduler, self.config.origin)
            if isinstance(config.scheduler, DummyScheduler):
                if schedule is None:
                    raise ConfigurationError(
                        f"configure_optimizers returned a DummyScheduler, and {self.config.origin} has no 'scheduler'. "
                        "Add one there, or return a real one."
                    )
                config.scheduler.stand_for(schedule)
                config.interval = "step"  # what it counts
                schedule = None
        if schedule is not None:
            raise ConfigurationError(
                f"{self.config.origin} has a 'scheduler', and configure_optimizers returned no DummyScheduler that "
                "stands for it. Return {'optimizer': …, 'lr_scheduler': DummyScheduler(optimizer)}, or leave it out "
                "there."
            )

    # Precision

    @property
    def _casts(self) -> bool:
        """Whether the engine computes with 16-bit parameters beside float32 ones."""
        content = self.config.content
        return any(content.get(part, {}).get("enabled") is True for part in ("bf16", "fp16"))

    def _forward_context(self) -> Any | None:
        if self.engine is not None and self._casts and self.precision.param_dtype is None:
            return None  # parameters and inputs have the dtype
        return self.precision.forward_context(self.device.type)

    def attach(self, run: Run, hooks: HookTable, sink: Any, *, counts_items: bool = True) -> None:
        super().attach(run, hooks, sink, counts_items=counts_items)
        if self.engine is None:
            return
        if self._casts and self.precision.param_dtype is None:
            like = Precision.parse("bf16-true" if self.precision.name.startswith("bf16") else "16-true")
            self._transfer = make_transfer(self.task, getattr(run, "datamodule", None), self.device, like)
        self._backward = self._run_backward
        self._zeroed = not self._zero_late  # the engine zeroes by itself; listeners are told

    # The step

    def _run_backward(self, loss: torch.Tensor) -> None:
        if self._trained is not None:
            self._trained.check()
        self.engine.backward(loss, scale_wrt_gas=False)

    def _synchronizing(self, last: bool) -> AbstractContextManager[Any]:
        if last is not self._boundary:
            self._boundary = last
            self.engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def _leave_out(self, skipped: list[int], group: Any, weights: Any, total: Any) -> Any:
        raise TaskError(
            f"{type(self.task).__name__}.training_step returned None on rank {self.processes.rank}: DeepSpeed averages "
            "gradients in the last backward of a step, and would wait for it. Return a loss of zero that is connected "
            "to the parameters instead, for example 0 * output.sum()."
        )

    def optimizer_step(self, clip: GradientClip | None) -> torch.Tensor | None:
        if clip is None and self.config.clipping is not None:
            clip = GradientClip(self.config.clipping)
        norm = self._prepare_clipping(clip)
        if self._own_step is None:
            self.engine.step()
        else:
            stepped: Any = EngineOptimizer(self.optimizers[0], self.engine)
            self._own_step(self.run.state.epoch, self._last_idx, stepped, self._closure())
        self._group = self._loss = None
        self._zeroed = not self._zero_late
        if self._pieces is not None:
            norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32, device=self.device)
        return norm

    def _prepare_clipping(self, clip: GradientClip | None) -> torch.Tensor | None:
        """Clip what the engine does not, and tell it about the rest."""
        if self._pieces is None:
            return None if clip is None else clip_gradients(parameters_of(self.optimizers), clip)
        by_norm = clip is not None and clip.algorithm == "norm"
        self.engine.optimizer.clip_grad = clip.value if by_norm and clip is not None else 0.0
        if clip is not None and not by_norm:
            for _, gradient in self._pieces.gradients():
                gradient.clamp_(-clip.value, clip.value)
        return None

    def _zero_gradients(self, idx: int) -> None:
        for hook in self.hooks.on_before_zero_grad:
            hook(self.run, self.task, self.optimizers[0])
        self._zeroed = True

    def discard_gradients(self) -> None:
        if self._pieces is None:
            super().discard_gradients()
        else:
            self._pieces.discard_gradients()
            self._group = self._loss = None
            self._zeroed = True
        if self.engine is not None:
            self._synchronizing(True)

    def _largest_gradient(self) -> torch.Tensor:
        if self._pieces is None:
            return super()._largest_gradient()
        found = [gradient for _, gradient in self._pieces.gradients() if gradient.numel()]
        return nn.utils.get_total_norm(found, float("inf")).to(self.device)

    def explain_non_finite(self, loss: torch.Tensor) -> NonFinite:
        if self._pieces is None:
            return super().explain_non_finite(loss)
        names = {id(parameter): name for name, parameter in self.task.named_parameters()}
        found = [names[id(p)] for p, gradient in self._pieces.gradients() if not gradient.isfinite().all()]
        return NonFinite(float(loss), found)

    @contextmanager
    def rehearsal(self, *, alone: bool) -> Iterator[None]:
        if self._pieces is not None:
            raise ConfigurationError(
                f"DeepSpeed keeps weights and states in pieces of its own at stage {self.stage}, so that steps cannot "
                "be tried out and taken back. Search with strategy='ddp'."
            )
        with super().rehearsal(alone=alone):
            yield

    # Evaluation

    def begin_evaluation(self) -> None:
        for buffer in self.task.buffers():
            dist.broadcast(buffer, src=0)

    # State

    def whole_parameters(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        return super().whole_parameters(keep=keep) if self._held is None else self._held.parameters(keep=keep)

    def whole_gradients(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        if self._pieces is None or self._held is None:
            return {} if self.stage else super().whole_gradients(keep=keep)
        return self._held.gradients(keep=keep)

    @property
    def saves_pieces(self) -> bool:
        cut = self._held is not None and self._held.has_pieces
        return self.state_dict_type == "sharded" and cut and self.processes.world_size > 1

    def in_pieces(self, state: Any) -> Any:
        return state if self._held is None else map_tensors(self._held.saved, state)

    def model_state(self) -> dict[str, Any]:
        return super().model_state() if self._held is None else self._held.model(in_pieces=self.saves_pieces)

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        if self._held is None:
            return super().load_model_state(state, strict=strict)
        return self._held.load_model(state, strict)

    def optimizer_states(self) -> list[dict[str, Any]]:
        if self._pieces is None or self._held is None:
            found = super().optimizer_states()
            return [as_torch(tree, optimizer) for tree, optimizer in zip(found, self.optimizers, strict=True)]
        return [self._held.optimizer(self.optimizers[0], in_pieces=self.saves_pieces)]

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        if self._pieces is None or self._held is None:
            super().load_optimizer_state(optimizer, state)
        else:
            self._held.load_optimizer(optimizer, state)

    # The end

    def make_whole(self) -> None:
        if self._held is not None:
            new = self._held.release(self.optimizers)
            self._take_apart()
            replace_parameters(self.task, new)
        self.task.to("cpu")

    def _take_apart(self) -> None:
        """Let go of the engine, and take off the task what it has left there. Not collective."""
        frozen, self._frozen = self._frozen, None
        if frozen is not None:
            frozen.destroy()
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.destroy()
            engine.optimizer = engine.basic_optimizer = None  # it would be taken apart once more when it is freed
            del engine
        traces, self._traces = self._traces, None
        if traces is not None:
            traces.remove()
        self._pieces = self._held = self._trained = None
        self._step = self._eval_step = None

    def teardown(self) -> None:
        self._take_apart()
        library, self._library = self._library, None
        if library is not None:
            # What an engine consists of are reference cycles, which must not be the last to hold a process group: see
            # DDPStrategy.
            leave(library)
            gc.collect()
        super().teardown()


class EngineOptimizer:
    """An optimizer as a task's own `optimizer_step` sees it: its step is the engine's. All else is its own.

    Args:
        optimizer: the real one.
        engine: DeepSpeed's.
    """

    def __init__(self, optimizer: Optimizer, engine: Any) -> None:
        self.optimizer = optimizer
        self._engine = engine

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average, clip and step; returns the closure's loss."""
        loss = None if closure is None else closure()
        self._engine.step()
        return loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def _groups_of(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    if optimizer is None:
        return []
    return optimizer.given_groups if isinstance(optimizer, DummyOptim) else list(optimizer.param_groups)
