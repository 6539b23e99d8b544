"""Records of a run for `trainwright parity`: every step's data, loss, gradients and parameters, in a folder.
`facts.json` describes the run; `step-00000.safetensors` holds the initial parameters, `step-00001.*` the first step's
loss, gradients and the parameters after it, and so on. The main rank writes; every rank takes part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from trainwright.callbacks.callback import Callback, Order
from trainwright.checkpoint.format.safetensors_io import read_safetensors, to_storable, write_safetensors
from trainwright.core.errors import ConfigurationError
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.rng import seed_everything
from trainwright.core.run import Run, Stage
from trainwright.core.state import Group, StepResult
from trainwright.core.task import TaskModule
from trainwright.core.tree import Batch, iterate_tensors
from trainwright.strategies.engine import Engine
from trainwright.strategies.steps.gradients import parameters_of

_PARAMETER, _GRADIENT, _BUFFER = "parameter/", "gradient/", "buffer/"


@dataclass(frozen=True)
class Facts:
    """Facts that explain a difference, JSON-compatible."""

    task: str
    processes: int
    precision: str
    running_statistics: list[str]  # buffers in which layers such as BatchNorm keep statistics of what they have seen
    optimizers: list[str]  # names of their classes


@dataclass
class StepRecord:
    """Record of one optimizer step, JSON-compatible; its tensors are in a separate file."""

    loss: float | None = None  # the mean over everything that the step consumed; None in tasks that optimize by hand
    norm: float | None = None  # of the gradients before clipping; None where the strategy computes none
    # "epoch/micro-batch", counted over all ranks → digest of its tensors
    data: dict[str, str] = field(default_factory=dict)
    strayed: list[list[Any]] = field(default_factory=list)  # rank and name of parameters that are not as rank 0's


class StepTape(Callback):
    """Callback that records a run step by step, and makes randomness independent of the number of ranks. Before each
    micro-batch every generator is seeded by its position in the order over all ranks, so that dropout draws the same
    numbers for the same samples in any number of processes.
    """

    order = Order.FIRST

    def __init__(self, folder: Path, micro_batches: int, seed: int) -> None:
        self.folder = folder
        self.micro_batches = micro_batches
        self.seed = seed
        self._num_steps = 0
        self._record = StepRecord()
        self._gradients: dict[str, torch.Tensor] = {}
        self._place = (0, 0)

    def setup(self, trainer: Any, task: TaskModule, stage: Stage) -> None:
        self._engine: Engine = trainer.strategy
        dp_size = self._engine.data_ranks.size
        if self.micro_batches % dp_size:
            raise ConfigurationError(
                f"a step of {self.micro_batches} micro-batches cannot be divided over {dp_size} data-parallel ranks. "
                f"Set trainer.accumulate_grad_batches, or --devices, so that {dp_size} divides their product."
            )
        accumulate = self.micro_batches // dp_size
        if accumulate > 1 and not task.automatic_optimization:
            raise ConfigurationError(
                f"{type(task).__name__} uses manual optimization, so that {dp_size} data-parallel rank(s) cannot "
                f"consume the {self.micro_batches} micro-batches of a step. Compare strategies with the same number of "
                "ranks."
            )
        trainer.accumulate_grad_batches = accumulate

    def on_train_start(self, trainer: Run, task: TaskModule) -> None:
        for config in trainer.lr_scheduler_configs:
            config.paused = config.monitor is not None  # without validation there is no metric to monitor
        self._write(trainer, task)
        if trainer.is_global_zero:
            (self.folder / "facts.json").write_text(json.dumps(asdict(_facts(trainer, self._engine, task))))

    # A step

    def on_train_step_start(self, trainer: Run, task: TaskModule, group: Group) -> None:
        self._record, self._gradients = StepRecord(), {}
        self._seed(trainer, group.first_idx)  # the task's transfer hooks may draw

    def on_train_batch_start(self, trainer: Run, task: TaskModule, batch: Batch, batch_idx: int) -> None:
        epoch, place = self._seed(trainer, batch_idx)
        self._record.data[f"{epoch}/{place}"] = _digest(batch)

    def on_after_backward(self, trainer: Run, task: TaskModule) -> None:
        epoch, place = self._place
        seed_everything(self._number(epoch, place + self._engine.data_ranks.size))  # for the next one's transfer

    def on_before_optimizer_step(self, trainer: Run, task: TaskModule, optimizer: torch.optim.Optimizer) -> None:
        own = {id(parameter) for parameter in parameters_of([optimizer])}
        names = {plain_name(name) for name, parameter in task.named_parameters() if id(parameter) in own}
        found = self._engine.state.full_gradients(keep=trainer.is_global_zero)
        for name, gradient in found.items():
            # An engine's own optimizer may hold other tensors than the task's.
            if trainer.is_global_zero and (name in names or not names):
                self._gradients[_GRADIENT + name] = _stored(gradient)

    def on_train_step_end(self, trainer: Run, task: TaskModule, result: StepResult) -> None:
        self._num_steps += 1
        record = self._record
        everyone = self._engine.processes.gather_object(
            (None if result.loss is None else float(result.loss), record.data)
        )
        losses = [loss for loss, _ in everyone if loss is not None]
        record.loss = sum(losses) / len(losses) if losses else None
        record.norm = None if result.grad_norm is None else float(result.grad_norm)
        record.data = {place: digest for _, data in everyone for place, digest in data.items()}
        self._write(trainer, task)

    def _seed(self, trainer: Run, idx: int) -> tuple[int, int]:
        ranks = self._engine.data_ranks
        self._place = trainer.state.epoch, idx * ranks.size + ranks.rank
        seed_everything(self._number(*self._place))
        return self._place

    def _number(self, epoch: int, place: int) -> int:
        text = f"{self.seed}/{epoch}/{place}".encode()
        return int.from_bytes(hashlib.blake2s(text, digest_size=4).digest(), "little")

    def _write(self, trainer: Any, task: TaskModule) -> None:
        """Write the current step. Collective."""
        main = trainer.is_global_zero
        parameters = self._engine.state.full_parameters(keep=main)
        self._record.strayed = self._compare_copies(trainer, parameters)
        if not main:
            return
        tensors = {_PARAMETER + name: _stored(tensor) for name, tensor in parameters.items()}
        tensors |= {_BUFFER + plain_name(name): _stored(tensor) for name, tensor in task.named_buffers()}
        stem = f"step-{self._num_steps:05}"
        write_safetensors(self.folder / f"{stem}.safetensors", {**tensors, **self._gradients})
        (self.folder / f"{stem}.json").write_text(json.dumps(asdict(self._record)))

    def _compare_copies(self, trainer: Any, parameters: Mapping[str, torch.Tensor]) -> list[list[Any]]:
        """Return the ranks and names of parameters that differ from rank 0's, if every rank holds all of them."""
        if trainer.world_size == 1 or not trainer.strategy.capabilities.whole_weights:
            return []
        mine = {name: _digest(tensor) for name, tensor in parameters.items()}
        everyone = self._engine.processes.gather_object(mine)
        return [
            [rank, name] for name in mine for rank, of_rank in enumerate(everyone) if of_rank.get(name) != mine[name]
        ]


