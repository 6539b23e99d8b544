"""A step of a pipeline against torch's schedule in a hand-written loop: two gloo processes, one thread each.

    python benchmarks/parallel.py [--steps 4] [--rounds 7]

A GPT of 20 million parameters is divided into two stages of three blocks. Both train in the same processes, in rounds
whose order turns, over the same micro-batches. A round's figure is the time of rank 0, from a barrier before the first
step to one after the last. The time that a rank is idle is found from steps of `M` and of `2 M` micro-batches: their
difference is the time of `M` micro-batches without the start and the end of a schedule.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ddp import Stopwatch
from measuring import Bars, describe_machine, interleave, print_table
from sharded_loops import GPT, NUM_LAYERS, WORLD_SIZE, make_batches, make_net, make_optimizer
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from trainwright import Accelerator, MegatronStrategy, TaskModule, Trainer, debug_launcher
from trainwright.callbacks import Callback

MICRO_BATCHES, HALF = 4, NUM_LAYERS // 2
HAND, OURS, LONGER = "hand-written loop", "Trainwright, Trainer", "the same with twice the micro-batches"


class Front(nn.Module):
    """The first half of the network."""

    def __init__(self, net: GPT) -> None:
        super().__init__()
        self.tokens, self.places, self.blocks = net.tokens, net.places, net.blocks[:HALF]

    def forward(self, batch: Tensor) -> Tensor:
        """Map token ids to activations."""
        inputs = batch[:, :-1]
        x: Tensor = self.tokens(inputs) + self.places.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x


class Back(nn.Module):
    """The second half of the network."""

    def __init__(self, net: GPT) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = net.blocks[HALF:], net.norm, net.head

    def forward(self, x: Tensor) -> Tensor:
        """Map activations to logits."""
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(logits: Tensor, batch: Tensor) -> Tensor:
    """Return the mean loss of a micro-batch."""
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def by_hand(batches: list[Tensor], watch: Stopwatch) -> float:
    """Train with one of torch's schedules."""
    rank, net = dist.get_rank(), make_net()
    half: Any = Back(net) if rank else Front(net)
    tied = (half.head if rank else half.tokens).weight
    stage = PipelineStage(half, rank, WORLD_SIZE, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = make_optimizer(half)
    losses: list[Tensor] = []
    watch.start()
    for i in range(0, len(batches), MICRO_BATCHES):
        whole = torch.cat(batches[i : i + MICRO_BATCHES])
        losses.clear()
        if rank:
            schedule.step(target=whole, losses=losses)
        else:
            schedule.step(whole)
        dist.all_reduce(tied.grad)
        optimizer.step()
        optimizer.zero_grad()
    watch.stop()
    found = torch.stack(losses).mean().detach() if rank else torch.zeros(())
    dist.broadcast(found, src=1)
    return float(found)


class Task(TaskModule):
    """The same training."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.net(batch)
        return loss

    def pipeline_stages(self) -> list[list[nn.Module]]:
        """Return the same halves. The model reads a weight of `places` in every stage, and calls it in none."""
        net = self.net
        front = [net.tokens, net.places, *net.blocks[:HALF]]
        return [front, [*net.blocks[HALF:], net.places, net.norm, net.head]]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return make_optimizer(self)


class Watched(Callback):
    """Times a training, and keeps its last loss."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch, self.loss = watch, torch.zeros(())

    def on_train_start(self, trainer: Any, task: Any) -> None:
        """Start the watch."""
        self.watch.start()

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        """Keep the loss."""
        self.loss = result.loss

    def on_train_end(self, trainer: Any, task: Any) -> None:
        """Stop the watch."""
        self.watch.stop()


def with_trainer(num: int, batches: list[Tensor], watch: Stopwatch) -> float:
    """Train through the Trainer, with `num` micro-batches in a step."""
    watched = Watched(watch)
    with contextlib.redirect_stdout(io.StringIO()):  # it says where its rank comes from, every time
        Trainer(
            strategy=MegatronStrategy(pp=WORLD_SIZE, weights_after_stage="none"),
            accelerator="cpu",
            devices=WORLD_SIZE,
            max_epochs=1,
            accumulate_grad_batches=num,
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            callbacks=[watched],
        ).fit(Task(), batches)
    return float(watched.loss)


def seconds(steps: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of each loop's step in each round, and the last losses; called in each process."""
    Accelerator(cpu=True)
    torch.set_num_threads(1)
    losses: dict[str, float] = {}

    def run(name: str, loop: Callable[[list[Tensor], Stopwatch], float], num: int) -> float:
        watch = Stopwatch()
        losses[name] = loop(make_batches(steps * num, 0), watch)
        return watch.seconds / steps

    loops = {
        HAND: partial(run, HAND, by_hand, MICRO_BATCHES),
        OURS: partial(run, OURS, partial(with_trainer, MICRO_BATCHES), MICRO_BATCHES),
        LONGER: partial(run, LONGER, partial(with_trainer, 2 * MICRO_BATCHES), 2 * MICRO_BATCHES),
    }
    return interleave(loops, rounds), losses


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="A step of a pipeline against a hand-written one.")
    parser.add_argument("--steps", type=int, default=4, help="steps in one run")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each loop")
    options = parser.parse_args()
    print(f"\n{describe_machine()}")
    found, losses = debug_launcher(seconds, (options.steps, options.rounds), num_processes=WORLD_SIZE)
    rows = [[name, f"{statistics.median(v) * 1e3:.1f}", f"{losses[name]:.6f}"] for name, v in found.items()]
    print_table(["loop", "median, ms a step", "last loss"], rows)
    bars = Bars()
    ratio = statistics.median(ours / hand for ours, hand in zip(found[OURS], found[HAND], strict=True))
    bars.add("pipeline: time of a step over that of the hand-written loop", ratio, 1.03, "")
    step, longer = statistics.median(found[OURS]), statistics.median(found[LONGER])
    idle, formula = 1 - (longer - step) / step, (WORLD_SIZE - 1) / (MICRO_BATCHES + WORLD_SIZE - 1)
    bars.add(f"pipeline: idle share {idle:.3f} over that of the formula, {formula:.3f}", idle / formula, 1.1, "")
    bars.print()


if __name__ == "__main__":
    main()
