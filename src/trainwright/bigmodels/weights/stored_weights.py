"""The weights of a checkpoint by name, mapped from its files. Tensors are views of the page cache.

A checkpoint is one or more files of safetensors or `torch.save`. The index of several files has the layout of
transformers (`weight_map`), or is an object of names and files. A mapping is private: a write to a tensor stays in this
process and never reaches the file. The file must keep its length while it is mapped, because access to a page beyond
its end kills the process (SIGBUS). `MappedFile.load` checks this first.
"""

from __future__ import annotations

import copy
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainwright.checkpoint.disk.untrusted import check_regular, check_relative, read_json, reading
from trainwright.checkpoint.format.safetensors_io import DTYPES, NATIVE_NAMES, from_storable, read_header
from trainwright.core.errors import CheckpointError
from trainwright.strategies.offload.advice import populate

# Linux's MAP_NORESERVE, which Python's mmap module lacks. Without it, Linux refuses a private mapping that is larger
# than the memory.
_MAP_NORESERVE = 0x4000
_READ_BYTES = 8 * 2**20  # bytes per read
_PROBE_BYTES = 2**20  # distance of the bytes that are probed to check whether a part is in memory
_GAP_BYTES = 64 * 2**10  # reading a gap of this size is cheaper than a second request


class FileSpan(NamedTuple):
    """Location of a tensor's bytes in a mapped file."""

    file: MappedFile
    start: int
    num_bytes: int

    def read_into(self, buffer: torch.Tensor, start: int) -> None:
        """Fill `buffer` with the tensor's bytes from `start` on; see `MappedFile.read_into`."""
        self.file.read_into(buffer, self.start + start)


