"""Computation of one stage of a model at a time, with the model's unchanged forward.

Every rank calls the model's forward. Modules of earlier stages are skipped and return NaN tensors of the right shapes.
The last module of the previous stage instead returns the tensor that the previous rank has sent. An exception exits the
forward after the last module of the stage.

Example: a model of an embedding, layers 0 to 3 and a head has the stages [embedding, 0, 1] and [2, 3, head]. The first
rank computes the embedding, 0 and 1, and then leaves the forward. On the second rank, the embedding and 0 return NaN, 1
returns the received tensor, and 2, 3 and the head are computed. Code outside of modules runs on both ranks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainwright.core.errors import TaskError
from trainwright.core.tree import iterate_tensors, map_tensors
from trainwright.strategies.megatron.stage_caches import StageCaches, recorded_updates
from trainwright.strategies.megatron.stages import Stages

Args = tuple[object, ...]
Kwargs = dict[str, object]


class StageModule(nn.Module):
    """One stage as a module, which FSDP shards and a schedule calls.

    Args:
        index: Index of the stage.
        parts: Modules of the stage, which the task also contains.
        pipeline: The pipeline, which computes the stage.
    """

    def __init__(self, index: int, parts: Sequence[nn.Module], pipeline: Pipeline) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.index = index
        self._pipeline = pipeline

    def forward(self, carry: torch.Tensor, micro_batch: torch.Tensor) -> torch.Tensor:
        """Run the stage on one micro-batch. `micro_batch` is the index, a host tensor of shape (1,)."""
        run = self._pipeline.run
        assert run is not None  # set before a stage is called
        stage_input = None if self.index == 0 else carry
        return run(self.index, stage_input, int(micro_batch))


class _StageDone(BaseException):
    """Exception that ends the forward of a model after the last module of a stage.

    It is not a subclass of `Exception`, so that `except Exception` in a user's forward does not catch it.
    """

    def __init__(self, output: torch.Tensor) -> None:
        self.output = output


@dataclass
class _StageForward:
    """State of a forward that computes one stage.

    Attributes:
        stage: Index of the stage.
        carry: Output of the previous stage. None in the first stage.
        seed: See `Pipeline.compute_stage`.
        has_entered: True once a module of the stage was called. Set by the call.
    """

    stage: int
    carry: torch.Tensor | None
    seed: int | None
    has_entered: bool = False


class StageLinks:
    """Communication between the ranks of one pipeline.

    Args:
        group: Process group of the pipeline, in the order of the mesh.
        ranks: Stage → rank in the group. A rank may have several stages.
        device: Device of the tensors.

    Attributes:
        rank: Rank of this process in the group.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device) -> None:
        self.group = group
        self.ranks = ranks
        self.device = device
        self.rank = dist.get_rank(group)

    @property
    def own(self) -> list[int]:
        """The stages of this rank, in order."""
        return [stage for stage, rank in enumerate(self.ranks) if rank == self.rank]

    def global_rank(self, stage: int) -> int:
        """Return the global rank that holds a stage of this pipeline. -1 is the last stage."""
        return dist.get_global_rank(self.group, self.ranks[stage])

    def send(self, tensor: torch.Tensor, stage: int) -> None:
        """Send a tensor of any shape to the rank of a stage. Blocks until the other rank has received it."""
        peer = self.global_rank(stage)
        header = [(tensor.shape, tensor.dtype)]  # `receive` allocates the tensor from it
        dist.send_object_list(header, peer, self.group, self.device)
        dist.send(tensor.detach().contiguous(), peer, self.group)

    def receive(self, stage: int) -> torch.Tensor:
        """Receive a tensor from the rank of a stage. Blocks until the tensor has arrived."""
        peer = self.global_rank(stage)
        header: list[Any] = [None]
        dist.recv_object_list(header, peer, self.group, self.device)
        shape, dtype = header[0]
        received = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(received, peer, self.group)
        return received

    def broadcast(self, tree: object, stage: int) -> Any:
        """Return on every rank of the pipeline the `tree` of the rank that holds a stage. Collective.

        Args:
            tree: Nested tensors and picklable values. Ignored on other ranks.
            stage: The stage. Its rank gets the same tensors, and the other ranks get copies on the device.
        """
        src = self.global_rank(stage)

        def send(tensor: torch.Tensor) -> torch.Tensor:
            dist.broadcast(tensor.detach().contiguous().to(self.device), src, self.group)
            return tensor

        def receive(meta_tensor: torch.Tensor) -> torch.Tensor:
            received = torch.empty_like(meta_tensor.contiguous(), device=self.device)
            dist.broadcast(received, src, self.group)
            return received

        # Send the tree with tensors on `meta` first. The other ranks create tensors of these shapes and dtypes.
        if self.rank == self.ranks[stage]:
            meta_tree = map_tensors(lambda tensor: tensor.detach().to("meta"), tree)
            dist.broadcast_object_list([meta_tree], src, self.group, self.device)
            return map_tensors(send, tree)
        header: list[Any] = [None]
        dist.broadcast_object_list(header, src, self.group, self.device)
        return map_tensors(receive, header[0])


