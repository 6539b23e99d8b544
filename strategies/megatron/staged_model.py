"""One stage at a time of a model whose forward is written for the whole.

Every rank calls the model's own forward. Modules of earlier stages are skipped: they return values of the right shapes,
all of them NaN, but the last one of the stage before returns what the rank before has sent. After the last module of a
stage the forward is left.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainwright.core.errors import TaskError
from trainwright.core.tree import iterate_tensors, map_tensors
from trainwright.strategies.megatron.stages import Stages

Args = tuple[object, ...]
Kwargs = dict[str, object]


class StageModule(nn.Module):
    """One stage as a module: what is sharded, and what a schedule calls.

    Args:
        index: Of the stage.
        parts: Its modules, which the task holds too.
        run: Runs the stage: `run(index, carry, micro_batch)`, the second None in the first stage.
    """

    def __init__(self, index: int, parts: Sequence[nn.Module], run: Callable[[int, Any, int], torch.Tensor]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.index, self.run = index, run

    def forward(self, carry: torch.Tensor, micro_batch: torch.Tensor) -> torch.Tensor:
        """Run the stage on one micro-batch; `micro_batch` is its index, of shape (1,), on the host."""
        return self.run(self.index, carry if self.index else None, int(micro_batch))


class _StageDone(BaseException):
    """Leaves the forward of a model after the last module of a stage; no user's `except Exception` catches it."""

    def __init__(self, output: torch.Tensor) -> None:
        self.output = output


@dataclass
class _Run:
    """A forward in which one stage is computed."""

    stage: int
    carry: torch.Tensor | None
    seed: int | None = None  # of what is drawn in the stage's modules
    entered: bool = False


