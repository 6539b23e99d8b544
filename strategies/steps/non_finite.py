"""Checks that loss and gradients are finite. Results are read immediately, or recorded on the device and read later."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.steps.gradients import parameters_of
from trainwright.strategies.steps.step import Step


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A step whose loss or gradients are not finite on one rank.

    Attributes:
        loss: This rank's weighted loss.
        parameters: Names of the parameters whose gradients contain a NaN or an infinity, in the task's order.
    """

    loss: float
    parameters: list[str]


def is_finite(step: Step, loss: torch.Tensor, ranks: DataRanks) -> bool:
    """Return whether loss and gradients are finite on every rank.

    Must be called between `forward_backward` and `optimizer_step`. With loss scaling, only the loss is checked, because
    the scaler handles gradients with overflow. Collective. Waits for the device to read one flag.

    Args:
        step: The step.
        loss: The result of `forward_backward`.
        ranks: The data-parallel ranks of the run.
    """
    finite = loss.isfinite()
    if step.scaler is None:
        # Unlike the 2-norm, whose squares may overflow, the maximum is finite if and only if all elements are.
        gradients = [values for _, values in step.held_gradients() if values.numel()]
        largest = nn.utils.get_total_norm(gradients, float("inf")).to(loss.device)
        finite = finite & largest.isfinite()
    return not ranks.sum((~finite).float()).item()


def explain(step: Step, loss: torch.Tensor) -> NonFinite:
    """Describe the values of this rank in a step that is not finite. Not collective. Waits for the device."""
    ids = []
    flags = []
    for parameter, values in step.held_gradients():
        ids.append(id(parameter))
        flags.append(values.isfinite().all().to(loss.device))
    bad: set[int] = set()
    if flags:
        finite = torch.stack(flags).tolist()  # one copy to the host for all parameters
        bad = {key for key, is_finite in zip(ids, finite, strict=True) if not is_finite}
    names = [name for name, parameter in step.task.named_parameters() if id(parameter) in bad]
    return NonFinite(float(loss), names)


def reading_waits(device: torch.device) -> bool:
    """Return whether the host waits for the device when it reads a value. False for the CPU."""
    return device.type != "cpu"


class FirstNonFinite:
    """Record of the first step whose loss or gradients were not finite: number, loss, and one flag per parameter.

    The record is stored on the device, so that `record` does not wait for the device or for other ranks.

    Args:
        step: The step whose loss and gradients are checked.
    """

    def __init__(self, step: Step) -> None:
        device = step.parts.device
        self._step = step
        # By id, because the == of tensors compares their values: index of the parameter in `_flags`.
        self._index = {id(parameter): i for i, parameter in enumerate(parameters_of(step.optimizers))}
        # Indices of the parameters with gradients in the last call of `record`, and the same on the device. Kept,
        # because they seldom change and a copy to the device takes time. None before the first call.
        self._indices: tuple[int, ...] = ()
        self._indices_on_device: torch.Tensor | None = None
        # The record: the step's number, or -1 if there was none; its loss; one flag per parameter.
        self._number = torch.full((), -1, dtype=torch.int64, device=device)
        self._loss = torch.zeros((), device=device)
        self._flags = torch.zeros(len(self._index), dtype=torch.bool, device=device)

    def record(self, loss: torch.Tensor, number: int) -> None:
        """Check a step between `forward_backward` and `optimizer_step`. With loss scaling, only the loss is checked.

        Does not wait for the device: the record is replaced by `torch.where`, and not by a condition in Python.

        Args:
            loss: The result of `forward_backward`.
            number: Number of the step.
        """
        flags = self._bad_gradients()
        is_first = (self._number < 0) & (~loss.isfinite() | flags.any())
        self._number = torch.where(is_first, number, self._number)
        self._loss = torch.where(is_first, loss.float(), self._loss)
        self._flags = torch.where(is_first, flags, self._flags)

    def _bad_gradients(self) -> torch.Tensor:
        """Return a flag per parameter that is True if its gradient contains a NaN or an infinity."""
        flags = torch.zeros_like(self._flags)
        if self._step.scaler is not None:  # which handles overflow
            return flags
        indices = []
        gradients = []
        for parameter, values in self._step.held_gradients():
            if values.numel():
                indices.append(self._index[id(parameter)])
                gradients.append(values)
        if not gradients:
            return flags
        if self._indices_on_device is None or tuple(indices) != self._indices:
            self._indices = tuple(indices)
            self._indices_on_device = torch.tensor(indices, device=flags.device)
        # Unlike the 2-norm, the maximum is finite if and only if all elements are.
        largest = torch._foreach_norm(gradients, float("inf"))
        finite = torch.stack([value.to(flags.device, torch.float32) for value in largest]).isfinite()
        return flags.index_put_((self._indices_on_device,), ~finite)

    def is_seen(self, ranks: DataRanks) -> bool:
        """Return whether any step was not finite on any rank. Collective. Waits for the device to read one flag."""
        return bool(ranks.sum((self._number >= 0).float()).item())

    def read(self) -> tuple[int, NonFinite] | None:
        """Return the number and description of this rank's first step that was not finite, or None.

        Waits for the device.
        """
        number = int(self._number)
        if number < 0:
            return None
        flags = self._flags.tolist()
        names = []
        for name, parameter in self._step.task.named_parameters():
            index = self._index.get(id(parameter))  # None if no optimizer has the parameter
            if index is not None and flags[index]:
                names.append(name)
        return number, NonFinite(float(self._loss), names)
