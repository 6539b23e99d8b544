"""Cache of keys and values, for models that are not from transformers."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.errors import ConfigurationError


class KeyValueCache:
    """Keys and values of all tokens that a model has computed, by layer.

    `generate` passes a cache to a model whose forward has a parameter `cache`, together with the tokens that are not
    stored yet: first the prompts, then one token per row. Rows may have different lengths.

    Attributes:
        positions: Position of each token of this call in its row, int64 of shape (batch, length). Set by `call`, like
            `mask`.
        mask: True where a token of this call attends to a stored one, of shape (batch, 1, length, stored): the
            `attn_mask` of `scaled_dot_product_attention`.

    Args:
        capacity: Largest number of tokens in a row.
    """

    positions: Tensor
    mask: Tensor

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Layer → (keys, values), each of shape (batch, heads, capacity, width).
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        self._updated: set[int] = set()  # layers that have called `update` in this call

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of this call's tokens, and return the keys and values of all tokens.

        Args:
            layer: Number of the layer, different for each layer.
            keys, values: Tensors of shape (batch, heads, length, width). The heads may be those of one rank.

        Returns:
            Keys and values of shape (batch, heads, stored, width).

        Raises:
            ConfigurationError: Shapes differ from those of the tokens, or two layers have the same number.
        """
        for name, new in (("keys", keys), ("values", values)):
            if new.dim() != 4 or (new.shape[0], new.shape[2]) != self.positions.shape:
                raise ConfigurationError(
                    f"cache.update received {name} of shape {tuple(new.shape)} for tokens of shape "
                    f"{tuple(self.positions.shape)}. Expected (batch, heads, length, width)."
                )
        if layer in self._updated:
            raise ConfigurationError(f"cache.update received layer={layer} twice in a forward. Number the layers.")
        self._updated.add(layer)
        if layer not in self._stored:
            # The whole capacity at once: appending would copy all tokens in every call.
            self._stored[layer] = (self._empty_like(keys), self._empty_like(values))
        stored_keys, stored_values = self._stored[layer]
        rows = torch.arange(len(keys), device=keys.device)[:, None]
        # Indexing with two tensors around a slice puts their dimensions first: (batch, length, heads, width).
        stored_keys[rows, :, self.positions] = keys.transpose(1, 2)
        stored_values[rows, :, self.positions] = values.transpose(1, 2)
        num_stored = self.mask.shape[-1]
        return stored_keys[:, :, :num_stored], stored_values[:, :, :num_stored]

    def _empty_like(self, new: Tensor) -> Tensor:
        batch, heads, _, width = new.shape
        return new.new_zeros((batch, heads, self._capacity, width))

    def select(self, rows: Tensor) -> None:
        """Keep the rows with the indices `rows`, int64 of shape (batch,). An index may repeat."""
        self._stored = {layer: (keys[rows], values[rows]) for layer, (keys, values) in self._stored.items()}

    def call(self, model: nn.Module, tokens: Tensor, positions: Tensor) -> Any:
        """Return the output of a model for tokens at `positions`, both of shape (batch, length).

        Raises:
            ConfigurationError: No layer of the model has called `update`.
        """
        self.positions = positions
        self._updated = set()
        stored = torch.arange(int(positions.max()) + 1, device=positions.device)
        self.mask = (stored <= positions[:, :, None])[:, None]
        output = model(tokens, cache=self)
        if not self._updated:
            raise ConfigurationError(
                f"forward of {type(model).__name__} has a parameter cache, but no layer called cache.update(layer, "
                "keys, values). Rename the parameter if it is for something else."
            )
        return output


def takes_cache(model: nn.Module) -> bool:
    """Return whether the forward of a model, or of the module in a wrapper, has a parameter `cache`."""
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]  # without self
    children = list(model.children())
    passes_all_on = all(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters)
    if len(children) == 1 and passes_all_on:  # a wrapper such as DistributedDataParallel
        return takes_cache(children[0])
    return any(parameter.name == "cache" for parameter in parameters)
