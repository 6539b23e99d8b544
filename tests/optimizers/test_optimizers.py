"""Optimizers by name: training, equality with the library's own, memory, resuming, and errors."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from trainwright.checkpoint import load_named_optimizer_state, named_optimizer_state
from trainwright.core.errors import CheckpointError, ConfigurationError, TrainwrightWarning
from trainwright.core.task import TaskModule
from trainwright.optimizers import LowRankAdamW, create_optimizer, optimizer_names
from trainwright.strategies.offload.training import OffloadStrategy

pytestmark = [
    pytest.mark.requires("bitsandbytes", reason="AdamW in 8 bits"),
    pytest.mark.requires("torchao", reason="AdamW in 8 and 4 bits"),
    pytest.mark.filterwarnings("ignore"),  # of both packages, about kernels that this machine does not have
]
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "adafactor": {"lr": 0.05},
    "muon": {"lr": 0.1},
    "adamw_low_rank": {"rank": 8, "update_every": 3, "scale": 1.0},
}


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Do not compile torchao's steps, which takes seconds for each shape."""
    with torch.compiler.set_stance("force_eager"):
        yield


class Autoencoder(TaskModule):
    def __init__(self, name: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        super().__init__()
        self.name, self.options = name, {"lr": 0.01, **OPTIONS.get(name, {}), **options}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            bias = name != "muon"
            self.net = nn.Sequential(nn.Linear(64, 128, bias=bias), nn.Tanh(), nn.Linear(128, 64, bias=bias)).to(dtype)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return functional.mse_loss(self.net(batch), batch)

    def configure_optimizers(self) -> Any:
        return create_optimizer(self.name, self.parameters(), **self.options)


def batches(num: int = 6, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(16, 64, generator=generator).to(dtype) for _ in range(num)]


def train_by_hand(task: Autoencoder, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> list[float]:
    """Train a plain loop; return the losses."""
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = task.training_step(batch, 0)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def library_optimizer(name: str, task: Autoencoder) -> torch.optim.Optimizer:
    """Return the class of the library, created without the table."""
    bnb, ao = (importlib.import_module(name) for name in ("bitsandbytes.optim", "torchao.optim"))
    kinds: dict[str, Any] = {
        "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor,
        "muon": torch.optim.Muon, "adamw_8bit": ao.AdamW8bit, "adamw_4bit": ao.AdamW4bit,
        "adamw_fp8": ao.AdamWFp8, "adamw_bnb_8bit": bnb.AdamW8bit,
        "adamw_low_rank": LowRankAdamW,
    }  # fmt: skip
    return kinds[name](list(task.parameters()), **task.options)


@pytest.mark.slow
@pytest.mark.parametrize("name", optimizer_names())
def test_a_trainer_trains_as_the_librarys_optimizer_does_in_a_plain_loop(name: str) -> None:
    alone = Autoencoder(name)
    losses = train_by_hand(alone, library_optimizer(name, alone), batches() * 3)
    assert losses[-1] < 0.95 * losses[0]
    task = Autoencoder(name)
    quiet_trainer(max_epochs=3).fit(task, batches())
    assert_equal_weights(weights_of(task), weights_of(alone))


@pytest.mark.slow
@pytest.mark.parametrize("name", optimizer_names())
def test_a_resumed_fit_continues_bit_for_bit(name: str, tmp_path: Path) -> None:
    straight = Autoencoder(name)
    quiet_trainer(max_epochs=2).fit(straight, batches())
    first, resumed = Autoencoder(name), Autoencoder(name)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(first, batches())
    trainer.save_checkpoint(tmp_path / "saved")
    assert not [path for path in (tmp_path / "saved").rglob("*") if path.suffix not in ("", ".json", ".safetensors")]
    quiet_trainer(max_epochs=2).fit(resumed, batches(), ckpt_path=tmp_path / "saved")
    assert_equal_weights(weights_of(resumed), weights_of(straight))


def test_full_rank_states_are_those_of_adamw() -> None:
    first, second = Autoencoder("adamw", foreach=False), Autoencoder("adamw_low_rank", rank=64)
    second.options = {"lr": 0.01, "rank": 64}
    for task in (first, second):
        train_by_hand(task, task.configure_optimizers(), batches())
    assert_equal_weights(weights_of(second), weights_of(first))


def test_low_rank_states_have_the_rank_and_the_step_of_its_definition() -> None:
    for shape in ((12, 6), (6, 12)):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(shape))
        before, grad = weight.detach().clone(), torch.randn(shape)
        optimizer = LowRankAdamW([weight], lr=0.1, weight_decay=0.0, rank=2, scale=0.5)
        weight.grad = grad
        optimizer.step()
        left, _, right = torch.linalg.svd(grad, full_matrices=False)
        tall = shape[0] > shape[1]
        low = grad @ right[:2].T if tall else left[:, :2].T @ grad
        update = low / (low.abs() + 1e-8)  # of Adam's first step
        expected = before - 0.1 * 0.5 * (update @ right[:2] if tall else left[:, :2] @ update)
        torch.testing.assert_close(weight.detach(), expected)
        assert optimizer.state[weight]["exp_avg"].shape == ((12, 2) if tall else (2, 12))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adamw_8bits", {}, "name='adamw_8bits' is unknown. Did you mean 'adamw_8bit'?"),
        ("adamw", {"weight_decai": 0.1}, "Did you mean 'weight_decay'?"),
        ("adamw", {"bf16_stochastic_round": True}, "has no stochastic rounding. Use 'adamw_8bit'"),
        ("muon", {}, r"one parameter has the shape \(3,\)"),
        ("adamw_low_rank", {"rank": 0}, "rank=0: expected an integer of at least 1"),
    ],
)
def test_a_wrong_name_option_or_parameter_is_an_error(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        create_optimizer(name, nn.Linear(3, 3).parameters(), **options)


def test_stochastic_rounding_of_float32_weights_is_a_warning() -> None:
    with pytest.warns(TrainwrightWarning, match="rounds weights in bfloat16, and no parameter is"):
        create_optimizer("adamw_8bit", nn.Linear(3, 3).parameters(), bf16_stochastic_round=True)


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_fp8"])
@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("codes", torch.zeros(3, dtype=torch.uint8)), ("scale", torch.ones(3)), ("scale", torch.ones(0)),
        ("qmap", torch.ones(3)), ("shape", [128, 64]), ("codes", None), ("dtype", "float"), ("nothing", None),
    ],
)  # fmt: skip
def test_a_quantized_state_that_makes_no_sense_is_refused(name: str, entry: str, value: Any) -> None:
    task = Autoencoder(name)
    optimizer = task.configure_optimizers()
    train_by_hand(task, optimizer, batches(1))
    names: dict[torch.Tensor, str] = {parameter: key for key, parameter in task.named_parameters()}
    tree = named_optimizer_state(optimizer, names)
    state = tree["state"]["net.0.weight"]["exp_avg"]
    if entry == "nothing" or (name == "adamw_fp8" and entry == "qmap"):
        del state["dtype"]
    else:
        state[entry] = value
    with pytest.raises(CheckpointError, match="OptimState"):
        load_named_optimizer_state(task.configure_optimizers(), tree, names)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adamw_bnb_8bit"])
def test_offloaded_training_is_that_of_one_device(name: str, tmp_path: Path) -> None:
    alone, offloaded = Autoencoder(name), Autoencoder(name)
    quiet_trainer(max_epochs=1).fit(alone, batches())
    on_disk = OffloadStrategy(optimizer_state="disk", offload_folder=tmp_path)
    if "torchao" in type(alone.configure_optimizers()).__module__:
        with pytest.raises(ConfigurationError, match="quantized states, which cannot be stored on disk"):
            quiet_trainer(max_epochs=1, strategy=on_disk).fit(Autoencoder(name), batches())
    quiet_trainer(max_epochs=1, strategy="offload").fit(offloaded, batches())
    assert_equal_weights(weights_of(offloaded), weights_of(alone))
