"""Functions with the names of `accelerate.utils` and `accelerate.logging`: tensors, texts, files, seeds, cores."""

from __future__ import annotations

import io
import logging
import os
import random
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.distributed import run_distributed
from trainwright import Accelerator, DistributedType, PartialState, utils
from trainwright.core.errors import ConfigurationError
from trainwright.core.host import cpu_affinity
from trainwright.logging import get_logger
from trainwright.utils import (
    RNGType,
    clear_environment,
    compare_versions,
    convert_outputs_to_fp32,
    get_cpu_distributed_information,
    get_grad_scaler,
    get_mixed_precision_context_manager,
    is_torch_version,
    listify,
    load,
    override_numa_affinity,
    patch_environment,
    purge_accelerate_environment,
    save,
    set_numa_affinity,
    set_seed,
    slice_tensors,
    synchronize_rng_states,
    tqdm,
)

pytestmark = pytest.mark.usefixtures("fresh_state")

Pair = namedtuple("Pair", "a b")


def test_helpers_look_into_nested_tensors() -> None:
    tree = {"name": "x", "rows": [torch.ones(3, 2), torch.ones(3)]}
    assert utils.find_device(tree) == torch.device("cpu")
    assert utils.find_device({"name": "x"}) is None
    assert utils.find_batch_size(tree) == 3
    with pytest.raises(ValueError, match="find_batch_size got no tensor"):
        utils.find_batch_size([])
    assert (utils.is_torch_tensor(torch.ones(1)), utils.is_torch_tensor([])) == (True, False)
    assert utils.is_namedtuple(Pair(1, 2))
    assert not utils.is_namedtuple((1, 2))
    assert utils.honor_type(Pair(0, 0), (n for n in (1, 2))) == Pair(1, 2)
    assert utils.honor_type([], iter((1, 2))) == [1, 2]
    padded = utils.pad_input_tensors({"x": torch.tensor([1, 2, 3, 4, 5, 6])}, 6, 4)
    assert padded["x"].tolist() == [1, 2, 3, 4, 5, 6, 6, 6]
    assert utils.pad_input_tensors(torch.ones(2, 4), 4, 2, dim=1).shape == (2, 4)
    assert utils.pad_input_tensors(torch.ones(0, 4), 0, 2).shape == (0, 4)


