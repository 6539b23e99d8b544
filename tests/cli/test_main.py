"""The dispatcher: which command runs, what is printed, and which exit code comes back."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import pytest

from trainwright import __version__
from trainwright.cli import main as main_module
from trainwright.cli.main import COMMANDS, Command, _take_traceback_option, main
from trainwright.core.errors import ConfigurationError


def _fail_on_purpose(arguments: Sequence[str]) -> int:
    raise ConfigurationError("batch_size=0 is not positive")


def _fail_unexpectedly(arguments: Sequence[str]) -> int:
    raise KeyError("a bug")


def _interrupted(arguments: Sequence[str]) -> int:
    raise KeyboardInterrupt


def _exit_143(arguments: Sequence[str]) -> int:
    sys.exit(143)


def _exit_with_message(arguments: Sequence[str]) -> int:
    sys.exit("no space left")


def _show(arguments: Sequence[str]) -> int:
    print(json.dumps(list(arguments)))
    return 3


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    here = __name__
    table = {
        "show": Command(f"{here}:_show", "show"),
        "fail": Command(f"{here}:_fail_on_purpose", "fail"),
        "bug": Command(f"{here}:_fail_unexpectedly", "bug"),
        "interrupted": Command(f"{here}:_interrupted", "interrupted"),
        "exit-143": Command(f"{here}:_exit_143", "exit"),
        "exit-message": Command(f"{here}:_exit_with_message", "exit"),
    }
    # Looking the functions up here, not by import, keeps this independent of the name pytest gives this module.
    monkeypatch.setattr(main_module, "COMMANDS", table)
    monkeypatch.setattr(main_module, "import_object", lambda target: globals()[target.partition(":")[2]])


def test_help_lists_every_command_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert main([]) == 0
    assert capsys.readouterr().out == printed
    for name, command in COMMANDS.items():
        assert f"  {name}" in printed
        assert command.help in printed


@pytest.mark.parametrize(
    ("word", "says"), [("validat", "unknown command 'validat'. Did you mean 'validate'?"), ("--versoin", "--versoin")]
)
def test_an_unknown_command_or_option_is_an_error(word: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("command", "word", "meant"), [("checkpoint", "verfiy", "verify"), ("data", "shwo", "show")])
def test_an_unknown_sub_command_is_one_line_with_the_nearest_name(
    command: str, word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, word]) == 2
    start = f"trainwright: error: {command} has no command {word!r}. Did you mean {meant!r}? Known: "
    assert capsys.readouterr().err.startswith(start)
    assert main([command, "frob"]) == 2
    assert "has no command 'frob'. Known: " in capsys.readouterr().err


@pytest.mark.usefixtures("commands")
def test_a_command_gets_what_follows_its_name_and_its_code_is_returned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "a", "--b", "c=d"]) == 3
    assert json.loads(capsys.readouterr().out) == ["a", "--b", "c=d"]


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("fail", 2, "trainwright: error: batch_size=0 is not positive\n"),
        ("interrupted", 130, "trainwright: interrupted\n"),
        ("exit-143", 143, ""),
        ("exit-message", 1, "no space left\n"),
    ],
)
def test_the_end_of_a_command_is_an_exit_code_without_a_traceback(
    name: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name]) == code
    assert capsys.readouterr().err == said


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize("arguments", [["--traceback", "fail"], ["fail", "--traceback"]])
def test_traceback_shows_where_an_error_of_ours_comes_from(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert "_fail_on_purpose" in printed


def test_traceback_may_be_an_option_of_the_launched_script() -> None:
    assert _take_traceback_option(["launch", "train.py", "--traceback"]) == (
        False,
        ["launch", "train.py", "--traceback"],
    )
    assert _take_traceback_option(["--traceback", "launch", "train.py"]) == (True, ["launch", "train.py"])
    assert _take_traceback_option(["launch", "--traceback", "train.py"]) == (True, ["launch", "train.py"])


def test_env_reports_versions_and_the_process_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["trainwright"] == __version__
    assert facts["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert facts["cuda"] == torch.version.cuda
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert facts["accelerator"] == (accelerator and accelerator.type)
    assert facts["process"].startswith("rank 0 of 1")
    assert ("avx512_bf16" in facts["cpu instructions"]) == torch.cpu._is_avx512_bf16_supported()
    assert ("amx_tile" in facts["cpu instructions"]) == torch.cpu._is_amx_tile_supported()
