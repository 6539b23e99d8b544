"""A model whose parameters a DeepSpeed engine manages."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError, TaskError
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.tree import map_tensors
from trainwright.strategies.deepspeed.checks import keep_groups
from trainwright.strategies.deepspeed.config import EngineConfig, RunFacts, for_engine
from trainwright.strategies.deepspeed.library import keep_own_adagrad, keep_unaligned_gradients, quiet_imports
from trainwright.strategies.deepspeed.options import ZeroOptions, look_up
from trainwright.strategies.deepspeed.placeholders import DummyOptim, DummyScheduler, refuse_schedule_of_dummy
from trainwright.strategies.deepspeed.zero_shards import FlatShards, ParameterShards, ZeroShards
from trainwright.strategies.engine import TrainingPlan
from trainwright.strategies.units import ModuleTraces, matching

_MARK = "ds_id"  # DeepSpeed's attribute of a sharded parameter
# Attributes of modules that the engine sets in its first steps, and not at its creation (DeepSpeed 0.19).
_SET_BY_STEPS = ("applied_pre_backward_ref_cnt", "ds_grads_remaining", "pre_bwd_fn", "post_bwd_fn")


class Traces(ModuleTraces):
    """Record of modules and parameters before an engine changes them."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__(root)
        # Each parameter with the names of its attributes.
        self._of_parameters = [(parameter, set(vars(parameter))) for parameter in root.parameters()]

    def remove(self) -> None:
        """Restore classes, and remove the engine's attributes and hooks. Not collective.

        Parameters keep their memory. Sharded parameters keep the attribute that marks them as sharded.
        """
        for module in self.modules():
            for name in _SET_BY_STEPS:
                vars(module).pop(name, None)
        super().remove()
        for module in self.modules():
            if type(module._parameters) is not dict:  # stage 3 replaces the dict
                vars(module)["_parameters"] = dict(module._parameters)
        for parameter, names in self._of_parameters:
            for name in set(vars(parameter)) - names - {_MARK}:
                delattr(parameter, name)


