"""Export of a module's `forward` as an ONNX file, as an `ExportedProgram` of `torch.export`, or as TorchScript."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from trainwright.core.errors import ConfigurationError, TaskError, require_package
from trainwright.core.measures import evaluating
from trainwright.core.tree import move


class ExportMixin(nn.Module):
    """Mixin for tasks with methods that export `forward`.

    Attributes:
        example_input_array: example arguments of `forward`, in a form that `input_sample` of `to_onnx` may have.
    """

    example_input_array: Any = None
    # Read by torch.jit.script, which cannot compile attributes of the type Any.
    __jit_ignored_attributes__ = ("example_input_array",)

    def to_onnx(self, file_path: str | Path | None = None, input_sample: object = None, **options: Any) -> Any:
        """Export `forward` in evaluation mode to ONNX. `options` are passed to `torch.onnx.export`.

        Returns the result of `torch.onnx.export`: an `ONNXProgram`, or None with `dynamo=False`.

        Args:
            file_path: the file to write. Default: None, which only returns the program.
            input_sample: arguments of `forward`: a tuple of positional arguments, a dict of named arguments, or one
                positional argument. Default: None, which uses `example_input_array`.

        Raises:
            ConfigurationError: `input_sample` and `example_input_array` are both missing.
            MissingPackageError: onnxscript is not installed.
        """
        positional, named = self._example("to_onnx", "input_sample", input_sample)
        require_package("onnxscript", purpose="to_onnx", install="onnx onnxscript")
        if named:
            options["kwargs"] = named
        with evaluating(self):
            return torch.onnx.export(self, positional, None if file_path is None else str(file_path), **options)

    def export(self, example_input: object = None, **options: Any) -> torch.export.ExportedProgram:
        """Export `forward` in evaluation mode. `options` are passed to `torch.export.export`.

        `example_input` may have the same forms as `input_sample` of `to_onnx`, and the same default and error.
        """
        positional, named = self._example("export", "example_input", example_input)
        with evaluating(self):
            return torch.export.export(self, positional, named or None, **options)

    def to_torchscript(
        self,
        file_path: str | Path | None = None,
        method: str | None = "script",
        example_inputs: object = None,
        **kwargs: Any,
    ) -> torch.jit.ScriptModule:
        """Return `forward` in evaluation mode as TorchScript. torch has deprecated TorchScript; prefer `export`.

        Args:
            file_path: the file to write. Default: None, which only returns the module.
            method: `"script"` compiles the code of `forward`, `"trace"` records one call of it. Default: `"script"`.
            example_inputs: arguments of `forward` for `"trace"`, in the forms of `input_sample` in `to_onnx`. Default:
                None, which uses `example_input_array`.
            kwargs: passed to `torch.jit.script` or `torch.jit.trace`.

        Raises:
            ConfigurationError: the method is unknown, or tracing has no example inputs.
        """
        if method not in ("script", "trace"):
            raise ConfigurationError(f"to_torchscript(method={method!r}): expected 'script' or 'trace'.")
        with evaluating(self), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
            if method == "script":
                script: torch.jit.ScriptModule = _script(self, **kwargs)
            else:
                positional, named = self._example("to_torchscript", "example_inputs", example_inputs)
                inputs = {"example_kwarg_inputs": named} if named else {"example_inputs": positional}
                script = torch.jit.trace(self, **inputs, **kwargs)  # type: ignore[no-untyped-call]  # torch has no types here
            if file_path is not None:
                torch.jit.save(script, str(file_path))
        return script

    def to_tensorrt(self, *args: object, **options: object) -> NoReturn:
        """Raise an error that recommends torch_tensorrt, which compiles a task like any module."""
        raise TaskError("to_tensorrt does not exist here. Use torch_tensorrt.compile(task.eval(), inputs=[input]).")

    def _example(self, method: str, argument: str, sample: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `sample` (or its default) as positional and named arguments of `forward`, on the task's device."""
        sample = self.example_input_array if sample is None else sample
        if sample is None:
            raise ConfigurationError(
                f"{type(self).__name__}.{method} needs an example of forward's input: pass {argument}, or set "
                "self.example_input_array."
            )
        device = next((parameter.device for parameter in self.parameters()), torch.device("cpu"))
        sample = move(sample, device)
        if isinstance(sample, dict):
            return (), sample
        if isinstance(sample, tuple):
            return sample, {}
        return (sample,), {}


def _script(module: nn.Module, **options: Any) -> Any:
    """Compile a task with torch.jit.script, with the properties of this package's base classes removed."""
    cls = type(module)
    properties: list[str] = []
    for base in cls.__mro__:
        if base.__module__.startswith("trainwright."):
            properties += [name for name, value in vars(base).items() if isinstance(value, property)]
    # torch.jit.script compiles every property of the class, and fails for those of a task, such as `trainer`. Its own
    # list of names to skip, `__jit_unused_properties__`, would be replaced by that of a user's class. Therefore give
    # the module, while it is compiled, a sub-class in which the properties are None.
    module.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, **dict.fromkeys(properties)})
    try:
        return torch.jit.script(module, **options)
    finally:
        module.__class__ = cls
