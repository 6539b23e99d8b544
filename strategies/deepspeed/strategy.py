"""Training through an engine of DeepSpeed: optimizer states, gradients and parameters in pieces (ZeRO).

The engine runs backward, averages, clips and steps; groups of micro-batches, their weights and checkpoints are this
framework's. Source: Rajbhandari et al., "ZeRO" (2020), "ZeRO-Infinity" (2021).
"""

from __future__ import annotations

import datetime
import gc
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Self

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trainwright.core.duration import Duration
from trainwright.core.errors import ConfigurationError
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.process import Topology
from trainwright.core.task import TaskModule
from trainwright.strategies.capabilities import Capabilities
from trainwright.strategies.data_parallel import DataParallel, ParallelEngine
from trainwright.strategies.deepspeed.accelerate_names import read_accelerate_config
from trainwright.strategies.deepspeed.checks import (
    TrainedParameters,
    check_optimizers,
    check_task,
    check_unbuilt,
    keep_groups,
)
from trainwright.strategies.deepspeed.config import EngineConfig, for_building, for_engine
from trainwright.strategies.deepspeed.facts import collect_facts
from trainwright.strategies.deepspeed.frozen import FrozenEngines
from trainwright.strategies.deepspeed.library import join, leave, load_library, quiet_imports
from trainwright.strategies.deepspeed.options import read_options
from trainwright.strategies.deepspeed.placeholders import DummyOptim, DummyScheduler, refuse_schedule_of_dummy
from trainwright.strategies.deepspeed.repairs import keep_own_adagrad, keep_unaligned_gradients
from trainwright.strategies.deepspeed.state import ReplicatedState, ZeroState
from trainwright.strategies.deepspeed.step import EngineStep
from trainwright.strategies.deepspeed.traces import Traces
from trainwright.strategies.deepspeed.zero_pieces import FlatPieces, ParameterPieces, ZeroPieces
from trainwright.strategies.engine import Engine, MakeOptimizers, TrainingPlan
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.precision import Precision
from trainwright.strategies.state import FullState, state_dict_type_name
from trainwright.strategies.steps.binding import StepModule
from trainwright.strategies.steps.step import Step, StepParts
from trainwright.strategies.steps.transfer import move_task
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
        self.source = (config, self.options, dict(options))
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
            trials=stage == 0,
            state_rests=False,
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **arguments: Any) -> Self:
        """Make the strategy from Hugging Face Accelerate's `deepspeed_config`, or the arguments of its DeepSpeedPlugin.

        Raises:
            ConfigurationError: see `read_accelerate_config`.
        """
        return cls(**read_accelerate_config(config), **arguments)

    # Before a run

    @property
    def config(self) -> EngineConfig:
        """DeepSpeed's configuration before a run is known."""
        return EngineConfig(*self.source)

    def config_for(self, settings: EngineSettings) -> EngineConfig:
        """Return DeepSpeed's configuration for a run.

        Raises:
            ConfigurationError: It contradicts the settings.
        """
        found = self.config
        found.check_hardware(settings.device_type, settings.num_processes)
        found.set_precision(settings.precision, settings.device_type)
        found.check_run(settings.accumulate_grad_batches, settings.clip)
        return found

    def check(self, settings: EngineSettings) -> None:
        super().check(settings)
        if settings.compile_options is not None:
            raise ConfigurationError(
                "compile= with DeepSpeed, whose engine gathers parameters within a step. Call compile() on modules in "
                "configure_model instead, or use strategy='fsdp'."
            )
        self.config_for(settings)

    def engine(self, settings: EngineSettings) -> Engine:
        return DeepSpeedEngine(self, settings)


