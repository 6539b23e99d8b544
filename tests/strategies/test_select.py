"""From arguments and the launcher's variables to a strategy and its mesh, before anything is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainwright.core.errors import ConfigurationError
from trainwright.core.process import Topology
from trainwright.processes.devices import device_indices, kernel_choice
from trainwright.processes.process_group import Processes
from trainwright.strategies import DDPStrategy, SingleDeviceStrategy
from trainwright.strategies.fsdp.state import disable_foreach, restore_foreach
from trainwright.strategies.megatron.strategy import MegatronStrategy
from trainwright.strategies.mesh import MeshShape, data_group, forget_groups
from trainwright.strategies.precision_names import parse_precision
from trainwright.strategies.select import Selection, compile_options, select

no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="says what a machine without one says")


def choose(**arguments: Any) -> Selection:
    defaults: dict[str, Any] = {"strategy": "auto", "accelerator": "cpu", "devices": "auto", "num_nodes": 1}
    defaults |= {"precision": parse_precision("32-true"), "compile": False, "launcher": "auto", "sync_batchnorm": False}
    return select(**(defaults | arguments))


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("arguments", "kind", "num_processes", "starts"),
    [
        ({}, SingleDeviceStrategy, 1, False),
        ({"strategy": "ddp", "devices": 1}, DDPStrategy, 1, False),
        ({"devices": 3}, DDPStrategy, 3, True),
    ],
)
def test_without_a_launcher_several_devices_are_ddp_in_processes_of_our_own(
    arguments: dict[str, Any], kind: type, num_processes: int, starts: bool
) -> None:
    found = choose(**arguments)
    assert type(found.strategy) is kind
    assert (found.settings.num_processes, found.starts_processes) == (num_processes, starts)


@pytest.mark.usefixtures("torchrun")
def test_a_launchers_processes_are_taken_and_none_are_started() -> None:
    for devices in ("auto", -1, 2, "2", [0, 1]):
        found = choose(devices=devices)
        assert type(found.strategy) is DDPStrategy
        assert (found.topology.rank, found.topology.world_size, found.starts_processes) == (1, 2, False)


@pytest.mark.usefixtures("torchrun")
def test_launcher_none_ignores_the_variables() -> None:
    found = choose(launcher="none")
    assert type(found.strategy) is SingleDeviceStrategy
    assert found.topology.world_size == 1


def test_options_may_follow_a_name() -> None:
    chosen = choose(strategy="megatron:pp=2:recompute=full:distributed_optimizer=False", devices=4).strategy
    assert isinstance(chosen, MegatronStrategy)
    assert (chosen.pp, chosen.activation_checkpointing, chosen.distributed_optimizer) == (2, True, False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("megatron:schedul=gpipe", "megatron has no option 'schedul'.*Did you mean 'schedule'"),
        ("megatrom:pp=2", "unknown strategy 'megatrom'.*Did you mean 'megatron'"),
        ("megatron:pp=two", "pp='two': use an integer"),
        ("ddp_spawn:static_grap=True", "ddp_spawn has no option 'static_grap'.*Did you mean 'static_graph'"),
    ],
)
def test_an_option_that_cannot_be_read_is_an_error(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        choose(strategy=text, devices=4)


def test_the_settings_reach_the_strategy() -> None:
    precision = parse_precision("bf16-mixed")
    settings = choose(devices=2, precision=precision, compile="reduce-overhead").settings
    assert settings.precision is precision
    assert settings.compile_options == {"mode": "reduce-overhead"}
    assert (settings.device_type, settings.device_indices) == ("cpu", [0, 1])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"devices": [0, 0]}, "must be different"),
        ({"devices": -2}, "devices=-2"),
        ({"num_nodes": 2, "devices": 2}, "torchrun --nnodes 2 --nproc-per-node 2"),
        ({"launcher": "slurm"}, "SLURM_PROCID"),
        ({"launcher": "torchrunn"}, "Did you mean 'torchrun'"),
    ],
    ids=str,
)
def test_what_cannot_be_is_an_error_that_says_what_can(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        choose(**arguments)
    assert says in str(caught.value)


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"devices": 4}, "asks for 4 process(es) on this node, but the launcher started 2"),
        ({"strategy": "single"}, "runs one process, but the launcher started 2"),
        ({"num_nodes": 2}, "num_nodes=2, but the launcher started 1 node(s)"),
    ],
    ids=str,
)
def test_arguments_that_contradict_the_launcher_are_an_error_that_quotes_it(
    arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        choose(**arguments)
    assert says in str(caught.value) or "SingleDeviceStrategy" in str(caught.value)


@no_accelerator
def test_an_accelerator_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"accelerator='gpu'.*no accelerator"):
        choose(accelerator="gpu")
    assert choose(accelerator="auto").settings.device_type == "cpu"


@pytest.mark.parametrize(
    ("devices", "indices"), [(1, [0]), (3, [0, 1, 2]), ("2", [0, 1]), ("0,3", [0, 3]), ([1, 4], [1, 4]), (-1, [0])]
)
def test_devices_are_counted_or_listed(devices: Any, indices: list[int]) -> None:
    assert device_indices(devices, "cpu") == indices


@pytest.mark.parametrize("devices", [["a"], [True, False], [1.7]])
def test_devices_that_are_not_indices_are_an_error(devices: Any) -> None:
    with pytest.raises(ConfigurationError, match="write indices such as"):
        device_indices(devices, "cpu")


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (False, (None, False)),
        (True, ({}, False)),
        ("regional", ({}, True)),
        ("max-autotune", ({"mode": "max-autotune"}, False)),
        ({"fullgraph": True, "regional": True}, ({"fullgraph": True}, True)),
    ],
)
def test_compile_takes_a_switch_a_mode_or_torchs_arguments(spec: Any, options: Any) -> None:
    assert compile_options(spec) == options


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("arguments", [(True, None), (False, None), (None, True), (None, "warn"), (None, None)])
def test_the_choice_of_kernels_ends_with_the_stage(before: bool, arguments: tuple[Any, Any]) -> None:
    torch.backends.cudnn.benchmark = before
    benchmark, deterministic = arguments
    with kernel_choice(*arguments):
        expected = before if benchmark is None else benchmark
        assert torch.backends.cudnn.benchmark is (False if deterministic else expected)
        assert torch.are_deterministic_algorithms_enabled() is bool(deterministic)
    assert torch.backends.cudnn.benchmark is before
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("shape", "of_ranks", "members"),
    [
        (MeshShape(dp_shard=2, tp=2), [0, 0, 1, 1], [0, 2]),  # neighbours work on one batch
        (MeshShape(pp=2, dp_shard=2), [0, 1, 0, 1], [0, 1]),  # stages of one batch are not neighbours
        (MeshShape(pp=2, dp_replicate=2, tp=2), [0, 0, 1, 1, 0, 0, 1, 1], [0, 2]),
        (MeshShape(dp_shard=2, cp=2, tp=2), [0, 0, 1, 1, 2, 2, 3, 3], [0, 2, 4, 6]),
    ],
)
def test_ranks_along_the_data_axes_see_different_data(
    shape: MeshShape, of_ranks: list[int], members: list[int]
) -> None:
    found = [
        shape.data_ranks(Processes(Topology("torchrun", rank=rank, world_size=shape.size)))
        for rank in range(shape.size)
    ]
    assert [ranks.rank for ranks in found] == of_ranks
    assert all(list(ranks.members) == members for ranks in found)


@pytest.mark.parametrize(
    ("shape", "axes", "same_part", "same_sequences"),
    [
        (MeshShape(dp_replicate=2, dp_shard=2, tp=2), {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, [1, 3, 5, 7], [5]),
        (MeshShape(pp=2, cp=2, tp=2), {"pp": 2, "dp_shard": 2, "tp": 2}, [5, 7], [5, 7]),
        (MeshShape(dp_replicate=4, tp=2), {"dp_replicate": 4, "dp_shard": 1, "tp": 2}, [1, 3, 5, 7], [5]),
        (MeshShape(dp_shard=4, cp=2), {"dp_shard": 8}, list(range(8)), [4, 5]),
        (MeshShape(tp=8), {"tp": 8}, None, [5]),
    ],
)
def test_groups_of_a_rank_among_eight(
    shape: MeshShape, axes: dict[str, int], same_part: list[int] | None, same_sequences: list[int]
) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    try:
        mesh = shape.device_mesh("cpu")
        assert dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)) == axes
        if same_part is not None:
            assert dist.get_process_group_ranks(data_group(mesh)) == same_part
        assert dist.get_process_group_ranks(shape.sequence_group()) == same_sequences
        if "dp_shard" not in axes:
            assert shape.device_mesh("cpu", shards=True).mesh_dim_names == ("dp_shard", *axes)
        forget_groups(mesh)
    finally:
        dist.destroy_process_group()


def test_tensors_of_several_meshes_are_stepped_one_by_one() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = MeshShape(tp=2).device_mesh("cpu")
        split, whole = DTensor.from_local(torch.ones(2), mesh, [Shard(0)]), torch.ones(2)
        for together, foreach in (([split, whole], False), ([split], None), ([whole], None)):
            optimizer = torch.optim.AdamW(together)
            disable_foreach([optimizer])
            assert optimizer.param_groups[0]["foreach"] is foreach
            saved = {"groups": [{"foreach": False}]}
            restore_foreach(optimizer, saved)  # False is kept if the user has chosen it
            assert saved["groups"][0]["foreach"] is (None if foreach is False else False)
        with pytest.raises(ConfigurationError, match="use separate groups"):
            disable_foreach([torch.optim.AdamW([split, whole], foreach=True)])
        forget_groups(mesh)
    finally:
        dist.destroy_process_group()
