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
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checkpoint.cutting import spans, write_in_pieces
from tests.checkpoint.every_kind import every_kind
from tests.checkpoint.resealing import reseal, resealed
from tests.checkpoint.snapshots import files_of, same, write_small
from trainwright.checkpoint import check_checkpoint, newest_valid, read_checkpoint, write_checkpoint
from trainwright.core.errors import CheckpointError

_MEMORY_BYTES = 3 * 2**30  # beyond what the process has when it begins
_SECONDS = 30  # for one file
_FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "os.fork")
_STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, 2**64, 10**30, 1.5, 1e308, "", "a/b", "../x", "/etc", "\ud800", "\0", "nan", "x" * 5000,
    [], {}, [[[[[[]]]]]], [0] * 100,
    {"$": "tensor", "v": "x"}, {"$": "ndarray", "dtype": "<f8", "shape": [2**40]},
    {"$": "ndarray", "dtype": "(9,9)f4,O", "shape": [2]}, {"$": "npscalar", "dtype": "|V99999", "v": ""},
    {"$": "datetime", "v": "2026-01-01", "fold": 0, "zone": "../Europe"}, {"$": "device", "v": "cuda:9999999999"},
    {"$": "size", "v": [2**70]}, {"$": "timedelta", "v": [1e300]}, {"$": "set", "v": [[1]]}, {"$": "int", "v": "0x"},
    {"$": "dict", "v": [[[1], 2]]}, {"$": "dtype", "v": "save"}, {"$": "duration", "v": [1, "eons"]}, {"$": []},
    {"$": "pieces", "v": "w", "shape": [2**62, 2**62], "dtype": "F32"},
)  # fmt: skip

Case = Callable[[random.Random], None]


def _mutated_bytes(data: bytes, numbers: random.Random) -> bytes:
    """Return `data` with some of it changed, cut off, left out or put in; never equal to it."""
    while True:
        place = numbers.randrange(len(data) + 1)
        end = place + numbers.choice([1, 1, 4, 8, 64])
        new = numbers.choice([
            data[:place],
            data[:place] + data[end:],
            data[:place] + numbers.randbytes(end - place) + data[end:],
            data[:place] + data[place:end] * 50 + data[end:],
            data[:place] + numbers.choice([0, 1, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little") + data[place + 8 :],
        ])  # fmt: skip
        if new != data:
            return new


def _mutated_json(data: bytes, numbers: random.Random) -> bytes:
    """Return JSON that is as well-formed as before, with some values changed, left out, or put in others' places."""
    tree = json.loads(data)
    for _ in range(numbers.choice([1, 1, 1, 2, 4])):
        places = list(_places(tree))
        if not places:
            return b"[]"
        container, key = numbers.choice(places)
        other, place = numbers.choice(places)
        kind = numbers.randrange(6)
        if kind == 0:
            del container[key]
        elif kind == 1:
            container[key] = json.loads(json.dumps(other[place]))
        elif kind == 2:
            for _ in range(numbers.choice([1, 10, 180])):
                container[key] = [container[key]]
        else:
            container[key] = json.loads(json.dumps(numbers.choice(_STRANGE)))
    return json.dumps(tree).encode()


def _places(tree: Any) -> Any:
    """Yield each value's container and its key or index there."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _places(value)


def noticed(read: Callable[[], Any]) -> bool:
    """Call a reader; tell whether it raised a `CheckpointError`. Anything else passes through and is a failure."""
    try:
        read()
    except CheckpointError as error:
        if "MemoryError" in str(error) or "not enough memory" in str(error):
            raise AssertionError(f"memory ran out: {error}") from error
        return True
    return False


def _runs(folder: Path) -> list[Path]:
    runs = [folder / "whole", folder / "pieces", folder / "small"]
    for run in runs:
        write_small(run, 1, "older", trainer={"run_id": "a"})
    write_checkpoint(runs[0] / "newer", every_kind())
    write_in_pieces(runs[1] / "newer", every_kind(), cut=spans)
    write_small(runs[2], 2, "newer")
    return runs


def forged(folder: Path) -> Case:
    """Changes with a seal that fits: what passes the check can be read, and what does not gives way."""
    runs = _runs(folder)

    def case(numbers: random.Random) -> None:
        run = numbers.choice(runs)
        path = run / "newer"
        file = numbers.choice(files_of(path))
        whole, manifest = file.read_bytes(), (path / "manifest.json").read_bytes()
        data = _mutated_json(whole, numbers) if file.suffix == ".json" else _mutated_bytes(whole, numbers)
        if file.name == "manifest.json":
            file.write_bytes(resealed(data.decode()))
        else:
            file.write_bytes(data)
            reseal(path)
        refused = noticed(lambda: check_checkpoint(path))
        again = noticed(lambda: read_checkpoint(path, verify=False, copy_model=False))
        assert again <= refused, file
        found = newest_valid(run, kind="full", parts=("trainer", "model", "optimizer", "rng"))
        assert found in (path, run / "older"), file
        assert refused or not (found == path and noticed(lambda: read_checkpoint(path))), file
        file.write_bytes(whole)
        (path / "manifest.json").write_bytes(manifest)

    return case


KINDS: dict[str, Callable[[Path], Case]] = {"forged": forged}


def _end_on_calls(event: str, arguments: Any) -> None:
    """End this process when anything is unpickled or started: no file may bring that about."""
    if event.startswith(_FORBIDDEN):
        print(f"a file made this process call {event} {arguments!r}", flush=True)
        os._exit(3)


def _limit_memory() -> None:
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
        case = KINDS[kind](Path(folder))
        assert same(pickle.loads(pickle.dumps(1)), 1)  # what these import on first use is there before it is forbidden
        sys.addaudithook(_end_on_calls)
        _limit_memory()
        for seed in range(first, first + count):
            signal.alarm(_SECONDS)
            try:
                case(random.Random(seed))
            except BaseException:  # noqa: BLE001  # whatever it is, it is told with its number
                print(f"{kind} {seed}:", flush=True)
                traceback.print_exc(file=sys.stdout)
                sys.exit(1)
            signal.alarm(0)
    print(f"{count} files of {kind} read")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
