"""The optimizer steps while gradients still come and weights already go, and no bit changes by that."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.offload.late_stream import LateStream
from tests.offload.test_training import DEPTH, PLACES, WIDTH, Tiny, batches
from trainwright import OffloadStrategy
from trainwright.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    Throughput,
    Timer,
)
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.hook_table import HookTable
from trainwright.strategies.offload import streaming
from trainwright.strategies.offload.portions import can_be_split


class Losses(Callback):
    """Writes down the losses, and nothing else."""

    reads_only = True

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        if result.loss is not None:
            self.values.append(float(result.loss))


def writes(trainer: Any, task: Any, *_: Any) -> None:
    """Shrink all weights in a way that no version counter sees."""
    for parameter in task.parameters():
        parameter.data.mul_(0.9)


def writer(event: str, base: type[Callback] = Callback, **attributes: Any) -> Callback:
    """Return a callback that writes weights at an event."""
    made: Callback = type("Writer", (base,), {event: lambda self, *args: writes(*args), **attributes})()
    return made


def train(
    strategy: Any = "single", *callbacks: Callback, task: Tiny | None = None, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    task = Tiny() if task is None else task
    losses = Losses()
    settings: dict[str, Any] = {"max_epochs": 2, "callbacks": [losses, *callbacks], **options}
    trainer = quiet_trainer(strategy=strategy, **settings)
    torch.manual_seed(3)
    trainer.fit(task, batches(5), batches(2) if settings.get("limit_val_batches") != 0 else None)
    return losses.values, weights_of(task), trainer


def assert_same(found: Any, wanted: Any) -> None:
    assert found[0] == wanted[0]
    assert_equal_weights(found[1], wanted[1])
    assert found[2].callback_metrics == wanted[2].callback_metrics


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have all copies made as late as can be. Without it, they are made as early as can be."""
    monkeypatch.setattr(streaming, "CopyStream", LateStream)
    yield
    LateStream.all.clear()


LISTENERS: dict[str, Callable[[], list[Callback]]] = {
    "nobody": list,
    "one who writes": lambda: [writer("on_train_step_end")],
    "averages": lambda: [EMAWeightAveraging(decay=0.5)],
}


CASES = [(*places, "nobody") for places in PLACES]
CASES += [
    (*places, who) for places in (("cpu", "cpu"), ("device", "cpu"), ("disk", "disk")) for who in [*LISTENERS][1:]
]


@functools.cache
def plainly(listener: str, accumulate: int, clip: float | None) -> Any:
    return train("single", *LISTENERS[listener](), accumulate_grad_batches=accumulate, gradient_clip_val=clip)


