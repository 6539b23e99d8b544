"""Training in fp8: which layers are converted, and that steps equal those of torchao alone."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from trainwright import Accelerator
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.task import TaskModule
from trainwright.launch.reading import read_command
from trainwright.strategies import Fp8, FSDPStrategy
from trainwright.strategies.fsdp.layers.styles import FusedColwise
from trainwright.utils import (
    AORecipeKwargs,
    TERecipeKwargs,
    convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers,
    has_ao_layers,
)

pytestmark = [
    pytest.mark.requires("torchao", reason="it converts the layers"),
    pytest.mark.filterwarnings("ignore:cpu has no float8 matrix products"),
]
_STEPS, _VOCABULARY, _LENGTH = 8, 32, 16


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm_1(x)).unsqueeze(1).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class TinyGPT(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, _VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


class Language(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = TinyGPT()
        self.losses: list[torch.Tensor] = []
        self.batches: list[torch.Tensor] = []
        self.seen = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen = has_ao_layers(self)
        loss: torch.Tensor = self.model(batch[0])
        self.losses.append(loss.detach().clone())
        self.batches.append(batch[0])
        return loss

    def shard_units(self) -> Any:
        return list(self.model.blocks)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def tokens() -> torch.Tensor:
    """Return counting sequences: twice as many as the steps of two."""
    starts = torch.randint(0, _VOCABULARY, (2 * _STEPS, 1), generator=torch.Generator().manual_seed(1))
    return (starts + torch.arange(_LENGTH + 1)) % _VOCABULARY


def loader() -> DataLoader[Any]:
    """Return batches of two sequences: one, or one for each of two ranks."""
    return DataLoader(TensorDataset(tokens()), batch_size=2)


def fit(precision: Any, task: Any = None, **arguments: Any) -> Language:
    task = task or Language()
    arguments = {"max_epochs": 1, "precision": precision, **arguments}
    quiet_trainer(**arguments).fit(task, loader())
    return task


def _is_inner(module: nn.Module, name: str) -> bool:
    """Return the rule of the first and last layer, written out for the model of these tests."""
    return isinstance(module, nn.Linear) and not name.endswith(("blocks.0.qkv", "head"))


def by_hand(
    batches: Any,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    recipe: str = "tensorwise",
    after_step: Callable[[nn.Module], None] = lambda model: None,
    **options: bool,
) -> Any:
    """Train with torchao alone; return the losses and the weights."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = TinyGPT()
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True, pad_inner_dim=True, **options)
    convert_to_float8_training(model, config=config, module_filter_fn=_is_inner)
    called = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = called(batch)
        loss.backward()
        optimizer.step()
        after_step(model)
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, weights_of(model)


def test_each_step_equals_one_of_torchao_alone() -> None:
    losses, weights = by_hand(tokens().split(2))
    task = fit("fp8")
    assert torch.equal(torch.stack(task.losses), torch.stack(losses))
    assert_equal_weights(weights_of(task.model), weights)


class Split(Language):
    def tensor_parallel_plan(self, mesh: Any) -> Any:
        return {"model.blocks.*.up": "colwise", "model.blocks.*.down": "rowwise"}


def _shard(model: Any) -> nn.Module:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for part in (*model.blocks, model):
        fully_shard(part, mp_policy=policy)
    return model  # type: ignore[no-any-return]  # a module


def _split_by_hand() -> None:
    def wrap(model: nn.Module) -> nn.Module:
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)

    task = fit(Fp8(recipe="rowwise"), task=Split(), strategy="tp", devices=2)
    assert task.seen
    assert not has_ao_layers(task)
    losses, _ = by_hand(task.batches, wrap, "rowwise")
    assert len(losses) == _STEPS
    assert torch.stack(task.losses).numpy() == pytest.approx(torch.stack(losses).numpy(), rel=1e-6)


@pytest.mark.slow
def test_split_layers_train_as_those_that_torch_alone_splits() -> None:
    run_distributed(_split_by_hand, 2)


def _gathered() -> None:
    from torchao.float8 import Float8LinearConfig, precompute_float8_dynamic_scale_for_fsdp

    recipe = Float8LinearConfig(enable_fsdp_float8_all_gather=True, pad_inner_dim=True)
    moved, tasks = {}, {}
    for narrow in (True, False):
        task = tasks[narrow] = Split()
        with _bytes_gathered() as counted:
            strategy = FSDPStrategy(weights_after_stage="all")
            fit(Fp8(recipe=recipe) if narrow else "fp8", task=task, strategy=strategy, devices=2)
        moved[narrow] = sum(counted)
        assert {type(p.data) for p in task.parameters()} == {torch.Tensor}
        assert not any("fsdp" in name for p in task.parameters() for name in vars(p))
    assert moved[True] < 0.75 * moved[False]
    narrow_losses, wide_losses = (torch.stack(tasks[key].losses).numpy() for key in (True, False))
    assert narrow_losses == pytest.approx(wide_losses, rel=0.02)
    options = {"after_step": precompute_float8_dynamic_scale_for_fsdp, "enable_fsdp_float8_all_gather": True}
    expected = torch.stack(by_hand(tasks[True].batches, _shard, **options)[0]).numpy()
    assert narrow_losses == pytest.approx(expected, rel=1e-6)


