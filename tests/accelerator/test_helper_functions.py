"""Small helpers with the names of `accelerate.utils`, as other libraries call them."""

from __future__ import annotations

import logging
from collections import namedtuple

import pytest
import torch
from torch import nn

from trainwright import utils
from trainwright.logging import get_logger
from trainwright.utils import concatenate

pytestmark = pytest.mark.usefixtures("fresh_state")

Pair = namedtuple("Pair", "a b")


def test_helpers_look_into_nested_tensors() -> None:
    tree = {"name": "x", "rows": [torch.ones(3, 2), torch.ones(3)]}
    assert utils.find_device(tree) == torch.device("cpu")
    assert utils.find_device({"name": "x"}) is None
    assert utils.find_batch_size(tree) == 3
    with pytest.raises(ValueError, match="find_batch_size got no tensor"):
        utils.find_batch_size([])
    assert (utils.is_torch_tensor(torch.ones(1)), utils.is_torch_tensor([])) == (True, False)
    assert utils.is_namedtuple(Pair(1, 2))
    assert not utils.is_namedtuple((1, 2))
    assert utils.honor_type(Pair(0, 0), (n for n in (1, 2))) == Pair(1, 2)
    assert utils.honor_type([], iter((1, 2))) == [1, 2]
    padded = utils.pad_input_tensors({"x": torch.tensor([1, 2, 3, 4, 5, 6])}, 6, 4)
    assert padded["x"].tolist() == [1, 2, 3, 4, 5, 6, 6, 6]
    assert utils.pad_input_tensors(torch.ones(2, 4), 4, 2, dim=1).shape == (2, 4)
    assert utils.pad_input_tensors(torch.ones(0, 4), 0, 2).shape == (0, 4)


def test_helpers_read_texts_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (utils.str_to_bool("Yes"), utils.str_to_bool("off", to_bool=True)) == (1, False)
    with pytest.raises(ValueError, match="true or false"):
        utils.str_to_bool("maybe")
    monkeypatch.setenv("MY_FLAG", "on")
    assert (utils.parse_choice_from_env("MY_FLAG"), utils.parse_choice_from_env("OTHER_FLAG")) == ("on", "no")
    assert (utils.parse_flag_from_env("MY_FLAG"), utils.parse_flag_from_env("OTHER_FLAG", default=True)) == (True, True)


@pytest.mark.filterwarnings("ignore:.*script_method")
def test_helpers_know_models_and_sizes() -> None:
    state = {"h.1.weight": torch.ones(1), "h.10.weight": torch.ones(1), "head": torch.ones(1)}
    assert list(utils.extract_submodules_state_dict(state, ["h.1", "head"])) == ["h.1.weight", "head"]
    assert (utils.dtype_byte_size(torch.float32), utils.dtype_byte_size(utils.CustomDtype.INT4)) == (4, 0.5)
    model = nn.Linear(1, 1)
    within = nn.Sequential(nn.Linear(1, 1))
    assert not utils.has_compiled_regions(within)
    within[0] = torch.compile(within[0])
    assert utils.has_compiled_regions(within)
    assert (utils.is_compiled_module(torch.compile(model)), utils.is_compiled_module(model)) == (True, False)


def test_packages_are_compared_with_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not utils.is_mps_available(min_version="2.0")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.43.1")
    assert utils.is_bnb_available()
    assert (utils.is_bnb_available(min_version="0.43"), utils.is_bnb_available("0.44")) == (True, False)


def test_one_structure_is_its_own_concatenation() -> None:
    assert concatenate(["x"]) == "x"
    with pytest.raises(TypeError, match="str"):
        concatenate(["x", "y"])


def test_a_wrapper_of_a_logger_counts_frames_as_accelerate_does(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("stack")

    def wrapper() -> None:
        logger.warning("of the caller", stacklevel=3)
        logger.warning("of the wrapper", stacklevel=2)
        logger.warning("of the wrapper")

    with caplog.at_level(logging.WARNING):
        wrapper()
    assert [record.funcName for record in caplog.records] == [
        "test_a_wrapper_of_a_logger_counts_frames_as_accelerate_does",
        "wrapper",
        "wrapper",
    ]