@dataclass
class Tape:
    """Records of a strategy's run."""

    label: str
    folder: Path
    facts: Facts
    steps: list[StepRecord]  # the initial state first

    @classmethod
    def read(cls, label: str, folder: Path) -> Self:
        """Read the records of `StepTape`, without tensors."""
        steps = [StepRecord(**json.loads(file.read_text())) for file in sorted(folder.glob("step-*.json"))]
        return cls(label, folder, Facts(**json.loads((folder / "facts.json").read_text())), steps)

    def tensors(self, step: int) -> StepTensors:
        """Read a step's tensors; 0 is before the first one."""
        found = read_safetensors(self.folder / f"step-{step:05}.safetensors")
        return StepTensors(*(_with_prefix(found, prefix) for prefix in (_GRADIENT, _PARAMETER, _BUFFER)))


@dataclass(frozen=True)
class StepTensors:
    """Tensors by name: the accumulated gradients before clipping, and parameters and buffers after the step."""

    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def _with_prefix(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return to_storable(dense.detach())[0].cpu().clone()


def _digest(tree: object) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tensor in iterate_tensors(tree):
        plain = tensor.detach().cpu().contiguous()
        found.update(str((plain.dtype, tuple(plain.shape))).encode())
        found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return found.hexdigest()


def _facts(trainer: Run, engine: Engine, task: TaskModule) -> Facts:
    layers = [(name, m) for name, m in task.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    return Facts(
        task=type(task).__name__,
        processes=trainer.world_size,
        precision=engine.precision.name,
        running_statistics=[f"{name}.{key}" for name, layer in layers for key, _ in layer.named_buffers()],
        optimizers=[type(optimizer).__name__ for optimizer in trainer.optimizers],
    )