class FrozenEngines:
    """Stage-3 engines of frozen modules. Each engine gathers the parameters of its module when the module is called.

    Args:
        task: The model.
        names: The option `frozen_modules`: names of modules or of their classes.

    Raises:
        ConfigurationError: A name matches no module, or a module has a trained parameter or contains another frozen
            module.
    """

    def __init__(self, task: nn.Module, names: tuple[str, ...]) -> None:
        self._task = task
        self._modules = matching(task, names, "frozen_modules") if names else []
        self._engines: list[Any] = []
        for module in self._modules:
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    raise ConfigurationError(
                        f"frozen_modules={names!r}: the parameter {name!r} of {type(module).__name__} has "
                        "requires_grad=True. Call requires_grad_(False) on the module in configure_model, or remove "
                        "the module's name from frozen_modules."
                    )
            if any(other is not module and other in self._modules for other in module.modules()):
                raise ConfigurationError(
                    f"frozen_modules={names!r}: {type(module).__name__} contains another frozen module. Name only the "
                    "outer one."
                )

    def start(self, library: Any, config: Mapping[str, Any]) -> None:
        """Create an engine for each module. Collective."""
        frozen_config = copy.deepcopy(dict(config))
        frozen_config.pop("optimizer", None)
        frozen_config.pop("scheduler", None)
        frozen_config["zero_optimization"] = {"stage": 3}
        for name, value in config.get("zero_optimization", {}).items():
            if name.startswith("stage3_"):
                frozen_config["zero_optimization"][name] = value
        for module in self._modules:
            engine, *_ = library.initialize(model=module, config=frozen_config, dist_init_required=False)
            self._engines.append(engine)

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Return a context in which the task lacks the frozen modules, so that the main engine ignores them."""
        parents = []  # of the frozen modules, each with all its children: their order is restored, too
        for parent in self._task.modules():
            if any(child in self._modules for child in parent.children()):
                parents.append((parent, dict(parent._modules)))
        for parent, modules in parents:
            for name, module in modules.items():
                if module in self._modules:
                    del parent._modules[name]
        try:
            yield
        finally:
            for parent, modules in parents:
                parent._modules.clear()
                parent._modules.update(modules)

    def destroy(self) -> None:
        """Destroy the engines. Not collective."""
        for engine in self._engines:
            _destroy(engine)
        self._engines = []


def _destroy(engine: Any) -> None:
    engine.destroy()
    # Otherwise the optimizer is destroyed again when it is freed.
    engine.optimizer = None
    engine.basic_optimizer = None


class ZeroModel:
    """A model whose parameters a DeepSpeed engine manages. Collective to create.

    Args:
        library: The module `deepspeed`.
        model: The model.
        root: The module whose forward the engine calls: the model, or a module that contains the model.
        optimizer: The optimizer. None if the model is not trained. For a `DummyOptim`, DeepSpeed creates the optimizer
            of its configuration.
        config: The configuration.
        plan: Properties of the run, and its learning rate schedules.
        device: Device of this process.
        dp_size: Number of data-parallel processes.

    Attributes:
        engine: DeepSpeed's engine. None after `close`.
        stage: ZeRO stage, 0 to 3.
        optimizer: The optimizer that the engine steps. None if the model is not trained.
        groups: The original parameter groups, each with the names of its parameters.
        dtypes: id of a parameter → its original dtype.
        shards: Shards of gradients and optimizer states. None if gradients and optimizer states are not sharded.
        holds_gradients: Backward has run since the last step of a user-written loop.
        is_complete: The last backward has averaged the gradients.
        was_called: In a user-written loop, the model was called since the last backward.
        input_dtype: Dtype to which a user-written loop's floating-point inputs are cast. None does not cast them.
        resolved_config: The configuration with every `"auto"` filled in.
        _flags: Name, parameter and `requires_grad` of each parameter at the creation, for `check_trained`.
    """

    def __init__(
        self,
        library: Any,
        model: nn.Module,
        root: nn.Module,
        optimizer: Optimizer | None,
        config: EngineConfig,
        plan: TrainingPlan,
        device: torch.device,
        dp_size: int,
    ) -> None:
        self.model = model
        self.library = library
        self.device = device
        self.stage = config.stage
        options = config.options
        names = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
        if isinstance(optimizer, DummyOptim):
            given_groups = optimizer.given_groups
        else:
            given_groups = _groups_of(optimizer)
        # Before DeepSpeed replaces the parameters of the groups by flat tensors.
        names_of_groups = [[names[parameter] for parameter in group["params"]] for group in given_groups]
        facts = collect_facts(model, plan, config.content, optimizer, dp_size=dp_size)
        self.resolved_config = config.resolved(facts, trains=optimizer is not None)
        self.dtypes = {id(parameter): parameter.dtype for parameter in model.parameters()}
        self._traces = Traces(root)
        for module in _leaf_modules(model, options, self.stage):
            library.utils.set_z3_leaf_module(module, True)
        engine_config = for_engine(self.resolved_config)
        is_own = optimizer is not None and not isinstance(optimizer, DummyOptim)
        self._frozen = FrozenEngines(model, options.frozen_modules or ())
        with quiet_imports():
            self._frozen.start(library, engine_config)
        with quiet_imports(), self._frozen.detached():
            self.engine, _, _, schedule = library.initialize(
                model=root,
                optimizer=optimizer if is_own else None,
                model_parameters=None if is_own or optimizer is None else given_groups,
                config=engine_config,
                dist_init_required=False,
            )
        keep_unaligned_gradients(self.engine.optimizer)
        keep_own_adagrad(self.engine)
        self._traces.record_changes()  # after the engine's changes, which `remove` undoes
        self.engine.lr_scheduler = None  # the training loop steps it
        self.optimizer: Any = None if optimizer is None else self.engine.basic_optimizer
        connect_schedule(schedule, self.optimizer, plan, config.origin)
        if self.optimizer is not None:
            keep_groups(self.optimizer, type(model).__name__)
        groups = given_groups if is_own else _groups_of(self.optimizer)
        self.groups = list(zip(groups, names_of_groups, strict=True))
        self.holds_gradients = False
        self.is_complete = False
        self.was_called = False
        self.input_dtype: torch.dtype | None = None
        self.shards: ZeroShards | None = None
        self._flags: list[tuple[str, nn.Parameter, bool]] = []
        if self.optimizer is not None and self.stage > 0:
            self._flags = [(name, parameter, parameter.requires_grad) for name, parameter in model.named_parameters()]
            kind = ParameterShards if self.stage == 3 else FlatShards
            self.shards = kind(self.engine.optimizer, device)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run a forward of a user-written loop in the engine. Collective at stage 3."""
        if self.input_dtype is not None:
            args, kwargs = map_tensors(self._cast, (args, kwargs))
        if torch.is_grad_enabled() and self.optimizer is not None:
            self.was_called = True
        return self.engine(*args, **kwargs)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.input_dtype) if tensor.is_floating_point() else tensor

    def check_trained(self) -> None:
        """Check that no parameter was frozen or unfrozen after the engine was created. Not collective.

        Raises:
            TaskError: A parameter was frozen or unfrozen.
        """
        for name, parameter, trained in self._flags:
            if parameter.requires_grad is not trained:
                what = "frozen" if trained else "unfrozen"
                effect = "keep updating by momentum and weight decay" if trained else "not update"
                raise TaskError(
                    f"{type(self.model).__name__}'s {name} was {what} after DeepSpeed's engine was created, which "
                    f"would {effect} it. Set requires_grad in __init__ or configure_model and call fit once for each "
                    "training phase, or use strategy='ddp' or 'fsdp'."
                )

    def close(self) -> None:
        """Destroy the engine, and remove its attributes and hooks from the model. Not collective."""
        engine = self.engine
        self.engine = None
        if engine is None:
            return
        self._frozen.destroy()
        _destroy(engine)
        del engine
        self._traces.remove()
        self.shards = None
        self.optimizer = None
        self._flags = []


