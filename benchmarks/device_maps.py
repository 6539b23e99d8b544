"""How long a device map of a large model takes, beside Accelerate's: a part of `bigmodel.py`.

Models are on the meta device; a figure is the median over interleaved rounds. Garbage that earlier calls have left is
collected before each map: one collection over the objects of 100,000 layers takes half as long as their map.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

from measuring import Bars, interleave, print_table
from torch import nn

from trainwright import infer_auto_device_map, init_empty_weights

_SLOWEST_PEER = 4000  # layers; beyond, the peer's quadratic time would take minutes


class Block(nn.Module):
    """What a layer of a language model looks like: 12 modules, 11 of them with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.ModuleDict({name: nn.Linear(8, 8) for name in "qkvo"})
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


def flat(num_layers: int) -> nn.Module:
    """Return `num_layers` linear layers in a row."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers)))


def deep(num_blocks: int) -> nn.Module:
    """Return `num_blocks` blocks in a row."""
    return nn.Sequential(*(Block() for _ in range(num_blocks)))


def budgets_for(model: nn.Module) -> dict[int | str, int]:
    """Return budgets of 8 accelerators and a host that a model just fits into."""
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {**dict.fromkeys(range(8), total // 10), "cpu": total}


def seconds(function: Callable[..., Any], model: nn.Module, budgets: dict[int | str, int]) -> float:
    """Return how long one map takes."""
    gc.collect()
    start = time.perf_counter()
    function(model, max_memory=dict(budgets))
    return time.perf_counter() - start


def measure_maps(rounds: int, bars: Bars) -> None:
    """Measure maps of some thousand and of 100,000 layers."""
    with init_empty_weights():
        models = {
            "4,000 layers": flat(4000),
            "1,000 blocks": deep(1000),
            "100,000 layers": flat(100_000),
        }
    rows, medians = [], dict[str, float]()
    for name, model in models.items():
        num_modules = sum(1 for _ in model.modules())
        budgets = budgets_for(model)
        contenders: dict[str, Callable[[], float]] = {"ours": partial(seconds, infer_auto_device_map, model, budgets)}
        if find_spec("accelerate") and num_modules <= 3 * _SLOWEST_PEER:
            import accelerate

            contenders["theirs"] = partial(seconds, accelerate.infer_auto_device_map, model, budgets)
        found = interleave(contenders, rounds)
        medians[name] = statistics.median(found["ours"])
        theirs = f"{statistics.median(found['theirs']):.3f}" if "theirs" in found else "–"
        rows.append([name, str(num_modules), f"{medians[name]:.3f}", f"{min(found['ours']):.3f}", theirs])
    print_table(["infer_auto_device_map", "modules", "median s", "least s", "Accelerate, median s"], rows)
    bars.add("device map of 4,000 layers", medians["4,000 layers"], 0.15, "s")
    growth = medians["100,000 layers"] / medians["4,000 layers"] / 25
    bars.add("time per module, 100,000 layers over 4,000", growth, 1.5, "times")
