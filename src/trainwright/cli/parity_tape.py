"""Recording and comparison of runs for `trainwright parity`.

Each run has a folder. `facts.json` describes the run. `step-00000.safetensors` contains the initial parameters. Files
`step-00001.*` and so on contain a step's data, loss, gradients, and the parameters after the step.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from trainwright.callbacks.callback import Callback, Order
from trainwright.checkpoint.format.safetensors_io import (
    read_header,
    read_safetensors,
    to_storable,
    write_safetensors,
)
from trainwright.core.errors import ConfigurationError
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.rng import seed_everything
from trainwright.core.run import Run, Stage
from trainwright.core.state import Group, StepResult
from trainwright.core.task import TaskModule
from trainwright.core.tree import Batch, iterate_tensors
from trainwright.strategies.engine import Engine
from trainwright.strategies.steps.gradients import parameters_of

GRADIENT = "gradient"
PARAMETER = "parameter"
LOSS = "loss"
NORM = "gradient norm"
COPY = "copy"
KINDS = (LOSS, NORM, GRADIENT, PARAMETER)


@dataclass
class StepRecord:
    """Record of one optimizer step, JSON-compatible. Its tensors are in a separate file."""

    loss: float | None = None  # the mean over everything that the step consumed; None for manual optimization
    norm: float | None = None  # of the gradients before clipping; None if the engine exposes neither
    data: dict[str, str] = field(default_factory=dict)  # "epoch/micro-batch" over all ranks → digest of its tensors
    copies: list[list[Any]] = field(default_factory=list)  # rank and name of parameters that differ from rank 0's


@dataclass
class Tape:
    """Records of one run, which `StepTape` wrote into a folder."""

    label: str  # the strategy as text, for messages
    folder: Path
    task: str  # name of the task's class
    processes: int
    precision: str  # such as `32-true`
    steps: list[StepRecord]  # entry 0 is the initial state, without loss; entry 1 the first step

    @classmethod
    def read(cls, label: str, folder: Path) -> Self:
        """Read the records in a run's folder, without tensors. `label` names the run in messages."""
        steps: list[StepRecord] = []
        for file in sorted(folder.glob("step-*.json")):
            steps.append(StepRecord(**json.loads(file.read_text())))
        facts = json.loads((folder / "facts.json").read_text())
        return cls(label, folder, facts["task"], facts["processes"], facts["precision"], steps)

    def tensors(self, step: int, kind: str) -> dict[str, torch.Tensor]:
        """Read a step's gradients before clipping, or the parameters after the step. Step 0 is the initial state."""
        file = self.folder / f"step-{step:05}.safetensors"
        prefix = f"{kind}/"
        names = [name for name in read_header(file) if name.startswith(prefix)]
        tensors = read_safetensors(file, names=names)
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


