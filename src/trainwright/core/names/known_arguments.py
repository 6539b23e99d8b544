"""Errors for unknown keywords of a function that keeps its signature for type checkers and editors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


Refuse = Callable[[str, object, list[str]], None]
"""Called with a keyword, its value and the function's own parameters: raises, or returns, and it is left out."""


def known_arguments(refuse: Refuse) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that calls `refuse` for each unknown keyword."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = list(inspect.signature(function).parameters)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs.keys() - known:
                refuse(name, kwargs.pop(name), known)
            return function(*args, **kwargs)

        return call

    return decorate
