"""Training with weights at home on the host or on disk equals training in one place, to the last bit."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.helpers.runs import StepRecorder, assert_equal_weights, quiet_trainer, weights_of
from trainwright import ConfigurationError, OffloadStrategy, TaskModule, TrainwrightWarning
from trainwright.callbacks import EMAWeightAveraging
from trainwright.callbacks.callback import Callback

WIDTH, DEPTH = 16, 5


class Block(nn.Module):
    """A residual block with dropout and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        changed: torch.Tensor = self.dropout(self.down(torch.tanh(self.up(self.norm(hidden)))))
        return hidden + changed


class Tiny(TaskModule):
    """An embedding, blocks, and a head that shares the embedding's weight."""

    def __init__(self, *, recompute: bool = False, units: bool = True) -> None:
        super().__init__()
        self.recompute, self.units = recompute, units
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed = nn.Embedding(11, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
            self.head = nn.Linear(WIDTH, 11)
            self.head.weight = self.embed.weight

    def shard_units(self) -> list[nn.Module]:
        return list(self.blocks) if self.units else []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
        scores: torch.Tensor = self.head(hidden)
        return scores

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"},
        }


def batches(count: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 11, (2, 7), generator=generator) for _ in range(count)]


def train(
    task: TaskModule, strategy: Any = "single", **options: Any
) -> tuple[StepRecorder, dict[str, torch.Tensor], Any]:
    recorder = StepRecorder()
    settings = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, **options}
    trainer = quiet_trainer(strategy=strategy, **{**settings, "callbacks": [recorder, *settings.get("callbacks", [])]})
    torch.manual_seed(3)
    trainer.fit(task, batches(), batches(2) if settings.get("limit_val_batches") != 0 else None)
    return recorder, weights_of(task), trainer


def assert_same(found: Any, wanted: Any) -> None:
    assert found[0].losses == wanted[0].losses
    assert found[0].norms == wanted[0].norms
    assert_equal_weights(found[1], wanted[1])
    assert found[2].callback_metrics == wanted[2].callback_metrics


PLACES = [(p, o) for p in ("cpu", "disk", "device") for o in ("cpu", "disk")]


@pytest.mark.parametrize("stream", [True, None])
@pytest.mark.parametrize(("parameters", "state"), PLACES)
def test_it_equals_training_in_one_place(parameters: Any, state: Any, stream: bool | None, tmp_path: Path) -> None:
    wanted = train(Tiny())
    strategy = OffloadStrategy(parameters, state, stream=stream, offload_folder=tmp_path)
    assert_same(train(Tiny(), strategy), wanted)
    assert max(wanted[0].norms) > 0.5  # something is clipped
    assert list(tmp_path.iterdir()) == []  # files have no names


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_the_device_holds_as_many_units_as_it_should(ahead: int) -> None:
    task = Tiny()
    seen: list[int] = []

    def count(*_: Any) -> None:
        units = task.trainer.strategy.weight_stream.units
        seen.append(sum(unit.flats[0][1].untyped_storage().nbytes() > 0 for unit in units))

    for block in task.blocks:
        block.up.register_forward_hook(count)
        block.norm.weight.register_hook(count)
    train(task, OffloadStrategy(stream=True, prefetch=ahead), accumulate_grad_batches=1, limit_val_batches=0)
    assert max(seen) == 1 + ahead
    assert len(seen) == 2 * 8 * 2 * DEPTH


def test_units_are_found_by_size_where_nobody_names_them() -> None:
    found: list[int] = []

    class Look(Callback):
        def on_train_start(self, trainer: Any, task: Any) -> None:
            found.append(len(trainer.strategy.weight_stream.units))

    strategy = OffloadStrategy(stream=True)
    assert_same(train(Tiny(units=False), strategy, callbacks=[Look()]), train(Tiny(units=False)))
    assert found[0] >= DEPTH


def test_activations_may_be_computed_anew() -> None:
    assert_same(train(Tiny(recompute=True), OffloadStrategy(stream=True)), train(Tiny(recompute=True)))


def test_a_frozen_base_streams_and_small_additions_train() -> None:
    def frozen() -> Tiny:
        task = Tiny()
        for name, parameter in task.named_parameters():
            parameter.requires_grad = "norm" in name
        return task

    before = weights_of(frozen())
    found = train(frozen(), OffloadStrategy(stream=True))
    assert_same(found, train(frozen()))
    assert torch.equal(found[1]["blocks.0.up.weight"], before["blocks.0.up.weight"])


@pytest.mark.slow
@pytest.mark.requires("peft", reason="LoRA adapters")
@pytest.mark.filterwarnings("ignore")
def test_lora_trains_over_an_offloaded_base() -> None:
    import peft

    class Adapted(Tiny):
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(1)
                config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights="gaussian")
                peft.inject_adapter_in_model(config, self)

    found = train(Adapted(), OffloadStrategy(stream=True))
    assert_same(found, train(Adapted()))
    assert any("lora" in name for name in found[1])


