"""Models that receive a cache of keys and values continue prompts as they do without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers.distributed import run_distributed
from tests.helpers.selection import mostly_exhaustive
from trainwright import Accelerator, FSDPStrategy, MegatronStrategy
from trainwright.core.errors import ConfigurationError
from trainwright.generation import KeyValueCache, generate

_PROMPTS = torch.tensor([[5, 7, 9, 11], [6, 8, 0, 0], [3, 4, 5, 0]])
_MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
_PLAN = {"layers.*.qkv": "fused_colwise", "layers.*.out": "rowwise"}


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32)

    def forward(self, x: Tensor, cache: KeyValueCache | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 8)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.update(self.number, k, v)
        mask = None if cache is None else cache.mask
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=cache is None)
        return x + torch.tanh(self.out(y.transpose(1, 2).flatten(2)))


class Caching(nn.Module):
    def __init__(self, numbers: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tokens, self.places = nn.Embedding(24, 32), nn.Embedding(32, 32)
        self.layers = nn.ModuleList(Layer(number) for number in numbers)
        self.head = nn.Linear(32, 24)
        self.lengths: list[int] = []

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        self.lengths.append(tokens.shape[1])
        positions = torch.arange(tokens.shape[1]) if cache is None else cache.positions
        x = self.tokens(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x, cache)
        return self.head(x)


class Recomputing(nn.Module):
    """The same model without a parameter for the cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Any:
        return self.model(tokens)


_OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.5, "seed": 3},
    {"top_p": 0.9, "seed": 4},
    {"eos_token": 7},
    {"num_beams": 3, "eos_token": 7},
]


@pytest.mark.parametrize("options", _OPTIONS)
def test_continuations_of_unequal_prompts_are_those_without_a_cache(options: dict[str, Any]) -> None:
    model = Caching()
    expected = generate(Recomputing(model), _PROMPTS, _MASK, max_new_tokens=20, **options)
    assert torch.equal(generate(model, _PROMPTS, _MASK, max_new_tokens=20, **options), expected)
    left = torch.stack([row.roll(4 - int(mask.sum())) for row, mask in zip(_PROMPTS, _MASK, strict=True)])
    mask = torch.stack([row.roll(4 - int(row.sum())) for row in _MASK])
    assert torch.equal(generate(model, left, mask, max_new_tokens=20, **options), expected)


def test_each_new_token_is_computed_alone() -> None:
    model = Caching()
    generate(model, _PROMPTS, _MASK, max_new_tokens=6)
    assert model.lengths == [4, 1, 1, 1, 1, 1]


def _split(strategy: Any) -> tuple[list[Tensor], list[int]]:
    accelerator = Accelerator(strategy=strategy, cpu=True)
    own = Caching()
    model = accelerator.prepare(own)
    found = [generate(model, _PROMPTS, _MASK, max_new_tokens=8, **options) for options in _OPTIONS]
    return found, own.lengths[:8]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", mostly_exhaustive(["ddp", "fsdp", "tp", "megatron"], keep=["tp"]))
def test_a_model_that_is_split_over_ranks_uses_its_cache(kind: str) -> None:
    strategies = {
        "fsdp": FSDPStrategy(),
        "tp": FSDPStrategy(tp=2, tensor_parallel_plan=_PLAN),
        "megatron": MegatronStrategy(tp=2, tensor_parallel_plan=_PLAN),
    }
    model = Recomputing(Caching())
    expected = [generate(model, _PROMPTS, _MASK, max_new_tokens=8, **options) for options in _OPTIONS]
    for found, lengths in run_distributed(_split, 2, strategies.get(kind, kind), init=False, timeout=90):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert lengths == [4] + [1] * 7


class Flat(Caching):
    """A model whose keys lack the dimension of the heads."""

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        x = self.tokens(tokens)
        if cache is not None:
            cache.update(0, x, x)
        return self.head(x)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Caching(numbers=(0, 0)), "received layer=0 twice in a forward"),
        (Caching(numbers=()), r"forward of Caching has a parameter cache, but no layer called cache\.update"),
        (Flat(), r"keys of shape \(3, 4, 32\) for tokens of shape \(3, 4\)"),
    ],
)
def test_wrong_calls_of_the_cache_are_errors(model: nn.Module, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        generate(model, _PROMPTS, _MASK)
