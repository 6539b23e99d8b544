"""Hashing of a checkpoint's files by all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainwright.checkpoint.format.manifests import hash_files
from trainwright.core.errors import CheckpointError
from trainwright.processes.process_group import Processes


class SharedHashing:
    """Distribution of file hashing over all ranks.

    Rank 0 calls `hash_files` any number of times and then `dismiss`. The other ranks call `serve`.

    Args:
        processes: the processes of the run.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def hash_files(self, paths: Sequence[Path]) -> list[str]:
        """Return the hash of each file. Collective: rank 0 calls this method while the other ranks run `serve`.

        Raises:
            CheckpointError: a rank cannot read one of its files.
        """
        shares = fair_shares([path.stat().st_size for path in paths], self._processes.world_size)
        self._processes.broadcast_object([[str(paths[i]) for i in share] for share in shares])
        answers = self._processes.gather_object(_hash_share([paths[i] for i in shares[0]]))
        found = [""] * len(paths)
        for rank, (share, answer) in enumerate(zip(shares, answers, strict=True)):
            if isinstance(answer, str):
                raise CheckpointError(
                    f"rank {rank} cannot read a checkpoint file that rank 0 can read: {answer}. Use a folder that all "
                    "ranks share."
                )
            for i, value in zip(share, answer, strict=True):
                found[i] = value
        return found

    def serve(self) -> None:
        """Hash the files that are assigned to this rank. Collective; blocks until rank 0 calls `dismiss`."""
        while (shares := self._processes.broadcast_object(None)) is not None:
            share = [Path(name) for name in shares[self._processes.rank]]
            self._processes.gather_object(_hash_share(share))

    def dismiss(self) -> None:
        """End `serve` on the other ranks. Collective: rank 0 calls this method while the other ranks run `serve`."""
        self._processes.broadcast_object(None)


def fair_shares(sizes: Sequence[int], num: int) -> list[list[int]]:
    """Divide file indices among `num` ranks so that each has about the same number of bytes."""
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
