"""Text generation with a language model in one process, or split over several processes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from trainwright.core.errors import ConfigurationError
from trainwright.core.tree import is_sharded
from trainwright.generation.cache import KeyValueCache, takes_cache
from trainwright.generation.sampling import Sampling, all_stop_words, cut, ends


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

    The default is greedy search. `temperature`, `top_k` or `top_p` select sampling, and `num_beams` selects beam
    search. A model of transformers uses its own `generate` with its key-value cache. Any other model must be causal. It
    is called as `model(tokens)` with tokens of shape (batch, length), returns logits of shape (batch, length,
    vocabulary), and computes all positions for each new token. A model whose forward has a parameter `cache` receives a
    `KeyValueCache` and computes each position once.

    Collective if the model's weights are split or sharded over ranks. Ranks with the same data must pass the same
    prompts. For models of transformers whose forward takes `past_key_values`, each pipeline stage caches the keys and
    values of its own layers.

    Args:
        model: A model of transformers, a task that contains one, or another causal language model; prepared or not.
        input_ids: Prompts, of shape (batch, length). Shorter rows are padded at the beginning or at the end.
        attention_mask: 0 at padding, of the same shape. Default: None, for prompts of equal length.
        max_new_tokens: Number of tokens to add to each row. Default: 32.
        temperature: Divisor of the logits before sampling. Default: None, which is 1 with `top_k` or `top_p`.
        top_k: Sample from this many tokens with the highest logits. 0 samples from all tokens. Default: 0.
        top_p: Sample from the most probable tokens whose probabilities sum up to this. Default: 1.
        top_p_decay: Factor of `top_p` after each token. Default: 1.
        num_beams: Sequences that beam search keeps for each row. Default: 1.
        length_penalty: Scores of beams are divided by their length to the power of this number. Default: 1.
        eos_token: Token that ends a row. Default: None, the token in the model's `generation_config`, if any.
        pad_token: Token that pads the ends of rows. Default: None, which is `eos_token`, or 0 without one.
        bos_token: Token to put before each prompt. Default: None.
        stop_words: Token sequences that end a row. The row includes them. Default: none.
        seed: Seed of the sampling. Default: None, which draws a seed from torch's generator.

    Raises:
        ConfigurationError: An argument is out of range or has no effect, options exclude each other, a prompt is empty
            or has unknown tokens, or a prompt with its continuation is longer than the model's context.
    """
    is_sampled = temperature is not None or top_k != 0 or top_p < 1
    if max_new_tokens < 1 or num_beams < 1:
        raise ConfigurationError(f"max_new_tokens={max_new_tokens}, num_beams={num_beams}: write at least 1.")
    if not is_sampled and seed is not None:
        raise ConfigurationError(f"seed={seed} has no effect without temperature, top_k or top_p. Remove it.")
    if is_sampled and num_beams > 1:
        raise ConfigurationError("num_beams searches the most probable sequences: remove temperature, top_k and top_p.")
    prompts = _prompts(input_ids, attention_mask, bos_token)
    library = _model_of_transformers(model)
    if library is not None:
        _check_limits(library.config, prompts, max_new_tokens)
        if eos_token is None:
            eos_token = _first_eos_token(library)
    if pad_token is None:
        pad_token = eos_token or 0
    words = all_stop_words(stop_words, eos_token)
    processors: list[Sampling] = []
    if is_sampled:
        generator = torch.Generator(input_ids.device).manual_seed(_common_seed(model) if seed is None else seed)
        scale = 1.0 if temperature is None else temperature
        processors.append(Sampling(scale, top_k, top_p, top_p_decay, generator))

    was_training = model.training
    model.eval()
    try:
        if library is not None:
            options = {
                "num_beams": num_beams,
                "length_penalty": length_penalty,
                "eos_token_id": eos_token,
                "max_new_tokens": max_new_tokens,
                "pad_token_id": pad_token,
                "logits_processor": processors,
            }
            continuations = _by_library(library, prompts, words, options)
        else:
            if num_beams > 1:
                continuations = []
                for prompt in prompts:
                    continuations.append(_beams(model, prompt, max_new_tokens, num_beams, length_penalty, words))
            else:
                continuations = _by_logits(model, prompts, max_new_tokens, processors, words)
            # Forwards of a sharded model are collective: call it until the ranks with longer continuations end, too.
            while _any_computes(model, input_ids.device, False):
                model(prompts[0][None])
    finally:
        model.train(was_training)
    rows = [torch.cat([prompt, cut(words, new)]) for prompt, new in zip(prompts, continuations, strict=True)]
    return pad_sequence(rows, batch_first=True, padding_value=pad_token)


