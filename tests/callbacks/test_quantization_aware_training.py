"""Quantization during and after training, against torchao in hand-written loops, with files that torchao reads."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.runs import assert_equal_weights, fitted, quiet_trainer, weights_of
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright import CheckpointError, ConfigurationError, load_quantized_model, quantize_model
from trainwright.callbacks import ModelCheckpoint, QuantizationAwareTraining
from trainwright.checkpoint import read_checkpoint

pytestmark = [
    pytest.mark.requires("torchao", reason="it quantizes the layers"),
    pytest.mark.filterwarnings("ignore:.*holds the state of a callback:UserWarning"),
    # torchao's own, at its import
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torchao"),
]
_NAMES = ["int8_dynamic_int4_weight", "int8_dynamic_int8_weight", "int4_weight", "int8_weight"]
_INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


class _Task(RegressionTask):
    """Widths that groups of 32 weights divide, and a parameter whose name has no dot."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(momentum=0.9)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(
                nn.Linear(4, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)
            )
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * self.scale


def _callback(config: Any = "int8_dynamic_int4_weight", **arguments: Any) -> QuantizationAwareTraining:
    return QuantizationAwareTraining(config, **{"skip": "net.0", **arguments})


def _fit(*callbacks: Any, ckpt_path: Any = None, task: Any = None, **arguments: Any) -> _Task:
    task = task or _Task()
    torch.manual_seed(3)  # of the dropout
    arguments = {"max_epochs": 2, **arguments}
    quiet_trainer(callbacks=list(callbacks), **arguments).fit(
        task, regression_loader(batch_size=8), ckpt_path=ckpt_path
    )
    return task


def _outputs(task: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        outputs: torch.Tensor = task.eval()(_INPUTS)
    return outputs


def _config(name: str) -> Any:
    from torchao import quantization

    is_int4 = "int4" in name
    granularity = quantization.PerGroup(32) if is_int4 else quantization.PerAxis(0)
    dtype = torch.int4 if is_int4 else torch.int8
    if "dynamic" in name:
        return quantization.Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=granularity)
    return quantization.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity)


def _by_hand(name: str) -> _Task:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    task = _Task()
    chosen = ("net.3", "net.5")
    quantize_(task, QATConfig(_config(name), step="prepare"), filter_fn=lambda module, name: name in chosen)
    optimizer = task.configure_optimizers()
    for _ in range(2):
        for batch in regression_loader(batch_size=8):
            optimizer.zero_grad()
            task.loss(batch).backward()
            optimizer.step()
    quantize_(task, QATConfig(_config(name), step="convert"))
    return task


@pytest.mark.parametrize("name", _NAMES)
def test_it_equals_a_loop_of_torchao_and_torchao_reads_the_file(name: str, tmp_path: Path) -> None:
    from safetensors import safe_open
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    path = tmp_path / "out" / "model.safetensors"
    task = _fit(_callback(name, path=path))
    expected = _by_hand(name)
    assert type(task.net[3]) is nn.Linear
    assert [type(task.net[i].weight.data) for i in (0, 3, 5)] == [type(expected.net[i].weight.data) for i in (0, 3, 5)]
    assert type(task.net[3].weight.data).__name__ == "IntxUnpackedToInt8Tensor"
    outputs = _outputs(task)
    torch.testing.assert_close(outputs, _outputs(expected), rtol=0, atol=0)

    with safe_open(path, "pt") as file:
        read, rest = unflatten_tensor_state_dict({key: file.get_tensor(key) for key in file.keys()}, file.metadata())  # noqa: SIM118
    by_torchao = _Task()
    by_torchao.load_state_dict({**read, **rest}, assign=True)
    for again in (by_torchao, load_quantized_model(_Task(), path)):
        torch.testing.assert_close(_outputs(again), outputs, rtol=0, atol=0)
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["model.safetensors"]


def test_a_checkpoint_has_float_weights_and_a_resume_is_exact(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=3)
    task = _fit(_callback(), saving, task=_Task(dropout=0.1))
    plain = _Task()
    plain.load_state_dict(dict(read_checkpoint(tmp_path / "step=6").model or {}))
    assert all(parameter.dtype == torch.float32 for parameter in plain.parameters())
    for step in (3, 9):
        again = _fit(_callback(), ckpt_path=tmp_path / f"step={step}", task=_Task(dropout=0.1))
        torch.testing.assert_close(_outputs(again), _outputs(task), rtol=0, atol=0)