class MappedFile:
    """A file that is mapped completely but not read.

    Attributes:
        path: Path of the file when it was opened, for messages.
        num_bytes: Length of the file when it was mapped.

    Raises:
        CheckpointError: The file cannot be opened or mapped, is empty, or is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_regular(path)
        try:
            self._map_descriptor(os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error}.") from error

    def _map_descriptor(self, descriptor: int) -> None:
        """Map an open file, and close it when this object is freed. Tensors remain valid: they keep the mapping."""
        self._descriptor = descriptor
        weakref.finalize(self, os.close, self._descriptor)
        self.num_bytes = os.fstat(self._descriptor).st_size
        self._bytes = _map(self._descriptor, self.num_bytes, self.path)  # uint8
        # Parts (start, num_bytes) that `load` has entered into the page table of this process. They need another `load`
        # only if the system has dropped them from the page cache.
        self._loaded: set[tuple[int, int]] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> MappedFile:
        """Map the same file again. Changes of the original's tensors in memory are not copied."""
        self.check()
        twin = copy.copy(self)
        twin._map_descriptor(os.dup(self._descriptor))  # the path may name another file by now
        return twin

    def counterpart(self, tensor: torch.Tensor, other: MappedFile) -> torch.Tensor | None:
        """Return this copy's tensor for a tensor of the original file `other`.

        None if `tensor` is not a contiguous view of `other`.
        """
        start = tensor.data_ptr() - other._bytes.data_ptr()
        if not 0 <= start < other.num_bytes or not tensor.is_contiguous():
            return None
        return self.tensor(start, tensor.dtype, tensor.shape)

    def tensor(self, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor that begins at byte `start`: a view, or a copy if it is not aligned.

        Raises:
            CheckpointError: The tensor ends beyond the file.
        """
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if start < 0 or start + num_bytes > self.num_bytes:
            raise CheckpointError(
                f"{self.path} is truncated: a tensor of {num_bytes} bytes begins at {start}, the file has "
                f"{self.num_bytes} bytes. Copy or download the file again."
            )
        content = self._bytes[start : start + num_bytes]
        if start % dtype.itemsize:  # torch cannot view unaligned bytes as this dtype
            content = content.clone()
        return content.view(dtype).view(tuple(shape))

    def check(self) -> None:
        """Raise CheckpointError if the file is shorter than when it was mapped. Takes one system call."""
        size = os.fstat(self._descriptor).st_size
        if size < self.num_bytes:
            raise CheckpointError(
                f"{self.path} has shrunk from {self.num_bytes} to {size} bytes while its weights are in use. "
                "Restore the file and load the model again."
            )

    def read_into(self, buffer: torch.Tensor, start: int) -> None:
        """Fill `buffer` (uint8 on the CPU, contiguous) with the bytes from `start` on, in one copy.

        Raises:
            CheckpointError: The file is too short, or cannot be read.
        """
        bytes_: Any = buffer.numpy()
        view = memoryview(bytes_)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done:]], start + done)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read at byte {start + done}: {error}.") from error
            if count == 0:
                self.check()
                raise CheckpointError(f"{self.path} ends at byte {start + done}, before the end of a weight.")
            done += count

    def load(self, start: int, num_bytes: int) -> None:
        """Read `num_bytes` bytes from `start` on into memory. Blocks, but returns quickly if they are in memory.

        Releases the GIL. Raises CheckpointError if the file has shrunk.
        """
        self.check()
        if (start, num_bytes) in self._loaded and self._is_in_memory(start, num_bytes):
            return
        if hasattr(os, "posix_fadvise"):  # starts to read the whole part, while the loop below waits for its pieces
            os.posix_fadvise(self._descriptor, start, num_bytes, os.POSIX_FADV_WILLNEED)
        begin = start - start % mmap.PAGESIZE
        end = min(start + num_bytes, self.num_bytes)
        while begin < end:
            count = min(_READ_BYTES, end - begin)
            if not populate(self._bytes.data_ptr() + begin, count):  # not supported by this system
                self.check()
                self._bytes[begin : begin + count : mmap.PAGESIZE].sum()  # touches each page
            begin += count
        self._loaded.add((start, num_bytes))

    def _is_in_memory(self, start: int, num_bytes: int) -> bool:
        """Return whether a range seems to be in the page cache. Probes a byte in each MiB."""
        flag = getattr(os, "RWF_NOWAIT", None)  # only on Linux: read only bytes that are in the page cache
        byte = [bytearray(1)]
        if flag is None or not num_bytes:
            return False
        last = start + num_bytes - 1
        try:
            for offset in (*range(start, last, _PROBE_BYTES), last):
                if not os.preadv(self._descriptor, byte, offset, flag):  # the file ends before
                    return False
        except OSError:  # it is not in memory, or the file system does not support the flag
            return False
        return True


def load_spans(spans: Iterable[FileSpan]) -> None:
    """Read parts of files into memory with `MappedFile.load`. Parts with gaps of up to 64 KiB are read together.

    Raises:
        CheckpointError: A file has shrunk.
    """
    runs: list[FileSpan] = []  # parts to read, each of which covers one or more spans
    for span in sorted(spans, key=lambda span: (str(span.file.path), span.start)):
        run = runs[-1] if runs else None
        if run is not None and span.file is run.file and span.start <= run.start + run.num_bytes + _GAP_BYTES:
            # A span may end before the run does: tied weights have the same span.
            num_bytes = max(run.num_bytes, span.start + span.num_bytes - run.start)
            runs[-1] = FileSpan(run.file, run.start, num_bytes)
        else:
            runs.append(span)
    for run in runs:
        run.file.load(run.start, run.num_bytes)


def _map(descriptor: int, num_bytes: int, path: Path) -> torch.Tensor:
    """Return the bytes of a file as a tensor of uint8. Writes to it do not change the file."""
    if num_bytes == 0:  # which cannot be mapped
        raise CheckpointError(f"{path} is truncated: it is empty. Copy or download the file again.")
    try:
        if hasattr(mmap, "MAP_PRIVATE"):
            flags = mmap.MAP_PRIVATE
            if hasattr(os, "posix_fadvise"):  # Linux: macOS has neither this function nor the flag
                flags |= _MAP_NORESERVE
            mapping = mmap.mmap(descriptor, num_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        else:  # Windows
            mapping = mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be mapped into memory: {error}.") from error
    return torch.frombuffer(mapping, dtype=torch.uint8)


_INDEX_SUFFIX = ".index.json"
_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
# Names in the headers of safetensors → dtype.
_DTYPES = DTYPES | {name: dtype for dtype, name in NATIVE_NAMES.items()}


class StoredWeights(Mapping[str, torch.Tensor]):
    """Name → tensor on the CPU, which may be mapped from a file. `read_checkpoint` creates one for a checkpoint.

    Names that are tied in the checkpoint's index have the same tensor. Writes to a tensor do not change the file.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._spans: dict[str, FileSpan] = {}  # only for names of tensors with a known location

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredWeights:
        twin = StoredWeights()
        for name, tensor in self._tensors.items():
            twin.add(name, *copy_stored(tensor, self._spans.get(name), memo))
        return twin

    def locate(self, name: str) -> FileSpan | None:
        """Return the location of a tensor in a safetensors file or an offload folder. None for other tensors."""
        return self._spans.get(name)

    def add(self, name: str, tensor: torch.Tensor, span: FileSpan | None = None) -> None:
        """Add a tensor, and its location if it is a view of a file.

        Without `span`, a name that exists keeps its location. The new tensor must then have the same bytes.
        """
        self._tensors[name] = tensor
        if span is not None:
            self._spans[name] = span

    def add_all(self, names: Iterable[str], tensor: torch.Tensor, span: FileSpan | None = None) -> None:
        """Add a tensor under each of several names."""
        for name in names:
            self.add(name, tensor, span)

    def update(self, others: StoredWeights, prefix: str = "") -> None:
        """Add the tensors and locations of other stored weights, with `prefix` before the names."""
        self._tensors |= {prefix + name: tensor for name, tensor in others._tensors.items()}
        self._spans |= {prefix + name: span for name, span in others._spans.items()}

    def add_alias(self, name: str, same: str) -> None:
        """Add `name` for the tensor that is called `same`."""
        self._tensors[name] = self._tensors[same]
        if same in self._spans:
            self._spans[name] = self._spans[same]

    def add_safetensors(self, path: Path, names: Iterable[str] | None = None) -> None:
        """Add the tensors of a safetensors file with the given names. Default: all.

        Raises:
            CheckpointError: The file is damaged or truncated, or does not contain one of `names`.
        """
        file = MappedFile(path)
        header = read_header(path)
        header.pop("__metadata__", None)
        # The file: 8 bytes with the length of the header, the header in JSON, and the tensors. Offsets in the header
        # count from `begin`, the first byte of the tensors.
        begin = 8 + int.from_bytes(file.tensor(0, torch.uint8, (8,)).numpy().tobytes(), "little")
        for name in header if names is None else names:
            if name not in header:
                raise CheckpointError(f"{path} lacks {name!r}, which the index lists. Copy the file again.")
            start, dtype, shape = _entry(header[name], name, path)
            self._tensors[name] = file.tensor(begin + start, dtype, shape)
            self._spans[name] = FileSpan(file, begin + start, self._tensors[name].nbytes)

    def add_torch_file(self, path: Path, names: Iterable[str] | None = None, *, mapped: bool = True) -> None:
        """Add tensors of a state dict that `torch.save` wrote, by default all. No code in the file is executed.

        With `mapped`, they are views of the file. Do not write to it while they exist: `torch.save` truncates it first.

        Raises:
            CheckpointError: The file is damaged, is not a dict of tensors, or does not contain one of `names`.
        """
        from trainwright.checkpoint.interop.torch_file import read_torch_file

        content, unknown = read_torch_file(path, mapped=mapped)
        if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):  # a checkpoint of Lightning
            content = content["state_dict"]
        if unknown or not isinstance(content, dict):
            raise CheckpointError(
                f"{path} is not a state dict of tensors" + (f": it contains {', '.join(unknown)}." if unknown else ".")
            )
        for name in content if names is None else names:
            if not isinstance(content.get(name), torch.Tensor):
                raise CheckpointError(f"{path} does not contain the tensor {name!r}. Copy the file again.")
            self._tensors[name] = content[name]


