"""Training in fp8 by transformer_engine: which layers and contexts it gets, with a package that records its calls."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from trainwright import Accelerator
from trainwright.core.errors import ConfigurationError
from trainwright.core.task import TaskModule
from trainwright.strategies.precision_names import parse_precision
from trainwright.utils import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    TERecipeKwargs,
    apply_fp8_autowrap,
    contextual_fp8_autocast,
    convert_model,
    has_transformer_engine_layers,
)


class _Linear(nn.Linear):
    def __init__(self, in_features: int, out_features: int, bias: bool, params_dtype: torch.dtype) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=params_dtype)

    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(3)

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("checkpoints have none")


class _LayerNorm(nn.LayerNorm):
    def __init__(self, size: int, eps: float, params_dtype: torch.dtype) -> None:
        super().__init__(size, eps=eps, dtype=params_dtype)


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Install the stand-in; return the arguments of its contexts."""
    found: list[Any] = []

    @contextmanager
    def fp8_autocast(*, enabled: bool, fp8_recipe: Any) -> Iterator[None]:
        found.append((enabled, fp8_recipe))
        yield

    def recipe(kind: str) -> Any:
        return lambda **options: (kind, options)

    root, torch_part = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    common, recipes = (types.ModuleType(f"transformer_engine.{name}") for name in ("common", "common.recipe"))
    root.__spec__ = types.SimpleNamespace(name="transformer_engine")  # type: ignore[assignment]
    vars(torch_part).update(
        Linear=_Linear, LayerNorm=_LayerNorm, TransformerLayer=type(None), fp8_autocast=fp8_autocast
    )
    formats = types.SimpleNamespace(HYBRID="hybrid", E4M3="e4m3", E5M2="e5m2")
    vars(recipes).update(Format=formats, DelayedScaling=recipe("delayed"), MXFP8BlockScaling=recipe("mxfp8"))
    for module in (root, torch_part, common, recipes):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    path = "trainwright.strategies.steps.te_layers"
    monkeypatch.setattr(f"{path}.is_transformer_engine_available", lambda: True)
    monkeypatch.setattr(f"{path}._DEVICES", ("cpu", "cuda"))
    return found


class _Net(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.odd = nn.Linear(16, 1)
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(self.down(self.up(self.norm(x)).relu()))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen = _kinds(self)
        return self(batch[0]).float().square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


_CONVERTED = ["_LayerNorm", "_Linear", "_Linear", "Linear"]
_OWN = ["LayerNorm", "Linear", "Linear", "Linear"]


def _loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(8, 16, generator=torch.Generator().manual_seed(1))), batch_size=2)


def _kinds(task: _Net) -> list[str]:
    return [type(module).__name__ for module in (task.norm, task.up, task.down, task.odd)]


def test_layers_are_replaced_during_a_stage_and_checkpoints_are_those_of_bf16(
    contexts: list[Any], tmp_path: Path
) -> None:
    task, other = _Net(), _Net()
    before = list(map(id, task.parameters()))
    trainer = quiet_trainer(precision="transformer-engine", max_epochs=1)
    trainer.fit(task, _loader(), _loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    quiet_trainer(precision="bf16-mixed", max_epochs=1).fit(other, _loader(), _loader())
    assert task.seen == _CONVERTED
    assert _kinds(task) == _OWN
    assert list(map(id, task.parameters())) == before
    assert_equal_weights(weights_of(task), weights_of(other))  # the stand-in computes as torch does
    assert all(recipe == ("delayed", {}) for _, recipe in contexts)
    assert {enabled for enabled, _ in contexts} == {True, False}  # training and validation
    again = _Net()
    quiet_trainer(precision="bf16-mixed", max_epochs=2).fit(again, _loader(), ckpt_path=tmp_path / "a.ckpt")
    further = _Net()
    quiet_trainer(precision="transformer-engine", max_epochs=2).fit(further, _loader(), ckpt_path=tmp_path / "a.ckpt")
    assert_equal_weights(weights_of(further), weights_of(again))


_REFUSED: dict[str, Callable[[], Any]] = {
    "expected 'HYBRID', 'E4M3' or 'E5M2'": lambda: _accelerator(TERecipeKwargs(fp8_format="E4M4")),
    "does not support the options interval": lambda: _accelerator(
        TERecipeKwargs(use_mxfp8_block_scaling=True, interval=2)
    ),
    "two backends": lambda: _accelerator(TERecipeKwargs(), AORecipeKwargs()),
    "only 'TE'.*AORecipeKwargs": lambda: FP8RecipeKwargs(backend="ao"),
    "opt_level='O2'.*MS-AMP needs": lambda: FP8RecipeKwargs(opt_level="O2"),
    "has no linear layer or layer norm": lambda: parse_precision("transformer-engine").convert(
        [nn.Sequential(nn.Linear(3, 3))], torch.device("cpu"), ExitStack()
    ),
    "precision='transformer-engine' is not supported by": lambda: quiet_trainer(
        precision="transformer-engine", strategy="tp", devices=2, max_steps=1
    ),
}


def _accelerator(*handlers: Any) -> None:
    Accelerator(mixed_precision="fp8", kwargs_handlers=list(handlers), cpu=True).autocast()


@pytest.mark.parametrize("message", _REFUSED)
def test_what_it_cannot_do_is_refused(message: str, contexts: list[Any]) -> None:
    with pytest.raises(ConfigurationError, match=message):
        _REFUSED[message]()


def test_a_model_is_converted_and_wrapped_without_an_accelerator(contexts: list[Any]) -> None:
    task = _Net()
    weights = weights_of(task)
    convert_model(task)
    assert _kinds(task) == _CONVERTED
    assert has_transformer_engine_layers(task)
    assert list(task.state_dict()) == list(weights)
    apply_fp8_autowrap(task, TERecipeKwargs(margin=1))
    task(torch.randn(2, 16))
    task.eval()(torch.randn(2, 16))
    assert contexts == [(True, ("delayed", {"margin": 1})), (False, ("delayed", {"margin": 1}))]
    convert_model(task, to_transformer_engine=False)
    assert _kinds(task) == _OWN
    assert_equal_weights(weights_of(task), weights)
    forward = contextual_fp8_autocast(task.up.forward, "recipe", use_during_eval=True)
    forward(task.up, torch.randn(2, 16))
    assert contexts[-1] == (True, "recipe")
