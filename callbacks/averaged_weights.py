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
    """Average of a task's parameters, and optionally of its floating-point buffers, over the updates so far.

    The first update copies the weights. Before it there is no average. Updates are counted on the host. An update waits
    for the device only if the average is on another device than the weights.

    Args:
        task: the task whose weights are averaged. The weights must already be on their final device.
        run: gathers and shards weights. Default: None, for weights that are not sharded.
        device: device of the average. Default: None, which uses the device of each weight.
        use_buffers: average floating-point buffers of the state dict too. Integer buffers (counters) are never
            averaged. Default: True.
        avg_fn: `(average, current, num_averaged) -> new average` of one tensor. Default: None.
        multi_avg_fn: updates lists of tensors of one device and dtype in place, instead of `avg_fn`. Without both
            functions, all updates have equal weight. Default: None.

    Attributes:
        num_averaged: number of updates.
        swapped: the task holds the average, and this object the training weights.
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
        self._places: dict[str, int] = {}  # tied weights share an index
        self._owners: list[tuple[torch.nn.Module, str]] = []
        self._find(task, use_buffers)
        with torch.no_grad():
            self._own = [value.detach().to(device, copy=True) for value in self._live]
        self._whole = False
        self._alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, value in enumerate(self._own):
            self._alike.setdefault((value.device, value.dtype), []).append(place)

    def _find(self, task: TaskModule, use_buffers: bool) -> None:
        saved = task.state_dict().keys()
        known: dict[int, int] = {}
        for prefix, module in task.named_modules(remove_duplicate=False):
            found = dict(module.named_parameters(recurse=False))
            if use_buffers:
                found |= module.named_buffers(recurse=False)
            for key, value in found.items():
                name = f"{prefix}.{key}" if prefix else key
                if name in saved and (value.is_floating_point() or value.is_complex()):
                    if id(value) not in known:
                        known[id(value)] = len(self._owners)
                        self._owners.append((module, key))
                    self._places[_plain(name)] = known[id(value)]

    @property
    def _held(self) -> list[torch.Tensor]:
        # Looked up each time: a task may replace a buffer by another tensor.
        return [getattr(module, key) for module, key in self._owners]

    @property
    def _live(self) -> list[torch.Tensor]:
        """Return this rank's shards of the task's weights. They share memory with the weights."""
        return [_local(value) for value in self._held]

    @property
    def in_shards(self) -> bool:
        """True if the average is sharded over several ranks."""
        return not self._whole and any(map(is_sharded, self._held))

    @torch.no_grad()
    def update(self) -> None:
        """Add the task's current weights to the average."""
        live = self._live
        for places in self._alike.values():
            averages = [self._own[place] for place in places]
            current = [live[place].detach().to(self._own[place].device) for place in places]
            if self.num_averaged == 0:
                for average, value in zip(averages, current, strict=True):
                    average.copy_(
                        value * 1
                    )  # torch_xla 2.9 shares the buffer of a plain copy, and the next step frees it
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
        for live, own in zip(self._live, self._own, strict=True):
            held = own.clone()
            own.copy_(live)
            live.copy_(held)
        self.swapped = not self.swapped

    def put_average_into(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return `state`, a state dict of the task, with averaged values. These are references, not copies.

        Collective if the task's weights are sharded and `state` contains full weights.
        """
        if self.num_averaged == 0:
            return dict(state)
        cut = any(map(is_sharded, state.values()))
        average = self._named(self._live if self.swapped else self._own, whole=not cut)
        return {name: average.get(_plain(name), value) for name, value in state.items()}

    def average(self) -> dict[str, torch.Tensor]:
        """Return the average by name (tied weights under each name). Empty before the first update.

        Values are references, not copies. For sharded weights the call is collective and returns full copies on the
        host, with values on the main rank only.
        """
        return self._named(self._live if self.swapped else self._own) if self.num_averaged else {}

    def current(self) -> dict[str, torch.Tensor]:
        """Return the training weights by name. Empty before the first update.

        Values are references or, for sharded weights, gathered copies, as in `average`.
        """
        return self._named(self._own if self.swapped else self._live) if self.num_averaged else {}

    @torch.no_grad()
    def restore(self, num_averaged: int, *, average: Tensors | None = None, current: Tensors | None = None) -> None:
        """Restore a saved state.

        Args:
            num_averaged: number of updates.
            average: values of the average. Default: None, unchanged.
            current: training weights, to copy into the task. Default: None, unchanged.

        Raises:
            CheckpointError: a name or shape differs from the task's.
        """
        for values, targets in ((average, self._own), (current, self._live)):
            if values is None:
                continue
            strange = sorted(set(values) ^ set(self._places))
            if strange:
                raise CheckpointError(
                    "the averaged weights of the checkpoint and the weights of this task have different names: "
                    f"{', '.join(strange[:5])}. Use the model and the use_buffers of the run that saved the "
                    "checkpoint."
                )
            held = self._held
            for name, value in values.items():
                place = self._places[name]
                if value.shape != held[place].shape:
                    raise CheckpointError(
                        f"the averaged {name} has the shape {tuple(value.shape)} in the checkpoint and "
                        f"{tuple(held[place].shape)} in this task. Use the model of the run that saved the checkpoint."
                    )
                piece = value if self._trainer is None else self._trainer.cut_like(value, held[place])
                targets[place].copy_(_local(piece))
        self.num_averaged = num_averaged
        self.swapped = False

    @torch.no_grad()
    def make_whole(self) -> None:
        """Gather the shards of the average. Call it before the task's weights are unsharded. Collective."""
        if self.in_shards:
            self._own = self._collect(self._own)
            self._whole = True

    def _as_held(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's values, as sharded tensors if the task's weights are sharded. Nothing is copied."""
        if not self.in_shards:
            return values
        from torch.distributed.tensor import DTensor

        def as_held(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
            if not isinstance(like, DTensor):
                return value
            mesh = like.device_mesh
            placements = like.placements
            stride = tuple(like.stride())
            return DTensor.from_local(value, mesh, placements, run_check=False, shape=like.shape, stride=stride)

        return [as_held(value, like) for value, like in zip(values, self._held, strict=True)]

    def _collect(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._trainer is None:
            return values
        return [self._trainer.gather_tensor(value) for value in self._as_held(values)]

    def _named(self, values: list[torch.Tensor], *, whole: bool = True) -> dict[str, torch.Tensor]:
        values = self._collect(values) if whole else self._as_held(values)
        return {name: values[place].detach() for name, place in self._places.items()}


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if is_sharded(value) else value


def _plain(name: str) -> str:
    """Remove the prefixes of `torch.compile` from a name: compiled and plain tasks share checkpoints."""
    return name.replace("_orig_mod.", "")
