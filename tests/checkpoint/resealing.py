"""Checkpoints that are sealed and yet not what the writer writes: as other programs, or forgers, would make them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from trainwright.checkpoint import FileEntry, Part, read_manifest
from trainwright.checkpoint.format.manifests import hash_file


def resealed(text: str) -> bytes:
    """Return the text of a manifest or an index with a seal that fits, as somebody who forges one would write it."""
    plain = re.sub(r'"seal": "\w+"', '"seal": "' + "0" * 32 + '"', text)
    return plain.replace("0" * 32, xxhash.xxh3_128_hexdigest(plain.encode())).encode()


def remove_part(checkpoint: Path, part: str) -> None:
    """Delete all files of a part; the manifest goes on naming them."""
    for file in read_manifest(checkpoint).parts[part].files:
        (checkpoint / file).unlink()


def reseal(checkpoint: Path) -> None:
    """Write the present sizes and hashes of all listed files into the manifest."""
    manifest = read_manifest(checkpoint)
    parts = {
        name: Part({
            file: FileEntry((checkpoint / file).stat().st_size, hash_file(checkpoint / file)) for file in part.files
        }, part.required)
        for name, part in manifest.parts.items()
    }  # fmt: skip
    (checkpoint / "manifest.json").write_bytes(dataclasses.replace(manifest, parts=parts).to_bytes())


def edit_trainer(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the object of trainer.json in place, and seal the checkpoint again."""
    file = checkpoint / "trainer.json"
    entries = json.loads(file.read_text())
    change(entries)
    file.write_text(json.dumps(entries))
    reseal(checkpoint)