class Wire:
    """The connections between the ranks of one pipeline.

    Args:
        group: Of the ranks, in the order of the mesh.
        ranks: Stage → its rank in the group.
        device: Where tensors are.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device) -> None:
        self.group, self.ranks, self.device = group, ranks, device
        self.rank = dist.get_rank(group)

    @property
    def own(self) -> list[int]:
        """The stages of this rank."""
        return [stage for stage, rank in enumerate(self.ranks) if rank == self.rank]

    def global_rank(self, stage: int) -> int:
        """Return the global rank of a stage in this pipeline."""
        return dist.get_global_rank(self.group, self.ranks[stage])

    def send(self, tensor: torch.Tensor, stage: int) -> None:
        """Send a tensor of any shape to the rank of a stage. Blocks until it is received."""
        peer = self.global_rank(stage)
        dist.send_object_list([(tensor.shape, tensor.dtype)], peer, self.group, self.device)
        dist.send(tensor.detach().contiguous(), peer, self.group)

    def receive(self, stage: int) -> torch.Tensor:
        """Receive what the rank of a stage sends. Blocks."""
        peer, header = self.global_rank(stage), [None]
        dist.recv_object_list(header, peer, self.group, self.device)
        shape, dtype = header[0] or ((), None)
        found = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(found, peer, self.group)
        return found

    def broadcast(self, tree: object, stage: int) -> Any:
        """Return on every rank of the pipeline what the rank of a stage has: tensors and picklable values. Collective.

        Args:
            tree: What the others pass is not read.
        """
        src, is_source = self.global_rank(stage), self.rank == self.ranks[stage]
        shown = [map_tensors(lambda t: t.detach().to("meta"), tree) if is_source else None]
        dist.broadcast_object_list(shown, src, self.group, self.device)
        if is_source:
            for tensor in iterate_tensors(tree):
                dist.broadcast(tensor.detach().to(self.device).contiguous(), src, self.group)
            return tree

        def received(tensor: torch.Tensor) -> torch.Tensor:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            dist.broadcast(made, src, self.group)
            return made

        return map_tensors(received, shown[0])


class Pipeline:
    """A model of which this rank computes some stages.

    Args:
        task: Holds the modules. They are whole, on any device, and keep their names.
        stages: See `find_stages`.
        wire: To the other ranks.

    Attributes:
        modules: Of each stage; those of this rank are called as a whole (see `StageModule`).
        run: Runs a stage when its module is called; a schedule sets it.
        release: Called after a forward that no backward follows; the engine sets it.
    """

    def __init__(self, task: nn.Module, stages: Stages, wire: Wire) -> None:
        self.wire, self.stages = wire, stages
        self.run: Callable[[int, Any, int], torch.Tensor] | None = None
        self.release: Callable[[], None] = lambda: None
        self._cast: list[tuple[nn.Module, str, torch.dtype]] = []
        self.modules = [StageModule(i, parts, self._run_module) for i, parts in enumerate(stages)]
        self.last = len(stages) - 1
        self._last_before = [None, *(parts[-1] for parts in stages[:-1])]
        self._stage_of: dict[int, list[int]] = {}
        for i, parts in enumerate(stages):
            for part in parts:
                self._stage_of.setdefault(id(part), []).append(i)
        self._entry = _entry(task, stages)
        self._task, self._name = task, type(task).__name__
        skipped = [m for i, parts in enumerate(stages) for m in parts if wire.own != [i]]
        self._twins = {id(module): _on_meta(module) for module in skipped}
        self._shapes: dict[Any, Any] = {}
        self._checked: set[int] = set()  # modules whose arguments have been looked at
        self._now: _Run | None = None

    @property
    def is_computing(self) -> bool:
        """Whether a stage is being computed now."""
        return self._now is not None

    def _run_module(self, stage: int, carry: torch.Tensor | None, micro_batch: int) -> torch.Tensor:
        assert self.run is not None  # set by whoever calls a stage
        return self.run(stage, carry, micro_batch)

    def narrow(self, dtype: torch.dtype, places: Iterable[tuple[nn.Module, str]]) -> None:
        """Have forwards see all parameters in a dtype, as those of stages are gathered in it.

        Args:
            dtype: Of 16 bits.
            places: Modules with names of parameters there that belong to no stage.
        """
        self._cast = [(module, key, dtype) for module, key in places]
        for twin in self._twins.values():
            twin.to(dtype)

    def install(self) -> Callable[[], None]:
        """Have modules called by stages from now on; returns what undoes it."""
        modules = {id(m): m for parts in self.stages for m in parts}.values()
        before = [(module, vars(module).get("_compiled_call_impl")) for module in modules]
        for module in modules:
            # In place of the whole call, as `nn.Module.compile` does it: a skipped module runs no hooks.
            module._compiled_call_impl = _Call(self, module, module._compiled_call_impl or module._call_impl)
        absent = [(m, key, name) for name, m, key in self._absent()]
        for module, key, name in absent:
            vars(module)[key] = _Absent(name, self._name)  # hides the parameter
        own_forward = vars(self._entry).get("forward")
        vars(self._entry)["forward"] = _EntryCall(self, self._entry.forward)

        def undo() -> None:
            for module, key, _ in absent:
                vars(module).pop(key, None)
            for module, call in before:
                vars(module).pop("_compiled_call_impl", None)
                if call is not None:
                    module._compiled_call_impl = call
            vars(self._entry).pop("forward", None)
            if own_forward is not None:
                vars(self._entry)["forward"] = own_forward

        return undo

    def _absent(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Yield the whole name, the module and the key of each parameter that only other ranks hold."""
        for prefix, module in self._task.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    yield f"{prefix}.{key}", module, key

    def compute_stage(
        self, stage: int, carry: torch.Tensor | None, call: Callable[[], Any], *, seed: int | None = None
    ) -> Any:
        """Compute a stage within `call`, which calls the model. Not collective.

        Args:
            carry: What the stage before has computed; None in the first one.
            seed: Of what is drawn in this call, the same on every rank of the pipeline. What is drawn before the first
                module of the stage is the same in each stage, what is drawn after it is not. Torch's generators then
                have the states from before the call: they do not depend on the stage, or on the order of stages and
                micro-batches. Default: None, which draws from torch's generators.

        Returns:
            The output of the stage, or that of `call` in the last one.

        Raises:
            TaskError: `call` did not call the model, or called it twice.
        """
        before, now = self._now, _Run(stage, carry, seed)
        generators = _generators(self.wire.device) if seed is not None else None
        if seed is not None:
            torch.manual_seed(seed)
        self._now = now
        for module, key, dtype in self._cast:
            vars(module)[key] = module.get_parameter(key).to(dtype)  # hides the parameter
        try:
            output = call()
        except _StageDone as done:
            return done.output
        finally:
            self._now = before
            for module, key, _ in self._cast:
                vars(module).pop(key, None)
            if generators is not None:
                _set_generators(self.wire.device, generators)
        if stage < self.last or not now.entered:
            raise TaskError(
                f"a step of {self._name} returned without calling the layers of the pipeline's stage {stage}. Under a "
                "pipeline each step calls the model once."
            )
        return output

    # Calls of modules

    def called(self, module: nn.Module, call: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Do what a module of a stage does when the model calls it."""
        now, stages = self._now, self._stage_of[id(module)]
        if now is None:
            if set(stages) & set(self.wire.own):
                return call(*args, **kwargs)
            raise TaskError(
                f"{self._name} calls {type(module).__name__}, which another rank of the pipeline holds, outside of the "
                f"forward of {type(self._entry).__name__}. Call the model as a whole."
            )
        if now.stage not in stages:
            skipped = self._skipped(module, args, kwargs)
            return _with_carry(now.carry, skipped) if module is self._last_before[now.stage] else skipped
        parts = self.stages[now.stage]
        if now.stage and module is parts[0] and now.entered:
            raise TaskError(f"a step of {self._name} called the model twice. A pipeline runs it once in a step.")
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
        """Refuse, in a module's first call, what a skipped module has returned. Waits for the device."""
        self._checked.add(id(module))
        for name, value in [*enumerate(args), *kwargs.items()]:
            tensors = [t for t in iterate_tensors(value) if t.is_floating_point() and t.numel()]
            if any(bool(t.isnan().all()) for t in tensors):
                raise TaskError(
                    f"argument {name} of {type(module).__name__} in {self._name} comes from another stage of the "
                    "pipeline, or is NaN. Only the first output of a stage's last layer is sent to the next stage. "
                    "Compute the others from the batch, or choose other stages."
                )

    def _skipped(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Return what a module of another stage would: of the same shapes, with NaN in place of values."""
        key = (id(module), module.training, tuple((t.shape, t.dtype) for t in iterate_tensors((args, kwargs))))
        if key not in self._shapes:
            on_meta = map_tensors(lambda tensor: tensor.to("meta"), (args, kwargs))
            twin = self._twins[id(module)].train(module.training)
            with torch.no_grad():
                self._shapes[key] = twin(*on_meta[0], **on_meta[1])
        return map_tensors(self._empty, self._shapes[key])

    def _empty(self, tensor: torch.Tensor) -> torch.Tensor:
        value = float("nan") if tensor.is_floating_point() else 0
        return torch.full(tensor.shape, value, dtype=tensor.dtype, device=self.wire.device)

    # Outside of training steps

    def forward(self, call: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Run the model's forward over all stages; every rank of the pipeline gets its output. Collective.

        Raises:
            TaskError: Gradients are recorded.
        """
        if torch.is_grad_enabled():
            raise TaskError(
                f"{type(self._entry).__name__} was called with gradients enabled outside of a training step. Its "
                "stages are on several ranks: call it under torch.no_grad()."
            )
        before = self.run
        self.run = lambda stage, carry, _: self.compute_stage(stage, carry, lambda: call(*args, **kwargs))
        try:
            outputs = [out for _, out in self.through(lambda stage, carry: self.modules[stage](carry, torch.zeros(1)))]
        finally:
            self.run = before
        self.release()
        return self.wire.broadcast(outputs[-1], self.last)

    def through(self, compute: Callable[[int, torch.Tensor], Any]) -> Iterator[tuple[int, Any]]:
        """Compute this rank's stages one after the other, and send each output on; yields each stage with its output.

        Args:
            compute: From a stage and its input, an empty tensor in the first one, to its output.
        """
        carry = torch.empty(0)
        for stage in self.wire.own:
            here_before = stage and self.wire.ranks[stage - 1] == self.wire.rank
            if stage and not here_before:
                carry = self.wire.receive(stage - 1)
            output = compute(stage, carry)
            if stage < self.last and self.wire.ranks[stage + 1] != self.wire.rank:
                self.wire.send(output, stage + 1)
            carry = output
            yield stage, output


class _Absent:
    """Stands in for a parameter that another rank holds: torch 2.13 multiplies by tensors on `meta` without error."""

    def __init__(self, name: str, model: str) -> None:
        self._message = (
            f"{model} reads {name}, which another stage of the pipeline holds, without a call of its module. If "
            "the forward does, define pipeline_stages() in the task, and name the module in each stage that uses its "
            "weights. A callback or a hook sees only weights of its rank's stages."
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


class _Call:
    """Stands in for the call of a module of a stage."""

    def __init__(self, pipeline: Pipeline, module: nn.Module, call: Callable[..., Any]) -> None:
        self._pipeline, self._module, self._call = pipeline, module, call

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._pipeline.called(self._module, self._call, args, kwargs)


class _EntryCall:
    """Stands in for the forward of the model as a whole."""

    def __init__(self, pipeline: Pipeline, forward: Callable[..., Any]) -> None:
        self._pipeline, self._forward = pipeline, forward

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if self._pipeline.is_computing:
            return self._forward(*args, **kwargs)
        return self._pipeline.forward(self._forward, args, kwargs)


def _entry(task: nn.Module, stages: Stages) -> nn.Module:
    """Return the outermost child of a task that holds all stages and can be called; the task itself if none does."""
    wanted = {id(module) for parts in stages for module in parts}
    for child in task.children():
        if wanted <= {id(m) for m in child.modules() if m is not child}:
            return task if isinstance(child, (nn.ModuleList, nn.ModuleDict)) else child
    return task


def _on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters and buffers have no memory."""
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        made = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made
    return copy.deepcopy(module, memo)


def _with_carry(carry: torch.Tensor | None, output: Any) -> Any:
    """Return the output of a skipped layer with the tensor that the rank before has sent in its first place."""
    return type(output)([carry, *output[1:]]) if isinstance(output, (tuple, list)) and output else carry


def _carried(output: object, module: nn.Module) -> torch.Tensor:
    found = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(found, torch.Tensor):
        raise TaskError(
            f"{type(module).__name__}, the last layer of a pipeline's stage, returned {type(output).__name__}. It must "
            "return a tensor, or a tuple that begins with it, which is the first argument of the next layer."
        )
    return found


def _generators(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def _set_generators(device: torch.device, states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)
