"""Over how many ranks layers can be split."""

from __future__ import annotations

from typing import Any

from trainwright.core.errors import ConfigurationError


def check_tp_size(tp: Any) -> int:
    """Return `tp`.

    Raises:
        ConfigurationError: it is no number of ranks.
    """
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise ConfigurationError(f"tp={tp!r}: write over how many ranks layers are split, such as 2.")
    return tp


def need_divisible(tp: int, **counts: int) -> None:
    """Check that counts, such as a number of heads, can be divided over the ranks of a tensor-parallel group.

    Raises:
        ConfigurationError: one cannot; says which numbers of ranks could.
    """
    for name, count in counts.items():
        if count % tp:
            raise ConfigurationError(
                f"{name}={count} is not divisible by tp={tp}. Use tp={_divisors(count)}, or a multiple of {tp} for "
                f"{name}."
            )


def _divisors(count: int) -> str:
    found = [str(n) for n in range(2, count + 1) if count % n == 0]
    return " or ".join(found[:4]) or "1"
