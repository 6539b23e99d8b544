"""Training with DeepSpeed's ZeRO: sharded optimizer states, gradients and parameters.

DeepSpeed's engine runs backward, averages, clips and steps. This framework implements gradient accumulation, loss
weights and checkpoints. Source: Rajbhandari et al., "ZeRO" (2020), "ZeRO-Infinity" (2021).
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.known_arguments import known_options
from trainwright.core.process import Topology
from trainwright.core.task import TaskModule
from trainwright.processes.devices import DistributedType
from trainwright.strategies.capabilities import Capabilities, refuse_removed
from trainwright.strategies.deepspeed.checks import (
    check_full,
    check_optimizers,
    check_task,
    check_unbuilt,
    on_host,
)
from trainwright.strategies.deepspeed.config import EngineConfig, for_building, read_accelerate_config
from trainwright.strategies.deepspeed.library import connect, disconnect, load_library
from trainwright.strategies.deepspeed.options import REMOVED, ZeroOptions, look_up
from trainwright.strategies.deepspeed.state import ReplicatedState, ZeroState
from trainwright.strategies.deepspeed.step import EngineStep
from trainwright.strategies.deepspeed.zero_loop import ZeroGradients, ZeroOptimizer
from trainwright.strategies.deepspeed.zero_model import ZeroModel
from trainwright.strategies.engine import (
    Description,
    Engine,
    MakeOptimizers,
    Models,
    Optimizers,
    Prepared,
    PreparedModel,
    TrainingPlan,
    create_optimizers,
)
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.precision_names import parse_precision
from trainwright.strategies.state import FullState, JointState, state_dict_type_name
from trainwright.strategies.steps.step import Step, StepParts
from trainwright.strategies.strategy import DataParallel, ParallelEngine, StrategyOutline
from trainwright.strategies.units import replace_parameters


@known_options(refuse_removed("DeepSpeedStrategy", REMOVED))
@dataclass(frozen=True, kw_only=True, repr=False)
class DeepSpeedStrategy(ZeroOptions, DataParallel):
    """Strategy that trains a task with DeepSpeed's ZeRO.

    Args:
        config: DeepSpeed's configuration, a dict or the path of a JSON file. `"auto"` values are filled in from the
            arguments, the model and the data. Default: None, which uses only the other arguments.
        state_dict_type: `"sharded"`: each rank writes its shards of a checkpoint. `"full"`: rank 0 gathers the full
            state on its host and writes it.
        logging_level: Level of DeepSpeed's log messages.
        timeout, hang_timeout, process_group_backend: See `DataParallel`.
        zero_optimization, stage, …, frozen_modules: See the attributes of the same names of `ZeroOptions` in
            `trainwright.strategies.deepspeed.options`. Default: None, which is the value in `config`, or else the
            value in `DEFAULTS` of that module.

    Raises:
        ConfigurationError: An option is unknown or impossible, or differs from `config`.
    """

    distributed_type = DistributedType.DEEPSPEED

    config: str | Path | Mapping[str, Any] | None = field(default=None, kw_only=False)
    state_dict_type: str = "sharded"
    logging_level: int = logging.WARNING

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(state_dict_type=state_dict_type_name(self.state_dict_type))
        self._set(capabilities=self._capabilities())

    def _capabilities(self) -> Capabilities:
        stage = self.engine_config.stage
        gathers = stage == 3 or bool(self.frozen_modules)
        return Capabilities(
            gradients="full" if stage == 0 else "hidden",
            manual_optimization=False,
            lockstep_evaluation=gathers,
            full_weights=stage == 0,
            weight_averages=stage == 0,
            independent_steps=False,
            closures=False,
            late_groups=False,
            inference_mode=not gathers,  # weights gathered in inference mode cannot be trained afterwards
            owns_optimizer_step=True,
            trials=stage == 0,
            state_rests=False,
            converted_layers=False,
        )

    @property
    def stated_accumulation(self) -> int | None:
        steps = self.engine_config.content.get("gradient_accumulation_steps")
        return steps if isinstance(steps, int) else None

    @property
    def stated_precision(self) -> str | None:
        content = self.engine_config.content
        for part in ("bf16", "fp16"):
            if look_up(content, (part, "enabled")) is True:
                return part
        return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **arguments: Any) -> Self:
        """Create the strategy from Accelerate's `deepspeed_config`, or from arguments of its DeepSpeedPlugin.

        Raises:
            ConfigurationError: An option is unknown or not supported.
        """
        return cls(**read_accelerate_config(config), **arguments)

    # Before a run

    @property
    def engine_config(self) -> EngineConfig:
        """A new `EngineConfig` from the options of the strategy. Reads the file if there is one."""
        return EngineConfig(self.config, self)

    def config_for(self, settings: EngineSettings) -> EngineConfig:
        """Return DeepSpeed's configuration for the settings of a run.

        Raises:
            ConfigurationError: The configuration and the settings differ, or DeepSpeed does not support them.
        """
        config = self.engine_config
        config.check_hardware(settings.device_type, settings.num_processes)
        config.set_precision(settings.precision, settings.device_type)
        config.check_run(settings.accumulate_grad_batches, settings.clip)
        return config

    def check(self, settings: EngineSettings) -> None:
        super().check(settings)
        if settings.compile_options is not None:
            raise ConfigurationError(
                "compile= is not supported with DeepSpeed, whose engine gathers parameters within a step. Call "
                "compile() on modules in configure_model, or use strategy='fsdp'."
            )
        self.config_for(settings)

    def outline(self, task: TaskModule | None, settings: EngineSettings) -> StrategyOutline:
        return replace(super().outline(task, settings), shards=1 if self.engine_config.stage < 3 else None)

    def engine(self, settings: EngineSettings) -> Engine:
        return DeepSpeedEngine(self, settings)


class DeepSpeedEngine(ParallelEngine):
    """Engine that trains a task with an engine of DeepSpeed.

    Attributes:
        config: The configuration. In a user-written loop, `use` replaces it.
        stage: ZeRO's stage in `config`.
        autocasts: The forward runs under torch's autocast. False if DeepSpeed's engine computes with 16-bit copies of
            float32 parameters, and without mixed precision.
        resolved_config: The configuration with every `"auto"` filled in. Empty before DeepSpeed's engine exists.
        _library: The module `deepspeed`, from `start` to `close`.
        _model: The model of a Trainer. None in user-written loops, and in evaluations at stages 0 to 2.
        _models: All models with an engine, of the Trainer or of a user-written loop.
        _untrained: Models of a user-written loop without an engine.
        _steps: The optimizer that a user-written loop steps, by the optimizer that the user has created.
    """

    strategy: DeepSpeedStrategy
    gradients: ZeroGradients

    def __init__(self, strategy: DeepSpeedStrategy, settings: EngineSettings) -> None:
        super().__init__(strategy, settings)
        self.config = strategy.config_for(settings)
        self.stage = self.config.stage
        self.autocasts = not (self._casts and self.precision.param_dtype is None)
        self.gradients = ZeroGradients(self.device)
        self.resolved_config: dict[str, Any] = {}
        self._library: Any = None
        self._model: ZeroModel | None = None
        self._models: list[ZeroModel] = []
        self._untrained: list[nn.Module] = []
        self._steps: dict[Optimizer, ZeroOptimizer] = {}

    def start(self, topology: Topology) -> None:
        library = load_library(self.settings.device_type, self.strategy.logging_level)
        super().start(topology)
        self.gradients = ZeroGradients(self.device)
        self._library = library
        connect(library, topology)

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine in the current stage of the Trainer. None if the stage has no DeepSpeed engine."""
        return None if self._model is None else self._model.engine

    # Model and optimizers

    def prepare_task(self, task: TaskModule, make_optimizers: MakeOptimizers | None, plan: TrainingPlan) -> None:
        check_task(task, trains=make_optimizers is not None)
        super().prepare_task(task, make_optimizers, plan)

    def prepare(self, models: Models, optimizers: Optimizers, plan: TrainingPlan, roots: Models = ()) -> Prepared:
        """Create an engine for each model that is trained or sharded. Collective."""
        if roots:
            (model,) = models
            (root,) = roots
            return self._prepare_root(model, root, optimizers, plan)
        created = create_optimizers(optimizers)
        optimizers_of_models = [self._optimizer_of(model, created) for model in models]
        # Check all models before any of them is changed.
        for model, optimizer in zip(models, optimizers_of_models, strict=True):
            check_full(model, built_in_shards=self.stage == 3)
            if optimizer is not None:
                check_optimizers([optimizer], model, self.config, self.precision, source="prepare() received")
        prepared = []
        for model, optimizer in zip(models, optimizers_of_models, strict=True):
            prepared.append(self._prepare_of_loop(model, optimizer, plan))
        return Prepared(prepared, [self._stepped(optimizer) for optimizer in created])

    def _prepare_root(
        self,
        model: nn.Module,
        root: nn.Module,
        optimizers: Optimizers,
        plan: TrainingPlan,
    ) -> Prepared:
        """Create the engine of a Trainer's model, if it is trained or sharded. Collective."""
        self._place(model)
        if optimizers is None and self.stage < 3:
            for parameter in model.parameters():
                dist.broadcast(parameter.detach(), src=0)
            return Prepared([PreparedModel.unchanged(model)], [])
        created = create_optimizers(optimizers)
        if optimizers is not None:
            check_optimizers(created, model, self.config, self.precision)  # there is exactly one
        zero_model = self._zero_model(model, root, created[0] if created else None, plan)
        self._model = zero_model
        evaluate = zero_model.engine if self.stage == 3 else None  # which gathers the weights in evaluations, too
        prepared = PreparedModel(call=zero_model.engine, attributes=zero_model.engine, evaluate=evaluate)
        return Prepared([prepared], [] if zero_model.optimizer is None else [zero_model.optimizer])

    def _build(self, task: TaskModule) -> None:
        check_unbuilt(task, self.config)
        with self._building():
            super()._build(task)

    def _place(self, model: nn.Module) -> None:
        if self.stage < 3:
            super()._place(model)
        self._place_tensors(model)

    def _make_scaler(self) -> torch.amp.GradScaler | None:
        return None  # the engine scales the loss

    def _make_context(self) -> AbstractContextManager[Any] | None:
        if self.engine is not None and not self.autocasts:
            return None  # parameters and inputs have the dtype
        return super()._make_context()

    def _place_tensors(self, model: nn.Module) -> None:
        """Make parameters contiguous, and copy rank 0's buffers to every device. Collective."""
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # DeepSpeed broadcasts only contiguous ones
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self.device)  # at stage 3 the engine moves the parameters
            dist.broadcast(buffer, src=0)

    def _building(self) -> AbstractContextManager[Any]:
        """Return the context in which stage 3 shards each module as soon as it is built."""
        if self.stage < 3:
            return nullcontext()
        device = self.config.offload("offload_param")
        context: AbstractContextManager[Any] = self._library.zero.Init(
            config_dict_or_path=for_building(self.config.content), remote_device=None if device == "none" else device
        )
        return context

    def _zero_model(
        self, model: nn.Module, root: nn.Module, optimizer: Optimizer | None, plan: TrainingPlan
    ) -> ZeroModel:
        if optimizer is not None:
            optimizer = on_host(optimizer, self.config)
        num_ranks = self.data_ranks.size
        zero_model = ZeroModel(self._library, model, root, optimizer, self.config, plan, self.device, num_ranks)
        self.resolved_config = zero_model.resolved_config
        self._models.append(zero_model)
        return zero_model

    def _state_of(self, zero: ZeroModel | None, module: nn.Module, optimizers: list[Optimizer]) -> FullState:
        """Return the state of a model. If the model has an engine, the state is read from the engine."""
        if zero is None or zero.stage == 0:
            return ReplicatedState(module, optimizers, self.device, is_main=self.is_main)
        return ZeroState(
            zero,
            module,
            optimizers,
            is_main=self.is_main,
            writes_shards=self.strategy.state_dict_type == "sharded" and self.processes.world_size > 1,
            keeps_float32=self.precision.param_dtype is None,
        )

    # User-written loops

    def use(self, strategy: Description) -> None:
        assert isinstance(strategy, DeepSpeedStrategy)
        super().use(strategy)
        self.config = strategy.config_for(self.settings)
        self.stage = self.config.stage
        if self.stage > 0:
            self.capabilities = strategy.capabilities  # some gradients or weights are now sharded

    def _prepare_of_loop(self, model: nn.Module, optimizer: Optimizer | None, plan: TrainingPlan) -> PreparedModel:
        """Create the engine of a user-written loop's model, if it is trained or sharded. Collective."""
        self._place(model)
        if optimizer is None and self.stage < 3:
            for parameter in model.parameters():
                dist.broadcast(parameter.detach(), src=0)
            self._untrained.append(model)
            return PreparedModel.unchanged(model)
        zero_model = self._zero_model(model, model, optimizer, plan)
        if optimizer is not None:
            self.gradients.models.append(zero_model)
            self._steps[optimizer] = ZeroOptimizer(zero_model, self.gradients, self.config.clipping)
        zero_model.input_dtype = self.precision.autocast_dtype if self._casts else None
        return PreparedModel(call=zero_model, attributes=zero_model.engine)

    def _optimizer_of(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Optimizer | None:
        """Return the optimizer over a model's parameters, or None if there is none."""
        ids_of_model = {id(parameter) for parameter in model.parameters()}
        found = []
        for optimizer in optimizers:
            ids_of_optimizer = _parameter_ids(optimizer)
            if ids_of_optimizer & ids_of_model:
                found.append(optimizer)
                if not ids_of_optimizer <= ids_of_model:
                    raise ConfigurationError(
                        f"{type(optimizer).__name__} holds parameters of {type(model).__name__} and of other models, "
                        "but a DeepSpeed engine steps one model. Use one optimizer for each model."
                    )
        if len(found) > 1:
            raise ConfigurationError(
                f"{len(found)} optimizers hold parameters of {type(model).__name__}, but a DeepSpeed engine steps "
                "one. Put all parameters into groups of one optimizer, or use strategy='fsdp'."
            )
        return found[0] if found else None

    def _stepped(self, optimizer: Optimizer) -> Optimizer:
        """Return a `ZeroOptimizer` for an optimizer that an engine steps. Return any other optimizer unchanged."""
        if optimizer not in self._steps:
            ids_of_optimizer = _parameter_ids(optimizer)
            earlier_models = self._untrained + [zero_model.model for zero_model in self._models]
            for model in earlier_models:
                if any(id(parameter) in ids_of_optimizer for parameter in model.parameters()):
                    raise ConfigurationError(
                        f"{type(optimizer).__name__} was passed to prepare() after its model, and DeepSpeed cannot "
                        "add an optimizer to a prepared model. Pass both to one prepare() call."
                    )
        return self._steps.get(optimizer, optimizer)

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        if self.gradients.models:
            self.gradients.backward(loss, **kwargs)
        else:
            super().backward(loss, **kwargs)

    @contextmanager
    def no_sync(self, prepared: Callable[..., Any]) -> Iterator[None]:
        if not isinstance(prepared, ZeroModel):
            yield
            return
        prepared.engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            prepared.engine.set_gradient_accumulation_boundary(True)

    def make_state(
        self, models: nn.Module, optimizers: Sequence[Optimizer], names: Mapping[torch.Tensor, str] | None = None
    ) -> FullState:
        # Several models of a user-written loop are children of a plain module.
        is_container = type(models) is nn.Module
        models_by_prefix = {"": models}
        if is_container:
            models_by_prefix = {f"{name}.": model for name, model in models.named_children()}
        parts: list[tuple[str, FullState]] = []  # (prefix of the names, state)
        for prefix, model in models_by_prefix.items():
            zero_model = self._zero_model_of(model)
            stepped: list[Optimizer] = []
            if zero_model is not None:
                stepped = [_real(one) for one in optimizers if self._stepped_by(one) is zero_model]
            parts.append((prefix, self._state_of(zero_model, model, stepped)))
        # Optimizers of models without an engine, such as torch's own.
        others = [optimizer for optimizer in optimizers if self._stepped_by(optimizer) is None]
        if others:
            parts.append(("", FullState(nn.Module(), others, self.device, is_main=self.is_main, names=names)))
        if len(parts) == 1:
            return parts[0][1]
        real_optimizers = [_real(optimizer) for optimizer in optimizers]
        return JointState(models, real_optimizers, self.device, is_main=self.is_main, parts=parts)

    def _zero_model_of(self, model: nn.Module) -> ZeroModel | None:
        """Return the engine of a model, or None."""
        for zero_model in self._models:
            if zero_model.model is model:
                return zero_model
        return None

    def _stepped_by(self, optimizer: Optimizer) -> ZeroModel | None:
        """Return the model whose engine steps an optimizer, or None."""
        if isinstance(optimizer, ZeroOptimizer):
            return optimizer.zero
        for zero_model in self._models:
            if zero_model.optimizer is optimizer:
                return zero_model
        return None

    # Precision

    @property
    def _casts(self) -> bool:
        """True if the engine computes with 16-bit copies of float32 parameters."""
        content = self.config.content
        return any(content.get(part, {}).get("enabled") is True for part in ("bf16", "fp16"))

    def make_step(self, parts: StepParts) -> Step:
        if self._model is None:
            return super().make_step(parts)
        if not self.autocasts:
            inputs = parse_precision("bf16-true" if self.precision.name.startswith("bf16") else "16-true")
            parts = replace(parts, inputs=inputs)
        parts = replace(parts, synchronize=self.engine.set_gradient_accumulation_boundary)
        return EngineStep(parts, self._model, self.config.clipping)

    # Evaluation

    def begin_evaluation(self) -> None:
        for buffer in self.task.buffers():
            dist.broadcast(buffer, src=0)

    # The end

    def unshard(self) -> None:
        state = self.state
        if isinstance(state, ZeroState):
            new_parameters = state.release()  # before the engines are destroyed, which hold the shards
            self._close_models()
            replace_parameters(self.task, new_parameters)
        self.task.to("cpu")

    def _close_models(self) -> None:
        """Destroy the engines, and remove their attributes from the models. Not collective."""
        self._drop_step()
        for model in self._models:
            model.close()
        self._model = None
        self._models.clear()
        self._steps.clear()
        self._untrained.clear()
        self.gradients.models.clear()
        if isinstance(vars(self).get("state"), ZeroState):
            self.state = self._state_of(self._model, self.task, self.optimizers)
        self._training_call = None
        self._eval_call = None

    def close(self) -> None:
        self._close_models()
        library = self._library
        self._library = None
        if library is not None:
            # Engines contain reference cycles. Collect them now, so that none keeps a process group alive; see
            # DDPStrategy.
            disconnect(library)
            gc.collect()
        super().close()


def _parameter_ids(optimizer: Optimizer) -> set[int]:
    """Return the ids of an optimizer's parameters. Ids, because tensors compare elementwise."""
    ids = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            ids.add(id(parameter))
    return ids


def _real(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer of DeepSpeed's engine for the optimizer that a user-written loop steps."""
    return optimizer.optimizer if isinstance(optimizer, ZeroOptimizer) else optimizer
