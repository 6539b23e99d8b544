"""fp8 by torchao with DDP or FSDP. A device without products of 8 bits, such as a CPU, emulates them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Accelerator, FullyShardedDataParallelPlugin
from trainwright.utils import AORecipeKwargs, set_seed


def make_model() -> nn.Sequential:
    """Return a model whose inner layers are converted: sizes are multiples of 16, first and last layer stay in bf16."""
    widths = [8, 32, 32, 32, 2]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def training_function(
    config: dict[str, Any], on_step: Callable[[Any, torch.Tensor], None] = lambda batch, loss: None, **options: Any
) -> dict[str, Any]:
    """Train replicas (`"ddp"`) or shards (`"fsdp"`), whose weights FSDP then gathers in 8 bits."""
    recipe = AORecipeKwargs(enable_fsdp_float8_all_gather=config["strategy"] == "fsdp")
    if config["strategy"] == "fsdp":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(auto_wrap_policy="NO_WRAP")
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe], **options)
    set_seed(config["seed"])
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    loader: Any = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), shuffle=True, batch_size=16)
    model: Any = make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(config["num_epochs"]):
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            on_step(batch, loss)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    inner = accelerator.unwrap_model(model)
    converted = [name for name, part in inner.named_modules() if type(part).__name__ == "Float8Linear"]
    accelerator.print(f"last loss: {loss.item():.3f}, layers in fp8: {converted}")
    accelerator.end_training()  # restores the layers
    return {"converted": converted}


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "cpu has no float8")
    strategy = sys.argv[1] if len(sys.argv) > 1 else "ddp"
    training_function({"lr": 0.02, "num_epochs": 2, "seed": 3, "strategy": strategy})
