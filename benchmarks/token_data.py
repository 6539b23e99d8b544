"""Tokens per second that one worker reads in random order, and the time to open a file of 10¹⁰ tokens.

    python benchmarks/token_data.py

The file has 2 * 10⁸ tokens in documents of 1 to 2,000; a sample has 2,048.
"""

from __future__ import annotations

import struct
import tempfile
import time
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader

from trainwright.data import TokenDataset, TokenFileWriter

TOKENS, LENGTH, BATCH_SIZE, SAMPLES = 2 * 10**8, 2048, 16, 8192


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        generator = np.random.default_rng(0)
        with TokenFileWriter(Path(folder, "tokens"), 2**16) as writer:
            left = TOKENS
            while left > 0:
                size = min(left, int(generator.integers(1, 2000)))
                writer.add(generator.integers(0, 2**16, size))
                left -= size
        for documents in ("joined", "separate", "packed"):
            begin = time.perf_counter()
            data = TokenDataset(Path(folder, "tokens"), LENGTH, documents=documents)
            opened = time.perf_counter() - begin
            loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, num_workers=1)
            batches = iter(loader)
            next(batches)
            begin = time.perf_counter()
            for _ in range(SAMPLES // BATCH_SIZE):
                next(batches)
            rate = SAMPLES * LENGTH / (time.perf_counter() - begin)
            print(f"{documents:9} opened in {1e3 * opened:8.2f} ms, {rate / 1e6:6.2f} M tokens/s by one worker")
        print(f"10^10 tokens opened in {1e3 * _open_sparse(Path(folder)):.2f} ms")


def _open_sparse(folder: Path) -> float:
    num, length = 10**6, 10**4
    with (folder / "sparse.bin").open("wb") as stream:
        stream.truncate(2 * num * length)
    with (folder / "sparse.idx").open("wb") as stream:
        stream.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, num, num + 1))
        stream.write(np.full(num, length, dtype=np.int32).tobytes())
        stream.write((np.arange(num, dtype=np.int64) * 2 * length).tobytes())
        stream.write(np.arange(num + 1, dtype=np.int64).tobytes())
    seconds = []
    for _ in range(7):
        begin = time.perf_counter()
        TokenDataset(folder / "sparse", LENGTH, documents="separate")[123456]
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[3]


if __name__ == "__main__":
    main()