def test_helpers_read_texts_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (utils.str_to_bool("Yes"), utils.str_to_bool("off", to_bool=True)) == (1, False)
    with pytest.raises(ValueError, match="true or false"):
        utils.str_to_bool("maybe")
    monkeypatch.setenv("MY_FLAG", "on")
    assert (utils.parse_choice_from_env("MY_FLAG"), utils.parse_choice_from_env("OTHER_FLAG")) == ("on", "no")
    assert (utils.parse_flag_from_env("MY_FLAG"), utils.parse_flag_from_env("OTHER_FLAG", default=True)) == (True, True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method")
def test_helpers_know_models_and_sizes() -> None:
    state = {"h.1.weight": torch.ones(1), "h.10.weight": torch.ones(1), "head": torch.ones(1)}
    assert list(utils.extract_submodules_state_dict(state, ["h.1", "head"])) == ["h.1.weight", "head"]
    assert (utils.dtype_byte_size(torch.float32), utils.dtype_byte_size(utils.CustomDtype.INT4)) == (4, 0.5)
    model = nn.Linear(1, 1)
    within = nn.Sequential(nn.Linear(1, 1))
    assert not utils.has_compiled_regions(within)
    within[0] = torch.compile(within[0])
    assert utils.has_compiled_regions(within)
    assert (utils.is_compiled_module(torch.compile(model)), utils.is_compiled_module(model)) == (True, False)


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


def test_variables_that_a_function_or_a_test_sets_are_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_A", "1")

    def set_variables(_: object) -> str:
        os.environ["ACCELERATE_A"] = os.environ["ACCELERATE_B"] = "2"
        return os.environ["ACCELERATE_A"]

    parent = purge_accelerate_environment(type("Parent", (), {"test_one": set_variables}))
    child = type("Child", (parent,), {"test_two": set_variables})()
    for call in (purge_accelerate_environment(set_variables), parent.test_one):
        assert call(child) == "2"
        assert (os.environ["ACCELERATE_A"], "ACCELERATE_B" in os.environ) == ("1", False)
    assert child.test_two() == "2"
    assert os.environ["ACCELERATE_A"] == "1"


def test_tensors_are_sliced_listed_and_widened() -> None:
    data = {"x": torch.arange(6).reshape(3, 2), "y": [torch.ones(3, dtype=torch.bfloat16)]}
    assert listify(slice_tensors(data, slice(1, 3))) == {"x": [[2, 3], [4, 5]], "y": [[1.0, 1.0]]}
    forward = convert_outputs_to_fp32(lambda x: {"out": x.half(), "count": 3})
    assert forward(torch.ones(1))["out"].dtype == torch.float32


def test_versions_are_compared_by_numbers() -> None:
    for operation, other in ((">=", "2.4"), ("<", "2.4.1"), ("==", "2.4.0")):
        assert compare_versions("2.4.0+cpu", operation, other) is True
    assert is_torch_version(">=", "2.1") is True
    with pytest.raises(ConfigurationError, match="operation='=>'"):
        compare_versions("torch", "=>", "2.0")


def test_the_context_and_the_scaler_are_those_of_the_precision() -> None:
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    assert accelerator.state.mixed_precision == "bf16"
    with get_mixed_precision_context_manager(native_amp=True):
        assert torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype == torch.bfloat16
    with get_mixed_precision_context_manager():
        assert torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype == torch.float32
    assert get_grad_scaler(init_scale=8.0).get_scale() == 8.0
    assert type(get_grad_scaler()) is torch.amp.GradScaler
    sharded = get_grad_scaler(DistributedType.FSDP)
    assert isinstance(sharded, torch.amp.GradScaler) and type(sharded) is not torch.amp.GradScaler  # noqa: PT018


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


def _save_on_ranks(folder: Path) -> list[str]:
    save({"w": torch.ones(2)}, folder / f"{PartialState().process_index}.bin")
    save({"w": torch.ones(2)}, folder / f"{PartialState().process_index}.safetensors", safe_serialization=True)
    save([1], folder / "node.bin", save_on_each_node=True)
    PartialState().wait_for_everyone()
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.distributed
def test_the_main_process_saves(tmp_path: Path) -> None:
    for found in run_distributed(_save_on_ranks, 2, tmp_path):
        assert found == ["0.bin", "0.safetensors", "node.bin"]
    assert load(tmp_path / "0.bin", map_location="cpu")["w"].tolist() == [1, 1]


class _Runs:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.putenv, ("LOADED", "1")  # type: ignore[return-value]


def test_a_pickle_is_not_executed_unless_it_is_trusted() -> None:
    file = io.BytesIO()
    save(_Runs(), file)
    file.seek(0)
    with pytest.raises(Exception, match="weights_only"):
        load(file)
    file.seek(0)
    assert load(file, weights_only=False) is None


def test_processes_share_the_numa_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for node, text in enumerate(("0,1", "2-3\n")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text)
    (tmp_path / "tasks/1").mkdir(parents=True)
    chosen: list[Any] = []
    monkeypatch.setattr(cpu_affinity, "_SYSTEM", tmp_path)
    monkeypatch.setattr(cpu_affinity, "_TASKS", tmp_path / "tasks")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *call: chosen.append(call))
    variables = {"world_size": 4, "local_world_size": 4, "accelerate_debug_mode": 1}
    for rank in (1, 2):
        with patch_environment(rank=rank, local_rank=rank, **variables, master_addr="localhost", master_port=1):
            assert get_cpu_distributed_information().local_world_size == 4
            override_numa_affinity(rank)
    assert chosen == [(1, {0, 1}), (1, {2, 3})]
    assert "process 2 runs on the cores [2, 3]" in caplog.text


def test_a_variable_sets_the_affinity_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr("trainwright.processes.partial_state.set_numa_affinity", called.append)
    PartialState(cpu=True)
    PartialState._reset_state()
    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", "true")
    PartialState(cpu=True)
    PartialState(cpu=True)
    assert called == [0]
    set_numa_affinity(0)  # this machine's own: no error
