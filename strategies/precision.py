"""Precision: the number formats of parameters and computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from trainwright.core.errors import ConfigurationError
from trainwright.core.host.device_types import properties


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats of parameters and computation, under a name of Lightning.

    Attributes:
        name: `"32-true"`, `"64-true"`, `"16-true"`, `"bf16-true"`, `"16-mixed"`, `"bf16-mixed"` or `"fp8"`.
        param_dtype: dtype of parameters, buffers and floating-point inputs. None does not convert them.
        autocast_dtype: dtype of autocast, while parameters stay float32. None disables autocast.
        scaled: Scale the loss so that small float16 gradients do not underflow.
        converts_layers: `convert` changes layers of models.
        fp8_all_gather: FSDP gathers the weights of converted layers in float8.
        splits_converted: Tensor parallelism can split converted layers.
        fp8_backend: `"AO"` (torchao), `"TE"` (transformer_engine) or `"NO"`.
    """

    name: str
    param_dtype: torch.dtype | None = None
    autocast_dtype: torch.dtype | None = None
    scaled: bool = False

    converts_layers: ClassVar[bool] = False
    fp8_all_gather: ClassVar[bool] = False
    splits_converted: ClassVar[bool] = True
    fp8_backend: ClassVar[str] = "NO"

    def check_device(self, device_type: str) -> None:
        """Check that a device type supports these formats, without using a device.

        Raises:
            ConfigurationError: The formats are not supported. The message suggests a supported precision.
        """
        if self.param_dtype is torch.float64 and not properties(device_type).has_float64:
            raise ConfigurationError(
                f"precision={self.name!r} is not supported: the accelerator {device_type!r} has no float64. Use "
                "precision='32-true', or accelerator='cpu'."
            )

    def convert(self, models: Sequence[nn.Module], device: torch.device, undo: ExitStack) -> None:
        """Convert layers of models in place. Not collective.

        Args:
            models: Models that are prepared together.
            device: Device of the models.
            undo: Receives callbacks that undo the conversion.

        Raises:
            ConfigurationError: No layer can be converted, or the device is not supported.
        """

    def default_dtype(self) -> AbstractContextManager[None]:
        """Return a context in which the default dtype of new tensors is `param_dtype`."""
        return nullcontext() if self.param_dtype is None else _DefaultDtype(self.param_dtype)

    def autocast(
        self, device_type: str, *, enabled: bool = True, cache_enabled: bool | None = None
    ) -> AbstractContextManager[None]:
        """Return a new autocast context with `autocast_dtype`. See `torch.autocast` for the arguments."""
        make = partial(
            torch.autocast, device_type, dtype=self.autocast_dtype, enabled=enabled, cache_enabled=cache_enabled
        )
        return Contexts(make, _without_fast_path) if enabled and device_type != "cuda" else make()

    def forward_context(self, device_type: str) -> Any | None:
        """Return a reusable context for forwards on this device type. None if no context is needed."""
        if self.autocast_dtype is not None:
            return self.autocast(device_type)
        return None if self.param_dtype is None else _DefaultDtype(self.param_dtype)


class Contexts(AbstractContextManager[None], ContextDecorator):
    """Combination of several contexts, which is reusable and reentrant.

    Args:
        makers: Functions that create the contexts, the outermost one first.
    """

    def __init__(self, *makers: Callable[[], AbstractContextManager[object]]) -> None:
        self._makers = makers
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as entered:
            for make in self._makers:
                entered.enter_context(make())
            self._entered.append(entered.pop_all())

    def __exit__(self, *_: object) -> None:
        self._entered.pop().close()


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Disable torch's fused attention and encoder layers, which do not support autocast.

    Under autocast, these layers fail or compute in float32. torch 2.13 disables them only under autocast for CUDA.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _DefaultDtype(AbstractContextManager[None]):
    """A reusable context with another default dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._before = torch.float32

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self._before)