def copy_stored(
    tensor: torch.Tensor, span: FileSpan | None, memo: dict[int, Any]
) -> tuple[torch.Tensor, FileSpan | None]:
    """Return deep copies of a tensor and its location. A mapped tensor is mapped again, not read."""
    if span is None:
        return copy.deepcopy(tensor, memo), None
    span_copy = copy.deepcopy(span, memo)  # maps the file again, once for all weights with this `memo`
    mapped_copy = span_copy.file.counterpart(tensor, span.file)
    if mapped_copy is None:  # not a view of the file, such as a converted tensor
        return copy.deepcopy(tensor, memo), span_copy
    return mapped_copy, span_copy


def _entry(entry: Any, name: str, path: Path) -> tuple[int, torch.dtype, list[int]]:
    """Return the offset, dtype and shape in an entry of the header, after checking them."""
    try:
        dtype = _DTYPES[entry["dtype"]]
        shape = [int(size) for size in entry["shape"]]
        start, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the entry of {name!r} cannot be read: {error!r}.") from error
    if start < 0 or min(shape, default=0) < 0 or end - start != torch.Size(shape).numel() * dtype.itemsize:
        raise CheckpointError(f"{path}: {name!r} has {end - start} bytes, which does not match {dtype} {shape}.")
    return start, dtype, shape


def read_checkpoint(checkpoint: Path) -> StoredWeights:
    """Map the weights of a checkpoint. Reads only the headers of its files.

    Args:
        checkpoint: A file of weights, an index (`*.index.json`, or JSON of names and files), or a folder with either.
            In a folder, an index is preferred to a file and safetensors to other formats. A checkpoint of the Trainer
            has its weights in `model/`.

    Raises:
        CheckpointError: No weights are found, a folder contains several indexes or files to choose from, a file is
            missing, damaged or truncated, or an index points outside its folder.
    """
    weights = StoredWeights()
    with reading(checkpoint):
        path = _find(checkpoint)
        if path.suffix == ".json":
            _add_indexed(weights, path)
        else:
            _add_file(weights, path, None)
    return weights


