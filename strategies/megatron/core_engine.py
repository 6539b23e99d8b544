"""Training with megatron-core: its GPTModel, and its distributed optimizer in place of the task's AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Optimizer

from trainwright.core.errors import CheckpointError, ConfigurationError, TaskError
from trainwright.core.process import Topology
from trainwright.core.state import Group
from trainwright.strategies.engine import Models, Optimizers, Prepared, TrainingPlan
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.megatron.core_model import (
    WeightMap,
    check_cuda,
    find_model,
    forward_through,
    import_core,
    make_gpt,
    shape_of,
)
from trainwright.strategies.mesh import MeshShape
from trainwright.strategies.state import FullState
from trainwright.strategies.steps.gradients import GradientClip, Gradients, clip_shards
from trainwright.strategies.steps.step import AutomaticStep, Step, StepParts
from trainwright.strategies.steps.transfer import move_model
from trainwright.strategies.strategy import DataParallel, ParallelEngine

# Options of AdamW's parameter groups that megatron-core's optimizer uses, too. Schedulers may change them.
_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")
# Options of AdamW that megatron-core's optimizer does not have. They must be False.
_UNSUPPORTED_OF_ADAMW = ("amsgrad", "maximize", "capturable", "differentiable")
# The options of MegatronStrategy that the engine supports.
_OPTIONS = ("tp", "dp_shard", "recompute", "weights_after_stage", "timeout", "hang_timeout", "process_group_backend")
# Keys of AdamW's moments, which megatron-core's optimizer also uses.
_MOMENTS = ("exp_avg", "exp_avg_sq")


class MegatronCoreEngine(ParallelEngine):
    """Engine that trains a GPTModel of megatron-core instead of a causal language model of transformers.

    The task keeps transformers' model, whose forward runs the GPTModel. The weights of transformers' model stay on the
    host. They have their initial values until a checkpoint or the end of the stage updates them.

    Args:
        strategy, settings: See `Engine`.
        shape: Mesh of the run, with `tp` and `dp_shard`.
        recompute: Megatron-core's `recompute_granularity`: `"full"`, `"selective"` or None, which disables it.

    Attributes:
        trained: Optimizer of the GPTModel. None before `prepare`, without optimizers (in evaluation), and after
            `unshard`.
    """

    autocasts = False

    def __init__(
        self, strategy: DataParallel, settings: EngineSettings, *, shape: MeshShape, recompute: str | None
    ) -> None:
        super().__init__(strategy, settings)
        self._shape = shape
        self._recompute = recompute
        self.trained: DistributedAdamW | None = None
        # Set by `_place`, which also sets `_gpt` and `_weights`: transformers' model in the task.
        self._model: Any = None

    def start(self, topology: Topology) -> None:
        super().start(topology)
        groups = import_core(".parallel_state")
        groups.initialize_model_parallel(tensor_model_parallel_size=self._shape.tp, create_gloo_process_groups=False)
        # A group is needed only if the data-parallel ranks are several, but not all ranks.
        needs_group = 1 < self._shape.dp_shard < self._shape.size
        data_group = groups.get_data_parallel_group() if needs_group else None
        self.data_ranks = self._shape.data_ranks(self.processes, data_group)
        devices = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(devices):
            # Megatron-core's fork() requires a seed. The GPTModel has no dropout, so the seed has no effect.
            import_core(".tensor_parallel").model_parallel_cuda_manual_seed(0)

    def prepare(self, models: Models, optimizers: Optimizers, plan: TrainingPlan, roots: Models = ()) -> Prepared:
        if not roots:
            raise ConfigurationError(
                "engine='megatron-core' works only with a Trainer. Use engine='torch' in user-written training loops."
            )
        prepared = super().prepare(models, optimizers, plan, roots)  # calls `_place`, which creates the GPTModel
        if optimizers is not None:
            check_optimizers(prepared.optimizers)
            self.trained = DistributedAdamW(prepared.optimizers[0], self._gpt, self._weights, self.device)
            self.gradients = self.trained
        # After the optimizer was created: the weights are also copied to its float32 shards.
        self.to_gpt(self._from_main)
        return prepared

    def make_state(
        self, models: nn.Module, optimizers: Sequence[Optimizer], names: Mapping[torch.Tensor, str] | None = None
    ) -> FullState:
        return CoreState(self.task, self)

    def _make_context(self) -> AbstractContextManager[Any] | None:
        return None  # the GPTModel computes in its own dtype

    def _place(self, model: nn.Module) -> None:
        """Create the GPTModel on the device, and make the forward of transformers' model run it.

        Args:
            model: The task.
        """
        inner = find_model(model).cpu()
        self._model = inner
        # Take transformers' model out of the task, so that only the rest of the task moves to the device.
        places: list[tuple[nn.Module, str]] = []
        for owner in model.modules():
            places.extend((owner, key) for key, child in owner.named_children() if child is inner)
        for owner, key in places:
            owner._modules[key] = None
        move_model(model, self.device)
        for owner, key in places:
            owner._modules[key] = inner
        tp = self._shape.tp
        shape = shape_of(inner, tp)
        dtype = self.precision.autocast_dtype or torch.float32
        self._gpt = make_gpt(inner, shape, tp, self._recompute, dtype).to(self.device)
        self._weights = WeightMap(inner, self._gpt, shape, tp)
        inner.forward = forward_through(self._gpt, inner)

    def _from_main(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the main rank's value of a parameter, on the device. Collective."""
        value = parameter.detach().to(self.device)
        if self.processes.world_size > 1:
            dist.broadcast(value, src=0)
        return value

    def to_gpt(self, value: Callable[[nn.Parameter], torch.Tensor]) -> None:
        """Copy `value(p)`, for each parameter p of transformers' model, to the GPTModel. Collective if `value` is.

        Parameters of the optimizer are also copied to its float32 shards, from which each step computes new values.
        """
        for gpt_parameter, part in self._weights.divide(value):
            gpt_parameter.data.copy_(part)
            shard = None if self.trained is None else self.trained.shard(gpt_parameter)
            if shard is not None:
                shard.tensors["param"].data.copy_(part.reshape(-1)[shard.place])

    def from_gpt(self) -> None:
        """Copy the trained values of the GPTModel to transformers' model. Collective.

        Without an optimizer, the two models already have equal values.
        """
        if self.trained is not None:
            for parameter, full in self._weights.gather(partial(self.trained.full, key="param")):
                parameter.data.copy_(full)

    def make_step(self, parts: StepParts) -> Step:
        return AutomaticStep(parts) if self.trained is None else CoreStep(parts)

    def unshard(self) -> None:
        self.from_gpt()
        if self.trained is not None:
            self.trained.handle.remove()
            self.trained.fill()
        # The task's optimizer now has the state. `DistributedAdamW` and its buffers are freed.
        self.trained = None

    def close(self) -> None:
        if self._model is not None:
            vars(self._model).pop("forward", None)
            import_core(".parallel_state").destroy_model_parallel()
        if self.trained is not None:
            self.trained.handle.remove()
        self.trained = None
        self._model = None
        self.gradients = Gradients(self.device)
        for name in ("_gpt", "_weights"):
            vars(self).pop(name, None)
        super().close()


