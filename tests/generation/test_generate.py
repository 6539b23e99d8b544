"""Continuations of prompts: equal to transformers', in one process and split over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.distributed import run_distributed
from tests.helpers.selection import mostly_exhaustive
from tests.strategies.fsdp.test_tensor_parallel_ready import make_model
from trainwright import Accelerator, FSDPStrategy, MegatronStrategy, TaskModule
from trainwright.core.errors import ConfigurationError
from trainwright.generation import generate
from trainwright.generation.sampling import Sampling
from trainwright.utils import MegatronLMPlugin

_PROMPTS = torch.tensor([[5, 7, 9, 11], [6, 8, 0, 0], [3, 4, 5, 0]])
_MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
needs_transformers = pytest.mark.requires("transformers", reason="the continuations of its models are compared")


class Plain(nn.Module):
    """A causal model that returns logits: the next token depends on the sum of all before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Parameter(torch.randn(24, 24))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens.cumsum(1) % 24]


def _alone(model: Any, num: int, **options: Any) -> list[list[int]]:
    found = []
    for row, mask in zip(_PROMPTS, _MASK, strict=True):
        prompt = row[mask.bool()][None]
        out = model.generate(prompt, max_new_tokens=num, do_sample=False, pad_token_id=0, eos_token_id=None, **options)
        found.append(out[0].tolist())
    return found


def _rows(found: Tensor, num: int) -> list[list[int]]:
    return [row[: int(mask.sum()) + num].tolist() for row, mask in zip(found, _MASK, strict=True)]


@needs_transformers
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("beams", [1, 3])
def test_continuations_of_unequal_prompts_are_those_of_each_alone(kind: str, beams: int) -> None:
    model = make_model(kind).eval()
    model.generation_config.eos_token_id = None
    found = generate(model, _PROMPTS, _MASK, max_new_tokens=6, num_beams=beams, length_penalty=1.5)
    options = {"num_beams": beams, "length_penalty": 1.5} if beams > 1 else {}
    assert _rows(found, 6) == _alone(model, 6, **options)
    left = torch.stack([row.roll(4 - int(mask.sum())) for row, mask in zip(_PROMPTS, _MASK, strict=True)])
    mask = torch.stack([row.roll(4 - int(row.sum())) for row in _MASK])
    assert torch.equal(generate(model, left, mask, max_new_tokens=6, num_beams=beams, length_penalty=1.5), found)


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        vars(self)["model"] = model  # not a child, whose `generate` would be used

    def forward(self, tokens: Tensor) -> Any:
        return self.model(tokens, use_cache=False).logits


@needs_transformers
@pytest.mark.parametrize(("eos_token", "length_penalty"), [(99, 1.0), (16, 0.0), (8, 1.5), (11, -1.0)])
def test_beams_of_any_model_are_those_of_transformers(eos_token: int, length_penalty: float) -> None:
    model = make_model("llama").eval()
    options: dict[str, Any] = {"num_beams": 4, "length_penalty": length_penalty, "eos_token": eos_token, "pad_token": 0}
    expected = generate(model, _PROMPTS, _MASK, max_new_tokens=8, **options)
    assert torch.equal(generate(Logits(model), _PROMPTS, _MASK, max_new_tokens=8, **options), expected)


def test_any_causal_model_continues_prompts() -> None:
    model = Plain()
    found = generate(model, _PROMPTS, _MASK, max_new_tokens=5)
    for row, mask in zip(found, _MASK, strict=True):
        tokens = row[: int(mask.sum())].tolist()
        for _ in range(5):
            tokens.append(int(model.table[sum(tokens) % 24].argmax()))
        assert row[: len(tokens)].tolist() == tokens
    with_begin = generate(model, _PROMPTS[:1], max_new_tokens=1, bos_token=1)
    assert with_begin[0, :5].tolist() == [1, *_PROMPTS[0].tolist()]
    assert model.training


