"""Loops of one's own with `Accelerator`, in one process: equal to the same loop written by hand, to the last bit."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights, weights_of
from trainwright.accelerator.accelerator import Accelerator
from trainwright.accelerator.gradient_state import GradientAccumulationPlugin
from trainwright.core.errors import ConfigurationError, TaskError, TrainwrightWarning
from trainwright.processes.partial_state import PartialState

pytestmark = pytest.mark.usefixtures("fresh_state")


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def _data(num: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(num, 4, generator=generator), torch.randn(num, 2, generator=generator))


def _train(accelerator: Accelerator, net: Any, data: TensorDataset, *, num_epochs: int = 2) -> tuple[Any, ...]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 1, 0.5)
    loader: Any = DataLoader(data, batch_size=1)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)  # type: ignore[assignment]
    for _ in range(num_epochs):
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(nn.functional.mse_loss(net(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return net, optimizer, loader, scheduler


def test_a_loop_with_accumulation_equals_one_by_hand_also_in_its_short_last_group() -> None:
    by_hand, data = _net(), _data(10)
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 1, 0.5)
    for _ in range(2):
        for group in ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9,)):
            for i in group:
                x, y = data[i : i + 1]
                (nn.functional.mse_loss(by_hand(x), y) / 3).backward()  # in the short group too
            nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(3, short_group="steps"), cpu=True)
    net, ours, _, schedule = _train(accelerator, _net(), data)
    assert_equal_weights(weights_of(net), weights_of(by_hand))
    assert ours.state_dict()["state"][0]["step"] == 8
    assert schedule.get_last_lr() == scheduler.get_last_lr()
    again: Any = accelerator.prepare(torch.optim.AdamW(net.parameters(), lr=0.9))
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    torch.testing.assert_close(again.optimizer.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    again.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.5})
    assert again.optimizer.param_groups[1]["lr"] == 0.5


def test_bf16_computes_under_autocast_and_gives_float32() -> None:
    by_hand, data = _net(), _data(4)
    ours = Accelerator(cpu=True, mixed_precision="bf16").prepare(copy.deepcopy(by_hand))
    x = data.tensors[0]
    with torch.autocast("cpu", torch.bfloat16):
        wanted = by_hand(x)
    assert wanted.dtype is torch.bfloat16
    found = ours(x)
    assert found.dtype is torch.float32
    assert torch.equal(found, wanted.float())
    assert list(ours.state_dict()) == list(by_hand.state_dict())
    ones = {name: torch.ones_like(value) for name, value in by_hand.state_dict().items()}
    ours.load_state_dict(ones, assign=True)
    assert all(p.data_ptr() == ones[name].data_ptr() for name, p in ours.named_parameters())


class Overflows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, factor: float) -> torch.Tensor:
        return (self.weight * factor).sum()


def test_fp16_leaves_out_steps_that_overflow_and_their_schedule_too() -> None:
    net = Overflows()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.5)
    schedule: Any = StepLR(optimizer, 1, 0.5)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    ours, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    skipped, rates, scales = [], [], []
    for factor in (1.0, math.inf, 1.0):
        accelerator.backward(ours(factor))
        norm = float(accelerator.clip_grad_norm_(ours.parameters(), 100.0))
        assert norm == pytest.approx(math.sqrt(2) * factor)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        rates.append(schedule.get_last_lr()[0])
        scales.append(accelerator._scale.scaler.get_scale())
    assert skipped == [False, True, False]
    assert rates == [0.25, 0.25, 0.125]
    assert scales == [65536.0, 65536.0, 32768.0]  # changed before the next backward
    assert net.weight.tolist() == [0.25, 0.25]


def test_a_pass_may_begin_in_its_middle_without_fetching_what_was_before() -> None:
    fetched: list[int] = []

    class Data(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> int:
            fetched.append(index)
            return index

    accelerator = Accelerator(cpu=True, seed=5)
    loader = accelerator.prepare(DataLoader(Data(), batch_size=2, shuffle=True))
    whole = [batch.tolist() for batch in loader]
    fetched.clear()
    loader.set_epoch(0)
    rest = accelerator.skip_first_batches(loader, 4)
    assert accelerator.prepare(rest) is rest
    assert (len(rest), rest.batch_size) == (2, 2)
    assert [batch.tolist() for batch in rest] == whole[4:]
    assert fetched == [index for batch in whole[4:] for index in batch]
    loader.set_epoch(1)
    second = [batch.tolist() for batch in loader]
    loader.set_epoch(0)
    assert len(list(accelerator.skip_first_batches(loader, 5))) == 1
    assert [batch.tolist() for batch in loader] == second != whole  # the pass that was skipped into has counted
    assert len(list(rest)) == 2  # in each pass


def test_an_evaluation_within_a_pass_leaves_its_groups_alone() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(3, short_group="mean"))
    net, other = _net(), _net()
    train, val = (DataLoader(_data(7), batch_size=1) for _ in range(2))
    ours, ours_train, ours_val = accelerator.prepare(net, train, val)
    due = []
    for i, (x, y) in enumerate(ours_train):
        if i == 1:
            with torch.no_grad():
                assert sum(len(accelerator.gather_for_metrics(ours(vx))) for vx, _ in ours_val) == 7
        with accelerator.accumulate(ours):
            accelerator.backward(nn.functional.mse_loss(ours(x), y))
            due.append(accelerator.sync_gradients)
    assert due == [False, False, True, False, False, True, True]
    for group in ((0, 1, 2), (3, 4, 5), (6,)):
        for i in group:
            x, y = _data(7)[i : i + 1]
            (nn.functional.mse_loss(other(x), y) / len(group)).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), other.parameters(), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"mixed_precision": "fp61"}, "Did you mean 'fp16'"),
        ({"gradient_accumulation_steps": 0}, "at least 1"),
        ({"megatron_lm_plugin": 1}, "MegatronLMPlugin"),
        ({"mixed_precison": "fp16"}, "Did you mean 'mixed_precision'"),
        ({"kwargs_handlers": [3]}, "holds a int"),
    ],
)
def test_what_it_does_not_take_is_said_with_what_to_do(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Accelerator(cpu=True, **arguments)
    assert not PartialState._shared_state  # nothing was joined


def test_a_wrong_call_says_what_to_do() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    with pytest.raises(AttributeError, match="Did you mean 'gather'"):
        _ = accelerator.gathr
    with pytest.raises(TaskError, match="without a graph"):
        accelerator.backward(torch.tensor(1.0))
    with pytest.raises(ConfigurationError, match="1 entries for 2 objects"):
        accelerator.prepare(_net(), _net(), device_placement=[True])
    with pytest.raises(ConfigurationError, match=r"'min' is unknown.*mean, sum, max, none"):
        accelerator.reduce(torch.ones(2), "min")
    net = _net()
    accelerator.prepare(net, torch.optim.SGD(net.parameters()))
    accelerator.backward(net(torch.ones(1, 4)).sum())
    accelerator.clip_grad_norm_(net.parameters(), 1.0)
    accelerator.backward(net(torch.ones(1, 4)).sum())
    with pytest.raises(ConfigurationError, match="after the last backward"):
        accelerator.clip_grad_norm_(net.parameters(), 1.0)


def test_unwrap_model_removes_all_wrappers() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    net = nn.Linear(2, 2)
    prepared = accelerator.prepare(net)
    compiled: Any = torch.compile(prepared, backend="eager")
    found: Any = accelerator.unwrap_model(compiled)
    assert type(found) is type(compiled)
    assert found._orig_mod is net
    assert compiled._orig_mod is prepared  # the loop goes on to train through it
    assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is net
    assert accelerator.unwrap_model(nn.DataParallel(prepared)) is net
    assert accelerator.get_state_dict(compiled).keys() == net.state_dict().keys()
    own = torch.compile(nn.Linear(2, 2), backend="eager")
    assert accelerator.unwrap_model(accelerator.prepare(own)) is own
    assert accelerator.unwrap_model(net) is net


def test_an_accelerator_is_pickled_with_prepared_objects() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    net = nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    loader: Any = DataLoader(torch.ones(4, 2), batch_size=1)  # type: ignore[arg-type]
    made = (accelerator, *accelerator.prepare(net, optimizer, loader))
    other, model, optimizer, loader = pickle.loads(pickle.dumps(made))
    assert (other.mixed_precision, other.gradient_accumulation_steps) == ("bf16", 2)
    assert other.prepare(model) is model
    before, changed = model.module.weight.clone(), []
    for x in loader:
        with other.accumulate(model):
            other.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
            changed.append(not torch.equal(before, model.module.weight))
    assert changed == [False, True, True, True]
    assert copy.deepcopy(accelerator).num_processes == 1
    assert pickle.loads(pickle.dumps(made[2])).param_groups[0]["lr"] == 0.1


def test_what_programs_read_of_accelerate_s_lists() -> None:
    accelerator = Accelerator(cpu=True)
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    loader: Any = DataLoader(torch.ones(4, 2))  # type: ignore[arg-type]
    prepared = accelerator.prepare(net, optimizer, schedule, loader)
    lists = (accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders)
    assert [found[0] for found in lists] == list(prepared)
    assert all(one._is_accelerate_prepared for one in prepared)
    accelerator.sync_gradients = False
    assert not accelerator.gradient_state.sync_gradients
    accelerator.free_memory()
    assert not accelerator._dataloaders


def test_hooks_of_states_remain_registered_after_free_memory(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    calls: list[str] = []
    save_handle = accelerator.register_save_state_pre_hook(lambda *_: calls.append("save"))
    load_handle = accelerator.register_load_state_pre_hook(lambda *_: calls.append("load"))
    accelerator.free_memory()
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    assert calls == ["save", "load"]
    save_handle.remove()
    load_handle.remove()
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    assert calls == ["save", "load"]


def test_a_state_is_saved_with_the_arguments_that_scripts_pass(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "a", safe_serialization=True)
    with pytest.warns(TrainwrightWarning, match="safetensors all the same"):
        accelerator.save_state(str(tmp_path / "b"), safe_serialization=False)
    for call, text in (
        (accelerator.save_state, r"output_dir='"),
        (accelerator.load_state, r"input_dir='"),
        (lambda: accelerator.save_state(tmp_path / "c", exclude_frozen_parameters=True), "exclude_frozen_parameters="),
        (lambda: accelerator.load_state(tmp_path / "a", load_kwargs={"weights_only": True}), "load_kwargs="),
    ):
        with pytest.raises(ConfigurationError, match=text):
            call()  # type: ignore[no-untyped-call]
    assert not (tmp_path / "c").exists()


def _pickle_among_two() -> Any:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    other = pickle.loads(pickle.dumps(accelerator))
    net = nn.Linear(2, 1)
    model = other.prepare(net)
    other.backward(model(torch.ones(1, 2)).sum() * (1 + other.process_index))
    with pytest.raises(ConfigurationError, match="before prepare"):
        pickle.dumps(other)
    return net.bias.grad.item()  # type: ignore[union-attr]


@pytest.mark.distributed
def test_an_accelerator_of_several_processes_pickles_its_settings() -> None:
    assert run_distributed(_pickle_among_two, 2, init=False, timeout=60) == [0.75, 0.75]
