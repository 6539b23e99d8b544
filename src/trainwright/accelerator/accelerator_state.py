"""The state that all Accelerators of a script share: processes, precision and DeepSpeed plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.processes.devices import DistributedType
from trainwright.processes.partial_state import PartialState

if TYPE_CHECKING:
    from trainwright.strategies.deepspeed.plugin import DeepSpeedPlugin
    from trainwright.strategies.fsdp.plugin import FullyShardedDataParallelPlugin
    from trainwright.strategies.megatron.plugin import MegatronLMPlugin


class AcceleratorState(PartialState):
    """The state of the processes (see `PartialState`), and the state that the script's Accelerators share.

    All instances share their attributes. `Accelerator(deepspeed_plugins=…)` stores DeepSpeed plugins, and
    `end_training` removes them.

    Attributes:
        mixed_precision: `"fp16"`, `"bf16"`, `"fp8"` or `"no"`: the newest Accelerator's. `"no"` without an Accelerator.
        fsdp_plugin, megatron_lm_plugin: Plugins of the newest Accelerator. None without an Accelerator.
        selected_plugin: Name of the selected DeepSpeed plugin. None without DeepSpeed plugins.
    """

    mixed_precision: str = "no"
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    megatron_lm_plugin: MegatronLMPlugin | None = None
    _engine_type: DistributedType | None = None
    selected_plugin: str | None = None
    _plugins: dict[str, DeepSpeedPlugin]

    @property
    def distributed_type(self) -> DistributedType:  # type: ignore[override]  # it is never set
        """The `DistributedType` of the newest Accelerator's strategy, or of the process group if that is None."""
        found: DistributedType = self._engine_type or vars(self)["distributed_type"]
        return found

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Remove the Accelerators' shared state, and with `reset_partial_state` the state of the processes."""
        if reset_partial_state:
            PartialState._reset_state()
        for name in AcceleratorState.__annotations__:
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
        found = self.deepspeed_plugins
        if name not in found:
            raise ConfigurationError(
                f"there is no DeepSpeed plugin {name!r}.{nearest(name, found)} Known: {', '.join(found) or 'none'}. "
                "Pass it in Accelerator(deepspeed_plugins={name: plugin, …})."
            )
        return found[name]

    def select_deepspeed_plugin(self, name: str) -> None:
        """Use a plugin for the models that the script's Accelerators prepare from now on.

        Models that transformers builds from now on are built according to the plugin's `zero3_init_flag`. Collective if
        it is at stage 3. An unknown name raises a ConfigurationError.
        """
        selected = self.get_deepspeed_plugin(name)
        self.selected_plugin = name
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
            self._plugins, self.selected_plugin = dict(plugins), next(iter(plugins))

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
