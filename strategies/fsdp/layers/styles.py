"""Tensor-parallel styles, which split one layer over ranks: torch's styles by name, and additional styles.

Source: Shoeybi et al., "Megatron-LM" (2019). For sequence parallelism: Korthikanti et al., "Reducing Activation
Recomputation" (2022).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional

from trainwright.strategies.steps.fp8 import float8_linear, is_converted


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D, a linear layer with weights of shape (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


class LossParallel(ColwiseParallel):
    """Style that splits the layer of the logits by classes, and computes `cross_entropy` on the shards.

    In the step, logits are a DTensor sharded along the last dimension. Outputs of the step are unsharded.

    Args:
        input_layouts: Placement of the layer's input; `Shard(1)` for a split sequence. Default: `Replicate()`.
    """

    def __init__(self, *, input_layouts: Placement | None = None) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=Shard(-1), use_local_output=False)


class FusedColwise(ParallelStyle):
    """Style that splits each block of a layer whose output is a concatenation, such as queries, keys and values.

    Each rank computes a part of every block, in the same order: `(…, outputs / ranks)`. The weight is a DTensor whose
    full tensor is the original weight. Checkpoints therefore do not depend on the split. Supports `nn.Linear` and
    transformers' `Conv1D`.

    Args:
        blocks: Number of blocks, which have equal widths.
        input_layouts: Placement of the layer's input; `Shard(1)` for a split sequence. Default: `Replicate()`.
    """

    def __init__(self, blocks: int = 3, *, input_layouts: Placement | None = None) -> None:
        super().__init__()
        self.blocks = blocks
        self.input_layouts = input_layouts or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        dim = 1 if is_conv1d(module) else 0
        _split_parameter(module, "weight", device_mesh, self._placement(dim))
        if module.bias is not None:
            _split_parameter(module, "bias", device_mesh, self._placement(0))

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            weight = _local(module.weight)
            bias = None if module.bias is None else _local(module.bias)
            full_inputs = _gathered_input(inputs, device_mesh, self.input_layouts)
            if is_converted(module):
                return float8_linear(module, full_inputs, weight, bias)
            if dim == 1:
                weight = weight.t()  # functional.linear expects (outputs, inputs)
            return functional.linear(full_inputs, weight, bias)

        vars(module)["forward"] = forward
        return module

    def _placement(self, dim: int) -> Placement:
        if self.blocks == 1:
            return Shard(dim)
        # Torch's placement of a tensor that was already sharded also describes blocks that are split separately. With 3
        # blocks and 2 ranks, rank 0 holds the first half of the queries, of the keys and of the values.
        return _StridedShard(dim, split_factor=self.blocks)


class Conv1DRowwise(ParallelStyle):
    """Style that splits transformers' `Conv1D` by inputs, and sums the outputs over ranks. Inputs must be split.

    Args:
        output_layouts: Placement of the output; `Shard(1)` for a split sequence. Default: `Replicate()`.
    """

    def __init__(self, *, output_layouts: Placement | None = None) -> None:
        super().__init__()
        self.output_layouts = output_layouts or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _split_parameter(module, "weight", device_mesh, Shard(0))
        _split_parameter(module, "bias", device_mesh, Replicate())
        # Each rank adds the bias to its output. If the output is a shard of the sequence, the gradient of the bias is a
        # partial sum. Else every rank computes the full gradient.
        bias_grad: Placement = Partial() if isinstance(self.output_layouts, Shard) else Replicate()

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            product = functional.linear(inputs, _local(module.weight).t())
            summed = _redistributed(product, device_mesh, Partial(), self.output_layouts)
            bias: Any = module.bias
            output: torch.Tensor = summed + bias.to_local(grad_placements=[bias_grad])
            return output

        vars(module)["forward"] = forward
        return module


class SplitEmbedding(ParallelStyle):
    """Style that splits an embedding by rows. Each rank looks up its own rows. The outputs are summed over the ranks.

    Unlike torch's `RowwiseParallel`, it allocates on each rank the gradient of this rank's rows, not of all rows.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)  # checked by SplitLayers
        _split_parameter(module, "weight", device_mesh, Shard(0))
        # torch's chunks: 10 rows over 4 ranks are 3, 3, 3 and 1.
        rows_per_rank = -(-module.num_embeddings // device_mesh.size())
        first = rows_per_rank * device_mesh.get_local_rank()
        num = len(_local(module.weight))
        # The padding row gets no gradient. Its index on this rank is None if another rank has it.
        padding = None
        if module.padding_idx is not None and 0 <= module.padding_idx - first < num:
            padding = module.padding_idx - first

        def forward(ids: torch.Tensor) -> torch.Tensor:
            rows = ids - first
            # Rows of other ranks: look up row 0 instead, and replace the result by 0, which adds nothing to the sum.
            remote = (rows < 0) | (rows >= num)
            looked_up = functional.embedding(rows.masked_fill(remote, 0), _local(module.weight), padding)
            part = looked_up.masked_fill(remote.unsqueeze(-1), 0)
            return _redistributed(part, device_mesh, Partial(), Replicate())

        vars(module)["forward"] = forward
        return module


def _is_plain_embedding(module: nn.Module) -> bool:
    """Return whether a module is an embedding with torch's forward and default options for lookups and gradients."""
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


class FirstInput(ParallelStyle):
    """Style that redistributes a module's first input, `(batch, length, …)`, or the argument `hidden_states`.

    Args:
        source: `Replicate()`, or `Shard(1)` for a split sequence.
        target: `Shard(1)` if `source` is `Replicate()`, and vice versa. All layers in the module use the same
            redistributed input.
    """

    def __init__(self, source: Placement, target: Placement) -> None:
        super().__init__()
        self.source = source
        self.target = target

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def redistribute_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (self._redistribute(args[0], device_mesh), *args[1:]), kwargs
            hidden_states = self._redistribute(kwargs["hidden_states"], device_mesh)
            return args, {**kwargs, "hidden_states": hidden_states}

        module.register_forward_pre_hook(redistribute_input, with_kwargs=True)
        return module

    def _redistribute(self, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        length = tensor.shape[1]
        ranks = mesh.size()
        if isinstance(self.target, Shard) and length % ranks:
            raise ValueError(
                f"a sequence of length {length} cannot be split over tp={ranks} ranks. Pad it to "
                f"{length + ranks - length % ranks}, or disable sequence parallelism."
            )
        # With a gathered input, the following layers sum its gradients over the ranks.
        return _redistributed(tensor, mesh, self.source, self.target)


class DivideAttributes(ParallelStyle):
    """Style that divides integer attributes of a module, such as its number of heads, by the number of ranks.

    Args:
        names: Names of the attributes.
    """

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in self.names:
            setattr(module, name, getattr(module, name) // device_mesh.size())
        return module


class SplitParameters(ParallelStyle):
    """Style that splits parameters along the first dimension. The module's forward must not read these parameters.

    Intended for parameters that are tied to a parameter of a split layer, such as BERT's bias of the vocabulary.

    Args:
        names: Names of the parameters.
    """

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in self.names:
            _split_parameter(module, name, device_mesh, Shard(0))
        return module


def _colwise(module: nn.Module) -> ParallelStyle:
    return FusedColwise(1) if is_conv1d(module) else ColwiseParallel()


def _rowwise(module: nn.Module, output_layouts: Placement | None = None) -> ParallelStyle:
    if is_conv1d(module):
        return Conv1DRowwise(output_layouts=output_layouts)
    return RowwiseParallel(output_layouts=output_layouts)


def _embedding(module: nn.Module) -> ParallelStyle:
    if _is_plain_embedding(module):
        return SplitEmbedding()
    return RowwiseParallel(input_layouts=Replicate())


# The names of styles in plans → function that creates the style for a module
STYLES: dict[str, Callable[[nn.Module], ParallelStyle]] = {
    "colwise": _colwise,
    "rowwise": _rowwise,
    "fused_colwise": lambda _: FusedColwise(3),
    "colwise_gathered": lambda _: ColwiseParallel(output_layouts=Replicate()),
    "loss": lambda _: LossParallel(),
    "embedding": _embedding,
    "sequence": lambda _: SequenceParallel(use_local_output=True),
    "split_sequence": lambda _: FirstInput(Replicate(), Shard(1)),  # for the first block
    "gather_sequence": lambda _: FirstInput(Shard(1), Replicate()),
    "rowwise_to_sequence": lambda module: _rowwise(module, output_layouts=Shard(1)),
}


def _local(parameter: Any) -> torch.Tensor:
    """Return this rank's shard of a parameter, with gradients to the parameter."""
    shard: torch.Tensor = parameter.to_local()
    return shard


def _split_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Replace a module's parameter by a DTensor of which this rank has a shard."""
    full: Any = getattr(module, name)
    # Every rank has the same full parameter, so that nothing is broadcast.
    shard = distribute_tensor(full, mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(shard, requires_grad=full.requires_grad))


def _gathered_input(inputs: torch.Tensor, mesh: DeviceMesh, layout: Placement) -> torch.Tensor:
    """Return the full input. Backward sums the gradients of the full input over the ranks."""
    distributed: Any = inputs
    if not isinstance(inputs, DTensor):
        distributed = DTensor.from_local(inputs, mesh, [layout], run_check=False)
    gathered = distributed.redistribute(placements=[Replicate()])
    full: torch.Tensor = gathered.to_local(grad_placements=[Partial()])
    return full


def _redistributed(tensor: torch.Tensor, mesh: DeviceMesh, source: Placement, target: Placement) -> torch.Tensor:
    """Return this rank's part of a tensor with the placement `target`, from its part with the placement `source`.

    For example, `Partial()` → `Replicate()` sums over the ranks, and `Replicate()` → `Shard(1)` cuts the sequence.
    """
    distributed = DTensor.from_local(tensor, mesh, [source], run_check=False)
    return distributed.redistribute(placements=[target]).to_local()
