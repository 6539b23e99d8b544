"""The kind of distribution of a script."""

from __future__ import annotations

from enum import Enum


class DistributedType(str, Enum):  # noqa: UP042 -- as text a member shows its class, as Accelerate's does
    """Kind of distribution; a member equals its name. A `PartialState` has `NO`, `MULTI_CPU`, `MULTI_GPU` or
    `MULTI_XPU`, an `Accelerator` also `DEEPSPEED` or `FSDP`. The others exist for scripts that compare with them.
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
