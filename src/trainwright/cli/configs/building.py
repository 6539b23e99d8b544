"""Build the objects that parsed settings describe; an error in a user's constructor stays the user's own error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace


class _Failure(BaseException):
    """Carry an error of a constructor past jsonargparse, which makes one text of all errors below an optional type."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class _Constructor:
    """Call classes; while `carries`, their errors are carried out of the parser.

    A factory (`Callable[[Iterable], Optimizer]`) keeps it and calls it in the run: errors there are plain errors.
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
    """Return the settings with their objects in place of class paths."""
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
