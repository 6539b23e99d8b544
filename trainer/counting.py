"""How many samples and tokens a group of micro-batches holds, over all ranks."""

from __future__ import annotations

from trainwright.core.state import Group
from trainwright.core.task import TaskModule
from trainwright.core.tree import batch_size
from trainwright.strategies.strategy import Strategy


def count_samples(group: Group, strategy: Strategy, *, exact: bool) -> int:
    """Return the samples of a group whose loader does not tell. With several data ranks and `exact`, collective.

    Args:
        group: this rank's.
        strategy: knows the other ranks.
        exact: something is decided by the number, so that ranks must agree on it; only then is it worth an exchange.
    """
    mine = sum(batch_size(batch) for batch in group.batches)
    if strategy.processes.world_size == 1:
        return mine
    return _sum(mine, strategy) if exact else mine * strategy.data_ranks.size


def count_tokens(group: Group, task: TaskModule, strategy: Strategy) -> int:
    """Return the tokens of a group, as the task counts them. Collective with several data ranks."""
    return _sum(sum(task.num_tokens(batch) for batch in group.batches), strategy)


def _sum(value: int, strategy: Strategy) -> int:
    return sum(of_rank[0] for of_rank in strategy.data_ranks.gather_integers([value]))
