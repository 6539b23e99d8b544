"""A model as one rank of a tensor-parallel group has it, to count what that rank needs."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from torch import nn

from trainwright.core.errors import ConfigurationError
from trainwright.strategies.fsdp.layers.check import PlannedMesh
from trainwright.strategies.fsdp.layers.plan import SplitLayers
from trainwright.strategies.fsdp.layers.ready import ready_plan

_ENDS = ("embedding", "colwise_gathered")  # styles of layers that are called with whole tensors, or make such


def one_ranks_share(model: nn.Module, tp: int, *, ends: bool = True) -> nn.Module | None:
    """Return a copy of a model whose layers are as narrow as on one rank, by the model's ready plan.

    Args:
        model: on the meta device; of the copy only shapes are right.
        tp: ranks over which layers are split.
        ends: False leaves the embedding and the layer that makes logits whole: then the copy can be called, and
            autograd keeps of it what it keeps on a rank.

    Returns:
        None where there is no ready plan, or it cannot split the model over so many ranks.
    """
    share = copy.deepcopy(model)
    task: Any = share  # of a task, names of modules are all that is asked
    mesh: Any = PlannedMesh({"tp": tp})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a vocabulary that stays whole: then it does in the copy too
            plan = ready_plan(share, tp)
        layers = SplitLayers(task, {name: style for name, style in plan.items() if ends or style not in _ENDS}, mesh)
    except ConfigurationError:
        return None
    layers.narrow()
    return share
