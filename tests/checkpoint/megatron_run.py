"""Run megatron-core's GPTModel on the CPU. on two tensor-parallel ranks. Arguments: KIND ACTION FOLDER RANK STORE.

`load` loads the rank files of FOLDER and saves the logits; `save` saves a new model with dist_checkpointing.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

VOCAB, WIDTH, LENGTH, RANKS = 64, 32, 16, 2


def patch_cuda() -> None:
    """Replace the functions of CUDA that megatron-core calls without a check."""
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tensor_parallel.model_parallel_cuda_manual_seed = lambda seed: None
    CudaRNGStatesTracker.fork = lambda self, *args: nullcontext()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    kind = torch.Tensor.type
    tensor.type = lambda self, *args: kind(self, *args) if args else kind(self).replace("torch.", "torch.cuda.", 1)
    cuda.set_device = lambda *args: None
    cuda.synchronize = lambda *args: None  # dynamo refuses one function under two names
    make = torch.tensor
    torch.tensor = lambda *args, device=None, **kwargs: make(  # type: ignore[assignment]  # a constructor
        *args, device="cpu" if device == "cuda" else device, **kwargs
    )
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()


def tokens() -> torch.Tensor:
    """Return the tokens of which both libraries compute logits."""
    return torch.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % 60


def model(kind: str) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    gpt2, norm = kind == "gpt2", "LayerNorm" if kind == "gpt2" else "RMSNorm"
    config = TransformerConfig(
        num_layers=4,
        hidden_size=WIDTH,
        num_attention_heads=4,
        num_query_groups=4 if gpt2 else 2,
        ffn_hidden_size=64,
        use_cpu_initialization=True,
        add_bias_linear=gpt2,
        qk_layernorm=kind == "qwen3",
        gated_linear_unit=not gpt2,
        activation_func=partial(torch.nn.functional.gelu, approximate="tanh") if gpt2 else torch.nn.functional.silu,
        normalization=norm,
        layernorm_epsilon=1e-5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        tensor_model_parallel_size=RANKS,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=kind == "qwen3", normalization=norm),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=gpt2,
        position_embedding_type="learned_absolute" if gpt2 else "rope",
        rotary_base=10000,
        parallel_output=False,
    )


def main(kind: str, action: str, folder: Path, rank: int, store: str) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    patch_cuda()
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, init_method=f"file://{store}")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    torch.manual_seed(0)
    gpt = model(kind)
    if action == "save":
        dist_checkpointing.save({**gpt.sharded_state_dict(), "checkpoint_version": 3.0}, str(folder))
    else:
        state = torch.load(folder / "release" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", weights_only=False)
        gpt.load_state_dict(state["model"], strict=True)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), diagonal=1)
    position = torch.arange(LENGTH).expand(2, -1)
    with torch.no_grad():
        logits = gpt(tokens(), position, mask)
    if rank == 0:
        torch.save(logits, folder.parent / f"{folder.name}.logits")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    kind, action, folder, rank, store = sys.argv[1:]
    main(kind, action, Path(folder), int(rank), store)
