"""A running average of a task's weights in memory, which can be swapped with the weights.

Each rank averages its own shards without communication. Shards are gathered only when the average is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.swa_utils import get_swa_multi_avg_fn

from trainwright.core.errors import CheckpointError
from trainwright.core.run import Run
from trainwright.core.task import TaskModule
from trainwright.core.tree import is_sharded

AverageFunction = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
MultiAverageFunction = Callable[[list[torch.Tensor], list[torch.Tensor], int], None]
Tensors = Mapping[str, torch.Tensor]


class AveragedWeights:
    """Running average of a task's parameters and, optionally, of its floating-point buffers.

    The first update copies the weights. Before it there is no average. Updates are counted on the host. An update waits
    for the device only if the average is on another device than the weights.

    Args:
        task: the task whose weights are averaged. The weights must already be on their final device.
        trainer: gathers and shards weights. Default: None, for weights that are not sharded.
        device: device of the average. Default: None, which uses the device of each weight.
        use_buffers: average floating-point buffers of the state dict too. Integer buffers (counters) are never
            averaged. Default: True.
        avg_fn: `(average, current, num_averaged) -> new average` of one tensor. Default: None.
        multi_avg_fn: updates lists of tensors of one device and dtype in place. It is not called if `avg_fn` is passed
            too. Without both functions, all updates have equal weight. Default: None.

    Attributes:
        num_averaged: number of updates.
        swapped: True if the task holds the average, and this object the training weights.
    """

    def __init__(
        self,
        task: TaskModule,
        trainer: Run | None = None,
        *,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        avg_fn: AverageFunction | None = None,
        multi_avg_fn: MultiAverageFunction | None = None,
    ) -> None:
        self.num_averaged = 0
        self.swapped = False
        self._trainer = trainer
        self._avg_fn = avg_fn
        self._multi_avg_fn = multi_avg_fn or get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]  # torch's own
        # Name → index in `_owners` and `_other_weights`. Tied weights share an index.
        self._indices: dict[str, int] = {}
        self._owners: list[tuple[torch.nn.Module, str]] = []  # module and attribute of each averaged tensor
        self._find_weights(task, use_buffers)
        # The weights that the task does not hold: the average, or the training weights while `swapped`. Values of the
        # first update replace these copies.
        with torch.no_grad():
            self._other_weights = [value.detach().to(device, copy=True) for value in self._local_weights]
        self._is_whole = False  # `_other_weights` holds this rank's shards or, after `make_whole`, full tensors
        # Indices of tensors that one call of `multi_avg_fn` can update together.
        self._groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, value in enumerate(self._other_weights):
            self._groups.setdefault((value.device, value.dtype), []).append(index)

    def _find_weights(self, task: TaskModule, use_buffers: bool) -> None:
        saved_names = task.state_dict().keys()
        index_of: dict[int, int] = {}  # by identity, because a tied weight is one tensor under several names
        for prefix, module in task.named_modules(remove_duplicate=False):
            tensors = dict(module.named_parameters(recurse=False))
            if use_buffers:
                tensors |= module.named_buffers(recurse=False)
            for key, value in tensors.items():
                name = f"{prefix}.{key}" if prefix else key
                can_average = value.is_floating_point() or value.is_complex()
                if name not in saved_names or not can_average:
                    continue
                if id(value) not in index_of:
                    index_of[id(value)] = len(self._owners)
                    self._owners.append((module, key))
                self._indices[_plain(name)] = index_of[id(value)]

    @property
    def _weights(self) -> list[torch.Tensor]:
        # Looked up each time: a task may replace a buffer by another tensor.
        return [getattr(module, key) for module, key in self._owners]

    @property
    def _local_weights(self) -> list[torch.Tensor]:
        """This rank's shards of the task's weights. They share memory with the weights."""
        return [_local(value) for value in self._weights]

    @property
    def in_shards(self) -> bool:
        """True if this object holds shards: the task's weights are sharded, and `make_whole` was not called."""
        return not self._is_whole and any(map(is_sharded, self._weights))

    @torch.no_grad()
    def update(self) -> None:
        """Add the task's current weights to the average. Call it only while not swapped."""
        weights = self._local_weights
        for (device, _), indices in self._groups.items():
            averages = [self._other_weights[index] for index in indices]
            current = [weights[index].detach().to(device) for index in indices]
            if self.num_averaged == 0:
                for average, value in zip(averages, current, strict=True):
                    # torch_xla 2.9 shares the buffer of a plain copy, and the next step frees it.
                    average.copy_(value * 1)
            elif self._avg_fn is not None:
                for average, value in zip(averages, current, strict=True):
                    average.copy_(self._avg_fn(average, value, self.num_averaged))
            else:
                self._multi_avg_fn(averages, current, self.num_averaged)
        self.num_averaged += 1

    @torch.no_grad()
    def swap(self) -> None:
        """Swap the task's weights and the average exactly. A second call undoes it. No effect without an average.

        Works in inference mode too. The parameters stay the same objects, so optimizers and wrappers are not affected.
        """
        if self.num_averaged == 0:
            return
        for weight, stored in zip(self._local_weights, self._other_weights, strict=True):
            previous = stored.clone()
            stored.copy_(weight)
            weight.copy_(previous)
        self.swapped = not self.swapped

    def put_average_into(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return `state`, a state dict of the task, with averaged values.

        The values are references, not copies. If the task's weights are sharded and `state` contains full weights, the
        call is collective, and the values are full copies on the host, on the main rank only.
        """
        if self.num_averaged == 0:
            return dict(state)
        is_in_shards = any(map(is_sharded, state.values()))
        average = self._named(self._average, full=not is_in_shards)
        return {name: average.get(_plain(name), value) for name, value in state.items()}

    def average(self) -> dict[str, torch.Tensor]:
        """Return the average by name (tied weights under each name). Empty before the first update.

        Values are references, not copies. For sharded weights the call is collective and returns full copies on the
        host, with values on the main rank only.
        """
        return {} if self.num_averaged == 0 else self._named(self._average)

    def current(self) -> dict[str, torch.Tensor]:
        """Return the training weights by name. Empty before the first update.

        Values are references or, for sharded weights, gathered copies, as in `average`.
        """
        if self.num_averaged == 0:
            return {}
        return self._named(self._other_weights if self.swapped else self._local_weights)

    @property
    def _average(self) -> list[torch.Tensor]:
        return self._local_weights if self.swapped else self._other_weights

    @torch.no_grad()
    def restore(self, num_averaged: int, *, average: Tensors | None = None, current: Tensors | None = None) -> None:
        """Restore a saved state. Call it only while not swapped.

        Args:
            num_averaged: number of updates.
            average: values of the average. Default: None, unchanged.
            current: training weights, to copy into the task. Default: None, unchanged.

        Raises:
            CheckpointError: a name or shape differs from the task's.
        """
        assert not self.swapped  # or the average would be loaded into the training weights
        if average is not None:
            self._load(average, self._other_weights)
        if current is not None:
            self._load(current, self._local_weights)
        self.num_averaged = num_averaged

    def _load(self, values: Tensors, targets: list[torch.Tensor]) -> None:
        """Copy full values into this rank's shards."""
        differing_names = sorted(set(values) ^ set(self._indices))
        if differing_names:
            raise CheckpointError(
                "the averaged weights of the checkpoint and the weights of this task have different names: "
                f"{', '.join(differing_names[:5])}. Use the model and the use_buffers of the run that saved the "
                "checkpoint."
            )
        weights = self._weights
        for name, value in values.items():
            index = self._indices[name]
            weight = weights[index]
            if value.shape != weight.shape:
                raise CheckpointError(
                    f"the averaged {name} has the shape {tuple(value.shape)} in the checkpoint and "
                    f"{tuple(weight.shape)} in this task. Use the model of the run that saved the checkpoint."
                )
            if self._trainer is not None:
                value = self._trainer.cut_like(value, weight)
            targets[index].copy_(_local(value))

    @torch.no_grad()
    def make_whole(self) -> None:
        """Gather the shards that this object holds: those of the average or, while swapped, of the training weights.

        Call it before the task's weights are unsharded. Collective.
        """
        if self.in_shards:
            self._other_weights = self._gather(self._other_weights)
            self._is_whole = True

    def _as_sharded(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's values, as sharded tensors if the task's weights are sharded. Nothing is copied."""
        if not self.in_shards:
            return values
        from torch.distributed.tensor import DTensor

        sharded: list[torch.Tensor] = []
        for value, weight in zip(values, self._weights, strict=True):
            if isinstance(weight, DTensor):
                # Shape and stride are passed because shards of different ranks may differ in size. They are those of
                # the weight, so the check, which communicates, is not needed.
                value = DTensor.from_local(
                    value,
                    weight.device_mesh,
                    weight.placements,
                    run_check=False,
                    shape=weight.shape,
                    stride=tuple(weight.stride()),
                )
            sharded.append(value)
        return sharded

    def _gather(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._trainer is None:
            return values
        return [self._trainer.gather_tensor(value) for value in self._as_sharded(values)]

    def _named(self, values: list[torch.Tensor], *, full: bool = True) -> dict[str, torch.Tensor]:
        values = self._gather(values) if full else self._as_sharded(values)
        return {name: values[index].detach() for name, index in self._indices.items()}


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if is_sharded(value) else value


def _plain(name: str) -> str:
    """Remove the prefixes of `torch.compile` from a name: compiled and plain tasks share checkpoints."""
    return name.replace("_orig_mod.", "")
