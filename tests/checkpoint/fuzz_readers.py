"""Read files that were damaged or forged by the thousand: `python -m tests.checkpoint.fuzz_readers KIND FIRST COUNT`.

Each has to be noticed, which is a `CheckpointError`, or to be harmless. A process of its own does this, with bounds on
its memory and on the time of each file; an import or a call that a file names ends it.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.cutting import spans, write_in_pieces
from tests.checkpoint.every_kind import every_kind
from tests.checkpoint.foreign import Net, lightning_dict, trained
from tests.checkpoint.mutations import mutated_bytes, mutated_json, mutated_pickle
from tests.checkpoint.resealing import reseal, resealed
from tests.checkpoint.snapshots import files_of, same, write_small
from trainwright.bigmodels.weights.stored_weights import read_checkpoint as read_weights
from trainwright.checkpoint import (
    RunIndex,
    check_checkpoint,
    newest_valid,
    read_checkpoint,
    verify,
    write_checkpoint,
)
from trainwright.checkpoint.interop.convert import ConvertOptions, convert_checkpoint
from trainwright.checkpoint.interop.torch_file import read_torch_file
from trainwright.core.errors import CheckpointError

_MEMORY_BYTES = 3 * 2**30  # beyond what the process has when it begins
_SECONDS = 30  # for one file
_FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "os.fork")

Case = Callable[[random.Random], None]


def noticed(read: Callable[[], Any]) -> bool:
    """Call a reader; tell whether it raised a `CheckpointError`. Anything else passes through and is a failure."""
    try:
        read()
    except CheckpointError as error:
        if "MemoryError" in str(error) or "not enough memory" in str(error):
            raise AssertionError(f"memory ran out: {error}") from error
        return True
    return False


def checkpoints(folder: Path) -> Iterator[Case]:
    """Damage without a new seal: always noticed, and the earlier checkpoint is found."""
    runs = _runs(folder)

    def damaged(numbers: random.Random) -> None:
        run = numbers.choice(runs)
        path, earlier = run / "newer", run / "older"
        file = numbers.choice(files_of(path))
        whole = file.read_bytes()
        try:
            file.write_bytes(mutated_bytes(whole, numbers))
            assert noticed(lambda: read_checkpoint(path)), file
            assert verify(path), file
            assert newest_valid(run, kind="full") == earlier, file
        finally:
            file.write_bytes(whole)

    yield damaged


def forged(folder: Path) -> Iterator[Case]:
    """Changes with a seal that fits: what passes the check can be read, and what does not gives way."""
    runs = _runs(folder)

    def changed(numbers: random.Random) -> None:
        run = numbers.choice(runs)
        path, earlier = run / "newer", run / "older"
        file = numbers.choice(files_of(path))
        whole, manifest = file.read_bytes(), (path / "manifest.json").read_bytes()
        try:
            data = _mutated_file(file, whole, numbers)
            if file.name == "manifest.json":
                file.write_bytes(resealed(data.decode()))
            else:
                file.write_bytes(data)
                reseal(path)
            refused = noticed(lambda: check_checkpoint(path))
            verify(path)
            for copies in (True, False):
                again = noticed(lambda copies=copies: read_checkpoint(path, verify=False, copy_model=copies))  # type: ignore[misc]
                assert again <= refused, file
            found = newest_valid(run, kind="full", parts=("trainer", "model", "optimizer", "rng"))
            assert found in (path, earlier), file
            assert refused or not (found == path and noticed(lambda: read_checkpoint(path))), file
        finally:
            file.write_bytes(whole)
            (path / "manifest.json").write_bytes(manifest)

    yield changed


def _mutated_file(file: Path, whole: bytes, numbers: random.Random) -> bytes:
    if file.suffix == ".json":
        return mutated_json(whole, numbers)
    if numbers.random() < 0.6:
        return _with_header(whole, lambda header: mutated_json(header, numbers))
    return mutated_bytes(whole, numbers)


def _with_header(whole: bytes, change: Callable[[bytes], bytes]) -> bytes:
    length = struct.unpack("<Q", whole[:8])[0]
    header = change(whole[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + whole[8 + length :]


def _runs(folder: Path) -> list[Path]:
    runs = [folder / "whole", folder / "pieces", folder / "small"]
    for run in runs:
        write_small(run, 1, "older", trainer={"run_id": "a"})
    write_checkpoint(runs[0] / "newer", every_kind())
    write_in_pieces(runs[1] / "newer", every_kind(), cut=spans)
    write_small(runs[2], 2, "newer")
    return runs


def indexes(folder: Path) -> Iterator[Case]:
    """The index of a run: what is changed is rebuilt, and no number in it is ever another one."""
    index = RunIndex(folder, run="a")
    for step in (1, 2, 3):
        index.add(write_small(folder, step, trainer={"run_id": "a"}))
    entries, whole = index.entries(), index.path.read_bytes()

    def changed(numbers: random.Random) -> None:
        index.path.write_bytes(mutated_bytes(whole, numbers))
        assert RunIndex(folder, run="a").entries() == entries

    def strange(numbers: random.Random) -> None:
        data = mutated_json(whole, numbers)
        index.path.write_bytes(resealed(data.decode()) if numbers.random() < 0.7 else data)
        noticed(lambda: RunIndex(folder, run="a").best("loss"))

    yield from (changed, strange)
    index.path.write_bytes(whole)


def pickles(folder: Path) -> Iterator[Case]:
    """Files of torch.save, in both formats: their bytes, and the pickles in them."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    trained(net, optimizer)
    tree = lightning_dict(net, [optimizer], extra={"path": Path("a"), "sets": [{1, 2}, frozenset("a")]})
    new, former, target = folder / "new.pt", folder / "former.pt", folder / "changed.pt"
    torch.save(tree, new)
    torch.save(tree, former, _use_new_zipfile_serialization=False)

    def bytes_changed(numbers: random.Random) -> None:
        target.write_bytes(mutated_bytes(numbers.choice([new, former]).read_bytes(), numbers))
        read(numbers)

    def pickle_changed(numbers: random.Random) -> None:
        with zipfile.ZipFile(new) as archive, zipfile.ZipFile(target, "w") as changed:
            for name in archive.namelist():
                data = archive.read(name)
                changed.writestr(name, mutated_pickle(data, numbers) if name.endswith("data.pkl") else data)
        read(numbers)

    def former_changed(numbers: random.Random) -> None:
        whole = former.read_bytes()
        head = numbers.randrange(200, len(whole))
        target.write_bytes(mutated_pickle(whole[:head], numbers) + whole[head:])
        read(numbers)

    def read(numbers: random.Random) -> None:
        noticed(lambda: read_torch_file(target, mapped=numbers.random() < 0.5))
        noticed(lambda: read_weights(target))
        made = folder / "converted"
        noticed(lambda: convert_checkpoint(target, made, ConvertOptions(drop_unknown=True)))
        shutil.rmtree(made, ignore_errors=True)

    yield from (bytes_changed, pickle_changed, former_changed)


