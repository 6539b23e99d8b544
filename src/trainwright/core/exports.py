"""Export a module's forward: as an ONNX file, as a program of `torch.export`, and as TorchScript."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from trainwright.core.errors import ConfigurationError, TaskError, require_package
from trainwright.core.measures import evaluating
from trainwright.core.tree import move


class ExportMixin(nn.Module):
    """Methods of a task that export its `forward`.

    Attributes:
        example_input_array: an example of `forward`'s argument.
    """

    example_input_array: Any = None

    def to_onnx(self, file_path: str | Path | None = None, input_sample: object = None, **options: Any) -> Any:
        """Write `forward` as an ONNX file, in evaluation mode; `options` are passed to `torch.onnx.export`.

        Args:
            file_path: the file; None: only return the program. Default: None.
            input_sample: arguments of `forward`: a tuple, a dict of named arguments, or a single one. Default:
                `example_input_array`.

        Raises:
            ConfigurationError: there is no sample.
            MissingPackageError: onnxscript is not installed.
        """
        sample = self.example_input_array if input_sample is None else input_sample
        return export_onnx(self, file_path, sample, **options)

    def export(self, example_input: object = None, **options: Any) -> torch.export.ExportedProgram:
        """Export `forward` in evaluation mode; `options` are passed to `torch.export.export`.

        Args:
            example_input: arguments of `forward`: a tuple, a dict of named arguments, or a single one. Default:
                `example_input_array`.

        Raises:
            ConfigurationError: there is no example.
        """
        sample = self.example_input_array if example_input is None else example_input
        return export_program(self, sample, **options)

    def to_torchscript(
        self,
        file_path: str | Path | None = None,
        method: str | None = "script",
        example_inputs: object = None,
        **kwargs: Any,
    ) -> torch.jit.ScriptModule:
        """Return `forward` as TorchScript, in evaluation mode. torch has deprecated TorchScript: prefer `export`.

        Args:
            file_path: the file to write; None: only return the module. Default: None.
            method: `"script"` compiles the code of `forward`, `"trace"` records one call of it. Default: `"script"`.
            example_inputs: arguments of `forward` for `"trace"`. Default: `example_input_array`.
            kwargs: passed to `torch.jit.script` or `torch.jit.trace`.

        Raises:
            ConfigurationError: the method is unknown, or there is no example to trace with.
        """
        sample = self.example_input_array if example_inputs is None else example_inputs
        return export_torchscript(self, file_path, method, sample, **kwargs)

    def to_tensorrt(self, *args: object, **options: object) -> NoReturn:
        """Not supported: torch_tensorrt compiles a task like any module."""
        raise TaskError(
            "to_tensorrt does not exist here. A task is a torch module: torch_tensorrt.compile(task.eval(), "
            "inputs=[input]) compiles it."
        )


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
            script = torch.jit.trace(module, **inputs, **options)  # type: ignore[no-untyped-call]  # torch has no types here
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