@pytest.mark.parametrize("copies", ["late", "at once"])
@pytest.mark.parametrize(("parameters", "state", "listener"), CASES)
def test_every_bit_is_that_of_training_in_one_place(
    parameters: Any, state: Any, listener: str, copies: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if copies == "late":
        request.getfixturevalue("late")
    for accumulate, clip in ((1, None), (3, None), (1, 0.5), (3, 0.5)):
        strategy = OffloadStrategy(parameters, state, stream=True, offload_folder=tmp_path)
        found = train(
            strategy, *LISTENERS[listener](), accumulate_grad_batches=accumulate, gradient_clip_val=clip
        )  # fmt: skip
        assert_same(found, plainly(listener, accumulate, clip))


# Order


@pytest.fixture
def trace(late: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Write down what is waited for, steps and is copied: (what, the unit's index, gradients on their way then)."""
    found: list[tuple[str, int, int]] = []
    units: list[streaming.Unit] = []

    def note(what: str, unit: streaming.Unit) -> None:
        found.append((what, units.index(unit), len(LateStream.all[1].waiting)))

    def watch(name: str, what: str) -> None:
        own = getattr(streaming.Unit, name)

        @functools.wraps(own)
        def watched(unit: streaming.Unit, *args: Any) -> Any:
            if unit not in units:  # they are made in the order of the forward, what is in no unit last
                units.append(unit)
            if what != "copy" or not unit.fresh:
                note(what, unit)
            return own(unit, *args)

        monkeypatch.setattr(streaming.Unit, name, watched)

    own_init, own_step = streaming.Unit.__init__, torch.optim.AdamW.step

    def init(unit: streaming.Unit, *args: Any, **options: Any) -> None:
        own_init(unit, *args, **options)
        units.append(unit)

    @functools.wraps(own_step)
    def step(optimizer: Any, *args: Any) -> Any:
        stepped = {p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        for unit in units:
            if stepped & set(unit.parameters):
                note("step", unit)
        return own_step(optimizer, *args)

    monkeypatch.setattr(streaming.Unit, "__init__", init)
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    watch("wait_for_gradients", "wait")
    watch("copy", "copy")
    return found


ROOT = DEPTH
IN_ORDER = [*range(DEPTH - 1, -1, -1), ROOT]  # the embedding's gradient comes last


def last_step(trace: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Return what happened from the last step's first wait for gradients on."""
    begins = [i for i, (what, unit, _) in enumerate(trace) if (what, unit) == ("wait", IN_ORDER[0])]
    return trace[begins[-1] :]


def test_a_unit_steps_before_the_gradients_of_the_next_one_are_waited_for(trace: Any) -> None:
    train(OffloadStrategy(stream=True, prefetch=0), limit_val_batches=0)
    steps = [entry for entry in last_step(trace) if entry[0] != "copy"]
    assert [entry[:2] for entry in steps] == [(what, unit) for unit in IN_ORDER for what in ("wait", "step")]
    on_their_way = [entry[2] for entry in steps if entry[0] == "step"]
    assert on_their_way == sorted(on_their_way, reverse=True)
    assert on_their_way[0] > DEPTH
    assert on_their_way[-1] == 0


def test_gradients_of_the_last_micro_batch_are_added_when_their_unit_steps(trace: Any) -> None:
    train(OffloadStrategy(stream=True, prefetch=0), limit_val_batches=0, accumulate_grad_batches=5)
    steps = [entry for entry in last_step(trace) if entry[0] != "copy"]
    assert [entry[1] for entry in steps if entry[0] == "step"] == IN_ORDER
    assert [entry[2] > 0 for entry in steps if entry[0] == "step"] == [unit != ROOT for unit in IN_ORDER]


def test_the_host_holds_the_gradients_of_two_units_that_are_to_be_added(late: None) -> None:
    task = Tiny()
    found: list[int] = []

    def count(*_: Any) -> None:
        found.append(sum(bool(unit._to_add) for unit in task.trainer.strategy.weight_stream.units))

    for block in task.blocks:
        block.norm.weight.register_hook(count)
    train(OffloadStrategy(stream=True), task=task, limit_val_batches=0, accumulate_grad_batches=5)
    assert max(found) == 2


def test_the_weights_of_a_unit_are_on_their_way_when_the_next_one_steps(trace: Any) -> None:
    train(OffloadStrategy("device", stream=True), limit_val_batches=0)
    found = [entry[:2] for entry in last_step(trace) if entry[0] != "wait"]
    assert found == [(what, unit) for unit in IN_ORDER for what in ("step", "copy")]


def test_as_many_units_go_to_the_device_early_as_it_has_room_for(trace: Any) -> None:
    train(OffloadStrategy(stream=True, prefetch=2), limit_val_batches=0)
    copied = [unit for what, unit, _ in last_step(trace) if what == "copy"]
    assert copied == [1, 0, ROOT]


def test_clipping_waits_for_gradients_and_not_for_weights(trace: Any) -> None:
    train(OffloadStrategy("device", stream=True), limit_val_batches=0, gradient_clip_val=0.5)
    found = last_step(trace)
    assert {on_their_way for _, _, on_their_way in found} == {0}
    assert [entry[:2] for entry in found if entry[0] != "wait"] == [
        (what, unit) for unit in IN_ORDER for what in ("step", "copy")
    ]


@pytest.mark.usefixtures("late")
def test_who_looks_at_gradients_finds_all_of_them() -> None:
    class Look(Callback):
        def __init__(self) -> None:
            self.sums: list[float] = []

        def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
            self.sums.append(sum(float(p.grad.sum()) for p in task.parameters()))

    looks = [Look(), Look()]
    assert_same(train(OffloadStrategy(stream=True), looks[0]), train("single", looks[1]))
    assert looks[0].sums == looks[1].sums


@pytest.mark.usefixtures("late")
def test_a_group_is_looked_at_when_all_its_gradients_are_there() -> None:
    class Odd(Tiny):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            # A finite loss and a gradient that is no number, of the weight whose gradient comes last.
            return loss + (0 * self.embed.weight).sum().sqrt() if batch_idx == 2 else loss

    options: dict[str, Any] = {"on_nonfinite": "skip"}
    with pytest.warns(UserWarning, match="not finite"):
        found = train(OffloadStrategy("device", stream=True), task=Odd(), **options)
    with pytest.warns(UserWarning, match="not finite"):
        wanted = train(task=Odd(), **options)
    assert found[2].skipped_batches == wanted[2].skipped_batches
    assert_equal_weights(found[1], wanted[1])


@pytest.mark.usefixtures("late")
def test_a_gradient_that_comes_in_two_parts_is_their_sum() -> None:
    class Recomputing(Tiny):
        """Has one layer in two parts that are computed anew, each with a backward of its own."""

        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                self.mix = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.blocks[0](self.embed(tokens))
            for _ in range(2):
                hidden = checkpoint(self.mix, hidden, use_reentrant=True)
            scores: torch.Tensor = self.head(hidden)
            return scores

    torch.manual_seed(0)
    found = train(OffloadStrategy(stream=True), task=Recomputing(), limit_val_batches=0)
    torch.manual_seed(0)
    assert_same(found, train(task=Recomputing(), limit_val_batches=0))


@pytest.mark.usefixtures("late")
def test_without_the_waits_other_weights_come_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming.Unit, "wait_for_gradients", lambda unit: None)
    found = train(OffloadStrategy(stream=True), limit_val_batches=0)
    assert found[0] != train(limit_val_batches=0)[0]


@pytest.mark.usefixtures("late")
def test_the_device_keeps_the_gradients_of_one_unit() -> None:
    task = Tiny()
    train(OffloadStrategy(stream=True), task=task, limit_val_batches=0)
    of_root = task.embed.weight.nbytes + sum(parameter.nbytes for parameter in task.head.parameters())
    of_unit = sum(parameter.nbytes for parameter in task.blocks[0].parameters())
    assert 0 < LateStream.all[1].most_kept <= of_unit + of_root


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_between_steps_the_device_holds_what_begins_the_next_forward(ahead: int) -> None:
    task = Tiny()
    seen: list[int] = []

    class Count(Callback):
        reads_only = True

        def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
            units = trainer.strategy.weight_stream.units
            seen.append(sum(unit.flats[0][1].untyped_storage().nbytes() > 0 for unit in units))

    def count(*_: Any) -> None:
        Count().on_train_step_end(task.trainer, task, None)

    for block in task.blocks:
        block.up.register_forward_hook(count)
    train(OffloadStrategy(stream=True, prefetch=ahead), Count(), task=task, limit_val_batches=0)
    assert seen[DEPTH] == ahead
    assert max(seen) == 1 + ahead


# Whoever writes weights between two steps

EVENTS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_step_start",
    "on_train_step_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_end",
    "on_validation_epoch_start",
)


@pytest.mark.parametrize("event", EVENTS)
def test_what_a_callback_writes_is_what_is_trained_on(event: str) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2}
    wanted = train("single", writer(event), **options)
    for parameters in ("cpu", "device"):
        assert_same(train(OffloadStrategy(parameters, stream=True), writer(event), **options), wanted)


def test_what_a_task_writes_is_what_is_trained_on() -> None:
    class Writing(Tiny):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            writes(None, self)

    class Scheduling(Tiny):
        def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
            super().lr_scheduler_step(scheduler, metric)
            writes(None, self)

    class Moving(Tiny):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            if self.training:
                writes(None, self)
            return batch

    for kind in (Writing, Scheduling, Moving):
        assert_same(train(OffloadStrategy("device", stream=True), task=kind()), train(task=kind()))


@pytest.mark.parametrize("parameters", ["cpu", "device"])
def test_a_frozen_part_that_follows_a_trained_one_is_the_present_one(parameters: Any) -> None:
    class Taught(Tiny):
        """The last block is a running average of the first one, and its teacher."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.blocks[0](self.embed(tokens))
            with torch.no_grad():
                wanted = self.blocks[-1](hidden)
            scores: torch.Tensor = self.head(hidden - wanted)
            return scores

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            for old, new in zip(self.blocks[-1].parameters(), self.blocks[0].parameters(), strict=True):
                old.data.lerp_(new.data, 0.5)
            return loss

    def task() -> Taught:
        made = Taught()
        made.blocks[-1].requires_grad_(False)
        return made

    strategy = OffloadStrategy(parameters, stream=True, prefetch=0)
    assert_same(train(strategy, task=task(), limit_val_batches=0), train(task=task(), limit_val_batches=0))


def test_what_is_done_at_a_safe_point_is_what_is_trained_on() -> None:
    class Later(Callback):
        def on_before_zero_grad(self, trainer: Any, task: Any, optimizer: Any) -> None:
            trainer.at_safe_point(functools.partial(writes, trainer, task))

    assert_same(train(OffloadStrategy("device", stream=True), Later()), train("single", Later()))


def test_weights_that_were_copied_early_are_used() -> None:
    """Who says that he only reads, and writes, writes in vain: what holds him off is that he says nothing."""
    told = writer("on_train_step_end", reads_only=True)
    found = train(OffloadStrategy("device", stream=True), told, limit_val_batches=0)
    assert found[0] != train("single", writer("on_train_step_end"), limit_val_batches=0)[0]


def test_what_torch_sees_written_is_copied_again() -> None:
    class Visibly(Callback):
        reads_only = True

        @torch.no_grad()
        def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
            for parameter in task.parameters():
                parameter.mul_(0.9)

    for parameters in ("cpu", "device"):
        assert_same(train(OffloadStrategy(parameters, stream=True), Visibly()), train("single", Visibly()))


def test_reading_is_said_by_each_class_for_itself() -> None:
    assert HookTable([Losses()]).only_read(["on_train_step_end"])
    assert HookTable([writer("on_train_step_end")]).only_read(["on_train_batch_end"])  # nobody listens
    assert not HookTable([writer("on_train_step_end", base=Losses)]).only_read(["on_train_step_end"])
    assert not HookTable([], _task_that_listens()).only_read(["on_train_epoch_end"])
    mine = Losses()
    mine.reads_only = False  # type: ignore[misc]  # one object may say so too
    assert not HookTable([mine]).only_read(["on_train_step_end"])


def _task_that_listens() -> Tiny:
    class Listening(Tiny):
        def on_train_epoch_end(self) -> None:
            pass

    return Listening()


def test_what_comes_with_a_run_by_default_only_reads(tmp_path: Path) -> None:
    found: list[tuple[int, bool]] = []

    class Look(Callback):
        reads_only = True

        def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
            units = trainer.strategy.weight_stream.all_units
            found.append((trainer.global_step, all(unit.fresh for unit in units)))

    options: dict[str, Any] = {"enable_checkpointing": True, "enable_progress_bar": True, "logger": "csv"}
    callbacks = [
        EarlyStopping("val_loss"), LearningRateMonitor(), ModelCheckpoint(every_n_train_steps=2), Throughput(), Timer()
    ]  # fmt: skip
    strategy = OffloadStrategy("device", stream=True)
    run = train(strategy, Look(), *callbacks, default_root_dir=tmp_path, **options)
    assert found == [(step, True) for step in range(1, 11)]
    assert_same(run, train())


def test_a_run_goes_on_from_a_checkpoint_with_its_weights(tmp_path: Path) -> None:
    wanted = train()

    def part(epochs: int, path: Path | None) -> Any:
        task = Tiny()
        trainer = quiet_trainer(strategy=OffloadStrategy("device", stream=True), max_epochs=epochs)
        torch.manual_seed(3)
        trainer.fit(task, batches(5), batches(2), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"after-{epochs}")
        return weights_of(task)

    part(1, None)
    assert_equal_weights(part(2, tmp_path / "after-1"), wanted[1])


# Failures, and optimizers that cannot be split


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("parameters", ["cpu", "device"])
def test_a_failure_amid_a_step_leaves_weights_at_home_and_all_gradients(
    parameters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = torch.optim.AdamW.step, 0

    @functools.wraps(own)
    def step(optimizer: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise ArithmeticError
        return own(optimizer, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    gradients: list[list[torch.Tensor]] = []
    for strategy, fails_at in (("single", 1), (OffloadStrategy(parameters, stream=True), 3)):  # noqa: B007  # by step
        task, calls = Tiny(), 0
        with pytest.raises(ArithmeticError):
            train(strategy, task=task, limit_val_batches=0)
        gradients.append([parameter.grad for parameter in task.parameters() if parameter.grad is not None])
    for found, wanted in zip(gradients[1], gradients[0], strict=True):
        assert torch.equal(found, wanted)
    untouched = Tiny()
    stepped = [
        not torch.equal(found.up.weight, before.up.weight)
        for found, before in zip(task.blocks, untouched.blocks, strict=True)
    ]
    assert stepped == [False] * (DEPTH - 2) + [True, True]


@pytest.mark.usefixtures("late")
def test_several_optimizers_may_share_a_unit() -> None:
    def task() -> Tiny:
        made = Tiny()
        norms = [p for name, p in made.named_parameters() if "norm" in name]
        others = [p for name, p in made.named_parameters() if "norm" not in name]
        made.configure_optimizers = lambda: (  # type: ignore[method-assign]
            [torch.optim.SGD(others, lr=0.1, momentum=0.9), torch.optim.Adam(norms, lr=0.1)]
        )
        return made

    for parameters in ("cpu", "device"):
        assert_same(train(OffloadStrategy(parameters, stream=True), task=task()), train(task=task()))


class SharedNorm(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        return super().step(closure)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("state", ["cpu", "disk"])
def test_an_optimizer_that_joins_its_parameters_steps_once(state: Any) -> None:
    def task() -> Tiny:
        made = Tiny()
        made.configure_optimizers = lambda: SharedNorm(made.parameters(), lr=0.1, momentum=0.9)  # type: ignore[method-assign]
        return made

    assert_same(train(OffloadStrategy("device", state, stream=True), task=task()), train(task=task()))


def test_torchs_optimizers_are_split_unless_somebody_would_notice() -> None:
    def parameters() -> list[torch.Tensor]:
        return [torch.nn.Parameter(torch.zeros(2, 2))]

    class Renamed(torch.optim.AdamW):
        pass

    for kind in (torch.optim.AdamW, torch.optim.Adafactor, torch.optim.SGD, Renamed):
        assert can_be_split(kind(parameters()))
    for other in (torch.optim.LBFGS, SharedNorm):
        assert not can_be_split(other(parameters()))
    heard = torch.optim.SGD(parameters())
    heard.register_step_post_hook(lambda *_: None)
    assert not can_be_split(heard)
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        assert not can_be_split(torch.optim.SGD(parameters()))
    finally:
        handle.remove()


@pytest.mark.requires("cuda", "copies that are made beside a device's computation")
@pytest.mark.parametrize(("parameters", "state"), PLACES)
def test_on_a_device_every_bit_is_that_of_waiting(parameters: Any, state: Any, tmp_path: Path) -> None:
    class Waiting(Callback):
        def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
            """Might look at gradients."""

        def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
            """Might write weights."""

    for accumulate in (1, 3):
        options: dict[str, Any] = {"accelerator": "gpu", "limit_val_batches": 0, "accumulate_grad_batches": accumulate}
        found = [
            train(OffloadStrategy(parameters, state, offload_folder=tmp_path), *callbacks, **options)
            for callbacks in ([], [Waiting()])
        ]
        assert_same(*found)
