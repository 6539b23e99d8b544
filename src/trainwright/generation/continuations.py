"""Continue prompts with a language model, in one process or with one that is split over several."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.core.errors import ConfigurationError
from trainwright.core.tree import is_cut
from trainwright.generation.beams import search_beams
from trainwright.generation.cache import KeyValueCache, takes_cache
from trainwright.generation.sampling import Sampling, StopWords


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int = 32,
    temperature: float | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
    top_p_decay: float = 1.0,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    eos_token: int | None = None,
    pad_token: int | None = None,
    bos_token: int | None = None,
    stop_words: Sequence[Sequence[int]] = (),
    seed: int | None = None,
) -> Tensor:
    """Return prompts with their continuations: int64 of shape (batch, length), padded at the end of each row.

    The most probable token is chosen (greedy search), or one is sampled if `temperature`, `top_k` or `top_p` is passed,
    or `num_beams` sequences are searched. A model of transformers computes by its own `generate`, with its cache of
    keys and values. Any other model is called as `model(tokens)`, with tokens of shape (batch, length), and returns
    logits of shape (batch, length, vocabulary); it is causal, and computes all positions for each new token. If its
    forward has a parameter `cache`, it receives a `KeyValueCache`, and computes each position once.

    Collective if the model's weights are split or sharded over ranks: all ranks call it, those with the same data with
    the same prompts. Each stage of a pipeline keeps the keys and values of its own layers, for models of transformers
    whose forward takes `past_key_values`.

    Args:
        model: A model of transformers, a task that holds one, or another causal language model; prepared or not.
        input_ids: Prompts, of shape (batch, length). In rows that are shorter, padding is at the beginning or at the
            end.
        attention_mask: 0 at padding, of the same shape. Default: None, for prompts of equal length.
        max_new_tokens: Number of tokens to add to each row. Default: 32.
        temperature: Logits are divided by it before a token is sampled. Default: None.
        top_k: Sample from this many tokens with the highest logits; 0: from all. Default: 0.
        top_p: Sample from the most probable tokens whose probabilities sum up to this. Default: 1.
        top_p_decay: `top_p` is multiplied by it after each token. Default: 1.
        num_beams: Sequences that beam search keeps for each row. Default: 1.
        length_penalty: Exponent of the length by which scores of beams are divided. Default: 1.
        eos_token: Ends a row. Default: None, which is that of the model's `generation_config`, if it has one.
        pad_token: Fills the ends of rows. Default: None, which is `eos_token`, or 0 if there is none.
        bos_token: Is put before each prompt. Default: None.
        stop_words: Sequences of tokens, each of which ends a row.
        seed: Seed of the samples. Default: None, which draws one from torch's generator.

    Raises:
        ConfigurationError: An argument is out of range or has no effect, options exclude each other, a prompt is empty
            or has unknown tokens, or a prompt with its continuation is longer than the model's context.
    """
    sampling = None
    if temperature is not None or top_k or top_p < 1:
        sampling = Sampling(1.0 if temperature is None else temperature, top_k, top_p, top_p_decay)
    if max_new_tokens < 1 or num_beams < 1:
        raise ConfigurationError(f"max_new_tokens={max_new_tokens}, num_beams={num_beams}: write at least 1.")
    if sampling is None and seed is not None:
        raise ConfigurationError(f"seed={seed} has no effect without temperature, top_k or top_p. Remove it.")
    if sampling is not None and num_beams > 1:
        raise ConfigurationError("num_beams searches the most probable sequences: remove temperature, top_k and top_p.")
    prompts = _prompts(input_ids, attention_mask, bos_token)
    library = _of_transformers(model)
    if library is not None and eos_token is None:
        eos_token = _first(getattr(library.generation_config, "eos_token_id", None))
    pad = pad_token if pad_token is not None else eos_token or 0
    _check_length(library, max(map(len, prompts)) + max_new_tokens)
    _check_tokens(library, prompts)
    stop = StopWords([*stop_words, *([] if eos_token is None else [[eos_token]])], list(map(len, prompts)))
    was_training = model.training
    model.eval()
    try:
        with torch.random.fork_rng(_devices(input_ids), enabled=sampling is not None):
            if sampling is not None:
                torch.manual_seed(_common_seed(model, seed))
            if library is not None:
                options = {"num_beams": num_beams, "length_penalty": length_penalty, "eos_token_id": eos_token}
                rows = _by_library(library, prompts, max_new_tokens, sampling, stop, pad, options)
            elif num_beams > 1:
                rows = _by_beams(model, prompts, max_new_tokens, num_beams, length_penalty, stop)
            else:
                rows = _by_logits(model, prompts, max_new_tokens, sampling, stop)
            if library is None:
                while _any_computes(model, input_ids.device, False):
                    model(prompts[0][None])
    finally:
        model.train(was_training)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)


def _prompts(input_ids: Tensor, mask: Tensor | None, bos_token: int | None) -> list[Tensor]:
    """Return the tokens of each row without padding."""
    if not isinstance(input_ids, Tensor) or input_ids.is_floating_point():
        kind = f"{input_ids.dtype} tensor" if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ConfigurationError(f"input_ids is a {kind}. Pass token numbers as an integer tensor of (batch, length).")
    if input_ids.dim() != 2 or (mask is not None and mask.shape != input_ids.shape):
        shape = None if mask is None else tuple(mask.shape)
        raise ConfigurationError(
            f"input_ids of shape {tuple(input_ids.shape)} and attention_mask of {shape}: expected (batch, length)."
        )
    rows = list(input_ids) if mask is None else [row[keep.bool()] for row, keep in zip(input_ids, mask, strict=True)]
    if bos_token is not None:
        rows = [torch.cat([row.new_tensor([bos_token]), row]) for row in rows]
    if not all(map(len, rows)):
        raise ConfigurationError("a prompt is empty. Pass bos_token=, with which texts begin.")
    return rows


def _of_transformers(model: nn.Module) -> Any:
    """Return the model itself or the part of it that generates as models of transformers do; None if there is none."""
    found: Any
    for found in model.modules():
        if hasattr(type(found), "generate") and hasattr(found, "generation_config"):
            return found
    return None


def _check_length(library: object, length: int) -> None:
    context = getattr(getattr(library, "config", None), "max_position_embeddings", None)
    if isinstance(context, int) and length > context:
        raise ConfigurationError(
            f"The longest prompt and max_new_tokens have {length} tokens, and the model's context {context}. Shorten "
            "one of them."
        )


def _check_tokens(library: object, prompts: list[Tensor]) -> None:
    config = getattr(library, "config", None)
    size = None if config is None else config.to_dict().get("vocab_size")
    largest = max(int(prompt.max()) for prompt in prompts)
    if isinstance(size, int) and largest >= size:
        raise ConfigurationError(
            f"input_ids has the token {largest}, and the model's vocabulary {size} tokens. Use the model's tokenizer."
        )


def _by_library(
    model: Any,
    prompts: list[Tensor],
    num: int,
    sampling: Sampling | None,
    stop: StopWords,
    pad: int,
    options: dict[str, Any],
) -> list[Tensor]:
    width = max(map(len, prompts))
    ids = prompts[0].new_full((len(prompts), width), pad)
    mask = torch.zeros_like(ids)
    for row, there, prompt in zip(ids, mask, prompts, strict=True):  # padded at the beginning
        row[width - len(prompt) :], there[width - len(prompt) :] = prompt, 1
    stop.begins = [width] * len(prompts)
    if _is_spread(model):
        options |= {"synced_gpus": True}
    in_stages = _is_in_stages(model)
    forward = type(model).forward if in_stages else model.forward  # megatron-core's has no cache
    has_cache = "past_key_values" in inspect.signature(forward).parameters
    options |= {"use_cache": has_cache} if has_cache or in_stages else {}  # also if the config disables it for training
    options |= {"cache_implementation": "dynamic"} if in_stages else {}
    if sampling is not None:
        options |= {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "logits_processor": [sampling]}
    else:
        options["do_sample"] = False
    if stop.words:
        options["stopping_criteria"] = [stop]
    found = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=num, pad_token_id=pad, **options)
    return [torch.cat([prompt, stop.cut(row[width:])]) for prompt, row in zip(prompts, found, strict=True)]


def _by_logits(
    model: nn.Module, prompts: list[Tensor], num: int, sampling: Sampling | None, stop: StopWords
) -> list[Tensor]:
    lengths = torch.tensor(list(map(len, prompts)), device=prompts[0].device)
    tokens = nn.utils.rnn.pad_sequence([*prompts], batch_first=True)
    rows = torch.arange(len(prompts), device=tokens.device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=tokens.device)
    ends = lengths.clone()
    cache = _make_cache(model, tokens.shape[1] + num)
    for step in range(num):
        places = lengths + step - 1  # of the newest token of each row; what follows it is not seen by it
        positions = torch.arange(int(places.max()) + 1, device=tokens.device).expand(len(prompts), -1)
        positions = positions if cache is None or step == 0 else places[:, None]
        logits = _logits(model, tokens, positions, cache)[rows, places - positions[:, 0]].float()
        scores = logits if sampling is None else sampling(tokens, logits)
        chosen = scores.argmax(-1) if sampling is None else torch.multinomial(scores.softmax(-1), 1).squeeze(-1)
        if int(places.max()) + 2 > tokens.shape[1]:
            tokens = nn.functional.pad(tokens, (0, 1))
        tokens[rows, places + 1] = torch.where(done, tokens[rows, places + 1], chosen)
        ends += ~done
        for i in range(len(prompts)):
            done[i] = done[i] or stop.ends(tokens[i, : int(ends[i])], len(prompts[i]))
        if bool(done.all()):
            break
    return [row[: int(end)] for row, end in zip(tokens, ends, strict=True)]


def _by_beams(
    model: nn.Module, prompts: list[Tensor], num: int, num_beams: int, length_penalty: float, stop: StopWords
) -> list[Tensor]:
    found = []
    for prompt in prompts:
        cache = _make_cache(model, len(prompt) + num)

        def score(
            rows: Tensor, parents: Tensor, prompt: Tensor = prompt, cache: KeyValueCache | None = cache
        ) -> Tensor:
            positions = torch.arange(rows.shape[1], device=rows.device).expand(len(rows), -1)
            if cache is not None and rows.shape[1] > len(prompt):
                cache.select(parents)
                positions = positions[:, -1:]
            return _logits(model, rows, positions, cache)[:, -1]

        found.append(search_beams(score, prompt, num, num_beams, length_penalty, stop))
    return found


def _make_cache(model: nn.Module, capacity: int) -> KeyValueCache | None:
    return KeyValueCache(capacity) if takes_cache(model) and not _is_in_stages(model) else None


def _logits(model: nn.Module, tokens: Tensor, positions: Tensor, cache: KeyValueCache | None) -> Tensor:
    """Return logits of (batch, length, vocabulary) at positions of (batch, length); all of them without a cache."""
    seen = tokens.gather(1, positions)
    _any_computes(model, tokens.device, True)
    output = model(seen) if cache is None else cache.call(model, seen, positions)
    logits: Tensor = getattr(output, "logits", output)
    if logits.dim() != 3 or logits.shape[:2] != seen.shape:
        raise ConfigurationError(
            f"the model returned logits of shape {tuple(logits.shape)} for tokens of {tuple(seen.shape)}. Expected "
            "(batch, length, vocabulary)."
        )
    return logits


def _first(token: int | Sequence[int] | None) -> int | None:
    """Return the token that ends texts; transformers may have several."""
    return token if isinstance(token, int) or token is None else token[0]


def _is_spread(model: nn.Module) -> bool:
    """Return whether the weights are split or sharded over ranks."""
    return any(is_cut(parameter) or parameter.is_meta for parameter in model.parameters())


def _any_computes(model: nn.Module, device: torch.device, computes: bool) -> bool:
    """Return whether any rank calls the model once more. Collective if ranks share the model's weights, and all of them
    must then call it. False if they do not.
    """
    if not (dist.is_initialized() and _is_spread(model)):
        return False
    flag = torch.tensor(int(computes), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def _is_in_stages(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _common_seed(model: nn.Module, seed: int | None) -> int:
    """Return the seed of rank 0 on all ranks that compute together."""
    found = [int(torch.randint(2**62, ())) if seed is None else seed]
    if seed is None and _is_spread(model) and dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    return found[0]


def _devices(tensor: Tensor) -> list[torch.device]:
    return [] if tensor.device.type == "cpu" else [tensor.device]
