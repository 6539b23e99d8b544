"""Small snapshots, and equality that is as strict as a checkpoint has to be."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainwright.checkpoint import Snapshot, named_optimizer_state, write_checkpoint
from trainwright.core.state import TrainState


def names_of(model: torch.nn.Module) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def small_snapshot(step: int = 1, **changes: Any) -> Snapshot:
    """Return a full snapshot of a tiny model whose values depend on `step`."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.data.fill_(float(step))
        parameter.grad = torch.full_like(parameter, float(step))
    optimizer.step()
    values: dict[str, Any] = {
        "state": TrainState(step=step, epoch=step // 10).to_dict(),
        "model": model.state_dict(),
        "optimizers": [named_optimizer_state(optimizer, names_of(model))],
        "trainer": {"callbacks": {"best": float(step)}, "hyper_parameters": {"width": 3}, "mean": torch.ones(2)},
        "rng": [{"torch": torch.get_rng_state()}],
        "metrics": {"loss": 1.0 / step},
    }
    return Snapshot(**(values | changes))


def write_small(folder: Path, step: int = 1, name: str | None = None, **changes: Any) -> Path:
    return write_checkpoint(folder / (name or f"step-{step:08d}"), small_snapshot(step, **changes))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def same(left: Any, right: Any) -> bool:
    """Tell whether two trees agree in types, order, and bits (so NaN equals NaN and 0.0 differs from -0.0)."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right) or (left != left and right != right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, torch.Tensor):
        return _same_tensor(left, right)
    if isinstance(left, (np.ndarray, np.generic)):
        return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())
    if isinstance(left, Mapping):
        pairs = zip(left.items(), right.items(), strict=False)
        return len(left) == len(right) and all(same(a, c) and same(b, d) for (a, b), (c, d) in pairs)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, (set, frozenset)):
        return len(left) == len(right) and all(any(same(a, b) for b in right) for a in left)
    return bool(left == right)


def _same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return _bits(left) == _bits(right)


def _bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if plain.is_complex():
        plain = torch.view_as_real(plain).reshape(-1)
    return bytes(plain.view(torch.uint8).numpy().tobytes())
