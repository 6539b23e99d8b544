"""Calls of Accelerate's documentation, page by page, in programs that run in one process and on two ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.distributed import run_distributed
from trainwright import (
    Accelerator,
)
from trainwright.utils import wait_for_everyone


def execution_page(folder: Path) -> None:
    accelerator, ran = Accelerator(cpu=True), []
    rank, last = accelerator.process_index, accelerator.num_processes - 1

    @accelerator.on_main_process
    def main() -> None:
        ran.append("main")

    @accelerator.on_local_main_process
    def local() -> None:
        ran.append("local")

    @accelerator.on_last_process
    def at_the_end() -> None:
        ran.append("last")

    @accelerator.on_process(process_index=0)
    def on_0() -> None:
        ran.append("0")

    @accelerator.on_local_process(local_process_idx=0)
    def on_local_0() -> None:
        ran.append("local 0")

    for function in (main, local, at_the_end, on_0, on_local_0):
        function()
    assert ran == (["main", "local"] if rank == 0 else []) + (["last"] if rank == last else []) + (
        ["0", "local 0"] if rank == 0 else []
    )
    accelerator.print("once")
    file = folder / "downloaded"
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            assert not file.exists()
            time.sleep(0.1)
            file.write_text("x")
        assert file.read_text() == "x"
    # A download by hand: the main process loads first, and the others wait.
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
    assert file.exists()
    if accelerator.is_main_process:
        accelerator.wait_for_everyone()
    with accelerator.local_main_process_first():
        pass
    wait_for_everyone()


_PAGES: list[Callable[[Path], None]] = [state_page, execution_page, saving_page, inference_page]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.__name__)
def test_the_calls_of_a_page_work_in_one_process(page: Callable[[Path], None], tmp_path: Path) -> None:
    page(tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.__name__)
def test_the_calls_of_a_page_work_on_two_ranks(page: Callable[[Path], None], tmp_path: Path) -> None:
    run_distributed(page, 2, tmp_path, init=False)


# Communication hooks
