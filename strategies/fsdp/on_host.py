"""Sharding with the pieces on the host, under a name of its own."""

from __future__ import annotations

from typing import Any

from trainwright.strategies.fsdp.strategy import FSDPStrategy


class FSDPOffloadStrategy(FSDPStrategy):
    """`FSDPStrategy(cpu_offload=True)`, which `Trainer(strategy="fsdp_cpu_offload")` means.

    Args:
        options: those of `FSDPStrategy`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(cpu_offload=True, **options)
