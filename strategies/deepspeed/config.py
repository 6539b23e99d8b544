"""DeepSpeed's configuration: the user's file or dict, merged with the arguments of the strategy and the Trainer.

If the file and an argument differ, a ConfigurationError names both. `"auto"` in the file is replaced by the argument's
value.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.strategies.deepspeed.option_table import DEEPSPEED
from trainwright.strategies.deepspeed.options import (
    OFFLOADS,
    Path,
    ZeroOptions,
    buffers,
    defaults,
    look_up,
    passed_options,
    read_options,
    set_value,
    statements,
)
from trainwright.strategies.precision import Precision
from trainwright.strategies.steps.gradients import GradientClip

AUTO = "auto"
_STAGE: Path = ("zero_optimization", "stage")
_QUANTIZED = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Properties of a run's model and data, from which `"auto"` values are computed.

    Attributes:
        world_size: Number of data-parallel processes.
        micro_batch_size: Batch size of one process. None if unknown.
        accumulate: Micro-batches of one process in a step.
        hidden_size: Hidden size in the model's configuration. None if the configuration has none.
        hyperparameters: The optimizer's first parameter group. None without an optimizer.
        total_steps: Number of optimizer steps of the run. Infinity if the run has no limit.
        warmup_steps: Number of steps in which the learning rate increases.
    """

    world_size: int
    micro_batch_size: int | None
    accumulate: int
    hidden_size: int | None
    hyperparameters: Mapping[str, Any] | None
    total_steps: float
    warmup_steps: int


class NamedConfig(dict[str, Any]):
    """A configuration that has been read, with the origin that error messages name."""

    def __init__(self, content: Mapping[str, Any], origin: str) -> None:
        super().__init__(content)
        self.origin = origin


def origin_of(config: object) -> str:
    """Return the name of a configuration in error messages."""
    if isinstance(config, NamedConfig):
        return config.origin
    if isinstance(config, (str, FilePath)):
        return f"config={str(config)!r}"
    return "config"


