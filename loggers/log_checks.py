"""Checks of calls of `log` that contradict earlier calls, or whose values would mix with others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainwright.core.errors import ConfigurationError
from trainwright.loggers.metric_options import MetricSettings
from trainwright.loggers.metric_slot import MetricSlot


def check_name(name: object) -> None:
    """Check the name of a metric.

    Raises:
        ConfigurationError: it is not a text, is empty, or contains the suffix of a loader.
    """
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"log got the name {name!r}; a metric's name is non-empty text.")
    if "/dataloader_idx_" in name:
        raise ConfigurationError(
            f"log got the name {name!r}; the index of the loader is appended with several loaders. Remove "
            "'/dataloader_idx_' from the name."
        )


def check_same_settings(slot: MetricSlot, settings: MetricSettings, stage: str) -> None:
    """Check that a later call of `log` in an epoch has the options of the first one.

    Raises:
        ConfigurationError: an option differs.
    """
    if slot.settings == settings:
        return
    changes: list[str] = []
    for field, first, now in zip(MetricSettings._fields, slot.settings, settings, strict=True):
        if first != now:
            changes.append(f"{field}={first!r} before, {now!r} now")
    raise ConfigurationError(
        f"log({slot.name!r}) was called with other options in the same {stage} epoch: {'; '.join(changes)} (defaults "
        "depend on the hook that calls log). Use the same options, or another name."
    )


def check_same_loader(slot: MetricSlot, loader: int | None) -> None:
    """Check that a later call of `log` in an epoch is for the loader of the first one. For numbers, not for objects.

    Raises:
        ConfigurationError: it is for another loader.
    """
    if loader != slot.loader:
        raise ConfigurationError(
            f"log({slot.name!r}, add_dataloader_idx=False) was called for dataloaders {slot.loader} and {loader}, "
            "whose values would mix. Give each loader's metric its own name, or remove add_dataloader_idx."
        )


def check_not_logged_in_stage(
    name: str, metric: Any, stage: str, other_stage: str, other_slots: Iterable[MetricSlot]
) -> None:
    """Check that no part of a metric object, which is logged in `stage`, is logged in `other_stage`, too.

    Raises:
        ConfigurationError: a part of it is.
    """
    # By id: torchmetrics hashes an object by its state too, so the hash changes with each update.
    part_ids = {id(part) for part in metric.modules()}
    for slot in other_slots:
        logged_parts = [] if slot.last_metric is None else slot.last_metric.modules()
        if any(id(part) in part_ids for part in logged_parts):
            raise ConfigurationError(
                f"log({name!r}): one metric object, or a part of it, is logged in the stages {other_stage!r} and "
                f"{stage!r}, so that its values would mix. Create one object for each stage."
            )


def check_logged_for_one_loader(name: str, metric: object, suffix: str, slots: Iterable[MetricSlot]) -> None:
    """Check that a metric object is not logged for another loader than that of `suffix`.

    Raises:
        ConfigurationError: it is.
    """
    for other in slots:
        if other.metric is metric and other.suffix != suffix:
            raise ConfigurationError(
                f"log({name!r}): one metric object is logged for several dataloaders, so that its values would "
                f"mix ({other.suffix} and {suffix}). Create one object for each loader, or pass "
                "add_dataloader_idx=False to aggregate over all of them."
            )
