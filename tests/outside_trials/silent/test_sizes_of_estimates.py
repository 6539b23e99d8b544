"""Integer buffers are no weights: an estimate's largest layer is never larger than the model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from trainwright.bigmodels.maps.estimates import count_stored_weights, count_weights


class Embeds(nn.Module):
    """Floating weights beside counters, as the embeddings of BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.register_buffer("positions", torch.arange(512))


class Tiny(nn.Module):
    """A model with little beside its embeddings."""

    _no_split_modules = ("Embeds",)

    def __init__(self) -> None:
        super().__init__()
        self.embeds = Embeds()
        self.out = nn.Linear(4, 2)


def test_counters_keep_their_bytes_in_every_dtype() -> None:
    count = count_weights(Tiny())
    assert (count.largest_layer, count.largest_elements, count.largest_fixed_bytes) == ("embeds", 40, 4096)
    for dtype, width in (("float32", 4), ("float16", 2), ("int8", 1)):
        assert count.largest_bytes(dtype) == 40 * width + 4096
        assert count.total_bytes(dtype) == 50 * width + 4096


def test_a_module_of_counters_is_not_the_largest_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Module())
    model[1].register_buffer("counts", torch.zeros(100, dtype=torch.int64))
    count = count_weights(model)
    assert (count.largest_layer, count.largest_bytes("float32"), count.total_bytes("float32")) == ("0", 80, 880)


def test_files_are_counted_alike(tmp_path: Path) -> None:
    save_file(Tiny().state_dict(), tmp_path / "model.safetensors")
    count = count_stored_weights(tmp_path)
    assert count.total_bytes("float32") == 50 * 4 + 4096
    assert count.largest_bytes("float32") <= count.total_bytes("float32")
