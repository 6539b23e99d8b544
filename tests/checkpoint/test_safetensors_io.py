from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.foreign import Evil
from tests.checkpoint.snapshots import same
from trainwright.checkpoint import read_safetensors, write_safetensors
from trainwright.core.errors import CheckpointError

_DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=10)
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(_DTYPES), st.lists(st.integers(0, 3), max_size=3)),
        max_size=6,
    )
)
def test_any_mixture_of_tensors_is_read_alike_by_the_library_and_by_us(tmp_path: Path, forms: Any) -> None:
    tensors = {name: random_tensor(dtype, *shape) for name, (dtype, shape) in forms.items()}
    path = tmp_path / "a.safetensors"
    path.unlink(missing_ok=True)
    write_safetensors(path, tensors)
    theirs, ours = safetensors.torch.load_file(path), read_safetensors(path)
    assert theirs.keys() == ours.keys() == tensors.keys()
    assert all(same(theirs[name], tensors[name]) and same(ours[name], tensors[name]) for name in tensors)


def test_selected_names_alone_are_read_and_an_unknown_one_is_an_error(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"a": torch.zeros(1), "b": torch.ones(1)})
    assert list(read_safetensors(tmp_path / "a.safetensors", names=["b"])) == ["b"]
    with pytest.raises(CheckpointError, match="no tensor 'c'"):
        read_safetensors(tmp_path / "a.safetensors", names=["c"])


def test_a_pickle_under_the_name_of_safetensors_is_refused_and_not_executed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    torch.save({"w": Evil(tmp_path / "ran")}, path)
    with pytest.raises(CheckpointError, match=r"not a safetensors file.*torch\.save"):
        read_safetensors(path)
    assert not (tmp_path / "ran").exists()
