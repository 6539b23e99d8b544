"""Trainings whose sequences are split over ranks equal those of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.strategies.megatron import test_pipeline as pipeline
from tests.strategies.megatron.test_pipeline import assert_same
from tests.strategies.megatron.test_transformers import Hf, make_model
from tests.strategies.megatron.test_transformers import batches as hf_batches
from trainwright.cli.parity_tape import Tolerance
from trainwright.core.errors import ConfigurationError
from trainwright.core.task import TaskModule
from trainwright.strategies.context.sequences import SplitSequences
from trainwright.strategies.fsdp.strategy import FSDPStrategy
from trainwright.strategies.megatron.strategy import MegatronStrategy

_VOCABULARY, _LENGTH, _WIDTH, _HEADS = 16, 16, 16, 4
_EXACT = Tolerance(atol=1e-6, rtol=1e-4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Speaker(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.embed, self.places = nn.Embedding(_VOCABULARY, _WIDTH), nn.Embedding(_LENGTH, _WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def split_sequences(self, batch: Any, split: Any) -> Any:
        tokens, targets, positions = batch
        return split(tokens), split(targets), split(positions, 0)

    def num_items(self, batch: Any) -> Any:
        return (batch[1] > 0).sum()

    def loss(self, batch: Any) -> torch.Tensor:
        tokens, targets, positions = batch
        return functional.cross_entropy(self(tokens, positions).flatten(0, 1), targets.flatten(), ignore_index=0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch[0]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0], batch[2])

    def shard_units(self) -> list[nn.Module]:
        return list(self.blocks)

    def configure_optimizers(self) -> Any:
        """Return AdamW; `eps` drowns the noise of gradients that are zero, as that of a key's bias."""
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)


def batches(num: int, rows: int = 2) -> list[Any]:
    """Return (tokens, targets, positions); rows end at different places."""
    generator, found = torch.Generator().manual_seed(5), []
    for _ in range(num):
        tokens = torch.randint(1, _VOCABULARY, (rows, _LENGTH + 1), generator=generator)
        tokens[-1, 10:] = 0
        found.append((tokens[:, :-1], tokens[:, 1:], torch.arange(_LENGTH)))
    return found


def train(folder: Path, task: Any, data: list[Any], strategy: Any = "single") -> dict[str, Any]:
    """Train four steps of two micro-batches each, validate and predict."""
    options = {"max_epochs": None, "max_steps": 4, "accumulate_grad_batches": 2}
    return pipeline.train(folder, strategy, task=task, data=data, val=data[:2], **options)


_STRATEGIES: dict[str, Any] = {
    "cp": lambda: FSDPStrategy(cp=2),
    "sp": lambda: FSDPStrategy(sp=2),
    "replicas": lambda: FSDPStrategy(cp=2, device_mesh=(2, 1)),
    "cp_ep": lambda: FSDPStrategy(cp=2, ep=2),
    "cp_tp": lambda: FSDPStrategy(cp=2, tp=2),
    "pp_cp": lambda: MegatronStrategy(pp=2, cp=2),
    "pp_sp": lambda: MegatronStrategy(pp=2, sp=2, schedule="gpipe"),
}


def _split(folder: Path, kind: str, model: str | None = None) -> dict[str, Any]:
    task: Any = Speaker() if model is None else Hf(model)
    return train(folder, task, batches(16) if model is None else hf_batches(16), _STRATEGIES[kind]())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    @cache
    def found(model: str | None = None) -> dict[str, Any]:
        task: Any = Speaker() if model is None else Hf(model)
        return train(tmp_path_factory.mktemp("one"), task, batches(16) if model is None else hf_batches(16))

    return found


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["cp", "sp"])
def test_a_training_equals_one_process(kind: str, expected: Any, tmp_path: Path) -> None:
    found = run_distributed(_split, 2, tmp_path / "run", kind)[0]
    assert_same(found, expected(), _EXACT)
    torch.testing.assert_close(found["predictions"], expected()["predictions"], atol=1e-5, rtol=1e-4)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["replicas", "pp_sp"])
