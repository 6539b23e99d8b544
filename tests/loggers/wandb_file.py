"""Read what W&B has written offline: LevelDB log blocks of protocol buffers, for which no reader is shipped."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 32 * 1024
_FILE_HEADER_BYTES = 7
_RECORD_HEADER = struct.Struct("<IHB")  # checksum, length, kind: 1 whole, 2 first, 3 middle, 4 last


def payloads(path: Path) -> Iterator[bytes]:
    """Yield the raw records of a `.wandb` file."""
    data = path.read_bytes()
    assert data.startswith(b":W&B"), data[:8]
    at, parts = _FILE_HEADER_BYTES, b""
    while at + _RECORD_HEADER.size <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _RECORD_HEADER.size:
            at += left
            continue
        _, length, kind = _RECORD_HEADER.unpack_from(data, at)
        at += _RECORD_HEADER.size
        parts += data[at : at + length]
        at += length
        if kind in (1, 4):
            yield parts
            parts = b""


def read_run(folder: Path | str, *, timeout_s: float = 20.0) -> dict[str, Any]:
    """Return `id`, `project`, `name`, `config`, `history` (a list of dicts) and `exit_code` of the newest run below.

    W&B's own process writes the file, and may still be at it when `finish` has returned: wait for the last record.
    """
    path = max(Path(folder).rglob("*.wandb"), key=lambda found: found.stat().st_mtime)
    deadline_s = time.monotonic() + timeout_s
    while (run := _read(path))["exit_code"] is None and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return run


def _read(path: Path) -> dict[str, Any]:
    from wandb.proto import wandb_internal_pb2

    run: dict[str, Any] = {"history": [], "config": {}, "exit_code": None}
    for payload in payloads(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run |= {"id": record.run.run_id, "project": record.run.project, "name": record.run.display_name}
            updates = record.run.config.update
        elif kind == "config":
            updates = record.config.update
        else:
            updates = []
        for item in updates:
            run["config"][item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        if kind == "history":
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            run["history"].append(row)
        elif kind == "exit":
            run["exit_code"] = record.exit.exit_code
    return run
