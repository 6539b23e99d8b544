from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.tasks import RegressionTask
from trainwright.core import exports
from trainwright.core.errors import ConfigurationError
from trainwright.utilities.boring_classes import BoringModel


def test_export_is_in_evaluation_mode_and_restores_the_mode() -> None:
    sample = torch.randn(2, 4)
    task = RegressionTask()
    task.net[1].eval()
    with pytest.raises(ConfigurationError, match="example_input_array"):
        task.export()
    with pytest.raises(ConfigurationError, match="example_input_array"):
        task.to_torchscript(method="trace")
    task.example_input_array = sample
    exported = task.export().module()(sample)
    assert [part.training for part in task.net] == [True, False, True, True]
    named = task.export({"inputs": sample}).module()(inputs=sample)
    expected = task.eval()(sample)
    torch.testing.assert_close(exported, expected)
    torch.testing.assert_close(named, expected)


@pytest.mark.filterwarnings("default:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("default:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("method", ["script", "trace"])
def test_torchscript_is_written_and_read(method: str, tmp_path: Path) -> None:
    sample = torch.randn(2, 4)
    task = RegressionTask()
    task.example_input_array = sample
    script = task.to_torchscript(tmp_path / "task.pt", method)
    assert task.training
    assert not script.training
    expected = task.eval()(sample)
    torch.testing.assert_close(script(sample), expected)
    torch.testing.assert_close(torch.jit.load(tmp_path / "task.pt")(sample), expected)
    with pytest.raises(ConfigurationError, match="'script' or 'trace'"):
        task.to_torchscript(method="compile")


def test_a_task_is_exported_in_evaluation_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []

    def export(module: Any, args: Any, file: Any, **options: Any) -> str:
        calls.append((module.training, torch.is_grad_enabled(), len(args), file, options))
        return "program"

    monkeypatch.setattr(exports, "require_package", lambda *args, **options: None)
    monkeypatch.setattr(torch.onnx, "export", export)
    task = RegressionTask()
    task.net[1].eval()
    task.example_input_array = torch.randn(2, 4)
    assert task.to_onnx(tmp_path / "a.onnx", dynamo=True) == "program"
    task.to_onnx(input_sample={"inputs": torch.randn(2, 4)})
    assert calls[0] == (False, False, 1, str(tmp_path / "a.onnx"), {"dynamo": True})
    assert calls[1][2:4] == (0, None)
    assert list(calls[1][4]["kwargs"]) == ["inputs"]
    assert [part.training for part in task.net] == [True, False, True, True]


def test_the_boring_model_can_be_scripted() -> None:
    sample = torch.randn(2, 32)
    task = BoringModel()
    torch.testing.assert_close(task.to_torchscript()(sample), task(sample))
