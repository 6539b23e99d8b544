"""What takes another path on an accelerator, once for each area: the same tests run on the CPU, where its path is.

`docs/hardware.md` says which of these have run on which hardware.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint import read_checkpoint
from trainwright.core.process import Topology
from trainwright.processes.process_group import ProcessGroup
from trainwright.strategies import OffloadStrategy
from trainwright.strategies.offload.copy_stream import CopyStream

_ON_CUDA = pytest.mark.requires("cuda", reason="a path that the CPU does not take")
DEVICES = pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=_ON_CUDA)])


def device_of(kind: str) -> torch.device:
    return torch.device(kind) if kind == "cpu" else torch.device(kind, 0)


class WideTask(RegressionTask):
    """Large enough that a copy to the host takes longer than asking for it."""

    def __init__(self, width: int = 512, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 1))


@DEVICES
def test_a_save_beside_the_training_holds_the_weights_of_its_step(kind: str, tmp_path: Path) -> None:
    seen: dict[int, dict[str, torch.Tensor]] = {}

    class Notes(Callback):
        def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
            seen[trainer.global_step] = {name: value.cpu() for name, value in weights_of(task).items()}

    saves = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    quiet_trainer(accelerator=kind, max_steps=6, callbacks=[Notes(), saves]).fit(
        WideTask(lr=1e-3, momentum=0.9), regression_loader(32, 4)
    )
    found = {saved.state["step"]: saved for saved in map(read_checkpoint, tmp_path.glob("epoch=*"))}
    assert sorted(found) == [2, 4, 6]
    for step, checkpoint in found.items():
        assert_equal_weights(dict(checkpoint.model or {}), seen[step])


@DEVICES
@pytest.mark.parametrize("start", [2.0**10, 2.0**127])
def test_a_scaled_step_is_that_of_a_loop_by_hand(kind: str, start: float) -> None:
    device, loader = device_of(kind), regression_loader(32, 4)

    class Starts(Callback):
        def on_train_start(self, trainer: Any, task: Any) -> None:
            trainer.strategy.scaler._init_scale = start  # the second: some steps are left out

    trained, by_hand = RegressionTask(momentum=0.9), RegressionTask(momentum=0.9).to(device)
    quiet_trainer(accelerator=kind, precision="16-mixed", max_epochs=1, callbacks=[Starts()]).fit(trained, loader)
    scaler = torch.amp.GradScaler(kind, init_scale=start)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.05, momentum=0.9)
    for inputs, targets in loader:
        with torch.autocast(kind, dtype=torch.float16):
            loss = nn.functional.mse_loss(by_hand(inputs.to(device)), targets.to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert_equal_weights(weights_of(trained), {name: value.to(device) for name, value in weights_of(by_hand).items()})


@DEVICES
@pytest.mark.distributed
def test_a_group_of_one_process_takes_tensors_of_the_device_and_objects_of_the_host(kind: str) -> None:
    device, processes = device_of(kind), ProcessGroup(Topology("none"))
    processes.open(device)
    try:
        for place in {device, torch.device("cpu")}:
            value = torch.arange(3.0, device=place)
            group = processes.group_for(place)
            torch.distributed.all_reduce(value, group=group)
            torch.distributed.broadcast(value, 0, group=group)
            assert value.tolist() == [0.0, 1.0, 2.0]
        assert torch.distributed.get_backend() == {"cpu": "gloo", "cuda": "nccl"}[kind]
        assert processes.gather_object({"rank": 0}) == [{"rank": 0}]
        assert processes.gather_integers([4, 5]) == [[4, 5]]
        assert processes.any(True)
        assert not processes.any(False)
        processes.barrier()
    finally:
        processes.close()


@DEVICES
def test_copies_on_a_stream_of_their_own_are_ordered_with_the_computation(kind: str) -> None:
    device = device_of(kind)
    to_device, from_device = CopyStream(device), CopyStream(device)
    weight = torch.ones(2**22, pin_memory=kind != "cpu")
    there = torch.empty_like(weight, device=device)
    for number in range(1, 9):
        to_device.join(to_device.queue(lambda: there.copy_(weight, non_blocking=True)))
        result = there * number
        home, event = from_device.fetch(result)
        result = None  # its memory is kept until it has been copied
        there.mul_(0)
        from_device.wait(event)
        assert home.device.type == "cpu"
        assert torch.equal(home, torch.full_like(weight, float(number)))
        from_device.release()
    to_device.synchronize()
    from_device.synchronize()


@DEVICES
@pytest.mark.parametrize("parameters", ["cpu", "device"])
def test_weights_that_visit_the_device_learn_what_those_that_stay_there_learn(kind: str, parameters: Any) -> None:
    found = []
    for strategy in ("auto", OffloadStrategy(parameters, stream=True)):
        task = WideTask(width=64, momentum=0.9)
        quiet_trainer(accelerator=kind, strategy=strategy, max_epochs=1).fit(task, regression_loader(32, 4))
        found.append({name: value.cpu() for name, value in weights_of(task).items()})
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)  # the optimizer steps on another device
