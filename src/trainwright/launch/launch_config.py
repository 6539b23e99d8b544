"""LaunchConfig: every option of `trainwright launch`, with its flag, YAML key and environment variable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from trainwright.core.errors import ConfigurationError, nearest

_TRUE, _FALSE = ("true", "yes", "y", "on", "1"), ("false", "no", "n", "off", "0")


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the launcher.

    Attributes:
        name: of the field, and with `--` of the flag.
        read: converts its text; raises ValueError for another text.
        help: one sentence.
        group: heading in `--help`.
        variable: environment variable by which it reaches the script; None: the launcher alone uses it.
        section: YAML mapping that contains it; empty: the file itself.
        choices: the possible values; empty: any.
        later: why it is refused; empty: it is supported.
        harmless: values of a refused option that request nothing.
    """

    name: str
    read: Callable[[str], Any]
    help: str
    group: str
    variable: str | None
    section: str
    choices: tuple[str, ...]
    later: str
    harmless: tuple[str, ...]

    @property
    def is_flag(self) -> bool:
        """True if the flag has no value on the command line."""
        return self.read is as_bool and self.section == ""

    @property
    def is_refused(self) -> bool:
        """True if the option has no value with an effect."""
        return self.group == _LATER

    def refusal(self, value: object) -> str:
        """Return why a value is refused; empty: it is accepted."""
        harmless = ("", "none", "no", "false", *self.harmless)
        return "" if value is None or str(value).lower() in harmless else self.later

    def parse(self, value: object, origin: str) -> Any:
        """Return a value in the option's type.

        Args:
            value: Text, or the value that YAML has read; None says nothing.
            origin: Where it comes from, for the error.

        Raises:
            ConfigurationError: It is not one of the option's values.
        """
        if value is None:
            return None
        text = "no" if value is False and "no" in self.choices else str(value)  # YAML reads `no` as false
        try:
            found = self.read(text)
        except ValueError:
            expected = {as_bool: "true or false", int: "a whole number", float: "a number"}.get(
                self.read, "another text"
            )
            raise ConfigurationError(f"{origin}: {self.name}={text!r}, expected {expected}.") from None
        if self.choices and str(found) not in self.choices:
            raise ConfigurationError(
                f"{origin}: {self.name}={text!r} is unknown.{nearest(text, self.choices)} Known: "
                f"{', '.join(self.choices)}."
            )
        return found


def as_bool(text: str) -> bool:
    """Return the truth value of a text.

    Raises:
        ValueError: It is not one.
    """
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ValueError(text)
    return text.lower() in _TRUE


def _lower(text: str) -> str:
    return text.lower()


def _option(
    help: str,
    read: Callable[[str], Any] = str,
    *,
    group: str,
    variable: str | None = None,
    section: str = "",
    choices: tuple[str, ...] = (),
    later: str = "",
    harmless: tuple[str, ...] = (),
) -> Any:
    return field(
        default=None,
        metadata={
            "help": help,
            "read": read,
            "group": group,
            "variable": variable,
            "section": section,
            "choices": choices,
            "later": later,
            "harmless": harmless,
        },
    )


_HARDWARE, _PROCESSES, _NODES, _RESULTS = "hardware", "processes", "several machines", "output and restarts"
_TRAINING, _COMPILE, _FSDP, _DEEPSPEED = "training", "compilation", "FSDP", "DeepSpeed"
_MESH, _LATER = "parallelism", "not supported yet"
_MEGATRON = "Megatron-LM is not supported; --use_parallelism_config splits layers"
_TPU = "TPUs are not supported; delete it, and start the script on GPUs or with --cpu"
_MPI = "start the script by mpirun itself, whose variables are read"
_SEQUENCES = "splitting sequences is not supported; use --parallelism_config_tp_size, which splits layers"
_SECRET = "SageMaker is not supported, and a secret does not belong on a command line; delete it"
_FP8 = "training in 8 bits is not supported; use --mixed_precision bf16"