class Pipeline:
    """A model of which this rank computes some stages.

    Args:
        task: The task, with full tensors on any device.
        stages: See `find_stages`.
        links: Communication with the other ranks.

    Attributes:
        modules: One `StageModule` for each stage, also for those of other ranks.
        last: Index of the last stage.
        run: Function that a `StageModule` calls: `run(stage, carry, micro_batch)` computes the stage with
            `compute_stage`. `carry` is None in the first stage. Set by `PipelineRunner.run` for training steps, and by
            the pipeline itself for other forwards. Otherwise None.
        release: Function that is called after a forward without a backward. It frees the parameters that FSDP has
            gathered. Set by the engine.
    """

    def __init__(self, task: nn.Module, stages: Stages, links: StageLinks) -> None:
        self.links = links
        self.stages = stages
        self.run: Callable[[int, Any, int], torch.Tensor] | None = None
        self.release: Callable[[], None] = lambda: None
        self.modules = [StageModule(stage, parts, self) for stage, parts in enumerate(stages)]
        self.last = len(stages) - 1
        self._task = task
        self._task_name = type(task).__name__
        # The module whose call outside of a step computes all stages: transformers' model, or the task.
        self._entry = _entry(task, stages)
        # Parameters in no stage, which are cast in forwards: module, name in the module, dtype. Set by `narrow`.
        self._cast: list[tuple[nn.Module, str, torch.dtype]] = []
        # id of a module in a stage → its stages. A module that the model calls several times may be in several stages.
        self._stages_by_module: dict[int, list[int]] = {}
        # id of a module in a stage → its copy on `meta`, which computes the shapes of the output when it is skipped.
        self._meta_copies: dict[int, nn.Module] = {}
        for stage, parts in enumerate(stages):
            for part in parts:
                self._stages_by_module.setdefault(id(part), []).append(stage)
            if links.own == [stage]:
                continue  # a rank with this stage alone never skips its modules
            for part in parts:
                self._meta_copies[id(part)] = _on_meta(part)
        # Results of skipped modules by the shapes of their arguments: the output on `meta`, and the updates of the
        # cache of keys and values. See `_skipped`.
        self._skipped_results: dict[Any, tuple[Any, list[tuple[Any, Any]]]] = {}
        self._checked: set[int] = set()  # ids of modules whose arguments have been checked
        self._current: _StageForward | None = None  # None outside of `compute_stage`
        self._caches = StageCaches(links.own)
        # Keys and values of the stage that is computed. None in training and in forwards without a cache.
        self._cache: Any = None

    @property
    def is_computing(self) -> bool:
        """True while a stage is being computed."""
        return self._current is not None

    def narrow(self, dtype: torch.dtype, places: Iterable[tuple[nn.Module, str]]) -> None:
        """Cast parameters that are in no stage to a dtype in forwards, as FSDP does for the parameters of stages.

        Args:
            dtype: A 16-bit dtype.
            places: For each such parameter, its module and its name in the module.
        """
        self._cast = [(module, key, dtype) for module, key in places]
        # Skipped modules compute their shapes and dtypes like the modules that FSDP casts.
        for meta_copy in self._meta_copies.values():
            meta_copy.to(dtype)

    def install(self) -> Callable[[], None]:
        """Replace the calls of modules by calls that compute stages. Return a function that restores the calls."""
        undo = ExitStack()

        def hide(module: nn.Module, key: str, value: object) -> None:
            """Set an instance attribute, which Python reads before a method, parameter or buffer of the same name."""
            attributes = vars(module)
            # The stack calls the last callback first: it removes `value`, then restores an earlier attribute.
            if key in attributes:
                undo.callback(attributes.update, {key: attributes[key]})
            undo.callback(attributes.pop, key)
            attributes[key] = value

        modules_by_id: dict[int, nn.Module] = {}  # a module in several stages is replaced once
        for parts in self.stages:
            for part in parts:
                modules_by_id[id(part)] = part
        for module in modules_by_id.values():
            # Replaces the full call, like `nn.Module.compile`, so that a skipped module runs no hooks.
            call = module._compiled_call_impl or module._call_impl
            hide(module, "_compiled_call_impl", partial(self._called, module, call))
        for prefix, module in self._task.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:  # only other ranks hold it
                    hide(module, key, _Absent(f"{prefix}.{key}", self._task_name))
        hide(self._entry, "forward", self._entry_call(self._entry.forward))
        return undo.close

    def _entry_call(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)  # transformers passes the arguments that the signature names
        def call(*args: object, **kwargs: object) -> Any:
            if self.is_computing:
                return forward(*args, **kwargs)
            return self._forward(forward, args, kwargs)

        return call

    def compute_stage(
        self, stage: int, carry: torch.Tensor | None, call: Callable[[], Any], *, seed: int | None = None
    ) -> Any:
        """Compute a stage by running `call`, a function that calls the model once. Not collective.

        Args:
            stage: Index of the stage.
            carry: Output of the previous stage. None in the first stage.
            call: Function that calls the model. It is left after the last module of the stage, except in the last
                stage, where it runs to its end.
            seed: Seed of the random numbers in this call, equal on every rank of the pipeline. Random numbers before
                the first module of the stage are the same in every stage. Later random numbers differ between stages.
                Torch's generators are restored after the call, so that they do not depend on the order of stages and
                micro-batches. Default: None, which uses torch's generators.

        Returns:
            The output of the stage. In the last stage, the result of `call`.

        Raises:
            TaskError: `call` did not call the model, or called it twice.
        """
        outer = self._current
        current = _StageForward(stage, carry, seed)
        self._current = current
        device = self.links.device
        devices = [] if device.type == "cpu" else [device]  # the host's generator is always restored
        for module, key, dtype in self._cast:
            vars(module)[key] = module.get_parameter(key).to(dtype)  # hides the parameter
        try:
            with torch.random.fork_rng(devices, enabled=seed is not None, device_type=device.type):
                if seed is not None:
                    torch.manual_seed(seed)
                output = call()
        except _StageDone as done:
            return done.output
        finally:
            self._current = outer
            for module, key, _ in self._cast:
                vars(module).pop(key, None)
        # Without `_StageDone`, only the last stage ends here.
        if stage < self.last or not current.has_entered:
            raise TaskError(
                f"a step of {self._task_name} returned without calling the layers of pipeline stage {stage}. With a "
                "pipeline, each step must call the model once."
            )
        return output

    # Calls of modules

    def _called(self, module: nn.Module, call: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
        """Compute or skip a module when the model calls it.

        Args:
            module: A module of a stage.
            call: The replaced call of the module.
        """
        current = self._current
        stages = self._stages_by_module[id(module)]
        if current is None:  # a user calls a part of the model, outside of a step and of the model's forward
            is_here = any(stage in self.links.own for stage in stages)
            if is_here:
                return call(*args, **kwargs)
            raise TaskError(
                f"{self._task_name} calls {type(module).__name__}, which is on another rank of the pipeline, outside "
                f"of the forward of {type(self._entry).__name__}. Call {type(self._entry).__name__} instead."
            )
        stage = current.stage
        if stage not in stages:
            skipped = self._skipped(module, args, kwargs)
            is_last_of_previous = stage > 0 and module is self.stages[stage - 1][-1]
            return _with_carry(current.carry, skipped) if is_last_of_previous else skipped
        parts = self.stages[stage]
        if stage > 0 and module is parts[0] and current.has_entered:
            raise TaskError(
                f"a step of {self._task_name} called the model twice. With a pipeline, call it once per step."
            )
        if stage > 0 and id(module) not in self._checked:
            self._check_arguments(module, args, kwargs)
        if not current.has_entered and current.seed is not None:
            torch.manual_seed(hash((current.seed, stage)))
        current.has_entered = True
        output = call(*args, **kwargs)
        if stage < self.last and module is parts[-1]:
            raise _StageDone(_carry_of(output, module))
        return output

    def _check_arguments(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Raise an error if an argument of a module's first call is NaN, as outputs of skipped modules are.

        Blocks on the device.
        """
        self._checked.add(id(module))
        for name, value in [*enumerate(args), *kwargs.items()]:
            is_nan = False
            for tensor in iterate_tensors(value):
                if tensor.is_floating_point() and tensor.numel() and bool(tensor.isnan().all()):
                    is_nan = True
            if is_nan:
                raise TaskError(
                    f"argument {name} of {type(module).__name__} in {self._task_name} comes from another pipeline "
                    "stage, or is NaN. Only the first output of a stage's last layer is sent to the next stage. "
                    "Compute the other values from the batch, or choose other stages."
                )

    def _skipped(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Return the output of a module in another stage, with the right shapes, and NaN as values.

        A copy of the module on `meta` computes the shapes. It runs once for each set of shapes of the arguments. If the
        module updates the cache of keys and values, the cache gets tensors on `meta`, of the right lengths.
        """
        receives_cache = any(value is self._cache for value in (*args, *kwargs.values()))
        cache: Any = self._cache if receives_cache else None  # `_cache` may also be None
        tensors = list(iterate_tensors((args, kwargs)))
        if cache is not None:
            # Masks become longer with each token, so that each token would run the copy. The output and the updates
            # depend only on the first tensor, the hidden states.
            del tensors[1:]
        shapes_of_arguments = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        key = (id(module), module.training, cache is None, shapes_of_arguments)
        if key in self._skipped_results:
            meta_output, updates = self._skipped_results[key]
            for update_args, update_kwargs in updates:
                cache.update(*update_args, **update_kwargs)
            return map_tensors(self._nan_like, meta_output)
        meta_args, meta_kwargs = map_tensors(lambda tensor: tensor.to("meta"), (args, kwargs))
        meta_copy = self._meta_copies[id(module)].train(module.training)
        with torch.no_grad(), recorded_updates(cache) as updates:
            meta_output = meta_copy(*meta_args, **meta_kwargs)
        self._skipped_results[key] = (meta_output, updates)
        return map_tensors(self._nan_like, meta_output)

    def _nan_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of NaN, or of 0 for integers, with the shape and dtype of a tensor on `meta`."""
        value = float("nan") if tensor.is_floating_point() else 0
        return torch.full(tensor.shape, value, dtype=tensor.dtype, device=self.links.device)

    # Outside of training steps

    def _forward(self, call: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Run the model's forward over all stages, and return its output on every rank of the pipeline. Collective.

        Raises:
            TaskError: Gradients are enabled.
        """
        if torch.is_grad_enabled():
            raise TaskError(
                f"{type(self._entry).__name__} was called with gradients enabled outside of a training step, which "
                "pipelines do not support. Call it under torch.no_grad()."
            )
        outer_run = self.run
        cache = kwargs.get("past_key_values")
        caches = self._caches.of(cache)  # stage → its cache

        def run(stage: int, carry: torch.Tensor | None, _: int) -> Any:
            self._cache = caches.get(stage)
            stage_kwargs = dict(kwargs)
            if cache is not None:
                stage_kwargs["past_key_values"] = self._cache
            return self.compute_stage(stage, carry, lambda: call(*args, **stage_kwargs))

        self.run = run
        no_micro_batch = torch.zeros(1)  # the index, which `run` ignores
        try:
            outputs = dict(self.through(lambda stage, carry: self.modules[stage](carry, no_micro_batch)))
        finally:
            self.run = outer_run
            self._cache = None
        self.release()
        output = outputs[self.links.own[-1]]  # only on the rank of the last stage, the output of the model
        if cache is not None:
            self._caches.merge(caches)
            if isinstance(output, dict) and "past_key_values" in output:
                output["past_key_values"] = None  # each rank keeps the keys and values of its stages
        output = self.links.broadcast(output, self.last)
        if cache is not None and isinstance(output, dict):
            output["past_key_values"] = cache
        return output

    def through(self, compute: Callable[[int, torch.Tensor], Any]) -> Iterator[tuple[int, Any]]:
        """Compute this rank's stages in order. Send each output to the next rank, and yield the stage and the output.

        Args:
            compute: Function of a stage and its input (an empty tensor in the first stage). Returns the output.

        Yields:
            The stage and the result of `compute`.
        """
        stage_input = torch.empty(0)
        own = self.links.own
        for stage in own:
            # A neighboring stage of the same rank needs no communication.
            if stage > 0 and stage - 1 not in own:
                stage_input = self.links.receive(stage - 1)
            output = compute(stage, stage_input)
            if stage < self.last and stage + 1 not in own:
                self.links.send(output, stage + 1)
            stage_input = output
            yield stage, output


class _Absent:
    """Placeholder for a parameter on another rank.

    It raises a `TaskError` at every use. A `meta` tensor would not: some operations of a tensor on the device and a
    `meta` tensor return a `meta` tensor.

    Args:
        name: Name of the parameter in the task.
        model: Class name of the task.
    """

    def __init__(self, name: str, model: str) -> None:
        self._message = (
            f"{model} reads {name}, which is in another pipeline stage, without calling its module. If the forward "
            "reads it, define pipeline_stages() in the task, and include the module in each stage that uses its "
            "weights. A callback or hook can read only the weights of its rank's stages."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python looks up special names, such as __deepcopy__, which must not fail
        raise TaskError(self._message)

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, _Absent):
                raise TaskError(value._message)
        return NotImplemented


def _entry(task: nn.Module, stages: Stages) -> nn.Module:
    """Return the callable child of a task that contains all stages, or the task if no child does."""
    part_ids: set[int] = set()
    for parts in stages:
        part_ids.update(id(part) for part in parts)
    for child in task.children():
        inner_ids = {id(module) for module in child.modules()} - {id(child)}
        is_callable = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        contains_all_stages = part_ids <= inner_ids
        if is_callable and contains_all_stages:
            return child
    return task


def _on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module on the device `meta`."""
    memo: dict[int, Any] = {}  # id of a tensor → its copy, which deepcopy uses instead of copying the data
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def _with_carry(carry: torch.Tensor | None, output: object) -> Any:
    """Return the output of a skipped layer. The tensor from the previous rank replaces the first tensor."""
    if isinstance(output, (tuple, list)) and output:
        return type(output)([carry, *output[1:]])
    return carry


def _carry_of(output: object, module: nn.Module) -> torch.Tensor:
    """Return the tensor in the output of a stage's last layer that the next stage receives."""
    carry = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(carry, torch.Tensor):
        raise TaskError(
            f"{type(module).__name__}, the last layer of a pipeline stage, returned {type(output).__name__}. It must "
            "return a tensor, or a tuple whose first element is a tensor: the first argument of the next layer."
        )
    return carry
