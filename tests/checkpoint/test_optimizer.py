from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.checkpoint.snapshots import names_of, same
from trainwright.checkpoint import decode, encode, load_named_optimizer_state, named_optimizer_state
from trainwright.core.errors import CheckpointError

Make = Callable[[list[Any]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1), capturable=False, foreach=False),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    x = torch.arange(12.0).reshape(4, 3) / 12

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (module(x) - 1).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return loss

    for _ in range(steps):
        optimizer.step(closure)  # type: ignore[arg-type]  # torch asks for a float, and takes a tensor


def through_disk(tree: Any) -> Any:
    return decode(*encode(tree))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]], ids=str)
def test_training_goes_on_bit_for_bit_after_a_reload_with_the_parameters_in_any_order(
    name: str, order: list[int]
) -> None:
    first = model()
    optimizer = OPTIMIZERS[name](list(first.parameters()))
    train(first, optimizer, 3)
    tree = through_disk(named_optimizer_state(optimizer, names_of(first)))
    second = copy.deepcopy(first)
    parameters = list(second.parameters())
    resumed = OPTIMIZERS[name]([parameters[index] for index in order])
    load_named_optimizer_state(resumed, tree, names_of(second))
    train(first, optimizer, 3)
    train(second, resumed, 3)
    assert same(second.state_dict(), first.state_dict())


def saved() -> dict[str, Any]:
    module = model()
    optimizer = OPTIMIZERS["Adam"](list(module.parameters()))
    train(module, optimizer, 2)
    return named_optimizer_state(optimizer, names_of(module))


def _in_two_groups(tree: dict[str, Any]) -> None:
    group = tree["groups"][0]
    tree["groups"] = [{**group, "params": group["params"][:2]}, {**group, "params": group["params"][2:]}]


MISMATCHES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "'2.bias' is not in the checkpoint": lambda tree: tree["groups"][0]["params"].remove("2.bias"),
    "'4.bias' is in the checkpoint and not in this optimizer": lambda tree: tree["groups"][0]["params"].append(
        "4.bias"
    ),
    "'2.weight' has no saved state": lambda tree: tree["state"].pop("2.weight"),
    "incomplete.*class": lambda tree: tree.pop("class"),
    "holds the state of SGD, and this optimizer is Adam": lambda tree: tree.update({"class": "SGD"}),
    "2 parameter groups and now has 1": _in_two_groups,
}


@pytest.mark.parametrize("message", MISMATCHES)
def test_a_tree_of_another_optimizer_is_refused_and_changes_nothing(message: str) -> None:
    module = model()
    optimizer = OPTIMIZERS["Adam"](list(module.parameters()))
    train(module, optimizer, 1)
    tree, before = saved(), copy.deepcopy(optimizer.state_dict())
    MISMATCHES[message](tree)
    with pytest.raises(CheckpointError, match=message):
        load_named_optimizer_state(optimizer, tree, names_of(module))
    assert same(optimizer.state_dict(), before)


class Odd(torch.optim.Optimizer):
    """Keeps states of all kinds, none of the parameter's dtype."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def fill(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "step": torch.tensor(3.0),
                    "master": torch.full_like(p, 1 / 3, dtype=torch.float32),
                    "double": torch.full_like(p, 1 / 3, dtype=torch.float64),
                    "mask": torch.ones_like(p, dtype=torch.bool),
                    "nested": {"history": [torch.full((2,), 1 / 3, dtype=torch.float64)], "note": "text"},
                    "ordered": collections.OrderedDict(a=torch.full((2,), 1 / 3, dtype=torch.float64)),
                    "array": np.array([1 / 3, 2.0]),
                }


def test_states_of_any_dtype_and_kind_are_restored_as_they_were_saved() -> None:
    module = model().to(torch.bfloat16)
    optimizer, resumed = Odd(module.parameters()), Odd(module.parameters())
    optimizer.state["count"] = 3  # belongs to no parameter
    optimizer.fill()
    tree = through_disk(named_optimizer_state(optimizer, names_of(module)))
    seen = []
    resumed.register_load_state_dict_post_hook(lambda one: seen.append(one.state[module[0].weight]["double"].dtype))
    load_named_optimizer_state(resumed, tree, names_of(module))
    assert same(dict(resumed.state), dict(optimizer.state))
    assert seen == [torch.float64]  # a user's hook finds the restored state
    assert resumed.state[module[0].weight]["double"] is not tree["state"]["0.weight"]["double"]


def test_lbfgs_in_another_order_is_refused_since_its_history_is_one_flat_vector() -> None:
    module = model()
    optimizer = torch.optim.LBFGS(module.parameters())
    train(module, optimizer, 1)
    tree = named_optimizer_state(optimizer, names_of(module))
    other = torch.optim.LBFGS(list(module.parameters())[::-1])
    with pytest.raises(CheckpointError, match="LBFGS was saved with the parameters in the order"):
        load_named_optimizer_state(other, tree, names_of(module))
