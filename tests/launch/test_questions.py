"""The questions of `trainwright config`: which are asked, which answers are refused, and what is written."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from trainwright.cli.main import main
from trainwright.launch import questions
from trainwright.launch.config_file import content_of
from trainwright.launch.launch import check_options
from trainwright.launch.launch_config import LaunchConfig
from trainwright.launch.questions import ask
from trainwright.launch.reading import options_of

_DOWN, _ENTER, _CLEAR = "\x1b[B", "\r", "\x15"


@contextmanager
def _typed(text: str) -> Iterator[None]:
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text(text)
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "keys", "expected"),
    [
        # SageMaker, machines, cpu, processes, deepspeed; dynamo, precision, accumulation
        (1, ["", "", "", "", "", "", "", "", ""],
         {"num_machines": 1, "cpu": False, "gpu_ids": "all", "num_processes": 1, "mixed_precision": "no",
          "gradient_accumulation_steps": 1}),
        (0, ["", "", "", "", "", _DOWN * 2, _CLEAR + "4"],
         {"num_machines": 1, "cpu": True, "num_processes": 1, "mixed_precision": "bf16",
          "gradient_accumulation_steps": 4}),
        # cpu, tpu, downcast_bf16
        (0, ["", "", "n", "y", "y", "", "", "", ""],
         {"num_machines": 1, "cpu": False, "tpu": True, "downcast_bf16": True, "num_processes": 1,
          "mixed_precision": "no", "gradient_accumulation_steps": 1}),
        # machines, mpi, hostfile, oneCCL, cpu, processes, debug, fsdp, deepspeed, megatron, axes
        (0, ["", _CLEAR + "2", "y", "", _CLEAR + "4", "y", "", "y", "", "", "", "", "", "", ""],
         {"num_machines": 2, "mpi": True, "mpirun_ccl": 4, "cpu": True, "num_processes": 2, "debug": True,
          "mixed_precision": "no", "gradient_accumulation_steps": 1}),
    ],
)  # fmt: skip
def test_only_what_is_needed_is_asked(devices: int, keys: list[str], expected: dict[str, Any]) -> None:
    with _typed("".join(key if key in ("y", "n") else f"{key}{_ENTER}" for key in keys)):
        assert ask(devices).set_options() == expected


def test_answers_are_written_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    file = tmp_path / "new/config.yaml"
    # sagemaker, machines, cpu, processes, debug, fsdp, deepspeed and its file, stage, optimizer on, parameters on,
    # init flag, clipping, dynamo, precision, accumulation: a wrong and a right answer
    keys = ["n", _ENTER, "y", f"{_CLEAR}2{_ENTER}", "y", "n", "y", _ENTER, f"{_DOWN}{_ENTER}", _ENTER]
    keys += [f"{_DOWN}{_ENTER}", "n", f"1.5{_ENTER}", _ENTER, f"{_DOWN}{_DOWN}{_ENTER}"]
    keys += [f"{_CLEAR}0{_ENTER}", f"{_CLEAR}4{_ENTER}"]
    with _typed("".join(keys)):
        assert main(["config", "--config_file", str(file)]) == 0
    assert f"trainwright launch --config_file {file} script.py" in capsys.readouterr().out.replace("\n", "")
    assert yaml.safe_load(file.read_text()) == {
        "compute_environment": "LOCAL_MACHINE",
        "debug": True,
        "deepspeed_config": {
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.5,
            "offload_optimizer_device": "none",
            "offload_param_device": "cpu",
            "zero3_init_flag": False,
            "zero_stage": 3,
        },
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 2,
        "use_cpu": True,
    }


class _Drawn:
    """In place of questionary: answers that hypothesis draws, of those that a question accepts."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def confirm(self, message: str, default: bool) -> Any:
        return self._answer([True, False])

    def select(self, message: str, choices: tuple[str, ...], default: str) -> Any:
        assert default in choices
        return self._answer(list(choices))

    def text(self, message: str, default: str, validate: Callable[[str], Any]) -> Any:
        return self._answer([text for text in (default, "0", "1", "2", "4", "8", "a", "") if validate(text) is True])

    def _answer(self, answers: list[Any]) -> Any:
        return SimpleNamespace(unsafe_ask=lambda: self.data.draw(st.sampled_from(answers)))


@pytest.mark.slow
@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_answers_make_options_that_launch_accepts(data: st.DataObject) -> None:
    devices = data.draw(st.integers(0, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(questions, "_questionary", lambda: _Drawn(data))
        found = ask(devices)
    check_options(found)
    assert LaunchConfig(**options_of(content_of(found), "a.yaml")) == found
    if found.use_parallelism_config:
        axes = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
        sizes = [getattr(found, f"parallelism_config_{axis}_size") or 1 for axis in axes]
        assert math.prod(sizes) == found.num_processes
    assert not (found.use_fsdp and found.use_deepspeed)
