"""The page on Megatron-LM of Accelerate's documentation: its programs on two ranks, compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from trainwright import Accelerator, DistributedType
from trainwright.utils import (
    GPTTrainStep,
    MegatronLMDummyScheduler,
    MegatronLMPlugin,
    avg_losses_across_data_parallel_group,
)

transformers = pytest.importorskip("transformers")
_STEPS, _BATCH = 6, 4


def _gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=4,
        n_embd=16,
        n_head=2,
        vocab_size=32,
        n_positions=8,
        bos_token_id=1,
        eos_token_id=1,
        attn_pdrop=0,
        resid_pdrop=0,
        embd_pdrop=0,
    )
    return transformers.GPT2LMHeadModel(config)


def _rows(num: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 32, (num, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def _reference(loss_of: Callable[[Any, torch.Tensor], torch.Tensor] | None = None) -> tuple[list[float], float]:
    """Train in one process by hand: the losses, and that of evaluation."""
    model = _gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for i, batch in enumerate(DataLoader(_rows(_STEPS * _BATCH), batch_size=_BATCH)):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (i / 2 if i <= 2 else 1 - (i - 2) / (_STEPS - 2))
        loss = model(**batch).loss if loss_of is None else loss_of(model, batch["input_ids"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        batch = next(iter(DataLoader(_rows(_BATCH), batch_size=_BATCH)))
        found = model(**batch).loss if loss_of is None else loss_of(model, batch["input_ids"])
    return losses, found.item()


def _train(
    options: dict[str, Any], custom: bool = False, folder: Path | None = None, batch_size: int = 2
) -> tuple[list[float], float, Any]:
    """Train as on the page: `batch_size` rows for each of two micro-batches."""
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(**options) if options else None, cpu=True)
    assert accelerator.distributed_type == DistributedType.MEGATRON_LM
    plugin = accelerator.state.megatron_lm_plugin
    assert plugin is accelerator.megatron_lm_plugin
    if custom:
        plugin.custom_train_step_class = GPTTrainStepWithCustomLoss
        plugin.custom_train_step_kwargs = {"keytoken_ids": [3, 5], "alpha": 0.25}
    model = _gpt2()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    args = SimpleNamespace(max_train_steps=_STEPS, num_warmup_steps=2)
    lr_scheduler: Any = MegatronLMDummyScheduler(
        optimizer=optimizer, total_num_steps=args.max_train_steps, warmup_num_steps=args.num_warmup_steps
    )
    train: Any = DataLoader(_rows(_STEPS * _BATCH), batch_size=batch_size)
    test: Any = DataLoader(_rows(_BATCH), batch_size=batch_size)
    model, optimizer, lr_scheduler, train, test = accelerator.prepare(model, optimizer, lr_scheduler, train, test)
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        total_batch_size = accelerator.state.megatron_lm_plugin.global_batch_size
    assert total_batch_size == _BATCH
    assert accelerator.prepare(train) is train
    assert len(train) == _STEPS
    losses, logits = [], None
    model.train()
    for batch in train:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        logits = outputs.get("logits")
    if folder is not None:
        accelerator.save_state(str(folder))
    model.eval()
    evals = []
    for batch in test:
        with torch.no_grad():
            evals.append(model(**batch).loss)
    return losses, torch.tensor(evals).mean().item(), None if logits is None else tuple(logits.shape)


# The page's class, with names and comments of its own.
class GPTTrainStepWithCustomLoss(GPTTrainStep):
    def __init__(self, megatron_args: Any, **kwargs: Any) -> None:
        super().__init__(megatron_args)
        self.kwargs = kwargs

    def get_loss_func(self) -> Any:  # type: ignore[override]  # as on the page
        def loss_func(inputs: Any, loss_mask: Any, output_tensor: Any) -> Any:
            batch_size, seq_length = output_tensor.shape
            loss_mask = loss_mask.view(-1).float()
            loss = output_tensor.float().view(-1) * loss_mask
            per_sample = loss.view(batch_size, seq_length).sum(axis=1)
            per_sample = per_sample / loss_mask.view(batch_size, seq_length).sum(axis=1)
            weights = torch.stack([(inputs == kt).float() for kt in self.kwargs["keytoken_ids"]]).sum(axis=[0, 2])  # type: ignore[call-overload]
            weighted = (per_sample * (1.0 + self.kwargs["alpha"] * weights)).mean()
            averaged = avg_losses_across_data_parallel_group([weighted])
            return weighted, {"lm loss": averaged[0]}

        return loss_func

    def get_forward_step_func(self) -> Any:
        def forward_step(data_iterator: Any, model: Any) -> Any:
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
            output_tensor = model(tokens, position_ids, attention_mask, labels=labels)
            return output_tensor, partial(self.loss_func, tokens, loss_mask)

        return forward_step


def _custom_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)
    weights = ((tokens == 3) | (tokens == 5)).float().sum(1)
    return (losses * (1 + 0.25 * weights)).mean()


_WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "pp": ({"pp_degree": 2, "num_micro_batches": 2}, 2),
    "interleaved": ({"pp_degree": 2, "num_micro_batches": 2, "num_layers_per_virtual_pipeline_stage": 1}, 2),
    "tp": ({"tp_degree": 2, "num_micro_batches": 2, "sequence_parallelism": True}, 2),
    "dp": ({"num_micro_batches": 2, "recompute_activations": True}, 1),
    "shards": ({"num_micro_batches": 2, "use_distributed_optimizer": True, "return_logits": True}, 1),
}


@pytest.mark.distributed
@pytest.mark.parametrize("custom", [False, True], ids=["loss", "custom_step"])
@pytest.mark.parametrize("way", _WAYS)
def test_the_page_trains_as_one_process_does(way: str, custom: bool, tmp_path: Path) -> None:
    options, batch_size = _WAYS[way]
    if custom:  # its loss function takes no logits
        options = {name: value for name, value in options.items() if name != "return_logits"}
    losses, test = _reference(_custom_loss if custom else None)
    for rank in run_distributed(_train, 2, options, custom, tmp_path / "state", batch_size, init=False, timeout=120):
        assert rank[0] == pytest.approx(losses, rel=1e-4)
        assert rank[1] == pytest.approx(test, rel=1e-4)
        assert rank[2] == ((2, 8, 32) if "return_logits" in options else None)
