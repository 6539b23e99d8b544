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
        positions: Position of each token of this call in its row, int64 of shape (batch, length).
        mask: True where a token of this call attends to a stored one, of shape (batch, 1, length, stored): the
            `attn_mask` of `scaled_dot_product_attention`.

    Args:
        capacity: Largest number of tokens in a row.
    """

    positions: Tensor
    mask: Tensor

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        self._updated: set[int] = set()  # layers of this call

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
            shapes = [(*new.shape[:2], self._capacity, new.shape[3]) for new in (keys, values)]
            self._stored[layer] = keys.new_zeros(shapes[0]), values.new_zeros(shapes[1])
        rows = torch.arange(len(keys), device=keys.device)[:, None]
        end = self.mask.shape[-1]
        for stored, new in zip(self._stored[layer], (keys, values), strict=True):
            stored[rows, :, self.positions] = new.transpose(1, 2)
        stored_keys, stored_values = self._stored[layer]
        return stored_keys[:, :, :end], stored_values[:, :, :end]

    def select(self, rows: Tensor) -> None:
        """Keep the rows with the indices `rows`, int64 of shape (batch,). An index may repeat."""
        self._stored = {layer: (keys[rows], values[rows]) for layer, (keys, values) in self._stored.items()}

    def call(self, model: nn.Module, tokens: Tensor, positions: Tensor) -> Any:
        """Return the output of a model for tokens at `positions`, both of shape (batch, length)."""
        self.positions, self._updated = positions, set()
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
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    children = list(model.children())
    if len(children) == 1 and all(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters):
        return takes_cache(children[0])
    return any(one.name == "cache" for one in parameters)