class StepTape(Callback):
    """Callback that records a run step by step, and makes randomness independent of the number of ranks.

    Before each micro-batch, all generators are seeded by the position of the micro-batch in the order over all ranks.
    Dropout then draws the same numbers for the same samples with any number of processes.

    Args:
        folder: folder of the run's `Tape`.
        micro_batches: micro-batches of a step over all ranks.
        seed: seed of the run.
    """

    order = Order.FIRST  # so that the generators are seeded before another callback draws numbers

    def __init__(self, folder: Path, micro_batches: int, seed: int) -> None:
        self.folder = folder
        self.micro_batches = micro_batches
        self.seed = seed
        self._num_steps = 0  # completed steps
        self._record = StepRecord()  # of the current step; of the initial state before the first step
        self._gradients: dict[str, torch.Tensor] = {}  # of the current step, by `gradient/name`; main process only
        self._place = (0, 0)  # epoch, and index of the micro-batch in the order over all ranks; set by `_seed`

    def setup(self, trainer: Any, task: TaskModule, stage: Stage) -> None:
        self._engine: Engine = trainer.strategy
        dp_size = self._engine.data_ranks.num_readers
        # The group of micro-batches of a step is the same for all runs. More ranks accumulate fewer of them each.
        accumulate, rest = divmod(self.micro_batches, dp_size)
        if rest:
            raise ConfigurationError(
                f"a step of {self.micro_batches} micro-batches cannot be divided over {dp_size} data-parallel ranks. "
                f"Set trainer.accumulate_grad_batches or --devices: {dp_size} must divide their product."
            )
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
        self._write(trainer)
        if trainer.is_global_zero:
            precision = self._engine.precision.name
            facts = {"task": type(task).__name__, "processes": trainer.world_size, "precision": precision}
            (self.folder / "facts.json").write_text(json.dumps(facts))

    def on_train_step_start(self, trainer: Run, task: TaskModule, group: Group) -> None:
        self._record = StepRecord()
        self._gradients = {}
        # The transfer of the first micro-batch precedes `on_train_batch_start`, and the task's transfer hooks may draw
        # random numbers.
        self._seed(trainer, group.first_idx)

    def on_train_batch_start(self, trainer: Run, task: TaskModule, batch: Batch, batch_idx: int) -> None:
        self._seed(trainer, batch_idx)
        epoch, place = self._place
        if self._engine.data_ranks.parts == 1:  # a part of a sequence is not the data of one process
            self._record.data[f"{epoch}/{place}"] = _digest(batch)

    def on_after_backward(self, trainer: Run, task: TaskModule) -> None:
        # For the transfer of this reader's next micro-batch: with 2 readers, micro-batch 7 is followed by 9.
        epoch, place = self._place
        self._seed_at(epoch, place + self._engine.data_ranks.num_readers)

    def on_before_optimizer_step(self, trainer: Run, task: TaskModule, optimizer: torch.optim.Optimizer) -> None:
        # By identity, because `==` of tensors compares their elements.
        stepped = {id(parameter) for parameter in parameters_of([optimizer])}
        names: set[str] = set()
        for name, parameter in task.named_parameters():
            if id(parameter) in stepped:
                names.add(plain_name(name))
        # All ranks gather the full gradients, and the main process stores them.
        for name, gradient in self._engine.state.full_gradients(keep=trainer.is_global_zero).items():
            # An engine's own optimizer may hold other tensors than the task's. Without names, store all gradients.
            is_stepped = name in names or not names
            if trainer.is_global_zero and is_stepped:
                self._gradients[f"{GRADIENT}/{name}"] = _stored(gradient)

    def on_train_step_end(self, trainer: Run, task: TaskModule, result: StepResult) -> None:
        self._num_steps += 1
        own_loss = None if result.loss is None else float(result.loss)
        all_ranks = self._engine.processes.gather_object((own_loss, self._record.data))
        losses: list[float] = []
        self._record.data = {}
        for loss, data in all_ranks:
            if loss is not None:
                losses.append(loss)
            self._record.data |= data
        self._record.loss = sum(losses) / len(losses) if losses else None
        if result.grad_norm is not None:
            self._record.norm = float(result.grad_norm)
        elif self._gradients:
            # The norm of the norms is the norm of all elements.
            norms = [gradient.double().norm() for gradient in self._gradients.values()]
            self._record.norm = float(torch.stack(norms).norm())
        self._write(trainer)

    def _seed(self, trainer: Run, idx: int) -> None:
        """Set `_place` to this reader's micro-batch `idx` of the epoch, and seed all generators for it."""
        # With 2 readers, micro-batch 3 of reader 1 is micro-batch 3 * 2 + 1 = 7 of the epoch.
        ranks = self._engine.data_ranks
        self._place = trainer.state.epoch, idx * ranks.num_readers + ranks.reader
        self._seed_at(*self._place)

    def _seed_at(self, epoch: int, place: int) -> None:
        text = f"{self.seed}/{epoch}/{place}".encode()
        seed_everything(int.from_bytes(hashlib.blake2s(text, digest_size=4).digest(), "little"))

    def _write(self, trainer: Any) -> None:
        """Write the record and the tensors of the current step on the main process. Collective."""
        main = trainer.is_global_zero
        parameters = self._engine.state.full_parameters(keep=main)
        # Without full weights, ranks hold shards, and not copies of the same parameters.
        if trainer.world_size > 1 and self._engine.capabilities.full_weights:
            self._record.copies = self._compare_copies(parameters)
        if main:
            tensors = {f"{PARAMETER}/{name}": _stored(tensor) for name, tensor in parameters.items()}
            stem = f"step-{self._num_steps:05}"
            write_safetensors(self.folder / f"{stem}.safetensors", {**tensors, **self._gradients})
            # Last, because `Tape.read` looks for this file.
            (self.folder / f"{stem}.json").write_text(json.dumps(asdict(self._record)))

    def _compare_copies(self, parameters: Mapping[str, torch.Tensor]) -> list[list[Any]]:
        """Return the rank and the name of each parameter that differs from the parameter of rank 0. Collective."""
        own_digests = {name: _digest(tensor) for name, tensor in parameters.items()}
        all_ranks = self._engine.processes.gather_object(own_digests)
        copies: list[list[Any]] = []
        for name in own_digests:
            for rank, digests in enumerate(all_ranks):
                if digests.get(name) != all_ranks[0][name]:
                    copies.append([rank, name])
        return copies


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU that safetensors can store: dense, and with a dtype that the format has."""
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return to_storable(dense.detach())[0].cpu().clone()


def _digest(tree: object) -> str:
    """Return a digest of the dtypes, shapes and bits of all tensors in a tree."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in iterate_tensors(tree):
        plain = tensor.detach().cpu().contiguous()
        digest.update(str((plain.dtype, tuple(plain.shape))).encode())
        if plain.numel():  # a tensor without elements has no bytes to view
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Tolerance:
    """Allowed difference of two tensors: `atol + rtol × the largest absolute element of the reference`.

    All elements of a tensor have the same bound, because rounding errors of a sum are relative to its largest terms.
    """

    atol: float
    rtol: float

    @classmethod
    def of(cls, precision: str, atol: float | None, rtol: float | None) -> Tolerance:
        """Return the requested tolerance. Default: the tolerance for rounding errors in this precision."""
        if precision == "64-true":
            default = cls(atol=1e-10, rtol=1e-8)
        elif precision == "32-true":
            default = cls(atol=1e-6, rtol=1e-4)
        else:
            default = cls(atol=1e-3, rtol=3e-2)
        if atol is None:
            atol = default.atol
        if rtol is None:
            rtol = default.rtol
        return cls(atol, rtol)

    def bound(self, reference: torch.Tensor) -> float:
        """Return the largest allowed absolute difference from `reference`."""
        return self.atol + self.rtol * _largest(reference)


