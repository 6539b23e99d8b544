"""Merge the chrome traces of several ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def merge_traces(paths: Mapping[int, Path | list[Path]], target: Path) -> None:
    """Write one chrome trace with the events of all ranks, in which each rank has lanes of its own.

    Args:
        paths: Rank → the file or files that `torch.profiler` exported on it.
        target: The file to write.
    """
    events: list[dict[str, Any]] = []
    first: int | None = None
    lanes: dict[tuple[int, Any], int] = {}
    for rank in sorted(paths):
        given = paths[rank]
        for path in given if isinstance(given, list) else [given]:
            trace = json.loads(path.read_text(encoding="utf-8"))
            base = int(trace.get("baseTimeNanoseconds", 0))
            first = base if first is None else first
            shift = (base - first) / 1000  # times of events are microseconds since the base
            for event in trace["traceEvents"]:
                lane = lanes.setdefault((rank, event.get("pid")), len(lanes))
                event["pid"] = lane
                if event.get("ph") != "M" and "ts" in event:
                    event["ts"] += shift
                if "id" in event:
                    event["id"] = f"{rank}-{event['id']}"
                if event.get("name") == "process_name":
                    event["args"] = {"name": f"rank {rank}: {event['args'].get('name', '')}"}
                elif event.get("name") == "process_sort_index":
                    event["args"] = {"sort_index": lane}
                events.append(event)
    merged = {"schemaVersion": 1, "baseTimeNanoseconds": first or 0, "displayTimeUnit": "ms", "traceEvents": events}
    target.write_text(json.dumps(merged), encoding="utf-8")
