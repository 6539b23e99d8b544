"""Export a module's forward: as an ONNX file, as a program of `torch.export`, and as TorchScript."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.core.errors import ConfigurationError, require_package
from trainwright.core.measures import evaluating
from trainwright.core.tree import move


def export_onnx(module: nn.Module, file_path: str | Path | None, sample: object, **options: Any) -> Any:
    """Export `module.forward` with torch's exporter, in evaluation mode and without gradients.

    Raises:
        ConfigurationError: there is no sample.
        MissingPackageError: onnxscript, which torch's exporter needs, is not installed.
    """
    positional, named = _arguments(module, "to_onnx", "input_sample", sample)
    require_package("onnxscript", purpose="to_onnx", install="onnx onnxscript")
    if named:
        options["kwargs"] = named
    with evaluating(module):
        return torch.onnx.export(module, positional, None if file_path is None else str(file_path), **options)


def export_program(module: nn.Module, sample: object, **options: Any) -> torch.export.ExportedProgram:
    """Export `module.forward` with `torch.export.export`, in evaluation mode and without gradients.

    Raises:
        ConfigurationError: there is no sample.
    """
    positional, named = _arguments(module, "export", "example_input", sample)
    with evaluating(module):
        return torch.export.export(module, positional, named or None, **options)


def export_torchscript(
    module: nn.Module, file_path: str | Path | None, method: str | None, sample: object, **options: Any
) -> torch.jit.ScriptModule:
    """Compile (`"script"`) or record (`"trace"`) `module.forward` as TorchScript, in evaluation mode.

    Raises:
        ConfigurationError: the method is unknown, or there is no sample to trace with.
    """
    if method not in ("script", "trace"):
        raise ConfigurationError(f"to_torchscript(method={method!r}): expected 'script' or 'trace'.")
    with evaluating(module), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
        if method == "script":
            with _without_properties(module):
                script: torch.jit.ScriptModule = torch.jit.script(module, **options)
        else:
            positional, named = _arguments(module, "to_torchscript", "example_inputs", sample)
            inputs = {"example_kwarg_inputs": named} if named else {"example_inputs": positional}
            script = torch.jit.trace(module, **inputs, **options)
        if file_path is not None:
            torch.jit.save(script, str(file_path))
    return script


@contextmanager
def _without_properties(module: nn.Module) -> Iterator[None]:
    """Hide the properties of this package's classes, which torch would read and compile along with `forward`."""
    cls = type(module)
    ours = [base for base in cls.__mro__ if base.__module__.startswith("trainwright.")]
    names = [name for base in ours for name, value in vars(base).items() if isinstance(value, property)]
    module.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, **dict.fromkeys(names)})
    try:
        yield
    finally:
        module.__class__ = cls


def _arguments(module: nn.Module, name: str, argument: str, sample: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments of `forward`, on the module's device."""
    if sample is None:
        raise ConfigurationError(
            f"{type(module).__name__}.{name} needs an example of forward's input: pass {argument}, or set "
            "self.example_input_array."
        )
    device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
    sample = move(sample, device)
    if isinstance(sample, dict):
        return (), sample
    return (sample if isinstance(sample, tuple) else (sample,)), {}
