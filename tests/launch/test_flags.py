"""Every flag of `accelerate launch` 1.15, and of earlier versions: accepted, or refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwright.core.errors import ConfigurationError
from trainwright.launch.launch import check_options
from trainwright.launch.launch_config import LaunchConfig
from trainwright.launch.reading import check_supported, known_options, read_command

# Flags with a value that requests something.
_ACCEPTED = """
config_file={file} quiet cpu multi_gpu tpu downcast_bf16 use_xpu no_tpu_cluster mixed_precision=bf16
num_processes=2 num_machines=1
num_cpu_threads_per_process=2 enable_cpu_affinity dynamo_backend=inductor dynamo_mode=default dynamo_use_fullgraph=true
dynamo_use_dynamic=true dynamo_use_regional_compilation=true use_deepspeed use_fsdp use_parallelism_config gpu_ids=0,1
same_network machine_rank=0 main_process_ip=10.0.0.1 main_process_port=0 tee=3 log_dir=logs role=default
rdzv_backend=static rdzv_conf=a=1 max_restarts=1 monitor_interval=5 module no_python deepspeed_config_file=ds.json
zero_stage=2 offload_optimizer_device=cpu offload_param_device=cpu offload_optimizer_nvme_path=/a
offload_param_nvme_path=/a gradient_accumulation_steps=2 gradient_clipping=1.0 zero3_init_flag=true
zero3_save_16bit_model=true deepspeed_moe_layer_cls_names=Block fsdp_version=2 fsdp_offload_params=true
fsdp_min_num_params=10 fsdp_sharding_strategy=1 fsdp_reshard_after_forward=true fsdp_auto_wrap_policy=NO_WRAP
fsdp_transformer_layer_cls_to_wrap=Block fsdp_backward_prefetch=BACKWARD_PRE
fsdp_backward_prefetch_policy=BACKWARD_PRE fsdp_state_dict_type=FULL_STATE_DICT fsdp_forward_prefetch=true
fsdp_use_orig_params=true fsdp_cpu_ram_efficient_loading=true fsdp_sync_module_states=true
fsdp_activation_checkpointing=true debug parallelism_config_dp_replicate_size=2 parallelism_config_dp_shard_size=2
parallelism_config_tp_size=2 parallelism_config_cp_size=2 parallelism_config_cp_backend=torch
parallelism_config_cp_comm_strategy=allgather parallelism_config_sp_size=2 parallelism_config_sp_backend=deepspeed
parallelism_config_sp_seq_length=128 parallelism_config_sp_seq_length_is_variable=true
parallelism_config_sp_attn_implementation=sdpa deepspeed_multinode_launcher=standard mixed_precision=fp8 fp8_backend=ao
fp8_backend=te fp8_use_autocast_during_eval=true fp8_margin=1 fp8_opt_level=O2
fp8_interval=2 fp8_format=HYBRID fp8_amax_history_len=16 fp8_amax_compute_algo=max
fp8_override_linear_precision=true,false,false fp8_enable_fsdp_float8_all_gather=true fp8_pad_inner_dim=true
use_megatron_lm
megatron_lm_tp_degree=2 megatron_lm_pp_degree=2 megatron_lm_num_micro_batches=2 megatron_lm_sequence_parallelism=true
megatron_lm_recompute_activations=true megatron_lm_use_distributed_optimizer=true megatron_lm_gradient_clipping=2
megatron_lm_recompute_granularity=full megatron_lm_attention_backend=flash megatron_lm_attention_softmax_in_fp32=true
megatron_lm_context_parallel_size=1 megatron_lm_attention_dropout=0.0 megatron_lm_no_load_optim=false
"""
_REFUSED = """
tpu_cluster tpu_use_cluster tpu_use_sudo vm=a env=A=1 main_training_function=train
ipex fsdp_activation_checkpointing_offload=true aws_access_key_id=K
aws_secret_access_key=K
megatron_lm_use_custom_fsdp=true megatron_lm_no_load_optim=true megatron_lm_no_save_optim=true
megatron_lm_eod_mask_loss=true megatron_lm_overlap_cpu_optimizer_d2h_h2d=true megatron_lm_optimizer_cpu_offload=true
megatron_lm_use_precision_aware_optimizer=true megatron_lm_decoder_last_pipeline_num_layers=2
megatron_lm_recompute_method=block megatron_lm_recompute_num_layers=2 megatron_lm_expert_model_parallel_size=2
megatron_lm_context_parallel_size=2 megatron_lm_attention_dropout=0.1 megatron_lm_hidden_dropout=0.1
megatron_lm_expert_tensor_parallel_size=2 megatron_lm_calculate_per_token_loss=true
megatron_lm_use_rotary_position_embeddings=true
fp8_opt_level=O1
"""


def _read(flag: str, tmp_path: Path) -> LaunchConfig:
    file = tmp_path / "config.yaml"
    file.write_text("num_processes: 2\n")
    switches = {"fsdp_": ["--use_fsdp"], "parallelism_config_": ["--use_parallelism_config"]}
    switches["megatron_lm_"] = ["--use_megatron_lm"]
    found = next((words for name, words in switches.items() if flag.startswith(name)), [])
    if flag.startswith(("zero", "offload", "deepspeed")):
        found = ["--use_deepspeed"]
    return read_command(["--config_file", str(file), *found, f"--{flag.format(file=file)}", "a.py"]).config


@pytest.mark.slow
@pytest.mark.parametrize("flag", _ACCEPTED.split())
def test_a_flag_is_accepted(flag: str, tmp_path: Path) -> None:
    check_supported(_read(flag, tmp_path))


@pytest.mark.parametrize("flag", _REFUSED.split())
def test_a_flag_is_refused_with_a_reason(flag: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_options(_read(flag, tmp_path))
    name, _, value = flag.partition("=")
    text = str(caught.value)
    assert text.startswith(f"--{name}")
    reason = text.partition("not supported")[2]
    assert len(reason.split()) > 2, text
    assert value != "K" or "K" not in text  # a secret is not printed


def test_the_tables_hold_every_option() -> None:
    names = {flag.partition("=")[0] for flag in (_ACCEPTED + _REFUSED).split()}
    own = {"rdzv_id", "min_nodes"}
    clusters = {name for name in known_options() if name.startswith(("slurm", "mpi", "ray", "kubernetes", "print"))}
    clusters |= {name for name, option in known_options().items() if option.group == "Amazon SageMaker"}
    hostfile = {"deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter"}  # test_hostfile.py
    assert set(known_options()) - own - hostfile - clusters <= names
