"""What callbacks get to see of what a training step returned: a dict of tensors without a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainwright.core.tree import map_tensors


def outputs_of(output: Any) -> dict[str, Any]:
    """Return the `outputs` of `on_train_batch_end`: what keeps it keeps neither the graph nor a buffer of the step.

    Args:
        output: what `training_step` returned: the loss alone becomes `{"loss": …}`, None (the micro-batch was skipped)
            an empty dict; anything else that is not a mapping is under `"output"`.

    Returns:
        A dict whose tensors are detached. The loss is a copy, because compiled steps reuse its memory; it is not
        weighted and not divided by the number of micro-batches.
    """
    if output is None:
        return {}
    if isinstance(output, torch.Tensor):
        return {"loss": output.detach().clone()}
    if not isinstance(output, Mapping):
        return {"output": map_tensors(torch.Tensor.detach, output)}
    found = {name: map_tensors(torch.Tensor.detach, value) for name, value in output.items()}
    if isinstance(found.get("loss"), torch.Tensor):
        found["loss"] = found["loss"].clone()
    return found