@pytest.mark.parametrize("kind", ["plain", pytest.param("llama", marks=needs_transformers)])
def test_a_row_ends_with_a_stop_word(kind: str) -> None:
    model: Any = Plain() if kind == "plain" else make_model(kind)
    if kind != "plain":
        model.generation_config.eos_token_id = None
    full = _rows(generate(model, _PROMPTS, _MASK, max_new_tokens=8), 8)
    word = full[0][6:8]  # the third and fourth new token of the first row
    found = generate(model, _PROMPTS, _MASK, max_new_tokens=8, stop_words=[word], pad_token=23)
    assert found[0].tolist() == full[0][:8] + [23] * (found.shape[1] - 8)
    ended = generate(model, _PROMPTS, _MASK, max_new_tokens=8, eos_token=full[1][2], pad_token=23)
    assert ended[1, :3].tolist() == full[1][:3]
    assert set(ended[1, 3:].tolist()) <= {23}


@pytest.mark.parametrize("kind", ["plain", pytest.param("llama", marks=needs_transformers)])
def test_samples_depend_on_the_seed_alone(kind: str) -> None:
    model: Any = Plain() if kind == "plain" else make_model(kind)
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 2.0, "eos_token": 99, "pad_token": 0}
    before = torch.get_rng_state()
    found = [generate(model, _PROMPTS, _MASK, seed=seed, **options) for seed in (1, 1, 2)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(
        generate(model, _PROMPTS, _MASK, max_new_tokens=8, top_k=1, eos_token=99, pad_token=0),
        generate(model, _PROMPTS, _MASK, max_new_tokens=8, eos_token=99, pad_token=0),
    )


def test_sampling_leaves_the_most_probable_tokens() -> None:
    scores = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    sampling = Sampling(1.0, 0, 0.65, 0.5)
    assert (sampling(_PROMPTS, scores) > -torch.inf).tolist() == [[False, True, False, True]]
    assert (sampling(_PROMPTS, scores) > -torch.inf).tolist() == [[False, True, False, False]]  # 0.325
    torch.testing.assert_close(
        Sampling(0.5, 3, 1.0, 1.0)(_PROMPTS, scores).exp(), torch.tensor([[0, 0.16, 0.04, 0.09]])
    )


def test_top_p_decays_from_1() -> None:
    scores = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    sampling = Sampling(1.0, 0, 1.0, 0.65)
    assert (sampling(_PROMPTS, scores) > -torch.inf).tolist() == [[True, True, True, True]]
    assert (sampling(_PROMPTS, scores) > -torch.inf).tolist() == [[False, True, False, True]]


class Holding(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model("llama")


@needs_transformers
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 13}, "17 tokens together, but the model's context has 16"),
        ({"max_new_tokens": 0}, "write at least 1"),
        ({"temperature": 0.0}, "For greedy search, pass none of them"),
        ({"top_p": 0.5, "num_beams": 2}, "remove temperature, top_k and top_p"),
        ({"attention_mask": torch.zeros(3, 4)}, "a prompt is empty"),
        ({"attention_mask": torch.ones(3, 3)}, r"expected \(batch, length\)"),
        ({"stop_words": [[]]}, "stop_words has an empty sequence"),
        ({"stop_words": [11]}, "has 11, expected sequences of tokens"),
    ],
)
def test_wrong_arguments_are_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        generate(Holding(), _PROMPTS, **({"max_new_tokens": 4} | arguments))


def test_inputs_of_another_kind_and_logits_of_another_shape_are_errors() -> None:
    with pytest.raises(ConfigurationError, match=r"input_ids is a list\. Pass token numbers as an integer tensor"):
        generate(Plain(), [[1, 2]])  # type: ignore[arg-type]  # the error
    with pytest.raises(ConfigurationError, match=r"input_ids is a torch\.float32 tensor"):
        generate(Plain(), torch.ones(1, 2))
    with pytest.raises(ConfigurationError, match="seed=1 has no effect without temperature"):
        generate(Plain(), _PROMPTS, seed=1)


def _as_documented() -> list[Tensor]:
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(pp_degree=2), cpu=True)
    model = accelerator.prepare(make_model("gpt2"))
    generated_tokens = [
        model.megatron_generate(_PROMPTS, _MASK, max_new_tokens=5, top_p=0.8, top_p_decay=0.5, temperature=0.9),
        model.megatron_generate(_PROMPTS, _MASK, max_new_tokens=5, top_k=50, temperature=0.9),
        model.megatron_generate(_PROMPTS, _MASK, max_new_tokens=5, add_BOS=True),
        model.megatron_generate(_PROMPTS[:1], _MASK[:1], max_new_tokens=5, num_beams=5, length_penalty=1.5),
    ]
    with pytest.raises(ConfigurationError, match="the model's context has 16"):
        model.megatron_generate(_PROMPTS)
    return generated_tokens


