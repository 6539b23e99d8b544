"""Accelerate's functions that need no Accelerator: seeds, environment, tensors, logging, versions."""

from __future__ import annotations

import logging
import os
import random

import pytest
import torch
from torch import nn

from tests.helpers.distributed import run_distributed
from trainwright import Accelerator, DistributedType, FullyShardedDataParallelPlugin, dispatch_model
from trainwright.core.errors import ConfigurationError
from trainwright.logging import get_logger
from trainwright.utils import (
    RNGType,
    clear_environment,
    compare_versions,
    convert_outputs_to_fp32,
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
    extract_model_from_parallel,
    get_grad_scaler,
    get_mixed_precision_context_manager,
    is_torch_version,
    listify,
    patch_environment,
    set_seed,
    slice_tensors,
    synchronize_rng_states,
    tqdm,
)


def test_variables_are_set_and_removed_for_a_block() -> None:
    os.environ["KEPT"] = "1"
    with patch_environment(kept=2, new=True):
        assert (os.environ["KEPT"], os.environ["NEW"]) == ("2", "True")
    assert os.environ["KEPT"] == "1"
    with clear_environment():
        assert not os.environ
        os.environ["LOST"] = "1"
    assert os.environ.pop("KEPT") == "1"
    assert "LOST" not in os.environ


def test_tensors_are_sliced_listed_and_widened() -> None:
    data = {"x": torch.arange(6).reshape(3, 2), "y": [torch.ones(3, dtype=torch.bfloat16)]}
    assert listify(slice_tensors(data, slice(1, 3))) == {"x": [[2, 3], [4, 5]], "y": [[1.0, 1.0]]}
    forward = convert_outputs_to_fp32(lambda x: {"out": x.half(), "count": 3})
    assert forward(torch.ones(1))["out"].dtype == torch.float32


@pytest.mark.parametrize(
    ("operation", "other", "expected"), [(">=", "2.4", True), ("<", "2.4.1", True), ("==", "2.4.0", True)]
)
def test_versions_are_compared_by_numbers(operation: str, other: str, expected: bool) -> None:
    assert compare_versions("2.4.0+cpu", operation, other) is expected
    assert is_torch_version(">=", "2.1") is True
    with pytest.raises(ConfigurationError, match="operation='=>'"):
        compare_versions("torch", "=>", "2.0")


def test_models_within_a_model_are_unwrapped_on_request() -> None:
    model = nn.Sequential(nn.DataParallel(nn.Linear(2, 2)))
    wrapper = model[0]
    assert extract_model_from_parallel(nn.DataParallel(model)) is model
    assert model[0] is wrapper
    assert isinstance(extract_model_from_parallel(model, recursive=True)[0], nn.Linear)  # type: ignore[index]


def test_the_context_and_the_scaler_are_those_of_the_precision() -> None:
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    assert accelerator.state.mixed_precision == "bf16"
    with get_mixed_precision_context_manager(native_amp=True):
        assert torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype == torch.bfloat16
    with get_mixed_precision_context_manager():
        assert torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype == torch.float32
    assert get_grad_scaler(init_scale=8.0).get_scale() == 8.0
    assert type(get_grad_scaler(DistributedType.FSDP)) is not type(get_grad_scaler())


def test_a_dispatched_model_is_recognized() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert not accelerator.verify_device_map(model)
    assert not accelerator.verify_device_map(dispatch_model(model, {"": "cpu"}))
    model[0].hf_device_map = {"a": "cpu", "b": "disk"}
    assert accelerator.verify_device_map(model)


def test_variables_of_fsdp_select_where_weights_are_loaded() -> None:
    with patch_environment(fsdp_cpu_ram_efficient_loading="none"):
        enable_fsdp_ram_efficient_loading()
        assert FullyShardedDataParallelPlugin().cpu_ram_efficient_loading is True
        disable_fsdp_ram_efficient_loading()
        assert FullyShardedDataParallelPlugin().cpu_ram_efficient_loading is False


def test_a_warning_is_written_once_and_shows_the_callers_line(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("test_utility_functions", log_level="INFO")
    for _ in range(2):
        logger.warning_once("only once")
        logger.info("each time")
    assert [record.message for record in caplog.records] == ["only once", "each time", "each time"]
    assert {record.filename for record in caplog.records} == {"test_utility_functions.py"}


def _on_ranks() -> dict[str, object]:
    rank = int(os.environ["RANK"])
    found: dict[str, object] = {}
    set_seed(3, device_specific=True)
    found["own"] = random.random(), float(torch.rand(()))
    synchronize_rng_states([RNGType.TORCH])
    found["shared"] = float(torch.rand(()))
    generator = torch.Generator().manual_seed(rank)
    synchronize_rng_states(["generator"], generator)
    found["generator"] = float(torch.rand((), generator=generator))
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logger = get_logger("on_ranks", log_level="INFO")
    logger.logger.addHandler(Keep())
    logger.info("main")
    logger.info("all", main_process_only=False)
    logger.info("in order", main_process_only=False, in_order=True)
    found["records"] = records
    with pytest.raises(ConfigurationError, match="rng_type='cuda'"):
        synchronize_rng_states(["cuda"])
    found["bar"] = tqdm(range(2)).disable
    return found


@pytest.mark.distributed
def test_processes_draw_other_or_the_same_numbers_and_log_on_the_main_one() -> None:
    first, second = run_distributed(_on_ranks, 2)
    assert first["own"] != second["own"]
    assert (first["shared"], first["generator"]) == (second["shared"], second["generator"])
    assert first["records"] == ["main", "all", "in order"]
    assert second["records"] == ["all", "in order"]
    assert (first["bar"], second["bar"]) == (False, True)