class EngineConfig:
    """DeepSpeed's configuration. Values that depend on the run remain `"auto"` until `resolved`.

    Args:
        config: The user's configuration: a dict, the path of a JSON file, or None.
        given: The ZeRO arguments of the strategy.

    Attributes:
        origin: Name of the user's configuration in error messages.
        content: The configuration. The user's values and those of passed arguments. Without a user's configuration,
            also the defaults of other arguments.
        options: All ZeRO arguments, with defaults in place of those that were not passed.

    Raises:
        ConfigurationError: The file cannot be read, an argument differs from `config`, or options contradict each
            other.
    """

    def __init__(self, config: str | FilePath | Mapping[str, Any] | None, given: ZeroOptions) -> None:
        self.origin = origin_of(config)
        self.content = read_config(config)
        self.options = read_options(given)
        # Defaults come first, because passed arguments override them but must not differ from the user's values.
        if config is None:
            for path, value in defaults(self.options).items():
                set_value(self.content, path, value)
            if not self.options.zero_optimization:
                set_value(self.content, _STAGE, 0)
        else:
            _fill_switches(self.content, self.options, self.origin)
        passed = passed_options(given)
        for path, (name, value) in statements(given).items():
            # The passed value, not the one that it stands for: offload_optimizer=True is the device "cpu".
            origin = f"DeepSpeedStrategy({name}={passed.get(name, value)!r})"
            self.state(path, value, origin, overrides=config is None)
        if config is None:
            # Defaults of offloading, once it is known which parts are offloaded.
            for part in OFFLOADS:
                if self.offload(part) == "none":
                    continue
                for path, (_, value) in buffers(part, self.options).items():
                    set_value(self.content, path, value)
        self._check_offload()

    @property
    def stage(self) -> int:
        """The stage of ZeRO, 0 to 3."""
        return int(look_up(self.content, _STAGE) or 0)

    def offload(self, part: str) -> str:
        """Return the device of `"offload_optimizer"` or `"offload_param"`: `"none"`, `"cpu"` or `"nvme"`."""
        return str(look_up(self.content, ("zero_optimization", part, "device")) or "none")

    def state(self, path: Path, value: object, origin: str, *, overrides: bool = False) -> None:
        """Set a value, and raise a ConfigurationError if the user's configuration has another one.

        Args:
            path: Keys of the value in the nested dicts.
            value: The value.
            origin: Source of the value in the error message, such as `"Trainer(precision='bf16-mixed')"`.
            overrides: Replace another value without an error. Default: False.
        """
        configured = look_up(self.content, path)
        if configured not in (None, AUTO, value) and not overrides:
            raise ConfigurationError(
                f"{self.origin} has {'.'.join(path)}={configured!r}, which differs from {origin}. Use the same value, "
                f'or write {".".join(path)}="auto".'
            )
        set_value(self.content, path, value)

    def _check_offload(self) -> None:
        if self.options.frozen_modules and self.stage not in (1, 2):
            raise ConfigurationError(
                f"frozen_modules={self.options.frozen_modules!r} has no effect at stage={self.stage}. Remove it: "
                "stage 3 shards frozen modules too, and stage 0 shards nothing."
            )
        for part, (argument, _) in OFFLOADS.items():
            device = self.offload(part)
            if device == "none" or self.stage >= 3:
                continue
            if device == "nvme":
                alternative = "the device cpu" if part == "offload_optimizer" else "remove it"
                raise ConfigurationError(
                    f"{argument} to 'nvme' at stage={self.stage}: DeepSpeed uses disks only at stage 3. Use stage=3, "
                    f"or {alternative}."
                )
            if part == "offload_param":
                raise ConfigurationError(
                    f"{argument} at stage={self.stage}: DeepSpeed offloads parameters only at stage 3. Use stage=3."
                )
            if self.stage == 0:
                raise ConfigurationError(
                    f"{argument} at stage=0: DeepSpeed offloads only sharded states. Use stage=1, 2 or 3."
                )

    # Settings of the Trainer

    def check_run(self, accumulate: int, clip: GradientClip | None) -> None:
        """Check that accumulation and clipping in the configuration do not differ from the Trainer's settings.

        Raises:
            ConfigurationError: One of them differs.
        """
        steps = look_up(self.content, ("gradient_accumulation_steps",))
        if steps not in (None, AUTO, accumulate):
            raise ConfigurationError(
                f"{self.origin} has gradient_accumulation_steps={steps!r}, which differs from "
                f"Trainer(accumulate_grad_batches={accumulate}). Use accumulate_grad_batches={steps!r} (in an "
                f'Accelerator, gradient_accumulation_steps={steps!r}), or write "auto" in the configuration.'
            )
        max_norm = look_up(self.content, ("gradient_clipping",))
        if clip is None or max_norm in (None, AUTO):
            return
        if clip.algorithm not in (None, "norm") or clip.value != float(max_norm):
            raise ConfigurationError(
                f"{self.origin} has gradient_clipping={max_norm!r}, which differs from "
                f"Trainer(gradient_clip_val={clip.value}, gradient_clip_algorithm={clip.algorithm!r}). Remove one of "
                'them, or write "auto" in the configuration.'
            )

    @property
    def clipping(self) -> float | None:
        """The maximum gradient norm in the configuration. None if clipping is disabled or `"auto"`."""
        max_norm = look_up(self.content, ("gradient_clipping",))
        if max_norm in (None, AUTO, 0):
            return None
        return float(max_norm)

    def check_hardware(self, device_type: str, world_size: int) -> None:
        """Raise a ConfigurationError if an option needs another device type or number of processes."""
        zero = self.content.get("zero_optimization", {})
        for name in _QUANTIZED:
            if zero.get(name) and device_type == "cpu":
                raise ConfigurationError(
                    f"{self.origin} has zero_optimization.{name}={zero[name]!r}, which needs CUDA, but accelerator is "
                    "'cpu'. Remove it."
                )
        size = zero.get("zero_hpz_partition_size", 1)
        if isinstance(size, int) and size > 1 and world_size % size:
            raise ConfigurationError(
                f"{self.origin} has zero_optimization.zero_hpz_partition_size={size}, which does not divide the "
                f"{world_size} process(es). Use a divisor, usually the number of processes per node."
            )

    def set_precision(self, precision: Precision, device_type: str) -> None:
        """Enable the Trainer's precision in the configuration.

        Raises:
            ConfigurationError: DeepSpeed does not support the precision here, or the configuration has another one.
        """
        name = precision.name
        stage = self.stage
        if name == "64-true":
            raise ConfigurationError("precision='64-true': DeepSpeed has no float64. Use '32-true'.")
        if name in ("16-true", "16-mixed") and device_type == "cpu":
            raise ConfigurationError(
                f"precision={name!r}: DeepSpeed has no float16 on the CPU. Use 'bf16-mixed', or a GPU."
            )
        if name != "32-true" and stage == 0:
            raise ConfigurationError(
                f"precision={name!r} at stage=0: DeepSpeed would keep no float32 weights. Use stage=1, or "
                "strategy='ddp'."
            )
        # DeepSpeed's third form of mixed precision: float32 parameters under torch's autocast, instead of bf16 or fp16.
        autocast = look_up(self.content, ("torch_autocast", "enabled")) is True
        for part, prefix in (("bf16", "bf16"), ("fp16", "16")):
            enables = name.startswith(prefix) and not autocast
            configured = look_up(self.content, (part, "enabled"))
            if configured not in (None, AUTO, enables):
                expected = f"{prefix}-mixed" if configured else "32-true"
                expected_of_accelerator = part if configured else "no"
                raise ConfigurationError(
                    f"{self.origin} has {part}.enabled={configured!r}, which differs from Trainer(precision={name!r}). "
                    f"Use precision={expected!r} (in an Accelerator, mixed_precision={expected_of_accelerator!r}), or "
                    'write "auto" in the configuration.'
                )
            if enables or part in self.content:
                set_value(self.content, (part, "enabled"), enables)
        if autocast and not name.endswith("-mixed"):
            raise ConfigurationError(
                f"{self.origin} has torch_autocast.enabled=True, which differs from Trainer(precision={name!r}). Use "
                "precision='bf16-mixed', or remove torch_autocast."
            )
        if autocast:
            dtype = "bfloat16" if name.startswith("bf16") else "float16"
            self.state(("torch_autocast", "dtype"), dtype, f"Trainer(precision={name!r})")
        accumulation_dtype = look_up(self.content, ("data_types", "grad_accum_dtype"))
        if stage == 1 and accumulation_dtype not in (None, AUTO):
            raise ConfigurationError(
                f"{self.origin} has data_types.grad_accum_dtype, for which DeepSpeed replaces the optimizer at stage "
                "1. Use stage=2, or remove grad_accum_dtype."
            )

    # For the engine

    def resolved(self, facts: RunFacts, *, trains: bool = True) -> dict[str, Any]:
        """Return the configuration with every `"auto"` filled in from `facts` by Accelerate's documented rules.

        `trains=False` removes the optimizer and the scheduler.

        Raises:
            ConfigurationError: A value differs from `facts`, or `"auto"` cannot be inferred.
        """
        config = copy.deepcopy(self.content)
        if not trains:
            for part in ("optimizer", "scheduler"):
                config.pop(part, None)
        _fill_batch(config, facts, self.origin)
        _fill_buckets(config, facts, self.origin)
        _fill_optimizer(config, facts, self.origin)
        open_path = next(autos(config), None)
        if open_path is not None:
            raise ConfigurationError(
                f'{self.origin} has {".".join(open_path)}="auto", but its value cannot be inferred. Write a value.'
            )
        return config