def _find(checkpoint: Path) -> Path:
    """Return the index or the file of weights of a checkpoint. In a folder, the first of these that exists:

    1. An index `*.index.json`, of safetensors before others.
    2. `index.json`, unless it is the index of an offload folder.
    3. `model.safetensors`, or `pytorch_model.bin`.
    4. The only file with one of the suffixes, in the order of `_SUFFIXES`.
    5. One of these in the subfolder `model`.
    """
    if checkpoint.is_file():
        return checkpoint
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint} is neither a file nor a folder. Check the path.")
    indexes = sorted(
        checkpoint.glob(f"*{_INDEX_SUFFIX}"), key=lambda path: (".safetensors." not in path.name, path.name)
    )
    plain = checkpoint / "index.json"
    if not indexes and plain.is_file() and not _is_offload_index(plain):
        return plain
    if indexes:
        is_safetensors = ".safetensors." in indexes[0].name
        same_format = [path for path in indexes if (".safetensors." in path.name) == is_safetensors]
        if len(same_format) > 1:
            names = ", ".join(path.name for path in same_format)
            raise CheckpointError(f"{checkpoint} contains several indexes: {names}. Pass the path of the one to load.")
        return indexes[0]
    for name in _SINGLE_FILES:
        if (checkpoint / name).is_file():
            return checkpoint / name
    from trainwright.checkpoint.interop.weights_folder import shards_of

    for suffix in _SUFFIXES:
        found = sorted(checkpoint.glob(f"*{suffix}"))
        if len(found) == 1 and shards_of(found[0]) > 1:
            raise CheckpointError(
                f"{checkpoint} is incomplete: it contains one of {shards_of(found[0])} shards, {found[0].name}, and no "
                "index of the others. Copy the missing files."
            )
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(path.name for path in found)
            raise CheckpointError(f"{checkpoint} contains {names} and no index. Pass the path of the file to load.")
    if (checkpoint / "model").is_dir():  # a checkpoint of the Trainer
        return _find(checkpoint / "model")
    raise CheckpointError(
        f"{checkpoint} contains no weights: no index and no {', '.join(_SUFFIXES)} file. Pass another path."
    )


def _is_offload_index(path: Path) -> bool:
    """Return whether an `index.json` belongs to offloaded weights, which may be in the checkpoint's folder."""
    index = read_json(path)
    entries = list(index.values()) if isinstance(index, dict) else []
    return bool(entries) and all(isinstance(entry, dict) and "dtype" in entry and "shape" in entry for entry in entries)


def _add_indexed(weights: StoredWeights, path: Path) -> None:
    """Add the weights that an index lists."""
    index = read_json(path)
    notes: Any = {}  # see `_add_notes`
    weight_map = index  # name → file, unless the index has the layout of transformers
    if isinstance(index, dict) and isinstance(index.get("weight_map"), dict):
        weight_map = index["weight_map"]
        metadata = index.get("metadata")
        notes = metadata.get("trainwright", {}) if isinstance(metadata, dict) else {}
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(
            f"{path} is not an index of weights: expected an object of names and files, or one as its weight_map."
        )
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(check_relative(file, str(path)), []).append(name)
    for file, names in by_file.items():
        if not (path.parent / file).is_file():
            raise CheckpointError(f"{path} lists the file {file!r}, which is missing. Copy it.")
        _add_file(weights, path.parent / file, names)
    _add_notes(weights, notes, path)


def _add_notes(weights: StoredWeights, notes: Mapping[str, Any], path: Path) -> None:
    """Apply the entries that this package adds to an index: dtypes that safetensors lacks, and tied names.

    For example `{"dtypes": {"a.weight": "torch.complex128"}, "tied": {"head.weight": "embedding.weight"}}`.
    """
    for name, dtype in dict(notes.get("dtypes", {})).items():
        if name in weights:
            weights.add(name, from_storable(weights[name], dtype))
    for name, same in dict(notes.get("tied", {})).items():
        if same not in weights:
            raise CheckpointError(f"{path} ties {name!r} to {same!r}, which it lacks. Copy it again.")
        weights.add_alias(name, same)


def _add_file(weights: StoredWeights, path: Path, names: Iterable[str] | None) -> None:
    if path.suffix == ".safetensors":
        weights.add_safetensors(path, names)
    else:
        weights.add_torch_file(path, names)
