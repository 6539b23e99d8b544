"""Distributed inference: each process answers a part of the prompts, and all answers are gathered in order."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainwright import Accelerator
from trainwright.utils import gather_object, set_seed


def inference_function(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Continue each prompt by the most probable tokens."""
    accelerator = Accelerator(**options)
    set_seed(config["seed"])
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32)).to(accelerator.device).eval()
    prompts = [[number, number + 1] for number in range(config["num"])]
    answers = []
    with accelerator.split_between_processes(prompts) as own:  # parts may differ by one prompt
        for prompt in own:
            tokens = torch.tensor(prompt, device=accelerator.device)
            for _ in range(config["new_tokens"]):
                with torch.no_grad():
                    following = model(tokens)[-1].argmax()
                tokens = torch.cat([tokens, following[None]])
            answers.append(tokens.tolist())
    answers = gather_object(answers)  # a list of all answers, on every process
    accelerator.print(f"{len(answers)} answers, the first: {answers[0]}")
    accelerator.end_training()
    return {"prompts": prompts, "answers": answers}


if __name__ == "__main__":
    inference_function({"seed": 3, "num": 5, "new_tokens": 4})
