"""Losses of the same training on meshes of gloo processes and in one process, for `parallel.py --part losses`.

A row of the table is a control: one process with a learning rate that is 1 % higher must be outside of the bar.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
import torch.distributed as dist
from measuring import Bars, print_table
from sharded_loops import Block, plan_by_names
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from trainwright import Accelerator, MegatronStrategy, TaskModule, Trainer, debug_launcher
from trainwright.callbacks import Callback
from trainwright.strategies.megatron.runner import SCHEDULES

SMALL, LENGTH, SYMBOLS, ROWS, STEPS = 64, 32, 256, 8, 20
FIRST, LATER = 1e-6, 1e-4  # the largest difference from one process in the first step, and in any

# name → sizes of the mesh, and the schedule of its pipeline
MESHES: dict[str, dict[str, Any]] = {
    **{f"pp 2, {schedule}": {"pp": 2, "schedule": schedule} for schedule in SCHEDULES},
    "pp 2 × tp 2": {"pp": 2, "tp": 2},
    "dp 2 × pp 2": {"pp": 2, "dp_shard": 2},
    "dp 2 × tp 2": {"tp": 2, "dp_shard": 2},
    "cp 2": {"cp": 2},
    "cp 2 × dp 2": {"cp": 2, "dp_shard": 2},
}


class Speaker(TaskModule):
    """A GPT of four blocks, which receives tokens, targets and positions."""

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lr = lr
        self.tokens, self.places = nn.Embedding(SYMBOLS, SMALL), nn.Embedding(LENGTH, SMALL)
        self.blocks = nn.ModuleList(Block(SMALL) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(SMALL), nn.Linear(SMALL, SYMBOLS)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return logits."""
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean loss of all positions."""
        tokens, targets, positions = batch
        return functional.cross_entropy(self(tokens, positions).flatten(0, 1), targets.flatten())

    def split_sequences(self, batch: Any, split: Any) -> Any:
        """Return this rank's part of each tensor."""
        return [split(tensor) for tensor in batch]

    def tensor_parallel_plan(self, mesh: Any) -> Any:
        """Return the plan of the blocks."""
        return plan_by_names()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Losses(Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        """Keep a copy: a step may reuse its tensor."""
        self.found.append(result.loss.detach().clone().reshape(()))


def losses_of(strategy: Any, num_ranks: int, data_ranks: int, **settings: float) -> Tensor:
    """Return the loss of each step, the mean over this process's group."""
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(SYMBOLS, (ROWS * STEPS, 1 + LENGTH), generator=generator)
    samples: Any = [(text[:-1], text[1:], torch.arange(LENGTH)) for text in texts]
    kept = Losses()
    with contextlib.redirect_stdout(io.StringIO()):
        Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=num_ranks,
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            callbacks=[kept],
        ).fit(Speaker(**settings), DataLoader(samples, batch_size=ROWS // data_ranks))
    found = torch.stack(kept.found).double()
    if num_ranks > 1:
        dist.all_reduce(found)
        found /= num_ranks
    return found


def losses_on_mesh(sizes: dict[str, Any], num_ranks: int) -> list[float]:
    """Return the loss of each step; called in each process."""
    Accelerator(cpu=True)
    torch.set_num_threads(1)
    data_ranks = sizes.get("dp_shard", 1)
    parts = {"num_micro_batches": ROWS // data_ranks} if "pp" in sizes else {}
    strategy = MegatronStrategy(**{"dp_shard": 1} | sizes | parts, weights_after_stage="none")
    return losses_of(strategy, num_ranks, data_ranks).tolist()


def report_losses(bars: Bars) -> None:
    """Train on each mesh and print how far its losses are from those of one process."""
    wanted, rows = losses_of("single", 1, 1), []
    for name, sizes in MESHES.items():
        num_ranks = 1
        for size in sizes.values():
            num_ranks *= size if isinstance(size, int) else 1
        losses = debug_launcher(losses_on_mesh, (sizes, num_ranks), num_processes=num_ranks)
        found = torch.tensor(losses, dtype=torch.float64)
        apart = (found - wanted).abs()
        rows.append([name, str(num_ranks), f"{found[0]:.6f}", f"{apart[0]:.1e}", f"{apart.max():.1e}"])
        bars.add(f"{name}: first loss, distance from one process", float(apart[0]), FIRST, "")
        bars.add(f"{name}: largest distance in {STEPS} steps", float(apart.max()), LATER, "")
    control = (losses_of("single", 1, 1, lr=1.01e-3) - wanted).abs()
    rows.append(["control: learning rate + 1 %", "1", "", f"{control[0]:.1e}", f"{control.max():.1e}"])
    bars.add("control: the bar over its largest distance", LATER / float(control.max()), 1.0, "")
    print(f"\nOne process: {wanted[0]:.6f} in the first step, {wanted[-1]:.6f} in the last one.\n")
    print_table(["mesh", "processes", "first loss", "distance", f"largest of {STEPS}"], rows)
