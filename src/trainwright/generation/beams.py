"""Beam search for models that are not transformers'."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainwright.generation.sampling import StopWords


def search_beams(
    score: Callable[[Tensor, Tensor], Tensor],
    prompt: Tensor,
    num: int,
    num_beams: int,
    length_penalty: float,
    stop: StopWords,
) -> Tensor:
    """Return a prompt with the best continuation that is found, as transformers' `generate` does.

    Args:
        score: Returns the logits of the next token, of shape (beams, vocabulary), for the tokens of each beam, of shape
            (beams, length), and for the beam of the last call that each one continues, of shape (beams,).
        prompt: Shape (length,).
        num: Largest number of new tokens.
        num_beams: Number of sequences that are continued.
        length_penalty: Exponent of the number of new tokens by which scores are divided.
        stop: Ends sequences.
    """
    beams, parents = prompt.repeat(num_beams, 1), torch.arange(num_beams, device=prompt.device)
    totals = torch.full((num_beams,), -torch.inf, device=prompt.device)
    totals[0] = 0.0  # all beams are equal at first
    finished: list[tuple[float, Tensor]] = []
    for length in range(1, num + 1):
        scores = totals[:, None] + score(beams, parents).float().log_softmax(-1)
        # So many that enough of them do not end.
        best = scores.flatten().topk(min(max(2, 1 + len(stop.words)) * num_beams, scores.numel()))
        sources, tokens = best.indices // scores.shape[1], best.indices % scores.shape[1]
        rows = torch.cat([beams[sources], tokens[:, None]], dim=1)
        ended = [length == num or stop.ends(row, len(prompt)) for row in rows]
        found = [(float(best.values[i]) / length**length_penalty, rows[i]) for i in range(num_beams) if ended[i]]
        finished = sorted(finished + found, key=lambda one: one[0], reverse=True)[:num_beams]
        kept = [i for i, is_ended in enumerate(ended) if not is_ended][:num_beams]
        if not kept:
            break
        if len(finished) == num_beams and float(best.values[kept[0]]) / length**length_penalty <= finished[-1][0]:
            break  # as `early_stopping=False` of transformers
        beams, parents, totals = rows[kept], sources[kept], best.values[kept]
    return finished[0][1]
