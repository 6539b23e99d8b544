"""A small model whose weights are on the disk against the same model in memory: a forward and a generation.

    python benchmarks/offloaded_forward.py [--rounds 60] [--threads N] [--clock cpu]

Llama of transformers with 8 layers of width 512, as `disk_offload` leaves it. The files stay in the page cache, so what
is measured is what the hooks of its modules cost. A third model has weights that safetensors has mapped from a file,
without hooks: what it costs over the one in memory is the machine's. Rounds of the models are interleaved in one
process; a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from measuring import Bars, describe_machine, interleave
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from trainwright import disk_offload


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="A forward of a model on the disk over one in memory.")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, help="of torch; default: its own number")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
    torch.manual_seed(0)
    in_memory: Any = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=4096)).eval()
    tokens = torch.randint(0, 4096, (1, 32))
    print(describe_machine(("torch", "transformers")), f"\n{torch.get_num_threads()} thread(s), {options.clock} clock")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        # What any forward on the weights of a file costs on this machine.
        by_hand = copy.deepcopy(in_memory)
        save_file(by_hand.state_dict(), f"{folder}/by_hand.safetensors")
        by_hand.load_state_dict(load_file(f"{folder}/by_hand.safetensors"), assign=True)
        on_disk = disk_offload(copy.deepcopy(in_memory), folder, execution_device="cpu")

        def timed(model: Any, length: int) -> Callable[[], float]:
            def run() -> float:
                began = clock()
                if length:
                    model.generate(tokens, max_new_tokens=length, do_sample=False, pad_token_id=0)
                else:
                    model(tokens)
                return clock() - began

            return run

        bars = Bars()
        for name, length in (("forward", 0), ("generation of 12 tokens", 12)):
            contenders = {"memory": in_memory, "by hand": by_hand, "disk": on_disk}
            found = interleave({key: timed(model, length) for key, model in contenders.items()}, options.rounds)
            for baseline, words in (("memory", "in memory"), ("by hand", "mapped by hand")):
                ratios = [a / b for a, b in zip(found["disk"], found[baseline], strict=True)]
                bars.add(f"{name}, on the disk over {words}", statistics.median(ratios), 1.08, "×")
        bars.print()


if __name__ == "__main__":
    main()
