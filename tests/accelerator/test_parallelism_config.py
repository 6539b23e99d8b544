"""ParallelismConfig: strategies, meshes and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.contracts.test_own_loop import Net
from tests.helpers.distributed import run_distributed
from trainwright import (
    Accelerator,
    DDPStrategy,
    FSDPStrategy,
    FullyShardedDataParallelPlugin,
    MegatronStrategy,
    ParallelismConfig,
    TensorParallelStrategy,
)
from trainwright.core.errors import ConfigurationError
from trainwright.processes.partial_state import PartialState
from trainwright.strategies.strategy import Strategy


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tp_size": 2}, TensorParallelStrategy(tp=2)),
        ({}, DDPStrategy()),
        (
            {"dp_replicate_size": 2, "tp_size": 2},
            FSDPStrategy(tp=2, sharding_strategy="HYBRID_SHARD", device_mesh=(2, 1)),
        ),
        ({"cp_size": 2}, FSDPStrategy(cp=2)),
        (
            {"sp_size": 2, "dp_replicate_size": 2},
            FSDPStrategy(sp=2, sharding_strategy="HYBRID_SHARD", device_mesh=(2, 1)),
        ),
        ({"pp_size": 2, "sp_size": 2}, MegatronStrategy(pp=2, sp=2, dp_shard=1)),
    ],
)
def test_without_a_plugin_it_describes_the_strategy(sizes: dict[str, int], expected: Strategy) -> None:
    config = ParallelismConfig(**sizes)
    found = config.strategy(config.total_size)
    assert type(found) is type(expected)
    for name in ("tp", "cp", "sp", "sharding_strategy", "device_mesh", "pp", "dp_shard"):
        assert getattr(found, name, None) == getattr(expected, name, None)


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ({"tp_size": 2}, []),
        ({"cp_size": 2, "tp_size": 2}, ["dp_shard"]),
        ({"sp_size": 2, "dp_replicate_size": 2}, ["dp_replicate", "dp_shard"]),
        ({"dp_replicate_size": 2}, ["dp_replicate"]),
    ],
)
def test_ranks_that_split_sequences_belong_to_the_axes_of_fsdp(sizes: dict[str, int], names: list[str]) -> None:
    assert ParallelismConfig(**sizes).fsdp_dim_names == names


def test_its_properties_follow_from_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "3")
    config = ParallelismConfig(dp_replicate_size=2, tp_size=4)
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (24, 6, 4)
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "tp"]
    assert (config.dp_dim_names, config.non_dp_dim_names) == (["dp_replicate", "dp_shard"], ["tp"])
    assert (config.tp_enabled, config.dp_shard_enabled, config.cp_enabled, config.sp_enabled) == (
        True,
        True,
        False,
        False,
    )


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"cp_size": 2}, "cp_size=2 × .* = 2 ranks, but there are 1 processes"),
        ({"cp_size": 2, "sp_size": 2}, "cp=2 and sp=2 split sequences in two ways"),
        ({"tp_size": 0}, "tp_size=0: use an integer"),
        ({"tp_handler": object()}, "tp_handler is not supported"),
        ({"dp_shard_size": 2}, "Pass Accelerator\\(fsdp_plugin=…\\) too"),
        ({"pp_size": 2}, "pp_size=2 × .* = 2 ranks, but there are 1 processes. Start 2 processes"),
        ({"ep_size": 2, "dp_shard_size": 3}, "dp_shard_size=3 is not divisible by ep_size=2.*dp_shard_size=4"),
        ({"ep_size": 2, "dp_shard_size": 2, "tp_size": 2}, "ep=2 and tp=2: tensor parallelism does not support"),
        ({"ep_size": 2, "dp_shard_size": 2, "pp_size": 2}, "ep_size=2 and pp_size=2: experts cannot be divided"),
    ],
)
def test_what_cannot_be_served_is_an_error(sizes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
    PartialState._reset_state()


def _trained(
    sizes: dict[str, int], sharded: bool, variables: bool
) -> tuple[list[torch.Tensor], dict[str, int], tuple[int, int, int], bool]:
    plugin = FullyShardedDataParallelPlugin() if sharded and not variables else None
    config = None if variables else ParallelismConfig(**sizes)
    accelerator = Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin)
    net: Any = Net()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(3):
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        accelerator.backward(net(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.get_state_dict(net)
    mesh = accelerator.torch_device_mesh
    lengths = {} if mesh is None else dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    ranks = (accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank, accelerator.tensor_parallel_rank)
    return [value.clone() for value in state.values()], lengths, ranks, accelerator.parallelism_config == config


@pytest.mark.distributed
@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize(
    ("sizes", "sharded", "variables", "lengths", "ranks"),
    [
        ({"dp_replicate_size": 2}, True, False, {"dp_replicate": 2, "dp_shard": 1}, (1, 0, 0)),
        ({"dp_shard_size": 2}, True, True, {"dp_shard": 2}, (0, 1, 0)),
        pytest.param({"tp_size": 2}, False, True, {"tp": 2}, (0, 0, 1), marks=pytest.mark.exhaustive),
    ],
)
def test_processes_are_arranged_along_the_axes(
    sizes: dict[str, int], sharded: bool, variables: bool, lengths: dict[str, int], ranks: tuple[int, int, int]
) -> None:
    env = {f"PARALLELISM_CONFIG_{name.upper()}": str(size) for name, size in sizes.items()}
    env |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"} | ({"ACCELERATE_USE_FSDP": "true"} if sharded else {})
    found = run_distributed(_trained, 2, sizes, sharded, variables, env=env if variables else None)
    expected = _trained({}, False, False)
    for value, wanted in zip(found[0][0], expected[0], strict=True):
        torch.testing.assert_close(value, wanted)
    assert found[1][1:3] == (lengths, ranks)
    assert found[1][3] or variables
