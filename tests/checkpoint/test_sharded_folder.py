"""Checkpoints in the shards of FSDP and DeepSpeed: every tensor, the losses after continuing, and what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from tests.checkpoint import sharded_runs
from tests.checkpoint.foreign import Evil
from tests.checkpoint.snapshots import names_of
from tests.helpers.distributed import run_distributed
from trainwright.checkpoint import load_named_optimizer_state, read_checkpoint, verify
from trainwright.checkpoint.format.regions import Box
from trainwright.checkpoint.interop.convert import convert_checkpoint
from trainwright.checkpoint.interop.dcp_folder import ForeignShards
from trainwright.checkpoint.interop.sharded_folder import merge_weights
from trainwright.cli.main import main
from trainwright.core.errors import CheckpointError
from trainwright.utils import merge_fsdp_weights


def _continued(folder: Path) -> list[float]:
    """Load a converted checkpoint into one process, and return the losses of the next steps on all ranks' batches."""
    snapshot = read_checkpoint(folder)
    model = sharded_runs.Net()
    model.load_state_dict(snapshot.model or {})
    optimizer = torch.optim.AdamW(sharded_runs.groups(model), lr=0.5)  # the saved rate replaces this one
    load_named_optimizer_state(optimizer, snapshot.optimizers[0], names_of(model))
    losses = []
    for number in range(3, 6):
        loss = sharded_runs.loss_of(model, sharded_runs.batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _check_tensors(folder: Path, expected: dict[str, Any]) -> None:
    snapshot = read_checkpoint(folder)
    assert verify(folder) == []
    weights = snapshot.model or {}
    assert weights.keys() == {"offset", *(name for name, _ in sharded_runs.Net().named_parameters())}
    for name, value in expected["weights"].items():
        assert torch.equal(weights[name], value), name
    state = snapshot.optimizers[0]["state"]
    for name, values in expected["moments"].items():
        for key, value in values.items():
            assert torch.equal(state[name][key], value), (name, key)
        assert float(state[name]["step"]) == 3


@pytest.mark.distributed
@pytest.mark.slow
def test_a_folder_of_fsdp_has_every_tensor_and_continues(tmp_path: Path) -> None:
    expected = run_distributed(sharded_runs.fsdp, 2, tmp_path / "saved", timeout=240)[0]
    done = convert_checkpoint(tmp_path / "saved", tmp_path / "out")
    assert (done.source, done.kind, done.step) == ("torch.distributed", "full", 3)
    _check_tensors(tmp_path / "out", expected)
    losses = _continued(tmp_path / "out")
    torch.testing.assert_close(losses, expected["losses"], rtol=1e-5, atol=1e-6)
    [file] = merge_weights(tmp_path / "saved" / "pytorch_model_fsdp_0", tmp_path / "merged")
    torch.testing.assert_close(load_file(file), expected["weights"], rtol=0, atol=0)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "is_bf16"), [(2, False), (3, True)])
def test_a_checkpoint_of_deepspeed_has_every_tensor_and_continues(stage: int, is_bf16: bool, tmp_path: Path) -> None:
    call = (sharded_runs.deepspeed_zero, 2, tmp_path / "saved", stage, is_bf16)
    expected = run_distributed(*call, timeout=240)[0]
    done = convert_checkpoint(tmp_path / "saved", tmp_path / "out")
    assert (done.source, done.kind, done.step) == ("deepspeed", "full", 3)
    _check_tensors(tmp_path / "out", expected)
    losses = _continued(tmp_path / "out")
    # The engine computes in bfloat16 there, whose numbers have 8 bits.
    close = {"rtol": 2e-2, "atol": 1e-3} if is_bf16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(losses, expected["losses"], **close)
    [file] = merge_weights(tmp_path / "saved", tmp_path / "merged")
    merged = load_file(file)
    assert all(torch.equal(merged[name], value) for name, value in expected["weights"].items())
    rank_1 = next((tmp_path / "saved").rglob("*zero_pp_rank_1_*optim_states.pt"))
    rank_1.unlink()
    with pytest.raises(CheckpointError, match=r"1 files \*_optim_states.pt, expected one from each of 2 ranks. Copy"):
        convert_checkpoint(tmp_path / "saved", tmp_path / "again")


def _dcp_folder(folder: Path, **more: Any) -> Path:
    model = sharded_runs.net()
    state = {"model": model.state_dict(), **more}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_file_of_a_rank_that_is_missing_or_cut_is_named(damage: str, tmp_path: Path) -> None:
    folder = _dcp_folder(tmp_path / "x")
    file = folder / "__0_0.distcp"
    content = file.read_bytes()
    file.unlink()
    if damage == "truncated":
        file.write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match=f"__0_0.distcp .*{damage}.*Copy"):
        convert_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_foreign_code_is_refused_and_never_executed(tmp_path: Path) -> None:
    flag = tmp_path / "executed"
    folder = _dcp_folder(tmp_path / "x", other=Evil(flag))
    with pytest.raises(CheckpointError, match="No code from the file was run"):
        convert_checkpoint(folder, tmp_path / "out")
    assert not flag.exists()


