"""Hashing a checkpoint's files with all ranks, while one of them decides which checkpoint to load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainwright.checkpoint.disk.hashing import hash_files
from trainwright.core.errors import CheckpointError
from trainwright.processes.process_group import Processes


class SharedHashing:
    """Has every rank hash a share of the files that rank 0 asks about; the results come to rank 0.

    Rank 0 calls `hash_files` as often as it likes and then `dismiss`; the others meanwhile are in `serve`.

    Args:
        processes: of this run.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def hash_files(self, paths: Sequence[Path]) -> list[str]:
        """Return the hash of each of some files, on rank 0. Collective with the others' `serve`.

        Raises:
            CheckpointError: a rank cannot read its share; it is named.
        """
        shares = fair_shares([path.stat().st_size for path in paths], self._processes.world_size)
        self._processes.broadcast_object([[str(paths[i]) for i in share] for share in shares])
        answers = self._processes.gather_object(_hash_share([paths[i] for i in shares[0]]))
        found = [""] * len(paths)
        for rank, (share, answer) in enumerate(zip(shares, answers, strict=True)):
            if isinstance(answer, str):
                raise CheckpointError(f"rank {rank} cannot read a file of the checkpoint that rank 0 sees: {answer}")
            for i, value in zip(share, answer, strict=True):
                found[i] = value
        return found

    def serve(self) -> None:
        """Hash shares until rank 0 needs no more, on the other ranks. Collective; blocks."""
        while (shares := self._processes.broadcast_object(None)) is not None:
            share = [Path(name) for name in shares[self._processes.rank]]
            self._processes.gather_object(_hash_share(share))

    def dismiss(self) -> None:
        """Tell the other ranks that rank 0 has decided. Collective with the others' `serve`."""
        self._processes.broadcast_object(None)


def fair_shares(sizes: Sequence[int], num: int) -> list[list[int]]:
    """Deal indices of files to `num` ranks so that each has about as many bytes: the largest go first."""
    shares: list[list[int]] = [[] for _ in range(num)]
    loads = [0] * num
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        least = loads.index(min(loads))
        shares[least].append(i)
        loads[least] += sizes[i]
    return shares


def _hash_share(paths: Sequence[Path]) -> list[str] | str:
    try:
        return hash_files(paths)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
