"""A checkpoint in DeepSpeed's pieces becomes one file of whole weights, in float32 or in 16 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.contracts.test_strategy import run
from trainwright.checkpoint.interop.export import export_weights


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_pieces_are_put_together_in_float32_and_saved_in_16_bits(name: str, tmp_path: Path) -> None:
    [(_, _, weights)] = run(name, {"epochs": 1, "save_to": tmp_path / "checkpoint"})
    assert len(list((tmp_path / "checkpoint").rglob("*.safetensors"))) > 2  # each rank has written its own
    for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        export_weights(tmp_path / "checkpoint", tmp_path / f"{dtype}.safetensors", dtype=dtype)
        whole = load_file(tmp_path / f"{dtype}.safetensors")
        for key in ("net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"):
            assert whole[key].dtype == kind
            assert torch.equal(whole[key], weights[key].to(kind))
