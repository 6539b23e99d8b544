"""Activation checkpointing: what is computed anew is what was asked for, and what trains is the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer, weights_of
from tests.strategies.fsdp.sharded import Blocks, batches
from trainwright.accelerator.accelerator import Accelerator
from trainwright.callbacks.callback import Callback
from trainwright.core.errors import ConfigurationError
from trainwright.strategies.fsdp.strategy import FSDPStrategy
from trainwright.strategies.shards import full_output


class OpsInBackward(TorchDispatchMode, Callback):
    """Counts the operators of a backward pass: of an affine map's own there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def on_before_backward(self, trainer: Any, task: Any, loss: Any) -> None:
        self.__enter__()

    def on_after_backward(self, trainer: Any, task: Any) -> None:
        self.__exit__(None, None, None)


class Counted(Blocks):
    """Knows how often each of its blocks was called while it trained."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0, 0, 0]
        for i, block in enumerate(self.blocks):
            block.mix.register_forward_pre_hook(lambda *_, i=i: self._count(i))

    def _count(self, i: int) -> None:
        self.calls[i] += 1


def keep_affine_maps(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what an affine map gives."""
    kept = operator is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_VARIANTS: dict[str, dict[str, Any]] = {
    "kept": {},
    "all": {"activation_checkpointing": True},
    "every second": {"activation_checkpointing": 2},
    "third": {"activation_checkpointing": 3},
    "a class": {"activation_checkpointing_policy": {nn.LayerNorm, nn.Linear}},
    "all but named operators": {"activation_checkpointing": True, "activation_checkpointing_save": ["aten.addmm"]},
    "all but operators": {
        "activation_checkpointing": True, "activation_checkpointing_save": {torch.ops.aten.tanh, torch.ops.aten.addmm},
    },
    "all but what a function says": {
        "activation_checkpointing": True, "activation_checkpointing_save": keep_affine_maps,
    },
}  # fmt: skip


def _train_in_all_variants() -> dict[str, tuple[list[int], Counter[str], dict[str, torch.Tensor]]]:
    found = {}
    for name, options in _VARIANTS.items():
        task, ops = Counted(), OpsInBackward()
        trainer = quiet_trainer(
            devices="auto", strategy=FSDPStrategy(**options), max_steps=1, callbacks=[ops], num_sanity_val_steps=0
        )
        trainer.fit(task, batches(2))
        found[name] = (task.calls, ops.counts, weights_of(task))
    return found


@pytest.fixture(scope="module")
def variants() -> dict[str, Any]:
    """One step of one micro-batch on each of two ranks; rank 0's calls, operators and weights."""
    by_rank: list[dict[str, Any]] = run_distributed(_train_in_all_variants, 2, timeout=120)
    return by_rank[0]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("kept", [1, 1, 1]),
        ("all", [2, 2, 2]),
        ("every second", [1, 2, 1]),
        ("third", [1, 1, 2]),
        ("a class", [2, 2, 2]),
        ("all but named operators", [2, 2, 2]),
    ],
)
def test_those_layers_run_twice_that_are_computed_anew(name: str, calls: list[int], variants: dict[str, Any]) -> None:
    assert variants[name][0] == calls


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "affine", "tanh"),
    [
        ("kept", 0, 0),
        ("all", 3, 3),
        ("every second", 1, 1),
        ("all but named operators", 0, 3),
        ("all but operators", 0, 0),
        ("all but what a function says", 0, 3),
    ],
)
def test_operators_run_in_backward_unless_their_results_are_kept(
    name: str, affine: int, tanh: int, variants: dict[str, Any]
) -> None:
    counts = variants[name][1]
    assert (counts["aten.addmm.default"], counts["aten.tanh.default"]) == (affine, tanh)


@pytest.mark.distributed
@pytest.mark.parametrize("name", [name for name in _VARIANTS if name != "kept"])
def test_what_is_computed_anew_trains_to_the_same_bits(name: str, variants: dict[str, Any]) -> None:
    torch.testing.assert_close(variants[name][2], variants["kept"][2], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"activation_checkpointing": 0}, "every n-th unit"),
        ({"activation_checkpointing": True, "activation_checkpointing_policy": {nn.Linear}}, "Remove one of them"),
        ({"activation_checkpointing_save": ["aten.mm"]}, "activation_checkpointing=True"),
        ({"activation_checkpointing": True, "activation_checkpointing_save": ["aten.addmn"]}, "'aten.addmn'"),
        ({"activation_checkpointing": True, "activation_checkpointing_save": [nn.Linear]}, "torch.ops.aten.mm"),
    ],
)
def test_a_wish_about_activations_that_means_nothing_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        FSDPStrategy(**options)


def test_more_layers_to_a_checkpoint_than_there_are_units_are_refused() -> None:
    trainer = quiet_trainer(strategy=FSDPStrategy(activation_checkpointing=4), max_steps=1)
    with pytest.raises(ConfigurationError, match="one in 4 units, and the task has 3"):
        trainer.fit(Blocks(), batches(2))


@pytest.mark.parametrize("save", [None, ["aten.addmm"]], ids=["all", "selective"])
def test_a_model_with_a_cache_uses_it_only_without_gradients(save: list[str] | None) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8, use_cache=True)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(0, 32, (2, 8))
    expected = torch.autograd.grad(model.eval()(tokens, labels=tokens).loss, model.transformer.wpe.weight)[0]
    strategy = FSDPStrategy(
        auto_wrap_policy={type(model.transformer.h[0])},
        activation_checkpointing=True,
        activation_checkpointing_save=save,
    )
    accelerator = Accelerator(strategy=strategy, cpu=True)
    model = accelerator.prepare(model)
    output = model(tokens, labels=tokens)  # in evaluation mode, without dropout
    accelerator.backward(output.loss)
    assert output.past_key_values is None
    torch.testing.assert_close(full_output(model.transformer.wpe.weight.grad), expected)
    with torch.no_grad():
        assert model(tokens).past_key_values.get_seq_length() == 8
    assert config.use_cache
