"""The state that all Accelerators of a script share: processes, precision and DeepSpeed plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.processes.devices import DistributedType
from trainwright.processes.partial_state import PartialState

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from trainwright.strategies.deepspeed.plugin import DeepSpeedPlugin
    from trainwright.strategies.fsdp.plugin import FullyShardedDataParallelPlugin, TorchTensorParallelPlugin
    from trainwright.strategies.launcher_variables import TorchDynamoPlugin
    from trainwright.strategies.megatron.parallelism_config import ParallelismConfig
    from trainwright.strategies.megatron.plugin import MegatronLMPlugin

# Arguments of Accelerate's AcceleratorState. In Trainwright, only an Accelerator sets these attributes.
_OF_ACCELERATOR = (
    "dynamo_plugin",
    "deepspeed_plugin",
    "fsdp_plugin",
    "torch_tp_plugin",
    "megatron_lm_plugin",
    "parallelism_config",
)


class AcceleratorState(PartialState):
    """The state of the processes (see `PartialState`), and the state that the script's Accelerators share.

    All instances share one `__dict__` (see `PartialState`), so that an assignment to one instance is an assignment to
    all. `Accelerator(deepspeed_plugins=…)` stores DeepSpeed plugins, and `end_training` removes them.

    The constructor is collective where `PartialState()` is.

    Args:
        mixed_precision: The expected precision. Default: None, which accepts every precision.
        cpu: Use the CPU even if there is an accelerator. Default: False.
        kwargs: Options of the process group; see `PartialState`.

    Attributes:
        mixed_precision: `"fp16"`, `"bf16"`, `"fp8"` or `"no"`: the newest Accelerator's. `"no"` without an Accelerator.
        fsdp_plugin, torch_tp_plugin, megatron_lm_plugin, dynamo_plugin, parallelism_config: Arguments of the newest
            Accelerator. None without an Accelerator.
        device_mesh: The `DeviceMesh` of the newest Accelerator. None if its strategy has none.
        selected_plugin: Name of the selected DeepSpeed plugin. None without DeepSpeed plugins.

    Raises:
        ConfigurationError: `mixed_precision` is not the newest Accelerator's, `kwargs` has a plugin, or `PartialState`
            raises it. Only an Accelerator sets the precision and the plugins.
    """

    mixed_precision: str = "no"
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    torch_tp_plugin: TorchTensorParallelPlugin | None = None
    megatron_lm_plugin: MegatronLMPlugin | None = None
    dynamo_plugin: TorchDynamoPlugin | None = None
    parallelism_config: ParallelismConfig | None = None
    device_mesh: DeviceMesh | None = None
    _engine_type: DistributedType | None = None  # of the newest Accelerator's strategy; None if it defines none
    selected_plugin: str | None = None
    _plugins: dict[str, DeepSpeedPlugin]  # exists only after `share_deepspeed_plugins`; read `shared_plugins()`

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **kwargs: object) -> None:
        for name in _OF_ACCELERATOR:
            if kwargs.pop(name, None) is not None:
                raise ConfigurationError(f"AcceleratorState does not set {name}. Pass it to Accelerator({name}=…).")
        super().__init__(cpu, **kwargs)
        if mixed_precision not in (None, self.mixed_precision):
            raise ConfigurationError(
                f"AcceleratorState(mixed_precision={mixed_precision!r}): the precision is {self.mixed_precision!r}. "
                f"Create Accelerator(mixed_precision={mixed_precision!r}) first."
            )

    def __repr__(self) -> str:
        text = f"{super().__repr__()}Mixed precision type: {self.mixed_precision}\n"
        if self.deepspeed_plugin is not None:
            text += f"ds_config: {self.deepspeed_plugin.deepspeed_config}\n"
        return text

    @property
    def distributed_type(self) -> DistributedType:  # type: ignore[override]  # it is never set
        """The `DistributedType` of the newest Accelerator's strategy, or of the process group if that is None."""
        of_process_group: DistributedType = vars(self)["distributed_type"]  # `PartialState` stores it there
        return self._engine_type or of_process_group

    @property
    def is_fsdp2(self) -> bool:
        """True if the newest Accelerator shards models with FSDP. The version of FSDP is always 2."""
        return self.distributed_type == DistributedType.FSDP

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Remove the Accelerators' shared state, and with `reset_partial_state` the state of the processes."""
        if reset_partial_state:
            PartialState._reset_state()
        for name in AcceleratorState.__annotations__:  # the attributes that are declared above
            PartialState._shared_state.pop(name, None)

    @classmethod
    def shared_plugins(cls) -> dict[str, DeepSpeedPlugin]:
        """Return the DeepSpeed plugins by name. Empty before an Accelerator has stored plugins."""
        return dict(cls._shared_state.get("_plugins", {}))

    @property
    def deepspeed_plugins(self) -> dict[str, DeepSpeedPlugin]:
        """The DeepSpeed plugins by name. A single plugin has the name `"default"`. Empty without plugins."""
        return self.shared_plugins()

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The selected DeepSpeed plugin, initially the first one. None without plugins."""
        return None if self.selected_plugin is None else self._plugins[self.selected_plugin]

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """Return a plugin by name. Raise a ConfigurationError for an unknown name."""
        plugins = self.deepspeed_plugins
        if name not in plugins:
            known = ", ".join(plugins) or "none"
            raise ConfigurationError(
                f"there is no DeepSpeed plugin {name!r}.{nearest(name, plugins)} Known: {known}. "
                "Pass it in Accelerator(deepspeed_plugins={name: plugin, …})."
            )
        return plugins[name]

    def select_deepspeed_plugin(self, name: str) -> None:
        """Use a plugin for the models that the script's Accelerators prepare from now on.

        Models that transformers builds from now on are built according to the plugin's `zero3_init_flag`. Collective if
        it is at stage 3. An unknown name raises a ConfigurationError.
        """
        selected = self.get_deepspeed_plugin(name)
        self.selected_plugin = name
        # transformers holds a weak reference to one configuration, so that at most one plugin is registered there.
        for plugin in self._plugins.values():
            plugin.remove_deepspeed_weakref()
        selected.set_deepspeed_weakref()

    def share_deepspeed_plugins(self, plugins: Mapping[str, DeepSpeedPlugin]) -> None:
        """Store an Accelerator's plugins, and select the first. Raise a ConfigurationError if others are stored."""
        stored = self.deepspeed_plugins
        if stored and stored != plugins:
            raise ConfigurationError(
                f"this Accelerator has the DeepSpeed plugins {list(plugins)}, and an earlier one has others: "
                f"{list(stored)}. Pass all plugins to the earlier one as deepspeed_plugins={{name: plugin, …}}, or "
                "call its end_training() first."
            )
        if not stored:
            self._plugins = dict(plugins)
            self.selected_plugin = next(iter(plugins))

    def remove_deepspeed_plugins(self) -> None:
        """Remove all plugins. Not collective."""
        for plugin in self.deepspeed_plugins.values():
            plugin.remove_deepspeed_weakref()
        for name in ("_plugins", "selected_plugin"):
            vars(self).pop(name, None)


def get_active_deepspeed_plugin(state: AcceleratorState) -> DeepSpeedPlugin:
    """Return the selected DeepSpeed plugin of `accelerator.state`, or raise a ConfigurationError."""
    if state.deepspeed_plugin is None:
        raise ConfigurationError("no Accelerator has DeepSpeed plugins. Pass Accelerator(deepspeed_plugins=…).")
    return state.deepspeed_plugin
