"""What a step costs on one GPU: strategies, peers, and fp8.

    python benchmarks/gpu.py [--rounds 3] [--parts tiny gpt2 fp8 offload]

Contenders run in this process in interleaved rounds. A time is the median over rounds, and a ratio the median of each
round's ratio to the hand-written loop. All train a GPT with AdamW (fused, but for Lightning, which does not clip then)
and clip the norm of gradients; batches come from pinned memory. Peaks are those of the allocator.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from measuring import describe_machine, interleave, print_table
from torch import nn
from torch.nn import functional

from trainwright import Accelerator, Callback, MegatronStrategy, OffloadStrategy, TaskModule, Trainer

WARM_UP = 8
QUIET = {
    "accelerator": "cuda", "devices": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "max_epochs": 1, "gradient_clip_val": 1.0,
}  # fmt: skip


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend and transform; (batch, length, width)."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


@dataclass(frozen=True)
class Size:
    """A model and its batches."""

    vocabulary: int
    width: int
    heads: int
    layers: int
    length: int
    rows: int
    steps: int

    def model(self) -> nn.Module:
        """Return the model on the GPU."""
        torch.manual_seed(0)
        with torch.device("cuda"):
            return Gpt(self)

    def loader(self) -> Any:
        """Return batches of tokens in pinned memory."""
        torch.manual_seed(1)
        batches = list(torch.randint(self.vocabulary, (self.steps, self.rows, self.length)))
        return torch.utils.data.DataLoader(batches, batch_size=None, pin_memory=True)  # type: ignore[arg-type]  # a list will do


class Gpt(nn.Module):
    """A language model."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each next token."""
        x = self.embed(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


class Watch:
    """Times the steps after the first ones, and waits for the GPU at both ends."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done, self.seconds = steps, 0, 0.0

    def step(self) -> None:
        """Note the end of a step."""
        self.done += 1
        if self.done in (WARM_UP, self.steps):
            torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.seconds

    @property
    def per_step(self) -> float:
        """Seconds of a step."""
        return self.seconds / (self.steps - WARM_UP)


def optimizer_of(model: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)


def by_hand(size: Size, dtype: torch.dtype | None, compiled: bool = False) -> float:
    """Time a hand-written loop."""
    model, watch = size.model(), Watch(size.steps)
    optimizer = optimizer_of(model)
    if compiled:
        model.compile()
    for batch in size.loader():
        batch = batch.to("cuda", non_blocking=True)
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        watch.step()
    return watch.per_step


class Task(TaskModule):
    """The model as a task."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss."""
        return self.model(batch)

    def shard_units(self) -> list[nn.Module]:
        """Return the blocks."""
        return list(self.model.blocks)  # type: ignore[arg-type]  # a ModuleList

    def configure_optimizers(self) -> Any:
        """Return AdamW."""
        return optimizer_of(self)


class Timed(Callback):
    """Tells a watch of each step."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        self.watch.step()


def trainer(size: Size, precision: str, **options: Any) -> float:
    """Time our Trainer."""
    watch = Watch(size.steps)
    Trainer(**QUIET, precision=precision, callbacks=[Timed(watch)], **options).fit(Task(size.model()), size.loader())
    return watch.per_step


def loop(size: Size, precision: str, accelerator: Any) -> float:
    """Time a user-written loop: ours, or Accelerate's."""
    model, watch = size.model(), Watch(size.steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), size.loader())
    for batch in loader:
        accelerator.backward(model(batch))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        watch.step()
    accelerator.free_memory()
    return watch.per_step


def accelerate(size: Size, precision: str) -> float:
    """Time Accelerate."""
    from accelerate import Accelerator as Theirs
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    return loop(size, precision, Theirs(mixed_precision=precision))


def lightning(size: Size, precision: str) -> float:
    """Time Lightning; it does not clip the gradients of a fused optimizer."""
    import lightning as pl

    watch = Watch(size.steps)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = size.model()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(batch)

        def configure_optimizers(self) -> Any:
            return optimizer_of(self, fused=False)

        def on_train_batch_end(self, *_: Any) -> None:
            watch.step()

    pl.Trainer(**QUIET, precision=precision).fit(Module(), size.loader())
    return watch.per_step


