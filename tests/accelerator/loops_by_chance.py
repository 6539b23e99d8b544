"""Loops that are drawn by chance, and the weights that their micro-batches should have in each optimizer step."""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.data import DataLoader, IterableDataset

from tests.contracts.strategies import STRATEGIES
from trainwright import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin, PartialState
from trainwright.accelerator.handlers import GradScalerKwargs
from trainwright.core.errors import TrainwrightWarning
from trainwright.data import shard_info

_MOST = 200  # micro-batches of a rank
KINDS = ("plain", "fetch", "parts", "skip first", "skip some", "hold back", "parts by chance")
WEIGHTS = ("steps", "mean", "items")
DATA = ("tensors", "texts", "stream", "shares")
BLOCKS = ("accumulate", "accumulate", "skipped", "no_sync", "trigger")


@dataclass(frozen=True)
class Program:
    """A loop on one or several ranks.

    Micro-batch i of rank r has a gradient of 1 in element `r · 200 + i` alone, and the optimizer subtracts the gradient
    from weights of 0. The weights thus show which micro-batches a step has used, and with which weights.

    Attributes:
        num_steps: Micro-batches of a group.
        weights: How losses are weighed, one of `WEIGHTS`.
        passes: Number of batches of a rank after which each pass is left. None: it is read to its end.
        num_batches: Batches of the loader, for all ranks together, or with `"shares"` for the first rank.
        kind: What the loop does with its batches, one of `KINDS`.
        size: Batches that are fetched ahead, parts of each batch, or every which batch or block is skipped.
        data: What the loader reads, one of `DATA`. `"shares"`: each rank has a stream of another length.
        blocks: `"accumulate"`, `"skipped"`: some of these blocks are left with `continue`, or else the loop divides
            losses by itself and averages gradients in its last one with `no_sync` or `trigger_sync_in_backward`.
        resumes_after: Number of steps after which the loop is saved and continues in new objects. None: never.
        skips: The resumed loop calls `skip_first_batches`.
        num_models: Models that are trained alternately.
        num_optimizers: Optimizers of each model.
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
    data: str = "tensors"
    blocks: str = "accumulate"
    resumes_after: int | None = None
    skips: bool = False
    num_models: int = 1
    num_optimizers: int = 1
    counts: tuple[int, ...] = (1,)
    clip: float | None = None
    precision: str = "no"
    even_batches: Any = True
    sync_each_batch: bool = False
    items_as_tensors: bool = False

    @staticmethod
    def drawn(generator: random.Random) -> Program:
        program = Program(
            num_steps=generator.randint(1, 4),
            weights=generator.choice(WEIGHTS),
            passes=[generator.choice([None, 1, 2, 3, 5]) for _ in range(generator.randint(1, 3))],
            num_batches=generator.randint(1, 11),
            kind=generator.choice(KINDS),
            size=generator.randint(2, 4),
            data=generator.choice(DATA),
            blocks=generator.choice(BLOCKS),
            resumes_after=generator.choice([None, None, None, 1, 2, 3]),
            skips=generator.random() < 0.5,
            num_models=generator.randint(1, 2),
            num_optimizers=generator.randint(1, 2),
            counts=tuple(generator.randint(1, 5) for _ in range(generator.randint(1, 3))),
            clip=generator.choice([None, None, 0.2]),
            precision=generator.choice(["no", "no", "fp16"]),
            even_batches=generator.choice([True, "pad"]),
            sync_each_batch=generator.random() < 0.2,
            items_as_tensors=generator.random() < 0.3,
        )
        return program.allowed()

    def allowed(self) -> Program:
        """Return the program without what its loop cannot do."""
        program = self
        if self.is_by_hand:  # without blocks, a backward belongs to the newest batch
            is_late = self.kind in ("fetch", "hold back")
            program = replace(program, weights="steps", even_batches=True if is_late else self.even_batches)
            resumes_after = None if is_late else self.resumes_after  # all that it has received counts as trained
            program = replace(program, resumes_after=resumes_after)
        if self.blocks == "skipped" and self.weights != "items":  # losses of left groups are divided by `num_steps`
            program = replace(program, weights="steps", even_batches=True)
        if self.data in ("stream", "shares"):  # which cannot seek, and warn that the epoch restarts
            program = replace(program, skips=True)
        return program

    @property
    def is_by_hand(self) -> bool:
        """True if the loop determines its groups itself."""
        return self.blocks in ("no_sync", "trigger")

    def is_left(self, number: int) -> bool:
        """Return whether the block of a micro-batch is left before its backward."""
        return self.blocks == "skipped" and number % (self.size + 1) == self.size

    def items_of(self, number: int, rank: int) -> int:
        return self.counts[(number + rank) % len(self.counts)]

    def num_batches_of(self, rank: int, world: int) -> int:
        if self.data == "shares":
            return max(1, self.num_batches - rank * self.size)
        return -(-(self.num_batches - rank) // world)

    def is_real(self, batch: int, rank: int, world: int) -> bool:
        """Return whether a rank's batch in a round is not padding."""
        return self.even_batches is True or batch < self.num_batches_of(rank, world)

    def has_certain_end(self, world: int) -> bool:
        """Return whether the loop shows which micro-batch is the last one of a pass."""
        if self.is_by_hand:
            return True
        if self.kind == "fetch":
            return self.passes == [None] * len(self.passes)
        shows_parts = self.num_batches_of(0, world) > 1 and self.resumes_after is None
        return self.kind == "plain" or (self.kind == "parts" and shows_parts)