def check_options(options: Mapping[str, Any], settings: EngineSettings) -> None:
    """Raise a `ConfigurationError` for changed options of the strategy, or settings, that this engine lacks."""
    refused = [f"{name}={value!r}" for name, value in options.items() if name not in (*_OPTIONS, "engine")]
    if settings.compile_options is not None:
        refused.append("compile")
    if settings.precision.name not in ("32-true", "bf16-mixed"):
        refused.append(f"precision={settings.precision.name!r}")
    if refused:
        raise ConfigurationError(
            f"engine='megatron-core' does not support {', '.join(refused)}, only {', '.join(_OPTIONS)} and "
            "precision='32-true' or 'bf16-mixed'. Remove them, or use engine='torch'."
        )
    check_cuda(settings.device_type)


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Raise a `ConfigurationError` for optimizers other than one plain AdamW."""
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    used: set[str] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            used.update(name for name in _UNSUPPORTED_OF_ADAMW if group.get(name))
    if [type(optimizer) for optimizer in optimizers] != [AdamW] or used:
        with_options = f" with {', '.join(sorted(used))}" if used else ""
        raise ConfigurationError(
            f"engine='megatron-core' trains with one torch.optim.AdamW, and configure_optimizers returned "
            f"{', '.join(kinds)}{with_options}. Return AdamW, or use engine='torch'."
        )


class ParameterShard(NamedTuple):
    """This rank's shard of a parameter in megatron-core's optimizer.

    Attributes:
        tensors: Flat float32 tensors of the shard: its values (`"param"`), and its moments after the first step
            (`"exp_avg"`, `"exp_avg_sq"`).
        place: Elements of the flat parameter that are in the shard.
    """

    tensors: dict[str, torch.Tensor]
    place: slice


class DistributedAdamW(Gradients):
    """Megatron-core's distributed optimizer with the groups of the task's AdamW. Its step runs after AdamW's.

    The gradients are stored in megatron-core's buffers. The task's AdamW has state only while a checkpoint is saved or
    loaded, and after the run.

    Args:
        optimizer: The task's optimizer of transformers' parameters. The parameters have no gradients, so AdamW changes
            nothing.
        gpt: The GPTModel.
        weights: Mapping between the weights of the GPTModel and those of transformers' model.
        device: Device of the gradients.

    Attributes:
        optimizer: The argument.
        weights: The argument.
        num_steps: Number of optimizer steps, also those of a loaded checkpoint.
        replica: Megatron-core's DistributedDataParallel of the GPTModel, which owns the buffers of gradients.
        library: Megatron-core's optimizer.
        handle: Handle of the hook that steps `library` after `optimizer`. The engine removes it at the end.
    """

    def __init__(self, optimizer: Optimizer, gpt: Any, weights: WeightMap, device: torch.device) -> None:
        super().__init__(device)
        self.optimizer = optimizer
        self.weights = weights
        self.num_steps = 0
        parallel = import_core(".distributed")
        optimizers = import_core(".optimizer")
        options = parallel.DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.replica = parallel.DistributedDataParallel(gpt.config, options, gpt)
        names = {parameter: name for name, parameter in self.replica.named_parameters()}
        group_of: dict[nn.Parameter, int] = {}
        for i, group in enumerate(optimizer.param_groups):
            group_of.update(dict.fromkeys(group["params"], i))
        names_of_group: dict[int, list[str]] = {}  # index of a group → names of the GPTModel's parameters
        for weight, gpt_parameter, originals in weights.rows:
            indices = {group_of.get(parameter) for parameter in originals}
            if len(indices) > 1 or None in indices:
                raise ConfigurationError(
                    f"The optimizer has {', '.join(weight.names)} in different parameter groups or in none, but "
                    "engine='megatron-core' trains them as one tensor. Put these parameters in one group."
                )
            group_index = indices.pop()
            assert group_index is not None
            names_of_group.setdefault(group_index, []).append(names[gpt_parameter])
        key = import_core(".optimizer.optimizer_config").ParamKey
        chained = optimizers.get_megatron_optimizer(
            optimizers.OptimizerConfig(
                optimizer="adam", lr=0.0, use_distributed_optimizer=True, bf16=gpt.config.bf16, clip_grad=0.0
            ),
            [self.replica],
            # Parameters with equal overrides become one group, which `_step` finds by `task_group`.
            config_overrides={key(name=tuple(group)): {"task_group": i} for i, group in names_of_group.items()},
            use_gloo_process_groups=False,
        )
        self.library = chained.chained_optimizers[0]  # the only one, because the GPTModel has no experts
        self._ranks = import_core(".parallel_state").get_data_parallel_group()
        self.handle = optimizer.register_step_post_hook(self._step)

    def _step(self, *_: object) -> None:
        """Step the GPTModel with the hyperparameters of the task's optimizer. Called after each of its steps."""
        for group in self.library.param_groups:
            task_group = self.optimizer.param_groups[group["task_group"]]  # schedulers change its learning rate
            group.update({name: task_group[name] for name in _HYPERPARAMETERS})
        self.library.step()
        self.num_steps += 1
        self.free()

    def complete(self) -> None:
        import_core(".distributed").finalize_model_grads([self.replica])

    def clip(self, parameters: Iterable[torch.Tensor], clip: GradientClip) -> torch.Tensor | None:
        counts: dict[nn.Parameter, bool] = {}
        for row in self.weights.rows:
            # Every tensor-parallel rank has the weights that are not split. The norm counts those of the first rank.
            is_split = row.weight.layout != "same"
            counts[row.gpt_parameter] = is_split or self.weights.rank == 0
        shards: list[tuple[torch.Tensor, bool]] = []
        for gpt_parameter, gradient in self.gradient_shards():
            shards.append((gradient, counts[gpt_parameter]))
        with torch.no_grad():
            return clip_shards(shards, clip, self.device)

    def free(self, parameters: Iterable[torch.Tensor] = ()) -> bool:
        self.replica.zero_grad_buffer()
        self.library.zero_grad()
        return True

    def shard(self, gpt_parameter: nn.Parameter) -> ParameterShard | None:
        """Return this rank's shard of a parameter, or None if this rank does not step any element of the parameter."""
        if gpt_parameter not in self.library.model_param_gbuf_map:
            return None
        bounds = self.library._get_model_param_range_map(gpt_parameter)["param"]
        tensors = self.library._get_main_param_and_optimizer_states(gpt_parameter)
        return ParameterShard(tensors, slice(bounds.start, bounds.end))

    def full(self, gpt_parameter: nn.Parameter, key: str) -> torch.Tensor:
        """Return a parameter of the GPTModel in float32 (`key="param"`), or one of its moments. Collective."""
        # Each element is in the shard of one rank, and 0 on the others.
        flat = torch.zeros(gpt_parameter.numel(), device=gpt_parameter.device)
        shard = self.shard(gpt_parameter)
        if shard is not None:
            flat[shard.place] = shard.tensors[key]
        dist.all_reduce(flat, group=self._ranks)
        return flat.view_as(gpt_parameter)

    def gradient_shards(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield parameters of the GPTModel with this rank's shards of their gradients. Not collective."""
        for row in self.weights.rows:
            shard = self.shard(row.gpt_parameter)
            if shard is not None:
                gradient = row.gpt_parameter.main_grad  # type: ignore[attr-defined]  # megatron-core's
                yield row.gpt_parameter, gradient.view(-1)[shard.place]

    def fill(self) -> None:
        """Copy the state from megatron-core's optimizer to the task's optimizer, on the host. Collective."""
        self.optimizer.state.clear()
        if self.num_steps == 0:
            return
        for key in _MOMENTS:
            for parameter, full in self.weights.gather(partial(self.full, key=key)):
                state = self.optimizer.state[parameter]
                state.setdefault("step", torch.tensor(float(self.num_steps)))
                state[key] = full.contiguous()

    def load(self) -> None:
        """Move the state from the task's optimizer to megatron-core's optimizer. Not collective.

        Raises:
            ConfigurationError: The loaded groups have an option that megatron-core's optimizer does not support.
            CheckpointError: Parameters have made different numbers of steps.
        """
        check_optimizers([self.optimizer])
        task_state = self.optimizer.state
        library_state = self.library.optimizer.state
        steps = {int(state["step"]) for state in task_state.values()}
        if len(steps) > 1:
            raise CheckpointError(
                "engine='megatron-core' steps all parameters together, but the optimizer's state has the different "
                f"steps {sorted(steps)}. Use engine='torch', or pass allow_missing=['optimizer'] to start the "
                "optimizer from scratch."
            )
        library_state.clear()
        self.num_steps = max(steps, default=0)
        if steps:
            for key in _MOMENTS:
                moments = {parameter: state[key] for parameter, state in task_state.items()}
                for gpt_parameter, part in self.weights.divide(moments.__getitem__):
                    shard = self.shard(gpt_parameter)
                    if shard is not None:
                        values = shard.tensors["param"]  # the parameter in torch's sense, of which it is the state
                        moment = part.reshape(-1)[shard.place]
                        library_state[values][key] = moment.to(values.device, copy=True)
        # torch's AdamW stores the number of steps for each parameter, and Transformer Engine's for each group.
        for state in library_state.values():
            state["step"] = torch.tensor(float(self.num_steps))
        for group in self.library.param_groups:
            group["step"] = self.num_steps
        task_state.clear()


class CoreStep(AutomaticStep):
    """A step whose gradients are stored in megatron-core's buffers."""

    def held_gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        trained: Any = self.parts.gradients  # a DistributedAdamW
        yield from trained.gradient_shards()

    def _skip_batches(self, skipped: list[int], group: Group, weights: object, total: object) -> Any:
        raise TaskError(f"{type(self.task).__name__}.training_step returned None. Return a loss for every micro-batch.")


class CoreState(FullState):
    """State of a GPTModel, in checkpoints under the parameter names of transformers' model."""

    def __init__(self, task: nn.Module, engine: MegatronCoreEngine) -> None:
        super().__init__(task, engine.optimizers, engine.device, is_main=engine.is_main)
        self._engine = engine

    def model_state(self) -> dict[str, Any]:
        self._engine.from_gpt()
        return super().model_state()

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        names = super().load_model_state(state, strict)
        self._engine.to_gpt(lambda parameter: parameter)
        return names

    def full_parameters(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        self._engine.from_gpt()
        return super().full_parameters(keep=keep)

    def optimizer_states(self) -> list[dict[str, Any]]:
        if self._engine.trained is None:
            return super().optimizer_states()
        self._engine.trained.fill()
        states = super().optimizer_states()
        self._optimizers[0].state.clear()  # frees the copies, which `states` holds until it is saved
        return states

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        super().load_optimizer_state(optimizer, state)
        if self._engine.trained is not None:
            self._engine.trained.load()