@pytest.mark.distributed
@needs_transformers
def test_documented_programs_of_megatron_generate() -> None:
    first, second = run_distributed(_as_documented, 2, init=False, timeout=90)
    assert all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))
    model = make_model("gpt2")
    assert torch.equal(first[2], generate(model, _PROMPTS, _MASK, max_new_tokens=5, bos_token=0))
    options: dict[str, Any] = {"max_new_tokens": 5, "num_beams": 5, "length_penalty": 1.5}
    assert torch.equal(first[3], generate(model, _PROMPTS[:1], **options))


def _split(strategy: Any, num: int) -> list[Tensor]:
    accelerator = Accelerator(strategy=strategy, cpu=True, seed=0)
    model = accelerator.prepare(make_model("llama"))
    options = {"max_new_tokens": num, "eos_token": 99, "pad_token": 0}
    return [
        generate(model, _PROMPTS, _MASK, **options),
        generate(model, _PROMPTS, _MASK, num_beams=2, **options),
        generate(model, _PROMPTS, _MASK, top_p=0.9, seed=4, **options),
        generate(model, _PROMPTS, _MASK, top_k=5, **options),
    ]


@pytest.mark.distributed
@needs_transformers
@pytest.mark.parametrize("kind", mostly_exhaustive(["ddp", "tp", "fsdp", "pp"], keep=["tp", "fsdp"]))
def test_a_model_that_is_split_over_ranks_continues_prompts_as_in_one_process(kind: str) -> None:
    strategy = {"fsdp": FSDPStrategy(), "pp": MegatronStrategy(pp=2), "ddp": "ddp"}.get(kind, FSDPStrategy(tp=2))
    alone = _split("single", 6)
    first, second = run_distributed(_split, 2, strategy, 6, init=False, timeout=90)
    for mine, other, one in list(zip(first, second, alone, strict=True))[:3]:
        assert torch.equal(mine, one)
        assert torch.equal(other, one)
    if kind != "ddp":
        assert torch.equal(first[3], second[3])  # the seed is rank 0's


def _computed_positions(kind: str, virtual_stages: int) -> tuple[list[Tensor], list[int]]:
    """Return continuations, and the number of positions in each call of a layer on this rank."""
    schedule = {"virtual_stages": virtual_stages, "schedule": "interleaved1f1b"} if virtual_stages > 1 else {}
    accelerator = Accelerator(strategy=MegatronStrategy(pp=2, **schedule), cpu=True)
    model, counts = accelerator.prepare(make_model(kind, **_FOUR[kind])), list[int]()
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, args: counts.append(args[0].shape[1]))
    options: dict[str, Any] = {"max_new_tokens": 6, "eos_token": 99, "pad_token": 0}
    greedy = generate(model, _PROMPTS, _MASK, **options)
    computed = counts[:]
    beams = generate(model, _PROMPTS, _MASK, num_beams=2, **options)
    return [greedy, beams, generate(model, _PROMPTS, _MASK, temperature=2.0, seed=4, **options)], computed


_FOUR = {"llama": {"num_hidden_layers": 4}, "gpt2": {"n_layer": 4}}


@pytest.mark.distributed
@needs_transformers
@pytest.mark.parametrize(
    ("kind", "virtual_stages"), mostly_exhaustive([("llama", 2), ("gpt2", 1)], keep=[("llama", 2)])
)
def test_stages_compute_one_position_per_row_and_token(kind: str, virtual_stages: int) -> None:
    model = make_model(kind, **_FOUR[kind])
    options: dict[str, Any] = {"max_new_tokens": 6, "eos_token": 99, "pad_token": 0}
    expected = [
        generate(model, _PROMPTS, _MASK, **options),
        generate(model, _PROMPTS, _MASK, num_beams=2, **options),
        generate(model, _PROMPTS, _MASK, temperature=2.0, seed=4, **options),
    ]
    for found, computed in run_distributed(_computed_positions, 2, kind, virtual_stages, init=False, timeout=90):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert computed == [4, 4] + [1, 1] * 5  # two layers on each rank
