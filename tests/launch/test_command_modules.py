"""The commands as modules, and the launcher's parser for other programs."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.commands.config import default_config_file, load_config_from_file
from trainwright.commands.launch import launch_command, launch_command_parser

_MODULES = {
    "config": "config",
    "env": "env",
    "estimate": "estimate",
    "launch": "launch",
    "merge": "merge-weights",
    "test": "check",
    "to_fsdp2": "to-fsdp2",
    "tpu": "tpu-config",
}


@pytest.mark.slow
@pytest.mark.parametrize("module", _MODULES)
def test_a_module_runs_its_command(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"trainwright.commands.{module}"
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__")
    assert ended.value.code in (0, None)
    assert f"trainwright {_MODULES[module]}" in capsys.readouterr().out


def test_a_program_launches_a_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[list[str]] = []
    monkeypatch.setattr("trainwright.commands.launch.launch", lambda argv: found.append(argv) or len(found) - 1)
    parser = launch_command_parser()
    options = ["--num-processes", "2", "--use_cpu", "--dynamo_use_dynamic", "-m", "--mixed_precision=bf16"]
    args = parser.parse_args([*options, "package.script", "--x", "1"])
    assert (args.num_processes, args.cpu, args.multi_gpu) == (2, True, False)
    args.num_machines = 1
    launch_command(args)
    words, script = found[0][:-4], found[0][-4:]
    assert script == ["--", "package.script", "--x", "1"]
    assert sorted(words) == [
        "--cpu=True",
        "--dynamo_use_dynamic=True",
        "--mixed_precision=bf16",
        "--module",
        "--num_machines=1",
        "--num_processes=2",
    ]
    args = parser.parse_args(["script.py"])
    args.training_script_args = ["--y"]
    args.fsdp_transformer_layer_cls_to_wrap = ("A", "B")
    with pytest.raises(SystemExit) as ended:
        launch_command(args)
    assert found[1] == ["--fsdp_transformer_layer_cls_to_wrap=A\nB", "--", "script.py", "--y"]
    assert ended.value.code == 1


@pytest.mark.parametrize(
    ("given", "started"),
    [
        (["script.py", "--x"], ["--module", "--", "trainwright.as_accelerate", "script.py", "--x"]),
        (["-m", "package.script"], ["--module", "--", "trainwright.as_accelerate", "-m", "package.script"]),
        (["--no_python", "program"], ["--no_python", "--", "program"]),
    ],
)
def test_the_started_script_also_runs_without_accelerate(
    given: list[str], started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[str]] = []
    monkeypatch.setattr("trainwright.commands.launch.launch", lambda argv: found.append(argv) or 0)
    monkeypatch.setattr("trainwright.commands.launch.replaces_accelerate", lambda: True)
    launch_command(launch_command_parser().parse_args(given))
    assert found == [started]


@pytest.mark.slow
def test_the_modules_are_also_those_of_accelerate() -> None:
    program = "import trainwright; trainwright.as_accelerate(); from accelerate.commands.launch import launch_command"
    subprocess.run([sys.executable, "-c", program], check=True)
    run = [sys.executable, "-m", "trainwright.as_accelerate", "-m", "accelerate.commands.env", "--help"]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert "trainwright env" in done.stdout


def test_a_program_reads_the_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("num_processes: 3\nmixed_precision: bf16\n")
    assert load_config_from_file(path).to_dict() == {"num_processes": 3, "mixed_precision": "bf16"}
    assert default_config_file.endswith("default_config.yaml")
