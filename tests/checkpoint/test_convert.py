from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.foreign import Net, accelerate_folder, lightning_dict, trained
from tests.checkpoint.snapshots import names_of, same
from trainwright.checkpoint import load_named_optimizer_state, named_optimizer_state, read_checkpoint, verify
from trainwright.checkpoint.interop.convert import Converted, ConvertOptions, convert_checkpoint
from trainwright.core.errors import CheckpointError

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _two_groups(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Decay for matrices only: the groups have their members' shapes to themselves."""
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])


def _lightning(tmp_path: Path, make: MakeOptimizer = _adamw, **more: Any) -> tuple[Path, Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = make(model)
    trained(model, optimizer)
    torch.save(lightning_dict(model, [optimizer], **more), tmp_path / "x.ckpt")
    return tmp_path / "x.ckpt", model, optimizer


def _notes(converted: Converted) -> str:
    return "\n".join(converted.notes)


def test_a_lightning_file_keeps_weights_step_epoch_and_hyper_parameters(tmp_path: Path) -> None:
    source, model, _ = _lightning(tmp_path)
    done = convert_checkpoint(source, tmp_path / "out")
    assert (done.source, done.kind, done.step, done.epoch) == ("lightning", "full", 8, 2)
    assert verify(tmp_path / "out") == []
    snapshot = read_checkpoint(tmp_path / "out")
    assert same(dict(snapshot.model or {}), dict(model.state_dict()))
    assert snapshot.trainer["hyper_parameters"] == {"width": 4}


@pytest.mark.parametrize(
    "make",
    [
        _adamw,
        _two_groups,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    ],
)
def test_an_optimizer_comes_along_keyed_by_name(make: MakeOptimizer, tmp_path: Path) -> None:
    source, model, optimizer = _lightning(tmp_path, make)
    assert convert_checkpoint(source, tmp_path / "out").kind == "full"
    saved = read_checkpoint(tmp_path / "out").optimizers[0]
    assert same(saved, named_optimizer_state(optimizer, names_of(model)))
    fresh = Net()
    load_named_optimizer_state(make(fresh), saved, names_of(fresh))  # loads into a new optimizer


def test_the_names_of_a_compiled_model_in_an_optimizer_are_those_of_the_model(tmp_path: Path) -> None:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([(f"_orig_mod.{name}", weight) for name, weight in model.named_parameters()])

    source, model, optimizer = _lightning(tmp_path, make)
    assert convert_checkpoint(source, tmp_path / "out").kind == "full"
    saved = read_checkpoint(tmp_path / "out").optimizers[0]
    assert same(saved, named_optimizer_state(optimizer, names_of(model)))


@pytest.mark.parametrize(("is_last_batch", "epoch"), [(False, 1), (True, 2)])
def test_a_file_from_within_an_epoch_stands_at_its_start(is_last_batch: bool, epoch: int, tmp_path: Path) -> None:
    source, _, _ = _lightning(tmp_path, is_last_batch=is_last_batch, inside=3)
    done = convert_checkpoint(source, tmp_path / "out")
    assert done.epoch == epoch
    assert ("saved 3 batches into epoch 1" in _notes(done)) is not is_last_batch


def test_an_optimizer_whose_names_cannot_be_told_is_left_out_unless_they_are_given(tmp_path: Path) -> None:
    source, model, optimizer = _lightning(tmp_path, lambda model: torch.optim.AdamW(list(model.parameters())[::-1]))
    done = convert_checkpoint(source, tmp_path / "out")
    assert done.kind == "weights"
    assert "cannot be keyed by name" in _notes(done)
    assert read_checkpoint(tmp_path / "out").optimizers == []
    names = [names_of(model)[p] for group in optimizer.param_groups for p in group["params"]]
    assert convert_checkpoint(source, tmp_path / "full", ConvertOptions(param_names=[names])).kind == "full"
    saved = read_checkpoint(tmp_path / "full").optimizers[0]
    assert same(saved, named_optimizer_state(optimizer, names_of(model)))


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["head.bias"], "1 different names were given for an optimizer of 6 parameters"),
        (["nose.bias", *list(dict(Net().named_parameters()))[1:]], "no weights of the given names nose.bias"),
        (list(dict(Net().named_parameters()))[::-1], "shape"),
    ],
)
def test_names_that_do_not_fit_are_an_error(names: list[str], complaint: str, tmp_path: Path) -> None:
    source, _, _ = _lightning(tmp_path)
    with pytest.raises(CheckpointError, match=complaint):
        convert_checkpoint(source, tmp_path / "out", ConvertOptions(param_names=[names]))
    assert not (tmp_path / "out").exists()


