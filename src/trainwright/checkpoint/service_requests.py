"""Time limit and errors of requests to the service of a remote file system."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from trainwright.core.errors import CheckpointError, TrainwrightError

# Words of access errors; the services have no common exception.
_REFUSED = re.compile(
    r"credential|permission|forbidden|access.?denied|unauthori|not authori|\b40[13]\b|anonymous", re.I
)
# Limit of a request whose duration does not depend on the size of a checkpoint. The clients of some services have no
# limit, and others repeat each request so often that a silent service is noticed after many minutes.
ANSWER_SECONDS = 60.0

Result = TypeVar("Result")


@contextlib.contextmanager
def service_errors(url: str, verb: str) -> Iterator[None]:
    """Convert errors of a service within the context to `CheckpointError`s.

    FileNotFoundError is only converted in writes. In other requests it is an ordinary result, which callers expect.
    `TrainwrightError`s and exceptions that are not an `Exception`, such as KeyboardInterrupt, are not converted.

    Args:
        url: address of the file or folder, for the error.
        verb: `"read"`, `"write"`, `"list"` or `"delete"`.
    """
    try:
        yield
    except TrainwrightError:
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError) and verb != "write":
            raise
        # All classes, since exceptions of services (botocore, aiohttp, ftplib) need not be OSErrors.
        problem = f"{type(error).__name__}: {error}".rstrip(".")
        hint = ""
        if _REFUSED.search(problem):
            scheme = url.partition(":")[0]
            hint = f" Set up credentials for the fsspec package of {scheme}://, or check their permissions."
        raise CheckpointError(f"could not {verb} {url}: {problem}.{hint}") from error


def answer(request: Callable[[], Result]) -> Result:
    """Return the result of a small request to a service, which runs in another thread.

    Raises:
        TimeoutError: no result came within `ANSWER_SECONDS`, or the request itself raises it.
        Exception: any other error of the request.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(request())
        except BaseException as error:  # noqa: BLE001  # raised in the caller
            future.set_exception(error)

    # The thread of a request without an answer is abandoned. It does not keep the process alive.
    threading.Thread(target=run, name="trainwright-remote", daemon=True).start()
    try:
        return future.result(ANSWER_SECONDS)
    except TimeoutError as error:
        # `Future.result` raises the same class for its own limit and for a time-out of the service's client.
        if future.done():
            raise  # the client's time-out
        raise TimeoutError(
            f"the service did not answer within {ANSWER_SECONDS:g} s. Check the network and the service's address"
        ) from error