KINDS: dict[str, Callable[[Path], Iterator[Case]]] = {
    "checkpoints": checkpoints, "forged": forged, "indexes": indexes, "pickles": pickles,
}  # fmt: skip


def forbid_calls() -> None:
    """End this process when anything is unpickled or started from here on: no file may bring that about."""

    def hook(event: str, arguments: Any) -> None:
        if event.startswith(_FORBIDDEN):
            print(f"a file made this process call {event} {arguments!r}", flush=True)
            os._exit(3)

    sys.addaudithook(hook)


def limit_memory() -> None:
    """Have allocations fail that would take the process far beyond what it has now."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(kind: str, first: int, count: int) -> None:
    """Read `count` changed files of a kind; the numbers from `first` on say how each is changed."""
    warnings.simplefilter("ignore")
    os.fsync = lambda _: None  # type: ignore[assignment]  # thousands of files are written
    with tempfile.TemporaryDirectory() as folder:
        cases = list(KINDS[kind](Path(folder)))
        assert same(pickle.loads(pickle.dumps(1)), 1)  # what these import on first use is there before it is forbidden
        json.loads("{}")
        forbid_calls()
        limit_memory()
        for seed in range(first, first + count):
            signal.alarm(_SECONDS)
            try:
                cases[seed % len(cases)](random.Random(seed))
            except BaseException:  # noqa: BLE001  # whatever it is, it is told with its number
                print(f"{kind} {seed}:", flush=True)
                traceback.print_exc(file=sys.stdout)
                sys.exit(1)
            signal.alarm(0)
    print(f"{count} files of {kind} read")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
