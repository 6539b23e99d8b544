"""A type of accelerator that a package adds to torch: `open`, with host memory and the CPU's kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils.cpp_extension import load

NAME = "open"


class OpenDevice:
    """The module `torch.open`: one device, with a generator that nothing draws from."""

    def __init__(self) -> None:
        self._state = torch.zeros(8, dtype=torch.uint8)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_device_name(self, index: int) -> str:
        return f"Open device {index}"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self._state.clone()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self._state = state.clone()

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing."""

    def _is_in_bad_fork(self) -> bool:
        return False


def build(folder: Path) -> None:
    """Compile the kernels into `folder`, or load those that are there."""
    load(
        NAME,
        [str(Path(__file__).with_name("open_device.cpp"))],
        build_directory=str(folder),
        is_python_module=False,
        with_cuda=False,
        extra_cflags=["-O0"],
    )


def register(folder: Path) -> None:
    """Add the device to torch, for the rest of this process."""
    build(folder)
    add: Any = backend_registration._setup_privateuseone_for_python_backend
    add(NAME, backend_module=OpenDevice())
