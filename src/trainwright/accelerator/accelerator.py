"""The Accelerator: strategies, loaders and precisions of the Trainer for user-written training loops.

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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainwright.accelerator.accelerator_state import AcceleratorState
from trainwright.accelerator.gathering import gather_objects, gather_real
from trainwright.accelerator.gradient_state import GradientAccumulationPlugin, GradientState, LoopGroups
from trainwright.accelerator.handlers import AutocastKwargs, DataLoaderConfiguration, EvenBatches, check_even_batches
from trainwright.accelerator.logging import install_rich_tracebacks
from trainwright.accelerator.loop_checkpoints import (
    LoadHook,
    LoopCheckpoints,
    LoopObjects,
    SaveHook,
)
from trainwright.accelerator.prepared.accelerated_loader import AcceleratedLoader, SkippedStart
from trainwright.accelerator.prepared.accelerated_model import unwrapped
from trainwright.accelerator.prepared.accelerated_optimizer import AcceleratedOptimizer, AcceleratedScheduler
from trainwright.accelerator.prepared.prepare import PreparedObjects
from trainwright.accelerator.project import ProjectConfiguration, StateFolders
from trainwright.accelerator.settings import (
    compare_precision,
    forget_precision,
    loader_settings,
    project_of,
    read_settings,
    refuse_attribute,
    refuse_option,
    refuse_unknown,
    schedule_steps_of,
)
from trainwright.accelerator.trackers import GeneralTracker, LoopTrackers, read_trackers
from trainwright.bigmodels.saving import save_model, save_object, save_sharded_model
from trainwright.core.errors import ConfigurationError, TaskError, TrainwrightWarning
from trainwright.core.host.memory import release_memory
from trainwright.core.names.constants import LoggerType, RNGType
from trainwright.core.names.known_arguments import known_arguments
from trainwright.core.tree import iterate_tensors
from trainwright.processes.collectives import gather, pad_across_processes, reduce
from trainwright.processes.devices import DistributedType
from trainwright.processes.meetings import Turn
from trainwright.processes.partial_state import PartialState
from trainwright.processes.signals import LoopSignal
from trainwright.profilers.pytorch import ProfileKwargs, profiled
from trainwright.strategies.engine_choice import PLUGINS
from trainwright.strategies.launcher_variables import DynamoBackend, TorchDynamoPlugin
from trainwright.strategies.step_group import LoopGradients
from trainwright.strategies.step_groups import MicroBatchBlock
from trainwright.strategies.steps.gradients import GradientClip, parameters_of
from trainwright.strategies.steps.loss_scale import LossScale
from trainwright.strategies.strategy import Strategy

if TYPE_CHECKING:
    from trainwright.strategies.deepspeed.plugin import DeepSpeedPlugin
    from trainwright.strategies.fsdp.plugin import FullyShardedDataParallelPlugin, TorchTensorParallelPlugin
    from trainwright.strategies.megatron.parallelism_config import ParallelismConfig
    from trainwright.strategies.megatron.plugin import MegatronLMPlugin

T = TypeVar("T")

# Clips at which the processes wait for each other, so that a process that does not call `clip_grad_norm_` is reported
# instead of waited for. A script that clips on the main process alone does so from its first step on, so that later
# clips need no check.
_NUM_CHECKED_CLIPS = 2


class Accelerator:
    """Object that prepares models, optimizers, schedulers and loaders for a user-written training loop.

    Methods and arguments have the names of Hugging Face's Accelerate. The micro-batches of one optimizer step are
    called a group. `backward(loss)` divides the loss by `gradient_accumulation_steps`, as in Accelerate. With
    `backward(loss, num_items=n)`, the gradient of a step is the mean over all items of the group. A rank that runs out
    of data before other ranks adds nothing to gradients. By default, a schedule advances once per optimizer step for
    any number of processes. `torchrun --nproc-per-node 2 script.py` starts two processes, and `python` one.

    Args:
        device_placement: Move models and batches to this process's device. Default: True.
        split_batches: The batch size of a DataLoader is the total over all processes. Each process gets an equal part
            of each batch. Default: False: the batch size of a DataLoader is that of one process.
        mixed_precision: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`. Default: None, which is the precision in the plugin's
            configuration, or else `"no"`.
        gradient_accumulation_steps: Number of micro-batches of one optimizer step. Default: 1.
        gradient_accumulation_plugin: A `GradientAccumulationPlugin` instead of the number. Default: None.
        cpu: Use the CPU even if the machine has an accelerator. Default: False.
        step_scheduler_with_optimizer: Schedules advance with optimizer steps. False: schedules advance in every call of
            their `step`. Default: True.
        schedule_steps: `"once"`: a schedule advances once per optimizer step. `"per_process"`: a schedule advances by
            the number of processes, as in Accelerate, unless `split_batches` is True. Default: None, which is
            `"per_process"` after `trainwright.as_accelerate()`. Otherwise None is `"once"`, with a warning if there are
            several processes.
        kwargs_handlers: A list of options, with at most one object of each class: `DistributedDataParallelKwargs`,
            `GradScalerKwargs`, `AutocastKwargs`, `InitProcessGroupKwargs`, `ProfileKwargs`, and `AORecipeKwargs` or
            `TERecipeKwargs`. Default: None.
        fsdp_plugin: A `FullyShardedDataParallelPlugin`, instead of `strategy=FSDPStrategy(…)`.
        deepspeed_plugin: A `DeepSpeedPlugin`, instead of `strategy=DeepSpeedStrategy(…)`, or a dict of plugins by name.
            `state.select_deepspeed_plugin(name)` selects the plugin for the next `prepare`. Initially, the dict's first
            plugin is selected. Default: the plugins of the script's other Accelerators, if there are any.
        deepspeed_plugins: Another name of `deepspeed_plugin`.
        torch_tp_plugin: A `TorchTensorParallelPlugin`, instead of `strategy=TensorParallelStrategy(…)`.
        megatron_lm_plugin: A `MegatronLMPlugin`, instead of `strategy=MegatronStrategy(…)`.
        parallelism_config: A `ParallelismConfig` with the number of processes along each axis of the mesh. Sharding
            also needs `fsdp_plugin`.
        dynamo_backend: Backend of `torch.compile`, which compiles prepared models. Default: `"no"`.
        dynamo_plugin: A `TorchDynamoPlugin` with all options of compilation, instead of `dynamo_backend`.
        dataloader_config: A `DataLoaderConfiguration` with the options for preparing loaders. Default: None.
        log_with: Trackers that `init_trackers` starts: a `LoggerType`, its name, a `GeneralTracker` or a list of these.
            `"all"` selects every installed tracker. Default: None.
        project_dir: Folder of the project, or its URL. Default: None.
        project_config: A `ProjectConfiguration` with the folders and the number of saved states. Default: None.
        rng_types: Generators whose states are copied from the first process to all processes before each pass of a
            prepared loader; see `synchronize_rng_states`. Default: None, which synchronizes no generator, because the
            order of the data depends on `seed`.
        strategy: A strategy that supports user-written loops, or its name. Default: `"auto"`, which is `"single"` for
            one process and `"ddp"` for several processes.
        seed: Seed of the order of the data. Default: torch's initial seed on the first process, or the seed of a state
            that `load_state` loads.

    Other arguments of Accelerate's Accelerator must be None. The error for another value names the replacement.

    The variables of `accelerate launch` (`ACCELERATE_MIXED_PRECISION`, `ACCELERATE_GRADIENT_ACCUMULATION_STEPS`,
    `ACCELERATE_USE_CPU`, `ACCELERATE_DYNAMO_BACKEND`) are the default values of the corresponding arguments.
    `ACCELERATE_USE_FSDP` selects FSDP, with options in the variables `FSDP_…`. `ACCELERATE_USE_DEEPSPEED` selects
    DeepSpeed, with options in `ACCELERATE_DEEPSPEED_…`. `ACCELERATE_USE_MEGATRON_LM` selects `MegatronStrategy`, with
    options in `MEGATRON_LM_…`. A warning names variables that an argument overrides, and variables with an option that
    is not used.

    The constructor of the first Accelerator joins the other processes, which is collective.

    Raises:
        ConfigurationError: An argument is unknown or not supported. The message names supported arguments.
    """

    # How loaders are prepared, under Accelerate's names.
    use_seedable_sampler: ClassVar[bool] = True  # shuffled data has the order of a seed
    non_blocking: ClassVar[bool] = True  # batches are copied to the device without waiting

    # State of the loop. `_begin` creates these fields, also again when `free_memory` has replaced the engine.
    _scale: LossScale | None  # None unless fp16 losses are scaled
    _make_context: Callable[..., AbstractContextManager[Any]] | None  # context of a forward; None: none is needed
    _groups: LoopGroups  # of micro-batches, one group for each optimizer step
    _prepared: PreparedObjects

    @known_arguments(refuse_unknown)
    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        rng_types: Sequence[str | RNGType] | None = None,
        log_with: str | LoggerType | GeneralTracker | Sequence[str | LoggerType | GeneralTracker] | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        strategy: str | Strategy = "auto",
        seed: int | None = None,
        schedule_steps: Literal["once", "per_process"] | None = None,
    ) -> None:
        if deepspeed_plugins is not None and deepspeed_plugin is not None:
            raise ConfigurationError("deepspeed_plugin and deepspeed_plugins are the same argument. Pass one of them.")
        install_rich_tracebacks()
        self.project_configuration = project_of(project_dir, project_config)
        self.log_with = read_trackers(log_with, self.project_configuration.logging_dir)
        self._loader_config = loader_settings(split_batches, seed, dataloader_config)
        self._has_passed_seed = self._loader_config.data_seed is not None  # False: `load_state` may set another seed
        # All arguments are checked before this process joins the others.
        settings = read_settings(
            mixed_precision=mixed_precision,
            steps=gradient_accumulation_steps,
            accumulation=gradient_accumulation_plugin,
            cpu=cpu,
            kwargs_handlers=kwargs_handlers,
            strategy=strategy,
            plugins={
                "fsdp_plugin": fsdp_plugin,
                "deepspeed_plugin": deepspeed_plugin if deepspeed_plugins is None else deepspeed_plugins,
                "torch_tp_plugin": torch_tp_plugin,
                "megatron_lm_plugin": megatron_lm_plugin,
                "parallelism_config": parallelism_config,
            },
            shared=AcceleratorState.shared_plugins(),
            dynamo_backend=dynamo_backend,
            dynamo_plugin=dynamo_plugin,
        )
        self._settings = settings
        self.state = AcceleratorState(cpu=settings.cpu, **settings.group_options)  # joins the other processes
        if settings.argument == "deepspeed_plugin":
            self.state.share_deepspeed_plugins(cast("dict[str, DeepSpeedPlugin]", settings.plugins))
        self.state.joined().watch_loop()
        self.engine = settings.selection.engine()
        self.engine.start(self.state.topology)
        if self.strategy.runs_on is not None:
            # The state has selected its device before the strategy, which runs only on this type of device.
            PartialState._shared_state["device"] = self.engine.device
        self.device_placement = device_placement
        self.rng_types = None if rng_types is None else [RNGType(kind) for kind in rng_types]
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.schedule_steps = schedule_steps_of(schedule_steps)
        self._syncs_each_batch = settings.accumulation.sync_each_batch or self.strategy.sync_each_batch
        self._registered: list[Any] = []  # the objects of `register_for_checkpointing`
        self._trackers = LoopTrackers(self.log_with, self.project_configuration.logging_dir)
        self._traces: list[str] = []  # paths of the traces that `profile` has written
        self._checkpoints = LoopCheckpoints(self.engine, StateFolders(self.project_configuration))
        self._begin(
            self._loader_config.data_seed, settings.accumulation.num_steps or 1, warns=self.state.is_main_process
        )
        self._trigger = False  # this rank has called `set_trigger` since the last `check_trigger`
        self._is_in_join = False  # within the context of `join_uneven_inputs`
        self._num_checked_clips = 0  # calls of `clip_grad_norm_`, up to _NUM_CHECKED_CLIPS
        self._signal: LoopSignal | None = None  # None until `should_stop` is read for the first time
        compare_precision(self, self.mixed_precision, warns=self.state.is_main_process)
        self._publish_settings()

    def _publish_settings(self) -> None:
        """Store the precision and the plugins in the state that all Accelerators share."""
        self.state.mixed_precision = self.mixed_precision
        self.state._engine_type = self.strategy.distributed_type
        self.state.fsdp_plugin = self.fsdp_plugin
        self.state.torch_tp_plugin = self.torch_tp_plugin
        self.state.megatron_lm_plugin = self.megatron_lm_plugin
        self.state.parallelism_config = self.parallelism_config
        self.state.dynamo_plugin = self._settings.dynamo
        if self.deepspeed_plugin is not None:
            for plugin in self.state.deepspeed_plugins.values():
                plugin.set_mixed_precision(self.mixed_precision)
            self.state.select_deepspeed_plugin(str(self.state.selected_plugin))

    def _begin(self, seed: int | None, num_steps: int, *, warns: bool) -> None:
        """Create the state of a loop without prepared objects, for an engine that has started.

        Args:
            seed: Seed of the data order. None: torch's initial seed, which is read when the first loader is prepared.
            num_steps: Micro-batches of one optimizer step.
            warns: Warn about the first short group; see `LoopGroups`.
        """
        self.state.device_mesh = self.engine.mesh
        scaler = self._settings.make_scaler(self.engine.gradients)
        self._scale = None if scaler is None else LossScale(scaler)
        context = self._settings.context_maker(self.device.type, cache=self.engine.capabilities.caches_casts)
        if context is not None and not self.engine.autocasts:
            context = nullcontext  # the engine casts itself; the wrapper of the model still widens outputs to float32
        self._make_context = context
        megatron = None
        if self._settings.megatron is not None:
            from trainwright.accelerator.megatron.megatron_loop import MegatronLoop  # imports all of FSDP

            megatron = MegatronLoop(self._settings.megatron, self.engine, self.forward_backward, num_steps)
        plugin = self._settings.accumulation
        loop_gradients = LoopGradients(
            self.engine.gradients,
            self.engine.data_ranks,
            self.device,
            self._accumulated_parameters,
            scales_loss=self._scale is not None,
            averages_each=self._syncs_each_batch,
        )
        self._groups = LoopGroups(loop_gradients, num_steps, plugin, warns=warns)
        self._prepared = PreparedObjects(
            self.state,
            self.engine,
            self._groups,
            self._scale,
            self._make_context,
            self._loader_config,
            seed,
            self.rng_types,
            self.schedule_steps,
            megatron,
        )

    # How loaders are prepared

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """The options for preparing loaders. A change, or another configuration, holds for loaders prepared later."""
        return self._loader_config

    @dataloader_config.setter
    def dataloader_config(self, value: DataLoaderConfiguration) -> None:
        config = loader_settings(False, self._prepared.seed, value)  # raises an error if another seed is in use
        self._prepared.seed = config.data_seed
        if value.data_seed is not None:
            self._has_passed_seed = True
        if not self._has_passed_seed:
            # The seed is torch's, which `loader_settings` has filled in. A script that assigns the same configuration
            # again, such as `accelerator.dataloader_config = accelerator.dataloader_config`, does not pass a seed.
            config = replace(config, data_seed=None)
        self._loader_config = config
        self._prepared.loader_config = config  # the same object, so that a change of a field has an effect

    @property
    def split_batches(self) -> bool:
        """True if the batch size of a prepared loader is the total over all processes."""
        return self.dataloader_config.split_batches

    @property
    def use_stateful_dataloader(self) -> bool:
        """True if the pass that was interrupted continues after `load_state`; see `DataLoaderConfiguration`."""
        return self.dataloader_config.use_stateful_dataloader is not False

    @property
    def even_batches(self) -> EvenBatches:
        """How processes get equal numbers of batches; see `DataLoaderConfiguration`.

        This attribute may be set. The value holds for loaders that are prepared later.
        """
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: EvenBatches) -> None:
        check_even_batches(value)
        self.dataloader_config.even_batches = value

    @property
    def dispatch_batches(self) -> bool | None:
        """True if the first process reads all data, and sends each process its part. False: every process reads its
        own part. None: True for iterable data sets that do not declare their division over processes, otherwise False.
        """
        return self.dataloader_config.dispatch_batches

    # Where it runs

    @property
    def strategy(self) -> Strategy:
        """The strategy that the constructor selected."""
        return self._settings.selection.strategy

    @property
    def distributed_type(self) -> DistributedType:
        """The `DistributedType` of the strategy. If the strategy defines none, the type of the process group."""
        return self.strategy.distributed_type or PartialState().distributed_type

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The selected DeepSpeed plugin. None without a DeepSpeed plugin."""
        return self.state.deepspeed_plugin if self._settings.argument == "deepspeed_plugin" else None

    @contextmanager
    def _use_selected_plugin(self, models: Sequence[nn.Module] = ()) -> Iterator[None]:
        """Return a context in which the engine prepares `models` with the present options of the plugin."""
        plugin = self.deepspeed_plugin
        if plugin is not None:
            engine: Any = self.engine
            engine.use(self._settings.strategy_of(self.state.selected_plugin, self.state.num_processes))
            before = engine.resolved_config
            yield
            if engine.resolved_config is not before:  # a DeepSpeed engine was created
                plugin.fill_in(engine.resolved_config)
            return
        if self._settings.argument == "fsdp_plugin":
            self.engine.use(self._settings.sharding_as_set(self.state.num_processes))
        elif self._settings.argument == "megatron_lm_plugin":
            self.engine.use(self._settings.megatron_as_set(self.state.num_processes, models))
        yield

    @property
    def is_fsdp2(self) -> bool:
        """True if the engine shards models with FSDP. The version of FSDP is always 2."""
        return self.distributed_type == DistributedType.FSDP

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.state.device

    @property
    def mixed_precision(self) -> str:
        """`"no"`, `"fp16"`, `"bf16"` or `"fp8"`."""
        if self._settings.precision.converts_layers:
            return "fp8"
        names: dict[torch.dtype | None, str] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
        return names.get(self._settings.precision.autocast_dtype, "no")

    @property
    def project_dir(self) -> str | None:
        """The folder of the project."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The folder of the trackers."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number in the name of the next automatically named state."""
        return self.project_configuration.iteration

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one optimizer step. This attribute may be set between two passes over the data."""
        return self._groups.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self._groups.num_steps = value

    @property
    def multi_device(self) -> bool:
        """True if there are several processes."""
        return self.state.num_processes > 1

    @property
    def torch_device_mesh(self) -> Any:
        """The `DeviceMesh` of a strategy that shards or splits models (FSDP, tensor parallelism), or None."""
        return self.engine.mesh

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """True if the strategy has a `DeviceMesh`."""
        return self.engine.mesh is not None

    def _rank_along(self, axis: str) -> int:
        """Return this process's index along an axis of the mesh. 0 if the mesh does not have the axis."""
        mesh = self.engine.mesh
        if mesh is None:  # each process is a replica, as with DDP
            return self.engine.data_ranks.rank if axis == "dp_replicate" else 0
        if axis not in mesh.mesh_dim_names:
            return 0
        rank: int = mesh.get_local_rank(axis)
        return rank

    @property
    def data_parallel_rank(self) -> int:
        """Index of this process's model replica. A replica may be sharded or split over several processes."""
        return self._rank_along("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Index of this process's shard in its replica. 0 if the replica is not sharded."""
        return self._rank_along("dp_shard") // self.engine.data_ranks.parts

    @property
    def tensor_parallel_rank(self) -> int:
        """Rank of this process among the processes that split a layer's weights. 0 if layers are not split."""
        return self._rank_along("tp")

    @property
    def context_parallel_rank(self) -> int:
        """Rank of this process among the processes that split a sequence. 0 if sequences are not split."""
        ranks = self.engine.data_ranks
        return ranks.rank % ranks.parts

    @property
    def pipeline_parallel_rank(self) -> int:
        """Index of this process in its pipeline. 0 without a pipeline."""
        return self._rank_along("pp")

    @property
    def fp8_backend(self) -> str:
        """With `mixed_precision="fp8"`, `"AO"` (torchao) or `"TE"` (transformer_engine). Otherwise `"NO"`."""
        return self._settings.precision.fp8_backend

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of `mixed_precision="fp16"`. None in other precisions."""
        return None if self._scale is None else self._scale.scaler

    # Lists of Accelerate that transformers and other programs read.

    @property
    def _models(self) -> list[nn.Module]:
        return self._prepared.models

    @property
    def _optimizers(self) -> list[AcceleratedOptimizer]:
        return self._prepared.optimizers

    @property
    def _schedulers(self) -> list[AcceleratedScheduler]:
        return self._prepared.schedulers

    @property
    def _dataloaders(self) -> list[AcceleratedLoader]:
        return self._prepared.dataloaders

    @property
    def should_save_model(self) -> bool:
        """True if this process holds the first replica of the model, or a part of the first replica."""
        return self.data_parallel_rank == 0

    @property
    def sync_gradients(self) -> bool:
        """True if an optimizer step follows the current micro-batch. Loops that divide steps themselves set it."""
        return self._groups.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._groups.set_sync_gradients(value)

    @property
    def gradient_state(self) -> GradientState:
        """The state of gradient accumulation, with `sync_gradients`, `end_of_dataloader`, `remainder` and others."""
        return GradientState(groups=self._groups)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if an optimizer skipped its last step because of non-finite fp16 gradients."""
        return any(optimizer.step_was_skipped for optimizer in self._prepared.optimizers)

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings. In a run with one process, also return the prepared objects.

        Raises:
            ConfigurationError: There are several processes, to which prepared objects hold connections.
        """
        state = {**vars(self), "_signal": None}  # handlers of signals belong to a process
        if self.state.num_processes == 1:
            return state
        if self._prepared:
            raise ConfigurationError(
                "this Accelerator holds connections to other processes, which cannot be pickled. Pickle it before "
                "prepare(), or pickle accelerator.unwrap_model(model) and state dicts."
            )
        # `__setstate__` creates these again, and needs two values for that.
        for name in ("engine", "_checkpoints", "_groups", "_scale", "_make_context", "_prepared"):
            del state[name]
        return {**state, "_to_begin": {"seed": self._prepared.seed, "num_steps": self.gradient_accumulation_steps}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        to_begin: dict[str, Any] | None = state.pop("_to_begin", None)  # None: a run with one process
        vars(self).update(state)
        if to_begin is not None:
            self.engine = self._settings.selection.engine()
            self.engine.start(self.state.topology)
            self._checkpoints = LoopCheckpoints(self.engine, StateFolders(self.project_configuration))
            self._begin(**to_begin, warns=self.state.is_main_process)

    def __getattr__(self, name: str) -> Any:
        """Return the plugin of the constructor's argument `name`, which may come from the launcher's variables.

        None if another argument, or none, selects the strategy. Other names are attributes of `AcceleratorState`:
        `num_processes`, `is_main_process`, `wait_for_everyone`, `print`, …
        """
        if name.startswith("_") or "state" not in vars(self):  # while the object is created or unpickled
            raise AttributeError(name)
        settings = self._settings
        if name == "parallelism_config" and settings.arrangement is not None:  # passed in addition to a plugin
            return settings.arrangement
        if name in PLUGINS:
            if name != settings.argument:
                return None
            (plugin,) = settings.plugins.values()  # only `deepspeed_plugin`, a property, may have several
            return plugin
        try:
            return getattr(self.state, name)
        except AttributeError:
            raise refuse_attribute(name, [*dir(type(self)), *dir(self.state)]) from None

    # Preparing

    def prepare(self, *args: object, device_placement: Sequence[bool | None] | bool | None = None) -> Any:
        """Prepare models, optimizers, DataLoaders and schedulers. Other arguments are returned unchanged.

        Collective with several processes: every rank prepares the same objects in the same order. An object that is
        already prepared is returned unchanged.

        Args:
            args: The objects, in any order. The result has the same order: a tuple, or the object if it is only one.
            device_placement: Move objects to the device: one bool, or a list with one bool or None per object. Default:
                None, which is the value of the constructor.

        Raises:
            ConfigurationError: `device_placement` has the wrong length, ranks prepare different models, or an object is
                not supported.
        """
        if isinstance(device_placement, Sequence):
            placements = list(device_placement)
        else:
            placements = [device_placement] * len(args)
        if len(placements) != len(args):
            raise ConfigurationError(
                f"device_placement has {len(placements)} entries for {len(args)} objects. Pass one entry for each "
                "object, or one bool for all."
            )
        placed = [self._is_placed(placement) for placement in placements]
        with self._use_selected_plugin([one for one in args if isinstance(one, nn.Module)]):
            results = self._prepared.prepare(args, placed, steps_with_optimizer=self.step_scheduler_with_optimizer)
        return results[0] if len(results) == 1 else tuple(results)

    def _is_placed(self, placement: bool | None) -> bool:
        return self.device_placement if placement is None else placement

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Return the module that the loop calls instead of `model`: a wrapper, or `model` if no wrapper is needed.

        Collective with several processes: all ranks start with rank 0's weights.

        Args:
            model: The model. Its parameters remain the same objects.
            device_placement: Move the model to the device. A model that `dispatch_model` has placed is not moved.
                Default: the value of the constructor.
            evaluation_mode: The model is not trained, and its backward does not communicate. Default: False.
        """
        placed = [self._is_placed(device_placement)]
        with self._use_selected_plugin([model]):
            return self._prepared.prepare_models([model], placed, evaluation_mode=evaluation_mode)[0]

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Return an optimizer whose `step` only has an effect in the last micro-batch of a group. Not collective.

        `device_placement` has no effect: an optimizer's state is where its parameters are.
        """
        del device_placement
        return self._prepared.optimizer(optimizer)

    def prepare_scheduler(self, scheduler: object) -> AcceleratedScheduler:
        """Return a schedule whose `step` advances it only if its optimizer has stepped. Not collective.

        With `step_scheduler_with_optimizer=False`, every call of `step` advances the schedule.
        """
        return self._prepared.scheduler(scheduler, steps_with_optimizer=self.step_scheduler_with_optimizer)

    def prepare_data_loader(
        self,
        data_loader: object,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> AcceleratedLoader:
        """Return a loader of this process's part of the data; see `prepare_loader`.

        Args:
            data_loader: A DataLoader, a list of batches, or an iterable of batches that declares its division over
                processes (see `ShardedIterable`).
            device_placement: Move batches to the device. Default: the value of the constructor.
            slice_fn_for_dispatch: `slice_fn(batch, slice, process_index=…, num_processes=…)` returns a process's part
                of a batch, if the first process reads all data. Default: None, which slices tensors and lists.
        """
        placed = self._is_placed(device_placement)
        return self._prepared.loader(data_loader, placed=placed, slice_fn=slice_fn_for_dispatch)

    def skip_first_batches(self, dataloader: AcceleratedLoader, num_batches: int = 0) -> SkippedStart:
        """Return a prepared loader that skips the first `num_batches` batches of each pass.

        See `AcceleratedLoader.skip`.
        """
        return self.prepare_data_loader(dataloader).skip(num_batches)

    # The step

    def backward(
        self, loss: torch.Tensor, *, num_items: int | float | torch.Tensor | None = None, **kwargs: object
    ) -> None:
        """Run backward on the weighted loss of a micro-batch.

        Collective in the last micro-batch of a group. With `sync_each_batch` or a sharded strategy, collective in every
        micro-batch.

        Without `num_items`, the loss is divided by `gradient_accumulation_steps`. If the last group of a pass has fewer
        micro-batches, its losses are divided by the same number, with one warning; `short_group` of
        `GradientAccumulationPlugin` sets another divisor. With `num_items`, the gradient of a step is the mean over all
        items of the group on all processes. The last micro-batch sums the counts over processes, and divides the
        accumulated gradients once, in place.

        Args:
            loss: Scalar with a graph: the mean over the rows, or the `num_items` items, of the micro-batch.
            num_items: Number of items (tokens, samples) that `loss` is the mean over. May be a tensor on the device,
                which is read without waiting, except in the first micro-batch under fp16. Pass it for every micro-batch
                of a group, or for none. Default: None.
            kwargs: Arguments of `torch.Tensor.backward`. With `learning_rate`, `lomo_backward` runs instead.

        Raises:
            TaskError: The loss has no graph or several elements, or `num_items` is not a count, is passed twice for one
                micro-batch, or is passed for only some micro-batches of a group.
        """
        # The block of `accumulate` has decided whether this backward averages gradients over processes (see
        # `MicroBatchBlock`). It does so in hooks of torch: DDP's and FSDP's are called within `engine.backward`.
        # `complete` adds what no hook does: the correction of weights, split layers, experts.
        if kwargs.get("learning_rate") is not None:
            return self.lomo_backward(loss, cast("float", kwargs["learning_rate"]))
        if not loss.requires_grad:
            raise TaskError(
                "backward() was given a loss without a graph (requires_grad is False): nothing could be learned from "
                "it. Compute it from the model's outputs, without detach(), .item() or torch.no_grad()."
            )
        if loss.numel() != 1 and not kwargs:
            raise TaskError(f"backward() was given a loss of shape {tuple(loss.shape)}. Take its mean() or sum().")
        loss = self._groups.weigh(loss, num_items)
        if self._scale is not None:
            loss = self._scale.scale(loss, starts_group=self._groups.starts_group)
        if self._groups.holds_back:  # a loop has set `sync_gradients = False` itself, without a block of `accumulate`
            with self._no_sync_of(()):
                self.engine.backward(loss, **kwargs)
            return None
        self.engine.backward(loss, **kwargs)
        if self._groups.sync_gradients:
            self._groups.complete()
            # Not in `join_uneven_inputs`: processes that have left the loop early would miss the exchange.
            if self._signal is not None and not self._is_in_join:
                self._signal.end_step()
        return None

    def forward_backward(self, step: Callable[[Any], torch.Tensor], batches: Sequence[Any]) -> torch.Tensor:
        """Run all micro-batches of one optimizer step forward and backward. Collective.

        A pipeline runs all micro-batches together. Other strategies run one micro-batch after the other, and average
        gradients in the last micro-batch. All micro-batches have the same weight. Use `gradient_accumulation_steps=1`:
        without a pipeline, the gradients are also divided by this number, as in `backward`.

        Args:
            step: Function of a micro-batch that returns the loss (0-dim, with a graph). In a pipeline, the function
                must call the model exactly once.
            batches: At least one micro-batch, of any form.

        Returns:
            The mean loss (0-dim, without a graph): with a pipeline over the micro-batches of all processes, otherwise
            over the micro-batches of this process.
        """
        if self._prepared.megatron is not None:
            step = self._prepared.megatron.direct(step)
        if self._prepared.run_group is not None:
            mean_loss = self._prepared.run_group(step, batches).detach()
            self.engine.gradients.complete()
            return mean_loss
        weighted_losses: list[torch.Tensor] = []
        for i, batch in enumerate(batches):
            is_last = i == len(batches) - 1
            block = nullcontext() if is_last else self._no_sync_of(())
            with block:
                loss = step(batch) / len(batches)
                self.backward(loss)
            weighted_losses.append(loss.detach())
        return torch.stack(weighted_losses).sum()

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return a context for one micro-batch. Only the last context of a group averages gradients over processes.

        In the other contexts, `step` and `zero_grad` of prepared optimizers have no effect.

        Args:
            models: Models that are trained in the context, each with one forward and backward. Without models, all
                prepared models are meant.
        """
        return MicroBatchBlock(self._groups, models, self._no_sync_of)

    def _no_sync_of(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Return a context in which backward averages no gradients of models. `()` stands for all prepared models.

        The contexts of the models are entered in this call, and left with the returned one.
        """
        with ExitStack() as stack:
            for model in models or self._prepared.models:
                stack.enter_context(self.no_sync(model))
            return stack.pop_all()  # otherwise, the end of this block would leave the contexts

    def _accumulated_parameters(self, models: Sequence[nn.Module]) -> list[torch.Tensor]:
        """Return the parameters whose gradients accumulate in groups of `models`. `()` stands for all prepared models.

        An optimizer of one of the models may also have parameters that belong to no model, such as a temperature.
        """
        of_models: list[torch.Tensor] = []
        for model in models or self._prepared.models:
            of_models.extend(model.parameters())
        parameters = dict.fromkeys(self.engine.gradients.stored(of_models))  # in order, without duplicates
        for optimizer in self._prepared.optimizers:
            of_optimizer = parameters_of([optimizer])
            trains_models = not parameters.keys().isdisjoint(of_optimizer)
            if not models or trains_models:
                parameters.update(dict.fromkeys(of_optimizer))
        return list(parameters)

    def no_sync(self, model: nn.Module) -> Any:
        """Return a context in which backward does not average gradients over processes.

        The next backward outside of the context averages the accumulated gradients.

        Args:
            model: The prepared model, or the model that was passed to `prepare`.
        """
        return self.engine.no_sync(self._prepared.inner_of(model))

    def trigger_sync_in_backward(self, model: nn.Module) -> Any:
        """Return a context in which backward averages gradients, although the forward ran within `no_sync`.

        Gradients that were accumulated by earlier backwards are averaged, too. The backward is collective.

        Args:
            model: The prepared model, or the model that was passed to `prepare`.

        Raises:
            ConfigurationError: DistributedDataParallel has `find_unused_parameters=True`.
        """
        return self.engine.sync_next_backward(self._prepared.inner_of(model))

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: EvenBatches | None = None) -> Iterator[None]:
        """Return a context for loops in which processes have different numbers of batches.

        A process that ends the loop early contributes zero gradients to the averages of the other processes, as in
        torch's `Join`. At the end of the context, it receives the weights of the process that ended last. Only the
        averages are joined: call `gather`, `reduce` and `backward(num_items=…)` outside of the context. Prepared
        loaders need the context only if `even_batches` is False. Otherwise, they return the same number of
        micro-batches on every process. Collective at the end of the context.

        With one process, and with strategies other than DDP, the context has no effect and a warning is raised.

        Args:
            joinables: Prepared models, and torch's `Joinable` objects such as `ZeroRedundancyOptimizer`.
            even_batches: Value of `even_batches` for passes of prepared loaders that begin in the context. Default:
                None, which is the Accelerator's value.
        """
        block = self.engine.join([self._prepared.inner_of(one) for one in joinables])
        if block is None:
            warnings.warn(
                "join_uneven_inputs() has no effect here: it is for models that several processes train with "
                "strategy='ddp'.",
                TrainwrightWarning,
                stacklevel=3,
            )
            block = nullcontext()
            even_batches = None  # processes that do not join need equal numbers of batches
        with ExitStack() as stack:
            if even_batches is not None:
                for loader in self._prepared.dataloaders:
                    stack.enter_context(loader.divided(even_batches))
            stack.enter_context(block)
            self._is_in_join = True
            try:
                yield
            finally:
                self._is_in_join = False

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context in which `scaled_dot_product_attention` spans sequences that are split over ranks.

        The context has no effect unless `ParallelismConfig` has a `cp_size` or `sp_size` above 1. Run forwards of
        prepared models in the context, with this rank's part of each batch. The buffers must include the position ids
        and, for transformers' causal models, `shift_labels`: the targets, shifted before they are split.

        Args:
            buffers: Tensors with full sequences. In the context, each tensor holds this rank's part.
            buffer_seq_dims: Dimension of the sequences in each buffer.
            no_restore_buffers: Buffers that are not restored after the context.

        Raises:
            ConfigurationError: At the start, a sequence cannot be split over the ranks. At the end, the model has not
                called `scaled_dot_product_attention`.
        """
        if self.engine.sequences is None:
            return nullcontext()
        return self.engine.sequences.in_place(buffers or [], buffer_seq_dims or [], no_restore_buffers or set())

    def deepspeed_ulysses_dl_adapter(self, dl: object, model: nn.Module) -> Any:
        """Return the loader unchanged, because `maybe_context_parallel` splits batches."""
        del model
        return dl

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Run the backward of `Lomo` or `AdaLomo` of lomo-optim, which updates parameters during backward.

        Args:
            loss: Scalar with a graph.
            learning_rate: Learning rate of this step.

        Raises:
            ConfigurationError: No such optimizer was prepared.
        """
        for optimizer in self._prepared.optimizers:
            if hasattr(optimizer.optimizer, "fused_backward"):
                optimizer.optimizer.fused_backward(loss, learning_rate)
                return
        raise ConfigurationError(
            "lomo_backward() needs an optimizer with fused_backward, such as Lomo of lomo-optim. Pass it to prepare(), "
            "or call backward(loss)."
        )

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Any:
        """Return a context that computes in the mixed precision, for code outside of a prepared model.

        Args:
            autocast_handler: Options of this context. Default: the `AutocastKwargs` in `kwargs_handlers`.
        """
        if self._make_context is None:
            return nullcontext()
        return self._make_context(**({} if autocast_handler is None else autocast_handler.to_dict()))

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[torch.profiler.profile]:
        """Return a context that yields torch's profiler and records the operations in the context.

        With `output_trace_dir`, every process must use the context, because its end waits for all traces.

        Args:
            profile_handler: Options. Default: the `ProfileKwargs` in `kwargs_handlers`, or else `ProfileKwargs()`.

        Raises:
            ConfigurationError: `profile_handler` has another type, or this machine does not support an activity.
        """
        options = profile_handler or self._settings.handlers.profile or ProfileKwargs()
        return profiled(options, self.process_index, self.wait_for_everyone, self._traces)

    def unscale_gradients(self, optimizer: Optimizer | Iterable[Optimizer] | None = None) -> None:
        """Divide gradients by the fp16 scale. A second call in the same step has no effect.

        Args:
            optimizer: One or several optimizers, prepared or not. Default: None, all prepared optimizers.

        Raises:
            ConfigurationError: A backward has added to gradients that were already divided.
        """
        if self._scale is None:
            return
        if optimizer is None:
            optimizers: Iterable[Optimizer] = self._prepared.optimizers
        elif isinstance(optimizer, Optimizer):
            optimizers = [optimizer]
        else:
            optimizers = optimizer
        for one in optimizers:
            self._scale.unscale(one.optimizer if isinstance(one, AcceleratedOptimizer) else one)

    def _unscale_for_clip(self, parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Unscale the gradients of the optimizers that have one of `parameters`. Return the parameters as a list.

        Other optimizers may still accumulate gradients, so theirs stay scaled.
        """
        clipped = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self._scale is not None:
            for optimizer in self._prepared.optimizers:
                if not set(clipped).isdisjoint(parameters_of([optimizer])):
                    self.unscale_gradients(optimizer)
        return clipped

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scale gradients so that the total norm is at most `max_norm`. Call it when `sync_gradients` is True.

        Returns:
            The norm before clipping (0-dim, on the device), equal on every rank. Does not wait for the device.
        """
        if self._shards and self._num_checked_clips < _NUM_CHECKED_CLIPS:
            self._num_checked_clips += 1
            self._meet("clip_grad_norm_()")
        clipped = self._unscale_for_clip(parameters)
        norm = self.engine.gradients.clip(clipped, GradientClip(max_norm, "norm", float(norm_type)))
        assert norm is not None  # only clipping by value computes none
        return norm

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each element of the gradients to ±`clip_value`. Call it when `sync_gradients` is True."""
        self.engine.gradients.clip(self._unscale_for_clip(parameters), GradientClip(clip_value, "value"))

    @property
    def _shards(self) -> bool:
        """True if gradients or weights are sharded over processes, so that reading them in full is collective."""
        return self.state.num_processes > 1 and self.engine.capabilities.gradients != "full"

    def _meet(self, call: str) -> None:
        """Wait for the other processes in a collective call. Report processes that do not make the call. Collective."""
        self.state.joined().meet(f"accelerator.{call}")

    def set_trigger(self) -> None:
        """Set a flag on this rank. `check_trigger` reports the flag on every rank."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Return whether any rank has called `set_trigger` since the last check. Collective, on the host."""
        is_set_on_any_rank = self.state.joined().any(self._trigger)
        self._trigger = False
        return is_set_on_any_rank

    @property
    def should_stop(self) -> bool:
        """True once any rank has received SIGTERM or SIGUSR1. End the loop after this step, and call `save_state`.

        The value is the same on every rank. It changes only in the `backward` of a group's last micro-batch, at most
        about a second (or one step) after the signal, and does not change within `join_uneven_inputs`. The first read
        sets the signal handlers of this process. From then on, ranks exchange signals in `backward`: read the value in
        each step, on every rank. A read does not communicate. The user's signal handlers are called, too.
        `end_training` restores the earlier handlers. If the main thread waits in a collective for 30 seconds after
        SIGTERM, the process ends with exit code 143. It ends within seconds if another rank has failed.

        Warns:
            TrainwrightWarning: The first read is outside of the main thread, where Python cannot set handlers.
        """
        if self._signal is None:
            self._signal = LoopSignal(self.state.joined())
        return self._signal.agreed

    # Between the processes

    def gather(self, tensor: object) -> Any:
        """Return the tensors of all ranks, concatenated along the first dimension. Collective.

        While a prepared loader is read, ranks may have different numbers of rows in the last batch. The rows of a rank
        without data, whose batch is padding, come last. `gather_for_metrics` drops these rows.

        Raises:
            TypeError: A leaf is not a tensor.
            ConfigurationError: Dtypes or shapes differ between ranks. While a loader is read, numbers of rows may
                differ. Raised on every rank.
        """
        if self._groups.reading is None:
            return gather(tensor)
        return gather_real(tensor, is_padding=False, processes=self.state.joined(), operation="gather")

    def gather_for_metrics(self, input_data: object, use_gather_object: bool = False) -> Any:
        """Return the results of all ranks for the current micro-batch of the loader that is being read. Collective.

        Padding is dropped. For a short last batch, excess rows, such as those of `loss.repeat(batch_size)`, are
        dropped, too. Ranks may have different numbers of rows: over a pass, each sample of the data set has one row.

        Args:
            input_data: Tensors with rows, in nested lists, tuples and dicts, or a list of other objects.
            use_gather_object: Gather picklable objects, and return the concatenated lists of all ranks. Default: False.
        """
        reading = self._groups.reading
        micro_batch = self._groups.micro_batch
        # Of the ranks that see the same data, only one contributes rows. The others are treated like padding.
        is_counted = self.state.process_index in self.engine.data_ranks.members
        has_no_rows = micro_batch.is_padding or micro_batch.num_rows == 0 or not is_counted
        if reading is not None and micro_batch.num_rows is not None:
            input_data = reading.loader.trim_rows(input_data, micro_batch.num_rows)
        has_tensors = next(iterate_tensors(input_data), None) is not None
        if use_gather_object or not has_tensors:
            values = list(input_data) if isinstance(input_data, (list, tuple)) else [input_data]
            return gather_objects([] if has_no_rows else values, self.state.joined())
        return gather_real(input_data, has_no_rows, self.state.joined())

    def reduce(self, tensor: object, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum (`reduction="mean"`: the mean) of all ranks' tensors, times `scale`. Collective."""
        return reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: object, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors in one dimension to the greatest length of all ranks. Collective."""
        return pad_across_processes(tensor, dim, pad_index, pad_first)

    # Saving and releasing

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's model without the wrappers of `prepare`, torch.compile and torch's replicas.

        Args:
            model: A prepared model, a compiled prepared model, or a DistributedDataParallel or DataParallel module.
            keep_fp32_wrapper: Accepted without effect: `prepare` does not change the model's forward. Default: True.
            keep_torch_compile: If a compiled module wraps the model, return the compiled module. Default: True.
        """
        del keep_fp32_wrapper
        return unwrapped(model, keep_torch_compile=keep_torch_compile)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether a device map has dispatched the model, or a part of the model, to several devices."""
        for module in model.modules():
            device_map = getattr(module, "hf_device_map", None)
            if device_map is not None and len(set(device_map.values())) > 1:
                return True
        return False

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict of a model, with the names of the unwrapped model. `unwrap` has no effect.

        Collective if the model is sharded: the main process gets copies on the host, and other processes get an empty
        dict. Otherwise, every process gets references to the tensors.
        """
        if self._shards:
            self._meet("get_state_dict()")
        self.engine.begin_save()
        unwrapped_model = self.unwrap_model(model, keep_torch_compile=False)
        state = self.engine.make_state(unwrapped_model, [])
        # `keep_vars`: the parameters themselves, so that both names of a tied parameter have the same object.
        values = unwrapped_model.state_dict(keep_vars=True)
        # By the tensor's id, so that a tied tensor is gathered once. A value may be any object, also without a hash.
        full: dict[int, torch.Tensor] = {}
        for value in values.values():
            is_sharded = state.missing_like(value) is not None
            if is_sharded and id(value) not in full:
                full[id(value)] = state.gather_tensor(value).detach()
        if not full:
            return dict(unwrapped_model.state_dict())
        if not self.state.is_main_process:
            return {}
        return {name: full.get(id(value), value) for name, value in values.items()}

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights on the main process, including offloaded and quantized weights.

        Arguments are those of `trainwright.save_model`. Collective if the model is sharded: one tensor at a time is
        gathered.
        """
        if self._shards:
            self._meet("save_model()")
        unwrapped_model = self.unwrap_model(model, keep_torch_compile=False)
        values = unwrapped_model.state_dict(keep_vars=True)
        state = self.engine.make_state(unwrapped_model, [])
        if any(state.missing_like(value) is not None for value in values.values()):
            save_sharded_model(values, state, self.engine.processes, save_directory, max_shard_size, safe_serialization)
        elif self.state.is_main_process:
            save_model(unwrapped_model, save_directory, max_shard_size, safe_serialization)

    def save(self, obj: object, f: str | os.PathLike[str] | IO[bytes], safe_serialization: bool = False) -> None:
        """Write an object with `torch.save`, on the main process only. Not collective.

        Args:
            obj: An object without sharded tensors, such as `get_state_dict(model)`.
            f: A path or an open file. An existing file at the path is replaced.
            safe_serialization: Write a dict of tensors as safetensors. `f` must be a path. Default: False.

        Raises:
            ConfigurationError: A tensor is sharded, or safetensors cannot store the object. Raised on every rank.
        """
        save_object(obj, f, safe_serialization, is_main=self.state.is_main_process)

    def register_for_checkpointing(self, *objects: object) -> None:
        """Add objects whose state `save_state` saves and `load_state` restores. Ranks must have equal states.

        Raises:
            ConfigurationError: An object has no `state_dict` or `load_state_dict`.
        """
        for one in objects:
            if not all(callable(getattr(one, name, None)) for name in ("state_dict", "load_state_dict")):
                raise ConfigurationError(f"{type(one).__name__} has no state_dict and load_state_dict. Define both.")
        self._registered.extend(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` on every rank before each `save_state`.

        Args:
            hook: Function of the unwrapped models, the list of their state dicts, and a folder. Files in the folder
                become part of the state. If the hook removes a state dict from the list, that model is not saved.

        Returns:
            A handle whose `remove()` removes the hook.
        """
        return self._checkpoints.add_save_hook(hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call `hook(models, input_dir)` on every rank before each `load_state`.

        Args:
            hook: Function of the list of unwrapped models, and the folder. Models that it removes are not loaded.

        Returns:
            A handle whose `remove()` removes the hook.
        """
        return self._checkpoints.add_load_hook(hook)

    @known_arguments(partial(refuse_option, "save_state"))
    def save_state(self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True) -> str:
        """Write the state of all prepared objects as a checkpoint, and replace an existing checkpoint. Collective.

        If weights and optimizers are not sharded, the main process may call it alone, within
        `if accelerator.is_main_process:`. It waits for the others, 10 s if they wait for it in a collective and 60 s
        otherwise, and then writes the state without their generators, with a warning.

        The checkpoint contains weights, optimizers, schedules, the loss scale, the position in the data, the generators
        of all ranks and registered objects. A loop that loads the checkpoint continues bit for bit. With a sharded
        strategy, every rank writes its shards. Call this method between two optimizer steps. Blocks until the state is
        on the disk and uploaded, unless `ProjectConfiguration(async_save=True)` is used.

        Args:
            output_dir: The folder, or a URL such as `s3://bucket/run/state`. An existing state at a URL is replaced
                only if this run has uploaded it. Default: None, which requires automatic naming; see
                `ProjectConfiguration`.
            safe_serialization: False only warns, because weights are always written as safetensors. Default: True.

        Returns:
            The folder or URL.

        Raises:
            CheckpointError: `output_dir` exists and is not a checkpoint, a value cannot be saved, or the upload failed.
                Earlier states are not changed.
            ConfigurationError: `output_dir` is missing without automatic naming, or is set with automatic naming, an
                option is unknown, the loop is within a group of micro-batches, or weights are sharded and the other
                processes wait for this one in other collectives.
        """
        self._checkpoints.folders.check_target(output_dir)
        objects = self._objects()
        turn: Turn = "together"
        if self._shards:
            self._meet("save_state()")
        else:
            steps = [optimizer.num_steps for optimizer in objects.optimizers]
            turn = self.state.joined().meet_or_lead("accelerator.save_state()", f"{output_dir} after steps {steps}")
        if turn == "done":  # this rank is late, and the main process has already written this state alone
            return self._checkpoints.folders.newest_place(output_dir)
        if self._settings.argument == "fsdp_plugin":  # its state_dict_type may have changed
            self.engine.use(self._settings.sharding_as_set(self.state.num_processes))
        if turn == "alone":
            warnings.warn(
                "the main process writes the state without the other processes, which wait for it elsewhere or are too "
                "slow: their generators are not saved. Call save_state() on every process.",
                TrainwrightWarning,
                stacklevel=2,
            )
        self._groups.refuse_open()
        if not safe_serialization:
            warnings.warn(
                "save_state(safe_serialization=False): weights are written as safetensors all the same, never pickled; "
                "load_state reads them.",
                TrainwrightWarning,
                stacklevel=2,
            )
        return self._checkpoints.save(output_dir, objects, alone=turn == "alone")

    @known_arguments(partial(refuse_option, "load_state"))
    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Restore a state that `save_state` wrote. First prepare the same objects. Collective.

        Every rank reads the folder. The strategy and the number of processes may differ from those of the save. If the
        state was saved within a pass over a loader, the next pass that trains continues at the saved position, with or
        without `skip_first_batches`. A loop that skips batches in another way passes
        `DataLoaderConfiguration(use_stateful_dataloader=False)`. Without a `seed` of the Accelerator, loaders take the
        order of the saved loop in their next pass. A checkpoint of a Trainer restores only weights,
        optimizers, schedules and generators.

        Args:
            input_dir: The folder, or a URL that the main process downloads. Default: None, which is the newest valid
                state with automatic naming; see `ProjectConfiguration`.
            load_kwargs: Must be None or an empty mapping, because `torch.load` is not used. Default: None.

        Raises:
            FileNotFoundError: `input_dir` does not exist, or no valid state was found.
            CheckpointError: The state is damaged, or belongs to another loop. Or another seed than that of the state
                was passed, and the order of a loader depends on the seed.
            ConfigurationError: `input_dir` is missing without automatic naming, or an option is unknown.
        """
        if load_kwargs:
            refuse_option("load_state", "load_kwargs")
        self._meet("load_state()")  # a call of one rank alone would leave replicas with different weights
        self._checkpoints.load(self._checkpoints.source(input_dir), self._objects())
        self._groups.drop_open()  # their gradients are those of the earlier weights

    def _objects(self) -> LoopObjects:
        models = [self.unwrap_model(model, keep_torch_compile=False) for model in self._prepared.models]
        prepared = self._prepared
        # Preparing a loader has set the seed of all ranks. Without loaders the seed has no effect.
        seed = torch.initial_seed() if prepared.seed is None else prepared.seed
        return LoopObjects(
            models=models,
            optimizers=prepared.optimizers,
            schedulers=prepared.schedulers,
            loaders=prepared.dataloaders,
            scale=self._scale,
            registered=self._registered,
            seed=seed,
            use_seed=None if self._has_passed_seed else prepared.use_seed,
        )

    def free_memory(self, *objects: object) -> list[Any]:
        """Release all prepared objects and their memory. Return None for each of `objects`.

        Call this method on every process, because it replaces the engine. Afterwards, a process can train the user's
        model directly and alone.

        The loop must also release its references: `model, optimizer = accelerator.free_memory(model, optimizer)`.
        Registered objects and hooks of states remain registered.
        """
        self._checkpoints.close()
        self._prepared.release()
        self.engine.close()
        self.engine = self._settings.selection.engine()
        self.engine.start(self.state.topology)
        self._checkpoints = self._checkpoints.for_engine(self.engine)
        self._begin(self._prepared.seed, self.gradient_accumulation_steps, warns=self._groups.warns)
        nones: list[Any] = [None] * len(objects)
        del objects  # `release_memory` frees what nobody references any more
        release_memory()
        return nones

    # Trackers

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers that `init_trackers` has started and that have not failed. Empty before `init_trackers`."""
        return self._trackers.started

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Open a run of each tracker in `log_with`. Close earlier runs.

        If a tracker fails, here or later, a warning is raised and the tracker is no longer used.

        Args:
            project_name: Name of the run's project. With TensorBoard, a folder in the folder of the project.
            config: Hyper-parameters to record. Default: None.
            init_kwargs: Name of a tracker → options: `{"wandb": {"tags": ["a"]}}`. Default: None.

        Raises:
            ConfigurationError: `init_kwargs` names a tracker that is not in `log_with`, or an option is not valid.
        """
        self._trackers.start(project_name, config, init_kwargs or {})

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record values with each tracker. Not collective. Only the values of the first process are recorded.

        Args:
            values: Numbers, tensors with one element, texts, and mappings of these. Reading a tensor waits for the
                device. User-defined trackers receive the values unchanged.
            step: Step of the values in the curves. Default: None, which is the step after the last one.
            log_kwargs: Name of a user-defined tracker → options for its `log`. Default: None.

        Raises:
            ConfigurationError: `init_trackers` has not been called on the main process, `log_kwargs` names an unknown
                tracker, or `values` or `step` has a wrong type.
        """
        self._trackers.log("log", values, step, log_kwargs)

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record lists of images by name, with each tracker that supports images. Other arguments: see `log`."""
        self._trackers.log("log_images", values, step, log_kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: object = None,
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record a table (`columns` and rows of `data`, or a pandas frame) with each tracker that supports tables.

        `step` and `log_kwargs` are those of `log`.
        """
        self._trackers.each("log_table", table_name, columns, data, dataframe, step, options=log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name. On all processes except the first, return an object without effect.

        Args:
            name: `"wandb"`, `"tensorboard"`, …, or the name of a user-defined tracker.
            unwrap: Return the run of the tracker's library. Default: False.

        Raises:
            ConfigurationError: No tracker has this name.
        """
        return self._trackers.get(name, unwrap=unwrap)

    def end_training(self) -> None:
        """Wait for the last save, close trackers, restore signal handlers and destroy the process group.

        It does not wait for other processes.
        """
        self._trackers.finish()
        self._checkpoints.close()
        if self._signal is not None:
            self._signal.close()
        self.engine.close()
        forget_precision(self)
        self.state.remove_deepspeed_plugins()
        self.state.destroy_process_group()

    def clear(self, *objects: object) -> list[Any]:
        """Call `free_memory`."""
        return self.free_memory(*objects)
