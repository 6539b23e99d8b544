"""Loops that are drawn by chance, and the weights that their micro-batches should have in each optimizer step."""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from trainwright import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin
from trainwright.accelerator.handlers import GradScalerKwargs
from trainwright.core.errors import TrainwrightWarning

_MOST = 200  # micro-batches of a rank
KINDS = ("plain", "fetch", "parts", "skip first", "skip some", "hold back", "parts by chance")
WEIGHTS = ("steps", "mean", "items")


@dataclass(frozen=True)
class Program:
    """A loop on one or several ranks.

    Micro-batch i of rank r has a gradient of 1 in element `r · 200 + i` alone, and the optimizer subtracts the gradient
    from weights of 0. The weights thus show which micro-batches a step has used, and with which weights.

    Attributes:
        num_steps: Micro-batches of a group.
        weights: How losses are weighed, one of `WEIGHTS`.
        passes: Number of batches of a rank after which each pass is left. None: it is read to its end.
        num_batches: Batches of the loader, for all ranks together.
        kind: What the loop does with its batches, one of `KINDS`.
        size: Batches that are fetched ahead, parts of each batch, or every which batch is skipped.
        num_models: Models that are trained alternately.
        texts: Batches are texts instead of tensors.
        counts: Items of the micro-batches, in turn.
        clip: The greatest norm of a gradient, or None.
        precision: `"no"` or `"fp16"`.
        even_batches: See `DataLoaderConfiguration`.
        sync_each_batch: See `GradientAccumulationPlugin`.
        items_as_tensors: Numbers of items are tensors.
    """

    num_steps: int
    weights: str
    passes: list[int | None]
    num_batches: int
    kind: str
    size: int
    num_models: int = 1
    texts: bool = False
    counts: tuple[int, ...] = (1,)
    clip: float | None = None
    precision: str = "no"
    even_batches: Any = True
    sync_each_batch: bool = False
    items_as_tensors: bool = False

    @staticmethod
    def drawn(generator: random.Random) -> Program:
        return Program(
            num_steps=generator.randint(1, 4),
            weights=generator.choice(WEIGHTS),
            passes=[generator.choice([None, 1, 2, 3, 5]) for _ in range(generator.randint(1, 3))],
            num_batches=generator.randint(1, 11),
            kind=generator.choice(KINDS),
            size=generator.randint(2, 4),
            num_models=generator.randint(1, 2),
            texts=generator.random() < 0.3,
            counts=tuple(generator.randint(1, 5) for _ in range(generator.randint(1, 3))),
            clip=generator.choice([None, None, 0.2]),
            precision=generator.choice(["no", "no", "fp16"]),
            even_batches=generator.choice([True, "pad"]),
            sync_each_batch=generator.random() < 0.2,
            items_as_tensors=generator.random() < 0.3,
        )

    def items_of(self, number: int, rank: int) -> int:
        return self.counts[(number + rank) % len(self.counts)]

    def num_real(self, batch: int, world: int) -> int:
        """Number of ranks whose batch in a round is not padding."""
        return world if self.even_batches is True else min(world, self.num_batches - batch * world)

    @property
    def has_certain_end(self) -> bool:
        """True if the loop shows which micro-batch is the last one of a pass."""
        if self.kind == "fetch":
            return self.passes == [None] * len(self.passes)
        return self.kind == "plain" or (self.kind == "parts" and self.num_batches > 1)


def micro_batches_of_a_pass(program: Program, batches: Iterable[Any], *, is_first: bool) -> Iterator[int]:
    """Yield the number of its batch for each micro-batch that the loop begins, where it begins."""
    size, batch = program.size, -1
    if program.kind == "fetch":
        source = iter(batches)
        while held := list(itertools.islice(source, min(size, program.num_steps))):
            for _ in held:
                batch += 1
                yield batch
    elif program.kind == "hold back":
        for batch, _ in enumerate(batches):
            if batch:
                yield batch - 1
        if batch >= 0:
            yield batch
    else:
        for batch, _ in enumerate(batches):
            if program.kind == "skip first" and is_first and batch < size:
                continue
            if program.kind == "skip some" and batch % size == 0:
                continue
            num_parts = {"parts": size, "parts by chance": 1 + (7 * batch) % size}.get(program.kind, 1)
            yield from [batch] * num_parts


@dataclass(frozen=True)
class Begun:
    """A micro-batch: its number, the number of its batch, and whether it is the last one of a complete pass."""

    number: int
    batch: int
    is_last: bool


def micro_batches(program: Program, loader: Any, num_rounds: int) -> Iterator[Begun]:
    """Yield all micro-batches of a program where the loop begins them."""
    number = 0
    for nth, leave_after in enumerate(program.passes):
        length = num_rounds if leave_after is None else min(leave_after, num_rounds)
        batches = loader if leave_after is None else itertools.islice(loader, leave_after)
        total = sum(1 for _ in micro_batches_of_a_pass(program, range(length), is_first=nth == 0))
        for i, batch in enumerate(micro_batches_of_a_pass(program, batches, is_first=nth == 0), start=1):
            yield Begun(number, batch, is_last=i == total and length == num_rounds)
            number += 1


