"""Quantization-aware training by torchao."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from trainwright.callbacks.callback import Callback, Order
from trainwright.callbacks.torchao_layers import (
    ModuleFilter,
    check_config,
    check_float,
    check_no_fp8,
    linear_layers,
    prepare_layers,
    quantize_layers,
    torchao_config,
    write_quantized,
)
from trainwright.core.host.rank_zero import rank_zero_info
from trainwright.core.run import Run, Stage
from trainwright.core.task import TaskModule


class QuantizationAwareTraining(Callback):
    """Callback that trains linear layers with fake quantization, and quantizes them at the end of the fit.

    During the fit, forward passes round weights (and activations, with a dynamic configuration) to the values that the
    quantized model will have. Parameters keep their names and float values, so that checkpoints of a fit with and
    without the callback are interchangeable. Each rank needs full weights (one process, DDP).

    Args:
        config: See `quantize_model`. A configuration object must be one that torchao supports for training. Default:
            `"int8_dynamic_int4_weight"`.
        group_size: Number of weights that share a scale, if `config` is a name with int4. Default: 32.
        skip: Names of layers, or of modules that contain them, that stay in float. Default: none.
        module_filter: A function of a layer and its name that returns True for layers to be quantized. Default: None,
            which is all.
        path: The safetensors file that rank 0 writes at the end of the fit; see `load_quantized_model`. Default: None.
        convert: Leave the task's layers quantized after the fit. False leaves them in float, also if `path` is given.
            Default: True.

    Raises:
        ConfigurationError: The configuration is unknown. At the beginning of a fit: a chosen layer cannot be quantized,
            no layer is chosen, no module has a name in `skip`, the precision is fp8, or the task is quantized already.
        MissingPackageError: torchao is not installed. Raised at the beginning of a fit.
        CheckpointError: the file cannot be written. Raised at the end of a fit.
    """

    needs = ("full_weights", "converted_layers")
    order = Order.FIRST  # searches of other callbacks try steps with fake quantization

    def __init__(
        self,
        config: Any = "int8_dynamic_int4_weight",
        group_size: int = 32,
        skip: str | Sequence[str] = (),
        module_filter: ModuleFilter | None = None,
        path: str | os.PathLike[str] | None = None,
        convert: bool = True,
    ) -> None:
        check_config(config)
        self.config = config
        self.group_size = group_size
        self.skip = skip
        self.module_filter = module_filter
        self.path = path
        self.convert = convert
        # Removes fake quantization. None before `on_fit_start` and after the fit.
        self._undo: Callable[[], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_undo": None}

    def setup(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        if stage == "fit" and self._undo is None:
            check_float(task, dict(task.named_modules()))  # before a checkpoint is loaded into it

    def on_fit_start(self, trainer: Run, task: TaskModule) -> None:
        if self._undo is not None:  # a rollback within the fit: the layers are already prepared
            return
        check_no_fp8(task)
        layers = linear_layers(task, self.skip, self.module_filter)
        self._undo = prepare_layers(layers, torchao_config(self.config, self.group_size))
        rank_zero_info(f"quantization-aware training: {len(layers)} linear layers have fake quantization.")

    def on_fit_end(self, trainer: Run, task: TaskModule) -> None:
        # Not in `on_train_end`, in which other callbacks set the final weights and the last checkpoint is written.
        self._restore()
        layers = linear_layers(task, self.skip, self.module_filter)
        undo = quantize_layers(layers, torchao_config(self.config, self.group_size))
        if self.path is not None and trainer.is_global_zero:
            write_quantized(task, self.path)
        if not self.convert:
            undo()

    def teardown(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        if stage == "fit":
            self._restore()

    def _restore(self) -> None:
        undo = self._undo
        self._undo = None
        if undo is not None:
            undo()