@dataclass(frozen=True)
class Begun:
    """A micro-batch where the loop begins it.

    Attributes:
        number: Number of the micro-batch in the program.
        nth: Number of its pass.
        batch: Number of its batch in the pass.
        content: The batch.
        is_last: It is the last one of a complete pass.
    """

    number: int
    nth: int
    batch: int
    content: Any
    is_last: bool


_BEGINNING = Begun(0, 0, 0, None, is_last=False)


def micro_batches_of_a_pass(
    program: Program, batches: Iterable[Any], first: int, *, is_first: bool
) -> Iterator[tuple[int, Any]]:
    """Yield the number of its batch, and the batch, for each micro-batch of a pass that begins at batch `first`."""
    size = program.size
    numbered = enumerate(batches, start=first)
    if program.kind == "fetch":
        while held := list(itertools.islice(numbered, min(size, program.num_steps))):
            yield from held
    elif program.kind == "hold back":
        before = None
        for found in numbered:
            if before is not None:
                yield before
            before = found
        if before is not None:
            yield before
    else:
        for batch, content in numbered:
            if program.kind == "skip first" and is_first and batch < size:
                continue
            if program.kind == "skip some" and batch % size == 0:
                continue
            num_parts = {"parts": size, "parts by chance": 1 + (7 * batch) % size}.get(program.kind, 1)
            yield from [(batch, content)] * num_parts


def micro_batches(program: Program, passes: Iterable[Any], num_rounds: int, start: Begun) -> Iterator[Begun]:
    """Yield all micro-batches of a program from `start` on, where the loop begins them.

    Args:
        passes: The loader of each pass that is left.
    """
    number = start.number
    for nth, loader in enumerate(passes, start=start.nth):
        first = start.batch if nth == start.nth else 0
        leave_after = program.passes[nth]
        length = num_rounds if leave_after is None else min(leave_after, num_rounds)
        batches = loader if leave_after is None else itertools.islice(loader, leave_after - first)
        planned = list(micro_batches_of_a_pass(program, range(first, length), first, is_first=nth == 0))
        found = micro_batches_of_a_pass(program, batches, first, is_first=nth == 0)
        for i, (batch, content) in enumerate(found, start=1):
            yield Begun(number, nth, batch, content, is_last=i == len(planned) and length == num_rounds)
            number += 1


