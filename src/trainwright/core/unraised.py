"""Errors of background work that no call has raised. They are reported when the process exits."""

from __future__ import annotations

import atexit
import os
import sys

_errors: list[Exception] = []  # of this process, in order


def report_at_exit() -> None:
    """Report unraised errors when the interpreter exits, with exit code 1. Call it before the work begins.

    Exit functions that are registered later, such as those of loggers, run before the report. Earlier ones do not run
    if there is an error, because `os._exit` is the only way to change the exit code at that time.
    """
    atexit.unregister(_report)  # register it once, and after the exit functions of earlier work
    atexit.register(_report)


def add(error: Exception) -> None:
    """Record an error until `discard` is called."""
    _errors.append(error)


def discard(error: Exception) -> None:
    """Remove an error that a call raises now."""
    _errors[:] = [known for known in _errors if known is not error]


def take() -> list[Exception]:
    """Return all recorded errors, and remove them."""
    errors = list(_errors)
    _errors.clear()
    return errors


def _report() -> None:
    errors = take()
    if not errors:
        return
    for error in errors:
        sys.stderr.write(f"trainwright: {error}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
