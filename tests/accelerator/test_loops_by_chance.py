"""Loops that are drawn by chance: each optimizer step has the gradient that its group of micro-batches should have."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from trainwright import Accelerator, GradientAccumulationPlugin
from trainwright.core.errors import TrainwrightWarning

pytestmark = pytest.mark.usefixtures("fresh_state")

_MOST = 200  # micro-batches of a program
_EXAMPLES = int(os.environ.get("TRAINWRIGHT_TEST_EXAMPLES", "60"))


@dataclass(frozen=True)
class Program:
    """A loop. Micro-batch i has a gradient of 1 in element i alone, so that a step's gradient shows its weights.

    Attributes:
        num_steps: Micro-batches of a group.
        weights: How losses are weighed: `"steps"`, `"mean"` or `"items"`.
        passes: Number of batches after which each pass is left. None: it is read to its end.
        num_batches: Batches of a pass.
        kind: What the loop does with its batches.
        size: Batches that are fetched ahead, parts of each batch, or every which batch is skipped.
        num_models: Models that are trained alternately.
        texts: Batches are texts instead of tensors.
        counts: Items of each micro-batch, in turn.
    """

    num_steps: int
    weights: str
    passes: list[int | None]
    num_batches: int
    kind: str
    size: int
    num_models: int
    texts: bool
    counts: list[int]


def programs() -> st.SearchStrategy[Program]:
    return st.builds(
        Program,
        num_steps=st.integers(1, 4),
        weights=st.sampled_from(["steps", "mean", "items"]),
        passes=st.lists(st.one_of(st.none(), st.integers(1, 6)), min_size=1, max_size=3),
        num_batches=st.integers(1, 9),
        kind=st.sampled_from(["plain", "fetch", "parts", "skip first", "skip some", "hold back", "parts by chance"]),
        size=st.integers(2, 4),
        num_models=st.integers(1, 2),
        texts=st.booleans(),
        counts=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    )


def micro_batches_of_a_pass(program: Program, batches: Iterable[Any], first: bool) -> Iterator[None]:
    """Yield once for each micro-batch that the loop begins, where it begins."""
    size = program.size
    if program.kind == "fetch":
        source = iter(batches)
        while held := list(itertools.islice(source, min(size, program.num_steps))):
            yield from (None for _ in held)
    elif program.kind == "hold back":
        held_back = None
        for batch in batches:
            if held_back is not None:
                yield
            held_back = batch
        if held_back is not None:
            yield
    else:
        for i, _ in enumerate(batches):
            if (program.kind == "skip first" and first and i < size) or (program.kind == "skip some" and i % size == 0):
                continue
            num_parts = {"parts": size, "parts by chance": 1 + (7 * i) % size}.get(program.kind, 1)
            yield from (None for _ in range(num_parts))


def run(program: Program) -> tuple[list[dict[int, float]], list[list[int]]]:
    """Run a program. Return the first model's steps, with the weights of their micro-batches, and the right groups."""
    short: Any = program.weights if program.weights in ("steps", "mean") else None
    plugin = GradientAccumulationPlugin(program.num_steps, short_group=short)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    nets = [nn.Linear(_MOST, 1, bias=False) for _ in range(program.num_models)]
    optimizers: Any = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    data: Any = [f"text {i}" for i in range(program.num_batches)] if program.texts else torch.ones(program.num_batches)
    *prepared, loader = accelerator.prepare(*nets, *optimizers, DataLoader(data))
    models, optimizers = prepared[: program.num_models], prepared[program.num_models :]
    steps: list[dict[int, float]] = []
    groups: list[list[int]] = [[]]
    for this, ends_pass in numbered(program, loader):
        count = count_of(program, this)
        for net, model, optimizer in zip(nets, models, optimizers, strict=True):
            with accelerator.accumulate(model):
                loss = model(nn.functional.one_hot(torch.tensor([this] * count), _MOST).float()).mean()
                accelerator.backward(loss, num_items=count if program.weights == "items" else None)
                if accelerator.sync_gradients and net is nets[-1]:
                    grad: Any = net.weight.grad
                    steps.append({at: grad[0, at].item() for at in grad[0].nonzero().flatten().tolist()})
                optimizer.step()
                optimizer.zero_grad()
        groups[-1].append(this)
        if ends_pass or len(groups[-1]) == program.num_steps:
            groups.append([])
    return steps, groups


def numbered(program: Program, loader: Any) -> Iterator[tuple[int, bool]]:
    """Yield the numbers of all micro-batches, each with whether it is the last one of a pass that is read to its end.

    Each number is yielded where the loop begins the micro-batch.
    """
    total = -1
    for nth, leave_after in enumerate(program.passes):
        batches = loader if leave_after is None else itertools.islice(loader, leave_after)
        length = program.num_batches if leave_after is None else min(leave_after, program.num_batches)
        last = total + sum(1 for _ in micro_batches_of_a_pass(program, range(length), nth == 0))
        for _ in micro_batches_of_a_pass(program, batches, nth == 0):
            total += 1
            yield total, total == last and length == program.num_batches


def count_of(program: Program, this: int) -> int:
    return program.counts[this % len(program.counts)]


def weights_of(program: Program, group: list[int]) -> dict[int, float]:
    counts = {this: count_of(program, this) for this in group}
    if program.weights == "items":
        return {this: count / sum(counts.values()) for this, count in counts.items()}
    divisor = len(group) if program.weights == "mean" else program.num_steps
    return dict.fromkeys(group, 1 / divisor)


@settings(max_examples=_EXAMPLES)
@given(programs())
def test_each_step_has_the_gradient_of_its_group(program: Program) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainwrightWarning)
        steps, groups = run(program)
    left = groups.pop()
    if len(left) == program.num_steps:
        groups.append(left)
        left = []
    is_certain = {
        "plain": True,
        "fetch": program.passes == [None] * len(program.passes),
        "parts": program.num_batches > 1,
    }
    if not is_certain.get(program.kind, False):
        # The end of the data is ambiguous. Nothing is dropped or doubled, and no group is too large.
        in_order = [this for group in groups for this in group] + left
        stepped = [this for step in steps for this in step]
        assert stepped == in_order[: len(stepped)]
        assert len(in_order) - len(stepped) < program.num_steps
        assert all(len(step) <= program.num_steps for step in steps)
        groups = [list(step) for step in steps]
    expected = [weights_of(program, group) for group in groups]
    assert [list(step) for step in steps] == [list(step) for step in expected]
    for step, right in zip(steps, expected, strict=True):
        assert step == pytest.approx(right, rel=1e-6)
