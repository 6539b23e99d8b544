"""User-written loops under FSDP and tensor parallelism: what the contract suite does not cover."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.contracts.test_own_loop import Net
from tests.helpers.distributed import run_distributed
from trainwright.accelerator.accelerator import Accelerator
from trainwright.core.errors import CheckpointError, ConfigurationError

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def _run(function: Any, *arguments: Any, ranks: int = 2) -> list[Any]:
    return run_distributed(function, ranks, *arguments, init=False, timeout=240)


def _save(folder: str) -> Any:
    accelerator = Accelerator(strategy="fsdp")
    model = accelerator.prepare(Net())
    accelerator.save_model(model, folder, max_shard_size="500B")
    try:
        accelerator.save_model(model, f"{folder}/{'x' * 300}")
    except (OSError, CheckpointError) as error:
        failed = f"{type(error).__name__}: {error}"
    accelerator.end_training()
    return failed


def test_the_main_process_writes_the_weights_of_a_sharded_model(tmp_path: Path) -> None:
    failed = _run(_save, str(tmp_path / "model"))
    found = {k: v for file in (tmp_path / "model").glob("*.safetensors") for k, v in load_file(file).items()}
    torch.testing.assert_close(found, dict(Net().state_dict()), rtol=0, atol=0)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 5
    assert "too long" in failed[0]
    assert failed[1].startswith("CheckpointError: rank 0 could not write")


def _gather(strategy: str) -> list[int]:
    accelerator = Accelerator(strategy=strategy)
    model, loader = accelerator.prepare(Net(), DataLoader(TensorDataset(torch.randn(7, 4), torch.arange(7)), 2))
    rows: list[int] = []
    with torch.no_grad():
        for inputs, indices in loader:
            assert model(inputs).shape == (len(inputs), 1)
            rows += accelerator.gather_for_metrics(indices).tolist()
    accelerator.end_training()
    return rows


@pytest.mark.parametrize("strategy", ["tp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_each_sample_has_one_row(strategy: str) -> None:
    for rows in _run(_gather, strategy):
        assert sorted(rows) == list(range(7))


def _different() -> str:
    accelerator = Accelerator(strategy="fsdp")
    try:
        accelerator.prepare(nn.Linear(4, 2 + accelerator.process_index))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_different_models_are_refused_on_every_rank() -> None:
    for text in _run(_different):
        assert "'weight' (2×4, torch.float32) on rank 0, and 'weight' (3×4, torch.float32) on rank 1" in text