def test_a_quantized_task_is_evaluated_but_neither_saved_nor_trained(tmp_path: Path) -> None:
    task = _Task()
    trainer = fitted(task, regression_loader(batch_size=8), max_epochs=1, callbacks=[_callback()])
    with pytest.raises(CheckpointError, match="_Task has quantized layers, which checkpoints"):
        trainer.save_checkpoint(tmp_path / "after")
    task = pickle.loads(pickle.dumps(task))
    trainer = quiet_trainer(max_epochs=1)
    assert trainer.test(task, regression_loader(batch_size=8), verbose=False)[0]["test_loss"] > 0
    with pytest.raises(ConfigurationError, match=r"net\.3, net\.5 of _Task is quantized already"):
        _fit(_callback(), task=task)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"skip": ()}, r"cannot quantize net\.0 \(4 × 32: .*group_size"),
        ({"module_filter": lambda module, name: False}, "has none outside of skip="),
        ({"config": 4}, "config=4 is unknown"),
        ({"config": "int8_weights"}, "Known: int8_dynamic_int4_weight"),
        ({"skip": ["net.0", "head"]}, "_Task has no module 'head'"),
        ({"strategy": "fsdp"}, r"QuantizationAwareTraining changes .* Use strategy='ddp'"),
        ({"precision": "fp8"}, r"cannot be combined with fp8, in which net\.3 of _Task"),
    ],
)
@pytest.mark.filterwarnings("ignore:cpu has no float8 matrix products")
def test_what_cannot_be_quantized_is_an_error_before_the_first_step(arguments: Any, expected: str) -> None:
    task = _Task()
    of_trainer = {name: arguments.pop(name) for name in ("strategy", "precision") if name in arguments}
    with pytest.raises(ConfigurationError, match=expected):
        _fit(_callback(**arguments), task=task, **of_trainer)
    assert_equal_weights(weights_of(task), weights_of(_Task()))
    assert {type(layer).__name__ for layer in task.net} == {"Linear", "Tanh", "Dropout", "ReLU"}


@pytest.mark.parametrize("name", [*_NAMES, "Float8WeightOnlyConfig"])
def test_quantization_after_training_equals_torchao_and_its_file_is_read_back(name: str, tmp_path: Path) -> None:
    from torchao import quantization

    config = _config(name) if name in _NAMES else getattr(quantization, name)(version=2)
    path = tmp_path / "model.safetensors"
    task = quantize_model(_Task(), name if name in _NAMES else config, skip=["net.0"], path=path)
    expected = _Task()
    quantization.quantize_(expected, config, filter_fn=lambda module, name: name in ("net.3", "net.5"))
    outputs = _outputs(task)
    torch.testing.assert_close(outputs, _outputs(expected), rtol=0, atol=0)
    assert not torch.equal(outputs, _outputs(_Task()))
    with torch.device("meta"):
        empty = _Task()
    torch.testing.assert_close(_outputs(load_quantized_model(empty, path)), outputs, rtol=0, atol=0)


def test_layers_that_cannot_be_quantized_are_named_and_none_is_quantized() -> None:
    from torchao.quantization import Int4WeightOnlyConfig

    task = _Task()

    with pytest.raises(ConfigurationError, match=r"net\.3 \(32 × 64: torchao left it unchanged\), net\.5"):
        quantize_model(task, Int4WeightOnlyConfig(group_size=128), skip="net.0")
    assert_equal_weights(weights_of(task), weights_of(_Task()))
    assert type(task.net[3].weight.data) is torch.Tensor


def test_a_file_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    quantize_model(_Task(), skip="net.0", path=path)
    with pytest.raises(CheckpointError, match="cannot be loaded into RegressionTask"):
        load_quantized_model(RegressionTask(), path)
    save_file(_Task().state_dict(), path)
    with pytest.raises(CheckpointError, match=r"no quantized weights. load_checkpoint_in_model reads"):
        load_quantized_model(_Task(), path)


@pytest.mark.parametrize("place", ["a file in the place of the folder", "a folder in the place of the file"])
def test_quantized_weights_that_cannot_be_written_are_an_error(place: str, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "model.safetensors"
    if place == "a file in the place of the folder":
        path.parent.write_text("")
    else:
        path.with_name(".model.safetensors.tmp").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"cannot be written to .*model\.safetensors"):
        quantize_model(_Task(), skip="net.0", path=path)


def test_without_convert_the_task_stays_in_float_and_can_be_trained_further(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    callback = _callback(convert=False, path=path)
    task = _fit(callback)
    assert type(task.net[3]) is nn.Linear
    assert not task.net[3]._forward_pre_hooks
    assert list(task.state_dict()) == list(_Task().state_dict())
    by_hand = quantize_model(copy.deepcopy(task), skip="net.0")
    torch.testing.assert_close(_outputs(load_quantized_model(_Task(), path)), _outputs(by_hand), rtol=0, atol=0)
    _fit(callback, task=task)