def test_names_of_fsdp_that_are_not_those_of_weights_are_an_error(tmp_path: Path) -> None:
    model = Net()
    names = [name.replace("head", "nose") for name, _ in model.named_parameters()]
    state = {"state": {}, "param_groups": [{**_adamw(model).state_dict()["param_groups"][0], "params": names}]}
    content = lightning_dict(model, [])
    content["optimizer_states"] = [state]
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=r"no weights of the optimizer's parameters nose\.weight"):
        convert_checkpoint(tmp_path / "x.ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _accelerate(tmp_path: Path, **more: Any) -> tuple[Path, Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = _adamw(model)
    trained(model, optimizer)
    return accelerate_folder(tmp_path / "state", model, optimizer, **more), model, optimizer


def test_an_accelerate_folder_with_ordered_weights_is_a_full_checkpoint(tmp_path: Path) -> None:
    source, model, optimizer = _accelerate(tmp_path, safe=False)
    done = convert_checkpoint(source, tmp_path / "out")
    assert (done.source, done.kind, done.step) == ("accelerate", "full", 3)
    snapshot = read_checkpoint(tmp_path / "out")
    assert same(dict(snapshot.model or {}), dict(model.state_dict()))
    assert same(snapshot.optimizers[0], named_optimizer_state(optimizer, names_of(model)))
    assert snapshot.trainer["schedulers"] == [{"last_epoch": 3, "_step_count": 4, "_last_lr": [0.1]}]


@pytest.mark.parametrize(("suffix", "key"), [(".bin", None), (".pt", "state_dict"), (".pth", "model")])
def test_a_state_dict_is_weights(suffix: str, key: str | None, tmp_path: Path) -> None:
    state = Net().state_dict()
    path = tmp_path / f"x{suffix}"
    torch.save(state if key is None else {key: state, "epoch": 3}, path)
    done = convert_checkpoint(path, tmp_path / "out")
    assert (done.source, done.kind) == ("state dict", "weights")
    assert same(dict(read_checkpoint(tmp_path / "out").model or {}), dict(state))
    assert ("skipped: epoch" in _notes(done)) is (key is not None)


def test_a_file_without_weights_is_an_error(tmp_path: Path) -> None:
    torch.save({"model": {"a": 1}}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="no state dict"):
        convert_checkpoint(tmp_path / "x.pt", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "advice"),
    [(".metadata", "damaged"), ("__0_0.distcp", ".metadata is missing"), ("notes.txt", "has: notes.txt")],
)
def test_a_folder_of_another_kind_says_what_to_do(name: str, advice: str, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / name).touch()
    with pytest.raises(CheckpointError, match=advice):
        convert_checkpoint(tmp_path / "x", tmp_path / "out")


@pytest.mark.engines
@pytest.mark.requires("accelerate", "writes a real folder; in the `bench` extra")
def test_a_real_accelerate_folder_is_taken_over(tmp_path: Path) -> None:
    script = Path(__file__).with_name("accelerate_run.py")
    subprocess.run([sys.executable, str(script), str(tmp_path / "state")], check=True, timeout=240)
    done = convert_checkpoint(tmp_path / "state", tmp_path / "out")
    assert (done.source, done.kind, done.step) == ("accelerate", "full", 4)
    saved = read_checkpoint(tmp_path / "out").optimizers[0]["state"]
    reference = torch.load(tmp_path / "state" / "optimizer.bin", weights_only=True)["state"]
    assert same(list(saved.values()), [reference[number] for number in range(len(saved))])


def test_values_that_a_checkpoint_cannot_hold_are_left_out_and_named(tmp_path: Path) -> None:
    source, _, _ = _lightning(tmp_path, mine={"thing": Net(), "kept": 1})
    done = convert_checkpoint(source, tmp_path / "out", ConvertOptions(trust_pickle=True))
    assert read_checkpoint(tmp_path / "out").trainer["task"] == {"mine": {"kept": 1}}
    assert "Skipped: task.mine.thing" in _notes(done)


def test_accelerate_safetensors_do_not_keep_the_order_of_weights_of_one_shape(tmp_path: Path) -> None:
    source, model, optimizer = _accelerate(tmp_path, safe=True)
    done = convert_checkpoint(source, tmp_path / "one")
    assert done.kind == "weights"
    assert "does not preserve their order" in _notes(done)
    names = list(dict(model.named_parameters()))
    assert convert_checkpoint(source, tmp_path / "two", ConvertOptions(param_names=[names])).kind == "full"
    saved = read_checkpoint(tmp_path / "two").optimizers[0]
    assert same(saved, named_optimizer_state(optimizer, names_of(model)))


def test_a_whole_module_is_refused_unless_trusted(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "x.pt")
    for options in (ConvertOptions(), ConvertOptions(drop_unknown=True)):
        with pytest.raises(CheckpointError, match=r"torch\.nn\.modules\.linear\.Linear"):
            convert_checkpoint(tmp_path / "x.pt", tmp_path / "out", options)
    convert_checkpoint(tmp_path / "x.pt", tmp_path / "out", ConvertOptions(trust_pickle=True))
    assert list(read_checkpoint(tmp_path / "out").model or {}) == ["weight", "bias"]
