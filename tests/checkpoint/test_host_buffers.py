from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.checkpoint.disk import host_buffers
from trainwright.checkpoint.disk.host_buffers import HostBuffers
from trainwright.checkpoint.disk.planned_file import PlannedFile
from trainwright.checkpoint.format.safetensors_io import plan_safetensors

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


def written(files: list[PlannedFile]) -> list[bytes]:
    return [b"".join(bytes(chunk) for chunk in file.chunks()) for file in files]


def some_tensor(draw: random.Random) -> torch.Tensor:
    shape = [draw.randint(0, 7) for _ in range(draw.randint(0, 3))]
    tensor = torch.randint(0, 2, shape) if draw.random() < 0.3 else torch.randn(shape)
    tensor = tensor.to(draw.choice(DTYPES))
    if tensor.dim() > 1 and draw.random() < 0.5:
        tensor = tensor.transpose(0, 1)
    if tensor.is_floating_point() and tensor.element_size() > 1 and draw.random() < 0.2:
        tensor = torch._neg_view(tensor)
    return tensor


@pytest.mark.slow
@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 3), st.sampled_from([64, 128, 2**20]))
def test_staged_files_have_the_bytes_of_the_live_ones_wherever_blocks_end(
    seed: int, num_threads: int, block: int
) -> None:
    draw = random.Random(seed)
    tensors = [{str(i): some_tensor(draw) for i in range(draw.randint(0, 6))} for _ in range(3)]
    files = [plan_safetensors(f"{number}", group) for number, group in enumerate(tensors)]
    expected = written(files)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_buffers, "BLOCK_BYTES", block)
        patch.setattr(host_buffers, "_SMALLEST_BLOCK_BYTES", 64)
        HostBuffers(num_threads=num_threads).stage(files)
    assert not any(file.tensors for file in files)
    assert written(files) == expected
