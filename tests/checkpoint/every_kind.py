"""A snapshot in which every kind of value and tensor occurs, the same on every machine."""

from __future__ import annotations

import datetime
import math
import pathlib
import zoneinfo
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import torch

from trainwright.checkpoint import Snapshot
from trainwright.core.duration import Duration

# Literally: what is stored for good does not grow with `TrainState`.
_PROGRESS: dict[str, Any] = {
    "step": 12, "batches": 24, "epoch": 1, "batch_in_epoch": 4, "step_in_epoch": 0, "samples": 48,
    "samples_in_epoch": 0, "tokens": 0, "seconds": 1.5, "epoch_done": False,
}  # fmt: skip


def every_value() -> dict[str, Any]:
    """Return one value at least of each type that a tree can hold."""
    return {
        "plain": [None, True, 7, -0.0, 1e-300, "ü\n", [], {}, {"a": {"b": [1.5]}}],
        "edges": [2**64 - 1, -(2**63), 2**64, -(2**200), 0.1],
        "not finite": [math.nan, math.inf, -math.inf],
        "complex": [complex(1, -2), complex(math.nan, math.inf)],
        "text": ["\ud800 alone", "$"],
        "bytes": b"\x00\xff",
        "tuple": (1, (2, [3]), ()),
        "sets": [{3, 1, 2}, frozenset({"b", "a"}), set()],
        "dicts": [{1: "int", (2, None): "tuple"}, {"$": "tensor"}, OrderedDict(b=1, a=2), Counter("aab")],
        "defaultdicts": [defaultdict(list, {"a": [1]}), defaultdict(None, {0: 1})],
        "times": [
            datetime.datetime(2026, 1, 31, 12, 30, 0, 5, tzinfo=datetime.UTC),
            datetime.datetime(2026, 1, 31, 12, 30),
            datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Rome")),
            datetime.date(2026, 2, 28),
            datetime.timedelta(days=-1, microseconds=3),
        ],
        "path": pathlib.Path("a/b.txt"),
        "durations": [Duration("500 steps"), Duration("0.25 epoch")],
        "torch": [torch.Size([2, 0]), torch.bfloat16, torch.device("cuda:1")],
        "arrays": [
            np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 2), np.int16), np.array(["ab", "c"]),
            np.array(True), np.array(["2026-01-01"], "datetime64[D]"),
        ],
        "scalars": [np.float64(0.1), np.int8(-3), np.str_("s"), np.bytes_(b"b\x00c"), np.bool_(True)],
        "tensors": every_tensor(),
        "twice": [shared := torch.tensor([1, 2]), shared],
    }  # fmt: skip


def every_tensor() -> dict[str, torch.Tensor]:
    """Return a tensor of each dtype that can be saved, and of unusual shapes."""
    small = torch.tensor([0.0, 1.0, -2.0, 3.5])
    whole = torch.tensor([[0, 1], [2, 100]])
    found = {
        str(dtype).removeprefix("torch."): small.to(dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
                      torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    }  # fmt: skip
    found |= {
        str(dtype).removeprefix("torch."): whole.to(dtype)
        for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16,
                      torch.uint8, torch.bool)
    }  # fmt: skip
    found |= {
        str(dtype).removeprefix("torch."): torch.complex(torch.tensor([1.0]), torch.tensor([-2.0])).to(dtype)
        for dtype in (torch.complex64, torch.complex128)
    }
    return found | {
        "0-dim": torch.tensor(3.25),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
    }


def every_kind() -> Snapshot:
    """Return a full snapshot of two ranks with two optimizers, a schedule, tied weights and extra state."""
    embedding = torch.arange(6, dtype=torch.bfloat16).reshape(3, 2)
    model: dict[str, Any] = {"embed.weight": embedding, "scale": torch.tensor(0.5), "head.weight": embedding}
    model |= {f"buffers.{name}": tensor for name, tensor in every_tensor().items()}
    model["norm._extra_state"] = {"amax": torch.tensor([1.0, 2.0]), "version": (1, 2)}
    group = {"lr": 0.1, "betas": (0.9, 0.999), "maximize": False, "foreach": None}
    adam = {
        "class": "Adam",
        "groups": [{**group, "params": ["embed.weight"]}],
        "state": {"embed.weight": {"step": torch.tensor(3.0), "exp_avg": embedding * 2, "exp_avg_sq": embedding}},
    }
    sgd = {"class": "SGD", "groups": [{"lr": torch.tensor(0.2), "params": ["scale"]}], "state": {"scale": {}}}
    return Snapshot(
        state=dict(_PROGRESS),
        model=model,
        optimizers=[adam, sgd],
        trainer={
            "hyper_parameters": {"width": 3},
            "task": every_value(),
            "callbacks": {"EarlyStopping": {"best": math.inf}},
            "schedulers": [{"last_epoch": 12, "_last_lr": [0.1]}],
            "strategy": {"scaler": {"scale": 65536.0}},
            "data": {"epoch": 1, "position": {"batch": 4, "samples": 8}},
            "loggers": [{"logger": "CSVLogger", "version": 0}],
            "datamodule": {},
            "seed": 2**63 + 1,
            "run_id": "0123456789abcdef",
            "precision": "16-mixed",
        },
        rng=[_generators(rank) for rank in (0, 1)],
        metrics={"loss": 0.1, "nothing": math.nan, "far": -math.inf},
        world_size=2,
    )


def _generators(rank: int) -> dict[str, Any]:
    key = {"key": np.arange(rank, rank + 4, dtype=np.uint32), "pos": 2}
    return {
        "python": (3, (rank, 2**32 - 1, 624), None),
        "numpy": {"bit_generator": "MT19937", "state": key, "has_gauss": 0, "gauss": 0.0},
        "torch": torch.arange(rank, rank + 16, dtype=torch.uint8),
    }