def test_a_training_on_four_ranks_equals_one_process(kind: str, expected: Any, tmp_path: Path) -> None:
    assert_same(run_distributed(_split, 4, tmp_path / "run", kind)[0], expected(), _EXACT)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.requires("transformers", reason="its models and their losses")
@pytest.mark.parametrize(
    ("kind", "model", "world"),
    [
        pytest.param("cp", "gpt2", 2, marks=pytest.mark.exhaustive),
        ("cp_ep", "mixtral", 2),
        pytest.param("cp_tp", "llama", 4, marks=pytest.mark.exhaustive),
        pytest.param("pp_cp", "llama", 4, marks=pytest.mark.exhaustive),
    ],
)
def test_models_of_transformers_equal_one_process(
    kind: str, model: str, world: int, expected: Any, tmp_path: Path
) -> None:
    assert_same(run_distributed(_split, world, tmp_path / "run", kind, model)[0], expected(model), _EXACT)


@pytest.fixture
def split(tmp_path: Path) -> Iterator[SplitSequences]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield SplitSequences(None, "ring")
    dist.destroy_process_group()


def test_a_batch_that_cannot_be_split_is_an_error(split: SplitSequences) -> None:
    with pytest.raises(ConfigurationError, match=r"type Tensor, not a dict with 'input_ids'.*Define split_seq"):
        split.batch(torch.zeros(2, 8))
    ids = torch.ones(2, 8, dtype=torch.long)
    with pytest.raises(RuntimeError, match="pad them at the end"):
        split.batch({"input_ids": ids, "attention_mask": torch.tensor([[0] * 4 + [1] * 4] * 2)})
    with pytest.raises(ConfigurationError, match=r"7 positions.*Pad it to 8"):
        split.batch({"input_ids": ids[:, 1:]})


@pytest.mark.requires("transformers", reason="its models compute losses")
def test_attention_gets_no_mask_and_a_loss_needs_shifted_targets(split: SplitSequences) -> None:
    model, ids, masks = make_model("gpt2"), torch.ones(2, 8, dtype=torch.long), []
    mask = torch.tensor([[1] * 8, [1] * 6 + [0] * 2])
    with split.models(model), split.attention.over_ranks():
        for module in (model, model.transformer.h[0].attn):
            module.register_forward_pre_hook(lambda *given: masks.append(given[2]["attention_mask"]), with_kwargs=True)
        with pytest.raises(ConfigurationError, match="Pass shift_labels to the model"):
            model(ids, position_ids=torch.arange(8).expand(2, -1), attention_mask=mask, labels=ids)
    assert masks == [mask, None]
    encoder = make_model("bert")
    with split.models(encoder), pytest.raises(RuntimeError, match="attends in both directions"):
        split.batch({"input_ids": ids, "attention_mask": mask})


def test_processes_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"over 2 ranks .*which does not divide.*3 process.*Start 2 or 4"):
        quiet_trainer(strategy=FSDPStrategy(cp=2), devices=3, accelerator="cpu").fit(Speaker(), batches(2))
    with pytest.raises(ConfigurationError, match="compile=True is not supported with cp=2"):
        quiet_trainer(strategy=FSDPStrategy(cp=2), devices=2, accelerator="cpu", compile=True).fit(
            Speaker(), batches(2)
        )


@pytest.mark.requires("transformers", reason="its models say how they attend")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_attn_implementation": "eager"}, "attention with 'eager'.*'sdpa'"),
        ({"sliding_window": 4}, "sliding-window attention over 4"),
    ],
)
def test_a_model_whose_attention_cannot_span_ranks_is_an_error(
    split: SplitSequences, changes: dict[str, Any], message: str
) -> None:
    model = make_model("mistral" if "sliding_window" in changes else "llama")
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(ConfigurationError, match=message), split.models(model):
        pass