@dataclass(frozen=True)
class Difference:
    """A value that differs by more than the tolerance."""

    kind: str  # one of `KINDS`, or `COPY` for another rank's copy of a parameter
    name: str  # of the parameter; empty for the loss and the norm
    text: str

    @property
    def what(self) -> str:
        """Name of the differing value, such as `gradient of net.weight`."""
        return f"{self.kind} of {self.name}" if self.name else self.kind


@dataclass
class Comparison:
    """Comparison of a run with the run of the reference strategy, step by step."""

    reference: Tape
    other: Tape
    tolerance: Tolerance
    step: int = 0  # the last compared step, and the first one that differs if `found` is not empty; 0: initial state
    found: list[Difference] = field(default_factory=list)  # differences of that step, in the order of computation
    # Kind → greatest relative difference over all compared steps. A kind that was not compared is missing.
    worst: dict[str, float] = field(default_factory=dict)
    other_data: list[str] = field(default_factory=list)  # "epoch/micro-batch" with other values
    # Parameter → elements whose gradients are within the tolerance of zero and not equal. They are not compared: an
    # optimizer that divides a gradient by its size, as Adam does, makes full steps of such rounding noise.
    noise: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """True if nothing differs by more than the tolerance."""
        return not self.found

    def notes(self) -> list[str]:
        """Return messages about micro-batches with different values and about elements that are not compared."""
        notes: list[str] = []
        if self.other_data:
            epoch, _, place = self.other_data[0].partition("/")
            notes.append(f"the data differ: micro-batch {place} of epoch {epoch} holds other values.")
        counts = {name: int(mask.sum()) for name, mask in self.noise.items() if mask.any()}
        if counts:
            first = list(counts.items())[:3]
            some = ", ".join(f"{count} of {name}" for name, count in first)
            more = f" and {len(counts) - 3} more" if len(counts) > 3 else ""
            notes.append(f"not compared: elements whose gradients are rounding noise around zero ({some}{more}).")
        return notes

    def compare_step(self, step: int) -> None:
        """Compare one step, in the order of computation. Add its differences to `found`."""
        self.step = step
        reference = self.reference.steps[step]
        other = self.other.steps[step]
        shared = reference.data.keys() & other.data.keys()
        self.other_data += sorted(place for place in shared if reference.data[place] != other.data[place])
        # A step computes its loss, gradients, their norm and then its parameters: the first difference is the cause.
        # Gradients come before parameters also because they determine which elements of the parameters are compared.
        self._compare_numbers(LOSS, reference.loss, other.loss)
        self._compare_gradients(self.reference.tensors(step, GRADIENT), self.other.tensors(step, GRADIENT))
        self._compare_numbers(NORM, reference.norm, other.norm)
        self._compare_parameters(self.reference.tensors(step, PARAMETER), self.other.tensors(step, PARAMETER))
        for rank, name in other.copies:
            self.found.append(Difference(COPY, name, f"rank {rank}'s copy is not rank 0's"))

    def _compare_numbers(self, kind: str, reference: float | None, other: float | None) -> None:
        if reference is not None and other is not None:
            self._compare(kind, "", torch.tensor(reference), torch.tensor(other))

    def _compare_gradients(self, references: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
        """Compare gradients by name, and add elements that are only noise to `noise`."""
        if not references or not others:
            return  # an engine does not expose them
        for name in dict.fromkeys([*references, *others]):
            # An unused parameter may have no gradient, or one of zeros.
            reference = references[name] if name in references else torch.zeros_like(others[name])
            other = others[name] if name in others else torch.zeros_like(reference)
            if self._compare(GRADIENT, name, reference, other):
                noise = (reference != other) & (reference.abs() <= self.tolerance.bound(reference))
                if name in self.noise:  # a parameter keeps the noise of earlier steps
                    noise = self.noise[name] | noise
                self.noise[name] = noise

    def _compare_parameters(self, references: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
        """Compare parameters by name, without the elements in `noise`."""
        for name in dict.fromkeys([*references, *others]):
            if name not in references or name not in others:
                without = self.other if name in references else self.reference
                self.found.append(Difference(PARAMETER, name, f"{without.label} has none"))
                continue
            reference = references[name]
            other = others[name]
            if name in self.noise and self.noise[name].shape == reference.shape == other.shape:
                other = torch.where(self.noise[name], reference, other)
            self._compare(PARAMETER, name, reference, other)

    def _compare(self, kind: str, name: str, reference: torch.Tensor, other: torch.Tensor) -> bool:
        """Compare two tensors and record a difference; return whether they are equal within the tolerance."""
        label = self.reference.label
        other_label = self.other.label
        if reference.shape != other.shape:
            text = f"its shape is {tuple(reference.shape)} under {label}, {tuple(other.shape)} under {other_label}"
            self.found.append(Difference(kind, name, text))
            return False
        reference = reference.double()
        other = other.double()
        differences = _absolute_differences(reference, other)
        greatest = float(differences.max()) if differences.numel() else 0.0
        bound = self.tolerance.bound(reference)
        largest = _largest(reference)
        if largest:
            relative = greatest / largest
        else:
            relative = math.inf if greatest else 0.0
        if greatest > bound or largest > self.tolerance.atol:  # otherwise both are close to zero
            self.worst[kind] = max(self.worst.get(kind, 0.0), relative)
        self.worst.setdefault(kind, 0.0)
        if greatest <= bound:
            return True
        index = tuple(int(i) for i in torch.unravel_index(differences.argmax(), differences.shape))
        where = f" at {list(index)}" if index else ""  # a number, such as the loss, has no index
        text = (
            f"{label} {float(reference[index]):.8g}, {other_label} {float(other[index]):.8g}{where}; "
            f"greatest difference {greatest:.3g} (relative {relative:.3g}), allowed {bound:.3g}"
        )
        self.found.append(Difference(kind, name, text))
        return False


def compare(reference: Tape, other: Tape, tolerance: Tolerance) -> Comparison:
    """Compare two runs until the first step in which they differ. Reads the tensors of one step at a time.

    If all common steps are equal, and one run has fewer steps, the loss of its first missing step counts as different.
    """
    result = Comparison(reference, other, tolerance)
    for step in range(min(len(reference.steps), len(other.steps))):
        result.compare_step(step)
        if result.found:
            return result
    # The initial state is not a step.
    num_steps = len(reference.steps) - 1
    num_other = len(other.steps) - 1
    if num_steps != num_other:
        result.step += 1
        text = f"{reference.label} made {num_steps} step(s), {other.label} {num_other}"
        result.found.append(Difference(LOSS, "", text))
    return result


def _absolute_differences(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return absolute differences: 0 for equal infinities or two NaNs, huge or infinite if only one value is finite."""
    same = (reference == other) | (reference.isnan() & other.isnan())
    # infinity - 1 is infinity, which `nan_to_num` replaces by the largest number of the dtype. NaN becomes infinity.
    return torch.where(same, 0.0, (reference - other).abs().nan_to_num(math.inf))


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute finite element, or 0 without any."""
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
