"""The training step of a replica: gradients averaged over the live replicas, and the state of a rejoining one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from trainwright.checkpoint.format.optimizer import load_named_optimizer_state, named_optimizer_state
from trainwright.core.errors import TrainwrightError
from trainwright.core.state import Group
from trainwright.core.tree import local_part, map_tensors
from trainwright.strategies.steps.gradients import stack_counts, without_loss
from trainwright.strategies.steps.step import AutomaticStep, StepParts
from trainwright.strategies.torchft.live_replicas import LiveReplicas


class TorchFTStep(AutomaticStep):
    """A step whose gradients are averaged over the live replicas.

    Two averages follow each other. The inherited step averages over the ranks of this replica (`parts.ranks`), and
    `LiveReplicas.average` averages the results over the replicas, weighted by the data that each has processed.

    `stepped` (see `Step`) is True for a group that this replica has passed over without training, because the other
    replicas have completed its step.

    Args:
        parts: See `StepParts`.
        replica: Number of this replica.

    Attributes:
        live: Connection to the live replicas. The replica sets it before the first training step. None in evaluations.
        _weight: Weight of this replica in the average of the current step: its number of micro-batches, or of items if
            the task defines `num_items`, without padding. Micro-batches of a group without padding are counted on one
            rank, otherwise they are summed over the replica's ranks. Only the ratio of the replicas' weights matters:
            all replicas have groups with padding at the same step, and equal numbers of ranks.
    """

    def __init__(self, parts: StepParts, replica: int) -> None:
        super().__init__(parts)
        self.live: LiveReplicas | None = None
        self._replica = replica
        self._weight = 0.0

    # The state that a rejoining replica receives

    def state_to_send(self) -> dict[str, Any]:
        """Return the progress and this rank's shards of the training state.

        torchft sends it to the process with the same rank in the rejoining replica, which has the same shards.
        """
        names = self._parameter_names()
        weights = {name: local_part(tensor) for name, tensor in _tensors_of(self.task)}
        optimizers = []
        for optimizer in self.optimizers:
            optimizers.append(map_tensors(local_part, named_optimizer_state(optimizer, names)))
        return {
            "model": weights,
            "optimizers": optimizers,
            "schedulers": [config.scheduler.state_dict() for config in self.run.lr_scheduler_configs],
            "progress": self.run.state.to_dict(),
        }

    def catch_up(self) -> bool:
        """Load a received state as soon as this replica has reached its position in the data.

        Returns:
            True if this replica can train: no state was received, or it is loaded now. False if the state is of a later
            position. The data before that position must be passed over first.

        Raises:
            TrainwrightError: This replica is at a later position than the state.
        """
        live = self.live
        assert live is not None  # set before the first training step
        state = live.received
        if state is None:
            return True
        position = self.run.state.batches
        position_of_state = state["progress"]["batches"]
        if position < position_of_state:
            return False
        if position > position_of_state:
            raise TrainwrightError(
                f"replica {self._replica} has consumed {position} batches, but a replica with more "
                f"steps has consumed only {position_of_state}. Start this replica again without a checkpoint."
            )
        self._load_weights(state["model"])
        self._load_optimizers(state["optimizers"])
        for config, scheduler_state in zip(self.run.lr_scheduler_configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(scheduler_state)
        live.received = None
        return True

    def _load_weights(self, shards: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in _tensors_of(self.task):
                local_part(tensor).copy_(shards[name])

    def _load_optimizers(self, trees: list[dict[str, Any]]) -> None:
        """Load trees of `named_optimizer_state` whose tensors are shards."""
        parameters = dict(self.task.named_parameters())
        names = self._parameter_names()
        for optimizer, tree in zip(self.optimizers, trees, strict=True):
            state = {}
            for name, values in tree["state"].items():
                parameter = parameters[name]
                state[name] = {key: _shard_as(value, parameter) for key, value in values.items()}
            load_named_optimizer_state(optimizer, {**tree, "state": state}, names)

    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return {parameter: name for name, parameter in self.task.named_parameters()}

    # The step

    def forward_backward(self, group: Group) -> torch.Tensor | None:
        live = self.live
        assert live is not None  # set before the first training step
        live.join()
        if not self.catch_up():
            self.stepped = True
            return None
        self.stepped = False
        if group.weights is None:
            self._weight = float(len(group.batches))
        else:
            self._weigh_real_batches(group)
        loss = super().forward_backward(group)
        while not live.average(self.task.parameters(), self._weight):
            # A replica has failed. Average again over the remaining ones, with the same gradients.
            live.join()
            if not self.catch_up():
                # The other replicas have completed this step without this one.
                self.stepped = True
                self.discard_gradients()
                return None
        return loss

    def _weigh_real_batches(self, group: Group) -> None:
        """Give each micro-batch that is not padding the same weight in the mean over this replica's ranks.

        The weights of `group` hold for the mean over the ranks of all replicas.
        """
        assert group.weights is not None  # checked by the caller
        ranks = self.parts.ranks
        is_real = torch.tensor([float(weight > 0) for weight in group.weights], device=self.parts.device)
        self._weight = float(ranks.sum(is_real.sum()))
        # A replica that has only padding has weight 0: avoid 0 / 0.
        group.weights = (is_real * ranks.size / max(self._weight, 1.0)).tolist()

    def _weigh_items(self, group: Group) -> Sequence[Any]:
        assert self._items is not None  # checked by the caller
        counts = stack_counts([self._items(batch) for batch in group.batches], self.parts.device)
        if group.weights is not None:
            is_real = [float(weight > 0) for weight in group.weights]
            counts = counts * torch.tensor(is_real, dtype=counts.dtype, device=counts.device)
        self._weight = float(self.parts.ranks.sum(counts.sum()))
        return super()._weigh_items(group)

    def _skip_batches(self, skipped: list[int], group: Group, weights: object, total: object) -> Any:
        raise without_loss(type(self.task).__name__, self._replica)


def _tensors_of(task: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from task.named_parameters()
    yield from task.named_buffers()


def _shard_as(value: object, parameter: torch.Tensor) -> object:
    """Return a received shard of an optimizer state as a DTensor with the layout of its parameter.

    Values that are not sharded like the parameter, such as a step count, and values of parameters that are not sharded
    are returned unchanged. A state is sharded like its parameter if it has the size of the parameter's shard.
    """
    shard = local_part(parameter)
    is_sharded = shard is not parameter
    if not is_sharded or not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0 or value.shape != shard.shape:
        return value
    layout: Any = parameter
    return type(layout.data).from_local(
        value.to(layout.device),
        layout.device_mesh,
        layout.placements,
        run_check=False,
        shape=layout.shape,
        stride=layout.stride(),
    )