class DeepSpeedEngine(ParallelEngine):
    """Trains a task through an engine of DeepSpeed.

    Attributes:
        engine: DeepSpeed's, while a stage has one; None otherwise.
        resolved_config: the configuration with every `"auto"` filled in, once there is an engine.
    """

    strategy: DeepSpeedStrategy

    def __init__(self, strategy: DeepSpeedStrategy, settings: EngineSettings) -> None:
        super().__init__(strategy, settings)
        self.config, self.stage = strategy.config_for(settings), strategy.stage
        self.engine: Any = None
        self.resolved_config: dict[str, Any] = {}
        self._library: Any = None
        self._pieces: ZeroPieces | None = None
        self._traces: Traces | None = None
        self._frozen: FrozenEngines | None = None
        self._trained: TrainedParameters | None = None

    def start(self, topology: Topology) -> None:
        library = load_library(self.settings.device_type, self.strategy.logging_level)
        super().start(topology)
        self._library = library
        join(library, topology)

    def prepare_models(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> NoReturn:
        raise ConfigurationError(
            "DeepSpeedStrategy runs the steps of a Trainer, and cannot serve a loop of your own yet. Use "
            "strategy='single', 'ddp' or 'fsdp', or write the step as a TaskModule for Trainer(strategy=…)."
        )

    # Model and optimizers

    def prepare(self, task: TaskModule, make_optimizers: MakeOptimizers | None, plan: TrainingPlan) -> list[Optimizer]:
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
            move_task(task, self.device)
        for parameter in task.parameters():
            parameter.data = parameter.data.contiguous()  # DeepSpeed broadcasts no others
        for buffer in task.buffers():
            buffer.data = buffer.data.to(self.device)  # at stage 3 the engine moves one parameter after the other
            dist.broadcast(buffer, src=0)
        optimizers = make_optimizers() if make_optimizers is not None else []
        if make_optimizers is not None:
            check_optimizers(optimizers, task, self.config, self.precision)
            optimizers = [self._start_engine(optimizers[0], plan)]
        elif self.stage == 3:
            self._start_engine(None, plan)
        else:
            for parameter in task.parameters():
                dist.broadcast(parameter.detach(), src=0)
        self.optimizers = optimizers
        self._context = self._forward_context()
        self.state = self._make_state()
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

    def _start_engine(self, optimizer: Optimizer | None, plan: TrainingPlan) -> Any:
        """Let an engine take the task's parameters; returns the optimizer that it steps. Collective."""
        task = self.task
        names = {parameter: plain_name(name) for name, parameter in task.named_parameters()}
        given = _groups_of(optimizer)
        members = [[names[p] for p in group["params"]] for group in given]
        facts = collect_facts(task, plan, self.config.content, optimizer, dp_size=self.data_ranks.size)
        self.resolved_config = self.config.resolved(facts, trains=optimizer is not None)
        dtypes = {id(parameter): parameter.dtype for parameter in task.parameters()}
        root = StepModule(task)
        self._traces = Traces(root)
        for module in self._leaf_modules():
            self._library.utils.set_z3_leaf_module(module, True)
        config = for_engine(self.resolved_config)
        is_own = optimizer is not None and not isinstance(optimizer, DummyOptim)
        self._frozen = FrozenEngines(task, self.strategy.options.frozen_modules)
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
        self._take_schedule(schedule, plan)
        real = None if optimizer is None else self.engine.basic_optimizer
        if real is not None:
            keep_groups(real, type(task).__name__)
        groups = given if is_own else [] if real is None else list(real.param_groups)
        if real is not None and self.stage > 0:
            self._trained = TrainedParameters(task)
            kind = ParameterPieces if self.stage == 3 else FlatPieces
            self._pieces = kind(self.engine.optimizer, self.device)
        self._groups, self._dtypes = list(zip(groups, members, strict=True)), dtypes
        self._training_call = self.engine
        self._eval_call = self.engine if self.stage == 3 else None
        return real

    def _make_state(self) -> FullState:
        """Return the state as the engine, if there is one, holds it now."""
        if self.engine is None or self.stage == 0:
            return ReplicatedState(self.task, self.optimizers, self.device, is_main=self.is_main)
        return ZeroState(
            self.task,
            self.optimizers,
            self.device,
            library=self._library,
            pieces=self._pieces,
            groups=self._groups,
            is_main=self.is_main,
            writes_pieces=self.strategy.state_dict_type == "sharded" and self.processes.world_size > 1,
            dtypes=self._dtypes,
            keeps_float32=self.precision.param_dtype is None,
        )

    def _leaf_modules(self) -> list[nn.Module]:
        names = self.strategy.options.moe_leaf_modules
        if not names:
            return []
        if self.stage < 3:
            raise ConfigurationError(
                f"moe_leaf_modules={names!r} at stage={self.stage}: modules are gathered at stage 3 only. Leave it out."
            )
        return matching(self.task, names, "moe_leaf_modules")

    def _take_schedule(self, schedule: Any, plan: TrainingPlan) -> None:
        """Let what stands for DeepSpeed's scheduler hand on to it."""
        for config in plan.lr_scheduler_configs:
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

    def make_step(self, parts: StepParts) -> Step:
        if self.engine is None:
            return super().make_step(parts)
        if self._casts and self.precision.param_dtype is None:
            inputs = Precision.parse("bf16-true" if self.precision.name.startswith("bf16") else "16-true")
            parts = replace(parts, inputs=inputs)
        parts = replace(parts, synchronize=self.engine.set_gradient_accumulation_boundary)
        return EngineStep(parts, self.engine, self._pieces, self._trained, self.config.clipping)

    # Evaluation

    def begin_evaluation(self) -> None:
        for buffer in self.task.buffers():
            dist.broadcast(buffer, src=0)

    # The end

    def unshard(self) -> None:
        state = self.state
        if isinstance(state, ZeroState):
            new = state.release()
            self._take_apart()
            replace_parameters(self.task, new)
        self.task.to("cpu")

    def _take_apart(self) -> None:
        """Let go of the engine, and take off the task what it has left there. Not collective."""
        self._drop_step()
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
        self._pieces = self._trained = None
        if isinstance(vars(self).get("state"), ZeroState):
            self.state = self._make_state()
        self._training_call = self._eval_call = None

    def close(self) -> None:
        self._take_apart()
        library, self._library = self._library, None
        if library is not None:
            # What an engine consists of are reference cycles, which must not be the last to hold a process group: see
            # DDPStrategy.
            leave(library)
            gc.collect()
        super().close()


def _groups_of(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    if optimizer is None:
        return []
    return optimizer.given_groups if isinstance(optimizer, DummyOptim) else list(optimizer.param_groups)
