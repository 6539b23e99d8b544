"""What torch says of parameters that a step has left out, in words of the model's own names."""

from __future__ import annotations

import re

from torch import nn

from trainwright.core.errors import TaskError
from trainwright.core.task import TaskModule

_MARK = "Expected to have finished reduction in the prior iteration"
_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
_MOST_NAMES = 10


def unused_parameters(error: BaseException, model: nn.Module) -> TaskError | None:
    """Return an error that names the parameters which a step has left out; None for errors about something else."""
    text = str(error)
    if not isinstance(error, RuntimeError) or not text.startswith(_MARK):
        return None
    found = _INDICES.search(text)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    places = [int(index) for index in found[1].split()] if found is not None else []
    names = [trained[place] for place in places if place < len(trained)]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    what = f": {', '.join(names[:_MOST_NAMES])}{more}" if names else ""
    option = (
        "DDPStrategy(find_unused_parameters=True) or strategy='ddp_find_unused_parameters_true', which look"
        if isinstance(model, TaskModule)
        else "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]), which looks"
    )
    return TaskError(
        f"the loss of {type(model).__name__}'s last step does not depend on some of its parameters{what}. The "
        "processes wait for the gradients of all of them. Let each step use them, freeze them "
        f"(requires_grad_(False)) or take them out; where steps differ in what they use: {option} for them in every "
        "step."
    )
