"""LaunchConfig: every option of `trainwright launch`, with its flag, YAML key and environment variable."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.core.names.kwargs_handler import FLAG_WORDS, as_flag
from trainwright.core.process import ALL_PROCESSES, JOB
from trainwright.core.process import variable as read
from trainwright.strategies.deepspeed.option_table import DEEPSPEED
from trainwright.strategies.engine_tables import ENGINE_TABLES
from trainwright.strategies.steps.option_table import DYNAMO, FP8


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the launcher.

    Attributes:
        name: name of the field in `LaunchConfig`. The flag is `--name`.
        read: converts the option's text to its value, and raises ValueError if the text is invalid.
        help: help text of the option, one sentence.
        group: heading in `--help`.
        variable: environment variable that passes the value to the script. None: only the launcher uses the option.
        section: key of the YAML mapping that contains the option. Empty: the top level of the file.
        choices: the allowed values. Empty: any.
        other: advice for values that are not in `choices`.
        later: reason why the option is not supported. Empty: the option is supported.
        harmless: value of an unsupported option that is accepted because it has no effect.
        repeats: True if the flag may be repeated. The value has one line for each occurrence.
    """

    name: str
    group: str
    help: str
    read: Callable[[str], Any] = str
    variable: str | None = None
    section: str = ""
    choices: tuple[str, ...] = ()
    other: str = ""
    later: str = ""
    harmless: str = ""
    repeats: bool = False

    @property
    def is_flag(self) -> bool:
        """True if the flag has no value on the command line."""
        return self.read is as_flag and self.section == ""

    def takes_none_of(self, words: Sequence[str]) -> bool:
        """Return whether the flag stands for true, and the words after it on the command line are not its value.

        Accelerate's flags of the sections of torch.compile and fp8 have no value. Here, `true` or `false` may follow.
        """
        if self.is_flag:
            return True
        may_lack_value = self.read is as_flag and self.section in (DYNAMO.section, FP8.section)
        return may_lack_value and (not words or words[0].lower() not in FLAG_WORDS)

    @property
    def is_refused(self) -> bool:
        """True if each value of the option is refused or has no effect."""
        return self.group == _LATER

    def refusal(self, value: object) -> str:
        """Return the reason why a value is not supported. Empty if the value is supported."""
        text = str(value).lower()
        requests_nothing = text in ("", "none", self.harmless) or FLAG_WORDS.get(text) is False
        return "" if requests_nothing else self.later

    def parse(self, value: object, origin: str) -> Any:
        """Return a value in the option's type.

        Args:
            value: Text, or the value from a YAML file. None if the option is not set.
            origin: Source of the value, for the error.

        Raises:
            ConfigurationError: The value is invalid, or the option is not supported.
        """
        if self.is_refused and self.refusal(value):
            raise ConfigurationError(f"{origin} is not supported: {self.later}.")
        if value is None or self.is_refused:
            return None
        if isinstance(value, dict):
            text = json.dumps(value)
        elif value is False and "no" in self.choices:  # YAML reads `no` as false
            text = "no"
        else:
            text = str(value)
        lines = text.split("\n") if self.repeats else [text]
        # Values are written into scripts line by line, and shown in terminals.
        if self.read is not as_mapping and not all(line.isprintable() for line in lines):
            raise ConfigurationError(f"{origin}: {self.name}={text!r}, expected one line of printable text.")
        try:
            parsed = self.read(text)
        except ValueError:
            kinds = {as_flag: "true or false", int: "a whole number", as_mapping: "a mapping of JSON"}
            expected = kinds.get(self.read, "a number")
            raise ConfigurationError(f"{origin}: {self.name}={text!r}, expected {expected}.") from None
        if isinstance(parsed, dict):
            _check_secrets(parsed, origin)
        if self.choices and str(parsed) not in self.choices:
            raise ConfigurationError(
                f"{origin}: {self.name}={text!r} is unknown.{nearest(text, self.choices)} Known: "
                f"{', '.join(self.choices)}.{self.other}"
            )
        return parsed

    def parse_argument(self, text: str) -> Any:
        """Return the value of a text on the command line, for argparse."""
        try:
            return self.parse(text, f"--{self.name}")
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(str(error)) from None


