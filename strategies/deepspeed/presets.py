"""DeepSpeed's strategies by the names that `Trainer(strategy=…)` knows; arguments are those of `DeepSpeedStrategy`."""

from __future__ import annotations

from typing import Any

from trainwright.strategies.deepspeed.strategy import DeepSpeedStrategy


class ZeroStage1(DeepSpeedStrategy):
    """`DeepSpeedStrategy(stage=1)`: `strategy="deepspeed_stage_1"`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"stage": 1, **options})


class ZeroStage1Offload(DeepSpeedStrategy):
    """Stage 1 with the optimizer on the host: `strategy="deepspeed_stage_1_offload"`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"stage": 1, "offload_optimizer": True, **options})


class ZeroStage2(DeepSpeedStrategy):
    """`DeepSpeedStrategy(stage=2)`: `strategy="deepspeed_stage_2"`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"stage": 2, **options})


class ZeroStage2Offload(DeepSpeedStrategy):
    """Stage 2 with the optimizer on the host: `strategy="deepspeed_stage_2_offload"`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"stage": 2, "offload_optimizer": True, **options})


class ZeroStage3(DeepSpeedStrategy):
    """`DeepSpeedStrategy(stage=3)`: `strategy="deepspeed_stage_3"`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"stage": 3, **options})


class ZeroStage3Offload(DeepSpeedStrategy):
    """Stage 3 with optimizer and parameters on the host: `strategy="deepspeed_stage_3_offload"`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"stage": 3, "offload_optimizer": True, "offload_parameters": True, **options})


class ZeroStage3OffloadNvme(DeepSpeedStrategy):
    """Stage 3 with optimizer and parameters on a disk: `strategy="deepspeed_stage_3_offload_nvme"`."""

    def __init__(self, **options: Any) -> None:
        on_disk = {
            "offload_optimizer": True, "offload_parameters": True,
            "offload_optimizer_device": "nvme", "offload_params_device": "nvme",
        }  # fmt: skip
        super().__init__(**{"stage": 3, **on_disk, **options})
