"""Compare the calls of the ranks before an exchange: otherwise torch's backends crash, hang or mix up values."""

from __future__ import annotations

import hashlib
from typing import Any

from trainwright.core.errors import ConfigurationError
from trainwright.processes.process_group import Processes


def same_on_all_ranks(processes: Processes, call: object) -> bool:
    """Return whether every rank is about to make the same call. Collective, on the host: one number from each rank."""
    digest = hashlib.blake2b(repr(call).encode(), digest_size=8).digest()
    told = processes.gather_integers([int.from_bytes(digest, "big", signed=True)])
    return all(row == told[0] for row in told)


def compare_calls(processes: Processes, operation: str, arguments: object, hint: str) -> None:
    """Raise on every rank unless all are about to make the same call. Collective, on the host."""
    if not same_on_all_ranks(processes, (operation, arguments)):
        raise different_calls(processes.gather_object((operation, arguments)), hint)


def different_calls(calls: list[Any], hint: str) -> ConfigurationError:
    """Return the error for calls that do not match."""
    shown = "\n".join(f"  process {rank}: {name} of {what}" for rank, (name, what) in enumerate(calls))
    return ConfigurationError(
        f"the processes do not make the same call with tensors of the same shapes and dtypes:\n{shown}\n{hint}"
    )