def connect_schedule(schedule: object, optimizer: Optimizer | None, plan: TrainingPlan, origin: str) -> None:
    """Make the plan's `DummyScheduler` forward to a scheduler of the real optimizer.

    `schedule` is the scheduler of DeepSpeed's configuration. If it is None, `lr_scheduler_callable` creates one. Raise
    a ConfigurationError if only one of the two, `DummyScheduler` and scheduler, exists.
    """
    for config in plan.lr_scheduler_configs:
        refuse_schedule_of_dummy(config.scheduler, origin)
        if isinstance(config.scheduler, DummyScheduler):
            make = config.scheduler.lr_scheduler_callable
            if schedule is None and make is not None and optimizer is not None:
                schedule = make(optimizer)
            if schedule is None:
                raise ConfigurationError(
                    f"DummyScheduler needs a 'scheduler', and {origin} has none. Add one there, pass "
                    "lr_scheduler_callable, or use a real scheduler."
                )
            config.scheduler.stand_for(schedule)
            config.interval = "step"  # what it counts
            schedule = None
    if schedule is not None:
        raise ConfigurationError(
            f"{origin} has a 'scheduler' without a DummyScheduler. Return {{'optimizer': …, 'lr_scheduler': "
            "DummyScheduler(optimizer)} from configure_optimizers, pass it to prepare(), or remove the 'scheduler'."
        )


def _leaf_modules(model: nn.Module, options: ZeroOptions, stage: int) -> list[nn.Module]:
    names = options.moe_leaf_modules
    if names and stage < 3:
        raise ConfigurationError(
            f"moe_leaf_modules={names!r} has no effect at stage={stage}. Remove it, or use stage=3."
        )
    if not names:
        return []
    return matching(model, names, "moe_leaf_modules")


def _groups_of(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    if optimizer is None:
        return []
    return list(optimizer.param_groups)


def collect_facts(
    model: nn.Module, plan: TrainingPlan, config: dict[str, Any], optimizer: Optimizer | None, *, dp_size: int
) -> RunFacts:
    """Return the properties of a run that the configuration needs.

    Loads data only if it needs the batch size, or the number of steps for `"total_num_steps": "auto"`.
    """
    trains = optimizer is not None
    needs_batch_size = trains and ("train_micro_batch_size_per_gpu" in config or "train_batch_size" in config)
    schedule = None
    for config_of_schedule in plan.lr_scheduler_configs:
        if isinstance(config_of_schedule.scheduler, DummyScheduler):
            schedule = config_of_schedule.scheduler
            break
    total: float = math.inf
    if trains and look_up(config, ("scheduler", "params", "total_num_steps")) == "auto":
        if schedule is not None and schedule.total_num_steps is not None:
            total = schedule.total_num_steps
        else:
            total = plan.estimated_stepping_batches  # needs the length of the data
    return RunFacts(
        world_size=dp_size,
        micro_batch_size=plan.train_batch_size if needs_batch_size else None,
        accumulate=plan.accumulate_grad_batches,
        hidden_size=_hidden_size(model),
        hyperparameters=None if optimizer is None else optimizer.param_groups[0],
        total_steps=total,
        warmup_steps=0 if schedule is None else schedule.warmup_num_steps,
    )


def _hidden_size(model: nn.Module) -> int | None:
    """Return the hidden size in the transformers `config` of the model or of one of its modules."""
    for module in model.modules():
        config = getattr(module, "config", None)
        size = getattr(config, "hidden_size", None)
        sizes = getattr(config, "hidden_sizes", None)  # one for each stage of a vision model
        if not size and sizes:
            size = max(sizes)
        if isinstance(size, int):
            return size
    return None