@contextlib.contextmanager
def _bytes_gathered() -> Iterator[list[int]]:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    counted: list[int] = []
    own = collectives.DefaultAllGather.__call__

    def call(self: Any, **arguments: Any) -> Any:
        counted.append(arguments["output_tensor"].nbytes)
        return own(self, **arguments)

    collectives.DefaultAllGather.__call__ = call  # type: ignore[method-assign]
    try:
        yield counted
    finally:
        collectives.DefaultAllGather.__call__ = own  # type: ignore[method-assign]


@pytest.mark.slow
def test_weights_gathered_in_float8_train_as_torchao_alone_gathers_them() -> None:
    run_distributed(_gathered, 2)


def _loop(
    precision: str, handlers: list[Any] | None = None, **arguments: Any
) -> tuple[list[torch.Tensor], nn.Module, Accelerator]:
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=handlers, cpu=True, **arguments)
    model = TinyGPT()
    parameters = [id(p) for p in model.parameters()]
    names = list(model.state_dict())
    prepared, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loader())
    assert arguments or [id(p) for p in model.parameters()] == parameters
    assert list(model.state_dict()) == names
    losses = []
    for (batch,) in data:
        loss = prepared(batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, model, accelerator


def test_an_own_loop_equals_torchao_alone() -> None:
    losses, weights = by_hand(tokens().split(2))
    found, model, accelerator = _loop("fp8")
    assert (accelerator.mixed_precision, accelerator.fp8_backend) == ("fp8", "AO")
    assert has_ao_layers(model)
    assert torch.equal(torch.stack(found), torch.stack(losses))
    assert_equal_weights(weights_of(model), weights)
    accelerator.end_training()
    assert not has_ao_layers(model)


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 32), nn.Linear(32, 48), nn.Linear(48, 16)
        self.odd, self.last = nn.Linear(16, 10), nn.Linear(10, 1)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (Fp8(), ["second", "third"]),
        (Fp8(skip=("third",)), ["second"]),
        (Fp8(skip="second"), ["third"]),
        (Fp8(min_features=32), ["second"]),
        (Fp8(module_filter=lambda module, name: name in ("first", "odd")), ["first"]),
    ],
)
def test_what_is_converted(precision: Fp8, expected: list[str], caplog: pytest.LogCaptureFixture) -> None:
    model = _Layers()
    before = copy.deepcopy(dict(vars(model.second)))
    with caplog.at_level(logging.INFO, "trainwright"), contextlib.ExitStack() as undo:
        precision.convert([model], torch.device("cpu"), undo)
        assert [name for name, layer in model.named_children() if has_ao_layers(layer)] == expected
        (text,) = [record.getMessage() for record in caplog.records if "fp8:" in record.getMessage()]
        assert text.startswith(f"fp8: {len(expected)} linear layers")
        assert "odd (16 × 10: not multiples of 16)" in text
    assert not has_ao_layers(model)
    assert vars(model.second).keys() == before.keys()