def _fsdp(help: str, name: str, read: Callable[[str], Any] = str, choices: tuple[str, ...] = ()) -> Any:
    return _option(help, read, group=_FSDP, variable=f"FSDP_{name}", section="fsdp_config", choices=choices)


def _deepspeed(help: str, variable: str | None, read: Callable[[str], Any] = str) -> Any:
    return _option(help, read, group=_DEEPSPEED, variable=variable, section="deepspeed_config")


def _mesh(help: str, name: str, later: str = "") -> Any:
    return _option(
        help,
        int,
        group=_MESH,
        variable=f"PARALLELISM_CONFIG_{name}",
        section="parallelism_config",
        later=later,
        harmless=("1",),
    )


def _unused(help: str, read: Callable[[str], Any] = str) -> Any:
    """Return an option of sequences that are split, which is accepted because `*_size` refuses more than 1."""
    return _option(help, read, group=_MESH, section="parallelism_config")


def _dynamo(help: str, name: str, read: Callable[[str], Any] = str) -> Any:
    return _option(help, read, group=_COMPILE, variable=f"ACCELERATE_DYNAMO_{name}", section="dynamo_config")


def _later(reason: str, read: Callable[[str], Any] = str, section: str = "", harmless: tuple[str, ...] = ()) -> Any:
    return _option("Not supported yet.", read, group=_LATER, section=section, later=reason, harmless=harmless)


def _megatron(*harmless: str) -> Any:
    return _later(_MEGATRON, harmless=harmless)


def _hidden(text: str) -> str:
    """Return a text that is shown in the place of a secret."""
    return "(hidden)" if text else ""


