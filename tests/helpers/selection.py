"""Choose which parameters of a test `make test` runs; `make test-all` runs all of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def mostly_exhaustive(values: Sequence[Any], *, keep: Collection[Any]) -> list[Any]:
    """Return `values` for `parametrize`, with those that are not in `keep` marked as exhaustive.

    Raises:
        ValueError: `keep` names a value that is not there.
    """
    if absent := [value for value in keep if value not in values]:
        raise ValueError(f"keep names {absent}, which are not among the parameters {list(values)}.")
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=[] if value in keep else [pytest.mark.exhaustive]
        )
        for value in values
    ]
