"""Calls of Accelerate's documentation, page by page, in programs that run in one process and on two ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.distributed import run_distributed
from trainwright import (
    Accelerator,
    AcceleratorState,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    PartialState,
    gather,
    gather_object,
)
from trainwright.state import GradientState
from trainwright.utils import GradientAccumulationPlugin, load, save, wait_for_everyone

_ROWS = 16


def _data(batch_size: int = 2) -> DataLoader[Any]:
    values = torch.arange(_ROWS * 4, dtype=torch.float32).reshape(_ROWS, 4) / 64
    return DataLoader(TensorDataset(values, values.sum(1, keepdim=True)), batch_size=batch_size)


def _net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Linear(4, 1)


def state_page(folder: Path) -> None:
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2)
    )
    state = AcceleratorState()
    assert "Num processes" in str(state)
    assert state.mixed_precision == accelerator.mixed_precision == "bf16"
    assert (state.device, state.num_processes) == (accelerator.device, PartialState().num_processes)
    assert state.is_main_process == (state.process_index == 0)
    model, loader = accelerator.prepare(_net(), _data())
    gradients = accelerator.gradient_state
    assert isinstance(gradients, GradientState)
    seen = []
    for inputs, _ in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).mean())
            seen.append((gradients.sync_gradients, gradients.end_of_dataloader, gradients.in_dataloader))
    assert (gradients.num_steps, gradients.in_dataloader) == (2, False)
    assert [sync for sync, _, _ in seen] == [False, True] * (len(seen) // 2)
    assert [end for _, end, _ in seen] == [False] * (len(seen) - 1) + [True]


def execution_page(folder: Path) -> None:
    accelerator, ran = Accelerator(cpu=True), []
    rank, last = accelerator.process_index, accelerator.num_processes - 1

    @accelerator.on_main_process
    def main() -> None:
        ran.append("main")

    @accelerator.on_local_main_process
    def local() -> None:
        ran.append("local")

    @accelerator.on_last_process
    def at_the_end() -> None:
        ran.append("last")

    @accelerator.on_process(process_index=0)
    def on_0() -> None:
        ran.append("0")

    @accelerator.on_local_process(local_process_idx=0)
    def on_local_0() -> None:
        ran.append("local 0")

    for function in (main, local, at_the_end, on_0, on_local_0):
        function()
    assert ran == (["main", "local"] if rank == 0 else []) + (["last"] if rank == last else []) + (
        ["0", "local 0"] if rank == 0 else []
    )
    accelerator.print("once")
    file = folder / "downloaded"
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            assert not file.exists()
            time.sleep(0.1)
            file.write_text("x")
        assert file.read_text() == "x"
    # A download by hand: the main process loads first, and the others wait.
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
    assert file.exists()
    if accelerator.is_main_process:
        accelerator.wait_for_everyone()
    with accelerator.local_main_process_first():
        pass
    wait_for_everyone()


def saving_page(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(_net())
    optimizer = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    plain = accelerator.unwrap_model(model)
    accelerator.save(plain.state_dict(), folder / "weights.pth")
    save(plain.state_dict(), folder / "weights.safetensors", safe_serialization=True)
    accelerator.save_model(model, folder / "model", max_shard_size="1GB", safe_serialization=True)
    accelerator.wait_for_everyone()
    for found in (load(folder / "weights.pth"), *map(load_file, folder.rglob("*.safetensors"))):
        torch.testing.assert_close(dict(found), dict(plain.state_dict()), rtol=0, atol=0)
    assert len(list(folder.rglob("*.safetensors"))) == 2


def inference_page(folder: Path) -> None:
    state = PartialState()
    ranks = state.num_processes
    with state.split_between_processes(["a dog", "a cat", "a chicken"], apply_padding=True) as prompts:
        made = [prompt.upper() for prompt in prompts]
    assert gather_object(made)[:3] == ["A DOG", "A CAT", "A CHICKEN"]
    assert len(gather_object(made)) == (3 if ranks == 1 else 4)
    with Accelerator(cpu=True).split_between_processes({"x": torch.arange(4), "y": list("abcd")}) as share:
        assert len(share["x"]) == len(share["y"]) == 4 // ranks
    with AcceleratorState().split_between_processes(torch.arange(5)) as rows:
        assert gather_object(rows.tolist()) == list(range(5))
    results = gather_object([[state.process_index, "answer"]])
    assert [rank for rank, _ in results] == list(range(ranks))
    if state.is_last_process:
        print(results)


_PAGES: list[Callable[[Path], None]] = [state_page, execution_page, saving_page, inference_page]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.__name__)
def test_the_calls_of_a_page_work_in_one_process(page: Callable[[Path], None], tmp_path: Path) -> None:
    page(tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.__name__)
def test_the_calls_of_a_page_work_on_two_ranks(page: Callable[[Path], None], tmp_path: Path) -> None:
    run_distributed(page, 2, tmp_path, init=False)


# Communication hooks

_HOOK = DDPCommunicationHookType
_HOOKS: dict[str, dict[str, Any]] = {
    "fp16": {"comm_hook": _HOOK.FP16},
    "bf16": {"comm_hook": _HOOK.BF16},
    "powerSGD": {"comm_hook": _HOOK.POWER_SGD},
    "powerSGD in fp16": {"comm_hook": _HOOK.POWER_SGD, "comm_wrapper": _HOOK.FP16},
    "powerSGD of rank 2": {"comm_hook": _HOOK.POWER_SGD, "comm_state_option": {"matrix_approximation_rank": 2}},
}


def _train(options: dict[str, Any] | None) -> list[float]:
    handlers = None if options is None else [DistributedDataParallelKwargs(**options)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    net = _net()
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), _data())
    for inputs, targets in loader:
        accelerator.backward((model(inputs) - targets).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return gather(net.weight.detach().flatten()).tolist()  # type: ignore[union-attr,operator,no-any-return]


def _train_with_hooks() -> dict[str, list[float]]:
    return {name: _train(options) for name, options in {"plain": None, **_HOOKS}.items()}


@pytest.mark.distributed
def test_hooks_of_the_page_train_as_without_them() -> None:
    found, _ = run_distributed(_train_with_hooks, 2, init=False)
    for name, weights in found.items():
        assert weights[:4] == weights[4:], name  # the same on both ranks
        assert weights == pytest.approx(found["plain"], abs=2e-2), name
