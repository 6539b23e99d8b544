"""Files that processes save, the cores they run on, and variables of loggers and uncaught errors."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from trainwright import PartialState
from trainwright.core.host import cpu_affinity
from trainwright.logging import get_logger
from trainwright.utils import (
    get_cpu_distributed_information,
    load,
    override_numa_affinity,
    patch_environment,
    save,
    set_numa_affinity,
)

NAMES = {
    "utils": (
        "AbstractTrainStep BertTrainStep BnbQuantizationConfig ComputeEnvironment DeepSpeedEngineWrapper "
        "DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DummyOptim DummyScheduler DynamoBackend FP8RecipeKwargs "
        "GPTTrainStep GradientAccumulationPlugin KwargsHandler LoggerType MODEL_NAME MegatronLMDummyDataLoader "
        "MegatronLMDummyScheduler MegatronLMPlugin OPTIMIZER_NAME PrecisionType ProjectConfiguration RNGType "
        "RNG_STATE_NAME SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SCALER_NAME SCHEDULER_NAME SageMakerDistributedType "
        "T5TrainStep TorchDynamoPlugin WEIGHTS_INDEX_NAME WEIGHTS_NAME align_module_device apply_fp8_autowrap "
        "avg_losses_across_data_parallel_group broadcast broadcast_object_list calculate_maximum_sizes "
        "clear_environment compute_module_sizes concatenate contextual_fp8_autocast convert_model "
        "convert_outputs_to_fp32 convert_to_fp32 disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading "
        "extract_model_from_parallel gather gather_object get_active_deepspeed_plugin get_balanced_memory "
        "get_grad_scaler get_max_layer_size get_mixed_precision_context_manager has_offloaded_params "
        "has_transformer_engine_layers install_xla is_bf16_available is_mps_available is_torch_version listify "
        "load_and_quantize_model load_offloaded_weights load_state_dict merge_fsdp_weights offload_state_dict "
        "pad_across_processes patch_environment recursively_apply reduce retie_parameters send_to_device "
        "set_module_tensor_to_device set_seed slice_tensors synchronize_rng_state wait_for_everyone "
        "write_basic_config"
    ),
    "optimizer": ("AcceleratedOptimizer"),
    "scheduler": ("AcceleratedScheduler"),
    "": (
        "Accelerator AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin "
        "DistributedDataParallelKwargs DistributedType FullyShardedDataParallelPlugin GradScalerKwargs "
        "InitProcessGroupKwargs ParallelismConfig PartialState ProfileKwargs cpu_offload cpu_offload_with_hook "
        "debug_launcher disk_offload dispatch_model find_executable_batch_size infer_auto_device_map "
        "init_empty_weights init_on_device load_checkpoint_and_dispatch load_checkpoint_in_model notebook_launcher "
        "prepare_pippy skip_first_batches synchronize_rng_states"
    ),
    "state": ("AcceleratorState"),
    "tracking": (
        "AimTracker ClearMLTracker CometMLTracker GeneralTracker MLflowTracker TensorBoardTracker WandBTracker "
        "get_logger on_main_process"
    ),
    "big_modeling": (
        "AlignDevicesHook UserCpuOffloadHook add_hook_to_module attach_align_device_hook "
        "attach_align_device_hook_on_blocks"
    ),
    "data_loader": (
        "BatchSamplerShard DataLoaderDispatcher DataLoaderShard GradientState IterableDatasetShard prepare_data_loader"
    ),
    "local_sgd": ("LocalSGD"),
    "hooks": (
        "ModelHook SequentialHook attach_execution_device_hook remove_hook_from_module remove_hook_from_submodules"
    ),
    "utils.megatron_lm": ("gather_across_data_parallel_groups initialize"),
}


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


@pytest.mark.parametrize(("rank", "cores"), [(1, {0, 1}), (2, {2, 3})])
def test_processes_share_the_numa_nodes(
    rank: int, cores: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    variables = {"rank": rank, "local_rank": rank, "world_size": 4, "local_world_size": 4, "accelerate_debug_mode": 1}
    with patch_environment(**variables, master_addr="localhost", master_port=1):
        assert get_cpu_distributed_information().local_world_size == 4
        override_numa_affinity(rank)
    assert chosen == [(1, cores)]
    assert f"process {rank} runs on the cores {sorted(cores)}" in caplog.text


def test_a_process_with_a_gpu_runs_on_the_cores_near_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(cpu_affinity, "_SYSTEM", tmp_path)
    folder = tmp_path / "bus/pci/devices/0000:3b:00.0"
    assert cpu_affinity._of_gpu(0) is None  # the system does not list its cores
    folder.mkdir(parents=True)
    (folder / "local_cpulist").write_text("4-7")
    assert cpu_affinity._of_gpu(0) == folder / "local_cpulist"
    assert cpu_affinity._of_gpu(1) is None
    del gpu.pci_bus_id
    assert cpu_affinity._of_gpu(0) is None


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


def test_a_variable_sets_the_level_of_loggers() -> None:
    with patch_environment(accelerate_log_level="warning"):
        assert get_logger("of_a_variable").logger.level == 30
        assert get_logger("of_an_argument", log_level="ERROR").logger.level == 40


@pytest.mark.parametrize("enabled", [True, False])
def test_uncaught_errors_are_shown_by_rich_on_request(enabled: bool) -> None:
    pytest.importorskip("rich")
    program = "import trainwright; trainwright.Accelerator(cpu=True); raise ValueError('shown')"
    environ = {**os.environ, "ACCELERATE_ENABLE_RICH": str(enabled), "TERM": "dumb"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, check=False)
    assert "ValueError: shown" in done.stderr
    assert ("Traceback (most recent call last) ─" in done.stderr) == enabled
