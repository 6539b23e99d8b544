"""What DeepSpeed does wrong, put right: torch's Adagrad, and gradients on a disk."""

from __future__ import annotations

from typing import Any

import torch


def keep_own_adagrad(engine: Any) -> None:
    """Have an engine step the Adagrad that it was given, with its groups, and not the one it has made in its place.

    Torch's Adagrad makes its states when it is constructed. DeepSpeed 0.19.8 constructs another one over its vectors,
    all in one group and with the defaults of the first: rates of groups are lost, with several groups the first step
    fails, and schedules move what nothing steps.
    """
    given, zero = engine.basic_optimizer, engine.optimizer
    made = getattr(zero, "optimizer", None)
    if made is given or not isinstance(made, torch.optim.Adagrad):
        return
    given.state.clear()  # those of the parameters as they were before they were cut
    given.state.update(made.state)
    zero.optimizer = given
    if hasattr(zero, "_link_all_hp_params"):  # stages 1 and 2 have linked as many groups as the other one has
        zero._link_all_hp_params()


def keep_unaligned_gradients(zero: Any) -> None:
    """Have gradients that begin in the middle of a disk's block stay on the host; the rest of them goes to the disk.

    DeepSpeed 0.19.8 cuts the end off a gradient whose length is no multiple of 256 elements, and reads it back to where
    it lay in its group's vector. Where that place is in the middle of a block, as behind a bias, the read goes wrong
    and nothing is said: weights of layers 1,500 wide are off by whole steps of Adam.
    """
    swapper = getattr(zero, "optimizer_swapper", None)
    if swapper is None:
        return
    split, block = swapper._adjust_for_misaligned_lengths, swapper.numel_alignment

    def split_and_mark(tensors: list[torch.Tensor], offsets: list[int]) -> tuple[list[torch.Tensor], list[int]]:
        parts, places = split(tensors=tensors, offsets=offsets)
        for part, place in zip(parts, places, strict=True):
            if place % block:
                part.swappable = False  # DeepSpeed's own mark
        return parts, places

    swapper._adjust_for_misaligned_lengths = split_and_mark
