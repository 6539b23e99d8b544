"""What every strategy promises: training as one device would, and checkpoints that any other can read."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.contracts.strategies import (
    ITEMS,
    MOST_EPOCHS_OF_STOP,
    NUM_COUNTED,
    NUM_EVALUATED,
    STOP_AFTER_STEPS,
    STRATEGIES,
    Contract,
    ContractTask,
    Training,
    continue_others,
    data_ranks_of,
    evaluation_data,
    parameters,
    run_contract,
    train_by_hand,
)
from trainwright.checkpoint import read_checkpoint
from trainwright.core.errors import TrainwrightWarning

NAMES = list(STRATEGIES)
_FOUR = [name for name in NAMES if STRATEGIES[name].processes == 4]
_UP_TO_TWO = [name for name in NAMES if name not in _FOUR]
# Every strategy reads every other's checkpoint on as many processes, and on more or fewer its own and one in pieces.
PAIRS = [
    *itertools.permutations(_UP_TO_TWO, 2),
    *itertools.permutations([*_FOUR, "single"], 2),
    *((reader, f"{reader}_4") for reader in _UP_TO_TWO if f"{reader}_4" in _FOUR),
    *((f"{writer}_4", writer) for writer in _UP_TO_TWO if f"{writer}_4" in _FOUR),
    *((reader, "fsdp_tp_4") for reader in _UP_TO_TWO if reader != "single"),
]


# Pairs of two sharded strategies that `make test` keeps; the other pairs without "single" are exhaustive.
_KEPT_PAIRS = {*itertools.permutations(("fsdp", "zero3")), *itertools.permutations(("fsdp", "pp"))}
_KEPT_PAIRS |= {("tp", "fsdp"), ("fsdp", "fsdp_tp_4")}


def _is_kept(reader: str, writer: str) -> bool:
    """Return whether `make test` lets `reader` continue a checkpoint of `writer`."""
    if {reader, writer} & set(_FOUR) - {"fsdp_tp_4"}:
        return False
    return reader == writer or "single" in (reader, writer) or (reader, writer) in _KEPT_PAIRS


def _group(reader: str, writer: str) -> str:
    """Return which checkpoints a reader continues in the same processes as that of `writer`."""
    return "kept" if _is_kept(reader, writer) else "of four" if writer in _FOUR else "of up to two"


def _marked(names: str | tuple[str, str]) -> Any:
    """Return the parameters of a test, marked as slow if one of them takes four processes, and as exhaustive."""
    names = (names,) if isinstance(names, str) else names
    marks = [pytest.mark.slow] if set(names) & set(_FOUR) else []
    kept = _is_kept(names[0], names[-1])
    return pytest.param(*names, marks=marks if kept else [*marks, pytest.mark.exhaustive])


ALL = [_marked(name) for name in NAMES]
OTHERS = [_marked(name) for name in NAMES if name != "single"]


class WhenAsked(dict[Any, Any]):
    """What `make` gives for a name, made when it is first asked for: no test pays for all of them.

    An error is kept, so that the other tests of the name fail at once.
    """

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make
        self.errors: dict[Any, BaseException] = {}

    def __missing__(self, name: Any) -> Any:
        if name in self.errors:
            raise self.errors[name]
        try:
            self[name] = self.make(name)
        except BaseException as error:  # pytest.fail raises one that is not an Exception
            self.errors[name] = error
            raise
        return self[name]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where each strategy's contract writes a checkpoint after half of the epochs."""
    folder = tmp_path_factory.mktemp("contract")
    return {name: folder / name for name in NAMES}


@pytest.fixture(scope="module")
def contracts(checkpoints: dict[str, Path]) -> dict[str, Contract]:
    """What each strategy made of the contract."""
    return WhenAsked(lambda name: run_contract(name, checkpoints[name]))


@pytest.fixture(scope="module")
def continued(contracts: dict[str, Any], checkpoints: dict[str, Path]) -> dict[tuple[str, str], dict[str, Training]]:
    """What each reader makes of others' checkpoints, by the reader and the writer's group."""

    def read(key: tuple[str, str]) -> dict[str, Training]:
        reader, group = key
        writers = [w for r, w in PAIRS if r == reader and _group(reader, w) == group and contracts[w]]
        return dict(zip(writers, continue_others(reader, [checkpoints[w] for w in writers]), strict=True))

    return WhenAsked(read)


def assert_like(found: Training, wanted: Training) -> None:
    """Compare losses, norms and parameters to what summing in another order allows."""
    assert found.losses == pytest.approx(wanted.losses, abs=1e-6)
    assert found.norms == pytest.approx(wanted.norms, abs=1e-6)
    torch.testing.assert_close(parameters(found.weights), parameters(wanted.weights), rtol=0, atol=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ALL)
def test_losses_norms_and_parameters_are_those_of_plain_pytorch(name: str, contracts: dict[str, Contract]) -> None:
    expected = train_by_hand()
    assert max(expected.norms) > 0.3  # something is clipped
    assert_like(contracts[name].whole, expected)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ALL)
