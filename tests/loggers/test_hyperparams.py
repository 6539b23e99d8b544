from __future__ import annotations

import dataclasses
import enum
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainwright.loggers.hyperparams import plain


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Net:
    width: int = 8
    act: Any = torch.relu


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Net(act="gelu"), {"width": 8, "act": "gelu"}),
        (Namespace(a=1), {"a": 1}),
        (Colour.RED, "RED"),
        ((1, {2}), [1, [2]]),
        (np.arange(2), [0, 1]),
        (torch.tensor([1.5]), [1.5]),
        (torch.zeros(100), "tensor of shape (100,), torch.float32"),
        (torch.zeros(2, device="meta"), "tensor of shape (2,), torch.float32"),
        (np.longdouble(1.5), 1.5),
        (np.clongdouble(1 + 2j), "(1+2j)"),
        (torch.eye(2).to_sparse(), "tensor of shape (2, 2), torch.float32"),
        (Path("a") / "b", "a/b"),
        (nn := torch.nn.Linear, f"{nn.__module__}.Linear"),
        (torch.device("cpu"), "cpu"),
    ],
)
def test_values_become_plain(value: Any, expected: Any) -> None:
    assert plain(value) == expected
