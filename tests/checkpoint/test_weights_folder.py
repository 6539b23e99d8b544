"""A folder of weights goes from one model to the next as a whole, wherever the process or the machine ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from trainwright.bigmodels.weights.stored_weights import read_checkpoint
from trainwright.checkpoint import set_fault_hook
from trainwright.checkpoint.disk.planned_file import Weight
from trainwright.checkpoint.interop.weights_folder import replace_weights
from trainwright.core.errors import CheckpointError

State = dict[str, torch.Tensor]
WHOLE = 10**6
HALVES, THIRDS = 512, 256  # six tensors of 128 bytes: two shards of four and two, three of two each

# What a folder holds before, and what comes: (bytes of a shard, safetensors).
CHANGES: dict[str, tuple[tuple[int, bool] | None, tuple[int, bool]]] = {
    "nothing to shards": (None, (HALVES, True)),
    "one file to shards": ((WHOLE, True), (HALVES, True)),
    "shards to shards of the same names": ((HALVES, True), (HALVES, True)),
}


def state_of(number: int) -> State:
    return {f"layer.{index}": torch.full((32,), float(10 * number + index)) for index in range(6)}


def write(folder: Path, number: int, how: tuple[int, bool]) -> list[Path]:
    weights = {name: Weight.of(tensor) for name, tensor in state_of(number).items()}
    return replace_weights(folder, weights, max_shard_bytes=how[0], safe=how[1])


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def number_of(state: Mapping[str, torch.Tensor]) -> int:
    """Return which of the models this is; fails if it is none of them as a whole."""
    number = int(state["layer.0"][0]) // 10
    assert state.keys() == state_of(number).keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in state_of(number).items())
    return number


@pytest.mark.parametrize("change", CHANGES)
def test_a_write_that_fails_at_any_point_leaves_a_whole_model(change: str, tmp_path: Path) -> None:
    before, after = CHANGES[change]
    for number in range(1000):
        folder = tmp_path / str(number)
        old: list[str] = []
        if before is not None:
            write(folder, 1, before)
            old = names_in(folder)
        left = [number]

        def fail(event: str, path: Path, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0 and event != "fsync_folder":
                set_fault_hook(None)
                raise OSError(28, "No space left on device")

        set_fault_hook(fail)
        try:
            write(folder, 2, after)
        except CheckpointError as error:
            in_place = "the new weights are in" in str(error)
        else:
            assert number > 5
            return
        finally:
            set_fault_hook(None)
        if in_place:
            assert number_of(read_checkpoint(folder)) == 2
        elif before is None:
            assert not folder.exists()
        else:
            assert number_of(read_checkpoint(folder)) == 1
            assert names_in(folder) == old
    pytest.fail("it never came to its end")
