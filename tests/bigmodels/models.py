"""Small models whose sizes are easy to say: a `layer(n)` has n parameters of 4 bytes."""

from __future__ import annotations

import torch
from torch import nn


def layer(num_parameters: int) -> nn.Linear:
    """Return a module of `4 * num_parameters` bytes, on the meta device."""
    return nn.Linear(num_parameters, 1, bias=False, device="meta")


def layers(*nums: int) -> nn.Sequential:
    return nn.Sequential(*(layer(num) for num in nums))


class Block(nn.Module):
    """Two layers of 100 bytes each, `a` and `b`."""

    def __init__(self) -> None:
        super().__init__()
        self.a = layer(25)
        self.b = layer(25)


class TiedModel(nn.Module):
    """An embedding and a head that are one tensor of 100 bytes, with two blocks of 200 bytes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = layer(25)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = layer(25)
        self.head.weight = self.embed.weight


class Buffered(nn.Module):
    """A layer of 100 bytes, a buffer of 40 that is saved and one of 80 that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer(25)
        self.register_buffer("saved", torch.zeros(10))
        self.register_buffer("unsaved", torch.zeros(10, dtype=torch.int64), persistent=False)
