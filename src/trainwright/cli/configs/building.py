"""Build the objects of parsed settings; an error in a user's constructor is raised unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace


class _Failure(BaseException):
    """Exception that carries a constructor's error through jsonargparse, which joins all errors below an optional type
    into one text.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class _Constructor:
    """Callable that constructs classes; while `carries`, their errors are passed through the parser. A factory
    (`Callable[[Iterable], Optimizer]`) keeps it and calls it in the run, where errors are raised normally.
    """

    def __init__(self) -> None:
        self.carries = True

    def __call__(self, cls: type[Any], *args: object, **kwargs: object) -> Any:
        try:
            return cls(*args, **kwargs)
        except Exception as error:
            if not self.carries:
                raise
            raise _Failure(error) from None


def build(parser: ArgumentParser, settings: Namespace) -> Any:
    """Return the settings with objects instead of class paths."""
    construct = _Constructor()
    failed: Exception | None = None
    try:
        built = parser.instantiate(settings, instantiators=[(construct, object, True)])
    except _Failure as failure:
        failed = failure.error
    finally:
        construct.carries = False
    if failed is not None:  # outside of `except`, so that the error keeps its own cause and context
        raise failed
    return built
