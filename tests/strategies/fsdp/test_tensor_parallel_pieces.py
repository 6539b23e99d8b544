"""What a rank holds of split layers: bytes against their formula; and what else works on the pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.distributed import run_distributed
from tests.strategies.fsdp.test_fsdp_shards import Sizes
from tests.strategies.fsdp.test_tensor_parallel import _PLAN, Gpt, train
from trainwright.callbacks import EMAWeightAveraging
from trainwright.strategies.fsdp.tensor_parallel import TensorParallelStrategy


class Untied(Gpt):
    """Has a head of its own, so that the embedding's gradient is its own too; nothing is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.head.weight.detach().flip(0).clone())
        self.requires_grad_(True)


class Built(Gpt):
    def __init__(self) -> None:
        super().__init__()
        for name in [name for name, _ in self.named_children() if name != "total"]:
            delattr(self, name)

    def configure_model(self) -> None:
        for name, module in Gpt().named_children():
            if name != "total":
                setattr(self, name, module)


def split_and_whole() -> tuple[int, int]:
    """Return how many numbers lie in weights that the plan splits, and in the others."""
    split = ("tokens.", "head.", "qkv.", "mlp.0.", "out.weight", "mlp.2.weight")  # biases behind a sum are whole
    sizes = {name: p.numel() for name, p in Untied().named_parameters()}
    inside = sum(size for name, size in sizes.items() if any(part in f".{name}" for part in split))
    return inside, sum(sizes.values()) - inside


def _measure(strategy: Any, dp_size: int) -> tuple[dict[str, int], dict[str, Any]]:
    sizes = Sizes()
    found = train(strategy, dp_size, task=Untied(), callbacks=[sizes])
    return sizes.sizes, found


def _run_two() -> dict[str, Any]:
    average = EMAWeightAveraging(decay=0.5)
    meta = TensorParallelStrategy(cpu_ram_efficient_loading=True)
    return {
        "untied": _measure("tp", 1),
        "averaged": train("tp", callbacks=[average])["weights"],
        "on one host": train(meta, task=Built())["losses"],
        "checkpointed": train(TensorParallelStrategy(activation_checkpointing=True))["weights"],
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_distributed(_run_two, 2, init=False, timeout=300)


@pytest.mark.distributed
def test_a_rank_holds_a_share_of_split_layers_and_all_of_the_others(two: list[dict[str, Any]]) -> None:
    assert _PLAN["tokens"] == "embedding"
    split, rest = split_and_whole()
    held = 4 * (split // 2 + rest)
    assert [found["untied"][0] for found in two] == [{"parameters": held, "gradients": held, "states": 2 * held}] * 2


@pytest.mark.distributed
def test_an_embedding_that_shares_no_weight_is_trained_as_in_one_process(two: list[dict[str, Any]]) -> None:
    alone = train("single", task=Untied())
    for found in two:
        torch.testing.assert_close(found["untied"][1]["weights"], alone["weights"], rtol=0, atol=1e-4)
        torch.testing.assert_close(found["untied"][1]["reported"], alone["reported"], rtol=0, atol=1e-4)


@pytest.mark.distributed
def test_layers_that_rank_zero_alone_has_built_are_split(two: list[dict[str, Any]]) -> None:
    alone = train("single")["losses"]
    for found in two:
        torch.testing.assert_close(found["on one host"], alone, rtol=0, atol=1e-5)