def _model_of_transformers(model: nn.Module) -> Any:
    """Return the first module with a `generate` of transformers, or None."""
    for module in model.modules():
        if hasattr(type(module), "generate") and hasattr(module, "generation_config"):
            return module
    return None


def _first_eos_token(library: Any) -> int | None:
    """Return the token that ends a text. Some models have several of them."""
    tokens: int | list[int] | None = library.generation_config.eos_token_id
    return tokens[0] if isinstance(tokens, list) else tokens


def _common_seed(model: nn.Module) -> int:
    """Draw a seed. The ranks of one model draw the same one, since they must sample the same tokens."""
    seeds = [int(torch.randint(2**62, ()))]
    if _is_shared(model):
        dist.broadcast_object_list(seeds, src=0)
    return seeds[0]


def _prompts(input_ids: Tensor, mask: Tensor | None, bos_token: int | None) -> list[Tensor]:
    """Return the tokens of each row without padding, after `bos_token`. Raise an error for invalid prompts."""
    if not isinstance(input_ids, Tensor) or input_ids.is_floating_point():
        kind = f"{input_ids.dtype} tensor" if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ConfigurationError(f"input_ids is a {kind}. Pass token numbers as an integer tensor of (batch, length).")
    if input_ids.dim() != 2 or (mask is not None and mask.shape != input_ids.shape):
        shape = None if mask is None else tuple(mask.shape)
        raise ConfigurationError(
            f"input_ids of shape {tuple(input_ids.shape)} and attention_mask of {shape}: expected (batch, length)."
        )
    rows = list(input_ids)
    if mask is not None:
        rows = [row[keep.bool()] for row, keep in zip(rows, mask, strict=True)]
    if bos_token is not None:
        rows = [torch.cat([row.new_tensor([bos_token]), row]) for row in rows]
    if any(len(row) == 0 for row in rows):
        raise ConfigurationError("a prompt is empty. Pass bos_token=, with which texts begin.")
    return rows


def _check_limits(config: Any, prompts: list[Tensor], num: int) -> None:
    """Check that prompts with `num` new tokens fit into the model's context, and tokens into its vocabulary."""
    context = getattr(config, "max_position_embeddings", None)
    size = config.to_dict().get("vocab_size")
    length = max(map(len, prompts)) + num
    largest = max(int(prompt.max()) for prompt in prompts)
    if isinstance(context, int) and length > context:
        raise ConfigurationError(
            f"The longest prompt and max_new_tokens have {length} tokens together, but the model's context has "
            f"{context}. Shorten one of them."
        )
    if isinstance(size, int) and largest >= size:
        raise ConfigurationError(
            f"input_ids has the token {largest}, but the model's vocabulary has {size} tokens. Use the model's "
            "tokenizer."
        )


# Each of the next three functions returns new tokens, which may continue after a stop word. `generate` cuts them.


def _by_library(model: Any, prompts: list[Tensor], words: list[list[int]], options: dict[str, Any]) -> list[Tensor]:
    # Padding is on the left: transformers appends new tokens on the right.
    ids = pad_sequence(prompts, batch_first=True, padding_value=options["pad_token_id"], padding_side="left")
    mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True, padding_side="left")
    width = ids.shape[1]
    in_stages = any(parameter.is_meta for parameter in model.parameters())  # other ranks hold some pipeline stages
    forward = type(model).forward if in_stages else model.forward  # megatron-core's has no cache
    has_cache = "past_key_values" in inspect.signature(forward).parameters
    if has_cache or in_stages:
        options["use_cache"] = has_cache  # also if the config disables it for training
    if in_stages:
        options["cache_implementation"] = "dynamic"

    def ended(tokens: Tensor, *_: object, **__: object) -> Tensor:
        return torch.tensor([ends(words, row[width:]) for row in tokens], device=tokens.device)

    options |= {"do_sample": False, "synced_gpus": _is_shared(model) or None, "stopping_criteria": [ended]}
    return list(model.generate(input_ids=ids, attention_mask=mask, **options)[:, width:])


def _by_logits(
    model: nn.Module, prompts: list[Tensor], num: int, processors: list[Sampling], words: list[list[int]]
) -> list[Tensor]:
    """Return the continuations of all prompts by greedy search, or by sampling if a processor adds noise."""
    lengths = torch.tensor(list(map(len, prompts)), device=prompts[0].device)
    # Prompts are padded on the right. New tokens of a row overwrite its padding, from position `lengths`.
    tokens = nn.functional.pad(pad_sequence(prompts, batch_first=True), (0, num))
    cache = _make_cache(model, tokens.shape[1])
    done = [False] * len(prompts)
    for step in range(num):
        scores = _next_logits(model, tokens, lengths + step, cache, is_first=step == 0)
        for process in processors:
            scores = process(tokens, scores)
        tokens.scatter_(1, (lengths + step)[:, None], scores.argmax(-1, keepdim=True))
        continuations = []
        for index, prompt in enumerate(prompts):
            new = tokens[index, len(prompt) : len(prompt) + step + 1]
            continuations.append(new)
            done[index] = done[index] or ends(words, new)
        if all(done):
            break
    return continuations


