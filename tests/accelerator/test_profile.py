"""`accelerator.profile` in user-written loops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainwright import Accelerator
from trainwright.core.errors import ConfigurationError
from trainwright.utils import ProfileKwargs


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())


def _inputs() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8)


def test_each_cycle_and_context_has_a_file_and_the_handler_its_own(tmp_path: Path) -> None:
    handler = torch.profiler.tensorboard_trace_handler(str(tmp_path / "board"))
    schedule = {"wait": 1, "active": 1}
    options = ProfileKwargs(schedule_option=schedule, output_trace_dir=str(tmp_path), on_trace_ready=handler)
    accelerator = Accelerator(cpu=True)
    for _ in range(2):
        with accelerator.profile(options) as prof:
            for _ in range(5):
                _model()(_inputs())
                prof.step()
    names = {path.name for path in tmp_path.glob("*.json")}
    assert names == {"profile_0.json", *(f"profile_0-{i}.json" for i in (1, 2, 3))}
    assert len(list((tmp_path / "board").iterdir())) == 4


def test_wrong_options_name_the_nearest() -> None:
    context = Accelerator(cpu=True).profile({"activities": ["cpu"]})  # type: ignore[arg-type]  # it is wrong on purpose
    with pytest.raises(ConfigurationError, match=r"expected ProfileKwargs\(…\)"), context:
        pass
    if not torch.cuda.is_available():
        with pytest.raises(ConfigurationError, match="'cuda' cannot be recorded"):
            ProfileKwargs(activities=["cuda"]).build()
    with pytest.raises(ConfigurationError, match=r"no key 'warm_up'.*'warmup'"):
        ProfileKwargs(schedule_option={"warm_up": 1})
    with pytest.raises(ConfigurationError, match=r"'cpuu'.*'cpu'"):
        ProfileKwargs(activities=["cpuu"])