def as_mapping(text: str) -> dict[str, Any]:
    """Return the mapping that a JSON text contains.

    Raises:
        ValueError: The text is not JSON, or contains something else.
    """
    mapping = json.loads(text)
    if not isinstance(mapping, dict):
        raise ValueError(text)
    return mapping


def _check_secrets(values: Mapping[str, Any], origin: str) -> None:
    """Check that no key of a mapping names AWS credentials."""
    for key, value in values.items():
        if any(word in key.lower() for word in ("secret_access", "access_key", "session_token")):
            raise ConfigurationError(f"{origin}: {key} is not supported: {_SECRET}.")
        if isinstance(value, dict):
            _check_secrets(value, origin)


def _option(group: str, help: str, read: Callable[[str], Any] = str, variable: str | None = None, **more: Any) -> Any:
    """Return the field of an option. `{}` in `variable` is replaced by the option's name in capitals."""
    return field(default=None, metadata={"option": Option("", group, help, read, variable, **more)})


_LATER = "not supported yet"
_TPU = "start the script on each machine of a pod with --tpu; trainwright tpu-config runs commands there"
_SECRET = "a secret does not belong in a command or a file; delete it, and name a profile of AWS by --profile"
_IPEX = "Intel ended intel_extension_for_pytorch with torch 2.8; its work is in torch, where bf16 uses AMX"


def _without_effect(name: str, read: Callable[[str], Any] = str) -> Option:
    """Return an option that is accepted and has no effect."""
    return Option(name, _LATER, "Not supported yet.", read)


def _refused(name: str, reason: str, read: Callable[[str], Any] = str, harmless: str = "") -> Option:
    """Return an option whose values are refused, except for `harmless`, which requests nothing."""
    return Option(name, _LATER, "Not supported yet.", read, later=reason, harmless=harmless)


# Options of `accelerate launch` that are not fields of `LaunchConfig`. The tables of engines contain others.
_REFUSED = (
    _without_effect("use_xpu", as_flag),
    _without_effect("no_tpu_cluster", as_flag),
    _without_effect("same_network", as_flag),
    _without_effect("parallelism_config_cp_backend"),
    _without_effect("parallelism_config_cp_comm_strategy"),
    _without_effect("parallelism_config_sp_backend"),
    _without_effect("parallelism_config_sp_seq_length"),
    _without_effect("parallelism_config_sp_seq_length_is_variable"),
    _without_effect("parallelism_config_sp_attn_implementation"),
    _refused("ipex", _IPEX, as_flag),
    _refused("tpu_cluster", _TPU, as_flag),
    _refused("tpu_use_cluster", _TPU, as_flag),
    _refused("tpu_use_sudo", _TPU, as_flag),
    _refused("vm", _TPU),
    _refused("env", _TPU),
    _refused("main_training_function", _TPU, harmless="main"),
    _refused("aws_access_key_id", _SECRET),
    _refused("aws_secret_access_key", _SECRET),
)
_TABLES = (*ENGINE_TABLES, FP8, DYNAMO)


_hardware = partial(_option, "hardware")
_processes = partial(_option, "processes")
_nodes = partial(_option, "several machines")
_slurm = partial(_option, "Slurm")
_mpi = partial(_option, "MPI")
_ray = partial(_option, "Ray")
_kubernetes = partial(_option, "Kubernetes")
_sagemaker = partial(_option, "Amazon SageMaker")
_results = partial(_option, "output and restarts")
_training = partial(_option, "training", variable="ACCELERATE_{}")


