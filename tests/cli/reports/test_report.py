"""`trainwright report`: a run as one HTML file."""

from __future__ import annotations

import base64
import json
import random
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks import ModelCheckpoint
from trainwright.cli.main import main
from trainwright.cli.reports.report import page
from trainwright.cli.reports.run_files import RunFileError, read_run
from trainwright.loggers.csv_logger import CSVLogger
from trainwright.loggers.jsonl_logger import JSONLinesLogger
from trainwright.loggers.tensorboard_logger import TensorBoardLogger


def _train(root: Path, logger: Any) -> None:
    trainer = quiet_trainer(
        max_epochs=2,
        log_every_n_steps=1,
        logger=logger,
        default_root_dir=root,
        callbacks=[ModelCheckpoint(monitor="val_loss")],
    )
    trainer.fit(RegressionTask(), regression_loader(8, 2), regression_loader(4, 2))


def _content(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(found[1])


def _unpacked(text: str, dtype: str) -> np.ndarray[Any, Any]:
    shuffled = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)
    values = shuffled.reshape(4, -1).T.copy().view(dtype).ravel()
    return values.cumsum() if dtype == "<i4" else values


@pytest.mark.parametrize("logger_class", [CSVLogger, JSONLinesLogger, TensorBoardLogger])
def test_the_curves_of_each_logger_are_read(tmp_path: Path, logger_class: type[Any]) -> None:
    _train(tmp_path, [logger_class(tmp_path, version=0)])
    run = read_run(tmp_path)
    assert sorted(run.curves) == ["train_loss", "val_loss"]
    assert run.curves["train_loss"].steps.tolist() == list(range(8))
    assert run.curves["val_loss"].steps.tolist() == [3, 7]
    assert np.isfinite(run.curves["train_loss"].values).all()
    assert [line["step"] for line in run.progress] == list(range(1, 9))
    assert run.start["strategy"] == "SingleDeviceStrategy"


def test_a_report_is_one_file_with_the_curves_events_checkpoints_and_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _train(tmp_path, [CSVLogger(tmp_path, version=0)])
    assert main(["report", str(tmp_path)]) == 0
    file = Path(capsys.readouterr().out.strip())
    assert file == tmp_path / "trainwright_logs/version_0/report.html"
    html = file.read_text()
    assert not re.search(r'(src|href)="', html)  # needs no network
    assert f" in {file.parent}</title>" in html
    content = _content(html)
    loss = content["charts"][0]
    assert loss["title"] == "loss"
    assert [series["name"] for series in loss["series"]] == ["train_loss", "val_loss"]
    expected = read_run(tmp_path).curves["train_loss"]
    assert _unpacked(loss["series"][0]["steps"], "<i4").tolist() == expected.steps.tolist()
    np.testing.assert_allclose(_unpacked(loss["series"][0]["values"], "<f4"), expected.values, rtol=1e-4)
    titles = [chart["title"] for chart in content["charts"]]
    assert titles[1:] == ["Learning rate", "Peak memory of the main process in GiB", "Throughput in samples per second"]
    kinds = {event["kind"] for event in content["events"]}
    assert kinds == {"fit", "validation", "save", "end"}
    tables = {table["title"]: table["rows"] for table in content["tables"]}
    assert [row[1:] for row in tables["Checkpoints"]][-1][-1] == "yes"
    assert any(row[0].endswith("(best)") for row in tables["Checkpoints"])
    assert ["max_epochs", "2", "argument"] in tables["Settings"]
    assert ["seed", "null", "default"] in tables["Settings"]
    assert ["strategy", "SingleDeviceStrategy"] in tables["Plan"]


