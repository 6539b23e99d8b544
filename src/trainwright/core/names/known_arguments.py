"""Errors for unknown keywords of a function that keeps its signature for type checkers and editors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


Refuse = Callable[[str, object, list[str]], None]
"""Called with a keyword, its value and the names of the parameters. Raises, or returns to skip the keyword."""


def known_arguments(refuse: Refuse) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator for a function. Each call first calls `refuse` for every keyword that is not a parameter."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = list(inspect.signature(function).parameters)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs.keys() - known:
                refuse(name, kwargs.pop(name), known)
            return function(*args, **kwargs)

        return call

    return decorate