def contenders(size: Size, half: bool) -> dict[str, Callable[[], float]]:
    """Return loops of one precision: float32, or mixed with bfloat16."""
    mixed, word = ("bf16-mixed", "bf16") if half else ("32-true", "no")
    found: dict[str, Callable[[], float]] = {
        "hand-written loop": partial(by_hand, size, torch.bfloat16 if half else None),
        "Trainer": partial(trainer, size, mixed),
        "Accelerator": lambda: loop(size, word, Accelerator(mixed_precision=word)),
        "Trainer, ddp": partial(trainer, size, mixed, strategy="ddp"),
        "Trainer, fsdp": partial(trainer, size, mixed, strategy="fsdp"),
    }
    if half:
        found["Trainer, megatron"] = lambda: trainer(size, mixed, strategy=MegatronStrategy())
        if find_spec("deepspeed"):
            found |= {
                f"Trainer, ZeRO-{n}": partial(trainer, size, mixed, strategy=f"deepspeed_stage_{n}") for n in (2, 3)
            }
    if find_spec("accelerate"):
        found["Accelerate"] = partial(accelerate, size, word)
    if find_spec("lightning"):
        found["Lightning"] = partial(lightning, size, mixed)
    return found


def fp8(size: Size) -> dict[str, Callable[[], float]]:
    """Return loops in bfloat16 and fp8, compiled and not."""
    return {
        "hand-written loop, bf16": partial(by_hand, size, torch.bfloat16),
        "Trainer, bf16": partial(trainer, size, "bf16-mixed"),
        "Trainer, fp8": partial(trainer, size, "fp8"),
        "hand-written loop, bf16, compiled": partial(by_hand, size, torch.bfloat16, True),
        "Trainer, bf16, compiled": partial(trainer, size, "bf16-mixed", compile=True),
        "Trainer, fp8, compiled": partial(trainer, size, "fp8", compile=True),
    }


def offload(size: Size) -> dict[str, Callable[[], float]]:
    """Return loops whose weights and optimizer are on the host."""
    return {
        "hand-written loop": partial(by_hand, size, torch.bfloat16),
        "Trainer, offload": lambda: trainer(size, "bf16-mixed", strategy=OffloadStrategy("cpu", stream=True)),
        "Trainer, fsdp_cpu_offload": partial(trainer, size, "bf16-mixed", strategy="fsdp_cpu_offload"),
    }


def compare(title: str, runs: dict[str, Callable[[], float]], rounds: int) -> None:
    """Print the times and peaks of loops."""
    peaks: dict[str, float] = {}

    def measured(name: str) -> float:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        seconds = runs[name]()
        peaks[name] = torch.cuda.max_memory_allocated() / 2**20
        return seconds

    times = interleave({name: partial(measured, name) for name in runs}, rounds)
    base = next(iter(runs))
    rows = []
    for name, seconds in times.items():
        ratio = statistics.median(mine / theirs for mine, theirs in zip(seconds, times[base], strict=True))
        rows.append([name, f"{statistics.median(seconds) * 1e3:.2f}", f"{ratio:.3f}", f"{peaks[name]:.0f}"])
    print_table([title, "ms per step", "of the hand-written loop", "peak MiB"], rows)


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=["tiny", "gpt2", "fp8", "offload"])
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device: nothing is measured.")
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(describe_machine(["torch", "lightning", "accelerate", "torchao", "deepspeed"]))
    print(torch.cuda.get_device_name())
    wide = Size(8192, 4096, 32, 4, 2048, 4, 20)
    parts: dict[str, Callable[[], dict[str, Callable[[], float]]]] = {
        "tiny": lambda: contenders(Size(64, 32, 2, 1, 16, 4, 400), half=False),
        "gpt2": lambda: contenders(Size(50304, 768, 12, 12, 1024, 16, 28), half=True),
        "fp8": lambda: fp8(wide),
        "offload": lambda: offload(Size(8192, 4096, 32, 4, 2048, 4, 12)),
    }
    for name in given.parts:
        compare(name, parts[name](), 1 if name == "offload" else given.rounds)


if __name__ == "__main__":
    main()
