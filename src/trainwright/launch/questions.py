"""The questions of `trainwright config`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainwright.core.errors import ConfigurationError, require_package
from trainwright.launch.launch_config import LaunchConfig, as_bool
from trainwright.launch.reading import known_options

_Answers = Mapping[str, Any]


def _always(answers: _Answers) -> bool:
    return True


def _if(**expected: Any) -> Callable[[_Answers], bool]:
    return lambda answers: all(answers.get(name) == value for name, value in expected.items())


def _more(name: str, than: int) -> Callable[[_Answers], bool]:
    return lambda answers: int(answers.get(name, -1)) > than


def _compiles(answers: _Answers) -> bool:
    return "dynamo_backend" in answers


def _is_explicit(answers: _Answers) -> bool:
    return "deepspeed_config_file" not in answers


def _remaining(answers: _Answers) -> int:
    """Return the number of ranks in one replica."""
    return int(answers["num_processes"]) // int(answers.get("parallelism_config_dp_replicate_size", 1))


@dataclass(frozen=True, slots=True)
class Question:
    """A question for one option.

    Attributes:
        name: of the option, whose help is the question.
        default: its answer, or a function of earlier answers and the number of devices.
        asked: returns whether earlier answers make it necessary.
        choices: the answers to choose from.
        least: the smallest number.
        divides: returns a number that the answer must divide.
        required: an empty text is not an answer.
    """

    name: str
    default: Any
    asked: Callable[[_Answers], bool] = _always
    choices: tuple[str, ...] = ()
    least: int = 1
    divides: Callable[[_Answers], int] | None = None
    required: bool = True

    def problem(self, text: str, answers: _Answers) -> str:
        """Return what is wrong with a written answer; empty: nothing."""
        if not text.strip():
            return "Write a value." if self.required else ""
        try:
            value = known_options()[self.name].parse(text, "answer")
        except ConfigurationError as error:
            return str(error)
        if isinstance(value, (int, float)) and not value >= self.least:  # nan too
            return f"Write a number of at least {self.least}."
        if self.name == "machine_rank" and value >= answers["num_machines"]:
            return f"Ranks are 0 to {answers['num_machines'] - 1}."
        if self.name == "num_processes" and value % answers["num_machines"]:
            return f"{value} processes cannot be divided by {answers['num_machines']} machines."
        if self.divides is not None and self.divides(answers) % value:
            return f"{self.divides(answers)} processes cannot be divided by {value}."
        return ""


_FSDP, _DEVICES = _if(use_fsdp=True), ("none", "cpu", "nvme")
_SEVERAL, _DISTRIBUTED = _more("num_machines", 1), _more("num_processes", 1)
QUESTIONS = (
    Question("num_machines", 1),
    Question("rdzv_backend", "static", _SEVERAL, ("static", "c10d")),
    Question("machine_rank", 0, _if(rdzv_backend="static"), least=0),
    Question("rdzv_id", "trainwright", _if(rdzv_backend="c10d")),
    Question("main_process_ip", "", _SEVERAL),
    Question("main_process_port", 29500, _SEVERAL),
    Question("cpu", lambda answers, devices: devices == 0),
    Question("gpu_ids", "all", _if(cpu=False, num_machines=1)),
    Question(
        "num_processes",
        lambda answers, devices: (1 if answers["cpu"] else devices or 1) * answers["num_machines"],
    ),
    Question("use_fsdp", False, _DISTRIBUTED),
    Question("fsdp_reshard_after_forward", True, _FSDP),
    Question("fsdp_offload_params", False, _FSDP),
    Question(
        "fsdp_auto_wrap_policy",
        "TRANSFORMER_BASED_WRAP",
        _FSDP,
        ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    ),
    Question(
        "fsdp_transformer_layer_cls_to_wrap", "", _if(fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP"), required=False
    ),
    Question("fsdp_min_num_params", 100_000_000, _if(fsdp_auto_wrap_policy="SIZE_BASED_WRAP")),
    Question("fsdp_state_dict_type", "SHARDED_STATE_DICT", _FSDP, ("SHARDED_STATE_DICT", "FULL_STATE_DICT")),
    Question("fsdp_cpu_ram_efficient_loading", True, _FSDP),
    Question("fsdp_activation_checkpointing", False, _FSDP),
    Question(
        "use_deepspeed",
        False,
        lambda answers: not answers.get("use_fsdp") and (_DISTRIBUTED(answers) or not answers["cpu"]),
    ),
    Question("deepspeed_config_file", "", _if(use_deepspeed=True), required=False),
    Question(
        "zero_stage",
        "2",
        lambda answers: bool(answers.get("use_deepspeed")) and _is_explicit(answers),
        ("0", "1", "2", "3"),
    ),
    Question("offload_optimizer_device", "none", _more("zero_stage", 1), _DEVICES),
    Question("offload_optimizer_nvme_path", "", _if(offload_optimizer_device="nvme")),
    Question("offload_param_device", "none", _more("zero_stage", 2), _DEVICES),
    Question("offload_param_nvme_path", "", _if(offload_param_device="nvme")),
    Question("gradient_clipping", "", _more("zero_stage", -1), least=0, required=False),
    Question(
        "use_parallelism_config", False, lambda answers: _DISTRIBUTED(answers) and not answers.get("use_deepspeed")
    ),
    Question(
        "parallelism_config_dp_replicate_size",
        1,
        _if(use_parallelism_config=True),
        divides=lambda answers: int(answers["num_processes"]),
    ),
    Question(
        "parallelism_config_dp_shard_size",
        lambda answers, devices: _remaining(answers),
        _if(use_parallelism_config=True, use_fsdp=True),
        divides=_remaining,
    ),
    Question("dynamo_backend", "no", _always, ("no", "inductor", "aot_eager", "cudagraphs", "eager")),
    Question("dynamo_mode", "default", _compiles, ("default", "reduce-overhead", "max-autotune")),
    Question("dynamo_use_fullgraph", False, _compiles),
    Question("dynamo_use_dynamic", False, _compiles),
    Question("dynamo_use_regional_compilation", False, _compiles),
    Question("mixed_precision", "no", _is_explicit, ("no", "fp16", "bf16")),
    Question("gradient_accumulation_steps", 1, _is_explicit),
)
"""In the order in which they are asked."""
# Answers that are not written.
_NOTHING = [("dynamo_backend", "no"), *((name, "False") for name in known_options() if name.startswith("use_"))]


def check_terminal() -> None:
    """Check that questions can be asked.

    Raises:
        ConfigurationError: There is no terminal.
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
    answers: dict[str, Any] = {}
    for question in QUESTIONS:
        text = _answer(question, answers, devices).strip() if question.asked(answers) else ""
        if text and (question.name, text) not in _NOTHING:
            answers[question.name] = known_options()[question.name].parse(text, "answer")
    if answers.get("use_fsdp"):
        answers["fsdp_version"] = 2
    if answers.get("use_parallelism_config"):
        shards = answers.get("parallelism_config_dp_shard_size", 1)
        answers["parallelism_config_tp_size"] = _remaining(answers) // shards
    return LaunchConfig(**answers)


def _answer(question: Question, answers: _Answers, devices: int) -> str:
    option = known_options()[question.name]
    default = question.default(answers, devices) if callable(question.default) else question.default
    message = f"{option.name}: {option.help}"
    if option.read is as_bool or isinstance(default, bool):
        return str(confirm(message, default))
    if question.choices:
        found = _questionary().select(message, choices=list(question.choices), default=default)
    else:
        found = _questionary().text(
            message, default=str(default), validate=lambda text: question.problem(text, answers) or True
        )
    return str(found.unsafe_ask())


def _questionary() -> Any:
    return require_package("questionary", purpose="`trainwright config`")
