"""HfDeepSpeedConfig: DeepSpeed's configuration with access by dotted key, which transformers subclasses."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainwright.core.errors import ConfigurationError
from trainwright.processes.partial_state import PartialState
from trainwright.strategies.deepspeed.config import read_config
from trainwright.strategies.deepspeed.library import connect, disconnect, load_library


class HfDeepSpeedConfig:
    """DeepSpeed's configuration, with the methods of Hugging Face Accelerate's `HfDeepSpeedConfig`.

    Until the model is prepared, transformers may fill in `"auto"` values. With stage 3, the constructor connects
    DeepSpeed to the script's process group, and `from_pretrained` of transformers builds sharded models while the
    object exists.

    Attributes:
        config: A copy of the configuration that was passed as a dict or as the path of a JSON file.

    Raises:
        ConfigurationError: The file cannot be read or is not a JSON object.
    """

    def __init__(self, config_file_or_dict: str | Path | Mapping[str, Any]) -> None:
        self.config = read_config(config_file_or_dict)
        if self.is_zero3() and dist.is_initialized():
            state = PartialState()
            library = load_library(state.device.type)
            weakref.finalize(self, disconnect, library)  # first: it also undoes a call of `connect` that fails
            connect(library, state.topology)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r})"

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the innermost dict of a dotted key (None if it does not exist), and the key's last part."""
        *path, last = ds_key_long.split(".")
        node: Any = self.config
        for part in path:
            if not isinstance(node, dict):
                break
            node = node.get(part)
        if not isinstance(node, dict):
            return None, last
        return node, last

    def get_value(self, ds_key_long: str, default: object = None) -> Any:
        """Return the value of a dotted key, such as `"zero_optimization.stage"`, or `default` if it does not exist."""
        node, last = self.find_config_node(ds_key_long)
        if node is None:
            return default
        return node.get(last, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete a dotted key. With `must_exist=True`, raise a ConfigurationError if the key is missing."""
        node, last = self.find_config_node(ds_key_long)
        if node is not None and last in node:
            del node[last]
        elif must_exist:
            raise ConfigurationError(
                f"DeepSpeed's configuration has no {ds_key_long!r}. Pass must_exist=False to ignore that."
            )

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether a key exists and its value is true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether a key exists and its value is false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return whether the stage is 2, which shards gradients but not parameters."""
        return bool(self.get_value("zero_optimization.stage") == 2)

    def is_zero3(self) -> bool:
        """Return whether the stage is 3, which also shards parameters."""
        return bool(self.get_value("zero_optimization.stage") == 3)

    def is_offload(self) -> bool:
        """Return whether optimizer states or parameters are offloaded."""
        devices = [
            self.get_value("zero_optimization.offload_optimizer.device"),
            self.get_value("zero_optimization.offload_param.device"),
        ]
        return "cpu" in devices or "nvme" in devices
