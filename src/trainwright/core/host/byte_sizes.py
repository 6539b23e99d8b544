"""Parse and format amounts of memory."""

from __future__ import annotations

import re

from trainwright.core.errors import ConfigurationError

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgtp]?)(i?)(b)\s*", re.IGNORECASE)


def convert_file_size_to_int(size: int | str) -> int:
    """Return an amount of memory in bytes.

    Args:
        size: a number of bytes, or text with a unit: `"512B"`, `"10GB"` (powers of 1000), `"10GiB"` (powers of 1024).
            K, M, G, T and P may be in lower case. `b` after a decimal prefix means bits: `"10Gb"` is 1.25 GB.

    Raises:
        ConfigurationError: `size` is neither a number of bytes nor such a text, or is negative.
    """
    if isinstance(size, int) and size >= 0:
        return size
    match = None
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
    if match is None:
        raise ConfigurationError(
            f"`size` {size!r} is not in a valid format. Write an integer number of bytes >= 0, or text with a unit, "
            "such as '5GB' or '10.5GiB'."
        )
    number, prefix, binary, unit = match.groups()  # "10.5", "G", "i" and "B"
    base = 1024 if binary else 1000
    amount = float(number) * base ** _POWERS[prefix.lower()]
    is_in_bits = unit == "b" and prefix and not binary
    return int(amount / 8) if is_in_bits else int(amount)


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes as text with a unit: `"1.61 GiB"`, `"85.0 MiB"`, `"12 B"`."""
    value = float(num_bytes)
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1000:  # and not 1024: "1023.9 KiB" is harder to read than "1.0 MiB"
            break
        value = value / 1024
        unit = larger
    if unit == "B":
        return f"{value:.0f} B"
    decimals = 2 if abs(value) < 10 else 1
    return f"{value:.{decimals}f} {unit}"