def _beams(
    model: nn.Module, prompt: Tensor, num: int, num_beams: int, length_penalty: float, words: list[list[int]]
) -> Tensor:
    """Return the best continuation of a prompt by beam search, like transformers' `generate`."""
    cache = _make_cache(model, len(prompt) + num)
    beams = prompt.repeat(num_beams, 1)
    totals = torch.full((num_beams,), -torch.inf, device=prompt.device)
    totals[0] = 0.0  # all beams are equal at first
    finished: list[tuple[float, Tensor]] = []  # (score, tokens of the prompt and the continuation), the best first
    for length in range(1, num + 1):
        lengths = torch.full((len(beams),), beams.shape[1], device=prompt.device)
        logits = _next_logits(model, beams, lengths, cache, is_first=length == 1)
        scores = totals[:, None] + logits.log_softmax(-1)
        # Each beam can end with one candidate for each stop word. With one candidate more, enough of them do not end.
        num_candidates = max(2, 1 + len(words)) * num_beams
        best = scores.flatten().topk(min(num_candidates, scores.numel()))
        sources = best.indices // scores.shape[1]
        tokens = best.indices % scores.shape[1]
        rows = torch.cat([beams[sources], tokens[:, None]], dim=1)
        open_rows = []  # indices of candidates that have not ended, the best first
        for index, row in enumerate(rows):
            if length < num and not ends(words, row[len(prompt) :]):
                open_rows.append(index)
            elif index < num_beams:  # as in transformers, worse candidates that end are dropped
                finished.append((float(best.values[index]) / length**length_penalty, row))
        finished = sorted(finished, key=lambda beam: beam[0], reverse=True)[:num_beams]
        open_rows = open_rows[:num_beams]
        if not open_rows:
            break
        # As `early_stopping=False` of transformers: stop when the best open beam is worse than all finished ones.
        best_open = float(best.values[open_rows[0]]) / length**length_penalty
        if len(finished) == num_beams and best_open <= finished[-1][0]:
            break
        beams = rows[open_rows]
        totals = best.values[open_rows]
        if cache is not None:
            cache.select(sources[open_rows])
    _, best_row = finished[0]
    return best_row[len(prompt) :]


def _make_cache(model: nn.Module, capacity: int) -> KeyValueCache | None:
    """Return a cache for rows of up to `capacity` tokens. None if the model does not accept one."""
    in_stages = any(parameter.is_meta for parameter in model.parameters())
    if in_stages or not takes_cache(model):
        return None
    return KeyValueCache(capacity)


def _next_logits(
    model: nn.Module, tokens: Tensor, lengths: Tensor, cache: KeyValueCache | None, *, is_first: bool
) -> Tensor:
    """Return float32 logits of (batch, vocabulary) for the token after the first `lengths` tokens of each row.

    Collective if the model's weights are split or sharded.
    """
    positions = torch.arange(int(lengths.max()), device=tokens.device).expand(len(tokens), -1)
    if cache is not None and not is_first:
        positions = lengths[:, None] - 1  # only the last token of each row; the cache has the others
    inputs = tokens.gather(1, positions)
    _any_computes(model, tokens.device, True)  # ranks that have finished call the model, too; see `generate`
    output = model(inputs) if cache is None else cache.call(model, inputs, positions)
    logits: Tensor = getattr(output, "logits", output)
    if logits.dim() != 3 or logits.shape[:2] != inputs.shape:
        raise ConfigurationError(
            f"the model returned logits of shape {tuple(logits.shape)} for tokens of {tuple(inputs.shape)}. Expected "
            "(batch, length, vocabulary)."
        )
    rows = torch.arange(len(tokens), device=logits.device)
    return logits[rows, lengths - 1 - positions[:, 0]].float()


def _is_shared(model: nn.Module) -> bool:
    """Return whether the model's weights are split or sharded over ranks."""
    if not dist.is_initialized():
        return False
    return any(is_sharded(parameter) or parameter.is_meta for parameter in model.parameters())


def _any_computes(model: nn.Module, device: torch.device, computes: bool) -> bool:
    """Return whether `computes` is True on any rank. All ranks must then call the model.

    Collective if the model's weights are split or sharded over ranks. Otherwise, return False without communication.
    """
    if not _is_shared(model):
        return False
    flag = torch.tensor(int(computes), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)