def run(program: Program, strategy: str = "auto") -> tuple[list[dict[int, float]], list[list[Begun]]]:
    """Run a program. Return the last model's steps with the weights of their micro-batches, and the right groups."""
    short: Any = program.weights if program.weights in ("steps", "mean") else None
    plugin = GradientAccumulationPlugin(program.num_steps, short_group=short, sync_each_batch=program.sync_each_batch)
    accelerator = Accelerator(
        cpu=True,
        strategy=strategy,
        mixed_precision=program.precision,
        gradient_accumulation_plugin=plugin,
        dataloader_config=DataLoaderConfiguration(even_batches=program.even_batches),
        kwargs_handlers=[GradScalerKwargs(init_scale=256.0)],  # with the default, the first step overflows
    )
    rank, world = accelerator.process_index, accelerator.num_processes
    nets = [nn.Linear(_MOST * world, 1, bias=False) for _ in range(program.num_models)]
    for net in nets:
        nn.init.zeros_(net.weight)
    optimizers: Any = [torch.optim.SGD(net.parameters(), lr=1.0) for net in nets]
    data: Any = [f"text {i}" for i in range(program.num_batches)] if program.texts else torch.ones(program.num_batches)
    *prepared, loader = accelerator.prepare(*nets, *optimizers, DataLoader(data))
    models, optimizers = prepared[: program.num_models], prepared[program.num_models :]
    steps: list[dict[int, float]] = []
    groups: list[list[Begun]] = [[]]
    for begun in micro_batches(program, loader, len(loader)):
        items = program.items_of(begun.number, rank)
        num_items: Any = torch.tensor(items) if program.items_as_tensors else items
        rows = torch.tensor([rank * _MOST + begun.number] * items)
        for model, optimizer in zip(models, optimizers, strict=True):
            with accelerator.accumulate(model):
                loss = model(nn.functional.one_hot(rows, _MOST * world).float()).mean()
                accelerator.backward(loss, num_items=num_items if program.weights == "items" else None)
                if accelerator.sync_gradients and program.clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), program.clip)
                optimizer.step()
                optimizer.zero_grad()
        if accelerator.sync_gradients:
            state = accelerator.get_state_dict(models[-1])
            weights = -next(iter(state.values()))[0] if state else torch.zeros(0)  # on the main process
            known = set().union(*steps)
            steps.append({at: weights[at].item() for at in weights.nonzero().flatten().tolist() if at not in known})
        groups[-1].append(begun)
        if begun.is_last or len(groups[-1]) == program.num_steps:
            groups.append([])
    return steps, groups


def weights_of(program: Program, group: list[Begun], world: int) -> dict[int, float]:
    """Return the weights that the micro-batches of a group should have in the gradient."""
    real = [
        (rank, begun.number) for begun in group for rank in range(world) if rank < program.num_real(begun.batch, world)
    ]
    if program.weights == "items":
        total = sum(program.items_of(number, rank) for rank, number in real)
        found = {rank * _MOST + number: program.items_of(number, rank) / total for rank, number in real}
    else:
        divisor = len(group) if program.weights == "mean" else program.num_steps
        found = {rank * _MOST + number: len(group) / (divisor * len(real)) for rank, number in real}
    norm = math.sqrt(sum(weight**2 for weight in found.values()))
    factor = 1.0 if program.clip is None else min(1.0, program.clip / (norm + 1e-6))
    return {at: weight * factor for at, weight in found.items()}


def difference(program: Program, strategy: str = "auto", world: int = 1) -> str:
    """Run a program. Return what differs from the weights that its micro-batches should have, or an empty text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainwrightWarning)
        steps, groups = run(program, strategy)
    left = groups.pop()
    if not program.has_certain_end:
        # Nothing is dropped or doubled, and no group is too large. The steps show the groups.
        begun = [one for group in groups for one in group] + left
        sizes = [len({at % _MOST for at in step}) for step in steps]
        if any(size > program.num_steps for size in sizes) or not 0 <= len(begun) - sum(sizes) < program.num_steps:
            return f"{program}: steps of {sizes} micro-batches of {len(begun)}"
        ends = list(itertools.accumulate(sizes, initial=0))
        groups = [begun[start:stop] for start, stop in itertools.pairwise(ends)]
        if program.kind != "parts by chance" and program.even_batches == "pad":
            return ""  # it is ambiguous which micro-batch is padding; a warning says so
    expected = [weights_of(program, group, world) for group in groups]
    tolerance = 2e-3 if program.precision == "fp16" else 2e-6
    if len(steps) != len(expected):
        return f"{program}: {len(steps)} steps, not {len(expected)}"
    for number, (step, right) in enumerate(zip(steps, expected, strict=True)):
        if step.keys() != right.keys() or any(abs(step[at] - right[at]) > tolerance for at in right):
            return f"{program}: step {number} is {step}, not {right}"
    return ""


def differences(strategy: str, seed: int, number: int) -> list[str]:
    """Run programs on all ranks. Return the differences that the main rank has found."""
    generator = random.Random(seed)
    found = []
    for _ in range(number):
        program = Program.drawn(generator)
        if strategy.startswith("deepspeed"):  # which has no float16 on the CPU, and refuses `sync_each_batch`
            program = replace(program, precision="no", sync_each_batch=False)
        state = Accelerator(cpu=True, strategy=strategy).state
        text = difference(program, strategy, state.num_processes)
        if text and state.is_main_process:
            found.append(text)
    return found