class Stream(IterableDataset[torch.Tensor]):
    """A stream, which the first process reads, or whose length differs on the ranks."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.is_sharded = program.data == "shares"

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank, world = shard_info() if self.is_sharded else (0, 1)
        return iter(torch.arange(self._program.num_batches_of(rank, world)))


def data_of(program: Program) -> Any:
    if program.data == "texts":
        return [f"text {i}" for i in range(program.num_batches)]
    return torch.arange(program.num_batches) if program.data == "tensors" else Stream(program)


class Net(nn.Module):
    """Weight `number` of two layers with four rows each is the loss of micro-batch `number`."""

    def __init__(self, num_weights: int) -> None:
        super().__init__()
        self.first = nn.Linear(num_weights, 4, bias=False)
        self.second = nn.Linear(num_weights, 4, bias=False)
        nn.init.zeros_(self.first.weight)
        nn.init.zeros_(self.second.weight)

    def tensor_parallel_plan(self, mesh: Any) -> dict[str, Any]:
        return dict.fromkeys(("first", "second"), ColwiseParallel(output_layouts=Replicate()))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        inputs = nn.functional.one_hot(numbers, self.first.in_features).to(self.first.weight.dtype)
        rows = (numbers // 2 % 4).unsqueeze(1)
        is_first = numbers % 2 == 0
        of_both = torch.where(is_first.unsqueeze(1), self.first(inputs), self.second(inputs))
        return of_both.gather(1, rows)

    @staticmethod
    def weights_in(state: dict[str, torch.Tensor]) -> torch.Tensor:
        return -sum(weight.float().sum(0) for weight in state.values())


class Loop:
    """The objects of a program's loop on this rank."""

    def __init__(self, program: Program, strategy: Any) -> None:
        self.program = program
        short: Any = program.weights if program.weights in ("steps", "mean") else None
        num_steps = 1 if program.is_by_hand else program.num_steps
        plugin = GradientAccumulationPlugin(num_steps, short_group=short, sync_each_batch=program.sync_each_batch)
        self.accelerator = Accelerator(
            cpu=True,
            strategy=strategy,
            seed=0,
            mixed_precision=program.precision,
            gradient_accumulation_plugin=plugin,
            dataloader_config=DataLoaderConfiguration(even_batches=program.even_batches),
            kwargs_handlers=[GradScalerKwargs(init_scale=256.0)],  # with the default, the first step overflows
        )
        ranks = self.accelerator.engine.data_ranks
        self.rank, self.world = ranks.reader, ranks.num_readers
        nets = [Net(_MOST * self.world) for _ in range(program.num_models)]
        optimizers: list[Any] = []
        for number in range(program.num_optimizers):
            parts = [list(net.parameters())[number :: program.num_optimizers] for net in nets]
            optimizers += [torch.optim.SGD(part, lr=1.0) for part in parts]
        loader = DataLoader(data_of(program), shuffle=program.data == "tensors")
        *prepared, self.loader = self.accelerator.prepare(*nets, *optimizers, loader)
        self.models = prepared[: program.num_models]
        optimizers = prepared[program.num_models :]
        of_each = [optimizers[i :: program.num_models] for i in range(program.num_models)]
        self.trained = list(zip(self.models, of_each, strict=True))

    def passes_from(self, start: Begun) -> Iterator[Any]:
        """Yield the loader of each pass."""
        for nth in range(start.nth, len(self.program.passes)):
            skips = self.program.skips and nth == start.nth and start.batch > 0
            yield self.accelerator.skip_first_batches(self.loader, start.batch) if skips else self.loader

    def train(self, begun: Begun, *, ends_group: bool) -> bool:
        """Train all models on a micro-batch. Return whether the optimizers have stepped."""
        train = self._train_by_hand if self.program.is_by_hand else self._train_in_block
        has_stepped = False
        for model, optimizers in self.trained:
            has_stepped = train(model, optimizers, begun, ends_group)
        return has_stepped

    def _train_in_block(self, model: nn.Module, optimizers: Any, begun: Begun, ends_group: bool) -> bool:
        program, accelerator = self.program, self.accelerator
        with accelerator.accumulate(model):
            if program.is_left(begun.number):
                return False  # as `continue` does
            items = program.items_of(begun.number, self.rank)
            num_items: Any = torch.tensor(items) if program.items_as_tensors else items
            accelerator.backward(self._loss(model, begun), num_items=num_items if program.weights == "items" else None)
            if accelerator.sync_gradients:
                self._clip(model)
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            return accelerator.sync_gradients

    def _train_by_hand(self, model: nn.Module, optimizers: Any, begun: Begun, ends_group: bool) -> bool:
        program, accelerator = self.program, self.accelerator
        is_late = program.blocks == "trigger"  # the forward does not know that gradients will be averaged
        with ExitStack() as stack:
            if not ends_group or is_late:
                stack.enter_context(accelerator.no_sync(model))
            loss = self._loss(model, begun) / program.num_steps
            if not ends_group:
                accelerator.backward(loss)
                return False
        with ExitStack() as stack:
            if is_late:
                stack.enter_context(accelerator.trigger_sync_in_backward(model))
            accelerator.backward(loss)
        self._clip(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return True

    def _loss(self, model: nn.Module, begun: Begun) -> torch.Tensor:
        number = self.rank * _MOST + begun.number
        loss: torch.Tensor = model(torch.tensor([number] * self.program.items_of(begun.number, self.rank))).mean()
        return loss

    def _clip(self, model: nn.Module) -> None:
        if self.program.clip is not None:
            self.accelerator.clip_grad_norm_(model.parameters(), self.program.clip)

    def weights(self) -> torch.Tensor:
        """Return how much was subtracted from the last model's weights. Empty except on the main process."""
        state = self.accelerator.get_state_dict(self.models[-1])
        return Net.weights_in(state) if state else torch.zeros(0)


@dataclass
class Found:
    """The results of a program.

    Attributes:
        steps: The last model's steps, with the weights of their micro-batches.
        groups: The right groups.
        num_blocks: Number of micro-batches since the end of the last group. If that one was left, no step has followed.
        contents: The batches of the micro-batches.
        has_resumed: The loop was saved and has continued.
        world: Number of ranks with different data.
    """

    steps: list[dict[int, float]] = field(default_factory=list)
    groups: list[list[Begun]] = field(default_factory=lambda: [[]])
    num_blocks: int = 0
    contents: list[Any] = field(default_factory=list)
    has_resumed: bool = False
    world: int = 1


def run(program: Program, strategy: Any, folder: Path) -> Found:
    """Run a program on this rank."""
    found = Found()
    start: Begun | None = _BEGINNING
    while start is not None:
        loop = Loop(program, strategy)
        found.world = loop.world
        if found.has_resumed:
            loop.accelerator.load_state(folder / "state")
        start = _run_from(start, loop, found, folder)
    return found


def _run_from(start: Begun, loop: Loop, found: Found, folder: Path) -> Begun | None:
    """Run a loop from `start` on. Return where it continues after a save, or None at its end."""
    program = loop.program
    num_rounds = program.num_batches_of(0, loop.world)
    for begun in micro_batches(program, loop.passes_from(start), num_rounds, start):
        group = found.groups[-1]
        group.append(begun)
        found.contents.append(begun.content if isinstance(begun.content, list) else begun.content.item())
        found.num_blocks += 1
        ends_group = begun.is_last or found.num_blocks == program.num_steps
        if ends_group:
            found.num_blocks = 0
            if not program.is_left(begun.number) and any(not program.is_left(one.number) for one in group):
                found.groups.append([])
        if not loop.train(begun, ends_group=ends_group):
            continue
        weights = loop.weights()
        known = set().union(*found.steps)
        found.steps.append({at: weights[at].item() for at in weights.nonzero().flatten().tolist() if at not in known})
        after = _resumed_at(program, begun, num_rounds)
        if not found.has_resumed and len(found.steps) == program.resumes_after and after is not None:
            loop.accelerator.save_state(folder / "state")
            found.has_resumed = True
            return after
    return None


def _resumed_at(program: Program, begun: Begun, num_rounds: int) -> Begun | None:
    """Return where a loop that is saved after a micro-batch continues. None: it is not saved there."""
    planned = list(micro_batches(program, [range(num_rounds)] * len(program.passes), num_rounds, _BEGINNING))
    following = planned[begun.number + 1 : begun.number + 2]
    if not following:
        return None
    if following[0].nth == begun.nth:
        if following[0].batch == begun.batch:
            return None  # another part of the same batch
        return replace(begun, number=begun.number + 1, batch=begun.batch + 1)
    if not begun.is_last or begun.batch != num_rounds - 1:
        return None  # the loop leaves the pass, which it would continue
    return replace(begun, number=begun.number + 1, nth=begun.nth + 1, batch=0)


def weights_of(program: Program, group: list[Begun], world: int) -> dict[int, float]:
    """Return the weights that the micro-batches of a group should have in the gradient."""
    real = [
        (rank, begun)
        for begun in group
        for rank in range(world)
        if program.is_real(begun.batch, rank, world) and not program.is_left(begun.number)
    ]
    places = [rank * _MOST + begun.number for rank, begun in real]
    if program.weights == "items":
        items = [program.items_of(begun.number, rank) for rank, begun in real]
        weights = [own / sum(items) for own in items]
    elif program.is_by_hand:  # each micro-batch is averaged by itself
        num_ranks = [sum(other is begun for _, other in real) for _, begun in real]
        weights = [1 / (program.num_steps * number) for number in num_ranks]
    else:
        divisor = len(group) if program.weights == "mean" else program.num_steps
        num_left = world * sum(program.is_left(begun.number) for begun in group)
        weights = [len(group) / (divisor * (len(real) + num_left))] * len(real)
    norm = math.sqrt(sum(weight**2 for weight in weights))
    factor = 1.0 if program.clip is None else min(1.0, program.clip / (norm + 1e-6))
    return {place: weight * factor for place, weight in zip(places, weights, strict=True)}


def difference(program: Program, folder: Path, strategy: Any = "auto") -> str:
    """Run a program. Return what differs from the weights that its micro-batches should have, or an empty text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainwrightWarning)
        found = run(program, strategy, folder)
        if found.has_resumed and program.has_certain_end(found.world):
            whole = run(replace(program, resumes_after=None), strategy, folder)
            if found != replace(whole, has_resumed=True):
                return f"{program}: resumed {found.contents} {found.steps}, not {whole.contents} {whole.steps}"
    if not PartialState().is_main_process:
        return ""  # only the main process has the weights
    steps, groups = found.steps, found.groups
    left = groups.pop()
    if not program.has_certain_end(found.world):
        # Nothing is dropped or doubled, and no group is too large. The steps show the groups.
        begun = [one for one in itertools.chain(*groups, left) if not program.is_left(one.number)]
        sizes = [len({at % _MOST for at in step}) for step in steps]
        most = math.inf if program.blocks == "skipped" else program.num_steps
        if any(size > most for size in sizes) or not 0 <= len(begun) - sum(sizes) < most:
            return f"{program}: steps of {sizes} micro-batches of {len(begun)}"
        ends = list(itertools.accumulate(sizes, initial=0))
        groups = [begun[start:stop] for start, stop in itertools.pairwise(ends)]
        if program.kind != "parts by chance" and program.even_batches == "pad":
            return ""  # it is ambiguous which micro-batch is padding; a warning says so
    expected = [weights_of(program, group, found.world) for group in groups]
    tolerance = 2e-3 if program.precision == "fp16" else 2e-6
    if len(steps) != len(expected):
        return f"{program}: {len(steps)} steps, not {len(expected)}"
    for number, (step, right) in enumerate(zip(steps, expected, strict=True)):
        if step.keys() != right.keys() or any(abs(step[at] - right[at]) > tolerance for at in right):
            return f"{program}: step {number} is {step}, not {right}"
    return ""


# What an engine refuses with an error. None of these has float16 on the CPU.
_WITHOUT_FP16 = {"precision": "no"}
_OF_ZERO = {"precision": "no", "sync_each_batch": False, "num_optimizers": 1}
_LIMITS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("documented", "offload", "tp", "fsdp_tp"), _WITHOUT_FP16),
    **dict.fromkeys(("zero1", "zero2", "zero3"), _OF_ZERO),
}


def differences(name: str, folder: Path, seed: int, number: int) -> list[str]:
    """Run programs on all ranks under a strategy of the contracts. Return the main rank's differences."""
    generator = random.Random(seed)
    found = []
    for _ in range(number):
        program = Program.drawn(generator)
        made: Any = STRATEGIES[name].strategy
        strategy = made if isinstance(made, str) else made()
        program = replace(program, **_LIMITS.get(name.removesuffix("_4"), {}))
        found.append(difference(program, folder, strategy))
    return list(filter(None, found))