def test_all_charts_show_the_steps_from_the_first_to_the_last_of_any_curve(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,short,long\n3,1,\n5,2,1\n90,,2\n")
    assert _content(page(read_run(tmp_path)))["range"] == [3, 90]


def test_values_that_are_not_finite_are_events(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss\n0,1\n1,nan\n2,inf\n3,2\n")
    content = _content(page(read_run(tmp_path)))
    assert [(event["kind"], event["step"]) for event in content["events"]] == [("not finite", 1), ("not finite", 2)]


def test_a_restart_mark_of_tensorboard_removes_later_values(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, version=0)
    for step in range(4):
        logger.log_metrics({"loss": float(step)}, step)
    logger.remove_from(2)
    logger.log_metrics({"loss": 10.0}, 2)
    logger.finish("success")
    assert read_run(tmp_path).curves["loss"].values.tolist() == [0.0, 1.0, 10.0]


def test_the_progress_of_abandoned_steps_is_left_out(tmp_path: Path) -> None:
    lines = [("fit", 0), ("progress", 2), ("progress", 4), ("fit", 3), ("progress", 5)]
    text = "".join(json.dumps({"event": event, "step": step, "time": 1.0}) + "\n" for event, step in lines)
    (tmp_path / "run.jsonl").write_text(text)
    assert [line["step"] for line in read_run(tmp_path).progress] == [2, 5]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.csv", "step,loss\n0,1\n1,x\n", r"metrics.csv, line 3: .*'x'"),
        ("metrics.csv", "a,b\n0,1\n", "no column 'step'"),
        ("metrics.jsonl", '{"step": 0, "loss": 1}\n{"step"\n', r"metrics.jsonl, line 2"),
        ("run.jsonl", '{"event": "fit"}\n', r"run.jsonl, line 1: not an event"),
        ("events.out.tfevents.1", "x" * 40, r"events.out.tfevents.1, byte 0: a checksum"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RunFileError, match=message):
        read_run(tmp_path)


_STRANGE = (None, -1, 2**70, 1e400, float("nan"), "x", [], {}, [[1]], {"a": {}}, True)


def test_a_folder_without_a_run_is_an_error_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "has none below it" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "absent")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").mkdir()
    with pytest.raises(RunFileError, match=r"run\.jsonl cannot be read"):
        read_run(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run.jsonl", "metrics.csv", "metrics.jsonl", "events.out.tfevents.1"])
def test_damage_anywhere_is_one_error_that_names_the_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(name)
    kinds = {"metrics.jsonl": JSONLinesLogger, "events.out.tfevents.1": TensorBoardLogger}
    _train(tmp_path / "whole", [kinds.get(name, CSVLogger)(tmp_path / "whole", version=0)])
    folder = read_run(tmp_path / "whole").folder
    damaged = folder / name
    if name not in {file.name for file in folder.iterdir()}:
        (written,) = folder.glob("events*")
        written.rename(damaged)
    shutil.copytree(folder, tmp_path / "other")
    before = damaged.read_bytes()
    capsys.readouterr()
    for _ in range(150):
        after = bytearray(before)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(after))
            after[at : at + rng.randint(0, 8)] = rng.randbytes(rng.randint(0, 8))
        if name.endswith("jsonl") and rng.random() < 0.8:
            lines = before.decode().splitlines()
            line = rng.randrange(len(lines))
            values = json.loads(lines[line])
            values[rng.choice(list(values))] = rng.choice(_STRANGE)
            lines[line] = json.dumps(values)
            after = bytearray("\n".join([*lines, ""]).encode())
        damaged.write_bytes(after)
        for command in (["report", str(folder)], ["diff", str(folder), str(tmp_path / "other")]):
            code = main(command)
            printed = capsys.readouterr()
            assert code in (0, 1, 2)
            assert (name in printed.err) == (code == 2), printed.err
            assert all(line.isprintable() for line in (printed.out + printed.err).splitlines())


@pytest.mark.engines
@pytest.mark.requires("program:chromium", reason="a real browser")
@pytest.mark.requires("playwright", reason="it drives the browser")
def test_a_report_of_a_million_points_opens_and_pans_in_a_browser(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    values = np.random.default_rng(0).normal(size=(100_000, 10))
    names = ",".join(f"train_{i}" for i in range(10))
    options = {"fmt": "%.8g", "delimiter": ",", "header": f"step,{names}", "comments": ""}
    np.savetxt(tmp_path / "metrics.csv", np.column_stack([np.arange(len(values)), values]), **options)
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").stat().st_size <= 5 * 10**6
    errors: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            tab = browser.new_page(color_scheme=scheme, viewport={"width": 1360, "height": 1000})
            tab.on("pageerror", lambda error: errors.append(str(error)))
            tab.goto(f"file://{tmp_path / 'report.html'}")
            tab.wait_for_selector(".uplot", timeout=20_000)
            assert tab.evaluate("document.documentElement.classList.contains('dark')") == (scheme == "dark")
            assert tab.evaluate("bounds") is None
            assert tab.evaluate("charts[0].plot.scales.x.max") == 99_999
            box = tab.locator(".u-over").first.bounding_box()
            tab.keyboard.down("Control")
            tab.mouse.move(box["x"] + 200, box["y"] + 50)
            tab.mouse.wheel(0, -400)
            tab.keyboard.up("Control")
            low, high = tab.evaluate("bounds")
            assert 0 < low < high < 99_999
            tab.keyboard.down("Shift")
            tab.mouse.down()
            tab.mouse.move(box["x"] + 260, box["y"] + 50)
            tab.mouse.up()
            moved = tab.evaluate("bounds")
            assert moved[0] < low
            assert moved[1] - moved[0] == pytest.approx(high - low)
        browser.close()
    assert not errors
