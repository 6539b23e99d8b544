"""Compare the results of two strategies, step by step, until the first step in which they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from trainwright.cli.parity.parity_tape import StepTensors, Tape

LOSS, NORM, GRADIENT, PARAMETER, COPY = "loss", "gradient norm", "gradient", "parameter", "copy"
KINDS = (LOSS, NORM, GRADIENT, PARAMETER)


@dataclass(frozen=True)
class Tolerance:
    """Allowed difference of two tensors: `atol + rtol × the largest absolute element of the reference`.

    A bound for each tensor, not for each element: rounding in a sum is relative to its largest terms.
    """

    atol: float
    rtol: float

    @classmethod
    def of(cls, precision: str, atol: float | None, rtol: float | None) -> Tolerance:
        """Return the requested tolerance, or the default for rounding in this precision."""
        default = {"64-true": cls(1e-10, 1e-8), "32-true": cls(1e-6, 1e-4)}.get(precision, cls(1e-3, 3e-2))
        return cls(default.atol if atol is None else atol, default.rtol if rtol is None else rtol)

    def bound(self, reference: torch.Tensor) -> float:
        """Return the largest allowed absolute difference from `reference`."""
        return self.atol + self.rtol * _largest(reference)


@dataclass(frozen=True)
class Difference:
    """Difference between two strategies."""

    step: int  # counted from 1; 0 is the initial state
    kind: str  # one of `KINDS`, or `COPY`: another rank's copy of a parameter
    name: str = ""  # of the tensor; empty for numbers
    absolute: float = 0.0  # the greatest difference
    relative: float = 0.0  # the same divided by the largest element of the reference
    bound: float = 0.0  # what was allowed
    index: tuple[int, ...] | None = None  # of the greatest difference
    values: tuple[float, float] | None = None  # there, of the reference and of the other
    ratio: float | None = None  # by what factor the other tensor is a multiple of the reference; None: it is none
    note: str = ""  # said instead of the numbers

    @property
    def what(self) -> str:
        """The differing value, as text."""
        return f"{self.kind} of {self.name}" if self.name else self.kind


@dataclass
class Comparison:
    """Comparison of a strategy with the reference."""

    reference: Tape
    other: Tape
    worst: dict[str, float] = field(default_factory=dict)  # kind → greatest relative difference
    found: list[Difference] = field(default_factory=list)  # in the first step in which anything differs
    other_data: list[str] = field(default_factory=list)  # "epoch/micro-batch" whose tensors were not the same
    noise: dict[str, int] = field(default_factory=dict)  # parameter → elements left out, see `_Comparing.noisy`
    buffers: list[str] = field(default_factory=list)  # those that differ after the last step

    @property
    def equal(self) -> bool:
        """True if nothing differs by more than is allowed."""
        return not self.found


def compare(reference: Tape, other: Tape, tolerance: Tolerance) -> Comparison:
    """Compare two runs until the first step in which they differ. Reads the tensors of one step at a time."""
    comparing = _Comparing(Comparison(reference, other), tolerance)
    for step in range(min(len(reference.steps), len(other.steps))):
        comparing.take_step(step)
        if comparing.result.found:
            break
    result = comparing.result
    if not result.found and len(reference.steps) != len(other.steps):
        ours, theirs = len(reference.steps) - 1, len(other.steps) - 1
        note = f"{reference.label} made {ours} step(s), {other.label} {theirs}"
        result.found.append(Difference(min(ours, theirs) + 1, LOSS, note=note))
    result.noise = {name: int(mask.sum()) for name, mask in comparing.noisy.items() if mask.any()}
    return result


class _Comparing:
    """Comparison in progress."""

    def __init__(self, result: Comparison, tolerance: Tolerance) -> None:
        self.result = result
        # Where a parameter's gradients have been within the tolerance of zero, and not equal. An optimizer that divides
        # a gradient by its own size, as Adam does, makes whole steps of such noise.
        self.noisy: dict[str, torch.Tensor] = {}
        self._tolerance = tolerance
        self._step = 0

    def take_step(self, step: int) -> None:
        """Compare one step, in the order of computation."""
        result, self._step = self.result, step
        mine, other = result.reference.steps[step], result.other.steps[step]
        ours, theirs = result.reference.tensors(step), result.other.tensors(step)
        shared = mine.data.keys() & other.data.keys()
        result.other_data += sorted(place for place in shared if mine.data[place] != other.data[place])
        self._number(LOSS, mine.loss, other.loss)
        if ours.gradients and theirs.gradients:  # neither engine hides them
            self._gradients(ours, theirs)
        if mine.norm is not None and other.norm is not None:
            self._number(NORM, mine.norm, other.norm)
        elif ours.gradients and theirs.gradients:
            self._number(NORM, _norm(ours.gradients), _norm(theirs.gradients))
        self._parameters(ours, theirs)
        for rank, name in other.strayed:
            result.found.append(Difference(step, COPY, name, note=f"rank {rank}'s copy is not rank 0's"))
        result.buffers = [n for n, b in ours.buffers.items() if self._differs(b, theirs.buffers.get(n))]

    def _number(self, kind: str, mine: float | None, other: float | None) -> None:
        if mine is not None and other is not None:
            self._take(kind, "", torch.tensor(mine), torch.tensor(other))

    def _gradients(self, ours: StepTensors, theirs: StepTensors) -> None:
        for name in ours.parameters:
            like = ours.gradients.get(name, theirs.gradients.get(name))
            if like is None:
                continue
            # An unused parameter may have no gradient, or one of zeros.
            mine = ours.gradients.get(name, torch.zeros_like(like))
            other = theirs.gradients.get(name, torch.zeros_like(like))
            if not self._take(GRADIENT, name, mine, other):
                noise = (mine.double() != other.double()) & (mine.double().abs() <= self._tolerance.bound(mine))
                self.noisy[name] = self.noisy[name] | noise if name in self.noisy else noise

    def _parameters(self, ours: StepTensors, theirs: StepTensors) -> None:
        for name in dict.fromkeys([*ours.parameters, *theirs.parameters]):
            mine, other = ours.parameters.get(name), theirs.parameters.get(name)
            if mine is None or other is None:
                without = self.result.reference if mine is None else self.result.other
                self._note(PARAMETER, name, f"{without.label} has none")
                continue
            mask = self.noisy.get(name)
            if mask is not None and mask.shape == other.shape:
                other = torch.where(mask, mine, other)
            self._take(PARAMETER, name, mine, other)

    def _take(self, kind: str, name: str, mine: torch.Tensor, other: torch.Tensor) -> bool:
        """Compare two tensors and record the difference; return whether it is more than is allowed."""
        result = self.result
        if mine.shape != other.shape:
            where = f"{result.reference.label}, {tuple(other.shape)} under {result.other.label}"
            self._note(kind, name, f"its shape is {tuple(mine.shape)} under {where}")
            return True
        mine, other = mine.double(), other.double()
        apart, bound = _apart(mine, other), self._tolerance.bound(mine)
        absolute = float(apart.max()) if apart.numel() else 0.0
        largest = _largest(mine)
        relative = absolute / largest if largest else (math.inf if absolute else 0.0)
        telling = relative if largest > self._tolerance.atol or absolute > bound else 0.0
        result.worst[kind] = max(result.worst.get(kind, 0.0), telling)
        if absolute <= bound:
            return False
        index = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
        values = (float(mine[index]), float(other[index]))
        result.found.append(
            Difference(self._step, kind, name, absolute, relative, bound, index, values, _ratio(mine, other, bound))
        )
        return True

    def _note(self, kind: str, name: str, note: str) -> None:
        self.result.found.append(Difference(self._step, kind, name, note=note))

    def _differs(self, mine: torch.Tensor, other: torch.Tensor | None) -> bool:
        if other is None or mine.shape != other.shape:
            return True
        mine, other = mine.double(), other.double()
        return bool(mine.numel()) and float(_apart(mine, other).max()) > self._tolerance.bound(mine)


def notes(comparison: Comparison) -> list[str]:
    """Return other data, harmless differences, and values that were not compared."""
    said = []
    if comparison.other_data:
        epoch, _, place = comparison.other_data[0].partition("/")
        said.append(f"the data differ: micro-batch {place} of epoch {epoch} holds other values.")
    facts = comparison.other.facts
    expected = [name for name in comparison.buffers if name in facts.running_statistics]
    others = [name for name in comparison.buffers if name not in facts.running_statistics]
    if expected:
        said.append(
            f"running statistics differ ({_some(expected)}): each rank's layers see the micro-batches of that rank, "
            "and rank 0's are kept. They do not count as differences; evaluation uses them, training does not."
        )
    if others:
        said.append(
            f"buffers differ ({_some(others)}): each rank has its own, and rank 0's are kept. They do not count as "
            "differences unless they affect a loss."
        )
    if comparison.noise:
        some = [f"{count} of {name}" for name, count in comparison.noise.items()]
        said.append(
            f"not compared: elements whose gradients are rounding noise around zero ({_some(some)}), of which "
            f"{'/'.join(facts.optimizers)} may make full-sized steps."
        )
    return said


def _some(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _apart(mine: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return absolute differences; none where both are the same infinity or both NaN, infinite where only one is."""
    same = (mine == other) | (mine.isnan() & other.isnan())
    return torch.where(same, 0.0, (mine - other).abs().nan_to_num(math.inf))


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _ratio(mine: torch.Tensor, other: torch.Tensor, bound: float) -> float | None:
    square = float((mine * mine).sum())
    if mine.numel() < 2 or not square or not math.isfinite(square):
        return None
    ratio = float((mine * other).sum()) / square
    rest = float((other - ratio * mine).abs().max())
    return ratio if rest <= bound * max(1.0, abs(ratio)) and abs(ratio) > 1e-3 else None


def _norm(gradients: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