@dataclass(frozen=True)
class LaunchConfig:
    """Options of `trainwright launch`, under the names of `accelerate launch`. A field that is None is not set."""

    cpu: bool | None = _hardware("Train on the CPU.", as_flag, "ACCELERATE_USE_CPU")
    multi_gpu: bool | None = _hardware("Use all GPUs of the machine, which is the default.", as_flag)
    tpu: bool | None = _hardware("Train on a TPU, or another device of torch_xla that PJRT_DEVICE names.", as_flag)
    downcast_bf16: bool | None = _hardware("Store float32 as bfloat16 on a TPU.", as_flag, "XLA_DOWNCAST_BF16")
    gpu_ids: str | None = _hardware("Numbers of the GPUs to use, separated by commas, or 'all'.")
    num_processes: int | None = _processes("Number on all machines. Default: one for each GPU; with --cpu 1.", int)
    num_cpu_threads_per_process: int | None = _processes("Threads of torch in each process.", int, "OMP_NUM_THREADS")
    enable_cpu_affinity: bool | None = _processes("Bind to the cores of GPUs.", as_flag, "ACCELERATE_CPU_AFFINITY")
    num_machines: int | None = _nodes("Number of machines. Default: 1.", int)
    machine_rank: int | None = _nodes("Rank of this machine, from 0.", int)
    main_process_ip: str | None = _nodes("Address of the machine with rank 0.")
    main_process_port: int | None = _nodes(
        "Port of the machine with rank 0. On one machine, 0 selects a free port.", int
    )
    rdzv_backend: str | None = _nodes("How machines meet: 'static' or 'c10d'.", str.lower, choices=("static", "c10d"))
    rdzv_conf: str | None = _nodes("Further options of the rendezvous: key=value, separated by commas.")
    rdzv_id: str | None = _nodes("Name of the job, the same on all machines.")
    min_nodes: int | None = _nodes("Continue with as few machines if others leave. Needs --rdzv_id.", int)
    slurm: bool | None = _slurm("Submit a job to Slurm by sbatch.", as_flag)
    slurm_partition: str | None = _slurm("Partition. Default: the cluster's.")
    slurm_account: str | None = _slurm("Account that is charged. Default: the user's.")
    slurm_time: str | None = _slurm("Time limit, such as 01:00:00. Default: the partition's.")
    slurm_output: str | None = _slurm("File for the output. Default: %x-%j.out, name and number of the job.")
    slurm_option: str | None = _slurm("Further option of sbatch: --constraint=a100. May be repeated.", repeats=True)
    mpi: bool | None = _mpi("Start the processes by mpirun. --mpirun_hostfile does it too.", as_flag)
    mpirun_hostfile: str | None = _mpi("File with the machines.", section="mpirun_config")
    mpirun_ccl: int | None = _mpi("Worker threads of oneCCL. Default: 1.", int, section="mpirun_config")
    print: bool | None = _nodes("Print the script or command of a cluster, and start nothing.", as_flag)
    ray: bool | None = _ray("Start the processes as actors of Ray.", as_flag)
    ray_address: str | None = _ray("Address of the cluster. Default: a running one, or else a local one.")
    kubernetes: bool | None = _kubernetes("Write a manifest for kubectl.", as_flag)
    kubernetes_kind: str | None = _kubernetes(
        "Kind of the job. Default: pytorchjob.", str.lower, choices=("pytorchjob", "trainjob", "jobset")
    )
    kubernetes_image: str | None = _kubernetes("Image that contains the script, torch and trainwright.")
    kubernetes_name: str | None = _kubernetes("Name of the job. Default: the script's.")
    kubernetes_namespace: str | None = _kubernetes("Namespace of the job. Default: kubectl's.")
    kubernetes_claim: str | None = _kubernetes("Volume claim to mount, and where: runs:/runs.")
    kubernetes_output: str | None = _kubernetes("File for the manifest. Default: standard output.")
    sagemaker: bool | None = _sagemaker("Train on Amazon SageMaker.", as_flag)
    sagemaker_distributed_type: str | None = _sagemaker(
        "DATA_PARALLEL: a process for each GPU of all instances. Default: NO, one process.",
        str.upper,
        choices=("NO", "DATA_PARALLEL", "MODEL_PARALLEL"),
    )
    ec2_instance_type: str | None = _sagemaker("Type of the instances, such as ml.g5.xlarge, or local.")
    iam_role_name: str | None = _sagemaker("Name or ARN of an existing IAM role that the job receives.")
    profile: str | None = _sagemaker("Profile of AWS credentials. Default: that of the environment.")
    region: str | None = _sagemaker("Region of AWS. Default: that of the profile or the environment.")
    image_uri: str | None = _sagemaker("Docker image with torch. Default: that of the versions.")
    py_version: str | None = _sagemaker("Python of the image without --image_uri, such as py312.")
    pytorch_version: str | None = _sagemaker("PyTorch of that image, such as 2.8.0.")
    transformers_version: str | None = _sagemaker("Transformers of that image. Default: an image without them.")
    base_job_name: str | None = _sagemaker("Beginning of the job's name. Default: that of the image.")
    sagemaker_inputs_file: str | None = _sagemaker("TSV file with a heading and lines of channel and S3 address.")
    sagemaker_metrics_file: str | None = _sagemaker("TSV file with a heading and lines of metric and pattern.")
    additional_args: Mapping[str, Any] | None = _sagemaker("Further arguments of the estimator, as JSON.", as_mapping)
    max_restarts: int | None = _results("How often all processes start again after a failure. Default: 0.", int)
    monitor_interval: float | None = _results("Seconds between two checks of the processes. Default: 0.1.", float)
    log_dir: str | None = _results("Folder with a file for the output of each process but the first.")
    tee: str | None = _results("Which output is written to files and shown: 0 none, 1 stdout, 2 stderr, 3 both.")
    role: str | None = _results("Name of the processes in the output. Default: 'default'.")
    debug: bool | None = _results("Compare tensors of all processes in collectives.", as_flag, "ACCELERATE_DEBUG_MODE")
    quiet: bool | None = _results("Accepted; the launcher prints no traceback.", as_flag)
    mixed_precision: str | None = _training("Precision of models.", str.lower, choices=("no", "fp16", "bf16", "fp8"))
    gradient_accumulation_steps: int | None = _option(
        DEEPSPEED.title,
        "Micro-batches of one optimizer step.",
        int,
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        section=DEEPSPEED.section,
    )
    use_fsdp: bool | None = _training("Shard models by FSDP.", as_flag)
    use_deepspeed: bool | None = _training("Train by DeepSpeed.", as_flag)
    use_megatron_lm: bool | None = _training("Train by MegatronStrategy.", as_flag)
    use_parallelism_config: bool | None = _training("Arrange processes along several axes.", as_flag)
    # Rows of the tables of engines, which describe these options; see `options`.
    fp8_backend: str | None = None
    fp8_enable_fsdp_float8_all_gather: bool | None = None
    fp8_pad_inner_dim: bool | None = None
    fp8_format: str | None = None
    fp8_margin: int | None = None
    fp8_interval: int | None = None
    fp8_amax_history_len: int | None = None
    fp8_amax_compute_algo: str | None = None
    fp8_override_linear_precision: str | None = None
    fp8_use_autocast_during_eval: bool | None = None
    dynamo_backend: str | None = None
    dynamo_mode: str | None = None
    dynamo_use_fullgraph: bool | None = None
    dynamo_use_dynamic: bool | None = None
    dynamo_use_regional_compilation: bool | None = None
    fsdp_version: int | None = None
    fsdp_sharding_strategy: str | None = None
    fsdp_reshard_after_forward: str | None = None
    fsdp_offload_params: bool | None = None
    fsdp_min_num_params: int | None = None
    fsdp_auto_wrap_policy: str | None = None
    fsdp_transformer_layer_cls_to_wrap: str | None = None
    fsdp_backward_prefetch: str | None = None
    fsdp_state_dict_type: str | None = None
    fsdp_forward_prefetch: bool | None = None
    fsdp_use_orig_params: bool | None = None
    fsdp_cpu_ram_efficient_loading: bool | None = None
    fsdp_sync_module_states: bool | None = None
    fsdp_activation_checkpointing: bool | None = None
    deepspeed_config_file: str | None = None
    zero_stage: int | None = None
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    gradient_clipping: float | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    deepspeed_moe_layer_cls_names: str | None = None
    deepspeed_hostfile: str | None = None
    deepspeed_exclusion_filter: str | None = None
    deepspeed_inclusion_filter: str | None = None
    deepspeed_multinode_launcher: str | None = None
    parallelism_config_dp_replicate_size: int | None = None
    parallelism_config_dp_shard_size: int | None = None
    parallelism_config_tp_size: int | None = None
    parallelism_config_cp_size: int | None = None
    parallelism_config_sp_size: int | None = None
    megatron_lm_tp_degree: int | None = None
    megatron_lm_sequence_parallelism: bool | None = None
    megatron_lm_pp_degree: int | None = None
    megatron_lm_num_micro_batches: int | None = None
    megatron_lm_recompute_activations: bool | None = None
    megatron_lm_use_distributed_optimizer: bool | None = None
    megatron_lm_gradient_clipping: float | None = None
    megatron_lm_recompute_granularity: str | None = None

    @property
    def engine(self) -> str | None:
        """Name of the flag of the engine that starts the processes, such as `"slurm"`. None: the launcher."""
        if self.mpi or self.mpirun_hostfile:
            return "mpi"
        engines = ("slurm", "ray", "kubernetes", "sagemaker")
        return next((name for name in engines if getattr(self, name)), None)

    def set_options(self) -> dict[str, Any]:
        """Return the options that are set, by their names."""
        values = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None:
                values[one.name] = value
        return values

    to_dict = set_options  # Accelerate's name

    def environment(self) -> dict[str, str]:
        """Return the environment variables that pass the options to the script."""
        variables = {}
        for option in options():
            value = getattr(self, option.name)
            if option.variable is not None and value is not None:
                variables[option.variable] = str(value).lower() if isinstance(value, bool) else str(value)
        if self.min_nodes is not None:  # the number of processes may become smaller
            variables[JOB] = str(self.rdzv_id)
            variables[ALL_PROCESSES] = str(self.num_processes)
        if self.tpu:
            variables["PJRT_DEVICE"] = read("PJRT_DEVICE") or "TPU"
        return variables


def options() -> Iterator[Option]:
    """Yield all options, in the order of the fields."""
    options_of_engines = {option.name: option for option in _options_of_engines()}
    for one in fields(LaunchConfig):
        option: Option | None = one.metadata.get("option")
        if option is None:
            yield options_of_engines[one.name]
            continue
        variable = None
        if option.variable is not None:
            variable = option.variable.format(one.name.upper())
        yield replace(option, name=one.name, variable=variable)


def refused_options() -> Iterator[Option]:
    """Yield the options that are not fields of `LaunchConfig`, because they have no effect or are refused."""
    yield from _REFUSED
    for option in _options_of_engines():
        if option.is_refused:
            yield option


def _options_of_engines() -> Iterator[Option]:
    """Yield the options that the tables of engines declare."""
    for table in _TABLES:
        for row in table.options.values():
            if row.flag is None:
                continue
            if row.not_launched is not None:
                harmless = str(row.harmless[0]).lower() if row.harmless else ""
                yield _refused(row.flag, row.not_launched, harmless=harmless)
                continue
            yield Option(
                row.flag,
                table.title,
                row.help,
                row.read,
                row.variable,
                section=table.section,
                choices=row.choices,
                other=row.other,
            )
