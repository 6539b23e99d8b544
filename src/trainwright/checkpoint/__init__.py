"""The on-disk format of checkpoints: codec, writer, reader, verification and retention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwright.core.registry import import_object

if TYPE_CHECKING:
    from trainwright.checkpoint.async_writer import AsyncWriter
    from trainwright.checkpoint.codec import decode, encode
    from trainwright.checkpoint.crew import Crew
    from trainwright.checkpoint.durable import fault_point, set_fault_hook
    from trainwright.checkpoint.layout import FileEntry, Manifest, Part
    from trainwright.checkpoint.load_task import load_task_from_checkpoint
    from trainwright.checkpoint.manifests import FoundCheckpoint, find_checkpoints, read_manifest, verify
    from trainwright.checkpoint.model import load_plain_state, read_model, write_model
    from trainwright.checkpoint.newest import newest_valid, whole_checkpoint
    from trainwright.checkpoint.optimizer import load_named_optimizer_state, named_optimizer_state
    from trainwright.checkpoint.piece_files import SavedTensor
    from trainwright.checkpoint.pieces import Box, Pieces, Region, Span
    from trainwright.checkpoint.reader import check_checkpoint, read_checkpoint
    from trainwright.checkpoint.retention import IndexEntry, RunIndex
    from trainwright.checkpoint.safetensors_io import read_safetensors, write_safetensors
    from trainwright.checkpoint.staging import clean_stale
    from trainwright.checkpoint.upgrade import FORMAT_VERSION, NewerFormatError
    from trainwright.checkpoint.writer import Contents, Draft, Snapshot, plan_share, write_checkpoint
    from trainwright.core.hidden_names import plain_name

_HOMES = {
    "AsyncWriter": "trainwright.checkpoint.async_writer",
    "Box": "trainwright.checkpoint.pieces",
    "check_checkpoint": "trainwright.checkpoint.reader",
    "clean_stale": "trainwright.checkpoint.staging",
    "Contents": "trainwright.checkpoint.writer",
    "Crew": "trainwright.checkpoint.crew",
    "decode": "trainwright.checkpoint.codec",
    "Draft": "trainwright.checkpoint.writer",
    "encode": "trainwright.checkpoint.codec",
    "fault_point": "trainwright.checkpoint.durable",
    "FileEntry": "trainwright.checkpoint.layout",
    "find_checkpoints": "trainwright.checkpoint.manifests",
    "FORMAT_VERSION": "trainwright.checkpoint.upgrade",
    "FoundCheckpoint": "trainwright.checkpoint.manifests",
    "IndexEntry": "trainwright.checkpoint.retention",
    "load_named_optimizer_state": "trainwright.checkpoint.optimizer",
    "load_plain_state": "trainwright.checkpoint.model",
    "load_task_from_checkpoint": "trainwright.checkpoint.load_task",
    "Manifest": "trainwright.checkpoint.layout",
    "named_optimizer_state": "trainwright.checkpoint.optimizer",
    "NewerFormatError": "trainwright.checkpoint.upgrade",
    "newest_valid": "trainwright.checkpoint.newest",
    "Part": "trainwright.checkpoint.layout",
    "Pieces": "trainwright.checkpoint.pieces",
    "plain_name": "trainwright.core.hidden_names",
    "plan_share": "trainwright.checkpoint.writer",
    "read_checkpoint": "trainwright.checkpoint.reader",
    "read_manifest": "trainwright.checkpoint.manifests",
    "read_model": "trainwright.checkpoint.model",
    "read_safetensors": "trainwright.checkpoint.safetensors_io",
    "Region": "trainwright.checkpoint.pieces",
    "RunIndex": "trainwright.checkpoint.retention",
    "SavedTensor": "trainwright.checkpoint.piece_files",
    "set_fault_hook": "trainwright.checkpoint.durable",
    "Snapshot": "trainwright.checkpoint.writer",
    "Span": "trainwright.checkpoint.pieces",
    "verify": "trainwright.checkpoint.manifests",
    "whole_checkpoint": "trainwright.checkpoint.newest",
    "write_checkpoint": "trainwright.checkpoint.writer",
    "write_model": "trainwright.checkpoint.model",
    "write_safetensors": "trainwright.checkpoint.safetensors_io",
}
__all__ = [
    "FORMAT_VERSION",
    "AsyncWriter",
    "Box",
    "Contents",
    "Crew",
    "Draft",
    "FileEntry",
    "FoundCheckpoint",
    "IndexEntry",
    "Manifest",
    "NewerFormatError",
    "Part",
    "Pieces",
    "Region",
    "RunIndex",
    "SavedTensor",
    "Snapshot",
    "Span",
    "check_checkpoint",
    "clean_stale",
    "decode",
    "encode",
    "fault_point",
    "find_checkpoints",
    "load_named_optimizer_state",
    "load_plain_state",
    "load_task_from_checkpoint",
    "named_optimizer_state",
    "newest_valid",
    "plain_name",
    "plan_share",
    "read_checkpoint",
    "read_manifest",
    "read_model",
    "read_safetensors",
    "set_fault_hook",
    "verify",
    "whole_checkpoint",
    "write_checkpoint",
    "write_model",
    "write_safetensors",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first touched: readers of weights need no writers."""
    if name in _HOMES:
        return import_object(f"{_HOMES[name]}:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
