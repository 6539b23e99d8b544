"""Trainwright in the place of accelerate: modules, metadata, scripts, and transformers' Trainer."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import trainwright
from tests.accelerator.tiny_llama import (
    STEPS,
    Sentences,
    arguments_of,
    in_order,
    language_model,
    losses_of,
    train_by_hand,
)
from tests.helpers.distributed import run_distributed
from trainwright.core.errors import ConfigurationError
from trainwright.core.names.stand_in import run_script

_SCRIPT = """
import importlib.metadata, sys
import accelerate, accelerate.utils.operations
from accelerate.data_loader import skip_first_batches
import trainwright
assert accelerate.Accelerator is trainwright.Accelerator
assert accelerate.utils.operations.gather is trainwright.gather
assert accelerate.__version__ == importlib.metadata.version("accelerate")
assert "huggingface" in importlib.metadata.metadata("accelerate")["Home-page"]
from accelerate.accelerator import DataLoaderConfiguration
from accelerate.test_utils import RegressionModel, test_script
from accelerate.utils.operations import copy_tensor_to_devices
assert test_script.Accelerator is trainwright.Accelerator
assert copy_tensor_to_devices(sys.modules["torch"].ones(2)).tolist() == [1, 1]
assert not hasattr(accelerate, "no_such_name")
try:
    from accelerate import no_such_name
except ImportError:
    pass
try:
    import accelerate.no_such_module
except ModuleNotFoundError:
    pass
print(sys.argv)
"""


def _run_module(folder: Path) -> str:
    """Run the script as a module; return what it has printed."""
    sys.path.insert(0, str(folder))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run_script(["-m", "script", "x"])
    return said.getvalue()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_script_imports_trainwright_as_accelerate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    command = [sys.executable, "-m", "trainwright.as_accelerate", str(script), "--flag", "1"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == str([str(script), "--flag", "1"])
    assert run_distributed(_run_module, 1, tmp_path, init=False)[0].strip() == str([str(script), "x"])
    with pytest.raises(SystemExit, match="usage:"):
        run_script([])
    advised = "trainwright launch --num_processes 2 -m trainwright.as_accelerate script.py"
    with pytest.raises(SystemExit, match=advised):
        run_script(["--num_processes", "2", str(script)])


def _replace_and_remove() -> str:
    with trainwright.as_accelerate():
        trainwright.as_accelerate()  # changes nothing
        import accelerate.utils

        assert accelerate.Accelerator is trainwright.Accelerator
    assert not any(name.startswith("accelerate") for name in sys.modules)
    sys.modules["accelerate"] = sys
    with pytest.raises(ConfigurationError) as caught:
        trainwright.as_accelerate()
    return str(caught.value)


@pytest.mark.distributed
def test_it_can_be_removed_and_refuses_an_imported_accelerate() -> None:
    assert "accelerate is imported already" in run_distributed(_replace_and_remove, 1, init=False)[0]


def _with_transformers(folder: Path, resume: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Train with transformers' Trainer; returns the losses of all steps and the class of its Accelerator."""
    trainwright.as_accelerate()
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    arguments = TrainingArguments(**arguments_of(folder, num_train_epochs=2, eval_strategy="epoch", **options))
    # Built in shards at ZeRO stage 3, and read by rank 0 alone with cpu_ram_efficient_loading.
    model = LlamaForCausalLM.from_pretrained(folder / "start") if resume is None else language_model()
    trainer = in_order(Trainer)(model=model, args=arguments, train_dataset=Sentences(), eval_dataset=Sentences())
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "last"))
    return {
        "losses": losses_of(trainer),
        "evaluated": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        "accelerator": type(trainer.accelerator).__module__,
    }


def _deepspeed(stage: int, **further: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
    return {"deepspeed": {"zero_optimization": zero, **dict.fromkeys(auto, "auto"), **further}}


_LAYERS = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
_ADAM = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}


_OPTIONS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero2": _deepspeed(2),
    "zero2, DeepSpeed's optimizer": _deepspeed(2, optimizer=_ADAM),
    "zero3": _deepspeed(3),
    "fsdp": {"fsdp": True, "fsdp_config": {**_LAYERS, "cpu_ram_efficient_loading": True}},
    "fsdp, sharded files": {"fsdp": True, "fsdp_config": {**_LAYERS, "state_dict_type": "SHARDED_STATE_DICT"}},
}


@pytest.mark.engines
@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize(("kind", "world_size"), [("ddp", 1), *((kind, 2) for kind in _OPTIONS)])
def test_transformers_trains_and_resumes_on_us(kind: str, world_size: int, tmp_path: Path) -> None:
    model = language_model()
    model.save_pretrained(tmp_path / "start")
    losses, weights = train_by_hand(model), model.state_dict()
    found, *_ = run_distributed(_with_transformers, world_size, tmp_path, None, _OPTIONS[kind], timeout=120)
    assert found["accelerator"].startswith("trainwright.")
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(losses), rtol=1e-5, atol=1e-5)
    last = tmp_path / "last/model.safetensors"  # written unless each rank writes its shards
    saved = load_file(last) if last.is_file() else {}
    assert bool(saved) == (kind != "fsdp, sharded files")
    for name, value in saved.items():
        torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)
    resume = str(tmp_path / "checkpoint-4")
    again, *_ = run_distributed(_with_transformers, world_size, tmp_path, resume, _OPTIONS[kind], timeout=120)
    assert again == found
    assert all(torch.equal(value, saved[name]) for name, value in (load_file(last) if saved else {}).items())
    assert json.loads((tmp_path / "checkpoint-6/trainer_state.json").read_text())["global_step"] == STEPS
