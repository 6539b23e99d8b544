"""How a task is trained: the Strategy contract and one file per engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwright.core.registry import Registry, import_object

if TYPE_CHECKING:
    from trainwright.strategies.capabilities import Capabilities
    from trainwright.strategies.ddp import DDPStrategy
    from trainwright.strategies.fsdp import FSDPStrategy
    from trainwright.strategies.precision import Precision
    from trainwright.strategies.single import SingleDeviceStrategy
    from trainwright.strategies.strategy import Strategy

STRATEGIES: Registry[Any] = Registry(
    "strategy",
    {
        "single": "trainwright.strategies.single:SingleDeviceStrategy",
        "ddp": "trainwright.strategies.ddp:DDPStrategy",
        "fsdp": "trainwright.strategies.fsdp:FSDPStrategy",
        "fsdp_cpu_offload": "trainwright.strategies.fsdp:FSDPOffloadStrategy",
    },
)

_PUBLIC = {
    "Capabilities": "trainwright.strategies.capabilities",
    "DDPStrategy": "trainwright.strategies.ddp",
    "FSDPStrategy": "trainwright.strategies.fsdp",
    "Precision": "trainwright.strategies.precision",
    "SingleDeviceStrategy": "trainwright.strategies.single",
    "Strategy": "trainwright.strategies.strategy",
}
__all__ = ["STRATEGIES", "Capabilities", "DDPStrategy", "FSDPStrategy", "Precision", "SingleDeviceStrategy", "Strategy"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return import_object(f"{_PUBLIC[name]}:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
