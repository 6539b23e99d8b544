"""Options of `accelerate launch`, each with its counterpart: an option of torchrun, an environment variable, or advice.
The keys of Accelerate's configuration file are the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["torchrun", "variable", "nothing", "note", "special"]
_FLAG_VALUE = "true"


@dataclass(frozen=True)
class Option:
    """Counterpart of one option.

    Attributes:
        kind: `"torchrun"`, an option of torchrun; `"variable"`, an environment variable; `"nothing"`, no longer needed;
            `"note"`, a manual change; `"special"`, handled by the rewrite itself.
        text: the option of torchrun, the variable, or the advice.
        takes_value: the option has a value. Default: True.
        argument: the argument of a script with the same meaning, to suggest in notes. Default: "".
    """

    kind: Kind
    text: str = ""
    takes_value: bool = True
    argument: str = ""


def _variable(name: str, argument: str = "", *, takes_value: bool = True) -> Option:
    return Option("variable", name, takes_value, argument)


def _notes(names: str, text: str, *, takes_value: bool = True) -> dict[str, Option]:
    return dict.fromkeys(names.split(), Option("note", text, takes_value))


_MEGATRON = "Megatron-LM is not supported; tensor parallelism is Accelerator(strategy='tp')"
_FP8 = "training in 8 bits is not supported; use mixed_precision='bf16'"
_TPU = "TPUs are not supported"
_SAGEMAKER = "start the script with torchrun in the SageMaker job"
_HOSTS = "start torchrun on each machine, with --nnodes, --node-rank, --master-addr and --master-port"

_FSDP = {
    "version": "fsdp_version",
    "sharding_strategy": "sharding_strategy",
    "reshard_after_forward": "reshard_after_forward",
    "offload_params": "cpu_offload",
    "min_num_params": "min_num_params",
    "auto_wrap_policy": "auto_wrap_policy",
    "backward_prefetch": "backward_prefetch",
    "state_dict_type": "state_dict_type",
    "forward_prefetch": "forward_prefetch",
    "use_orig_params": "use_orig_params",
    "cpu_ram_efficient_loading": "cpu_ram_efficient_loading",
    "sync_module_states": "sync_module_states",
    "activation_checkpointing": "activation_checkpointing",
}
_DEEPSPEED = {
    "zero_stage": "ZERO_STAGE",
    "offload_optimizer_device": "OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "OFFLOAD_PARAM_DEVICE",
    "offload_optimizer_nvme_path": "OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_nvme_path": "OFFLOAD_PARAM_NVME_PATH",
    "zero3_init_flag": "ZERO3_INIT",
    "zero3_save_16bit_model": "ZERO3_SAVE_16BIT_MODEL",
}


def _plugin(field: str) -> str:
    return f"FullyShardedDataParallelPlugin({field}=…)"


def _deepspeed(field: str) -> str:
    return f"DeepSpeedPlugin({field}=…)"


OPTIONS: dict[str, Option] = {
    **dict.fromkeys(
        ("num_processes", "num_machines", "config_file", "module", "no_python", "gpu_ids"), Option("special")
    ),
    "machine_rank": Option("torchrun", "--node-rank"),
    "main_process_ip": Option("torchrun", "--master-addr"),
    "main_process_port": Option("torchrun", "--master-port"),
    "rdzv_backend": Option("torchrun", "--rdzv-backend"),
    "rdzv_conf": Option("torchrun", "--rdzv-conf"),
    "max_restarts": Option("torchrun", "--max-restarts"),
    "monitor_interval": Option("torchrun", "--monitor-interval"),
    "tee": Option("torchrun", "--tee"),
    "log_dir": Option("torchrun", "--log-dir"),
    "role": Option("torchrun", "--role"),
    **dict.fromkeys(("multi_gpu", "multi_cpu", "quiet", "use_mps_device"), Option("nothing", takes_value=False)),
    **dict.fromkeys(("same_network", "use_xpu", "ipex", "use_ipex"), Option("nothing", takes_value=False)),
    "mixed_precision": _variable("ACCELERATE_MIXED_PRECISION", "Accelerator(mixed_precision=…)"),
    "gradient_accumulation_steps": _variable(
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "Accelerator(gradient_accumulation_steps=…)"
    ),
    **dict.fromkeys(("cpu", "use_cpu"), _variable("ACCELERATE_USE_CPU", "Accelerator(cpu=True)", takes_value=False)),
    "debug": _variable("TRAINWRIGHT_DEBUG_MODE", takes_value=False),
    **dict.fromkeys(
        ("num_cpu_threads_per_process", "num_cpu_threads"), _variable("OMP_NUM_THREADS", "torch.set_num_threads(…)")
    ),
    "dynamo_backend": _variable("ACCELERATE_DYNAMO_BACKEND", "Accelerator(dynamo_backend=…)"),
    "dynamo_mode": _variable("ACCELERATE_DYNAMO_MODE", "TorchDynamoPlugin(mode=…)"),
    **{
        f"dynamo_use_{name}": _variable(
            f"ACCELERATE_DYNAMO_USE_{name.upper()}", f"TorchDynamoPlugin({field}=…)", takes_value=False
        )
        for name, field in (
            ("fullgraph", "fullgraph"),
            ("dynamic", "dynamic"),
            ("regional_compilation", "use_regional_compilation"),
        )
    },
    "use_fsdp": _variable("ACCELERATE_USE_FSDP", "Accelerator(strategy='fsdp')", takes_value=False),
    **{f"fsdp_{name}": _variable(f"FSDP_{name.upper()}", _plugin(field)) for name, field in _FSDP.items()},
    **dict.fromkeys(
        ("fsdp_transformer_layer_cls_to_wrap", "fsdp_transformer_cls_to_wrap"),
        _variable("FSDP_TRANSFORMER_CLS_TO_WRAP", _plugin("transformer_cls_names_to_wrap")),
    ),
    "fsdp_backward_prefetch_policy": _variable("FSDP_BACKWARD_PREFETCH", _plugin("backward_prefetch")),
    "use_deepspeed": _variable("ACCELERATE_USE_DEEPSPEED", "Accelerator(strategy='deepspeed')", takes_value=False),
    **{name: _variable(f"ACCELERATE_DEEPSPEED_{text}", _deepspeed(name)) for name, text in _DEEPSPEED.items()},
    "deepspeed_config_file": _variable("ACCELERATE_DEEPSPEED_CONFIG_FILE", _deepspeed("hf_ds_config")),
    "deepspeed_moe_layer_cls_names": _variable(
        "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", _deepspeed("transformer_moe_cls_names")
    ),
    "gradient_clipping": _variable("ACCELERATE_GRADIENT_CLIPPING", _deepspeed("gradient_clipping")),
    **_notes(
        "deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_multinode_launcher", _HOSTS
    ),
    **_notes("use_parallelism_config", "pass Accelerator(parallelism_config=ParallelismConfig(…))", takes_value=False),
    **_notes("enable_cpu_affinity", "start the processes under numactl or taskset", takes_value=False),
    **_notes("use_megatron_lm", _MEGATRON, takes_value=False),
    **_notes("tpu tpu_cluster no_tpu_cluster tpu_use_sudo tpu_use_cluster downcast_bf16", _TPU, takes_value=False),
    **_notes("vm env commands command_file tpu_name tpu_zone tpu_env", _TPU),
    **_notes("aws_access_key_id aws_secret_access_key", _SAGEMAKER),
    "main_training_function": Option("nothing"),
    **_notes("mpirun_hostfile mpirun_ccl", "start the script with mpirun: its variables are read"),
}
"""Name of an option, with underscores → its counterpart."""

_PREFIXES = {
    "megatron_lm_": Option("note", _MEGATRON),
    "fp8_": Option("note", _FP8),
    "parallelism_config_": Option("note", "pass Accelerator(parallelism_config=ParallelismConfig(…))"),
    "fsdp_": Option("note", "FSDP2 has no such option; remove it"),
    "dynamo_": Option("note", "pass Accelerator(dynamo_plugin=TorchDynamoPlugin(…))"),
    "deepspeed_": Option("note", "pass it to DeepSpeedPlugin, or write it into DeepSpeed's own configuration"),
}
_SHORT = {"-m": "module", "-q": "quiet", "-t": "tee"}


def find_option(name: str) -> Option | None:
    """Return the counterpart of an option or a key of a configuration file; None for an unknown one."""
    if name in OPTIONS:
        return OPTIONS[name]
    return next((option for prefix, option in _PREFIXES.items() if name.startswith(prefix)), None)


def option_name(word: str) -> str:
    """Return the name of an option as it is written on a command line: `--num-processes=2` → `num_processes`."""
    if word in _SHORT:
        return _SHORT[word]
    return word.partition("=")[0].removeprefix("--").replace("-", "_")


def variable_value(name: str, value: str) -> str | None:
    """Return the value that a variable gets; None if the default is meant and no variable is needed."""
    if name in ("mixed_precision", "dynamo_backend") and value.lower().strip("\"'") in ("no", "none", "null", ""):
        return None
    return value or _FLAG_VALUE
