"""Calls of Accelerate's documentation, page by page, in programs that run in one process and on two ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from tests.helpers.distributed import run_distributed
from trainwright import (
    Accelerator,
    AcceleratorState,
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    PartialState,
    broadcast,
    broadcast_object_list,
    concatenate,
    find_executable_batch_size,
    gather,
    gather_object,
    pad_across_processes,
    recursively_apply,
    reduce,
    release_memory,
    send_to_device,
    skip_first_batches,
    synchronize_rng_states,
)
from trainwright.core.errors import ConfigurationError, DistributedOperationException, TrainwrightWarning
from trainwright.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    prepare_data_loader,
)
from trainwright.local_sgd import LocalSGD
from trainwright.logging import get_logger
from trainwright.state import GradientState
from trainwright.utils import (
    GradientAccumulationPlugin,
    TorchDynamoPlugin,
    clear_environment,
    load,
    patch_environment,
    save,
    set_seed,
    wait_for_everyone,
)

_ROWS = 16


def _data(batch_size: int = 2) -> DataLoader[Any]:
    values = torch.arange(_ROWS * 4, dtype=torch.float32).reshape(_ROWS, 4) / 64
    return DataLoader(TensorDataset(values, values.sum(1, keepdim=True)), batch_size=batch_size)


def _net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Linear(4, 1)


# Utilities


def environment_page(folder: Path) -> None:
    with patch_environment(trial_port=29500, trial_name="a"):
        assert (os.environ["TRIAL_PORT"], os.environ["TRIAL_NAME"]) == ("29500", "a")
        with clear_environment():
            assert "TRIAL_PORT" not in os.environ
            os.environ["TRIAL_LOST"] = "1"
        assert os.environ["TRIAL_NAME"] == "a"
    assert not {"TRIAL_PORT", "TRIAL_LOST"} & os.environ.keys()


def operations_page(folder: Path) -> None:
    state = PartialState()
    rank, ranks = state.process_index, state.num_processes
    batch = {"tokens": torch.ones(2, 3, dtype=torch.long), "rest": [torch.zeros(2), "text"]}
    doubled = recursively_apply(lambda leaf, by: leaf * by, batch, 2)
    assert (int(doubled["tokens"].sum()), doubled["rest"][1]) == (12, "text")
    kept = send_to_device(batch, state.device, skip_keys="rest")
    assert kept["rest"] is batch["rest"]
    assert concatenate([batch["tokens"], batch["tokens"]], dim=1).shape == (2, 6)
    with pytest.raises(TypeError, match="takes tensors"):
        recursively_apply(torch.neg, batch, error_on_other_type=True)
    assert gather(torch.tensor([rank])).tolist() == list(range(ranks))
    assert reduce({"loss": torch.tensor(1.0)}, reduction="sum")["loss"] == ranks
    assert broadcast(torch.tensor([rank + 5])).tolist() == [5]
    padded = pad_across_processes({"ids": torch.ones(1 + rank)}, pad_index=-1)
    assert padded["ids"].tolist() == [1.0] + [-1.0 if rank == 0 else 1.0] * (ranks - 1)


def objects_page(folder: Path) -> None:
    state = PartialState()
    rank, ranks = state.process_index, state.num_processes
    assert gather_object([{"rank": rank}] * (1 + rank)) == [{"rank": r} for r in range(ranks) for _ in range(1 + r)]
    names = ["chosen", 3] if rank == 0 else [None, None]
    assert broadcast_object_list(names, from_process=0) == ["chosen", 3]
    assert names[0] == "chosen"  # in place


def batch_size_page(folder: Path) -> None:
    accelerator, tried = Accelerator(cpu=True), []

    @find_executable_batch_size(starting_batch_size=32)
    def train(batch_size: int, factor: int) -> int:
        accelerator.free_memory()
        tried.append(batch_size)
        model, loader = accelerator.prepare(_net(), _data(batch_size))
        if batch_size > 8:
            raise RuntimeError("CUDA out of memory.")
        accelerator.backward(model(next(iter(loader))[0]).mean())
        return batch_size * factor

    found = train(2)
    assert found == 2 * tried[-1]
    assert tried[-1] <= 8
    first, second = release_memory(torch.ones(2), torch.ones(2))
    assert (first, second) == (None, None)


def seeds_page(folder: Path) -> None:
    set_seed(7, device_specific=True)
    synchronize_rng_states(["torch"])
    drawn = gather(torch.rand(1))
    assert len(set(drawn.tolist())) == 1


# Logging and states


def logging_page(folder: Path) -> None:
    PartialState()
    logger = get_logger("reference_blocks", log_level="DEBUG")
    assert logger.isEnabledFor(10)
    logger.debug("on the main process")
    logger.debug("on every process", main_process_only=False)
    logger.debug("one after the other", main_process_only=False, in_order=True)
    logger.warning_once("once")


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


def handlers_page(folder: Path) -> None:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16",
        dynamo_plugin=TorchDynamoPlugin(backend="no"),
        kwargs_handlers=[
            AutocastKwargs(cache_enabled=True),
            DistributedDataParallelKwargs(find_unused_parameters=True),
            GradScalerKwargs(init_scale=8.0),
            InitProcessGroupKwargs(timeout=timedelta(seconds=800)),
        ],
    )
    net = nn.ModuleDict({"used": nn.Linear(4, 1), "unused": nn.Linear(4, 1)})
    net.forward = lambda inputs: net["used"](inputs)  # type: ignore[method-assign]
    model = accelerator.prepare(net)
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 4)).float().mean())
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert nn.Linear(4, 1)(torch.ones(1, 4)).dtype == torch.float32
    with accelerator.autocast():
        assert nn.Linear(4, 1)(torch.ones(1, 4)).dtype == torch.bfloat16
    assert GradScalerKwargs(init_scale=8.0).to_kwargs() == {"init_scale": 8.0}


# Data loaders


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(_ROWS))


def loaders_page(folder: Path) -> None:
    state = PartialState()
    rank, ranks = state.process_index, state.num_processes
    sampler = BatchSampler(SequentialSampler(range(_ROWS)), 2, drop_last=False)
    mine = [row for batch in BatchSamplerShard(sampler, ranks, rank) for row in batch]
    assert sorted(gather_object(mine)) == list(range(_ROWS))
    split = BatchSamplerShard(sampler, ranks, rank, split_batches=True)
    assert {len(batch) for batch in split} == {2 // ranks}
    streamed = list(IterableDatasetShard(_Stream(), batch_size=2, num_processes=ranks, process_index=rank))
    assert sorted(gather_object(streamed)) == list(range(_ROWS))
    for cls, options in ((DataLoaderShard, {}), (DataLoaderDispatcher, {"split_batches": True})):
        loader: Any = cls(_Stream(), batch_size=2, **options)
        assert len(list(loader)) == 8
        assert loader.end_of_dataloader
    for options in (
        {},
        {"dispatch_batches": True, "put_on_device": True},
        {"split_batches": True},
        {"even_batches": False},
    ):
        free: Any = prepare_data_loader(_data(), num_processes=ranks, process_index=rank, **options)
        rows = torch.cat([inputs for inputs, _ in free])
        assert len(gather(rows).unique(dim=0)) == _ROWS
        skipped: Any = skip_first_batches(free, 1)
        assert len(list(skipped)) == len(list(free)) - 1


def loader_options_page(folder: Path) -> None:
    options = DataLoaderConfiguration(
        split_batches=True, dispatch_batches=False, even_batches=True, use_seedable_sampler=True, data_seed=3
    )
    accelerator = Accelerator(cpu=True, dataloader_config=options, rng_types=["torch"])
    assert (accelerator.split_batches, accelerator.dispatch_batches, accelerator.even_batches) == (True, False, True)
    loader = accelerator.prepare_data_loader(_data(4))
    rows = [accelerator.gather_for_metrics(inputs) for inputs, _ in loader]
    assert [len(row) for row in rows] == [4] * 4
    skipped = accelerator.skip_first_batches(loader, 3)
    assert torch.equal(accelerator.gather_for_metrics(next(iter(skipped))[0]), rows[3])
    assert torch.equal(accelerator.gather_for_metrics(next(iter(loader))[0]), rows[0])


# Execution


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


def deferring_page(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(_net())
    accelerator.wait_for_everyone()
    plain = accelerator.unwrap_model(model)
    accelerator.save(plain.state_dict(), folder / "weights.pth")
    save(plain.state_dict(), folder / "weights.safetensors", safe_serialization=True)
    accelerator.save_model(model, folder / "model", max_shard_size="1GB", safe_serialization=True)
    accelerator.wait_for_everyone()
    with accelerator.main_process_first():
        plain.load_state_dict(load(folder / "weights.pth", map_location="cpu"))
    assert (folder / "weights.safetensors").is_file()
    assert (folder / "model/model.safetensors").is_file()


def early_stop_page(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(_net(), _data())
    seen = 0
    for inputs, targets in loader:
        loss = (model(inputs) - targets).square().mean()
        accelerator.backward(loss)
        seen += 1
        if accelerator.is_last_process and seen == 2:  # one process decides
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    assert gather_object([seen]) == [2] * accelerator.num_processes


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


def local_sgd_page(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(_net(), _data())
    optimizer = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4, enabled=True) as local_sgd:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(inputs) - targets).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
    weights = gather(accelerator.unwrap_model(model).weight.detach())  # type: ignore[arg-type]
    assert all(torch.equal(weights[0], row) for row in weights)


_PAGES: list[Callable[[Path], None]] = [
    environment_page,
    operations_page,
    objects_page,
    batch_size_page,
    seeds_page,
    logging_page,
    state_page,
    handlers_page,
    loaders_page,
    loader_options_page,
    execution_page,
    deferring_page,
    early_stop_page,
    inference_page,
    local_sgd_page,
]


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


@pytest.mark.distributed
@pytest.mark.parametrize("hook", _HOOKS)
def test_a_hook_of_the_page_trains_as_without_it(hook: str) -> None:
    found, _ = run_distributed(_train, 2, _HOOKS[hook], init=False)
    plain, _ = run_distributed(_train, 2, None, init=False)
    assert found[:4] == found[4:]  # the same on both ranks
    assert found == pytest.approx(plain, abs=2e-2)


# Calls that differ on one rank


def _different_calls() -> dict[str, str]:
    accelerator = Accelerator(cpu=True)
    rank, zeros = accelerator.process_index, torch.zeros
    assert accelerator.state.debug
    calls: dict[str, Callable[[], Any]] = {
        "shape": lambda: gather({"a": zeros(2), "b": [zeros(2), zeros(2 + rank)]}),
        "dimensions": lambda: broadcast({"x": zeros(1, 5) if rank == 0 else zeros(1, 2, 5)}),
        "key": lambda: gather({"a": zeros(2)} | ({"b": zeros(1)} if rank else {})),
        "order": lambda: gather({"a": zeros(2), "b": zeros(2)} if rank else {"b": zeros(2), "a": zeros(2)}),
        "length": lambda: reduce([zeros(1)] * (1 + rank), "sum"),
        "reduction": lambda: reduce(zeros(1), ("sum", "mean")[rank]),
        "sender": lambda: broadcast(zeros(1), rank),
        "padding": lambda: pad_across_processes({"x": zeros(3) if rank == 0 else zeros(3, 1)}),
        "dtype": lambda: pad_across_processes({"x": zeros(3) if rank == 0 else zeros(3).long()}),
        "columns": lambda: accelerator.gather_for_metrics({"p": zeros(2, 3 + rank)}),
        "metric dtype": lambda: accelerator.gather_for_metrics({"p": zeros(2) if rank == 0 else zeros(2).long()}),
        "metric key": lambda: accelerator.gather_for_metrics({("p", "q")[rank]: zeros(2)}),
        "metric kind": lambda: accelerator.gather_for_metrics(zeros(2) if rank else ["text"]),
        "objects": lambda: gather_object([1]) if rank else gather(zeros(2)),
        "list": lambda: broadcast_object_list([1]) if rank else gather_object([1]),
        "value": lambda: gather({"a": zeros(1) if rank == 0 else "text"}),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises((ConfigurationError, TypeError)) as caught:
            call()
        expected = TypeError if name == "value" and rank else DistributedOperationException
        assert isinstance(caught.value, expected), name
        found[name] = str(caught.value)
    assert gather_object([rank]) == [0, 1]  # the processes still meet
    return found


_TEXTS = {
    "shape": ["In gather, ['b'][1] is (2,), float32 on process 0, and (3,), float32 on process 1."],
    "dimensions": ["broadcast(…, 0)", "['x'] is (1, 5), float32 on process 0, and (1, 2, 5), float32 on process 1"],
    "key": ["In gather, process 1 has a tensor at ['b'], and process 0 has none."],
    "order": ["process 1 has the keys in another order than process 0"],
    "length": ["In reduce(…, 'sum'), process 1 has a tensor at [1], and process 0 has none."],
    "reduction": ["process 0: reduce(…, 'sum')", "process 1: reduce(…, 'mean')"],
    "sender": ["process 0: broadcast(…, 0)", "process 1: broadcast(…, 1)"],
    "padding": ["pad_across_processes", "['x'] is 1 dimensions, float32 on process 0, and 2 dimensions"],
    "dtype": ["pad_across_processes", "['x'] is 1 dimensions, float32 on process 0, and 1 dimensions, int64 on"],
    "columns": ["gather_for_metrics: ['p'] has rows of different shapes: (3,) on process 0, (4,) on process 1."],
    "metric dtype": ["gather_for_metrics: ['p'] has different dtypes: torch.float32 on process 0, torch.int64 on"],
    "metric key": ["In gather_for_metrics, process 0 has a tensor at ['p'], and process 1 has none."],
    "metric kind": ["gather_for_metrics of other objects", "process 1: gather_for_metrics"],
    "objects": ["process 0: gather of", "process 1: gather_object of objects"],
    "list": ["process 0: gather_object", "process 1: broadcast_object_list"],
    "value": [],
}


@pytest.mark.distributed
def test_calls_that_differ_are_named_with_rank_key_and_shape_in_debug_mode() -> None:
    for found in run_distributed(_different_calls, 2, init=False, env={"ACCELERATE_DEBUG_MODE": "1"}):
        assert found.keys() == _TEXTS.keys()
        for name, texts in _TEXTS.items():
            for text in texts:
                assert text in found[name], (name, found[name])


_CONTRADICTIONS: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({"MIXED_PRECISION": "fp16"}, {"mixed_precision": "bf16"}, "mixed_precision='bf16'"),
    ({"GRADIENT_ACCUMULATION_STEPS": "4"}, {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
    (
        {"GRADIENT_ACCUMULATION_STEPS": "4"},
        {"gradient_accumulation_plugin": GradientAccumulationPlugin(2)},
        "gradient_accumulation_plugin: 2 steps",
    ),
    ({"DYNAMO_BACKEND": "INDUCTOR"}, {"dynamo_backend": "eager"}, "dynamo_backend, which has backend='eager'"),
    ({"USE_FSDP": "true"}, {"strategy": "ddp"}, "strategy='ddp'"),
]


@pytest.mark.parametrize(("variables", "arguments", "text"), _CONTRADICTIONS)
def test_a_variable_that_an_argument_contradicts_is_named_with_it(
    variables: dict[str, str], arguments: dict[str, Any], text: str
) -> None:
    (variable, value), *_ = variables.items()
    with (
        patch_environment(**{f"ACCELERATE_{name}": value for name, value in variables.items()}),
        pytest.warns(TrainwrightWarning, match=f"ACCELERATE_{variable}={value} is overridden by ") as seen,
    ):
        Accelerator(cpu=True, **arguments)
    assert text in str(seen[0].message)


def test_two_variables_that_contradict_each_other_are_both_named() -> None:
    with (
        patch_environment(ACCELERATE_USE_FSDP=True, ACCELERATE_USE_DEEPSPEED=True),
        pytest.raises(ConfigurationError, match="ACCELERATE_USE_FSDP and ACCELERATE_USE_DEEPSPEED both"),
    ):
        Accelerator(cpu=True)
