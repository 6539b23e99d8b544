"""`trainwright diff`: two runs compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.cli.main import main
from trainwright.cli.reports.run_diff import compare
from trainwright.cli.reports.run_files import read_run
from trainwright.loggers.csv_logger import CSVLogger


class _Task(RegressionTask):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr)
        self.save_hyperparameters()


def _train(root: Path, lr: float = 0.05, batch_size: int = 2, **options: Any) -> Path:
    settings = {"max_steps": 4, "seed": 0, **options}
    trainer = quiet_trainer(log_every_n_steps=1, logger=CSVLogger(root, name="", version=0), **settings)
    trainer.fit(_Task(lr), regression_loader(16, batch_size))
    return root / "version_0"


def test_equal_runs_have_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = _train(tmp_path / "a"), _train(tmp_path / "b")
    assert main(["diff", str(first), str(second)]) == 0
    assert "equal: code, model, hyperparameters" in capsys.readouterr().out


def test_the_settings_and_the_step_where_losses_part_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = _train(tmp_path / "a"), _train(tmp_path / "b", lr=0.06, gradient_clip_val=5.0)
    assert main(["diff", str(first), str(second), "--json"]) == 1
    printed = capsys.readouterr().out
    found = json.loads(printed[printed.index("{\n") :])  # after what the fits have printed
    assert found["hyperparameters"] == [["lr", 0.05, 0.06]]
    assert found["settings"] == [["gradient_clip_val", None, 5.0]]
    ((name, unequal, parted, *_),) = found["curves"]
    assert name == "train_loss"
    assert unequal == 1  # the first loss is of the same weights
    assert parted in (1, 2, 3)
    assert main(["diff", str(first), str(second), "--tolerance", "1"]) == 1
    assert "step 1         –" in capsys.readouterr().out


def test_json_contains_no_number_that_json_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("a", "1.0"), ("b", "nan")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(f"step,loss\n1,{value}\n")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["curves"] == [["loss", 1, 1, 1.0, "NaN"]]


def test_the_last_value_of_a_repeated_step_is_compared(tmp_path: Path) -> None:
    for name, rows in (("a", "1,1.0\n2,9.0\n2,2.0\n3,3.0\n"), ("b", "1,1.0\n2,2.0\n3,3.0\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(f"step,loss\n{rows}")  # a resumed run repeats step 2
    assert compare(read_run(tmp_path / "a"), read_run(tmp_path / "b"))["curves"] == []


def test_a_column_without_values_is_no_curve(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("step,loss,val\n1,1.0,\n")
    runs = [read_run(tmp_path / "a"), read_run(tmp_path / "b")]
    assert list(runs[0].curves) == ["loss"]
    assert compare(*runs)["curves"] == []


def test_another_order_of_the_data_is_shown(tmp_path: Path) -> None:
    runs = [read_run(_train(tmp_path / "a")), read_run(_train(tmp_path / "b", seed=1, batch_size=4))]
    assert compare(*runs)["data order"] == [["seed", 0, 1], ["samples after step 1", 2, 4]]


def test_without_records_only_curves_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("step,loss\n0,1\n")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    printed = capsys.readouterr().out
    assert "equal: metrics, curves\nnot known: code, settings and environment" in printed


def test_runs_that_share_nothing_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(f"step,{name}_loss\n0,1\n")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "share nothing" in capsys.readouterr().err
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "a")]) == 2
    assert "both paths name the run" in capsys.readouterr().err
    assert main(["diff", str(tmp_path), str(tmp_path)]) == 2
    assert f"Pass two of: {tmp_path / 'a'}, {tmp_path / 'b'}." in capsys.readouterr().err
