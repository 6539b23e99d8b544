"""What callables take, and how they are called with it."""

from __future__ import annotations

from typing import Any

import pytest

from trainwright.core.errors import ConfigurationError
from trainwright.core.hooks import TaskHooks
from trainwright.core.signatures import arguments_of, bind, check_signatures, fits
from trainwright.core.task import TaskModule

STEP = ("batch", "batch_idx", "dataloader_idx")
END = ("outputs", *STEP)


def test_a_hook_is_called_with_what_its_base_declares() -> None:
    assert arguments_of(TaskHooks, "on_validation_batch_end") == END
    assert arguments_of(TaskModule, "backward") == ("loss",)
    assert arguments_of(TaskModule, "training_step") == ("batch", "batch_idx")


def test_a_name_in_another_place_is_given_by_its_name() -> None:
    def step(batch: Any, dataloader_idx: int) -> Any:
        return batch, dataloader_idx

    bound = bind(step, "test_step", STEP)
    assert bound("batch", 7) == ("batch", 0)
    assert bound("batch", 7, 3) == ("batch", 3)


@pytest.mark.parametrize(
    ("function", "name", "names", "right"),
    [
        (lambda: None, "test_step", STEP, False),
        (lambda batch: None, "test_step", STEP, True),
        (lambda outputs, batch: None, "on_test_batch_end", END, False),
        (lambda outputs, batch, batch_idx: None, "on_test_batch_end", END, True),
        (lambda outputs, batch, batch_idx, a, b: None, "on_test_batch_end", END, False),
        (lambda outputs, batch, batch_idx, a=0, b=0: None, "on_test_batch_end", END, True),
        (lambda *args, batch_idx: None, "on_test_batch_end", END, True),
        (lambda *args, other: None, "on_test_batch_end", END, False),
        (lambda *, stage: None, "setup", ("stage",), False),
    ],
)
def test_what_cannot_be_called_is_found(function: Any, name: str, names: tuple[str, ...], right: bool) -> None:
    assert fits(function, name, names) is right


def test_a_callback_s_batch_hook_keeps_its_batch_where_the_loader_s_index_comes_first() -> None:
    names = ("trainer", "task", "outputs", "batch", "batch_idx", "dataloader_idx")
    hook = bind(
        lambda trainer, task, outputs, dataloader_idx, batch, batch_idx: (batch, batch_idx, dataloader_idx),
        "on_validation_batch_end",
        names,
    )
    assert hook("t", "m", "o", "b", 1) == ("b", 1, 0)
    assert hook("t", "m", "o", "b", 1, 2) == ("b", 1, 2)


@pytest.mark.parametrize("kind", ["an async function", "a generator"])
def test_what_a_call_would_not_run_is_refused(kind: str) -> None:
    class Async(TaskModule):
        async def optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...

    class Generator(TaskModule):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            yield batch

    task, name = (Async(), "optimizer_step") if kind == "an async function" else (Generator(), "validation_step")
    with pytest.raises(ConfigurationError, match=rf"{type(task).__name__}.{name} is {kind}.* would never run"):
        check_signatures(task, TaskModule, [name])
