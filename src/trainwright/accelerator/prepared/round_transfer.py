"""Transfer of batches from the first process to the other processes."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainwright.checkpoint.disk.planned_file import host_bytes
from trainwright.core.errors import WorkerError
from trainwright.processes.collectives import recursively_apply
from trainwright.processes.process_group import Processes

T = TypeVar("T")

_TAG = 7301  # separates these messages from point-to-point messages of the user
_CPU = torch.device("cpu")


Round = tuple[Sequence[Any], Any]
"""One batch for each data-parallel rank, and picklable facts that every process receives."""


class RoundTransfer:
    """Transfer of rounds from the first process. A round is one batch for each data-parallel rank.

    The first process reads one round ahead, and the other processes receive one round ahead, in a thread. A round
    consists of two messages to each process: a header with the number of the pass and the length of the second message,
    and the process's batch. `places` contains the data-parallel rank of each process.
    """

    def __init__(self, processes: Processes, places: Sequence[int]) -> None:
        self._processes = processes
        self._places = places
        self._pass = 0
        self._pending: list[tuple[Any, torch.Tensor]] = []

    def iterate(self, read: Callable[[], Iterator[Round]]) -> Iterator[tuple[Any, Any]]:
        """Return an iterator over the rounds of a pass: this process's batch, and the round's second element.

        `read` is called on the first process only. An error of `read` is raised there, and as a `WorkerError` on other
        processes. Every process must read the same number of rounds.
        """
        self._pass += 1
        return self._received() if self._processes.rank else self._sent(read)

    def _sent(self, read: Callable[[], Iterator[Round]]) -> Iterator[tuple[Any, Any]]:
        rounds = _deferring(read)
        try:
            error, found = next(rounds)
            self._send(error, found)
            while found is not None:
                own, facts = found[0][self._places[0]], found[1]
                error, found = next(rounds)
                self._send(error, found)
                yield own, facts
                del own
            if error is not None:
                raise error
        finally:
            self._wait()

    def _wait(self) -> None:
        """Wait until the other processes have received all messages."""
        pending, self._pending = self._pending, []
        for work, _ in pending:
            work.wait()

    def _received(self) -> Iterator[tuple[Any, Any]]:
        ahead = _in_thread(self._receive)
        try:
            while True:
                kind, facts, share = ahead.result()
                if kind == "end":
                    return
                if kind == "error":
                    raise WorkerError(f"the first process could not read the data: {facts}")
                ahead = _in_thread(self._receive)
                yield share, facts
                del share
        finally:
            wait([ahead])  # it has been sent

    def _send(self, error: Exception | None, found: Round | None) -> None:
        """Start to send a round, or the end of the pass, once the previous messages have been received."""
        self._wait()
        kind, facts = ("round", found[1]) if found else ("end", None)
        if error is not None:
            kind, facts = "error", f"{type(error).__name__}: {error}"
        group = self._processes.group_for(_CPU)
        for process in range(1, self._processes.world_size):
            share = None if found is None else found[0][self._places[process]]
            described, content = _encode((kind, facts, share))
            header = torch.tensor([self._pass, described, len(content)])
            for message in (header, content):
                self._pending.append((dist.isend(message, process, group=group, tag=_TAG), message))

    def _receive(self) -> tuple[str, Any, Any]:
        group = self._processes.group_for(_CPU)
        while True:
            header = torch.empty(3, dtype=torch.int64)
            dist.recv(header, 0, group=group, tag=_TAG)
            number, described, size = header.tolist()
            content = torch.empty(size, dtype=torch.uint8)
            dist.recv(content, 0, group=group, tag=_TAG)
            if number == self._pass:  # otherwise it belongs to a pass that this process has left
                kind, facts, share = _decode(content, described)
                return kind, facts, share


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """Call a function in a daemon thread. Return the future of its result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 -- it is raised by the thread that requests the result
            future.set_exception(error)

    threading.Thread(target=run, name="trainwright-receive", daemon=True).start()
    return future


class _Slot:
    """Replacement of a tensor in a pickled message: its dtype and shape."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.shape = tensor.dtype, tensor.shape


def _encode(value: object) -> tuple[int, torch.Tensor]:
    """Return the bytes of all tensors in `value` followed by a pickle of the rest, and the pickle's length."""
    parts: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor | _Slot:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor
        parts.append(torch.from_numpy(host_bytes(tensor.resolve_conj())))
        return _Slot(tensor)

    described = bytearray(pickle.dumps(recursively_apply(keep, value)))
    return len(described), torch.cat([*parts, torch.frombuffer(described, dtype=torch.uint8)])


def _decode(content: torch.Tensor, described: int) -> Any:
    """Return the argument of `_encode`. Tensors that are aligned in `content` share its memory."""
    end = 0

    def fill(slot: _Slot) -> torch.Tensor:
        nonlocal end
        start, end = end, end + slot.shape.numel() * slot.dtype.itemsize
        part = content[start:end] if start % slot.dtype.itemsize == 0 else content[start:end].clone()
        return part.view(slot.dtype).view(slot.shape)

    structure = pickle.loads(content[len(content) - described :].numpy().data)
    return recursively_apply(fill, structure, test_type=lambda leaf: isinstance(leaf, _Slot))


def _deferring(read: Callable[[], Iterator[Round]]) -> Iterator[tuple[Exception | None, Round | None]]:
    """Yield `(None, round)` for each round. At the end, yield `(error, None)` if there was one, and `(None, None)`."""
    try:
        for found in read():
            yield None, found
    except Exception as error:  # noqa: BLE001 -- it is raised on every process once the last round has been used
        yield error, None
    yield None, None


def rounds_of(batches: Iterator[Any], world: int) -> Iterator[list[Any]]:
    """Yield the batches in groups of one for each process; the last group may be short."""
    while found := list(itertools.islice(batches, world)):
        yield found
