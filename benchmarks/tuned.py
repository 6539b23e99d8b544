"""What `trainwright profile --apply` gains: a step of the tuned configuration against a hand-written loop.

    python benchmarks/tuned.py [--rounds 4]

Two models: nanoGPT's for a CPU (`real_model.py`) and the classifier of the template. `--apply` writes the tuned
configuration first. Then the loop, the Trainer without changes and the tuned Trainer run in interleaved rounds in this
process. A figure is the median over rounds of the ratio to the loop of the same round. Seconds are those of 100 steps
after 50 others (nanoGPT), or the median of epochs of 20 steps without the first (classifier).
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from measuring import describe_machine, interleave, print_table
from real_model import BATCH_SIZE, CLIP, GPT, Text, make_optimizer
from torch import nn
from torch.utils.data import DataLoader

from trainwright import Callback, DataModule, TaskModule, Trainer, seed_everything

WARMUP, STEPS, EPOCHS = 50, 100, 6
HAND, PLAIN, TUNED = "hand-written loop", "Trainwright", "tuned"
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
}


class Net(TaskModule):
    """nanoGPT's model, with the arguments that `--apply` may set."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.model, self.fused = GPT(), fused

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        loss: torch.Tensor = self.model(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the loop."""
        optimizer = make_optimizer(self)
        for group in optimizer.param_groups:
            group["fused"] = self.fused or None
        return optimizer


class Characters(DataModule):
    """Its data."""

    def __init__(self, num_workers: int = 0) -> None:
        super().__init__()
        self.num_workers = num_workers

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a shuffled loader."""
        samples = Text((WARMUP + STEPS) * BATCH_SIZE)
        return DataLoader(samples, BATCH_SIZE, shuffle=True, num_workers=self.num_workers)


class Clock(Callback):
    """Notes the time after each step and at the start of each epoch."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.starts: list[float] = []

    def on_train_epoch_start(self, trainer: Any, task: Any) -> None:
        self.starts.append(time.perf_counter())

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        self.steps.append(time.perf_counter())


def step_time(clock: Clock) -> float:
    """Return the seconds of a step."""
    if len(clock.starts) == 1:
        return (clock.steps[-1] - clock.steps[WARMUP - 1]) / (len(clock.steps) - WARMUP)
    per_epoch = len(clock.steps) // len(clock.starts)
    ends = clock.steps[per_epoch - 1 :: per_epoch]
    return statistics.median(end - start for start, end in list(zip(clock.starts, ends, strict=True))[1:]) / per_epoch


def hand_gpt() -> float:
    """Train nanoGPT by hand; return the seconds of a step."""
    torch.manual_seed(0)
    model, clock = GPT(), Clock()
    optimizer = make_optimizer(model)
    clock.starts.append(time.perf_counter())
    for batch in Characters().train_dataloader():
        model(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        clock.steps.append(time.perf_counter())
    return step_time(clock)


def hand_classifier() -> float:
    """Train the classifier of the template by hand; return the seconds of a step."""
    seed_everything(0)
    project = importlib.import_module("digits.task")
    data = importlib.import_module("digits.data").DigitsData()
    clock = Clock()
    data.prepare_data()
    data.setup("fit")
    model = project.DigitsClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    loader = data.train_dataloader()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=EPOCHS * len(loader))
    model.train()
    for _ in range(EPOCHS):
        clock.starts.append(time.perf_counter())
        for images, targets in loader:
            nn.functional.cross_entropy(model(project.distort(images)), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            clock.steps.append(time.perf_counter())
    return step_time(clock)


def fit(make_task: Callable[..., Any], make_data: Callable[..., Any], config: dict[str, Any], **options: Any) -> float:
    """Train with the Trainer and the settings that `--apply` may change; return the seconds of a step."""
    seed_everything(0)
    clock, trainer = Clock(), config.get("trainer", {})
    changed = {name: trainer[name] for name in ("compile", "precision") if name in trainer}
    task = {name: value for name, value in config.get("task", {}).get("init_args", {}).items() if name == "fused"}
    data = {name: value for name, value in config.get("data", {}).get("init_args", {}).items() if name == "num_workers"}
    Trainer(callbacks=[clock], **QUIET, **changed, **options).fit(make_task(**task), datamodule=make_data(**data))
    return step_time(clock)


def tuned(folder: Path) -> dict[str, Any]:
    """Run `trainwright profile --apply` in a folder, show its table, and return the configuration that it wrote."""
    words = ["profile", "config.yaml", "--apply", "--steps", "40"]
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, "-m", "trainwright", *words], cwd=folder, env=variables, check=True)
    file = folder / "config.tuned.yaml"
    found: dict[str, Any] = yaml.safe_load(file.read_text()) if file.exists() else {}
    return found


def main() -> None:
    """Tune, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    print(describe_machine(("torch", "trainwright")))
    with tempfile.TemporaryDirectory() as made:
        gpt = Path(made, "gpt")
        gpt.mkdir()
        trainer = f"trainer: {{accelerator: cpu, devices: 1, gradient_clip_val: {CLIP}}}"
        (gpt / "config.yaml").write_text(f"{trainer}\ntask: tuned.Net\ndata: tuned.Characters\n")
        subprocess.run(
            [sys.executable, "-m", "trainwright", "new", "digits"], cwd=made, check=True, capture_output=True
        )
        digits = Path(made, "digits")
        sys.path.insert(0, str(digits / "src"))
        classifier = partial(
            fit,
            importlib.import_module("digits.task").DigitsClassifier,
            importlib.import_module("digits.data").DigitsData,
        )
        options = {"max_epochs": EPOCHS}
        model = partial(fit, Net, Characters)
        rows = []
        for name, hand, ours, more, folder in (
            ("nanoGPT", hand_gpt, model, {"max_epochs": 1, "gradient_clip_val": CLIP}, gpt),
            ("classifier", hand_classifier, classifier, options, digits),
        ):
            config = tuned(folder)
            contenders = {HAND: hand, PLAIN: partial(ours, {}, **more), TUNED: partial(ours, config, **more)}
            seconds = interleave(contenders, rounds)
            for each in (HAND, PLAIN, TUNED):
                ratios = [a / b for a, b in zip(seconds[each], seconds[HAND], strict=True)]
                ms = 1000 * statistics.median(seconds[each])
                rows.append([name, each, f"{ms:.2f} ms", f"{statistics.median(ratios):.3f}"])
    print_table(["model", "", "step", "of the loop"], rows)


if __name__ == "__main__":
    main()
