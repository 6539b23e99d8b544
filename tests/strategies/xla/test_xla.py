"""XLA on the CPU: losses of one device, one program for each step, checkpoints to and from other strategies.

`make test-xla` runs them in an environment of its own, with the torch that torch_xla was built for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest

from trainwright import Trainer
from trainwright.core.errors import ConfigurationError

needs_xla = pytest.mark.requires("torch_xla", reason="make test-xla has an environment for it")


def run(name: str, num_devices: int = 1, **options: Any) -> Any:
    """Run one of `programs` in a process of its own."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(num_devices)}
    command = [sys.executable, "-m", "tests.strategies.xla.programs", name, json.dumps(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_xla
@pytest.mark.parametrize(("strategy", "devices"), [("xla", 1), ("xla_ddp", 2), ("xla_fsdp", 2), ("xla_fsdp", 4)])
def test_losses_weights_and_metrics_are_those_of_one_device(strategy: str, devices: int) -> None:
    found = run("equal_losses", devices, strategy=strategy, accumulate_grad_batches=2, gradient_clip_val=0.5)
    assert max(found["losses"], found["weights"], found["metrics"]) < 2e-6
    assert found["tied"]
    assert found["devices"] == ["cpu"]  # brought back after the stage


@needs_xla
@pytest.mark.parametrize(("strategy", "accumulate"), [("xla", 1), ("xla", 2), ("xla_ddp", 1), ("xla_fsdp", 1)])
def test_a_step_is_one_program_without_a_compilation_or_a_read(strategy: str, accumulate: int) -> None:
    counts = run("counted_steps", 2, strategy=strategy, accumulate=accumulate)
    steps = list(pairwise(counts))
    assert [after["marks"] - before["marks"] for before, after in steps] == [1] * 11
    assert [after["compilations"] - before["compilations"] for before, after in steps[2:]] == [0] * 9
    assert [after["reads"] - before["reads"] for before, after in steps] == [0] * 11


@needs_xla
@pytest.mark.parametrize("strategy", ["xla", "xla_fsdp"])
def test_checkpoints_resume_exactly_and_continue_those_of_other_strategies(strategy: str) -> None:
    found = run("saves", 2, strategy=strategy)
    assert found["resumed"] == 0  # with dropout: the device's generator is in the checkpoint
    assert max(found["to_cpu"], found["from_cpu"]) < 1e-6


@needs_xla
def test_a_compilation_after_the_first_steps_is_a_warning_that_names_the_batch() -> None:
    (text,) = run("ragged")
    assert all(part in text for part in ("batch 4", "(6, 8)", "(16, 8)", "drop_last"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "16-mixed"}, "bf16-mixed"),
        ({"compile": True}, "compiles every step"),
        ({"accelerator": "cpu"}, "needs 'xla' devices"),
        ({"accelerator": "tpu", "devices": [1, 3]}, "devices=2"),
        ({"strategy": "xla_ddp", "devices": 4}, "4 processes were started or requested. Remove spmd"),
    ],
)
def test_what_does_not_apply_is_refused(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str) -> None:
    monkeypatch.setattr("trainwright.strategies.xla.strategy.check_versions", lambda: None)
    with pytest.raises(ConfigurationError, match=message):
        Trainer(**{"strategy": "xla", "logger": False, **options})
