"""The remedies of `trainwright profile --apply`: changes of a configuration that may save time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from trainwright.checkpoint.disk.low_priority_thread import usable_cores

# Largest relative differences of losses: for remedies with the same arithmetic, and for those with fewer digits.
_EXACT = 1e-3
_ROUNDED = 5e-2
_MOST_WORKERS = 32


# Each of these returns the value to try after the current value, or None if there is none.


def _turned_on(value: object) -> Any:
    return None if value else True


def _doubled(default: int) -> Callable[[int | None], int]:
    """Return a function that doubles a value. `default` replaces a value that is not set."""
    return lambda value: 2 * (value or default)


def _more_workers(workers: int | None) -> int | None:
    workers = workers or 1  # 0, 1 and no value are followed by 2
    return 2 * workers if workers < _MOST_WORKERS else None


def _compiled(value: object) -> Any:
    return True if value in (None, False, "regional") else None


def _bf16(precision: object) -> str | None:
    return "bf16-mixed" if precision in (None, 32, "32", "32-true") else None


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of one argument of the configuration.

    Attributes:
        section: `trainer`, `task` or `data`; `environment` for a variable, which a configuration cannot set.
        argument: the argument's name. In `task` and `data`, arguments of nested classes are found, too.
        following: function that returns the value to try after the current value, or None if there is none. Default:
            True follows a value that is not set or False.
        tolerance: largest relative difference of losses. Default: 1e-3. None does not compare losses. Such a remedy
            changes training, and is only proposed unless `--apply` names it.
        climbs: after a gain, also try the next value. Default: False.
        needs: another argument of the section, which must be set. Default: an empty text, which is none.
    """

    section: str
    argument: str
    following: Callable[[Any], Any] = _turned_on
    tolerance: float | None = _EXACT
    climbs: bool = False
    needs: str = ""


class Change(NamedTuple):
    """Overrides to try: `["data.num_workers=2"]`.

    Attributes:
        words: the overrides. Those of `threads` are alternatives, all others are tried together.
        sizes: batch sizes before and after, in samples. `(1, 1)` for changes that keep the batch size.
    """

    words: list[str]
    sizes: tuple[int, int] = (1, 1)


# Tried in this order, each together with the remedies kept so far. `regional` comes before `compile`, which also
# replaces the value "regional". `batch_size` is last, because it changes training.
REMEDIES = {
    "workers": Remedy("data", "num_workers", _more_workers, climbs=True),
    # 2 is the DataLoader's own prefetch_factor with workers, 25 is DDP's own bucket_cap_mb.
    "prefetch": Remedy("data", "prefetch_factor", _doubled(2), climbs=True, needs="num_workers"),
    "persistent": Remedy("data", "persistent_workers", needs="num_workers"),
    "pin_memory": Remedy("data", "pin_memory"),
    "fused": Remedy("task", "fused"),
    "foreach": Remedy("task", "foreach"),
    "channels_last": Remedy("task", "channels_last"),
    "buckets": Remedy("trainer", "strategy.init_args.bucket_cap_mb", _doubled(25), climbs=True),
    "regional": Remedy("trainer", "compile", lambda value: None if value else "regional"),
    "compile": Remedy("trainer", "compile", _compiled),
    "bf16": Remedy("trainer", "precision", _bf16, _ROUNDED),
    "threads": Remedy("environment", "OMP_NUM_THREADS"),
    "batch_size": Remedy("data", "batch_size", lambda size: 2 * size if size else None, None, climbs=True),
}


def arguments(config: Mapping[str, Any], remedy: Remedy) -> dict[str, Any]:
    """Return the dotted keys and values of a remedy's argument in a configuration with all defaults."""
    nested = remedy.section != "trainer"
    values: dict[str, Any] = {}
    for key, value in _items(config.get(remedy.section)):
        if key == remedy.argument or (nested and key.endswith(f".{remedy.argument}")):
            values[f"{remedy.section}.{key}"] = value
    return values


def _items(node: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted key and value of nested mappings. A mapping is yielded, too, before its own keys."""
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        yield f"{prefix}{key}", value
        yield from _items(value, f"{prefix}{key}.")


def change(config: Mapping[str, Any], name: str) -> Change | str:
    """Return the next change of a remedy, or the reason, as text, why it cannot be tried.

    Args:
        config: the configuration with all defaults and the kept overrides.
        name: a key of `REMEDIES`.
    """
    remedy = REMEDIES[name]
    if name == "threads":
        return _thread_changes(remedy.argument)
    current = arguments(config, remedy)
    if not current:
        return f"not tried: {remedy.section} has no argument {remedy.argument.rpartition('.')[2]}"
    if name == "pin_memory" and not torch.cuda.is_available():
        return "not tried: this machine has no GPU"
    if remedy.needs and not any(arguments(config, Remedy(remedy.section, remedy.needs)).values()):
        return f"not tried: {remedy.needs} is not set"
    following: dict[str, Any] = {}
    for key, value in current.items():
        next_value = remedy.following(value)
        if next_value is not None:
            following[key] = next_value
    if not following:
        return f"not tried: it is {next(iter(current.values()))} already"
    # Overrides are YAML. JSON writes true for True; a text needs no quotes.
    words = [f"{key}={json.dumps(value).strip(chr(34))}" for key, value in following.items()]
    if name != "batch_size":
        return Change(words)
    # Several batch sizes, such as those of a loader for each stage, are doubled together: the first one is enough.
    key, size = next(iter(following.items()))
    return Change(words, (current[key], size))


def _thread_changes(variable: str) -> Change | str:
    """Return half and double of the current number of threads as alternatives."""
    threads = torch.get_num_threads()
    cores = usable_cores()
    words = [f"{variable}={number}" for number in (threads // 2, 2 * threads) if 1 <= number <= cores]
    if not words:
        return f"not tried: {threads} of {cores} cores have no half and no double"
    return Change(words)
