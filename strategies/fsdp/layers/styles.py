"""How one layer is split over the ranks of a tensor-parallel group: torch's styles by name, and those it lacks.

Source: Shoeybi et al., "Megatron-LM" (2019); Korthikanti et al., "Reducing Activation Recomputation" (2022) for the
split of activations along the sequence.
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
    """Tell whether a module is transformers' Conv1D: a linear layer whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


class LossParallel(ColwiseParallel):
    """Split the layer that makes logits by classes, and leave them split: `cross_entropy` then works on the pieces.

    Logits are a DTensor in the step, cut in its last dimension; what the step returns is whole again.

    Args:
        input_layouts: how the layer's input lies on the ranks; whole unless told, `Shard(1)` for a split sequence.
    """

    def __init__(self, *, input_layouts: Placement | None = None) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=Shard(-1), use_local_output=False)


class FusedColwise(ParallelStyle):
    """Split a layer whose outputs are several blocks side by side, such as queries, keys and values, block by block.

    Each rank computes its share of every block, in the same order: `(…, outputs / ranks)`. The weight is a DTensor
    whose whole is the layer's own, so that checkpoints do not know of the split. For `nn.Linear` and transformers'
    `Conv1D`.

    Args:
        blocks: how many blocks of equal width.
        input_layouts: how the layer's input lies on the ranks; whole unless told, `Shard(1)` for a split sequence.
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
            weight, bias = _local(module.weight), None if module.bias is None else _local(module.bias)
            found = _gathered_input(inputs, device_mesh, self.input_layouts)
            if is_converted(module):
                return float8_linear(module, found, weight, bias)
            return functional.linear(found, weight.t() if dim else weight, bias)

        vars(module)["forward"] = forward
        return module

    def _placement(self, dim: int) -> Placement:
        # Several blocks, each cut over the ranks: what torch needs for a tensor that had been cut before.
        return _StridedShard(dim, split_factor=self.blocks) if self.blocks > 1 else Shard(dim)


class Conv1DRowwise(ParallelStyle):
    """Split transformers' `Conv1D` by its inputs, which are split already; its outputs are summed over the ranks.

    Args:
        output_layouts: how the output lies on the ranks; whole unless told, `Shard(1)` for a split sequence.
    """

    def __init__(self, *, output_layouts: Placement | None = None) -> None:
        super().__init__()
        self.output_layouts = output_layouts or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _split_parameter(module, "weight", device_mesh, Shard(0))
        _split_parameter(module, "bias", device_mesh, Replicate())
        layouts = [self.output_layouts]
        # Each rank adds the bias to its part of the output: to all of it, or to the piece of a split sequence.
        of_bias = [Partial() if isinstance(self.output_layouts, Shard) else Replicate()]

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            product = functional.linear(inputs, _local(module.weight).t())
            summed: Any = DTensor.from_local(product, device_mesh, [Partial()], run_check=False).redistribute(
                placements=layouts
            )
            bias: Any = module.bias
            found: torch.Tensor = summed.to_local() + bias.to_local(grad_placements=of_bias)
            return found

        vars(module)["forward"] = forward
        return module


class SplitEmbedding(ParallelStyle):
    """Split an embedding by its entries; each rank looks its own up, and the outputs are summed over the ranks.

    Unlike torch's `RowwiseParallel`, which makes a gradient for all entries on every rank, a rank has its own only.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)  # checked with the plan
        _split_parameter(module, "weight", device_mesh, Shard(0))
        first = -(-module.num_embeddings // device_mesh.size()) * device_mesh.get_local_rank()
        num = len(_local(module.weight))
        padding = None if module.padding_idx is None else module.padding_idx - first
        padding = padding if padding is not None and 0 <= padding < num else None

        def forward(ids: torch.Tensor) -> torch.Tensor:
            places = ids - first
            elsewhere = (places < 0) | (places >= num)
            found = functional.embedding(places.masked_fill(elsewhere, 0), _local(module.weight), padding)
            return _redistributed(found.masked_fill(elsewhere.unsqueeze(-1), 0), device_mesh, Partial(), Replicate())

        vars(module)["forward"] = forward
        return module


def _is_plain_embedding(module: nn.Module) -> bool:
    """Whether a module does nothing but look up: no norms, no counting, no forward of a sub-class."""
    return isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward and not (
        module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    )  # fmt: skip


class _FirstInput(ParallelStyle):
    """Change how a module's first input, or its `hidden_states`, lies on the ranks.

    Args:
        dim: the sequence's dimension.
    """

    def __init__(self, *, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def _change(self, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        raise NotImplementedError

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def change(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (self._change(args[0], device_mesh), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": self._change(kwargs["hidden_states"], device_mesh)}

        module.register_forward_pre_hook(change, with_kwargs=True)
        return module


class SplitSequence(_FirstInput):
    """Cut a module's first input along the sequence, of which each rank then works on its piece: `(batch, length, …)`.

    For the first block of a model whose norms are `"sequence"`.

    Args:
        dim: the sequence's dimension.
    """

    def _change(self, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        length, ranks = tensor.shape[self.dim], mesh.size()
        if length % ranks:
            raise ValueError(
                f"a sequence of length {length} cannot be split over tp={ranks} ranks. Pad it to "
                f"{length + ranks - length % ranks}, or leave sequence parallelism out."
            )
        return _redistributed(tensor, mesh, Replicate(), Shard(self.dim))


class GatherSequence(_FirstInput):
    """Make a module's first input whole again, of which each rank has a piece of the sequence.

    For modules in which several split layers read the same input, so that it is gathered once.

    Args:
        dim: the sequence's dimension.
    """

    def _change(self, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        # The layers behind it add up their gradients for the whole by themselves.
        return _redistributed(tensor, mesh, Shard(self.dim), Replicate())


class DivideAttributes(ParallelStyle):
    """Divide whole numbers that a module keeps, such as its number of heads, by the number of ranks while it is split.

    Args:
        names: of the attributes.
    """

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in self.names:
            setattr(module, name, getattr(module, name) // device_mesh.size())
        return module


class SplitParameters(ParallelStyle):
    """Split parameters of a module along their first dimension, which its forward does not read.

    For a parameter that is tied to one of a split layer, such as BERT's bias of the vocabulary.

    Args:
        names: Of the parameters.
    """

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in self.names:
            _split_parameter(module, name, device_mesh, Shard(0))
        return module


# name → what makes the style for a module
STYLES: dict[str, Callable[[nn.Module], ParallelStyle]] = {
    "colwise": lambda module: FusedColwise(1) if is_conv1d(module) else ColwiseParallel(),
    "rowwise": lambda module: Conv1DRowwise() if is_conv1d(module) else RowwiseParallel(),
    "fused_colwise": lambda _: FusedColwise(3),
    "colwise_gathered": lambda _: ColwiseParallel(output_layouts=Replicate()),
    "loss": lambda _: LossParallel(),
    "embedding": lambda module: (
        SplitEmbedding() if _is_plain_embedding(module) else RowwiseParallel(input_layouts=Replicate())
    ),
    "sequence": lambda _: SequenceParallel(use_local_output=True),
    "split_sequence": lambda _: SplitSequence(),
    "gather_sequence": lambda _: GatherSequence(),
    "rowwise_to_sequence": lambda module: (
        Conv1DRowwise(output_layouts=Shard(1)) if is_conv1d(module) else RowwiseParallel(output_layouts=Shard(1))
    ),
}


def _local(parameter: Any) -> torch.Tensor:
    """Return this rank's piece of a parameter, through which gradients flow."""
    piece: torch.Tensor = parameter.to_local()
    return piece


def _split_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    whole: Any = getattr(module, name)
    piece = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(piece, requires_grad=whole.requires_grad))


def _gathered_input(inputs: torch.Tensor, mesh: DeviceMesh, layout: Placement) -> torch.Tensor:
    """Return an input whole; in backward the ranks' gradients of it are summed."""
    found: Any = inputs
    if not isinstance(inputs, DTensor):
        found = DTensor.from_local(inputs, mesh, [layout], run_check=False)
    piece: torch.Tensor = found.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return piece


def _redistributed(tensor: torch.Tensor, mesh: DeviceMesh, source: Placement, target: Placement) -> torch.Tensor:
    found = DTensor.from_local(tensor, mesh, [source], run_check=False).redistribute(placements=[target])
    return found.to_local()
