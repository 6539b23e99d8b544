"""Images in the form that every backend accepts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trainwright.core.errors import ConfigurationError

_CHANNELS = (1, 3, 4)


def to_pixels(image: object) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return `image` as an array H×W×C of uint8, with C = 1, 3 or 4. Waits for the device of a tensor.

    Args:
        image: a tensor C×H×W or H×W; an array H×W×C, C×H×W or H×W; or a PIL image. Integers are in 0 to 255, floats in
            0 to 1 (other values are clipped, NaN is black), booleans as black and white.

    Raises:
        ConfigurationError: the shape is none of these. The message names it.
    """
    is_tensor = isinstance(image, torch.Tensor)
    if isinstance(image, torch.Tensor):
        host_tensor = image.detach().cpu()
        if host_tensor.dtype == torch.bfloat16:  # NumPy has no such type
            host_tensor = host_tensor.float()
        image = host_tensor.numpy()
    array = np.asarray(image)
    shape = array.shape
    if array.ndim == 2:
        array = array[:, :, None]
    # Each library's convention comes first; the other order is used if only that one is possible.
    elif array.ndim == 3 and shape[0] in _CHANNELS and (is_tensor or shape[2] not in _CHANNELS):
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in _CHANNELS:
        raise ConfigurationError(
            f"an image of shape {tuple(shape)} was logged. Expected (height, width), or with 1, 3 or 4 channels a "
            "tensor of shape (channels, height, width) or an array of shape (height, width, channels). Log the "
            "images of a batch one by one."
        )
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    if np.issubdtype(array.dtype, np.floating):
        unit = np.clip(np.nan_to_num(array.astype(np.float32), nan=0.0), 0.0, 1.0)
        return np.asarray((unit * 255.0).round(), dtype=np.uint8)
    return np.asarray(np.clip(array, 0, 255), dtype=np.uint8)
