"""Transfer of batches from the first process to the other processes."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from trainwright.checkpoint.disk.planned_file import host_bytes
from trainwright.core.errors import WorkerError
from trainwright.processes.collectives import recursively_apply
from trainwright.processes.process_group import Processes

T = TypeVar("T")

_TAG = 7301  # separates these messages from point-to-point messages of the user
_CPU = torch.device("cpu")


class Round(NamedTuple):
    """What the first process reads for one round.

    Attributes:
        shares: One batch for each data-parallel rank.
        facts: A small picklable value that every process receives.
    """

    shares: Sequence[Any]
    facts: Any


class Delivery(NamedTuple):
    """This process's part of a round: its batch, and the facts of the round."""

    share: Any
    facts: Any


class RoundTransfer:
    """Transfer of rounds from the first process. A round is one batch for each data-parallel rank.

    The first process reads one round ahead, and the other processes receive one round ahead, in a thread. A round
    consists of two messages to each process. The first one is a header of three numbers: the number of the pass, and
    the length of the pickle and of the whole second message, in bytes. The second one contains the process's batch.

    Args:
        processes: All processes of the script.
        places: The data-parallel rank of each process. Processes with equal ranks receive the same batch.
    """

    def __init__(self, processes: Processes, places: Sequence[int]) -> None:
        self._processes = processes
        self._places = places
        self._pass = 0  # number of the present pass, equal on all processes
        # Sends that have begun, each with its message, whose memory must remain until it has been sent.
        self._pending: list[tuple[Any, torch.Tensor]] = []

    def iterate(self, read: Callable[[], Iterator[Round]]) -> Iterator[Delivery]:
        """Return an iterator over the rounds of a pass: this process's batch, and the facts of the round.

        `read` is called on the first process only. An error of `read` is raised there, and as a `WorkerError` on other
        processes. Every process must read the same number of rounds.
        """
        self._pass += 1
        if self._processes.rank == 0:
            return self._sent(read)
        return self._received()

    # The first process

    def _sent(self, read: Callable[[], Iterator[Round]]) -> Iterator[Delivery]:
        rounds = _deferring(read)
        try:
            error, current = next(rounds)
            self._send(error, current)
            while current is not None:
                share = current.shares[self._places[0]]
                facts = current.facts
                # The next round is read and sent first, so that the other processes can receive it while all train.
                error, current = next(rounds)
                self._send(error, current)
                yield Delivery(share, facts)
                del share  # only the loop holds the batch now, and may free it
            if error is not None:
                raise error
        finally:
            self._wait()

    def _send(self, error: Exception | None, current: Round | None) -> None:
        """Start to send a round, an error, or the end of the pass (both are None), after the previous message."""
        self._wait()
        shares: Sequence[Any] | None = None
        facts: Any = None
        if error is not None:
            kind = "error"
            facts = f"{type(error).__name__}: {error}"
        elif current is not None:
            kind = "round"
            shares = current.shares
            facts = current.facts
        else:
            kind = "end"
        group = self._processes.group_for(_CPU)
        for process in range(1, self._processes.world_size):
            share = None if shares is None else shares[self._places[process]]
            pickle_length, content = _encode((kind, facts, share))
            header = torch.tensor([self._pass, pickle_length, len(content)])
            for message in (header, content):
                work = dist.isend(message, process, group=group, tag=_TAG)
                self._pending.append((work, message))

    def _wait(self) -> None:
        """Wait until the other processes have received all messages."""
        pending = self._pending
        self._pending = []
        for work, _ in pending:
            work.wait()

    # The other processes

    def _received(self) -> Iterator[Delivery]:
        ahead = _in_thread(self._receive)
        try:
            while True:
                kind, facts, share = ahead.result()
                if kind == "end":
                    return
                if kind == "error":
                    raise WorkerError(f"the first process could not read the data: {facts}")
                ahead = _in_thread(self._receive)
                yield Delivery(share, facts)
                del share
        finally:
            # Also if the loop leaves the pass. The message of `ahead` has been sent, so that this does not take long.
            # Otherwise, the threads of two passes would receive messages at the same time.
            wait([ahead])

    def _receive(self) -> tuple[str, Any, Any]:
        """Return the kind of the next message of the present pass, its facts, and this process's batch."""
        group = self._processes.group_for(_CPU)
        while True:
            header = torch.empty(3, dtype=torch.int64)
            dist.recv(header, 0, group=group, tag=_TAG)
            pass_number, pickle_length, size = header.tolist()
            content = torch.empty(size, dtype=torch.uint8)
            dist.recv(content, 0, group=group, tag=_TAG)
            if pass_number == self._pass:  # otherwise it belongs to a pass that this process has left
                kind, facts, share = _decode(content, pickle_length)
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
    """Replacement of a tensor in a pickled message: its dtype and shape. Its values precede the pickle, as bytes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.shape = tensor.shape


def _encode(value: object) -> tuple[int, torch.Tensor]:
    """Return the pickle's length, and the bytes of all tensors in `value` followed by a pickle of the rest."""
    parts: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor | _Slot:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor  # has no plain bytes: it is pickled
        parts.append(torch.from_numpy(host_bytes(tensor.resolve_conj())))
        return _Slot(tensor)

    pickled = bytearray(pickle.dumps(recursively_apply(keep, value)))
    return len(pickled), torch.cat([*parts, torch.frombuffer(pickled, dtype=torch.uint8)])


def _decode(content: torch.Tensor, pickle_length: int) -> Any:
    """Return the argument of `_encode`. Tensors that are aligned in `content` share its memory."""
    end = 0  # of the bytes of the newest tensor; `_encode` has visited the tensors in the same order

    def fill(slot: _Slot) -> torch.Tensor:
        nonlocal end
        start = end
        end = start + slot.shape.numel() * slot.dtype.itemsize
        part = content[start:end]
        if start % slot.dtype.itemsize != 0:
            part = part.clone()  # `view` needs an aligned start
        return part.view(slot.dtype).view(slot.shape)

    structure = pickle.loads(content[len(content) - pickle_length :].numpy().data)
    return recursively_apply(fill, structure, test_type=lambda leaf: isinstance(leaf, _Slot))


def _deferring(read: Callable[[], Iterator[Round]]) -> Iterator[tuple[Exception | None, Round | None]]:
    """Yield `(None, round)` for each round, and at the end `(None, None)`, or `(error, None)` after an error."""
    try:
        for current in read():
            yield None, current
            del current  # before the next round is read
    except Exception as error:  # noqa: BLE001 -- it is raised on every process once the last round has been used
        yield error, None
    yield None, None


def rounds_of(batches: Iterator[Any], world: int) -> Iterator[list[Any]]:
    """Yield the batches in lists of `world` batches. The last list may be shorter."""
    while batches_of_round := list(itertools.islice(batches, world)):
        yield batches_of_round
