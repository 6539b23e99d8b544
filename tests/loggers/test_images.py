from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trainwright.core.errors import ConfigurationError
from trainwright.loggers.images import to_pixels


@pytest.mark.parametrize(
    ("image", "shape"),
    [
        (torch.zeros(3, 4, 5), (4, 5, 3)),
        (torch.zeros(4, 5), (4, 5, 1)),
        (torch.zeros(4, 5, 3), (5, 3, 4)),
        (torch.zeros(6, 5, 3), (6, 5, 3)),
        (np.zeros((4, 5, 3)), (4, 5, 3)),
        (np.zeros((3, 6, 5)), (6, 5, 3)),
        (torch.zeros(3, 4, 5, dtype=torch.bfloat16), (4, 5, 3)),
    ],
)
def test_the_layout_follows_the_librarys_custom_unless_only_the_other_can_be_meant(
    image: Any, shape: tuple[int, ...]
) -> None:
    assert to_pixels(image).shape == shape


def test_floats_are_taken_as_0_to_1_and_clipped() -> None:
    assert to_pixels(np.array([[0.0, 0.5, 1.0, 7.0, -1.0, np.nan]]))[0, :, 0].tolist() == [0, 128, 255, 255, 0, 0]


def test_whole_numbers_and_booleans_keep_their_meaning() -> None:
    assert to_pixels(np.array([[0, 200, 300]]))[0, :, 0].tolist() == [0, 200, 255]
    assert to_pixels(torch.tensor([[True, False]]))[0, :, 0].tolist() == [255, 0]


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4, 5), (2, 5, 7)])
def test_a_shape_that_is_no_image_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="an image of shape"):
        to_pixels(torch.zeros(shape))
