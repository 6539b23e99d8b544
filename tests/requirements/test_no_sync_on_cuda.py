"""Law 5 on the hardware that it is about: no step between two log points waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.tasks import RegressionTask, regression_data
from trainwright import Callback, Trainer


class NoSyncBetween(Callback):
    """Makes an implicit wait an error from the second to the tenth step."""

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        if trainer.state.step == 1:
            torch.cuda.set_sync_debug_mode("error")
        elif trainer.state.step == 10:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.requires("cuda", reason="only a device that runs behind the host can be waited for")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("on_nonfinite", [None, "raise"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_steps_two_to_ten_wait_for_nothing(precision: str, on_nonfinite: Any, tmp_path: Any) -> None:
    loader = torch.utils.data.DataLoader(regression_data(64), batch_size=4, pin_memory=True)
    trainer = Trainer(
        accelerator="cuda", devices=1, max_steps=12, log_every_n_steps=12, precision=precision,
        gradient_clip_val=1.0, on_nonfinite=on_nonfinite, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
        logger=False, default_root_dir=tmp_path, callbacks=[NoSyncBetween()],
    )  # fmt: skip
    try:
        trainer.fit(RegressionTask(), loader)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.global_step == 12
