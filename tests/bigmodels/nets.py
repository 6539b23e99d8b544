"""Small networks, and their weights as checkpoints in the forms that people have them in."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn


class Net(nn.Module):
    """An embedding, two blocks with a buffer each, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


TOKENS = torch.arange(12)
MIXED = {"embed": "cpu", "blocks.0": "disk", "blocks.1": "cpu", "head": "disk"}
ALL_DISK = {"": "disk"}


def make_net() -> Net:
    """Return a network in evaluation mode, with values; each call gives the same."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        net = Net().eval()
        for block in net.blocks:
            nn.init.normal_(block[1].running_mean)
    return net


def empty_net() -> Net:
    with torch.device("meta"):
        return Net().eval()


def plain_state(net: nn.Module) -> dict[str, torch.Tensor]:
    """Return a state dict that safetensors takes: each tensor under one name, with its own memory."""
    seen: set[int] = set()
    found = {}
    for name, tensor in net.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            found[name] = tensor.clone()
    return found


def save_sharded(
    folder: Path, state: Mapping[str, torch.Tensor], *, plain: bool = False, pickled: bool = False
) -> Path:
    """Write two shards and an index, of transformers' layout or a plain one; return the folder."""
    folder.mkdir()
    names = list(state)
    suffix = "bin" if pickled else "safetensors"
    weight_map = {}
    for number, part in enumerate((names[:3], names[3:]), start=1):
        file = f"model-{number:05d}-of-00002.{suffix}"
        tensors = {name: state[name] for name in part}
        if pickled:
            torch.save(tensors, folder / file)
        else:
            save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if plain:
        (folder / "index.json").write_text(json.dumps(weight_map))
    else:
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (folder / f"{'pytorch_model.bin' if pickled else 'model.safetensors'}.index.json").write_text(json.dumps(index))
    return folder


def tree_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of each file below a folder: what changes when something is written."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@contextmanager
def files_end_at(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def of_transformers(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a slow test of models by their configurations, whatever their library warns of."""
    marks = pytest.mark.slow, pytest.mark.requires("transformers", reason="models by their configuration")
    for mark in (*marks, pytest.mark.filterwarnings("ignore")):
        test = mark(test)
    return test
