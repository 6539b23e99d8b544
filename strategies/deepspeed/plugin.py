"""DeepSpeedPlugin: options of DeepSpeed with the names of Hugging Face Accelerate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.kwargs_handler import KwargsHandler
from trainwright.core.names.packages import is_transformers_available, load_transformers
from trainwright.strategies.deepspeed.config import AUTO, NamedConfig, autos, for_building, origin_of, read_config
from trainwright.strategies.deepspeed.hf_config import HfDeepSpeedConfig
from trainwright.strategies.deepspeed.option_table import DEEPSPEED
from trainwright.strategies.deepspeed.options import Path as KeyPath
from trainwright.strategies.deepspeed.options import look_up, set_value
from trainwright.strategies.deepspeed.strategy import DeepSpeedStrategy

_PATHS = DEEPSPEED.paths()
_WRITTEN_BEFORE = 'Write the values to deepspeed_config before prepare(), which replaces "auto".'


@dataclass(eq=False)
class DeepSpeedPlugin(KwargsHandler):
    """Options of `DeepSpeedStrategy`, with the names of Hugging Face Accelerate.

    A field that is None takes the value of its environment variable, if it has one (`ACCELERATE_DEEPSPEED_ZERO_STAGE`,
    …). The first read of `deepspeed_config`, or the Accelerator's constructor, combines the fields and `hf_ds_config`.
    After that, `deepspeed_config` has the values that are used, and a field that is set is also written to it. Values
    may change until the model is prepared.

    Two plugins are equal if their fields were equal before they were combined. Later changes do not count.

    Attributes:
        hf_ds_config: DeepSpeed's own configuration: a dict, the path of a JSON file or a `HfDeepSpeedConfig`. The other
            fields fill in `"auto"` and missing values. A field that differs from the configuration is an error. Once
            the fields are combined, a `HfDeepSpeedConfig` with all values; fields that were None have its values.
        gradient_accumulation_steps: Micro-batches of one optimizer step. Default: the value of the Accelerator.
        gradient_clipping: Maximum norm of the gradients. Default: None, which disables clipping.
        zero_stage: ZeRO stage, 0 to 3. Default: 2 without `hf_ds_config`, or else its stage (0 if it has none).
        is_train_batch_min: Accepted without effect: every batch has the size of its loader.
        offload_optimizer_device, offload_param_device: `"none"`, `"cpu"` or `"nvme"`. Default: the device in
            `hf_ds_config`, or else `"none"`.
        offload_optimizer_nvme_path, offload_param_nvme_path: Folder for `"nvme"`. Both must be the same folder.
            Default: the folder in `hf_ds_config`, or else `"/local_nvme"`.
        zero3_init_flag: `from_pretrained` and `from_config` of transformers build models in shards while an Accelerator
            uses the plugin. Only for stage 3. Default: None, which is True at stage 3.
        zero3_save_16bit_model: Accepted without effect: checkpoints contain full weights at every stage.
        transformer_moe_cls_names: Classes of mixture-of-experts layers, in a list or separated by commas.
        enable_msamp: Must be False. MS-AMP is not supported.
        msamp_opt_level: Accepted without effect: MS-AMP is not supported.
    """

    _elsewhere: ClassVar[Mapping[str, str]] = {
        "fill_match": _WRITTEN_BEFORE,
        "deepspeed_config_process": _WRITTEN_BEFORE,
        "select": "Call accelerator.state.select_deepspeed_plugin(name).",
        "selected": "Read accelerator.state.selected_plugin, the name of the selected plugin.",
        "set_moe_leaf_modules": "Pass transformer_moe_cls_names. prepare() marks the modules.",
    }

    hf_ds_config: str | Path | Mapping[str, Any] | HfDeepSpeedConfig | None = DEEPSPEED.field("hf_ds_config")
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = DEEPSPEED.field("gradient_clipping")
    zero_stage: int | None = DEEPSPEED.field("zero_stage")
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = DEEPSPEED.field("offload_optimizer_device")
    offload_param_device: str | None = DEEPSPEED.field("offload_param_device")
    offload_optimizer_nvme_path: str | None = DEEPSPEED.field("offload_optimizer_nvme_path")
    offload_param_nvme_path: str | None = DEEPSPEED.field("offload_param_nvme_path")
    zero3_init_flag: bool | None = DEEPSPEED.field("zero3_init_flag")
    zero3_save_16bit_model: bool | None = DEEPSPEED.field("zero3_save_16bit_model")
    transformer_moe_cls_names: str | list[str] | None = DEEPSPEED.field("transformer_moe_cls_names")
    enable_msamp: bool = False
    msamp_opt_level: str = "O1"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hf_ds_config is None and self.zero_stage is None:
            self.zero_stage = 2
        # The plugin is in one of two states:
        # - Before it is combined, `hf_ds_config` is what the user has passed, and `_passed` is None.
        # - After `_combine`, `hf_ds_config` is a HfDeepSpeedConfig. Its dict is `deepspeed_config`, whose values count.
        #   Fields only pass assignments on to it (`__setattr__`).
        self._passed: dict[str, Any] | None = None  # the fields before `_combine`
        # Path → value with which `fill_in` has replaced "auto" in `deepspeed_config`.
        self._filled: dict[KeyPath, Any] = {}
        # Name of the user's configuration in error messages. It survives `_combine`, which replaces the configuration.
        self._origin = origin_of(self.hf_ds_config)
        # Set by `set_deepspeed_weakref`. transformers stores only a weak reference to it.
        self._registered: HfDeepSpeedConfig | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeepSpeedPlugin):
            return NotImplemented
        # A second Accelerator may get an equal plugin although the first one, or transformers, has changed its own.
        return self._fields_as_passed() == other._fields_as_passed()

    def _fields_as_passed(self) -> dict[str, Any]:
        return self.to_dict() if self._passed is None else self._passed

    # The two states

    @property
    def _is_combined(self) -> bool:
        # By `vars`, because the generated `__init__` assigns the fields before `__post_init__` creates `_passed`.
        return vars(self).get("_passed") is not None

    def __setattr__(self, name: str, value: object) -> None:
        if name == "deepspeed_config" or not self._is_combined:
            super().__setattr__(name, value)
        elif name == "hf_ds_config":
            # `_filled` stays: transformers assigns an object with the values of the previous one.
            super().__setattr__(name, _as_object(value))
            self._origin = origin_of(value)
        else:
            super().__setattr__(name, value)
            if name in _PATHS:
                set_value(self.deepspeed_config, _PATHS[name], value)
                self._filled.pop(_PATHS[name], None)

    def _combine(self) -> None:
        """Combine the fields and `hf_ds_config`. From then on, the values in `deepspeed_config` count.

        For example, `DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}}, gradient_clipping=0.5)` gets
        `zero_stage=1`, and `gradient_clipping` 0.5 in its configuration.
        """
        # These read the fields, so they come before any assignment.
        content = self.strategy(1).engine_config.content
        passed = self.to_dict()
        combined = _as_object(self.hf_ds_config)
        combined.config.update(content)
        # `_passed` is still None, so these assignments do not write to a configuration.
        for name, path in _PATHS.items():
            value = look_up(content, path)
            if getattr(self, name) is None and value != AUTO:
                setattr(self, name, value)
        self.hf_ds_config = combined
        self._passed = passed

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's configuration. Its values may be changed until the model is prepared.

        `prepare` replaces each `"auto"` by the value that it infers from the model and the data.
        """
        if not self._is_combined:
            self._combine()
        return cast(HfDeepSpeedConfig, self.hf_ds_config).config

    @deepspeed_config.setter
    def deepspeed_config(self, config: dict[str, Any]) -> None:
        # transformers assigns the dict of the HfDeepSpeedConfig that it has assigned before.
        if not self._is_combined:
            self._combine()
        cast(HfDeepSpeedConfig, self.hf_ds_config).config = config

    @property
    def _user_config(self) -> str | Path | Mapping[str, Any] | None:
        """The user's configuration, with `"auto"` again for values that `fill_in` has replaced."""
        if not self._is_combined:
            config = self.hf_ds_config
            return config.config if isinstance(config, HfDeepSpeedConfig) else config
        content = NamedConfig(read_config(self.deepspeed_config), self._origin)
        for path, value in self._filled.items():
            if look_up(content, path) == value:  # the user has not changed it since
                set_value(content, path, AUTO)
        return content

    @property
    def config(self) -> dict[str, Any]:
        """The same dict as `deepspeed_config`."""
        return self.deepspeed_config

    def get_value(self, ds_key_long: str, default: object = None) -> Any:
        """Return the value of a dotted key of `deepspeed_config`, or `default` if it does not exist."""
        value = look_up(self.deepspeed_config, tuple(ds_key_long.split(".")))
        return default if value is None else value

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether the value of a dotted key of `deepspeed_config` is `"auto"`."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def fill_in(self, resolved: Mapping[str, Any]) -> None:
        """Replace each `"auto"` in `deepspeed_config` by its value in `resolved`, if there is one. Not collective.

        The next model that is prepared infers these values again, unless they are changed in `deepspeed_config`.
        """
        config = self.deepspeed_config  # also combines the plugin, on which `_user_config` depends
        still_open = read_config(self._user_config)  # a copy, in which each value to be replaced is "auto"
        # The run sets these values in a configuration without them, too.
        always: list[KeyPath] = [("fp16", "enabled"), ("bf16", "enabled"), ("gradient_accumulation_steps",)]
        for path in always:
            if look_up(still_open, path) is None:
                set_value(still_open, path, AUTO)
        for path in autos(still_open):
            value = look_up(resolved, path)
            if value is not None:
                set_value(config, path, value)
                self._filled[path] = value

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Write a mixed precision to `deepspeed_config`. The Accelerator does this with its own. Not collective.

        Args:
            mixed_precision: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`. DeepSpeed computes in bfloat16 with `"fp8"`.

        Raises:
            ConfigurationError: The configuration enables another precision.
        """
        enabled = "bf16" if mixed_precision == "fp8" else mixed_precision
        content = read_config(self._user_config)
        for part in ("fp16", "bf16"):
            if part != enabled and look_up(content, (part, "enabled")) is True:
                raise ConfigurationError(
                    f"mixed_precision={mixed_precision!r}, but the configuration has {part}.enabled=True. Use "
                    f'mixed_precision={part!r}, or write {part}.enabled="auto".'
                )
        self.fill_in({part: {"enabled": part == enabled} for part in ("fp16", "bf16")})

    # Models of transformers

    def is_zero3_init_enabled(self) -> bool:
        """Return whether transformers builds models in shards while an Accelerator uses this plugin."""
        is_stage_3 = self.get_value("zero_optimization.stage") == 3
        return is_stage_3 and self.zero3_init_flag is not False

    def set_deepspeed_weakref(self) -> None:
        """Make transformers build models according to `zero3_init_flag`. Collective at stage 3.

        The Accelerator and `select_deepspeed_plugin` call this method.
        """
        self.remove_deepspeed_weakref()
        if not self.is_zero3_init_enabled() or not is_transformers_available():
            return
        integration: Any = load_transformers("zero3_init_flag", "transformers.integrations.deepspeed")
        current = integration._hf_deepspeed_config_weak_ref
        if current is not None and current() is self.hf_ds_config:
            return  # TrainingArguments have registered it
        self._registered = HfDeepSpeedConfig(for_building(self.deepspeed_config))
        integration.set_hf_deepspeed_config(self._registered)

    def remove_deepspeed_weakref(self) -> None:
        """Make transformers build full models again. Not collective."""
        self._registered = None

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Return a context in which `zero3_init_flag` has the value `enable`. Default: False. Collective at stage 3."""
        former_flag = self.zero3_init_flag
        self.zero3_init_flag = enable
        self.set_deepspeed_weakref()
        try:
            yield
        finally:
            self.zero3_init_flag = former_flag
            self.set_deepspeed_weakref()

    def strategy(self, num_processes: int) -> DeepSpeedStrategy:
        """Return the strategy with the same options.

        Args:
            num_processes: Not used. Plugins of other engines use it.

        Raises:
            ConfigurationError: An option is unknown, the strategy does not support it, or it differs from
                `hf_ds_config`.
        """
        config = self.to_dict()
        if self._is_combined:
            for name in _PATHS:
                del config[name]  # the values in `deepspeed_config` count
        else:
            self._check_fields()
        config["hf_ds_config"] = self._user_config
        if not self.enable_msamp:
            del config["enable_msamp"], config["msamp_opt_level"]
        return DeepSpeedStrategy.from_config(config)

    def _check_fields(self) -> None:
        """Check that no field differs from `hf_ds_config`."""
        content = read_config(self._user_config)
        different: list[str] = []
        for name, path in _PATHS.items():
            value = getattr(self, name)
            configured = look_up(content, path)
            if value is not None and configured not in (None, AUTO, value):
                different.append(f"{name}={value!r} ({'.'.join(path)}={configured!r})")
        if different:
            raise ConfigurationError(
                f"these fields of DeepSpeedPlugin, or their environment variables, differ from hf_ds_config (in "
                f'parentheses): {", ".join(different)}. Remove them, or write "auto" in the configuration.'
            )


def _as_object(config: Any) -> HfDeepSpeedConfig:
    """Return `config` if it is a `HfDeepSpeedConfig`, or else an object with a copy of its content."""
    if isinstance(config, HfDeepSpeedConfig):
        return config
    wrapped = HfDeepSpeedConfig({})  # without a stage: at stage 3, the constructor connects DeepSpeed
    wrapped.config = read_config(config)
    return wrapped
