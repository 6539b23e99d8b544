"""`trainwright checkpoint …`: what is printed, what is written, and which exit code comes back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from tests.checkpoint.foreign import Net, lightning_dict, trained
from tests.checkpoint.snapshots import same, write_small
from trainwright import TaskModule, Trainer
from trainwright.checkpoint import Snapshot, newest_valid, read_checkpoint, write_checkpoint
from trainwright.checkpoint.interop import megatron_folder
from trainwright.cli import checkpoint
from trainwright.cli.main import main


class _Evil:
    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.flag}",)


class _Task(TaskModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.head = torch.nn.Linear(width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.first(batch[0])))).pow(2).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def _run(*arguments: object) -> int:
    return main(["checkpoint", *map(str, arguments)])


def _json(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    assert _run(*arguments, "--json") == code
    return json.loads(capsys.readouterr().out)


def _fit(folder: Path, max_epochs: int = 1, **arguments: Any) -> Trainer:
    trainer = Trainer(
        max_epochs=max_epochs, accelerator="cpu", logger=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(_Task(), DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=2), **arguments)
    return trainer


def _damage(checkpoint: Path, name: str = "trainer.json") -> None:
    data = bytearray((checkpoint / name).read_bytes())
    data[len(data) // 2] ^= 1
    (checkpoint / name).write_bytes(bytes(data))


def test_ls_marks_damaged_checkpoints_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, cut, unsealed = (write_small(tmp_path, step) for step in (1, 2, 3))
    (cut / "trainer.json").unlink()
    (unsealed / "manifest.json").unlink()
    assert _run("ls", tmp_path) == 0
    printed = capsys.readouterr().out
    table = {line.split()[0]: line for line in printed.splitlines()[:4]}
    assert "DAMAGED" not in table[whole.name]
    assert "DAMAGED" in table[cut.name]
    assert "DAMAGED" in table[unsealed.name]
    assert f"{cut.name}: trainer: trainer.json is missing" in printed
    assert f"{unsealed.name}: " in printed


def test_ls_reads_hashes_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _damage(write_small(tmp_path, 1))
    assert _json(capsys, "ls", tmp_path)[0]["problems"] == []
    assert "has changed" in _json(capsys, "ls", tmp_path, "--verify")[0]["problems"][0]


def test_show_prints_what_a_resume_restores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _fit(tmp_path)
    path = newest_valid(tmp_path / "checkpoints")
    facts = _json(capsys, "show", path)
    assert (facts["step"], facts["kind"]) == (4, "full")
    assert facts["topology"] == {"world_size": 1}
    assert set(facts["versions"]) == {"trainwright", "torch", "python"}
    assert set(facts["parts"]) == {"trainer", "model", "optimizer", "rng"}
    (optimizer,) = facts["optimizers"]
    assert optimizer["class"] == "AdamW"
    assert optimizer["state"] == "exp_avg, exp_avg_sq, step, for 6 of 6 parameters"
    assert optimizer["groups"][0]["lr"] == 0.005
    assert facts["schedulers"][0]["last_epoch"] == 1
    assert facts["progress"]["samples"] == 8
    assert facts["data"]["position"]["samples"] == 8
    assert facts["rng"] == {"rank 0": ["python", "numpy", "torch"]}
    assert any(name.startswith("ModelCheckpoint") for name in facts["callbacks"])


def test_verify_finds_every_checkpoint_below_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = write_small(tmp_path / "run" / "best", 1)
    last = write_small(tmp_path / "run" / "checkpoints", 2)
    (tmp_path / "run" / "checkpoints" / "index.json").touch()
    _damage(last)
    assert _run("verify", tmp_path / "run") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"{best}: intact", f"{last}: damaged"]


def test_diff_names_the_first_tensor_and_the_largest_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for name, weight in (("a", [1.0, 2.0]), ("b", [1.5, 5.0])):
        model = {"one": torch.tensor(weight[:1]), "two": torch.tensor(weight[1:]), "three": torch.ones(1)}
        paths.append(write_checkpoint(tmp_path / name, Snapshot(model=model, kind="weights")))
    assert _run("diff", *paths) == 1
    printed = capsys.readouterr().out
    assert "2 of 3 compared tensors differ, the first is model.one; largest difference 3 in model.two" in printed
    assert "  model.one: 0.5" in printed


def test_merge_writes_one_file_of_all_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {f"w{number}": torch.randn(4) for number in range(5)}
    source = write_checkpoint(tmp_path / "a", Snapshot(model=model, kind="weights"), max_shard_bytes=16)
    assert len(list((source / "model").glob("*.safetensors"))) == 5
    assert _run("merge", source, tmp_path / "out.safetensors") == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "out.safetensors"), "5 tensors, 80 B"]
    loaded = load_file(tmp_path / "out.safetensors")
    assert all(same(loaded[name], model[name]) for name in model)


def test_export_converts_and_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {f"w{number}": torch.randn(1000) for number in range(4)}
    source = write_checkpoint(tmp_path / "a", Snapshot(model=model, kind="weights"))
    arguments = ["--dtype", "bf16", "--sharded", "--max-shard-size", "4kB"]
    assert _run("export", source, tmp_path / "out", *arguments) == 0
    assert "4 tensors, 8.0 kB" in capsys.readouterr().out
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2
    assert same(load_file(tmp_path / "out" / index["weight_map"]["w3"])["w3"], model["w3"].bfloat16())


def test_export_says_which_weights_are_tied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight = torch.ones(2)
    source = write_checkpoint(tmp_path / "a", Snapshot(model={"a": weight, "b": weight}, kind="weights"))
    assert _run("export", source, tmp_path / "out.safetensors") == 0
    assert "note: b is the same weight as a" in capsys.readouterr().err
    assert _run("export", source, tmp_path / "both.safetensors", "--expand-tied") == 0
    assert set(load_file(tmp_path / "both.safetensors")) == {"a", "b"}


def test_convert_refuses_a_crafted_pickle_and_executes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"state_dict": Net().state_dict(), "evil": _Evil(tmp_path / "ran")}, tmp_path / "x.pt")
    assert _run("convert", tmp_path / "x.pt", tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert "posix.system" in told
    assert "--trust-pickle" in told
    assert not (tmp_path / "out").exists()
    assert _run("convert", tmp_path / "x.pt", tmp_path / "out", "--drop-unknown") == 0
    assert "skipped: evil" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_convert_takes_names_classes_and_counts(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(list(model.parameters())[::-1])
    trained(model, optimizer)
    torch.save(lightning_dict(model, [optimizer]), tmp_path / "x.ckpt")
    names = [name for name, _ in model.named_parameters()][::-1]
    (tmp_path / "names.txt").write_text("\n".join(names) + "\n\n")
    arguments = ["--param-names", tmp_path / "names.txt", "--optimizer-class", "MyAdam", "--step", 9, "--epoch", 3]
    assert _run("convert", tmp_path / "x.ckpt", tmp_path / "out", *arguments) == 0
    snapshot = read_checkpoint(tmp_path / "out")
    assert snapshot.optimizers[0]["class"] == "MyAdam"
    assert snapshot.optimizers[0]["groups"][0]["params"] == names
    assert (snapshot.state["step"], snapshot.state["epoch"]) == (9, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "nowhere"],
        ["show", "nowhere"],
        ["verify", "empty"],
        ["merge", "good", "good"],
        ["export", "good", "out", "--max-shard-size", "5 parsecs"],
        ["convert", "file.pt", "out"],
        ["convert", "file.pt", "out", "--step=-1"],
        ["convert", "file.pt", "out", "--param-names", "nowhere"],
        ["convert", "file.pt", "out", "--param-names", "latin-1"],
        ["export", "good", "out", "--max-shard-size", "0.1B"],
    ],
)
def test_what_cannot_be_done_is_one_line_and_exits_with_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_small(tmp_path, 1, name="good")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.pt").write_bytes(b"no archive")
    (tmp_path / "latin-1").write_bytes("größe".encode("latin-1"))
    assert _run(*arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("trainwright: error: ")
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_show_is_readable_without_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("show", write_small(tmp_path, 5)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "step: 5" in lines
    assert "optimizer 0:" in lines
    assert "  class: Adam" in lines
    assert "  rank 0: torch" in lines


def test_diff_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, "diff", write_small(tmp_path, 1), write_small(tmp_path, 2), code=1)
    assert not found["same"]
    assert {"path": "manifest.step", "left": "1", "right": "2"} in found["values"]
    assert any(item["path"] == "model.weight" for item in found["tensors"])


@pytest.mark.parametrize("option", ["--step", "--epoch"])
def test_an_option_without_effect_for_megatron_is_an_error_also_if_it_is_zero(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(megatron_folder, "megatron_folder", lambda source: source)
    assert _run("convert", tmp_path, tmp_path / "out", option, 0) == 2
    assert f"{option} has no effect for Megatron" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_960, "1.0 MB")]
)
def test_sizes_have_at_most_three_digits_before_the_point(num_bytes: int, text: str) -> None:
    assert checkpoint._size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (59.9, "59 s"), (60, "1 min"), (3599.6, "59 min"), (86399, "23 h")]
)
def test_ages_are_rounded_down(seconds: float, text: str) -> None:
    assert checkpoint._age(seconds) == text
