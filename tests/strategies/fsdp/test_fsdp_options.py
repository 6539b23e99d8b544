"""What people say about sharding in Lightning's, Accelerate's and torch's words is understood, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from tests.strategies.fsdp.sharded import Block
from trainwright.core.errors import ConfigurationError
from trainwright.strategies.fsdp.options import mesh_shape
from trainwright.strategies.fsdp.strategy import FSDPStrategy
from trainwright.strategies.mesh import MeshShape

_BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, {"sharding_strategy": "SHARD_GRAD_OP"}),
        ({"cpu_offload": CPUOffload(offload_params=True)}, {"cpu_offload": True}),
        ({"cpu_offload": CPUOffloadPolicy()}, {"cpu_offload": True}),
        ({"cpu_offload": OffloadPolicy()}, {"cpu_offload": False}),
        (
            {"mixed_precision": MixedPrecision(param_dtype=_BF16, reduce_dtype=torch.float32)},
            {"mixed_precision": MixedPrecisionPolicy(param_dtype=_BF16, reduce_dtype=torch.float32)},
        ),
        ({"activation_checkpointing_policy": {Block}}, {"activation_checkpointing": {Block}}),
    ],
)
def test_lightnings_and_torchs_ways_to_say_it_are_understood(options: dict[str, Any], wanted: dict[str, Any]) -> None:
    strategy = FSDPStrategy(**options)
    assert {name: getattr(strategy, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"fsdp_sharding_strategy": 5}, {"sharding_strategy": "HYBRID_SHARD_ZERO2"}),
        ({"fsdp_sharding_strategy": "2"}, {"sharding_strategy": "SHARD_GRAD_OP"}),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, {"sharding_strategy": "SHARD_GRAD_OP"}),
        (
            {"fsdp_cpu_ram_efficient_loading": "true", "fsdp_sync_module_states": True},
            {"cpu_ram_efficient_loading": True},
        ),
        (
            {"mixed_precision_policy": {"param_dtype": _BF16, "reduce_dtype": torch.float32}},
            {"mixed_precision": MixedPrecisionPolicy(param_dtype=_BF16, reduce_dtype=torch.float32)},
        ),
        (
            {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]},
            {"auto_wrap_policy": ["Block"]},
        ),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": "50"}, {"min_num_params": 50}),
        ({"fsdp_forward_prefetch": "true", "fsdp_backward_prefetch_policy": "BACKWARD_PRE"}, {"forward_prefetch": 1}),
        ({"fsdp_offload_params": True, "fsdp_use_orig_params": True}, {"cpu_offload": True}),
    ],
)
def test_every_field_of_accelerates_configuration_that_can_be_served_is(
    config: dict[str, Any], wanted: dict[str, Any]
) -> None:
    strategy = FSDPStrategy.from_config(config)
    found = vars(strategy)
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"fsdp_version": 1}, "only FSDP2 is available"),
        ({"fsdp_sync_module_states": False}, "rank 0's weights are always broadcast"),
        ({"fsdp_backward_prefetch": "BACKWARD_POST"}, "FSDP2 always gathers"),
        ({"fsdp_activation_checkpointing_offload": True}, "stay on the device"),
        ({"mixed_precision_policy": "fp8"}, "Known: bf16, fp16, fp32"),
        ({"mixed_precision_policy": {"param_dtype": _BF16, "buffer_dtype": _BF16}}, "Remove buffer_dtype"),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}, "needs fsdp_min_num_params"),
        ({"fsdp_state_dict_type": "LOCAL_STATE_DICT"}, "each rank writes its shards"),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": "1e8"}, "use an integer"),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": 3}, "use names of classes"),
        ({"mixed_precision_policy": {"foo": 1}}, "mixed_precision_policy=.*foo"),
    ],
)
def test_a_field_of_accelerates_configuration_that_cannot_be_served_says_what_to_do(
    config: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        FSDPStrategy.from_config(config)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"state_dict_type": "local"}, "sharded"),
        ({"cpu_offload": CPUOffloadPolicy(pin_memory=False)}, "Use cpu_offload=True"),
        ({"mixed_precision": "bf16"}, "MixedPrecisionPolicy"),
        ({"mixed_precision": MixedPrecision(keep_low_precision_grads=True)}, "the dtype of the shards"),
        ({"sharding_strategy": "HYBRID_SHARD_ZERO2", "reshard_after_forward": True}, "Remove one of them"),
        ({"cluster_environment": "auto"}, "detected automatically"),
        ({"sharding_strategy": "FULL"}, "FULL_SHARD"),
        ({"auto_wrap_policy": "Block", "min_num_params": 5}, "Remove one of them"),
        ({"forward_prefetch": -1}, "number of units"),
        ({"sharding_strategy": "NO_SHARD", "device_mesh": (2, 4)}, "Remove one of them"),
        ({"use_orig_params": True}, "FSDP2 does not have use_orig_params"),
        ({"shardingstrategy": "FULL_SHARD"}, "Did you mean 'sharding_strategy'"),
        ({"meta_init": True, "cpu_ram_efficient_loading": True}, "Remove one of them"),
        ({"activation_checkpointing": 0}, "every n-th unit"),
        ({"activation_checkpointing_save": ["aten.mm"]}, "activation_checkpointing=True"),
        ({"activation_checkpointing": True, "activation_checkpointing_save": ["aten.addmn"]}, "'aten.addmn'"),
        *[({"tp": size}, "use the number of ranks") for size in (0, True)],
        *[({name: 0}, f"{name}=0: use an integer") for name in ("cp", "sp")],
        ({"cp": 2, "sp": 2}, "cp=2 and sp=2 split sequences in two ways"),
        ({"ep": 2, "tp": 2}, "ep=2 and tp=2"),
    ],
)
def test_an_argument_that_cannot_be_served_says_what_to_do(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        FSDPStrategy(**options)


@pytest.mark.parametrize("sharding_strategy", ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2"])
def test_hybrid_sharding_keeps_a_replica_on_each_node(sharding_strategy: str) -> None:
    assert mesh_shape(sharding_strategy, None, num_nodes=2, devices_per_node=4) == MeshShape(dp_replicate=2, dp_shard=4)
    with pytest.raises(ConfigurationError, match=f"{sharding_strategy}.*there is one node"):
        mesh_shape(sharding_strategy, None, num_nodes=1, devices_per_node=4)


@pytest.mark.parametrize(("num_nodes", "devices_per_node"), [(2, 6), (4, 2)])
def test_hybrid_sharding_needs_as_many_data_ranks_on_each_node(num_nodes: int, devices_per_node: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"a replica on each of {num_nodes} nodes"):
        mesh_shape("HYBRID_SHARD", None, tp=4, num_nodes=num_nodes, devices_per_node=devices_per_node)
