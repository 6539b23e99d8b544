"""Steps and losses on meshes of gloo processes, one thread each.

    python benchmarks/parallel.py [--part pipeline|mesh|losses] [--steps 4] [--rounds 7] [--clock wall|cpu]

`pipeline`: a step of a pipeline on two processes against torch's schedule in a hand-written loop. A GPT of 20 million
parameters is divided into two stages of three blocks. Both train in the same processes, in rounds whose order turns,
over the same micro-batches. A round's figure is the time of rank 0, from a barrier before the first step to one after
the last. The time that a rank is idle is found from steps of `M` and of `2 M` micro-batches: their difference is the
time of `M` micro-batches without the start and the end of a schedule.

`mesh`: a step of the same GPT on four processes, sharded over two and split over two, against `fully_shard` over
`parallelize_module` in a hand-written loop.

`losses`: the losses of a smaller GPT on meshes of two and four processes, against those of one process.

`--clock cpu` measures the processor time of rank 0, for a machine that others use. It shows no idle share.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ddp import Stopwatch
from measuring import Bars, describe_machine, interleave, print_table
from mesh_losses import report_losses
from sharded_loops import (
    GPT,
    HAND,
    NUM_LAYERS,
    OURS,
    WORLD_SIZE,
    Loop,
    make_batches,
    make_net,
    make_optimizer,
    sharded_and_split_by_hand,
    with_trainwright,
)
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from trainwright import Accelerator, MegatronStrategy, TaskModule, Trainer, debug_launcher
from trainwright.callbacks import Callback

MICRO_BATCHES, HALF = 4, NUM_LAYERS // 2
LONGER = "the same with twice the micro-batches"


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


def seconds(steps: int, rounds: int, clock: str) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of each loop's step in each round, and the last losses; called in each process."""
    numbers = {HAND: MICRO_BATCHES, OURS: MICRO_BATCHES, LONGER: 2 * MICRO_BATCHES}
    loops = {HAND: by_hand, OURS: partial(with_trainer, MICRO_BATCHES), LONGER: partial(with_trainer, numbers[LONGER])}
    return _measure(loops, {name: make_batches(steps * num, 0) for name, num in numbers.items()}, steps, rounds, clock)


def mesh_seconds(steps: int, rounds: int, clock: str) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the same of the loops on four processes; called in each process."""
    strategy = partial(MegatronStrategy, tp=2, dp_shard=2, weights_after_stage="none")
    loops = {HAND: sharded_and_split_by_hand, OURS: partial(with_trainwright, strategy, world_size=2 * WORLD_SIZE)}
    Accelerator(cpu=True)
    batches = make_batches(steps, dist.get_rank() // 2)  # ranks that split layers receive the same ones
    return _measure(loops, dict.fromkeys(loops, batches), steps, rounds, clock)


def _measure(
    loops: dict[str, Loop], batches: dict[str, list[Tensor]], steps: int, rounds: int, clock: str
) -> tuple[dict[str, list[float]], dict[str, float]]:
    Accelerator(cpu=True)
    torch.set_num_threads(1)
    if clock == "cpu":
        Stopwatch.clock = time.process_time
    losses: dict[str, float] = {}

    def run(name: str) -> float:
        watch = Stopwatch()
        losses[name] = loops[name](batches[name], watch)
        return watch.seconds / steps

    return interleave({name: partial(run, name) for name in loops}, rounds), losses


def report_pipeline(options: argparse.Namespace, bars: Bars) -> None:
    """Measure the pipeline and print its table."""
    found, losses = debug_launcher(seconds, (options.steps, options.rounds, options.clock), num_processes=WORLD_SIZE)
    _print(found, losses)
    bars.add("pipeline: time of a step over that of the hand-written loop", _ratio(found), 1.03, "")
    if options.clock == "wall":
        step, longer = statistics.median(found[OURS]), statistics.median(found[LONGER])
        idle, formula = 1 - (longer - step) / step, (WORLD_SIZE - 1) / (MICRO_BATCHES + WORLD_SIZE - 1)
        bars.add(f"pipeline: idle share {idle:.3f} over that of the formula, {formula:.3f}", idle / formula, 1.1, "")


def report_mesh(options: argparse.Namespace, bars: Bars) -> None:
    """Measure the mesh of four processes and print its table."""
    arguments = (options.steps, options.rounds, options.clock)
    found, losses = debug_launcher(mesh_seconds, arguments, num_processes=2 * WORLD_SIZE)
    _print(found, losses)
    bars.add("dp 2 × tp 2: time of a step over that of the hand-written loop", _ratio(found), 1.03, "")


def _print(found: dict[str, list[float]], losses: dict[str, float]) -> None:
    rows = [[name, f"{statistics.median(v) * 1e3:.1f}", f"{losses[name]:.6f}"] for name, v in found.items()]
    print_table(["loop", "median, ms a step", "last loss"], rows)


def _ratio(found: dict[str, list[float]]) -> float:
    return statistics.median(ours / hand for ours, hand in zip(found[OURS], found[HAND], strict=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Steps and losses on meshes of processes.")
    parser.add_argument("--part", choices=["pipeline", "mesh", "losses"], help="only this one; default: all")
    parser.add_argument("--steps", type=int, default=4, help="steps in one run")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each loop")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="the clock of a round")
    options = parser.parse_args()
    print(f"\n{describe_machine()}\n")
    bars = Bars()
    if options.part in (None, "pipeline"):
        report_pipeline(options, bars)
    if options.part in (None, "mesh"):
        report_mesh(options, bars)
    if options.part in (None, "losses"):
        report_losses(bars)
    bars.print()


if __name__ == "__main__":
    main()
