from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from trainwright.core.errors import TrainwrightError
from trainwright.core.host.memory import find_executable_batch_size, is_out_of_memory, release_memory

HOST = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "400000000000000 bytes. Error code 12 (Cannot allocate memory)"
)


def _out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    "error",
    [
        _out_of_memory(),
        HOST,
        MemoryError(),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a ..."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=lambda error: f"{type(error).__name__} {error!s:.20}",
)
def test_memory_that_ran_out_is_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes"), ValueError("out of memory"), KeyError("x")])
def test_another_error_is_none(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_a_function_is_tried_with_half_until_it_fits() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, factor: int, *, more: int = 0) -> int:
        """Train."""
        tried.append(batch_size)
        if batch_size > 20:
            raise _out_of_memory()
        return batch_size * factor + more

    assert train(2, more=1) == 25
    assert tried == [100, 50, 25, 12]
    assert train.__doc__ == "Train."


@pytest.mark.parametrize(("args", "options"), [((8, 1.0), {}), ((), {"batch_size": 8})])
def test_a_batch_size_that_is_handed_over_is_refused(args: Any, options: Any) -> None:
    @find_executable_batch_size
    def train(batch_size: int, lr: float = 0.1) -> None:
        pytest.fail("must not run")

    with pytest.raises(TypeError, match=r"passes already. Call it without: train\(lr=\.\.\.\)"):
        train(*args, **options)


def test_nothing_fits() -> None:
    def fail(batch_size: int) -> None:
        raise _out_of_memory()

    train = find_executable_batch_size(fail, starting_batch_size=4)
    with pytest.raises(TrainwrightError, match=r"no batch size fits: .*fail .* starting from 4") as caught:
        train()
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    with pytest.raises(TrainwrightError) as caught:  # a later call tries again
        train()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_released_objects_are_none_and_gone() -> None:
    a, b = torch.ones(3), torch.ones(4)
    references = [weakref.ref(a), weakref.ref(b)]
    a, b = release_memory(a, b)
    assert a is None
    assert b is None
    assert [reference() for reference in references] == [None, None]
