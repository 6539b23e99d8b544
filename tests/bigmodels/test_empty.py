"""Models are built without memory and without initialisation, and what must keep its values keeps them."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from trainwright import init_empty_weights, init_on_device

META = torch.device("meta")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, 16)
        self.head = nn.Linear(16, 200, bias=False)
        self.head.weight = self.embed.weight
        self.computed = nn.Parameter(torch.randn(2000) * 2)
        self.same = self.computed
        self.register_buffer("ones", torch.ones(2000))
        table = torch.empty(100, 20)
        table[:, 0::2] = 1.0
        table[:, 1::2] = 2.0
        self.register_buffer("table", table, persistent=False)
        threes = torch.zeros(2000)
        nn.init.constant_(threes, 3.0)
        self.register_buffer("threes", threes, persistent=False)
        self.attribute = torch.full((2000,), 7.0)


@pytest.fixture(scope="module")
def empty() -> Model:
    with init_empty_weights():
        return Model()


def test_tied_weights_stay_one_object(empty: Model) -> None:
    assert empty.head.weight is empty.embed.weight
    assert empty.same is empty.computed


def test_a_parameter_that_was_made_before_is_one_object_in_all_its_modules() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with init_empty_weights():
        for layer in layers:
            layer.weight = weight
    assert layers[0].weight is layers[1].weight
    assert layers[0].weight.device == META


def test_buffers_and_other_tensors_keep_their_values(empty: Model) -> None:
    assert empty.ones.sum() == 2000
    assert empty.table.sum() == 1500 * 2
    assert empty.threes.sum() == 6000
    assert empty.attribute.sum() == 14000


def test_modules_draw_nothing_random_but_their_buffers() -> None:
    before = torch.get_rng_state()
    with init_empty_weights():
        nn.TransformerEncoderLayer(64, 4)
    assert torch.equal(torch.get_rng_state(), before)
    with init_empty_weights():
        module = nn.Module()
        module.register_buffer("noise", torch.randn(10_000))
    assert 0.9 < float(module.noise.std()) < 1.1


def test_persistent_buffers_are_empty_on_request_and_others_never() -> None:
    with init_empty_weights(include_buffers=True):
        model = Model()
    assert model.ones.device == META
    assert model.table.sum() == 3000
    assert model.threes.sum() == 6000


def test_other_threads_are_not_affected() -> None:
    built: list[nn.Module] = []
    with init_empty_weights():
        thread = threading.Thread(target=lambda: built.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
    assert built[0].weight.device.type == "cpu"


def test_on_a_real_device_weights_are_initialised_and_stay_tied() -> None:
    with init_on_device("cpu", include_buffers=True):
        model = Model()
    assert model.head.weight is model.embed.weight
    assert float(model.embed.weight.detach().std()) > 0.5


@pytest.mark.requires("cuda", reason="a device that is not the host")
def test_weights_are_made_on_the_device() -> None:
    with init_on_device("cuda"):
        model = Model()
    assert model.embed.weight.is_cuda
    assert model.head.weight is model.embed.weight
    assert not model.ones.is_cuda
    with init_on_device("cuda", include_buffers=True):
        assert Model().ones.is_cuda