@dataclass(frozen=True)
class LaunchConfig:
    """Options of `trainwright launch`, under the names of `accelerate launch`. A field that is None is not set."""

    cpu: bool | None = _option("Train on the CPU.", as_bool, group=_HARDWARE, variable="ACCELERATE_USE_CPU")
    multi_gpu: bool | None = _option("Use all GPUs of the machine, which is the default.", as_bool, group=_HARDWARE)
    gpu_ids: str | None = _option("Numbers of the GPUs to use, separated by commas, or 'all'.", group=_HARDWARE)
    num_processes: int | None = _option(
        "Processes on all machines. Default: one for each GPU; with --cpu 1.", int, group=_PROCESSES
    )
    num_cpu_threads_per_process: int | None = _option(
        "Threads of torch in each process.", int, group=_PROCESSES, variable="OMP_NUM_THREADS"
    )
    enable_cpu_affinity: bool | None = _option(
        "Bind processes to the CPU cores beside their GPUs.",
        as_bool,
        group=_PROCESSES,
        variable="ACCELERATE_CPU_AFFINITY",
    )
    num_machines: int | None = _option("Number of machines. Default: 1.", int, group=_NODES)
    machine_rank: int | None = _option("Rank of this machine, from 0.", int, group=_NODES)
    main_process_ip: str | None = _option("Address of the machine with rank 0.", group=_NODES)
    main_process_port: int | None = _option(
        "Port of the machine with rank 0. 0 chooses a free one on one machine.", int, group=_NODES
    )
    same_network: bool | None = _option(
        "Accepted: machines meet at the address of the machine with rank 0.", as_bool, group=_NODES
    )
    rdzv_backend: str | None = _option(
        "How machines meet: 'static' or 'c10d'.", _lower, group=_NODES, choices=("static", "c10d")
    )
    rdzv_conf: str | None = _option("Further options of the rendezvous: key=value, separated by commas.", group=_NODES)
    rdzv_id: str | None = _option("Name of the job, the same on all machines.", group=_NODES)
    max_restarts: int | None = _option(
        "How often all processes are started again after a failure. Default: 0.", int, group=_RESULTS
    )
    monitor_interval: float | None = _option(
        "Seconds between two looks at the processes. Default: 0.1.", float, group=_RESULTS
    )
    log_dir: str | None = _option("Folder for the output of processes, a file for each.", group=_RESULTS)
    tee: str | None = _option(
        "Which output is written to files and shown: 0 none, 1 stdout, 2 stderr, 3 both.", group=_RESULTS
    )
    role: str | None = _option("Name of the processes in the output. Default: 'default'.", group=_RESULTS)
    debug: bool | None = _option(
        "Compare tensors of all processes in each collective operation.",
        as_bool,
        group=_RESULTS,
        variable="ACCELERATE_DEBUG_MODE",
    )
    quiet: bool | None = _option("After a failure, show only the traceback of the script.", as_bool, group=_RESULTS)
    mixed_precision: str | None = _option(
        "Precision of models.",
        _lower,
        group=_TRAINING,
        variable="ACCELERATE_MIXED_PRECISION",
        choices=("no", "fp16", "bf16", "fp8"),
    )
    gradient_accumulation_steps: int | None = _deepspeed(
        "Micro-batches of one optimizer step.", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", int
    )
    use_fsdp: bool | None = _option("Shard models by FSDP.", as_bool, group=_TRAINING, variable="ACCELERATE_USE_FSDP")
    use_deepspeed: bool | None = _option(
        "Train by DeepSpeed.", as_bool, group=_TRAINING, variable="ACCELERATE_USE_DEEPSPEED"
    )
    use_parallelism_config: bool | None = _option(
        "Arrange processes along several axes.", as_bool, group=_TRAINING, variable="ACCELERATE_USE_PARALLELISM_CONFIG"
    )
    dynamo_backend: str | None = _dynamo("Compile models by this backend of torch.compile.", "BACKEND")
    dynamo_mode: str | None = _dynamo("Mode of torch.compile.", "MODE")
    dynamo_use_fullgraph: bool | None = _dynamo("Compile a model as one graph.", "USE_FULLGRAPH", as_bool)
    dynamo_use_dynamic: bool | None = _dynamo("Compile for dynamic shapes.", "USE_DYNAMIC", as_bool)
    dynamo_use_regional_compilation: bool | None = _dynamo(
        "Compile repeated blocks.", "USE_REGIONAL_COMPILATION", as_bool
    )
    fsdp_version: int | None = _fsdp("Version whose options are given.", "VERSION", int, ("1", "2"))
    fsdp_sharding_strategy: str | None = _fsdp("Sharding strategy of version 1.", "SHARDING_STRATEGY")
    fsdp_reshard_after_forward: str | None = _fsdp(
        "Free gathered parameters after the forward.", "RESHARD_AFTER_FORWARD"
    )
    fsdp_offload_params: bool | None = _fsdp("Keep shards on the host.", "OFFLOAD_PARAMS", as_bool)
    fsdp_min_num_params: int | None = _fsdp("Smallest unit of SIZE_BASED_WRAP.", "MIN_NUM_PARAMS", int)
    fsdp_auto_wrap_policy: str | None = _fsdp("TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP.", "AUTO_WRAP_POLICY")
    fsdp_transformer_layer_cls_to_wrap: str | None = _fsdp(
        "Classes of units, separated by commas.", "TRANSFORMER_CLS_TO_WRAP"
    )
    fsdp_backward_prefetch: str | None = _fsdp("When the next unit is gathered in backward.", "BACKWARD_PREFETCH")
    fsdp_state_dict_type: str | None = _fsdp("FULL_STATE_DICT or SHARDED_STATE_DICT.", "STATE_DICT_TYPE")
    fsdp_forward_prefetch: bool | None = _fsdp("Gather the next unit during a forward.", "FORWARD_PREFETCH", as_bool)
    fsdp_use_orig_params: bool | None = _fsdp("Only true.", "USE_ORIG_PARAMS", as_bool)
    fsdp_cpu_ram_efficient_loading: bool | None = _fsdp(
        "Only rank 0 reads pretrained weights.", "CPU_RAM_EFFICIENT_LOADING", as_bool
    )
    fsdp_sync_module_states: bool | None = _fsdp("Only true.", "SYNC_MODULE_STATES", as_bool)
    fsdp_activation_checkpointing: bool | None = _fsdp(
        "Recompute activations in backward.", "ACTIVATION_CHECKPOINTING", as_bool
    )
    deepspeed_config_file: str | None = _deepspeed("DeepSpeed's own configuration.", "ACCELERATE_DEEPSPEED_CONFIG_FILE")
    zero_stage: int | None = _deepspeed("Stage of ZeRO, 0 to 3.", "ACCELERATE_DEEPSPEED_ZERO_STAGE", int)
    offload_optimizer_device: str | None = _deepspeed(
        "none, cpu or nvme.", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"
    )
    offload_param_device: str | None = _deepspeed("none, cpu or nvme.", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE")
    offload_optimizer_nvme_path: str | None = _deepspeed(
        "Folder of offloaded optimizer states.", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH"
    )
    offload_param_nvme_path: str | None = _deepspeed(
        "Folder of offloaded parameters.", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"
    )
    gradient_clipping: float | None = _deepspeed("Largest norm of gradients.", "ACCELERATE_GRADIENT_CLIPPING", float)
    zero3_init_flag: bool | None = _deepspeed(
        "Accepted: models are built in shards.", "ACCELERATE_DEEPSPEED_ZERO3_INIT", as_bool
    )
    zero3_save_16bit_model: bool | None = _deepspeed(
        "Accepted.", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", as_bool
    )
    deepspeed_moe_layer_cls_names: str | None = _deepspeed(
        "Classes of mixture-of-experts layers.", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"
    )
    parallelism_config_dp_replicate_size: int | None = _mesh("Replicas of the model.", "DP_REPLICATE_SIZE")
    parallelism_config_dp_shard_size: int | None = _mesh("Ranks that shard a replica.", "DP_SHARD_SIZE")
    parallelism_config_tp_size: int | None = _mesh("Ranks that split layers.", "TP_SIZE")
    parallelism_config_cp_size: int | None = _mesh("Ranks that split sequences; only 1.", "CP_SIZE", _SEQUENCES)
    parallelism_config_cp_backend: str | None = _unused("Accepted.")
    parallelism_config_cp_comm_strategy: str | None = _unused("Accepted.")
    parallelism_config_sp_size: int | None = _mesh("Ranks that split sequences; only 1.", "SP_SIZE", _SEQUENCES)
    parallelism_config_sp_backend: str | None = _unused("Accepted.")
    parallelism_config_sp_seq_length: int | None = _unused("Accepted.", int)
    parallelism_config_sp_seq_length_is_variable: bool | None = _unused("Accepted.", as_bool)
    parallelism_config_sp_attn_implementation: str | None = _unused("Accepted.")
    use_xpu: bool | None = _option("Accepted: XPUs are found.", as_bool, group=_HARDWARE)
    no_tpu_cluster: bool | None = _option("Accepted: there is no TPU.", as_bool, group=_HARDWARE)
    ipex: bool | None = _later("intel_extension_for_pytorch ended with torch 2.8; bf16 works without it", as_bool)
    tpu: bool | None = _later(_TPU, as_bool)
    tpu_cluster: bool | None = _later(_TPU, as_bool)
    tpu_use_cluster: bool | None = _later(_TPU, as_bool)
    tpu_use_sudo: bool | None = _later(_TPU, as_bool)
    vm: str | None = _later(_TPU)
    env: str | None = _later(_TPU)
    main_training_function: str | None = _later(_TPU, harmless=("main",))
    downcast_bf16: bool | None = _later(_TPU, as_bool)
    aws_access_key_id: str | None = _later(_SECRET, _hidden)
    aws_secret_access_key: str | None = _later(_SECRET, _hidden)
    fsdp_activation_checkpointing_offload: bool | None = _later(
        "inputs of recomputed layers stay on the device; use --fsdp_activation_checkpointing true alone",
        as_bool,
        "fsdp_config",
    )
    use_megatron_lm: bool | None = _later(_MEGATRON, as_bool)
    megatron_lm_tp_degree: str | None = _megatron("1")
    megatron_lm_pp_degree: str | None = _megatron("1")
    megatron_lm_num_micro_batches: str | None = _megatron("1")
    megatron_lm_sequence_parallelism: str | None = _megatron()
    megatron_lm_recompute_activations: str | None = _megatron()
    megatron_lm_use_distributed_optimizer: str | None = _megatron()
    megatron_lm_gradient_clipping: str | None = _megatron("1.0")
    megatron_lm_use_custom_fsdp: str | None = _megatron()
    megatron_lm_no_load_optim: str | None = _megatron()
    megatron_lm_no_save_optim: str | None = _megatron()
    megatron_lm_eod_mask_loss: str | None = _megatron()
    megatron_lm_overlap_cpu_optimizer_d2h_h2d: str | None = _megatron()
    megatron_lm_optimizer_cpu_offload: str | None = _megatron()
    megatron_lm_use_precision_aware_optimizer: str | None = _megatron()
    megatron_lm_decoder_last_pipeline_num_layers: str | None = _megatron()
    megatron_lm_recompute_granularity: str | None = _megatron()
    megatron_lm_recompute_method: str | None = _megatron()
    megatron_lm_recompute_num_layers: str | None = _megatron()
    megatron_lm_attention_backend: str | None = _megatron()
    megatron_lm_expert_model_parallel_size: str | None = _megatron("1")
    megatron_lm_context_parallel_size: str | None = _megatron("1")
    megatron_lm_attention_dropout: str | None = _megatron()
    megatron_lm_hidden_dropout: str | None = _megatron()
    megatron_lm_attention_softmax_in_fp32: str | None = _megatron()
    megatron_lm_expert_tensor_parallel_size: str | None = _megatron("1")
    megatron_lm_calculate_per_token_loss: str | None = _megatron()
    megatron_lm_use_rotary_position_embeddings: str | None = _megatron()
    fp8_backend: str | None = _later(_FP8)
    fp8_margin: str | None = _later(_FP8)
    fp8_interval: str | None = _later(_FP8)
    fp8_format: str | None = _later(_FP8)
    fp8_amax_history_len: str | None = _later(_FP8)
    fp8_amax_compute_algo: str | None = _later(_FP8)
    fp8_override_linear_precision: str | None = _later(_FP8)
    fp8_opt_level: str | None = _later(_FP8)
    fp8_enable_fsdp_float8_all_gather: str | None = _later(_FP8)
    fp8_pad_inner_dim: str | None = _later(_FP8)
    fp8_use_autocast_during_eval: bool | None = _later(_FP8, as_bool)
    deepspeed_hostfile: str | None = _deepspeed("File with the machines: lines of 'NAME slots=NUMBER'.", None)
    deepspeed_exclusion_filter: str | None = _deepspeed("Machines and slots to leave out: 'a@b:0,2'.", None)
    deepspeed_inclusion_filter: str | None = _deepspeed("Machines and slots to use: 'a@b:0,2'.", None)
    deepspeed_multinode_launcher: str | None = _deepspeed(
        "standard: start the command on each machine. pdsh: start it once.", None
    )
    mpirun_hostfile: str | None = _later(_MPI, section="mpirun_config")
    mpirun_ccl: str | None = _later(_MPI, section="mpirun_config", harmless=("0", "1"))

    def set_options(self) -> dict[str, Any]:
        """Return the options that are set, by their names."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) is not None}

    def environment(self) -> dict[str, str]:
        """Return the variables by which set options reach the script."""
        found = {}
        for option in options():
            value = getattr(self, option.name)
            if option.variable is not None and value is not None:
                found[option.variable] = str(value).lower() if isinstance(value, bool) else str(value)
        return found


def options() -> Iterator[Option]:
    """Yield all options, in the order of the fields."""
    for one in fields(LaunchConfig):
        facts: Mapping[str, Any] = one.metadata
        yield Option(one.name, **facts)