def test_options_of_a_launcher_file_reach_both_front_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = {"backend": "TE", "fp8_format": "E4M3", "margin": 1, "interval": 2, "amax_history_length": 16}
    section |= {"amax_compute_algorithm": "max", "override_linear_precision": [True, False, False]}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"mixed_precision": "fp8", "fp8_config": section | {"use_autocast_during_eval": False}}))
    for name, value in read_command(["--config_file", str(file), "a.py"]).config.environment().items():
        monkeypatch.setenv(name, value)
    expected = TERecipeKwargs(False, 1, 2, "E4M3", 16, "max", (True, False, False))
    assert TERecipeKwargs() == expected
    with pytest.raises(ConfigurationError, match="transformer_engine"):  # it is not installed, or not for the CPU
        quiet_trainer()
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    monkeypatch.setenv("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "true")
    assert AORecipeKwargs().precision().fp8_all_gather
    monkeypatch.setenv("ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION", "true,false")
    with pytest.raises(ConfigurationError, match="expected three"):
        TERecipeKwargs()


def _fit_with(precision: Any, strategy: Any = "auto", devices: int = 1) -> None:
    quiet_trainer(precision=precision, strategy=strategy, devices=devices, max_steps=1).fit(Language(), loader())


_REFUSED: dict[str, Callable[[], Any]] = {
    "Use recipe='tensorwise'": lambda: Fp8(recipe="rowwise", fp8_all_gather=True),
    "Did you mean 'rowwise'": lambda: Fp8(recipe="rowwis"),
    "fp8_all_gather=True with cpu_offload=": lambda: _fit_with(
        Fp8(fp8_all_gather=True), FSDPStrategy(cpu_offload=True), 2
    ),
    r"precision='fp8' is not supported by .*Use strategy='ddp'": lambda: _fit_with("fp8", "deepspeed_stage_1", 2),
    "needs a CUDA device. Use 'rowwise'": lambda: _fit_with(Fp8(recipe="rowwise_with_gw_hp")),
    "no linear layer of LayerNorm .*It has no linear layers": lambda: Fp8().convert(
        [nn.LayerNorm(16)], torch.device("cpu"), contextlib.ExitStack()
    ),
    "no linear layer of Linear .*not multiples of 16": lambda: Fp8().convert(
        [nn.Linear(16, 10)], torch.device("cpu"), contextlib.ExitStack()
    ),
    "no module 'thrid'. Did you mean 'third'": lambda: Fp8(skip="thrid").convert(
        [_Layers()], torch.device("cpu"), contextlib.ExitStack()
    ),
    "Use 'fp8', or remove the handler": lambda: Accelerator(mixed_precision="bf16", kwargs_handlers=[AORecipeKwargs()]),
}


@pytest.mark.parametrize("message", _REFUSED)
def test_what_it_cannot_do_is_refused(message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        _REFUSED[message]()


def test_a_gpu_without_float8_is_named_with_its_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.warns(TrainwrightWarning, match=r"cuda with compute capability 8\.0 has no float8 matrix products"):
        assert Fp8()._config(torch.device("cuda")).emulate


def test_a_layer_of_two_models_is_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    first, second = _Layers(), _Layers()
    second.third = first.third
    with caplog.at_level(logging.INFO, "trainwright"), contextlib.ExitStack() as undo:
        Fp8().convert([first, second], torch.device("cpu"), undo)
    assert "fp8: 3 linear layers" in caplog.text


def test_a_model_is_converted_for_a_loop_without_an_accelerator() -> None:
    model = _Layers()
    convert_model_to_fp8_ao(model)
    assert [name for name, layer in model.named_children() if has_ao_layers(layer)] == ["second", "third"]
    chosen = [name for name, _ in model.named_children() if filter_first_and_last_linear_layers(model, name)]
    assert chosen == ["second", "third"]


def _fused() -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True, pad_inner_dim=True)
    whole = convert_to_float8_training(nn.Sequential(nn.Linear(32, 96)), config=config)
    split, x = copy.deepcopy(whole), torch.randn(6, 32, requires_grad=True)
    parallelize_module(split, init_device_mesh("cpu", (2,)), {"0": FusedColwise(3)}, src_data_rank=None)
    rank = dist.get_rank()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = split(x), whole(x.bfloat16()).view(6, 3, 2, 16)[:, :, rank].flatten(1)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    assert not torch.equal(
        found, nn.functional.linear(x, split[0].weight.to_local(), split[0].bias.to_local()).bfloat16()
    )
    found.float().square().sum().backward()
    expected.float().square().sum().backward()
    grad = split[0].weight.grad.to_local()
    expected_grad = whole[0].weight.grad.view(3, 2, 16, 32)[:, rank].flatten(0, 1)
    assert torch.allclose(grad, expected_grad, atol=0.05 * expected_grad.abs().max().item())


@pytest.mark.slow
def test_blocks_of_one_fused_layer_compute_in_fp8() -> None:
    run_distributed(_fused, 2)


class _Narrow(Split):
    def __init__(self) -> None:
        super().__init__()
        for block in self.model.blocks:
            block.up, block.down = nn.Linear(32, 16), nn.Linear(16, 32)  # type: ignore[assignment]


def _narrow() -> None:
    message = r"width of 16 is 8 on each of tp=2 ranks.*Fp8\(skip='model.blocks.0.up'\)"
    with pytest.raises(ConfigurationError, match=message):
        quiet_trainer(precision="fp8", strategy="tp", devices=2, max_steps=1).fit(_Narrow(), loader())


@pytest.mark.slow
def test_shards_of_layers_have_sizes_of_float8_products() -> None:
    run_distributed(_narrow, 2)
