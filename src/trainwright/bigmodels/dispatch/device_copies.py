"""Copies of weights from the host to where they are used, beside the computation.

On an accelerator each copy goes through a stream of its own. What lies in pageable memory or in a file passes through
pinned buffers that are used again and again: one copy on the host, read straight from the file where there is one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from trainwright.bigmodels.weights.mapped_file import FileSpan

_BUFFER_BYTES = 32 * 2**20
_GAP_BYTES = 64 * 2**10  # reading so much in vain is cheaper than asking twice


@dataclass(slots=True)
class Fetched:
    """Weights of a module where they are to be used.

    Attributes:
        tensors: by their names in the module.
        ready: when they are there; None where they are already.
    """

    tensors: dict[str, torch.Tensor]
    ready: torch.Event | None = None

    def use(self) -> dict[str, torch.Tensor]:
        """Return the tensors, safe for what the calling thread queues on its stream from now on; does not block."""
        if self.ready is not None:
            for tensor in self.tensors.values():
                stream = torch.accelerator.current_stream(tensor.device)
                stream.wait_event(self.ready)
                tensor.record_stream(stream)  # their memory is the copy stream's, which must not reuse it too early
            self.ready = None
        return self.tensors


class PinnedBuffers:
    """Host buffers that copies to a device pass through, each reused once its last copy is over.

    Args:
        pinned: False for ordinary memory, from which copies wait.
    """

    def __init__(self, num_bytes: int = _BUFFER_BYTES, *, pinned: bool = True) -> None:
        self.num_bytes = num_bytes
        self._pinned = pinned
        self._lock = threading.Lock()
        self._free: list[tuple[torch.Tensor, torch.Event | None]] = []

    def acquire(self) -> torch.Tensor:
        """Return a buffer that nothing reads any more; may wait for the device."""
        with self._lock:
            found = self._free.pop(0) if len(self._free) > 1 else None
        if found is None:
            # Where the user's default device is another, only the host has pinned memory; and a buffer that was made in
            # inference mode could not be written again outside of it.
            with torch.inference_mode(False):
                return torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        buffer, event = found
        if event is not None:
            event.synchronize()
        return buffer

    def give_back(self, buffer: torch.Tensor, event: torch.Event | None) -> None:
        """Take a buffer back, to be used again after `event`."""
        with self._lock:
            self._free.append((buffer, event))


_STREAMS: dict[torch.device, torch.Stream] = {}
_BUFFERS = PinnedBuffers()
_LOCK = threading.Lock()


def _copy_stream(device: torch.device) -> torch.Stream:
    with _LOCK:
        if device not in _STREAMS:
            _STREAMS[device] = torch.Stream(device=device)
        return _STREAMS[device]


def fetch_to(
    device: torch.device,
    tensors: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
    spans: Mapping[str, FileSpan],
) -> Fetched:
    """Bring tensors to a device.

    Args:
        device: where to. On the CPU tensors are handed out as they are, after their parts of files were read in.
        tensors: by name, on the CPU or on `device`.
        dtypes: what each becomes, for those named.
        spans: where a tensor lies in a file, for those that do.

    Raises:
        CheckpointError: a file has become shorter.
        torch.OutOfMemoryError: the device is full.
    """
    if device.type in ("cpu", "meta", "mps"):
        for run in _runs(spans):
            run.file.load(run.start, run.num_bytes)
        return Fetched({name: tensor.to(device, dtypes.get(name, tensor.dtype)) for name, tensor in tensors.items()})
    stream = _copy_stream(device)
    found: dict[str, torch.Tensor] = {}
    with stream:
        for name, tensor in tensors.items():
            target = _copied(tensor, device, spans.get(name), stream, _BUFFERS)
            found[name] = target.to(dtypes.get(name, target.dtype))
        ready = stream.record_event()
    return Fetched(found, ready)


def _runs(spans: Mapping[str, FileSpan]) -> Iterator[FileSpan]:
    """Yield the parts of files that hold `spans`, those that adjoin as one."""
    run: FileSpan | None = None
    for span in sorted(spans.values(), key=lambda span: (str(span.file.path), span.start)):
        if run is not None and span.file is run.file and span.start <= run.start + run.num_bytes + _GAP_BYTES:
            run = FileSpan(run.file, run.start, max(run.num_bytes, span.start + span.num_bytes - run.start))
            continue
        if run is not None:
            yield run
        run = span
    if run is not None:
        yield run


def _copied(
    tensor: torch.Tensor, device: torch.device, span: FileSpan | None, stream: torch.Stream, buffers: PinnedBuffers
) -> torch.Tensor:
    """Return a copy on the device, queued on `stream`."""
    if tensor.device == device or tensor.is_pinned() or tensor.numel() == 0:
        return tensor.to(device, non_blocking=True)
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    source = tensor.contiguous().reshape(-1).view(torch.uint8)
    flat = target.reshape(-1).view(torch.uint8)
    for start in range(0, source.numel(), buffers.num_bytes):
        count = min(buffers.num_bytes, source.numel() - start)
        buffer = buffers.acquire()
        if span is None:
            buffer[:count].copy_(source[start : start + count])
        else:
            span.file.read_into(buffer[:count], span.start + start)
        flat[start : start + count].copy_(buffer[:count], non_blocking=True)
        buffers.give_back(buffer, stream.record_event())
    return target