def test_a_schedule_advances_once_per_step(name: str, contracts: dict[str, Contract]) -> None:
    assert contracts[name].whole.lrs == train_by_hand().lrs


@pytest.mark.distributed
@pytest.mark.parametrize("name", ALL)
def test_bf16_losses_are_those_of_autocast(name: str, contracts: dict[str, Contract]) -> None:
    expected = train_by_hand(1, autocast=True).losses
    assert contracts[name].bf16 == pytest.approx(expected, rel=0.02)
    assert contracts[name].bf16 != pytest.approx(train_by_hand(1).losses, rel=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ALL)
def test_saving_loading_and_continuing_equals_the_uninterrupted_run(name: str, contracts: dict[str, Contract]) -> None:
    found = contracts[name]
    continued = found.rest.after(found.first)
    assert continued.losses == found.whole.losses
    assert continued.norms == found.whole.norms
    torch.testing.assert_close(continued.weights, found.whole.weights, rtol=0, atol=0)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ALL)
def test_an_evaluation_counts_each_sample_once_and_predictions_are_in_order(
    name: str, contracts: dict[str, Contract]
) -> None:
    found = contracts[name]
    inputs, targets = evaluation_data().tensors
    with torch.no_grad():
        outputs = ContractTask().net(inputs)
    loss = float(functional.mse_loss(outputs, targets))
    assert found.evaluated == pytest.approx({"val_loss": loss, "num_samples": NUM_EVALUATED}, abs=1e-6)
    torch.testing.assert_close(found.predicted, outputs, rtol=0, atol=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ALL)
def test_metric_objects_count_each_sample_once(name: str, contracts: dict[str, Contract]) -> None:
    """A sample counts once where a rank repeats a batch, and where a rank has none."""
    found = contracts[name]
    numbers = [float(i + 1) for i in range(NUM_COUNTED)]
    if found.counted is not None:
        assert found.counted == [(NUM_COUNTED, numbers, [max(numbers), sum(numbers)])] * 2
    assert found.metrics["validated"] == NUM_COUNTED
    assert found.metrics["callback"] == NUM_COUNTED


@pytest.mark.distributed
@pytest.mark.parametrize("name", ALL)
def test_a_stop_that_one_rank_asks_for_ends_all_at_one_step(name: str, contracts: dict[str, Contract]) -> None:
    steps_of_an_epoch = len(ITEMS) // data_ranks_of(name)
    assert STOP_AFTER_STEPS <= contracts[name].stopped_at < MOST_EPOCHS_OF_STOP * steps_of_an_epoch


@pytest.mark.distributed
@pytest.mark.parametrize(("reader", "writer"), [_marked(pair) for pair in PAIRS])
@pytest.mark.filterwarnings("ignore:.*random number generators start from scratch:UserWarning")
def test_a_checkpoint_of_one_strategy_continues_under_another(
    reader: str, writer: str, continued: dict[Any, Any], contracts: dict[str, Contract]
) -> None:
    found = continued[reader, _group(reader, writer)][writer]
    assert_like(found.after(contracts[writer].first), contracts["single"].whole)


@pytest.mark.distributed
@pytest.mark.parametrize("name", OTHERS)
def test_every_strategy_writes_the_same_names_shapes_and_optimizer_state(
    name: str, contracts: dict[str, Contract], checkpoints: dict[str, Path]
) -> None:
    assert contracts["single"]  # the trainings write the checkpoints
    assert contracts[name]
    single, other = read_checkpoint(checkpoints["single"]), read_checkpoint(checkpoints[name])
    assert single.model is not None
    assert other.model is not None
    assert {k: (v.shape, v.dtype) for k, v in single.model.items()} == {
        k: (v.shape, v.dtype) for k, v in other.model.items()
    }
    ours, theirs = single.optimizers[0]["state"], other.optimizers[0]["state"]
    assert set(ours) == set(theirs) == {n for n, _ in ContractTask().named_parameters()}
    for parameter, state in ours.items():
        for key, value in state.items():
            torch.testing.assert_close(theirs[parameter][key], value, rtol=0, atol=1e-5)
    # Batches are counted on one rank; the samples of ragged batches are estimated from one rank.
    skipped = ("seconds", "batches", "batch_in_epoch", "samples", "samples_in_epoch")
    assert {k: v for k, v in single.state.items() if k not in skipped} == {
        k: v for k, v in other.state.items() if k not in skipped
    }


@pytest.mark.distributed
def test_another_number_of_processes_says_that_generators_start_anew(
    contracts: dict[str, Contract], checkpoints: dict[str, Path]
) -> None:
    assert contracts["ddp"]  # the training writes the checkpoint
    with pytest.warns(TrainwrightWarning, match="written by 2 process.*random number generators start from scratch"):
        continue_others("single", [checkpoints["ddp"]])
