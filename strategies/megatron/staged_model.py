"""Computation of one stage of a model at a time, with the model's unchanged forward.

Every rank calls the model's forward. Modules of earlier stages are skipped and return NaN tensors of the right shapes.
The last module of the previous stage instead returns the tensor that the previous rank has sent. An exception exits the
forward after the last module of the stage.
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
        return run(self.index, carry if self.index else None, int(micro_batch))


class _StageDone(BaseException):
    """Exception that ends the forward of a model after the last module of a stage. Not an `Exception` subclass."""

    def __init__(self, output: torch.Tensor) -> None:
        self.output = output


@dataclass
class _Run:
    """State of a forward that computes one stage."""

    stage: int
    carry: torch.Tensor | None
    seed: int | None = None  # for the modules of the stage
    entered: bool = False


class StageLinks:
    """Communication between the ranks of one pipeline.

    Args:
        group: Process group of the pipeline, in the order of the mesh.
        ranks: Stage → rank in the group.
        device: Device of the tensors.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device) -> None:
        self.group = group
        self.ranks = ranks
        self.device = device
        self.rank = dist.get_rank(group)

    @property
    def own(self) -> list[int]:
        """The stages of this rank."""
        return [stage for stage, rank in enumerate(self.ranks) if rank == self.rank]

    def global_rank(self, stage: int) -> int:
        """Return the global rank that holds a stage of this pipeline."""
        return dist.get_global_rank(self.group, self.ranks[stage])

    def send(self, tensor: torch.Tensor, stage: int) -> None:
        """Send a tensor of any shape to the rank of a stage. Blocks until the other rank has received it."""
        peer = self.global_rank(stage)
        dist.send_object_list([(tensor.shape, tensor.dtype)], peer, self.group, self.device)
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
            stage: The stage.
        """
        src = self.global_rank(stage)

        def send(tensor: torch.Tensor) -> torch.Tensor:
            dist.broadcast(tensor.detach().contiguous().to(self.device), src, self.group)
            return tensor

        def receive(shape: torch.Tensor) -> torch.Tensor:
            received = torch.empty_like(shape.contiguous(), device=self.device)
            dist.broadcast(received, src, self.group)
            return received

        # First the structure with tensors on `meta`, from which the other ranks learn shapes and dtypes.
        if self.rank == self.ranks[stage]:
            shapes = map_tensors(lambda tensor: tensor.detach().to("meta"), tree)
            dist.broadcast_object_list([shapes], src, self.group, self.device)
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
        modules: One `StageModule` for each stage.
        run: `run(index, carry, micro_batch)` computes a stage when its module is called. `carry` is None in the first
            stage. Set by the runner of the schedule.
        release: Function that is called after a forward without a backward. Set by the engine.
    """

    def __init__(self, task: nn.Module, stages: Stages, links: StageLinks) -> None:
        self.links = links
        self.stages = stages
        self.run: Callable[[int, Any, int], torch.Tensor] | None = None
        self.release: Callable[[], None] = lambda: None
        self._cast: list[tuple[nn.Module, str, torch.dtype]] = []
        self.modules = [StageModule(i, parts, self) for i, parts in enumerate(stages)]
        self.last = len(stages) - 1
        self._last_before = [None, *(parts[-1] for parts in stages[:-1])]
        self._stages_of: dict[int, list[int]] = {}
        for i, parts in enumerate(stages):
            for part in parts:
                self._stages_of.setdefault(id(part), []).append(i)
        self._entry = _entry(task, stages)
        self._task = task
        self._name = type(task).__name__
        self._meta_copies: dict[int, nn.Module] = {}
        for i, parts in enumerate(stages):
            if links.own == [i]:
                continue  # a rank with this stage alone never skips its modules
            for part in parts:
                self._meta_copies[id(part)] = _on_meta(part)
        self._shapes: dict[Any, Any] = {}
        self._checked: set[int] = set()  # modules whose arguments have been checked
        self._now: _Run | None = None
        self._caches = StageCaches(links.own)
        self._cache: Any = None  # keys and values of the stage that is computed

    @property
    def is_computing(self) -> bool:
        """True while a stage is being computed."""
        return self._now is not None

    def narrow(self, dtype: torch.dtype, places: Iterable[tuple[nn.Module, str]]) -> None:
        """Cast parameters that are in no stage to a dtype in forwards, as FSDP does for the parameters of stages.

        Args:
            dtype: A 16-bit dtype.
            places: For each such parameter, its module and its name in the module.
        """
        self._cast = [(module, key, dtype) for module, key in places]
        for meta_copy in self._meta_copies.values():
            meta_copy.to(dtype)

    def install(self) -> Callable[[], None]:
        """Replace the calls of modules by calls that compute stages. Return a function that restores the calls."""
        undo = ExitStack()

        def hide(module: nn.Module, key: str, value: object) -> None:
            attributes = vars(module)
            if key in attributes:
                undo.callback(attributes.update, {key: attributes[key]})
            undo.callback(attributes.pop, key)  # called before the update
            attributes[key] = value

        modules: dict[int, nn.Module] = {}  # each module once
        for parts in self.stages:
            modules.update((id(part), part) for part in parts)
        for module in modules.values():
            # Replaces the full call, like `nn.Module.compile`, so that a skipped module runs no hooks.
            call = module._compiled_call_impl or module._call_impl
            hide(module, "_compiled_call_impl", partial(self._called, module, call))
        for prefix, module in self._task.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:  # only other ranks hold it
                    hide(module, key, _Absent(f"{prefix}.{key}", self._name))
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
            carry: Output of the previous stage. None in the first stage.
            seed: Seed of the random numbers in this call, equal on every rank of the pipeline. Random numbers before
                the first module of the stage are the same in every stage. Later random numbers differ between stages.
                Torch's generators are restored after the call, so that they do not depend on the order of stages and
                micro-batches. Default: None, which uses torch's generators.

        Returns:
            The output of the stage. In the last stage, the result of `call`.

        Raises:
            TaskError: `call` did not call the model, or called it twice.
        """
        before = self._now
        now = _Run(stage, carry, seed)
        self._now = now
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
            self._now = before
            for module, key, _ in self._cast:
                vars(module).pop(key, None)
        if stage < self.last or not now.entered:
            raise TaskError(
                f"a step of {self._name} returned without calling the layers of pipeline stage {stage}. With a "
                "pipeline, each step must call the model once."
            )
        return output

    # Calls of modules

    def _called(self, module: nn.Module, call: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
        """Compute or skip a module when the model calls it."""
        now = self._now
        stages = self._stages_of[id(module)]
        if now is None:
            is_here = any(stage in self.links.own for stage in stages)
            if is_here:
                return call(*args, **kwargs)
            raise TaskError(
                f"{self._name} calls {type(module).__name__}, which is on another rank of the pipeline, outside of the "
                f"forward of {type(self._entry).__name__}. Call {type(self._entry).__name__} instead."
            )
        if now.stage not in stages:
            skipped = self._skipped(module, args, kwargs)
            if module is self._last_before[now.stage]:
                return _with_carry(now.carry, skipped)
            return skipped
        parts = self.stages[now.stage]
        if now.stage and module is parts[0] and now.entered:
            raise TaskError(f"a step of {self._name} called the model twice. With a pipeline, call it once per step.")
        if now.stage and id(module) not in self._checked:
            self._check_arguments(module, args, kwargs)
        if not now.entered and now.seed is not None:
            torch.manual_seed(hash((now.seed, now.stage)))
        now.entered = True
        output = call(*args, **kwargs)
        if now.stage < self.last and module is parts[-1]:
            raise _StageDone(_carried(output, module))
        return output

    def _check_arguments(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Raise an error if an argument of a module's first call is NaN, as outputs of skipped modules are. Blocks."""
        self._checked.add(id(module))
        for name, value in [*enumerate(args), *kwargs.items()]:
            tensors = [t for t in iterate_tensors(value) if t.is_floating_point() and t.numel()]
            if any(bool(t.isnan().all()) for t in tensors):
                raise TaskError(
                    f"argument {name} of {type(module).__name__} in {self._name} comes from another pipeline stage, or "
                    "is NaN. Only the first output of a stage's last layer is sent to the next stage. Compute the "
                    "other values from the batch, or choose other stages."
                )

    def _skipped(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Return NaN tensors with the shapes of the output of a module in another stage."""
        cache: Any = self._cache if any(value is self._cache for value in (*args, *kwargs.values())) else None
        tensors = list(iterate_tensors((args, kwargs)))
        if cache is not None:
            del tensors[1:]  # masks become longer with each token
        key = (id(module), module.training, cache is None, tuple((t.shape, t.dtype) for t in tensors))
        if key in self._shapes:
            shapes, updates = self._shapes[key]
            for update_args, update_kwargs in updates:
                cache.update(*update_args, **update_kwargs)
            return map_tensors(self._empty, shapes)
        meta_args, meta_kwargs = map_tensors(lambda tensor: tensor.to("meta"), (args, kwargs))
        meta_copy = self._meta_copies[id(module)].train(module.training)
        with torch.no_grad(), recorded_updates(cache) as updates:
            shapes = meta_copy(*meta_args, **meta_kwargs)
        self._shapes[key] = shapes, updates
        return map_tensors(self._empty, shapes)

    def _empty(self, tensor: torch.Tensor) -> torch.Tensor:
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
        before = self.run
        cache = kwargs.get("past_key_values")
        caches = self._caches.of(cache)

        def run(stage: int, carry: torch.Tensor | None, _: int) -> Any:
            self._cache = caches.get(stage)
            stage_kwargs = dict(kwargs)
            if cache is not None:
                stage_kwargs["past_key_values"] = self._cache
            return self.compute_stage(stage, carry, lambda: call(*args, **stage_kwargs))

        self.run = run
        try:
            outputs = dict(self.through(lambda stage, carry: self.modules[stage](carry, torch.zeros(1))))
        finally:
            self.run = before
            self._cache = None
        self.release()
        output = outputs[self.links.own[-1]]
        if cache is not None:
            self._caches.merge(caches)
            if isinstance(output, dict) and "past_key_values" in output:
                output["past_key_values"] = None  # is not sent
        output = self.links.broadcast(output, self.last)
        if cache is not None and isinstance(output, dict):
            output["past_key_values"] = cache  # of this rank
        return output

    def through(self, compute: Callable[[int, torch.Tensor], Any]) -> Iterator[tuple[int, Any]]:
        """Compute this rank's stages in order. Send each output to the next rank, and yield the stage and the output.

        Args:
            compute: Function of a stage and its input (an empty tensor in the first stage). Returns the output.
        """
        carry = torch.empty(0)
        own = self.links.own
        for stage in own:
            if stage > 0 and stage - 1 not in own:
                carry = self.links.receive(stage - 1)
            output = compute(stage, carry)
            if stage < self.last and stage + 1 not in own:
                self.links.send(output, stage + 1)
            carry = output
            yield stage, output


class _Absent:
    """Placeholder for a parameter on another rank. Unlike a `meta` tensor, it raises an error at every use."""

    def __init__(self, name: str, model: str) -> None:
        self._message = (
            f"{model} reads {name}, which is in another pipeline stage, without calling its module. If the forward "
            "reads it, define pipeline_stages() in the task, and include the module in each stage that uses its "
            "weights. A callback or hook can read only the weights of its rank's stages."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TaskError(self._message)

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, _Absent):
                raise TaskError(value._message)
        return NotImplemented


def _entry(task: nn.Module, stages: Stages) -> nn.Module:
    """Return the callable child of a task that contains all stages, or the task if no child does."""
    part_ids = {id(part) for parts in stages for part in parts}
    for child in task.children():
        inner_ids = {id(module) for module in child.modules()} - {id(child)}
        is_callable = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if is_callable and part_ids <= inner_ids:
            return child
    return task


def _on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module on the device `meta`."""
    memo: dict[int, Any] = {}  # deepcopy takes these copies of tensors, and copies no data
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


def _carried(output: object, module: nn.Module) -> torch.Tensor:
    carry = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(carry, torch.Tensor):
        raise TaskError(
            f"{type(module).__name__}, the last layer of a pipeline stage, returned {type(output).__name__}. It must "
            "return a tensor, or a tuple whose first element is a tensor: the first argument of the next layer."
        )
    return carry
