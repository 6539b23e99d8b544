"""What `trainwright profile --apply` gains: a step of the tuned configuration against a hand-written loop.

    python benchmarks/tuned.py [--models nanoGPT LSTM] [--rounds 4] [--minutes 6]

Five models: nanoGPT's for a CPU, ResNet-18 on images of 32 × 32, a small BERT of transformers, a U-Net and an LSTM
(`tuned_models.py`). `--apply` writes the tuned configuration first. Then the loop, the Trainer without changes and the
tuned Trainer run in interleaved rounds in this process. A figure is the median over rounds of the ratio to the loop of
the same round, for a mean step after the first ones. The largest difference of losses is the one that `--apply` found.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from measuring import Bars, describe_machine, interleave, print_table
from torch import nn
from tuned_models import CLIP, WORKS, Work

from trainwright import Callback, Trainer, seed_everything

WARM_UP, STEPS = 15, 60
HAND, PLAIN, TUNED = "hand-written loop", "Trainwright", "tuned"
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
}


@dataclass
class Tuned:
    """What `--apply` has found.

    Attributes:
        config: the configuration that it wrote. Empty if no change was kept.
        kept: the changes that are in it.
        losses: largest difference of losses, relative to the mean loss.
        seconds: that the command took.
    """

    config: dict[str, Any] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    losses: float = 0.0
    seconds: float = 0.0

    def arguments(self, section: str) -> dict[str, Any]:
        """Return the arguments of the task or the data."""
        arguments: dict[str, Any] = self.config.get(section, {}).get("init_args", {})
        return arguments


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


class Clock(Callback):
    """Measures the steps after the first ones.

    Attributes:
        seconds: of a step, on average.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.num_steps, self.started, self.seconds = device, 0, 0.0, 0.0

    def end_step(self) -> None:
        """Count a step."""
        self.num_steps += 1
        if self.num_steps == WARM_UP:
            synchronize(self.device)
            self.started = time.perf_counter()
        elif self.num_steps == WARM_UP + STEPS:
            synchronize(self.device)
            self.seconds = (time.perf_counter() - self.started) / STEPS

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        self.end_step()


def by_hand(work: Work, device: torch.device) -> float:
    """Train in a hand-written loop; return the seconds of a step."""
    seed_everything(0)
    net, clock = work.task().to(device), Clock(device)
    optimizer = net.configure_optimizers()
    net.train()
    for batch in work.data().train_dataloader():
        net.loss([part.to(device, non_blocking=True) for part in batch]).backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        clock.end_step()
        if clock.seconds:
            break
    return clock.seconds


def fit(work: Work, device: torch.device, tuned: Tuned) -> float:
    """Train with the Trainer and the changes of `--apply`; return the seconds of a step."""
    seed_everything(0)
    clock, trainer = Clock(device), tuned.config.get("trainer", {})
    changed = {name: trainer[name] for name in ("compile", "precision") if name in trainer}
    task, data = work.task(**tuned.arguments("task")), work.data(**tuned.arguments("data"))
    Trainer(
        accelerator=device.type, devices=1, max_steps=WARM_UP + STEPS, gradient_clip_val=CLIP, callbacks=[clock],
        **QUIET, **changed,
    ).fit(task, datamodule=data)  # fmt: skip
    return clock.seconds


def apply(work: Work, device: torch.device, minutes: float) -> Tuned:
    """Run `trainwright profile --apply` in a temporary folder."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "config.yaml").write_text(work.config(device.type))
        words = ["profile", "config.yaml", "--apply", "--steps", "30", "--minutes", str(minutes), "--json"]
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "trainwright", *words],
            cwd=folder,
            env=variables,
            check=True,
            stdout=subprocess.PIPE,
        )
        rows = json.loads(done.stdout)["rows"]
        for row in rows:
            if row["before"] is not None:
                print(f"{row['remedy']}: {row['before']:.4g} to {row['after']:.4g} {row['unit']}; {row['result']}")
        kept = [row for row in rows if row["kept"]]
        file = folder / "config.tuned.yaml"
        return Tuned(
            config=yaml.safe_load(file.read_text()) if file.exists() else {},
            kept=[row["remedy"] for row in kept],
            losses=max((row["losses"] or 0.0 for row in kept), default=0.0),
            seconds=time.perf_counter() - began,
        )


def compare(work: Work, device: torch.device, minutes: float, rounds: int) -> tuple[Tuned, dict[str, list[float]]]:
    """Tune, and return what was found and the seconds of a step of each contender in each round."""
    tuned = apply(work, device, minutes)
    contenders = {
        HAND: partial(by_hand, work, device),
        PLAIN: partial(fit, work, device, Tuned()),
    }
    if tuned.kept:
        contenders[TUNED] = partial(fit, work, device, tuned)
    seconds = interleave(contenders, rounds)
    seconds.setdefault(TUNED, seconds[PLAIN])  # nothing was kept: the same configuration
    return tuned, seconds


def ratio(seconds: dict[str, list[float]], name: str) -> float:
    """Return the median over rounds of a contender's time over that of the hand-written loop."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[HAND], strict=True))


def main() -> None:
    """Tune, measure and print."""
    parser = argparse.ArgumentParser(description="A tuned configuration over a hand-written loop.")
    parser.add_argument("--models", nargs="+", default=[work.name for work in WORKS], help="default: all five")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=6, help="time of --apply for each model")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    print(describe_machine(("torch", "trainwright", "transformers")))
    rows, bars = [], Bars()
    ratios, seconds_of_apply = [], []
    for work in WORKS:
        if work.name not in options.models:
            continue
        tuned, seconds = compare(work, device, options.minutes, options.rounds)
        seconds_of_apply.append(tuned.seconds)
        ratios.append(ratio(seconds, TUNED))
        rows.append([
            work.name,
            ", ".join(tuned.kept) or "nothing",
            f"{1000 * statistics.median(seconds[HAND]):.1f}",
            f"{ratio(seconds, PLAIN):.3f}",
            f"{ratios[-1]:.3f}",
            f"{tuned.losses:.1g}",
            f"{tuned.seconds:.0f}",
        ])  # fmt: skip
        print_table(["model", "kept", "loop, ms", "Trainwright", "tuned", "losses", "s of --apply"], rows[-1:])
        bars.add(f"{work.name}, tuned, of the hand-written loop", ratios[-1], 1.0, "×")
    print()
    print_table(["model", "kept", "loop, ms", "Trainwright", "tuned", "losses", "s of --apply"], rows)
    if len(ratios) >= 3:
        bars.add("third best of the tuned models, of the hand-written loop", sorted(ratios)[2], 0.9, "×")
    # The first trial and a comparison that takes longer than expected may exceed the time.
    bars.add("longest --apply over its time", max(seconds_of_apply) / (60 * options.minutes), 1.0, "×")
    bars.print()


if __name__ == "__main__":
    main()
