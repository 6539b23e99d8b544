"""AdamW with states of low rank, as in GaLore (Zhao et al., 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError


class LowRankAdamW(Optimizer):
    """AdamW that projects the gradient of each matrix on `rank` directions and stores its states in that basis.

    The directions are the first singular vectors of a gradient. They are computed again every `update_every` steps.
    Parameters that are not matrices, and matrices with a side of at most `rank`, are trained by plain AdamW.

    Args:
        params: Parameters, or parameter groups.
        lr: Learning rate. Default: 0.001.
        betas: Decay rates of the two averages. Default: (0.9, 0.999).
        eps: Added to the denominator. Default: 1e-8.
        weight_decay: Decoupled weight decay. Default: 0.01.
        rank: Number of directions. Default: 128.
        update_every: Steps between two computations of the directions. Default: 200.
        scale: Factor of the projected updates. Default: 0.25.

    Raises:
        ConfigurationError: `rank` or `update_every` is not an integer of at least 1.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        rank: int = 128,
        update_every: int = 200,
        scale: float = 0.25,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "rank": rank, "update_every": update_every, "scale": scale})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, whose options may differ from those of other groups."""
        for option in ("rank", "update_every"):
            value = param_group.get(option, self.defaults[option])
            if type(value) is not int or value < 1:
                raise ConfigurationError(f"{option}={value!r}: expected an integer of at least 1.")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step, and return the loss of `closure`.

        Args:
            closure: Evaluates the model and returns the loss. Default: None.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)
        return loss

    def _step_one(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        # For a matrix (rows, columns) with rows >= columns, `projection` is (rank, columns), and both averages are
        # (rows, rank). New directions do not change the averages, as in GaLore.
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
        is_low_rank = grad.dim() == 2 and min(grad.shape) > group["rank"]
        if is_low_rank:
            if int(state["step"]) % group["update_every"] == 0:
                state["projection"] = _directions(grad, group["rank"])
            grad = _project(grad, state["projection"])
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(grad)
            state["exp_avg_sq"] = torch.zeros_like(grad)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        step = float(state["step"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        mean = state["exp_avg"].lerp_(grad, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (square.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
        step_size = group["lr"] / (1 - beta1**step)
        if is_low_rank:
            update = _project_back(mean / denominator, state["projection"], parameter)
            parameter.add_(update, alpha=-step_size * group["scale"])
        else:
            parameter.addcdiv_(mean, denominator, value=-step_size)


def _directions(grad: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the first `rank` singular vectors of the gradient's shorter side, one in each row."""
    left, _, right = torch.linalg.svd(grad.float(), full_matrices=False)
    chosen: torch.Tensor = right[:rank] if grad.shape[0] >= grad.shape[1] else left[:, :rank].T
    return chosen.to(grad.dtype).contiguous()


def _project(grad: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """Return the coordinates of the gradient along the directions."""
    return grad @ projection.T if grad.shape[0] >= grad.shape[1] else projection @ grad


def _project_back(update: torch.Tensor, projection: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return an update in the shape of the parameter `like`."""
    return update @ projection if like.shape[0] >= like.shape[1] else projection.T @ update
