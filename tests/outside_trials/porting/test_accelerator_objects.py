"""What ported scripts do with an `Accelerator` and its models: unwrap, pickle, reduce, save."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from trainwright import Accelerator
from trainwright.core.errors import ConfigurationError, TrainwrightWarning

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_a_model_is_unwrapped_through_everything_that_is_around_it() -> None:
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


def test_an_accelerator_is_pickled_with_what_it_has_prepared() -> None:
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
def test_among_several_processes_its_settings_are_pickled() -> None:
    assert run_distributed(_pickle_among_two, 2, init=False, timeout=60) == [0.75, 0.75]


def test_an_unknown_reduction_names_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"'max' is unknown.*mean, sum, none.*gather\(tensor\).max\(\)"):
        Accelerator(cpu=True).reduce(torch.ones(2), "max")


def test_a_state_is_saved_with_the_arguments_that_scripts_pass(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    net = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "a", safe_serialization=True)
    with pytest.warns(TrainwrightWarning, match="safetensors all the same"):
        accelerator.save_state(str(tmp_path / "b"), safe_serialization=False)
    with torch.no_grad():
        net.weight.zero_()
    accelerator.load_state(tmp_path / "b", load_kwargs=None)
    assert net.weight.any()
    for call, text in (
        (accelerator.save_state, r"output_dir='"),
        (accelerator.load_state, r"input_dir='"),
        (lambda: accelerator.save_state(tmp_path / "c", exclude_frozen_parameters=True), "exclude_frozen_parameters="),
        (lambda: accelerator.load_state(tmp_path / "a", load_kwargs={"weights_only": True}), "load_kwargs="),
    ):
        with pytest.raises(ConfigurationError, match=text):
            call()  # type: ignore[no-untyped-call]
    assert not (tmp_path / "c").exists()
