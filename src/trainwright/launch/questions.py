"""The questions of `trainwright config`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigurationError, require_package
from trainwright.launch.launch_config import LaunchConfig
from trainwright.launch.reading import known_options

# Options that are off by default, besides those whose names begin with "use_".
_SWITCHES = ("sagemaker", "mpi", "tpu", "downcast_bf16", "debug")


def check_terminal() -> None:
    """Check that questions can be asked.

    Raises:
        ConfigurationError: No terminal is attached.
        MissingPackageError: questionary is not installed.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigurationError(
            "`trainwright config` asks questions, and this is not a terminal. Use `trainwright config default "
            "--mixed_precision bf16`, or pass options to `trainwright launch` (--num_processes, --use_fsdp, …)."
        )
    _questionary()


def confirm(message: str, default: bool = False) -> bool:
    """Return the answer to a question for yes or no."""
    return bool(_questionary().confirm(message, default=default).unsafe_ask())


def ask(devices: int) -> LaunchConfig:
    """Ask all necessary questions and return the options.

    Args:
        devices: Number of accelerators of this machine.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    questions = Questions()
    if questions.confirm("sagemaker", False):
        _ask_sagemaker(questions)
    else:
        _ask_machines(questions, devices)
    if questions.choose("dynamo_backend", "no", "inductor", "aot_eager", "cudagraphs", "eager") != "no":
        questions.choose("dynamo_mode", "default", "reduce-overhead", "max-autotune")
        for name in ("dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation"):
            questions.confirm(name, False)
    if "deepspeed_config_file" not in questions.answers:
        questions.choose("mixed_precision", "no", "fp16", "bf16", "fp8")
        if not questions.answers["sagemaker"]:  # Accelerate reads no section of DeepSpeed in such a file
            questions.number("gradient_accumulation_steps", 1)
    options = {}
    for name, answer in questions.answers.items():
        is_switch = name.startswith("use_") or name in _SWITCHES
        # Leave out what is off by default, so that the file has only what was requested.
        if is_switch and answer is False:
            continue
        if name == "dynamo_backend" and answer == "no":
            continue
        options[name] = answer
    return LaunchConfig(**options)


def _ask_sagemaker(questions: Questions) -> None:
    for name in ("profile", "region"):
        questions.text(name, required=False)
    questions.text("iam_role_name")
    if not questions.text("image_uri", required=False):
        questions.text("py_version", "py312")
        questions.text("pytorch_version", "2.8.0")
        questions.text("transformers_version", required=False)
    for name in ("sagemaker_inputs_file", "sagemaker_metrics_file"):
        questions.text(name, required=False)
    questions.text("ec2_instance_type", "ml.g5.xlarge")
    if questions.choose("sagemaker_distributed_type", "NO", "DATA_PARALLEL") == "DATA_PARALLEL":
        questions.number("num_machines", 1)


def _ask_machines(questions: Questions, devices: int) -> None:
    _ask_processes(questions, devices)
    if questions.answers.get("tpu"):
        return
    has_several = questions.answers["num_processes"] > 1
    # DeepSpeed is of use for one GPU too: it offloads to the CPU.
    can_use_deepspeed = has_several or not questions.answers["cpu"]
    if has_several and questions.confirm("use_fsdp", False):
        _ask_fsdp(questions)
    elif can_use_deepspeed and questions.confirm("use_deepspeed", False):
        _ask_deepspeed(questions)
    elif has_several and questions.confirm("use_megatron_lm", False):
        _ask_megatron(questions)
    _ask_axes(questions)


def _ask_processes(questions: Questions, devices: int) -> None:
    machines = questions.number("num_machines", 1)
    if machines > 1 and questions.confirm("mpi", False):
        questions.text("mpirun_hostfile", required=False, problem=_missing_file)
        questions.number("mpirun_ccl", 1)
    elif machines > 1:
        if questions.choose("rdzv_backend", "static", "c10d") == "static":
            text = f"Ranks are 0 to {machines - 1}."
            questions.number("machine_rank", 0, least=0, problem=lambda rank: text if rank >= machines else "")
        else:
            questions.text("rdzv_id", "trainwright")
        questions.text("main_process_ip")
        questions.number("main_process_port", 29500)
    cpu = questions.confirm("cpu", devices == 0)
    may_have_tpu = not cpu and devices == 0 and not questions.answers.get("mpi")
    if may_have_tpu and questions.confirm("tpu", False):
        questions.confirm("downcast_bf16", False)
    elif not cpu and machines == 1:
        questions.text("gpu_ids", "all")
    default = machines
    if not cpu and devices > 0:
        default = devices * machines
    _ask_num_processes(questions, default, machines)


def _ask_num_processes(questions: Questions, default: int, machines: int) -> None:
    text = f"Write a multiple of the {machines} machines."
    processes = questions.number("num_processes", default, problem=lambda number: text if number % machines else "")
    if processes > 1:
        questions.confirm("debug", False)


def _ask_fsdp(questions: Questions) -> None:
    questions.answers["fsdp_version"] = 2
    questions.confirm("fsdp_reshard_after_forward", True)
    questions.confirm("fsdp_offload_params", False)
    policy = questions.choose("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
    if policy == "TRANSFORMER_BASED_WRAP":
        questions.text("fsdp_transformer_layer_cls_to_wrap", required=False)
    elif policy == "SIZE_BASED_WRAP":
        questions.number("fsdp_min_num_params", 100_000_000)
    questions.choose("fsdp_state_dict_type", "SHARDED_STATE_DICT", "FULL_STATE_DICT")
    questions.confirm("fsdp_cpu_ram_efficient_loading", True)
    questions.confirm("fsdp_activation_checkpointing", False)


def _ask_deepspeed(questions: Questions) -> None:
    if questions.text("deepspeed_config_file", required=False):
        return
    stage = questions.choose("zero_stage", "0", "1", "2", "3", default="2")
    for least, name in ((2, "optimizer"), (3, "param")):
        if stage >= least and questions.choose(f"offload_{name}_device", "none", "cpu", "nvme") == "nvme":
            questions.text(f"offload_{name}_nvme_path")
    if stage == 3:
        questions.confirm("zero3_init_flag", True)
    questions.number("gradient_clipping", "", least=0)


def _ask_megatron(questions: Questions) -> None:
    processes = questions.answers["num_processes"]
    tp = questions.number("megatron_lm_tp_degree", 1, problem=_divisor(processes))
    if tp > 1:
        questions.confirm("megatron_lm_sequence_parallelism", True)
    if questions.number("megatron_lm_pp_degree", 1, problem=_divisor(processes // tp)) > 1:
        questions.number("megatron_lm_num_micro_batches", 1)
    questions.confirm("megatron_lm_recompute_activations", True)
    questions.confirm("megatron_lm_use_distributed_optimizer", True)
    questions.number("megatron_lm_gradient_clipping", 1, least=0)


def _ask_axes(questions: Questions) -> None:
    processes = questions.answers["num_processes"]
    if processes == 1 or questions.answers.get("use_deepspeed") or questions.answers.get("use_megatron_lm"):
        return
    if not questions.confirm("use_parallelism_config", False):
        return
    # The product of all sizes is the number of processes. Tensor parallelism receives the rest.
    rest = processes // questions.number("parallelism_config_dp_replicate_size", 1, problem=_divisor(processes))
    if questions.answers["use_fsdp"]:
        rest //= questions.number("parallelism_config_dp_shard_size", rest, problem=_divisor(rest))
        rest //= _ask_sequences(questions, rest)
    questions.answers["parallelism_config_tp_size"] = rest


def _ask_sequences(questions: Questions, processes: int) -> int:
    """Return the number of ranks that split sequences, by either context or sequence parallelism."""
    if processes == 1:
        return 1
    for name in ("parallelism_config_cp_size", "parallelism_config_sp_size"):
        size: int = questions.number(name, 1, problem=_divisor(processes))
        if size > 1:
            return size
    return 1


def _missing_file(path: str) -> str:
    return "" if Path(path).expanduser().is_file() else f"{path} does not exist."


def _divisor(processes: int) -> Callable[[int], str]:
    """Return a check that an answer is a divisor of `processes`."""

    def problem(size: int) -> str:
        return f"{processes} processes cannot be divided by {size}." if processes % size else ""

    return problem


class Questions:
    """Dialog that asks for one option after the other, with the option's help as question. Stores answers by name."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}

    def confirm(self, name: str, default: bool) -> Any:
        """Ask for yes or no."""
        return self._store(name, str(confirm(self._message(name), default)))

    def choose(self, name: str, *choices: str, default: str | None = None) -> Any:
        """Ask for one of `choices`. The first choice is the default."""
        return self._store(
            name, _questionary().select(self._message(name), choices, default or choices[0]).unsafe_ask()
        )

    def text(
        self, name: str, default: str = "", required: bool = True, problem: Callable[[str], str] = lambda text: ""
    ) -> Any:
        """Ask for a text for which `problem` is empty. Return None for an empty text."""

        def of_text(text: str) -> str:
            if not text:
                return "Write a value." if required else ""
            return problem(text)

        return self._ask_text(name, default, of_text)

    def number(
        self, name: str, default: int | str, least: int = 1, problem: Callable[[Any], str] = lambda value: ""
    ) -> Any:
        """Ask for a number of at least `least` for which `problem` is empty. An empty `default` also allows None."""

        def of_text(text: str) -> str:
            if not text:
                return "" if default == "" else "Write a value."
            try:
                value = known_options()[name].parse(text, "answer")
            except ConfigurationError as error:
                return str(error)
            if value >= least:  # False for nan
                return problem(value)
            return f"Write a number of at least {least}."

        return self._ask_text(name, str(default), of_text)

    def _ask_text(self, name: str, default: str, problem: Callable[[str], str]) -> Any:
        def validate(text: str) -> str | bool:  # questionary expects True or an error
            return problem(text.strip()) or True

        question = _questionary().text(self._message(name), default, validate=validate)
        return self._store(name, question.unsafe_ask().strip())

    def _store(self, name: str, text: str) -> Any:
        """Store and return an answer. An empty text is no answer, and returns None."""
        if text:
            self.answers[name] = known_options()[name].parse(text, "answer")
        return self.answers.get(name)

    def _message(self, name: str) -> str:
        return f"{name}: {known_options()[name].help}"


def _questionary() -> Any:
    return require_package("questionary", purpose="`trainwright config`")