def for_engine(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration for an engine that neither accumulates nor clips, because this package does both."""
    engine_config = copy.deepcopy(dict(config))
    engine_config.setdefault("steps_per_print", None)
    engine_config.pop("train_batch_size", None)  # contradicts the accumulation below
    engine_config["gradient_accumulation_steps"] = 1
    engine_config["gradient_clipping"] = 0.0
    return engine_config


def for_building(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration for `deepspeed.zero.Init`, without `"auto"` values."""
    config = for_engine(content)
    for part in ("optimizer", "scheduler"):
        config.pop(part, None)
    for *outer_keys, key in list(autos(config)):
        section = look_up(config, tuple(outer_keys))
        del section[key]
    config["train_micro_batch_size_per_gpu"] = 1  # DeepSpeed requires a batch size
    return config


def read_config(config: str | FilePath | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of a configuration dict, or the content of a configuration file. Return an empty dict for None.

    Raises:
        ConfigurationError: The file cannot be read or is not a JSON object.
    """
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    try:
        content = json.loads(FilePath(config).read_text())
    except OSError as error:
        raise ConfigurationError(f"config={str(config)!r} cannot be read: {error}. Pass a path or a dict.") from error
    except ValueError as error:
        raise ConfigurationError(f"config={str(config)!r} is not valid JSON: {error}. Correct the file.") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"config={str(config)!r} holds a {type(content).__name__}. Write a JSON object.")
    return content


def _fill_switches(config: dict[str, Any], options: ZeroOptions, origin: str) -> None:
    """Replace each `"auto"` whose value depends only on the strategy's arguments."""
    zero = config.setdefault("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ConfigurationError(f'{origin} has zero_optimization={zero!r}. Write {{"stage": 0}}, or another stage.')
    if zero.get("stage") == AUTO:
        zero["stage"] = options.stage if options.zero_optimization else 0
    for part, (switch, device) in OFFLOADS.items():
        section = zero.get(part)
        if not isinstance(section, dict):
            continue
        if section.get("device") == AUTO:
            is_on = getattr(options, switch)
            section["device"] = getattr(options, device) if is_on else "none"
        if section.get("nvme_path") == AUTO:
            section["nvme_path"] = options.nvme_path
    if zero.get("stage3_gather_16bit_weights_on_model_save") == AUTO:
        zero["stage3_gather_16bit_weights_on_model_save"] = zero.get("stage") == 3
    config.setdefault("zero_allow_untested_optimizer", options.zero_allow_untested_optimizer)


def _fill_batch(config: dict[str, Any], facts: RunFacts, origin: str) -> None:
    """Set the batch sizes, which satisfy train_batch_size = micro-batch size × accumulation × processes."""
    micro = config.get("train_micro_batch_size_per_gpu", AUTO)
    if facts.micro_batch_size is not None and micro not in (AUTO, facts.micro_batch_size):
        raise ConfigurationError(
            f"{origin} has train_micro_batch_size_per_gpu={micro!r}, which differs from the training loader's "
            f'batch_size={facts.micro_batch_size}. Use the same value, or write "auto" in the configuration.'
        )
    size = facts.micro_batch_size if micro == AUTO else int(micro)  # None if neither states it
    total = config.get("train_batch_size", AUTO)
    parts = facts.accumulate * facts.world_size
    if size is None and total != AUTO:
        size = max(int(total) // parts, 1)  # of an indivisible total, the check below raises an error
    # DeepSpeed requires a batch size but does not use it here, because this package's loaders create the batches.
    config["train_micro_batch_size_per_gpu"] = 1 if size is None else size
    expected = config["train_micro_batch_size_per_gpu"] * parts
    if total not in (AUTO, expected):
        raise ConfigurationError(
            f"{origin} has train_batch_size={total!r}, which is not batch_size {size} × accumulate_grad_batches "
            f"{facts.accumulate} × {facts.world_size} process(es) (={expected}). Use {expected}, or write "
            '"auto" in the configuration.'
        )
    config["train_batch_size"] = expected
    config["gradient_accumulation_steps"] = facts.accumulate
    if config.get("gradient_clipping") == AUTO:
        config["gradient_clipping"] = 0.0


def _fill_buckets(config: dict[str, Any], facts: RunFacts, origin: str) -> None:
    """Compute the sizes of stage 3's buckets from the hidden size."""
    zero = config.get("zero_optimization", {})
    hidden = facts.hidden_size
    for key in ("stage3_max_live_parameters", "stage3_max_reuse_distance"):
        if zero.get(key) == AUTO:
            zero[key] = 1_000_000_000  # DeepSpeed's own default
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    open_keys = [key for key in keys if zero.get(key) == AUTO]
    if not open_keys:
        return
    if hidden is None:
        raise ConfigurationError(
            f'{origin} has "auto" for zero_optimization.{", ".join(open_keys)}, but no module of the model has a '
            "`config` with hidden_size or hidden_sizes to compute it from. Write numbers."
        )
    values = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    for key in open_keys:
        zero[key] = values[key]


def _fill_optimizer(config: dict[str, Any], facts: RunFacts, origin: str) -> None:
    """Fill in the parameters of DeepSpeed's optimizer and learning rate scheduler."""
    optimizer = look_up(config, ("optimizer", "params")) or {}
    open_keys = [key for key, value in optimizer.items() if value == AUTO]
    hyperparameters = facts.hyperparameters or {}
    for key in open_keys:
        if key not in hyperparameters:
            raise ConfigurationError(
                f'{origin} has optimizer.params.{key}="auto", but no value was passed. Use '
                f"DummyOptim(model.parameters(), {key}=…), or write a value."
            )
        value = hyperparameters[key]
        optimizer[key] = list(value) if isinstance(value, tuple) else value  # JSON has no tuples
    scheduler = look_up(config, ("scheduler", "params")) or {}
    values: dict[str, Any] = {
        "warmup_min_lr": 0,
        "warmup_max_lr": optimizer.get("lr", hyperparameters.get("lr")),
        "warmup_num_steps": facts.warmup_steps,
    }
    if facts.total_steps != float("inf"):
        values["total_num_steps"] = int(facts.total_steps)
    for key, value in scheduler.items():
        if value == AUTO and values.get(key) is not None:  # `resolved` raises an error for each remaining "auto"
            scheduler[key] = values[key]


def autos(config: Mapping[str, Any], path: Path = ()) -> Iterator[Path]:
    """Yield the path of each `"auto"` in nested dicts."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from autos(value, (*path, key))
        elif value == AUTO:
            yield (*path, key)


# Hugging Face Accelerate's names, in its `deepspeed_config` and `DeepSpeedPlugin`

_ELSEWHERE = {
    "deepspeed_hostfile": "only the launcher reads it",
    "deepspeed_exclusion_filter": "only the launcher reads it",
    "deepspeed_inclusion_filter": "only the launcher reads it",
    "deepspeed_multinode_launcher": "start the processes with torchrun, srun or mpirun",
    "mixed_precision": "use Trainer(precision=…)",
    "enable_msamp": "MS-AMP does not run with this torch version",
    "msamp_opt_level": "MS-AMP does not run with this torch version",
}
# The plugin reads zero3_init_flag, and checkpoints hold full weights at every stage.
_HARMLESS = ("zero3_init_flag", "zero3_save_16bit_model", "is_train_batch_min")
_DEVICES = {f"{part}_device": arguments for part, arguments in OFFLOADS.items()}
_PATHS = ("offload_optimizer_nvme_path", "offload_param_nvme_path")
_VALUES = ("gradient_accumulation_steps", "gradient_clipping")
_KNOWN = [*(name for name in DEEPSPEED.names if name not in _ELSEWHERE), "is_train_batch_min"]


def read_accelerate_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert Accelerate's options to arguments of `DeepSpeedStrategy`.

    Without `hf_ds_config`, the argument `config` has `"auto"` for all values that the Trainer determines.

    Raises:
        ConfigurationError: An option is unknown or not supported, or two options differ.
    """
    arguments: dict[str, Any] = {}
    content: Any = {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": AUTO,
        "gradient_clipping": AUTO,
        "zero_optimization": {"stage": AUTO},
        "zero_allow_untested_optimizer": True,
    }
    values: dict[str, Any] = {}  # to write into `content`, once it is known: hf_ds_config may come later
    for written, value in config.items():
        if written in _ELSEWHERE:
            raise ConfigurationError(f"{written}={value!r}: {_ELSEWHERE[written]}. Remove it here.")
        if written not in _KNOWN:
            hint = nearest(written, _KNOWN)
            raise ConfigurationError(f"{written}={value!r} is unknown.{hint} Known: {', '.join(_KNOWN)}.")
        option = DEEPSPEED.find(written)
        name = written if option is None else option.name
        if value is None or name in _HARMLESS:
            continue
        if name == "zero_stage":
            arguments["stage"] = int(value)
        elif name in _DEVICES:
            switch, device = _DEVICES[name]
            arguments[switch] = str(value) != "none"
            if arguments[switch]:
                arguments[device] = str(value)
        elif name in _PATHS and str(value) != "none":
            if arguments.get("nvme_path", str(value)) != str(value):
                raise ConfigurationError(f"{' and '.join(_PATHS)} differ. Use one folder for both.")
            arguments["nvme_path"] = str(value)
        elif name == "transformer_moe_cls_names":
            names = value.split(",") if isinstance(value, str) else value
            arguments["moe_leaf_modules"] = tuple(name.strip() for name in names)
        elif name == "hf_ds_config":
            content = value
        elif name in _VALUES:
            values[name] = value
    if values:
        content = _with_values(content, values)
    return {"config": content, **arguments}


def _with_values(config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration, or the content of its file, in which `values` replace `"auto"`."""
    content = read_config(config)
    for name, value in values.items():
        if content.get(name) not in (None, AUTO, value):
            raise ConfigurationError(
                f"{name}={value!r} differs from {content[name]!r} in the configuration. Remove one of them, or write "
                '"auto" in the configuration.'
            )
        content[name] = value
    return content
