"""Compare two recorded runs step by step, until the first step in which they differ."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from trainwright.cli.parity.parity_tape import GRADIENT, PARAMETER, Tape

LOSS, NORM, COPY = "loss", "gradient norm", "copy"
KINDS = (LOSS, NORM, GRADIENT, PARAMETER)


@dataclass(frozen=True)
class Tolerance:
    """Allowed difference of two tensors: `atol + rtol × the largest absolute element of the reference`.

    One bound for each tensor, because rounding in a sum is relative to its largest terms.
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
    """Value that differs by more than the tolerance."""

    kind: str  # one of `KINDS`, or `COPY` for another rank's copy of a parameter
    name: str  # of the parameter; empty for the loss and the norm
    text: str

    @property
    def what(self) -> str:
        """The differing value, as text."""
        return f"{self.kind} of {self.name}" if self.name else self.kind


@dataclass
class Comparison:
    """Comparison of a run with the reference."""

    reference: Tape
    other: Tape
    tolerance: Tolerance
    step: int = 0  # the last compared step: the first one that differs; 0 is the initial state
    found: list[Difference] = field(default_factory=list)  # differences of that step, in the order of computation
    worst: dict[str, float] = field(default_factory=dict)  # kind → greatest relative difference
    other_data: list[str] = field(default_factory=list)  # "epoch/micro-batch" with other values
    # Parameter → elements whose gradients are within the tolerance of zero and not equal. They are not compared: an
    # optimizer that divides a gradient by its size, as Adam does, makes full steps of such rounding noise.
    noise: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """True if nothing differs by more than the tolerance."""
        return not self.found

    def notes(self) -> list[str]:
        """Return sentences on micro-batches with other values, and on elements that are not compared."""
        notes = []
        if self.other_data:
            epoch, _, place = self.other_data[0].partition("/")
            notes.append(f"the data differ: micro-batch {place} of epoch {epoch} holds other values.")
        counts = {name: int(mask.sum()) for name, mask in self.noise.items() if mask.any()}
        if counts:
            some = ", ".join(f"{count} of {name}" for name, count in list(counts.items())[:3])
            more = f" and {len(counts) - 3} more" if len(counts) > 3 else ""
            notes.append(f"not compared: elements whose gradients are rounding noise around zero ({some}{more}).")
        return notes

    def compare_step(self, step: int) -> None:
        """Compare one step, in the order of computation."""
        self.step = step
        mine, other = self.reference.steps[step], self.other.steps[step]
        shared = mine.data.keys() & other.data.keys()
        self.other_data += sorted(place for place in shared if mine.data[place] != other.data[place])
        self._compare_numbers(LOSS, mine.loss, other.loss)
        self._compare_gradients(self.reference.tensors(step, GRADIENT), self.other.tensors(step, GRADIENT))
        self._compare_numbers(NORM, mine.norm, other.norm)
        self._compare_parameters(self.reference.tensors(step, PARAMETER), self.other.tensors(step, PARAMETER))
        for rank, name in other.copies:
            self.found.append(Difference(COPY, name, f"rank {rank}'s copy is not rank 0's"))

    def _compare_numbers(self, kind: str, mine: float | None, other: float | None) -> None:
        if mine is not None and other is not None:
            self._compare(kind, "", torch.tensor(mine), torch.tensor(other))

    def _compare_gradients(self, ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
        if not ours or not theirs:
            return  # an engine does not expose them
        for name in dict.fromkeys([*ours, *theirs]):
            # An unused parameter may have no gradient, or one of zeros.
            mine = ours[name] if name in ours else torch.zeros_like(theirs[name])
            other = theirs[name] if name in theirs else torch.zeros_like(mine)
            if self._compare(GRADIENT, name, mine, other):
                noise = (mine != other) & (mine.abs() <= self.tolerance.bound(mine))
                self.noise[name] = self.noise[name] | noise if name in self.noise else noise

    def _compare_parameters(self, ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
        for name in dict.fromkeys([*ours, *theirs]):
            if name not in ours or name not in theirs:
                without = self.other if name in ours else self.reference
                self.found.append(Difference(PARAMETER, name, f"{without.label} has none"))
                continue
            mine, other = ours[name], theirs[name]
            if name in self.noise and self.noise[name].shape == mine.shape == other.shape:
                other = torch.where(self.noise[name], mine, other)
            self._compare(PARAMETER, name, mine, other)

    def _compare(self, kind: str, name: str, mine: torch.Tensor, other: torch.Tensor) -> bool:
        """Compare two tensors and record a difference; return whether they are equal within the tolerance."""
        ours, theirs = self.reference.label, self.other.label
        if mine.shape != other.shape:
            text = f"its shape is {tuple(mine.shape)} under {ours}, {tuple(other.shape)} under {theirs}"
            self.found.append(Difference(kind, name, text))
            return False
        mine, other = mine.double(), other.double()
        gaps, bound, largest = _gaps(mine, other), self.tolerance.bound(mine), _largest(mine)
        gap = float(gaps.max()) if gaps.numel() else 0.0
        relative = gap / largest if largest else (math.inf if gap else 0.0)
        if gap > bound or largest > self.tolerance.atol:  # otherwise both are close to zero
            self.worst[kind] = max(self.worst.get(kind, 0.0), relative)
        self.worst.setdefault(kind, 0.0)
        if gap <= bound:
            return True
        index = tuple(int(i) for i in torch.unravel_index(gaps.argmax(), gaps.shape))
        text = (
            f"{ours} {float(mine[index]):.8g}, {theirs} {float(other[index]):.8g}"
            f"{f' at {list(index)}' if index else ''}; greatest difference {gap:.3g} (relative {relative:.3g}), "
            f"allowed {bound:.3g}"
        )
        self.found.append(Difference(kind, name, text))
        return False


def compare(reference: Tape, other: Tape, tolerance: Tolerance) -> Comparison:
    """Compare two runs until the first step in which they differ. Reads the tensors of one step at a time."""
    result = Comparison(reference, other, tolerance)
    for step in range(min(len(reference.steps), len(other.steps))):
        result.compare_step(step)
        if result.found:
            return result
    ours, theirs = len(reference.steps) - 1, len(other.steps) - 1
    if ours != theirs:
        result.step += 1
        result.found.append(Difference(LOSS, "", f"{reference.label} made {ours} step(s), {other.label} {theirs}"))
    return result


def _gaps(mine: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return absolute differences: 0 where both are the same infinity or both NaN, infinite where only one is."""
    same = (mine == other) | (mine.isnan() & other.isnan())
    return torch.where(same, 0.0, (mine - other).abs().nan_to_num(math.inf))


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
