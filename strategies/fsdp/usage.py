"""Whether every rank has used the same parameters in each step, without which gradients are mixed up."""

from __future__ import annotations

import zlib
from typing import Any

from trainwright.core.errors import TaskError
from trainwright.core.task import TaskModule
from trainwright.processes.process_group import Processes

_FIRST = 3  # steps that are all compared
_PERIOD = 64  # of those after them


class Usage:
    """Keeps one number of which parameters have had a gradient in each step, and compares it with the other ranks'.

    `fully_shard` sums the gradients of a unit as one vector of those that there are. A rank that has left one out adds
    the others to places where they do not belong, and torch 2.13 does not notice.

    Args:
        task: cut.
        processes: this rank among the others.
    """

    def __init__(self, task: TaskModule, processes: Processes) -> None:
        self._task, self._processes = task, processes
        self._parameters = dict(task.named_parameters())
        self._mark = self._steps = 0

    def note(self) -> None:
        """Take note of a step whose gradients are there. Collective, on the host, in some steps."""
        self._mark = zlib.crc32(bytes([p.grad is None for p in self._parameters.values()]), self._mark)
        self._steps += 1
        if self._steps <= _FIRST or self._steps % _PERIOD == 0:
            self.check()

    def check(self) -> None:
        """Compare with the other ranks. Collective, on the host.

        Raises:
            TaskError: on every rank, where some have used other parameters than this one, in this step or another since
                the last comparison.
        """
        marks = [mark for (mark,) in self._processes.gather_integers([self._mark])]
        if len(set(marks)) > 1:
            unused = self._processes.gather_object([n for n, p in self._parameters.items() if p.grad is None])
            raise TaskError(
                f"{type(self._task).__name__} has used other parameters on one rank than on another{_example(unused)}, "
                "so that their gradients were mixed up when the ranks were summed. Under FSDP each step must use the "
                "same ones on every rank: call the same units, and add 0 * parameter.sum() to the loss for what a "
                "batch has no use for; or use strategy='ddp_find_unused_parameters_true'."
            )


def _example(unused: list[Any]) -> str:
    everywhere = set.intersection(*map(set, unused))
    for rank, names in enumerate(unused):
        for name in names:
            if name not in everywhere:
                other = next(i for i, found in enumerate(unused) if name not in found)
                return f": in the last step rank {other} used {name}, and rank {rank} did not"
    return ""
