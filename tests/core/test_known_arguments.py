"""Keywords that a function does not have are told by name at run time, and found by type checkers."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.sources import ROOT
from trainwright import Accelerator, Trainer
from trainwright.core.names.known_arguments import known_arguments
from trainwright.trainer.configuration.arguments import TrainerArguments

_PROGRAM = """
from trainwright import Accelerator, Trainer

Trainer(max_epochs=3)
Trainer(max_epoch=3)
Trainer(max_epochs="3")
Accelerator(mixed_precision="bf16")
Accelerator(mixed_precison="bf16")
"""


def test_what_is_refused_is_called_for_and_what_it_lets_pass_is_left_out() -> None:
    asked: list[tuple[str, Any]] = []

    def refuse(name: str, value: Any, known: list[str]) -> None:
        assert known == ["a", "b"]
        asked.append((name, value))

    @known_arguments(refuse)
    def add(a: int, *, b: int = 2) -> int:
        return a + b

    assert add(1) == 3
    assert add(a=1, b=1) == 2
    assert not asked
    assert add(1, c=5) == 3  # type: ignore[call-arg]  # as a program would that no type checker has seen
    assert asked == [("c", 5)]
    assert str(inspect.signature(add)) == "(a: 'int', *, b: 'int' = 2) -> 'int'"


def test_every_argument_of_the_trainer_is_kept_under_its_name() -> None:
    assert list(TrainerArguments.__annotations__) == list(inspect.signature(Trainer).parameters)


@pytest.mark.parametrize("front_door", [Trainer, Accelerator])
def test_no_front_door_takes_any_keyword(front_door: type) -> None:
    kinds = {parameter.kind for parameter in inspect.signature(front_door).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds


@pytest.mark.slow
def test_type_checkers_find_a_misspelt_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mypy import api

    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    monkeypatch.chdir(ROOT)
    found = [line.partition("program.py:")[2] for line in api.run([str(program)])[0].splitlines() if ": error:" in line]
    assert [line.partition(":")[0] for line in found] == ["5", "6", "8"]
    assert "max_epoch" in found[0]
    assert "mixed_precison" in found[2]
