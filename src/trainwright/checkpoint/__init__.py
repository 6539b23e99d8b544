"""The on-disk format of checkpoints: codec, writer, reader, verification and retention."""

from trainwright.checkpoint.async_writer import AsyncWriter
from trainwright.checkpoint.codec import decode, encode
from trainwright.checkpoint.crew import Crew
from trainwright.checkpoint.durable import fault_point, set_fault_hook
from trainwright.checkpoint.layout import FileEntry, Manifest, Part
from trainwright.checkpoint.load_task import load_task_from_checkpoint
from trainwright.checkpoint.model import load_plain_state, plain_name, read_model, write_model
from trainwright.checkpoint.optimizer import load_named_optimizer_state, named_optimizer_state
from trainwright.checkpoint.piece_files import SavedTensor
from trainwright.checkpoint.pieces import Box, Pieces, Region, Span
from trainwright.checkpoint.reader import (
    FoundCheckpoint,
    check_checkpoint,
    find_checkpoints,
    newest_valid,
    read_checkpoint,
    read_manifest,
    verify,
    whole_checkpoint,
)
from trainwright.checkpoint.retention import IndexEntry, RunIndex
from trainwright.checkpoint.safetensors_io import read_safetensors, write_safetensors
from trainwright.checkpoint.staging import clean_stale
from trainwright.checkpoint.upgrade import FORMAT_VERSION, NewerFormatError
from trainwright.checkpoint.writer import Contents, Draft, Snapshot, plan_share, write_checkpoint

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
