"""`trainwright check`: its table, its parts in this process, and real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.rendezvous import RendezvousError

from trainwright import Accelerator
from trainwright.cli.main import main
from trainwright.launch import check as check_command
from trainwright.launch import check_processes
from trainwright.launch.check import FAIL, PARTS, PASS, SKIPPED, Finding, failed, table
from trainwright.launch.check_processes import Check, combined
from trainwright.launch.launch import PREFIX


def test_the_table_has_the_advice_below_a_failure() -> None:
    assert table([Finding("data", PASS, "each of 11 samples once"), failed("clocks", "3.0 s")]).splitlines() == [
        "part         result   found",
        "data         pass     each of 11 samples once",
        "clocks       fail     3.0 s",
        f"{'':<21} advice: {PARTS['clocks']}",
    ]


def test_a_failure_of_one_rank_is_a_failure() -> None:
    assert combined("data", [(PASS, "good"), (PASS, "good")]) == Finding("data", PASS, "good")
    assert combined("data", [(PASS, "good"), (FAIL, "bad")]) == failed("data", "rank 1: bad")
    assert combined("data", [(FAIL, "bad"), (FAIL, "bad")]) == failed("data", "bad")
    assert combined("clocks", [(SKIPPED, "one process")]).result == SKIPPED


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--cpu", "train.py"], "takes options only, not 'train.py'"),
        (["--num_procesess", "2"], "trainwright check has no option --num_procesess. Did you mean 'num_processes'?"),
        (["--run_folder"], "--run_folder needs a value"),
        (
            ["--num_machines=2", "--machine_rank=0", "--main_process_ip=10.0.0.1", "--main_process_port=1"],
            "several machines need --run_folder",
        ),
    ],
)
def test_wrong_options_start_nothing(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_machines_that_do_not_meet_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RendezvousError("too few machines")

    monkeypatch.setenv(PREFIX, "")
    monkeypatch.setattr(check_command, "set_environment", lambda config: (1, 1))
    monkeypatch.setattr(check_command, "run_agent", fail)
    assert main(["check", "--cpu"]) == 1
    output = capsys.readouterr().out
    assert "RendezvousError: too few machines" in output
    assert PARTS["processes"] in output


@pytest.fixture
def one(tmp_path: Path) -> Check:
    return Check(Accelerator(cpu=True), tmp_path / "run")


def test_another_result_than_that_of_plain_pytorch_is_a_failure(one: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = check_processes.plain_training

    def perturbed(training: Any, batches: Any) -> list[float]:
        with torch.no_grad():
            training.plain[0][0].weight[0, 0] += 0.1
        return plain(training, batches)

    monkeypatch.setattr(check_processes, "plain_training", perturbed)
    row = one.run("parity", check_processes.parity)
    assert (row.result, row.advice) == (FAIL, PARTS["parity"])
    assert "largest relative difference" in row.found


def test_a_state_that_is_not_restored_is_a_failure(one: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    one.folder.mkdir()
    monkeypatch.setattr(Accelerator, "load_state", lambda *_: None)
    assert "differ" in one.run("resume", check_processes.resume).found


@pytest.mark.parametrize(
    ("part", "other", "text"),
    [
        ("versions", {"python": "3.11.0", "torch": "2.0", "trainwright": "0"}, "rank 1 has {'python': '3.11.0'"),
        (
            "devices",
            {"kind": "cuda", "name": "H100", "host": "node", "device": "cuda:0"},
            "different kinds of device: cpu, cuda",
        ),
        ("clocks", [4e9] * 7, "s between ranks 0 and 1"),
    ],
)
def test_ranks_that_differ_are_a_failure(
    part: str, other: Any, text: str, one: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Check, "exchange", lambda _, value, key="": [value] if key else [value, other])
    one.world_size = 2
    row = one.run(part, getattr(check_processes, part))
    assert (row.result, row.advice) == (FAIL, PARTS[part])
    assert text in row.found


def test_an_error_is_a_failure_and_the_next_part_runs(one: Check) -> None:
    def broken(_: Check) -> str:
        raise RuntimeError("no\nluck")

    assert one.run("data", broken) == failed("data", "RuntimeError: no luck")
    assert one.run("data", check_processes.data).result == PASS


@pytest.mark.slow
def test_a_missing_run_folder_fails_with_advice(tmp_path: Path) -> None:
    check = Check(Accelerator(cpu=True), tmp_path / "missing" / "run")
    row = check.run("run folder", check_processes.run_folder)
    assert (row.result, row.advice) == (FAIL, PARTS["run folder"])
    assert "No such file" in row.found
    assert check.run("resume", check_processes.resume).result == SKIPPED


def _command(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "trainwright", "check", "--cpu", *map(str, arguments)]
    return {"args": command, "text": True, "env": dict(os.environ)}


def _check(*arguments: object) -> tuple[dict[str, dict[str, str]], int]:
    done = subprocess.run(**_command(*arguments, "--json"), capture_output=True, timeout=120, check=False)
    return {row["part"]: row for row in json.loads(done.stdout)}, done.returncode


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        pytest.param("--num_processes 1", "1 (NO, no communication)", marks=pytest.mark.exhaustive),
        ("--num_processes 2", "2 (MULTI_CPU, gloo)"),
        pytest.param(
            "--num_processes 2 --use_fsdp --mixed_precision bf16", "2 (FSDP, gloo)", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_every_part_passes(options: str, kind: str, tmp_path: Path) -> None:
    rows, code = _check(*options.split(), "--run_folder", tmp_path)
    assert code == 0, rows
    assert list(rows) == list(PARTS)
    assert rows["processes"]["found"] == kind
    skipped = {"clocks", "collectives"} if kind.startswith("1") else set()
    assert {part for part, row in rows.items() if row["result"] == SKIPPED} == skipped
    assert list(tmp_path.iterdir()) == []
