"""Training with sequences that are split over ranks: batches, losses and attention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from inspect import signature
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.core.errors import ConfigurationError
from trainwright.core.signatures import method_of, overrides
from trainwright.core.task import TaskModule
from trainwright.strategies.context.attention import Kind, SplitAttention
from trainwright.strategies.context.labels import count_targets, shifted, shifts_labels
from trainwright.strategies.context.split import positions, split_sequence
from trainwright.strategies.steps.step import StepParts

_MASK = "attention_mask"


class SplitSequences:
    """Division of sequences over the ranks of a group. Attention covers the full sequences.

    Args:
        group: Process group of the ranks that split each sequence.
        kind: See `SplitAttention`.

    Attributes:
        attention: The `SplitAttention` that the trained models use.
    """

    def __init__(self, group: dist.ProcessGroup | None, kind: Kind) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.attention = SplitAttention(group, kind)
        # `models` sets the next two from the attention layers of transformers.
        self._shifts = True  # the models shift labels: the target of a position is the next label
        self._is_causal = True  # every attention of the models is causal
        self._targets: Any = WeakIdKeyDictionary()  # this rank's labels → this rank's shifted targets

    # Batches

    def __call__(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of a tensor; see `SequenceSplit`."""
        return split_sequence(tensor, dim, self.group, self.attention.order)

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Return the positions that this rank holds; see `SequenceSplit`."""
        return positions(length, self.group, self.attention.order).to(device)

    def batch(self, batch: object) -> dict[str, Any]:
        """Return this rank's part of a batch for transformers models; see `SequenceSplit`.

        Raises:
            ConfigurationError: The batch is not a dict with `input_ids` or `inputs_embeds`.
        """
        full = batch if isinstance(batch, Mapping) else {}
        inputs = full.get("input_ids", full.get("inputs_embeds"))
        if not isinstance(inputs, Tensor) or inputs.dim() < 2:
            description = f"of type {type(batch).__name__}"
            if full:
                description = f"a dict with {', '.join(map(repr, full))}"
            raise ConfigurationError(
                f"The batch is {description}, not a dict with 'input_ids' of shape (batch, length), so its "
                "sequences cannot be split over ranks. Define split_sequences(self, batch, split) in the task. It "
                "returns the batch with each tensor of shape (batch, length, …) replaced by split(tensor), with "
                "targets that are already shifted, and with split.positions(length) for the model."
            )
        length = inputs.shape[1]
        part = {}
        for key, value in full.items():
            is_sequence = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length
            part[key] = self(value) if is_sequence else value
        mask = part.get(_MASK)
        if mask is not None:
            self._check_mask(full[_MASK])
            # A mask of ones: causal attention ignores padding at the end, and a part of the mask would be wrong.
            part[_MASK] = torch.ones_like(mask)
        if "position_ids" not in full:
            part["position_ids"] = self.positions(length, inputs.device).expand(len(inputs), -1)
        labels = part.get("labels")
        if self._shifts and isinstance(labels, Tensor) and labels.dim() == 2:
            # Labels are shifted before they are split: the target of a part's last position is in another part.
            if "shift_labels" not in full:
                part["shift_labels"] = self(shifted(full["labels"]))
            self._targets[labels] = part["shift_labels"]  # read by `_loss_over` if the model does not pass them on
        return part

    def _check_mask(self, mask: Tensor) -> None:
        """Check that sequences are padded only at the end, where causal attention ignores padding, or not at all."""
        if not self._is_causal:
            torch._assert_async(
                mask.all(),
                "attention_mask has zeros, which are not supported for sequences that are split over ranks if a model "
                "attends in both directions: it would attend to the padding. Use batches without padding, or do not "
                "split sequences.",
            )
            return
        is_padded_at_end = torch.tensor(False)  # masks with more dimensions are not supported
        if mask.dim() == 2:
            is_padded_at_end = (mask[:, 1:] <= mask[:, :-1]).all()  # 1 1 1 0 0
        # Asynchronous: the result is on the device, and reading it would wait for the device.
        torch._assert_async(
            is_padded_at_end,
            "attention_mask has zeros before ones. If sequences are split over ranks, pad them at the end, and use "
            "masks of shape (batch, length).",
        )

    def split(self, batch: object, task: TaskModule) -> tuple[Any, float]:
        """Return this rank's part of a batch, and the weight of the part's loss in the mean over the ranks.

        The weight is proportional to the number of targets or items in the part, and 1 on average.
        """
        part = method_of(task, "split_sequences")(batch, self)
        num_in_part: int | Tensor | None = count_targets(part, shifts=self._shifts)
        num_in_batch: int | Tensor | None = count_targets(batch, shifts=self._shifts)
        if num_in_part is None and overrides(task, "num_items", TaskModule):
            num_in_part = task.num_items(part)
            num_in_batch = task.num_items(batch)
        if num_in_part is None or not num_in_batch:
            return part, 1.0
        return part, float(num_in_part) * self.size / float(num_in_batch)

    # Models

    @contextmanager
    def models(self, model: nn.Module) -> Iterator[None]:
        """Return a context that adapts the attention, masks and losses of a model to split sequences.

        Raises:
            ConfigurationError: The model's attention is not supported.
        """
        with ExitStack() as undo:
            # transformers sets `is_causal` in the attention layers.
            is_causal = [module.is_causal for module in model.modules() if _is_attention(module)]
            self._shifts = not is_causal or any(is_causal)
            self._is_causal = all(is_causal)
            for name, module in model.named_modules():
                config = getattr(module, "config", None)
                if hasattr(config, "_attn_implementation"):
                    if not _is_attention(module):
                        _check_config(config, name or type(module).__name__)
                    if "position_ids" in signature(module.forward).parameters:
                        undo.callback(module.register_forward_pre_hook(self._check_positions, with_kwargs=True).remove)
                if getattr(module, "is_causal", False) is True:
                    undo.callback(module.register_forward_pre_hook(_without_mask, with_kwargs=True).remove)
                if shifts_labels(module):
                    undo.callback(_restore, module, "_loss_function", vars(module).get("_loss_function"))
                    module._loss_function = self._loss_over(module.loss_function)
            undo.enter_context(self.attention.installed())
            yield

    def _check_positions(self, module: nn.Module, args: object, kwargs: dict[str, object]) -> None:
        if self.attention.is_active and kwargs.get("position_ids") is None and "input_ids" in kwargs:
            raise ConfigurationError(
                f"{type(module).__name__} was called without position_ids, which are needed for a part of a split "
                "sequence. Pass them to the model. In a user-written loop, include them in the buffers, too."
            )

    def _loss_over(self, loss_function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def loss(
            logits: Tensor, labels: Tensor | None, *args: object, shift_labels: Tensor | None = None, **kwargs: object
        ) -> Tensor:
            if shift_labels is None and labels is not None and self.attention.is_active:
                shift_labels = self._targets.get(labels)
                if shift_labels is None:
                    raise ConfigurationError(
                        "The loss of split sequences needs targets that were shifted before they were split. Pass "
                        "shift_labels to the model."
                    )
            return loss_function(logits, labels, *args, shift_labels=shift_labels, **kwargs)

        return loss

    @contextmanager
    def in_place(self, buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor]) -> Iterator[None]:
        """Return a context in which attention covers the sequences of all ranks, and buffers hold this rank's parts.

        Args:
            buffers: Tensors to split in place.
            dims: The dimension of the sequence in each buffer.
            kept: Buffers that stay split after the context.

        Raises:
            ConfigurationError: `buffers` and `dims` have different lengths, or see `SplitAttention.over_ranks`.
        """
        if len(buffers) != len(dims):
            raise ConfigurationError(
                f"maybe_context_parallel received {len(buffers)} buffers and {len(dims)} entries of buffer_seq_dims. "
                "Pass one dimension for each buffer."
            )
        parts = [self(buffer, dim) for buffer, dim in zip(buffers, dims, strict=True)]
        originals = []
        for buffer, part in zip(buffers, parts, strict=True):
            originals.append(buffer.detach())
            buffer.data = part
        try:
            with self.attention.over_ranks():
                yield
        finally:
            for buffer, full in zip(buffers, originals, strict=True):
                if not any(buffer is other for other in kept):
                    buffer.data = full

    def step_parts(self, parts: StepParts) -> StepParts:
        """Return a copy of `parts` for a step that splits its batches and attends over the sequences of all ranks."""
        return replace(
            parts,
            context=_Forward(self.attention, parts.context),
            split=lambda batch: self.split(batch, parts.task),
        )


class _Forward(ExitStack):
    """Context of a forward in which attention covers the sequences of all ranks."""

    def __init__(self, attention: SplitAttention, inner: AbstractContextManager[object] | None) -> None:
        super().__init__()
        self._attention = attention
        self._inner = inner or nullcontext()

    def __enter__(self) -> Self:
        self.enter_context(self._attention.over_ranks())
        self.enter_context(self._inner)
        return self


def check_heads(model: nn.Module, sp: int, tp: int) -> None:
    """Check that the numbers of heads of transformers models are divisible by `sp * tp`.

    Raises:
        ConfigurationError: A number of heads is not divisible.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        for name in ("num_attention_heads", "num_key_value_heads"):
            count = getattr(config, name, None)
            if isinstance(count, int) and count % (sp * tp):
                ranks = f"sp={sp} x tp={tp}" if tp > 1 else f"sp={sp}"
                raise ConfigurationError(
                    f"{type(module).__name__} has {name}={count}, which is not divisible by {ranks} ranks. Use cp={sp} "
                    f"instead of sp, or sizes whose product divides {count}."
                )


def _is_attention(module: Any) -> bool:
    """Return whether a module is an attention layer of transformers, which has a flag `is_causal`."""
    return isinstance(getattr(module, "is_causal", None), bool)


def _restore(module: nn.Module, name: str, value: object) -> None:
    """Restore an attribute of a module. None deletes it."""
    if value is None:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = value


def _without_mask(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Remove the mask of causal attention, which covers only this rank's positions."""
    if _MASK in kwargs:
        kwargs = {**kwargs, _MASK: None}
    return args, kwargs


def _check_config(config: Any, name: str) -> None:
    """Raise an error if a transformers model computes attention in a way that cannot be split."""
    if config._attn_implementation != "sdpa":
        raise ConfigurationError(
            f"{name} computes attention with {config._attn_implementation!r}, which sees only this rank's part of a "
            "split sequence. Load the model with attn_implementation='sdpa'."
        )
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    if window is not None and (layers is None or "sliding_attention" in layers):
        raise ConfigurationError(
            f"{name} has sliding-window attention over {window} positions, which does not support sequences that are "
            "split over ranks. Set sliding_window=None in its configuration if sequences are shorter than the window."
        )
