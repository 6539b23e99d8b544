"""What DeepSpeed does to torch's Adagrad, put right."""

from __future__ import annotations

from typing import Any

import torch


def keep_own_adagrad(engine: Any) -> None:
    """Have an engine step the Adagrad that it was given, with its groups, and not the one it has made in its place.

    Torch's Adagrad makes its states when it is constructed. DeepSpeed 0.19.8 constructs another one over its vectors,
    all in one group and with the defaults of the first: rates of groups are lost, with several groups the first step
    fails, and schedules move what nothing steps.

    Args:
        engine: whose optimizer has just been made. One with another optimizer stays as it is.
    """
    given, zero = engine.basic_optimizer, engine.optimizer
    made = getattr(zero, "optimizer", None)
    if made is given or not isinstance(made, torch.optim.Adagrad):
        return
    given.state.clear()  # those of the parameters as they were before they were cut
    given.state.update(made.state)
    zero.optimizer = given
    if hasattr(zero, "_link_all_hp_params"):  # stages 1 and 2 have linked as many groups as the other one has
        zero._link_all_hp_params()