def _deepspeed_folder(folder: Path, **more: Any) -> Path:
    (folder / "global_step2").mkdir(parents=True)
    (folder / "latest").write_text("global_step2")
    model = sharded_runs.net()
    state = {"module": model.state_dict(), "optimizer": None, "param_shapes": None, "global_steps": 2, **more}
    torch.save(state, folder / "global_step2" / "mp_rank_00_model_states.pt")
    return folder


def test_what_deepspeed_saved_in_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    _deepspeed_folder(tmp_path / "x", mp_world_size=2)
    with pytest.raises(CheckpointError, match=r"tensor parallelism.*ds_to_universal"):
        convert_checkpoint(tmp_path / "x", tmp_path / "out")


@pytest.mark.parametrize("kind", ["bin", "sharded"])
def test_merge_weights_writes_one_model(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _dcp_folder(tmp_path / "pytorch_model_fsdp_0")
    options = {"bin": ["--unsafe_serialization"], "sharded": ["--max_shard_size", "60B"]}[kind]
    assert main(["merge-weights", str(folder), str(tmp_path / "out"), *options]) == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert capsys.readouterr().out.count("\n") == len(names)
    if kind == "bin":
        weights = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    else:
        files = [name for name in names if name.endswith(".safetensors")]
        weights = {name: value for file in files for name, value in load_file(tmp_path / "out" / file).items()}
    torch.testing.assert_close(weights, dict(sharded_runs.net().state_dict()), rtol=0, atol=0)
    assert folder.is_dir()


def test_merge_weights_names_its_own_option_for_a_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge-weights", str(tmp_path), str(tmp_path / "out"), "--max_shard_size", "5 parsecs"]) == 2
    assert "--max_shard_size='5 parsecs', expected a size" in capsys.readouterr().err


def test_merge_fsdp_weights_removes_the_shards_if_asked(tmp_path: Path) -> None:
    folder = _dcp_folder(tmp_path / "pytorch_model_fsdp_0")
    with pytest.raises(CheckpointError, match="would be removed"):
        merge_fsdp_weights(folder, folder / "out", remove_checkpoint_dir=True)
    merge_fsdp_weights(folder, tmp_path / "out", remove_checkpoint_dir=True)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == sharded_runs.net().state_dict().keys()
    assert not folder.exists()


def test_a_checkpoint_of_deepspeed_without_zero_is_its_weights(tmp_path: Path) -> None:
    done = convert_checkpoint(_deepspeed_folder(tmp_path / "x"), tmp_path / "out")
    assert (done.kind, done.step, done.num_tensors) == ("weights", 2, 7)


def test_a_checkpoint_of_stage_1_has_its_frozen_weights(tmp_path: Path) -> None:
    shapes = [{"second.weight": torch.Size([5, 5]), "head.weight": torch.Size([1, 5])}]
    frozen = {"frozen_param_shapes": None, "frozen_param_fragments": None}  # DeepSpeed saves them from stage 2 on
    folder = _deepspeed_folder(tmp_path / "x", param_shapes=shapes, dp_world_size=1, buffer_names=["offset"], **frozen)
    trained = torch.arange(30.0)
    optimizer = {"state": {0: {"momentum_buffer": trained + 1}}, "param_groups": [{"lr": 0.1}]}
    partition = {"single_partition_of_fp32_groups": [trained], "base_optimizer_state": optimizer}
    file = folder / "global_step2" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": partition}, file)
    [merged] = merge_weights(folder, tmp_path / "merged")
    weights = load_file(merged)
    expected = sharded_runs.net().state_dict()
    expected["second.weight"] = trained[:25].view(5, 5)
    expected["head.weight"] = trained[25:].view(1, 5)
    torch.testing.assert_close(weights, dict(expected), rtol=0, atol=0)


def test_merging_something_else_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no shards"):
        merge_weights(tmp_path, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        merge_weights(tmp_path / "nowhere", tmp_path / "out")


def test_shards_with_different_data_types_are_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    shards = ForeignShards()
    shards.add("weight", Box((0,), (2,)), (4,), torch.float32, lambda: torch.zeros(2))
    shards.add("weight", Box((2,), (2,)), (4,), torch.float16, lambda: torch.zeros(2))
    with pytest.raises(CheckpointError, match="is incomplete: the shards of 'weight' do not belong to a F32 tensor"):
        shards.full("weight", (4,), torch.float32, tmp_path)
