"""Where tensors live that are on the device only while they are used: host memory, or files mapped into it."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError
from trainwright.core.host.byte_sizes import format_bytes

PLACES = ("cpu", "disk")
_ALIGN_BYTES = 64  # as torch aligns what it allocates: kernels may add in another order for other addresses


class Home:
    """Makes tensors in one place.

    Args:
        place: `"cpu"` or `"disk"`.
        folder: for `"disk"`; a temporary one unless given. Files have no name there once they are mapped: they go when
            the tensors do, a killed process's too.
        pinned: for `"cpu"`: memory that an accelerator copies from and to beside its computation.
    """

    def __init__(self, place: str, folder: Path | None = None, *, pinned: bool = False) -> None:
        self.place, self.folder, self.pinned = place, folder, pinned

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor (numel,) without values.

        Raises:
            ConfigurationError: the disk is full, or the folder cannot be written.
        """
        if self.place == "cpu" or numel == 0:
            return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self.pinned)
        return self._mapped(numel, dtype)

    def _mapped(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = numel * dtype.itemsize
        try:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, path = tempfile.mkstemp(prefix=".offloaded-", dir=self.folder)
        except OSError as error:
            raise ConfigurationError(f"offload_folder={str(self.folder)!r} cannot be written: {error}.") from error
        try:
            # Reserved now: a page that cannot be stored later kills the process.
            os.posix_fallocate(descriptor, 0, num_bytes)
            return torch.from_file(path, shared=True, size=numel, dtype=dtype)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise ConfigurationError(
                f"{format_bytes(num_bytes)} of weights do not fit into {Path(path).parent}: {error.strerror}. Name a "
                "larger offload_folder."
            ) from error
        finally:
            os.close(descriptor)
            os.unlink(path)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the same values here, in the same memory format."""
        made = self.empty_like(tensor)
        made.copy_(tensor)
        return made

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of another one's shape, dtype and memory format, without values."""
        return _laid_out(self.empty(tensor.numel(), tensor.dtype), tensor)

    def take_state(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Move state here that an optimizer has created elsewhere. Scalars stay where they are.

        Args:
            optimizer: its state tensors are replaced.
            parameters: whose state. Default: None, which is all.
        """
        for parameter in list(optimizer.state) if parameters is None else parameters:
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() and not hasattr(value, "_trainwright_at_home"):
                    at_home = self.like(value)
                    at_home._trainwright_at_home = True  # type: ignore[attr-defined]  # a mark of our own
                    optimizer.state[parameter][name] = at_home


def place_in(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors like these that lie one after the other in a flat one of `flat_numel` elements."""
    found, start, step = [], 0, _ALIGN_BYTES // flat.itemsize
    for tensor in tensors:
        found.append(_laid_out(flat[start : start + tensor.numel()], tensor))
        start += -(-tensor.numel() // step) * step
    return found


def _laid_out(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a flat tensor, with another one's shape and, where that is dense, its order of dimensions:
    kernels choose by it (channels_last), and add in its order.
    """
    return flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())


def flat_numel(sizes: Sequence[torch.Size], dtype: torch.dtype) -> int:
    """Return how many elements tensors of these sizes take one after the other, each aligned."""
    step = _ALIGN_BYTES // dtype.itemsize
    return sum(-(-size.numel() // step) * step for size in sizes)
