"""A strategy is a value; gradients are clipped on the host, and counts are exact."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright.core.errors import ConfigurationError
from trainwright.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    LocalSGDStrategy,
    MegatronStrategy,
    ModelParallelStrategy,
    OffloadStrategy,
    SingleDeviceStrategy,
    Strategy,
    TensorParallelStrategy,
    TorchFTStrategy,
)
from trainwright.strategies.steps.gradients import GradientClip, HostGradients, parameters_of, stack_counts

_CASES: list[tuple[Callable[[], Strategy], Callable[[], Strategy], str]] = [
    (SingleDeviceStrategy, DDPStrategy, "SingleDeviceStrategy()"),
    (lambda: DDPStrategy(static_graph=True, ddp_comm_hook="fp16"), DDPStrategy,
     "DDPStrategy(static_graph=True, ddp_comm_hook='fp16')"),
    (lambda: LocalSGDStrategy(4), LocalSGDStrategy, "LocalSGDStrategy(local_sgd_steps=4)"),
    (lambda: FSDPStrategy(timeout="1 min", tp=2), FSDPStrategy,
     "FSDPStrategy(timeout=datetime.timedelta(seconds=60), tp=2)"),
    (lambda: TensorParallelStrategy(tp=2), TensorParallelStrategy, "TensorParallelStrategy(tp=2)"),
    (lambda: DeepSpeedStrategy(stage=3), lambda: DeepSpeedStrategy(stage=1), "DeepSpeedStrategy(stage=3)"),
    (lambda: OffloadStrategy("disk"), OffloadStrategy, "OffloadStrategy(parameters='disk')"),
    (lambda: MegatronStrategy(recompute="full", engine="megatron-core"), lambda: MegatronStrategy(recompute="full"),
     "MegatronStrategy(recompute='full', engine='megatron-core')"),
    (lambda: ModelParallelStrategy(2, 2, False), ModelParallelStrategy,
     "ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2, save_distributed_checkpoint=False)"),
    (lambda: TorchFTStrategy(replica=1), TorchFTStrategy, "TorchFTStrategy(replica=1)"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "make_other", "text"), _CASES)
def test_a_strategy_is_compared_printed_and_pickled(
    make: Callable[[], Strategy], make_other: Callable[[], Strategy], text: str
) -> None:
    assert make() == make()
    assert make() != make_other()
    assert repr(make()) == text
    again = pickle.loads(pickle.dumps(make()))
    assert again == make()
    assert vars(again).keys() == vars(make()).keys()


_SPLIT_LAYERS: Any = dict  # a plan
_SHARING: dict[str, Any] = {
    "auto_wrap_policy": ["Block"],
    "weights_after_stage": "all",
    "state_dict_type": "full",
    "timeout": timedelta(seconds=60),
    "hang_timeout": timedelta(seconds=30),
    "process_group_backend": "gloo",
    "tensor_parallel_plan": _SPLIT_LAYERS,
}


def test_strategies_pass_the_options_that_they_share_on() -> None:
    split = {**_SHARING, "activation_checkpointing": 2, "cpu_ram_efficient_loading": True}
    meta = {"meta_init": True}
    pipeline = {**_SHARING, "pp": 2, "tp": 2, "cp": 2, "dp_shard": 3, "dp_replicate": 4, "num_micro_batches": 5}
    for cls, options in (
        (TensorParallelStrategy, split),
        (TensorParallelStrategy, meta),
        (MegatronStrategy, pipeline),
        (MegatronStrategy, {"sp": 2, "split_points": ["a"], "pp": 2, "distributed_optimizer": False}),
    ):
        found = vars(cls(**options))
        assert {name: found[name] for name in options} == options
    assert MegatronStrategy(recompute="full").activation_checkpointing is True
    assert MegatronStrategy(recompute="full").activation_checkpointing_save is None
    assert MegatronStrategy(recompute="selective").activation_checkpointing_save is not None


def test_a_strategy_does_not_change() -> None:
    strategy = DDPStrategy()
    with pytest.raises(AttributeError, match="cannot assign to field 'sync_batchnorm'"):
        strategy.sync_batchnorm = True  # type: ignore[misc]  # it is frozen
    assert strategy.with_options(sync_batchnorm=True) == DDPStrategy(sync_batchnorm=True)
    assert strategy == DDPStrategy()


def test_a_copy_with_other_options_is_checked_and_keeps_the_rest() -> None:
    copied = MegatronStrategy(pp=2, engine="megatron-core").with_options(timeout=60)
    assert copied == MegatronStrategy(pp=2, engine="megatron-core", timeout="1 min")
    assert copied.capabilities == MegatronStrategy(engine="megatron-core").capabilities
    assert DDPStrategy().with_options(ddp_comm_hook="fp16").comm_hook.hook == "fp16"
    with pytest.raises(ConfigurationError, match="state_dict_type"):
        FSDPStrategy().with_options(state_dict_type="halved")
    with pytest.raises(ConfigurationError, match="FSDPStrategy has no option 'tensor_parallel'"):
        FSDPStrategy().with_options(tensor_parallel=2)


def test_a_subclass_without_a_decorator_may_set_attributes() -> None:
    class Mine(DDPStrategy):
        def __init__(self, scale: float) -> None:
            super().__init__(bucket_cap_mb=5)
            self.scale = scale

    assert (Mine(2.0).scale, repr(Mine(2.0))) == (2.0, "Mine(bucket_cap_mb=5)")


def test_parameters_of_several_optimizers_come_once_each_and_in_order() -> None:
    first, second, third = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    optimizers = [
        torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=1),
        torch.optim.SGD([third, first], lr=1),
    ]
    assert [id(p) for p in parameters_of(optimizers)] == [id(first), id(second), id(third)]


@given(st.lists(st.integers(0, 2**52), min_size=1, max_size=6))
def test_counts_are_exact_whether_numbers_or_tensors(counts: list[int]) -> None:
    mixed = [torch.tensor(count) if index % 2 else count for index, count in enumerate(counts)]
    stacked = stack_counts(mixed, torch.device("cpu"))
    assert stacked.dtype is torch.float64
    assert [int(count) for count in stacked.tolist()] == counts


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("value", [1e-3, 1e9, float("nan")])
def test_gradients_on_the_host_are_clipped_as_by_torch(
    norm_type: float, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    generator, clip = torch.Generator().manual_seed(0), GradientClip(1.0, "norm", norm_type)
    ours, theirs = ([nn.Parameter(torch.zeros(2**20 + i)) for i in range(4)] for _ in range(2))
    for one, other in zip(ours[:3], theirs[:3], strict=True):  # the last one has no gradient
        one.grad = torch.randn(one.shape, generator=generator) * min(value, 1e3)
        if value == 1e9:
            one.grad *= 1e-9  # is not clipped
        other.grad = one.grad.clone()
    norm = HostGradients(torch.device("cpu")).clip(ours, clip)
    expected = nn.utils.clip_grad_norm_(theirs, 1.0, norm_type)
    torch.testing.assert_close(norm, expected, rtol=0, atol=0, equal_nan=True)
    for one, other in zip(ours[:3], theirs[:3], strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0, equal_nan=True)
