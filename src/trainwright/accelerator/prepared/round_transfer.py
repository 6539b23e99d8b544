"""Transfer of batches from the first process to the others: each of them receives its share of a round."""

from __future__ import annotations

import itertools
import pickle
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from trainwright.core.errors import WorkerError
from trainwright.processes.collectives import recursively_apply
from trainwright.processes.process_group import Processes

_HEADER = struct.Struct("qqq")  # pass, bytes of the description, bytes of the second message
_HEADER_BYTES = 4096
_ALIGNMENT = 64  # of tensors in a message
_TAG = 7301  # separates these messages from point-to-point messages of the user
_CPU = torch.device("cpu")


class Round(NamedTuple):
    """Shares of one round.

    Attributes:
        shares: one batch for each data-parallel rank.
        facts: picklable values that every process receives.
    """

    shares: Sequence[Any]
    facts: Any


class RoundTransfer:
    """Sends rounds that the first process reads. It reads one round ahead, which the others receive in a thread.

    A round is one message to each process, with the structure of its share, and one with the tensors.

    Args:
        processes: all processes of the script.
        places: the data-parallel rank of each process.
    """

    def __init__(self, processes: Processes, places: Sequence[int]) -> None:
        self._processes = processes
        self._places = places
        self._pass = 0
        self._pending: list[tuple[Any, torch.Tensor]] = []

    def iterate(self, read: Callable[[], Iterator[Round]]) -> Iterator[tuple[Any, Any]]:
        """Return an iterator over this process's share and the facts of each round.

        Every process must take the same number of rounds. An error of `read` on the first process is raised there, and
        as a `WorkerError` on the others.

        Args:
            read: called on the first process only; returns the rounds of a pass.
        """
        self._pass += 1
        return self._received() if self._processes.rank else self._sent(read)

    def _sent(self, read: Callable[[], Iterator[Round]]) -> Iterator[tuple[Any, Any]]:
        rounds = _deferring(read)
        try:
            error, found = next(rounds)
            self._send(error, found)
            while found is not None:
                own, facts = found.shares[self._places[0]], found.facts
                error, found = next(rounds)
                self._send(error, found)
                yield own, facts
                del own
            if error is not None:
                raise error
        finally:
            self._wait()

    def _wait(self) -> None:
        """Wait until the others have received what was sent: a message ends with its buffer."""
        pending, self._pending = self._pending, []
        for work, _ in pending:
            work.wait()

    def _received(self) -> Iterator[tuple[Any, Any]]:
        ahead = _InThread(self._receive)
        try:
            while True:
                kind, facts, share = ahead.result()
                if kind == "end":
                    return
                if kind == "error":
                    raise WorkerError(f"the first process could not read the data: {facts}")
                ahead = _InThread(self._receive)
                yield share, facts
                del share
        finally:
            ahead.wait()  # it has been sent

    def _send(self, error: Exception | None, found: Round | None) -> None:
        """Start to send a round, or the end of the pass, once the others have received what was sent before."""
        self._wait()
        kind, facts = ("round", found.facts) if found else ("end", None)
        if error is not None:
            kind, facts = "error", f"{type(error).__name__}: {error}"
        group = self._processes.group_for(_CPU)
        for process in range(1, self._processes.world_size):
            share = None if found is None else found.shares[self._places[process]]
            for message in _encode(self._pass, kind, facts, share):
                self._pending.append((dist.isend(message, process, group=group, tag=_TAG), message))

    def _receive(self) -> tuple[str, Any, Any]:
        group = self._processes.group_for(_CPU)
        while True:
            header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
            dist.recv(header, 0, group=group, tag=_TAG)
            number, described, size = _HEADER.unpack_from(header.numpy().data)
            content = torch.empty(size, dtype=torch.uint8)
            if size:
                dist.recv(content, 0, group=group, tag=_TAG)
            if number == self._pass:  # otherwise it belongs to a pass that this process has left
                return _decode(header, described, content)


class _InThread:
    """Call of a function in another thread."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="trainwright-receive", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 -- it is raised by the thread that requests the result
            self._error = error

    def wait(self) -> None:
        """Wait for the end of the call."""
        self._thread.join()

    def result(self) -> Any:
        """Return the result once it is there, or raise the error of the call."""
        self.wait()
        if self._error is not None:
            raise self._error
        found, self._result = self._result, None
        return found


class _Slot:
    """Placeholder of a tensor in the structure of a share."""

    def __init__(self, tensor: torch.Tensor, start: int) -> None:
        self.dtype, self.shape, self.start = tensor.dtype, tuple(tensor.shape), start


def _deferring(read: Callable[[], Iterator[Round]]) -> Iterator[tuple[Exception | None, Round | None]]:
    """Yield each round, and after the last one None with the error that ended the pass."""
    try:
        for found in read():
            yield None, found
    except Exception as error:  # noqa: BLE001 -- it is raised on every process once the last round has been used
        yield error, None
    yield None, None


def _encode(number: int, kind: str, facts: object, share: object) -> list[torch.Tensor]:
    """Return the messages of a share: the header, and the rest if there is any."""
    tensors: list[torch.Tensor] = []
    place = 0

    def keep(tensor: torch.Tensor) -> Any:
        nonlocal place
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor
        slot = _Slot(tensor, place)
        tensors.append(tensor.detach())
        place = _aligned(place + tensor.nbytes)
        return slot

    described = pickle.dumps((kind, facts, recursively_apply(keep, share)))
    inline = _HEADER.size + len(described) <= _HEADER_BYTES
    start = 0 if inline else _aligned(len(described))
    size = start + place
    header = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
    _HEADER.pack_into(header.numpy().data, 0, number, len(described), size)
    if inline:
        _write(header, _HEADER.size, described)
    if not size:
        return [header]
    content = torch.empty(size, dtype=torch.uint8)
    if not inline:
        _write(content, 0, described)
    for tensor in tensors:
        end = start + tensor.nbytes
        if end > start:
            content[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        start = _aligned(end)
    return [header, content]


def _decode(header: torch.Tensor, described: int, content: torch.Tensor) -> tuple[str, Any, Any]:
    inline = _HEADER.size + described <= _HEADER_BYTES
    text = header[_HEADER.size : _HEADER.size + described] if inline else content[:described]
    kind, facts, structure = pickle.loads(text.numpy().tobytes())
    first = 0 if inline else _aligned(described)

    def fill(slot: _Slot) -> torch.Tensor:
        size = slot.dtype.itemsize
        for length in slot.shape:
            size *= length
        start = first + slot.start
        if not size:
            return torch.empty(slot.shape, dtype=slot.dtype)
        return content[start : start + size].view(slot.dtype).view(slot.shape)

    return kind, facts, recursively_apply(fill, structure, test_type=lambda leaf: isinstance(leaf, _Slot))


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


def _write(message: torch.Tensor, start: int, text: bytes) -> None:
    message[start : start + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)


def rounds_of(batches: Iterator[Any], world: int) -> Iterator[list[Any]]:
    """Yield the batches in groups of one for each process; the last group may be short."""
    while found := list(itertools.islice(batches, world)):
        yield found