def test_what_is_unfrozen_during_a_run_trains() -> None:
    class Unfreeze(Callback):
        def on_train_epoch_start(self, trainer: Any, task: Any) -> None:
            if trainer.current_epoch == 1:
                task.blocks[2].requires_grad_(True)

    def task() -> Tiny:
        made = Tiny()
        made.configure_optimizers = lambda: torch.optim.SGD(made.parameters(), lr=0.1)  # type: ignore[method-assign]
        made.blocks[2].requires_grad_(False)
        return made

    found = train(task(), OffloadStrategy(stream=True), callbacks=[Unfreeze()])
    assert_same(found, train(task(), callbacks=[Unfreeze()]))
    assert not torch.equal(found[1]["blocks.2.up.weight"], weights_of(task())["blocks.2.up.weight"])


@pytest.mark.parametrize("parameters", ["cpu", "device"])
def test_averages_are_evaluated(parameters: Any) -> None:
    options: dict[str, Any] = {"callbacks": [EMAWeightAveraging(decay=0.5)]}
    wanted = train(Tiny(), callbacks=[EMAWeightAveraging(decay=0.5)])
    assert_same(train(Tiny(), OffloadStrategy(parameters, stream=True), **options), wanted)


@pytest.mark.parametrize("parameters", ["cpu", "device"])
def test_predictions_are_the_same(parameters: Any) -> None:
    wanted = quiet_trainer().predict(Tiny(), batches(3))
    found = quiet_trainer(strategy=OffloadStrategy(parameters, stream=True)).predict(Tiny(), batches(3))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_a_failed_step_leaves_every_weight_at_home() -> None:
    class Failing(Tiny):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.blocks[0](self.embed(tokens))
            self.blocks[1](hidden)
            raise ArithmeticError

    task = Failing()
    before = weights_of(task)
    with pytest.raises(ArithmeticError):
        train(task, OffloadStrategy(stream=True), limit_val_batches=0)
    for name in ("embed.weight", "blocks.1.up.weight"):
        assert torch.equal(task.state_dict()[name], before[name])


def test_listeners_to_gradients_find_them_at_home() -> None:
    class Look(Callback):
        def __init__(self) -> None:
            self.sums: list[float] = []

        def on_after_backward(self, trainer: Any, task: Any) -> None:
            self.sums.append(sum(float(p.grad.sum()) for p in task.parameters()))

        def on_before_zero_grad(self, trainer: Any, task: Any, optimizer: Any) -> None:
            self.sums.append(sum(float(p.grad.sum()) for p in task.parameters() if p.grad is not None))

    looks = [Look(), Look()]
    assert_same(train(Tiny(), OffloadStrategy(stream=True), callbacks=[looks[0]]), train(Tiny(), callbacks=[looks[1]]))
    assert looks[0].sums == looks[1].sums


def test_bf16_mixed_is_that_of_one_place() -> None:
    options: dict[str, Any] = {"precision": "bf16-mixed", "limit_val_batches": 0}
    assert_same(train(Tiny(), OffloadStrategy(stream=True), **options), train(Tiny(), **options))


def test_the_state_of_an_optimizer_lies_in_files(tmp_path: Path) -> None:
    mapped: list[bool] = []

    class Look(Callback):
        def on_train_end(self, trainer: Any, task: Any) -> None:
            maps = Path("/proc/self/maps").read_text()
            mapped.append(str(tmp_path) in maps)
            state = trainer.optimizers[0].state
            mapped.extend(hasattr(s["exp_avg"], "_trainwright_on_host") for s in state.values())

    train(Tiny(), OffloadStrategy("disk", "disk", offload_folder=tmp_path), callbacks=[Look()])
    assert mapped == [True] * len(mapped)
    assert len(mapped) > DEPTH


def test_a_full_disk_is_an_error_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    task = Tiny()
    before = weights_of(task)
    with pytest.raises(ConfigurationError, match=r"do not fit into.*Set offload_folder"):
        train(task, OffloadStrategy("disk", stream=True, offload_folder=tmp_path))
    assert_equal_weights(weights_of(task), before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: OffloadStrategy("gpu"), "parameters='gpu', expected one of 'cpu', 'disk', 'device'"),
        (lambda: OffloadStrategy(optimizer_state="nvme"), "optimizer_state='nvme', expected one of 'cpu', 'disk'"),
        (lambda: OffloadStrategy(prefetch=-1), "expected 0 or more"),
        (lambda: quiet_trainer(strategy="offload", compile=True), "Remove compile="),
        (lambda: quiet_trainer(strategy="offload", devices=2), "one process"),
    ],
)
def test_what_it_cannot_do_is_refused_at_once(make: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make()


def test_a_model_without_units_is_warned_of() -> None:
    class Flat(Tiny):
        def shard_units(self) -> list[nn.Module]:
            return []

    task = Flat()
    task.embed, task.blocks, task.head = nn.Embedding(11, 11), nn.ModuleList(), nn.Identity()  # type: ignore[assignment]
    strategy = OffloadStrategy(stream=True, min_num_params=10**6)
    with pytest.warns(TrainwrightWarning, match="Flat has no units to stream"):
        train(task, strategy, limit_val_batches=0)
