"""Transformers' models train in a pipeline as they do in one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import language_models
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.strategies.megatron import test_pipeline as pipeline
from tests.strategies.megatron.test_pipeline import assert_same
from trainwright.core.errors import ConfigurationError
from trainwright.core.task import TaskModule
from trainwright.strategies.megatron.strategy import MegatronStrategy

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.requires("transformers", reason="its models are divided into stages"),
]

_VOCABULARY = 24
make_model = functools.partial(language_models.make_model, layers=4)


class Hf(TaskModule):
    def __init__(self, kind: str, **options: object) -> None:
        super().__init__()
        self.model, self.options = make_model(kind), options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch, **self.options).loss
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch, **self.options).loss, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> Any:
        """Return AdamW; a key's bias has no gradient but noise, which `eps` drowns."""
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)


def batches(num: int) -> list[dict[str, torch.Tensor]]:
    """Return micro-batches of three padded rows."""
    generator, found = torch.Generator().manual_seed(7), []
    for _ in range(num):
        ids = torch.randint(1, _VOCABULARY, (3, 8), generator=generator)
        mask = (torch.arange(8) < torch.tensor([[8], [6], [5]])).long()
        labels = ids.masked_fill(mask == 0, -100)
        found.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})
    return found


def train(folder: Path, task: Hf, strategy: Any = "single") -> dict[str, Any]:
    """Train three steps of four micro-batches and validate."""
    return pipeline.train(folder, strategy, task=task, data=batches(12), val=batches(2), max_epochs=1)


_CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "gpt2": ("gpt2", {}, 1),
    "bert, rows with other numbers of labels": ("bert", {}, 2),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("stages")

    def runs() -> dict[str, Any]:
        return {
            name: train(folder / name, Hf(kind, **options), MegatronStrategy(pp=2, num_micro_batches=num))
            for name, (kind, options, num) in _CASES.items()
        }

    return run_distributed(runs, 2, init=False, timeout=300)


@pytest.mark.parametrize("name", list(_CASES))
def test_two_stages_train_as_one_process(name: str, two: Any, tmp_path: Path) -> None:
    kind, options, _ = _CASES[name]
    one = train(tmp_path / "one", Hf(kind, **options))
    for found in two:
        assert_same(found[name], one)


def test_an_encoder_and_a_decoder_are_refused_before_a_process_starts() -> None:
    trainer = quiet_trainer(strategy=MegatronStrategy(pp=2), devices=2, max_steps=1)
    with pytest.raises(ConfigurationError, match=r"has an encoder and a decoder.*Use pp=1 with tp=2"):
        trainer.fit(Hf("t5"), batches(4))


def _sequence_parallel(folder: Path) -> dict[str, Any]:
    strategy = MegatronStrategy(tp=2, sequence_parallel=True)
    return train(folder, Hf("llama", use_cache=False), strategy)


def test_norms_work_on_parts_of_sequences(tmp_path: Path) -> None:
    one = train(tmp_path / "one", Hf("llama", use_cache=False))
    assert_same(run_distributed(_sequence_parallel, 2, tmp_path / "split", timeout=120)[0], one)


def test_sequence_parallel_needs_split_layers() -> None:
    with pytest.raises(ConfigurationError, match="sequence_parallel=True needs tp above 1"):
        MegatronStrategy(sequence_parallel=True)
