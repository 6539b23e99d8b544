"""Megatron-style parallelism: pipeline stages, tensor parallelism and sharding on one mesh of ranks."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from trainwright.core.duration import Duration
from trainwright.core.errors import ConfigurationError
from trainwright.core.names.known_arguments import known_arguments
from trainwright.core.signatures import overrides
from trainwright.core.task import TaskModule
from trainwright.processes.devices import DistributedType
from trainwright.strategies.capabilities import Capabilities, refuse_removed
from trainwright.strategies.engine import Engine
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.fsdp.layers.known_models import sequence_parallel_plan
from trainwright.strategies.fsdp.layers.plan import GivenPlan
from trainwright.strategies.fsdp.options import check_sizes, one_of
from trainwright.strategies.fsdp.recompute import SavePolicy
from trainwright.strategies.fsdp.strategy import FSDPEngine, FSDPStrategy
from trainwright.strategies.megatron.core_engine import MegatronCoreEngine, check_options
from trainwright.strategies.megatron.core_model import find_model, shape_of
from trainwright.strategies.megatron.pipeline_engine import PipelineEngine, PipelineOptions
from trainwright.strategies.megatron.runner import SCHEDULES
from trainwright.strategies.megatron.stages import find_stages
from trainwright.strategies.mesh import MeshShape, nearest_meshes
from trainwright.strategies.strategy import StrategyOutline
from trainwright.strategies.units import WrapPolicy

_MATRIX_PRODUCTS = ("aten.mm", "aten.addmm")  # torch's operators whose results recompute="selective" stores
_STRICT_PLAN = partial(sequence_parallel_plan, strict=True)
_POSSIBLE_PLAN = partial(sequence_parallel_plan, strict=False)


@dataclass(frozen=True, init=False, repr=False)
class MegatronStrategy(FSDPStrategy):
    """Strategy that trains one model with several kinds of parallelism at once.

    The model is divided into `pp` pipeline stages. `tp` ranks split each layer. `dp_shard` ranks shard the resulting
    parameters, gradients and optimizer states. The model is written for one process. The number of processes is the
    product of all sizes.

    A step calls the model once. Each stage runs the step up to its layers, and the last stage runs it to the end.
    Random numbers that `training_step` draws before it calls the model are the same in every stage. Ranks that read the
    same batches start with equal states of torch's generators.

    Args:
        pp: Number of pipeline stages. Default: 1.
        tp: Number of ranks that split each layer (see `FSDPStrategy`). Default: 1.
        cp, sp: Number of ranks that split the sequences of a batch (see `FSDPStrategy`). Default: 1.
        dp_shard: Number of ranks that shard a stage and see different data. Default: None, the number of processes
            divided by the other sizes.
        dp_replicate: Number of replicas of the model, which see different data. Default: 1.
        num_micro_batches: Number of micro-batches into which each batch is divided along its first dimension. The
            micro-batches of all batches of an optimizer step (`accumulate_grad_batches`) run through the pipeline
            together. Default: 1.
        schedule: One of torch's schedules, which determines the order in which stages compute micro-batches: `"1f1b"`,
            `"gpipe"`, and with several stages per rank `"interleaved1f1b"`, `"loopedbfs"`, `"interleavedzerobubble"`,
            `"zbvzerobubble"` and `"dualpipev"`. Default: `"1f1b"`.
        virtual_stages: Number of stages per rank. The pipeline has `pp * virtual_stages` stages. Default: None, which
            means 2 if the schedule needs several stages per rank, and 1 otherwise.
        recompute: `"full"`: layers store only their inputs and are recomputed in backward. `"selective"`: layers also
            store the results of matrix products. Default: None, which disables recomputation.
        distributed_optimizer: Shard parameters, gradients and optimizer states over data-parallel ranks. False
            replicates them, unless `dp_shard` is set. Default: True.
        sequence_parallel: The `tp` ranks also split norms and residuals along the sequence. Supported for transformers'
            Llama, Mistral and Qwen models (see `ready_plan`). With other models, True raises an error and `"auto"` has
            no effect. Default: False.
        split_points: Names of the first layers of all stages except the first stage. Default: None, which uses the
            task's `pipeline_stages`, or divides the parameters evenly.
        engine: `"megatron-core"` trains a causal language model of transformers with megatron-core's GPTModel and
            distributed optimizer. It supports only `tp`, `dp_shard` and `recompute`. Default: `"torch"`.
        tensor_parallel_plan: See `FSDPStrategy`.
        auto_wrap_policy: Units that are sharded separately; see `FSDPStrategy`.
        weights_after_stage, state_dict_type: See `FSDPStrategy`.
        timeout, hang_timeout, process_group_backend: See `DataParallel`.

    Raises:
        ConfigurationError: An option is invalid, or options contradict each other. At the start of a run: the product
            of the sizes is not the number of processes.
    """

    distributed_type: ClassVar[DistributedType | None] = DistributedType.MEGATRON_LM
    capabilities = Capabilities(
        gradients="sharded",
        manual_optimization=False,
        lockstep_evaluation=True,
        full_weights=False,
        weight_averages=False,
        independent_steps=False,
        closures=False,
        inference_mode=False,
        trials=False,
        late_groups=False,
        converted_layers=False,
    )

    pp: int = 1
    dp_shard: int | None = None
    dp_replicate: int = 1
    num_micro_batches: int = 1
    schedule: str = "1f1b"
    virtual_stages: int | None = None
    recompute: str | None = None
    distributed_optimizer: bool = True
    sequence_parallel: bool | str = False
    split_points: Sequence[str] | None = None
    # The argument `engine`. A field cannot have this name, which is also the name of a method.
    library: str = field(default="torch", metadata={"argument": "engine"})
    # Set by `recompute`. They are arguments of `FSDPStrategy`, but not of this class.
    activation_checkpointing: bool = field(default=False, init=False)
    activation_checkpointing_save: SavePolicy | None = field(default=None, init=False)

    @known_arguments(refuse_removed("MegatronStrategy", {}))
    def __init__(
        self,
        *,
        pp: int = 1,
        tp: int = 1,
        cp: int = 1,
        sp: int = 1,
        dp_shard: int | None = None,
        dp_replicate: int = 1,
        num_micro_batches: int = 1,
        schedule: str = "1f1b",
        virtual_stages: int | None = None,
        recompute: str | None = None,
        distributed_optimizer: bool = True,
        sequence_parallel: bool | str = False,
        split_points: Sequence[str] | None = None,
        engine: str = "torch",
        tensor_parallel_plan: GivenPlan | None = None,
        auto_wrap_policy: WrapPolicy | None = None,
        weights_after_stage: str = "main",
        state_dict_type: str = "sharded",
        timeout: float | datetime.timedelta | Duration | str | None = None,
        hang_timeout: float | datetime.timedelta | Duration | str | None = "auto",
        process_group_backend: str | None = None,
    ) -> None:
        self._set(pp=pp, tp=tp, cp=cp, sp=sp, dp_shard=dp_shard, dp_replicate=dp_replicate)
        self._set(num_micro_batches=num_micro_batches, schedule=schedule, virtual_stages=virtual_stages)
        self._set(recompute=recompute, distributed_optimizer=distributed_optimizer)
        self._set(sequence_parallel=sequence_parallel, split_points=split_points, library=engine)
        self._set(tensor_parallel_plan=tensor_parallel_plan, auto_wrap_policy=auto_wrap_policy)
        self._set(weights_after_stage=weights_after_stage, state_dict_type=state_dict_type)
        self._set(timeout=timeout, hang_timeout=hang_timeout, process_group_backend=process_group_backend)
        self.__post_init__()

    def __post_init__(self) -> None:
        if self.recompute is not None:
            one_of("recompute", self.recompute, ("full", "selective"))
        self._set(
            schedule=one_of("schedule", self.schedule.lower(), tuple(SCHEDULES)),
            split_points=None if self.split_points is None else list(self.split_points),
            activation_checkpointing=self.recompute is not None,
            activation_checkpointing_save=_MATRIX_PRODUCTS if self.recompute == "selective" else None,
        )
        super().__post_init__()
        _plan(self.sequence_parallel, self.tp, self.tensor_parallel_plan)  # raises an error if they do not fit
        check_sizes(pp=self.pp, dp_shard=self.dp_shard, dp_replicate=self.dp_replicate)
        check_sizes(num_micro_batches=self.num_micro_batches, virtual_stages=self.virtual_stages)
        has_several_stages = self.split_points is not None or (self.virtual_stages or 1) > 1
        if self.pp == 1 and (has_several_stages or self.num_micro_batches > 1):
            raise ConfigurationError(
                "num_micro_batches, split_points and virtual_stages need a pipeline, and pp=1. Remove them, or use "
                "Trainer(accumulate_grad_batches=…)."
            )
        required_stages = SCHEDULES[self.schedule]
        if required_stages is None:
            fits_schedule = self.stages_per_rank >= 2
        else:
            fits_schedule = self.stages_per_rank == required_stages
        if not fits_schedule:
            raise ConfigurationError(
                f"schedule={self.schedule!r} needs {required_stages or 'several'} stage(s) on each rank, and "
                f"virtual_stages={self.virtual_stages}. Remove virtual_stages, or choose another schedule."
            )
        if one_of("engine", self.library, ("torch", "megatron-core")) != "torch":
            # Megatron-core's buffers hold the gradients, and its optimizer steps.
            self._set(capabilities=replace(self.capabilities, gradients="hidden", owns_optimizer_step=True))

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages on each rank."""
        if self.virtual_stages is not None:
            return self.virtual_stages
        return SCHEDULES[self.schedule] or 2  # a schedule without a fixed number uses at least 2

    @property
    def split_plan(self) -> GivenPlan | None:
        return _plan(self.sequence_parallel, self.tp, self.tensor_parallel_plan)

    def mesh_shape(self, settings: EngineSettings) -> MeshShape:
        sequence_ranks = self.cp * self.sp  # one axis for both, of which only one is above 1
        fixed = self.pp * self.tp * sequence_ranks * self.dp_replicate
        replicas = self.dp_replicate
        shards = settings.num_processes // fixed if self.dp_shard is None else self.dp_shard
        if shards == 0 or fixed * shards != settings.num_processes:
            raise self._wrong_number_of_processes(settings.num_processes, fixed * (self.dp_shard or 1))
        if not self.distributed_optimizer and self.dp_shard is None:
            # The data-parallel ranks hold replicas instead of shards.
            replicas *= shards
            shards = 1
        return MeshShape(pp=self.pp, dp_replicate=replicas, dp_shard=shards, cp=sequence_ranks, tp=self.tp)

    def _wrong_number_of_processes(self, world: int, product: int) -> ConfigurationError:
        """Return the error for a number of processes that does not fit the sizes.

        Args:
            world: Number of processes.
            product: Product of the sizes, without `dp_shard` if it is None. `world` must then be a multiple of it.
        """
        if self.dp_shard is None:
            needed = f"{product} process(es) or a multiple"
            # The nearest multiples.
            below = world // product * product
            above = -(-world // product) * product
            # 5 processes for pp=2: start 4 or 6. 1 process for pp=2: start 2.
            fitting = [size for size in dict.fromkeys((below, above)) if size]
        else:
            needed = f"{product} processes"
            fitting = [product]
        sizes = f"pp={self.pp}, tp={self.tp}, cp={self.cp}, sp={self.sp}, dp_replicate={self.dp_replicate}"
        nearest = nearest_meshes(world, self.pp, self.tp, (self.cp, self.sp), self.dp_replicate, self.dp_shard or 1)
        return ConfigurationError(
            f"MegatronStrategy({sizes}, dp_shard={self.dp_shard}) needs {needed}, and the run has {world}. Start "
            f"{' or '.join(map(str, fitting))}, or choose {' or '.join(nearest)} for {world} "
            f"process{'es' * (world > 1)}."
        )

    def check(self, settings: EngineSettings) -> None:
        super().check(settings)
        if self.library != "torch":
            check_options(self.changed_options, settings)
        if self.pp > 1 and settings.compile_options is not None:
            raise ConfigurationError("compile=True is not supported with pp > 1. Remove compile, or use pp=1.")

    def check_task(self, task: TaskModule, settings: EngineSettings) -> None:
        has_layers = not overrides(task, "configure_model", TaskModule)  # `configure_model` makes them later
        if self.library != "torch":
            if has_layers:
                shape_of(find_model(task), self.tp)
            return
        super().check_task(task, settings)
        if has_layers and self.pp > 1:
            find_stages(task, self.pp * self.stages_per_rank, self.split_points)

    def outline(self, task: TaskModule | None, settings: EngineSettings) -> StrategyOutline:
        if self.library != "torch":
            return StrategyOutline(self.mesh_shape(settings))
        return super().outline(task, settings)

    def engine(self, settings: EngineSettings) -> Engine:
        if self.library != "torch":
            return MegatronCoreEngine(self, settings, shape=self.mesh_shape(settings), recompute=self.recompute)
        if self.pp > 1:
            options = PipelineOptions(
                self.pp, self.stages_per_rank, self.num_micro_batches, self.schedule, self.split_points
            )
            return PipelineEngine(self, settings, options=options)
        return FSDPEngine(self, settings)


def _plan(sequence_parallel: bool | str, tp: int, user_plan: GivenPlan | None) -> GivenPlan | None:
    """Return the tensor-parallel plan of `FSDPStrategy`.

    Args:
        sequence_parallel, tp: See `MegatronStrategy`.
        user_plan: The user's plan, or None. It is returned unless `sequence_parallel` selects a built-in plan.
    """
    if not sequence_parallel:
        return user_plan
    if tp == 1 or user_plan is not None:
        raise ConfigurationError(
            f"sequence_parallel={sequence_parallel!r} needs tp above 1 and no tensor_parallel_plan, but tp={tp}. "
            "Remove sequence_parallel or the plan, or increase tp."
        )
    return _STRICT_PLAN if sequence_parallel is True else _POSSIBLE_PLAN
