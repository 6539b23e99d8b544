"""What a framework adds to the training of a small GPT on characters, alone and with logging, validation and saves.

    python benchmarks/real_model.py [--steps 200] [--rounds 5] [--threads N] [--clock cpu]

The model is nanoGPT's for a CPU: 4 layers, 4 heads, 128 channels, contexts of 64 characters, batches of 12, AdamW,
clipped gradients, a shuffled `DataLoader`. All contenders run in this process in interleaved rounds, with torch's own
number of threads; a figure is the median over rounds of the ratio to the hand-written loop of the same round. Seconds
go from the first step to the return of `fit`, the wait for the last save included. Beside them stands what does not
depend on the machine's load: operations of torch, Python calls and page faults. A last table counts page faults a step
in three consecutive fits of a large model.
"""

from __future__ import annotations

import argparse
import csv
import gc
import logging
import math
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from measuring import Bars, describe_machine, interleave, print_table
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from trainwright import CSVLogger, ModelCheckpoint, TaskModule, Trainer

LAYERS, HEADS, WIDTH, CONTEXT, BATCH_SIZE, VOCABULARY = 4, 4, 128, 64, 12, 65
CLIP, LOG_EVERY, VAL_BATCHES, NUM_CHECKS = 1.0, 10, 5, 3
HAND, OURS, LIGHTNING = "hand-written loop", "Trainwright", "Lightning"
clock: Callable[[], float] = time.perf_counter


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, time, channel)` to the same."""
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm_1(x)).split(WIDTH, 2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A GPT over characters that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean loss of inputs and targets, each `(batch, time)`."""
        inputs, targets = batch
        x = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Contexts of characters, and the same one character later."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.text = torch.randint(VOCABULARY, (num_samples + CONTEXT,), generator=generator)

    def __len__(self) -> int:
        return len(self.text) - CONTEXT

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        return self.text[idx : idx + CONTEXT], self.text[idx + 1 : idx + 1 + CONTEXT]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with nanoGPT's settings."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)


@dataclass
class Work:
    """What every contender does.

    Attributes:
        num_steps: of training.
        full: also log the loss, validate and save three times.
    """

    num_steps: int
    full: bool = False

    @property
    def check_every(self) -> int:
        """Steps from validation to validation, and from save to save."""
        return math.ceil(self.num_steps / NUM_CHECKS)

    def loaders(self) -> tuple[DataLoader[Any], DataLoader[Any]]:
        """Return those of training and of validation."""
        train = DataLoader(Text(self.num_steps * BATCH_SIZE), BATCH_SIZE, shuffle=True)
        return train, DataLoader(Text(VAL_BATCHES * BATCH_SIZE), BATCH_SIZE)


def run_by_hand(work: Work) -> float:
    """Train with the loop that everyone writes; returns seconds."""
    train, val = work.loaders()
    model = GPT()
    optimizer = make_optimizer(model)
    gc.collect()
    started = clock()
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log.csv", "w", newline="") as file:
        log = csv.writer(file)
        for step, batch in enumerate(train, start=1):
            loss = model(batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            if work.full and step % LOG_EVERY == 0:
                log.writerow([step, loss.item()])
            if work.full and step % work.check_every == 0:
                model.eval()
                with torch.inference_mode():
                    log.writerow([step, torch.stack([model(batch) for batch in val]).mean().item()])
                model.train()
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, Path(folder) / "last.pt")
        return clock() - started


def make_task(base: Any, work: Work) -> Any:
    """Return the same task as a sub-class of our TaskModule or of the LightningModule."""

    class Task(base):  # type: ignore[misc]  # either base
        def __init__(self) -> None:
            super().__init__()
            self.net = GPT()
            self.started = 0.0

        def on_train_start(self) -> None:
            gc.collect()
            self.started = clock()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self.net(batch)
            if work.full:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self)

    class Validating(Task):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.net(batch))

    return Validating() if work.full else Task()


def run_framework(kinds: tuple[Any, Any, Any, Any], work: Work) -> float:
    """Train with Trainwright or Lightning; returns seconds.

    Args:
        kinds: the task's base, the Trainer, its ModelCheckpoint and its CSV logger.
        work: what to do.
    """
    base, trainer_type, checkpoint_type, logger_type = kinds
    train, val = work.loaders()
    task = make_task(base, work)
    with tempfile.TemporaryDirectory() as folder:
        full = {
            "logger": logger_type(folder), "val_check_interval": work.check_every, "log_every_n_steps": LOG_EVERY,
            "callbacks": [checkpoint_type(every_n_train_steps=work.check_every, save_top_k=1)],
        }  # fmt: skip
        trainer = trainer_type(
            accelerator="cpu", devices=1, max_epochs=1, gradient_clip_val=CLIP, default_root_dir=folder,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=work.full,
            num_sanity_val_steps=0, **(full if work.full else {"logger": False}),
        )  # fmt: skip
        trainer.fit(task, train, val if work.full else None)
        return clock() - task.started


def contenders() -> dict[str, Callable[[Work], float]]:
    """Return what is compared; Lightning if it is installed."""
    found: dict[str, Callable[[Work], float]] = {
        HAND: run_by_hand,
        OURS: partial(run_framework, (TaskModule, Trainer, ModelCheckpoint, CSVLogger)),
    }
    if find_spec("lightning"):
        from lightning.pytorch import LightningModule
        from lightning.pytorch import Trainer as LightningTrainer
        from lightning.pytorch.callbacks import ModelCheckpoint as LightningCheckpoint
        from lightning.pytorch.loggers import CSVLogger as LightningLogger

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        kinds = (LightningModule, LightningTrainer, LightningCheckpoint, LightningLogger)
        found[LIGHTNING] = partial(run_framework, kinds)
    return found


class Operations(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
    """Counts the operations that torch carries out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one."""
        self.num += 1
        return func(*args, **(kwargs or {}))


def count(run: Callable[[Work], float], full: bool) -> tuple[float, float, float]:
    """Return operations, Python calls and page faults of one step: of 24 steps less those of 12, over 12."""

    def operations(num_steps: int) -> int:
        with Operations() as counter:
            run(Work(num_steps, full))
        return counter.num

    def calls(num_steps: int) -> int:
        num = 0

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal num
            num += event == "call"

        sys.setprofile(profile)
        try:
            run(Work(num_steps, full))
        finally:
            sys.setprofile(None)
        return num

    def faults(num_steps: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        run(Work(num_steps, full))
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    run(Work(12, full))  # what is cached at the first call
    found = [(measure(24) - measure(12)) / 12 for measure in (operations, calls, faults)]
    return found[0], found[1], found[2]


def report(num_steps: int, rounds: int, *, full: bool) -> tuple[float, float | None]:
    """Measure and print one table; returns the ratios of Trainwright and Lightning to the hand-written loop."""
    runs = contenders()
    counts = {name: count(run, full) for name, run in runs.items()}
    seconds = interleave({name: partial(run, Work(num_steps, full)) for name, run in runs.items()}, rounds)
    ratios = {
        name: statistics.median(mine / hand for mine, hand in zip(found, seconds[HAND], strict=True))
        for name, found in seconds.items()
    }
    print(f"\n{'with logging, validation and three saves' if full else 'bare'}\n")
    rows = [
        [
            name,
            f"{statistics.median(seconds[name]) / num_steps * 1e3:.2f}",
            f"{min(seconds[name]) / num_steps * 1e3:.2f}",
            f"{ratios[name]:.3f}",
            *(f"{each:.0f}" for each in counts[name]),
        ]
        for name in runs
    ]
    header = ["", "median ms a step", "least", "of the hand-written", "operations", "Python calls", "page faults"]
    print_table(header, rows)
    return ratios[OURS], ratios.get(LIGHTNING)


class Large(TaskModule):
    """100 million parameters in linear layers with AdamW.

    Attributes:
        faults: page faults of this process after each step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(24)])
        self.faults: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return a loss."""
        return cast(Tensor, self.net(batch).square().mean())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count."""
        self.faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return make_optimizer(self)


def count_faults(fit: bool, num_steps: int = 10) -> float:
    """Return the median page faults a step of `Large`, by `fit` or in a hand-written loop."""
    task, batches = Large(), torch.randn(num_steps, 8, 2048)
    if fit:
        Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        ).fit(task, batches)  # fmt: skip
    else:
        optimizer = make_optimizer(task)
        for idx, batch in enumerate(batches):
            task.training_step(batch, idx).backward()
            optimizer.step()
            optimizer.zero_grad()
            task.on_train_batch_end(None, batch, idx)
    steps = [after - before for before, after in pairwise(task.faults)]
    return statistics.median(steps[num_steps // 3 :])


def main() -> None:
    """Measure and print."""
    global clock
    parser = argparse.ArgumentParser(description="Seconds of training a small GPT over a hand-written loop.")
    parser.add_argument("--steps", type=int, default=200, help="steps in one run")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each contender")
    parser.add_argument("--threads", type=int, help="of torch; default: its own number")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: with one thread, on a busy machine"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # peers' advice about workers
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.clock == "cpu":
        clock = time.thread_time
    print(describe_machine(("torch", "lightning")))
    print(
        f"{options.rounds} interleaved rounds of {options.steps} steps, {torch.get_num_threads()} thread(s) in torch, "
        f"{sum(p.numel() for p in GPT().parameters()):,} parameters ({options.clock} clock)"
    )
    bars = Bars()
    for full, limit in ((False, 1.01), (True, 1.03)):
        ours, lightning = report(options.steps, options.rounds, full=full)
        what = "with logging, validation and saves" if full else "bare"
        bars.add(f"{what}, of the hand-written loop", ours, limit, "×")
        if lightning is not None:
            bars.add(f"{what}, of Lightning", ours / lightning, 1.0, "×")
    by_hand = count_faults(fit=False)
    in_fits = [count_faults(fit=True) for _ in range(3)]
    print_table(["page faults a step, 100 M parameters", "by hand", "fit 1", "fit 2", "fit 3"],
                [["", *(f"{each:.0f}" for each in (by_hand, *in_fits))]])  # fmt: skip
    bars.add("page faults a step of the worst of three fits, over the hand-written loop", max(in_fits) - by_hand, 0, "")
    bars.print()


if __name__ == "__main__":
    main()
