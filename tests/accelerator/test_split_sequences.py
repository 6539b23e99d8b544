"""User-written loops over sequences that are split over ranks, in the form of Accelerate's programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.strategies.megatron.test_transformers import make_model
from trainwright import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from trainwright.core.errors import ConfigurationError

pytestmark = [pytest.mark.distributed, pytest.mark.requires("transformers", reason="a model of such programs")]


def _batches(num: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    found = []
    for _ in range(num):
        ids = torch.randint(1, 24, (4, 17), generator=generator)
        positions = torch.arange(16).expand(4, -1).contiguous()
        ids[:, 12:] *= torch.tensor([1, 1, 0, 1])[:, None]
        targets = ids[:, 1:].masked_fill(ids[:, 1:] == 0, -100)
        found.append({"input_ids": ids[:, :-1].clone(), "shift_labels": targets, "position_ids": positions})
    return found


def _train(sizes: dict[str, int] | None, rows: slice = slice(None)) -> dict[str, Any]:
    config = None if sizes is None else ParallelismConfig(**sizes)
    plugin = FullyShardedDataParallelPlugin() if sizes and sizes.get("dp_shard_size", 1) > 1 else None
    accelerator = Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin)
    model = make_model("llama")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3))
    losses, lengths = [], set()
    for batch in _batches(4):
        share = accelerator.data_parallel_shard_rank
        batch = {name: value[share * 2 : share * 2 + 2] if plugin else value for name, value in batch.items()}
        buffers = list(batch.values())
        with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), {batch["position_ids"]}):
            lengths.add(batch["input_ids"].shape[1])
            loss = model(**batch, labels=batch["shift_labels"], use_cache=False).loss
            num_items = (batch["shift_labels"] != -100).sum()
            accelerator.backward(loss, num_items=num_items)
        assert batch["input_ids"].shape[1] == 16
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        total = accelerator.reduce(torch.stack([loss.detach() * num_items, num_items]))
        losses.append((total[0] / total[1]).item())
    state, rank = accelerator.get_state_dict(model), accelerator.context_parallel_rank
    return {"losses": losses, "norm": float(norm), "lengths": lengths, "state": state, "rank": rank}


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize(
    "sizes", [{"sp_size": 2}, pytest.param({"cp_size": 2, "dp_shard_size": 2}, marks=pytest.mark.exhaustive)], ids=str
)
def test_a_loop_equals_one_process(sizes: dict[str, int]) -> None:
    world = torch.tensor(list(sizes.values())).prod().item()
    of_ranks, alone = run_distributed(_train, int(world), sizes), _train(None)
    found = of_ranks[0]
    assert found["lengths"] == {8}
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert found["norm"] == pytest.approx(alone["norm"], rel=1e-4)
    for name, value in alone["state"].items():
        torch.testing.assert_close(found["state"][name], value, atol=1e-5, rtol=1e-4, msg=name)
    assert {each["rank"] for each in of_ranks} == {0, 1}


def _mistakes() -> list[str]:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    model = accelerator.prepare(make_model("llama"))
    (batch,), said = _batches(1), []
    ids, targets = batch["input_ids"], batch["shift_labels"]
    for buffers, dims, call in (
        ([ids], [1, 1], lambda: None),
        ([ids[:, :15]], [1], lambda: None),
        ([ids, targets], [1, 1], lambda: None),
        ([ids, targets], [1, 1], lambda: model(input_ids=ids, labels=targets)),
        ([ids, targets], [1, 1], lambda: model(input_ids=ids, labels=targets, position_ids=ids)),
    ):
        with pytest.raises(ConfigurationError) as error, accelerator.maybe_context_parallel(buffers, dims):
            call()
        said.append(str(error.value))
    return said


def test_mistakes_are_named() -> None:
    said = run_distributed(_mistakes, 2)[0]
    for text, part in zip(
        said,
        (
            "1 buffers and 2 entries of buffer_seq_dims",
            "15 positions",
            "has not called torch.nn.functional",
            "without position_ids",
            "shifted before they were split",
        ),
        strict=True,
    ):
        assert part in text
