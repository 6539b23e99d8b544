from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.checkpoint.snapshots import same
from trainwright.checkpoint import plain_name, read_model, write_model
from trainwright.checkpoint.format.model import MODEL_INDEX, load_plain_state
from trainwright.core.errors import CheckpointError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(()))


def index_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / MODEL_INDEX).read_text()))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(0, 6), max_size=8), limit=st.integers(1, 60))
def test_shards_hold_every_tensor_once_and_none_is_needlessly_large(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("model")
    state = {f"w{number}": torch.rand(size) for number, size in enumerate(sizes)}
    write_model(folder, state, max_shard_bytes=limit)
    index = index_of(folder)
    shards = {file: safetensors.torch.load_file(folder / file) for file in {*index["weight_map"].values()}}
    assert {name: file for file, shard in shards.items() for name in shard} == index["weight_map"]
    assert index["metadata"]["total_size"] == 4 * sum(sizes)
    for shard in shards.values():
        nbytes = [tensor.nbytes for tensor in shard.values()]
        assert sum(nbytes) <= limit or len([size for size in nbytes if size]) == 1
    assert same(read_model(folder), state)


def test_tied_weights_are_stored_once_and_both_names_come_back(tmp_path: Path) -> None:
    model = Tied()
    write_model(tmp_path, model.state_dict())
    assert set(safetensors.torch.load_file(tmp_path / "model-00001-of-00001.safetensors")) == {"embed.weight", "scale"}
    back = read_model(tmp_path)
    assert back["head.weight"] is back["embed.weight"]
    other = Tied()
    other.load_state_dict(back)
    assert same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["weight_map"].update(w="gone.safetensors"), "'gone.safetensors', which is missing"),
        (lambda index: index["weight_map"].update(v=index["weight_map"]["w"]), "no tensor 'v'"),
        (lambda index: index["metadata"]["trainwright"].update(tied={"v": "u"}), "ties 'v' to 'u'"),
        (lambda index: index["metadata"]["trainwright"].update(dtypes={"w": "torch.complex64"}), "cannot be read as"),
        (lambda index: index["weight_map"].update(w=3), "not a plain relative path"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_an_error(tmp_path: Path, change: Any, message: str) -> None:
    write_model(tmp_path, {"w": torch.ones(3)})
    index = index_of(tmp_path)
    change(index)
    (tmp_path / MODEL_INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        read_model(tmp_path)


def test_wrappers_leave_no_trace_in_names() -> None:
    assert plain_name("net._orig_mod._checkpoint_wrapped_module.0.w") == "net.0.w"
    assert plain_name("net.my_orig_mod.w") == "net.my_orig_mod.w"


def test_buffers_that_a_stage_set_under_inference_mode_are_loaded() -> None:
    module = torch.nn.Linear(1, 1)
    with torch.inference_mode():
        module.register_buffer("mean", torch.zeros(1))
    load_plain_state(module, {**module.state_dict(), "mean": torch.ones(1)})
    assert module.mean.item() == 1.0
    assert not module.weight.is_inference()
