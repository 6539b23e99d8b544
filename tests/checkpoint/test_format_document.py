"""docs/checkpoint-format.md is enough to read a checkpoint: a reader made from it alone gets what ours gets."""

from __future__ import annotations

import datetime
import itertools
import pathlib
import re
import zoneinfo
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint import format_reader
from tests.checkpoint.cutting import Cut, spans, tiles, write_in_pieces
from tests.checkpoint.every_kind import every_kind
from tests.checkpoint.format_reader import Stored, Tagged
from tests.helpers.runs import quiet_trainer
from tests.helpers.sources import ROOT
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks.early_stopping import EarlyStopping
from trainwright.checkpoint import Snapshot, read_checkpoint, write_checkpoint
from trainwright.checkpoint.format import codec, safetensors_io
from trainwright.core.duration import Duration
from trainwright.core.state import TrainState

PAGE = ROOT / "docs" / "checkpoint-format.md"
_NAMES = safetensors_io._DTYPE_NAMES


def _stored(tensor: torch.Tensor) -> Stored:
    plain = tensor.detach().contiguous().reshape(-1)
    data = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return Stored(_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), data)


def described(value: Any) -> Any:
    """Return what the reader would give for `value`."""
    kind = type(value)
    if kind is torch.Tensor:
        return _stored(value)
    if kind in (list, tuple, set, frozenset):
        return kind(described(item) for item in value)
    if kind is dict:
        return {described(key): described(item) for key, item in value.items()}
    if kind in (OrderedDict, Counter, defaultdict):
        factory = getattr(value, "default_factory", None)
        return Tagged(kind.__name__, (None if factory is None else factory.__name__, described(dict(value))))
    if kind is datetime.datetime and isinstance(value.tzinfo, zoneinfo.ZoneInfo):
        return Tagged("zoned", (value.replace(tzinfo=None), value.tzinfo.key))
    if kind is np.ndarray:
        return Tagged("ndarray", (value.dtype.str, value.shape, value.tobytes()))
    if kind in (np.str_, np.bytes_):
        return Tagged("npstr", str(value)) if kind is np.str_ else Tagged("npbytes", bytes(value))
    if isinstance(value, np.generic):
        return Tagged("npscalar", (value.dtype.str, value.tobytes()))
    views: dict[type, Any] = {
        torch.Size: lambda size: ("size", tuple(size)),
        torch.dtype: lambda dtype: ("dtype", str(dtype).removeprefix("torch.")),
        torch.device: lambda device: ("device", str(device)),
        Duration: lambda duration: ("duration", (duration.value, duration.unit)),
        type(pathlib.Path()): lambda path: ("path", str(path)),
    }
    return Tagged(*views[kind](value)) if kind in views else value


def text(value: Any) -> str:
    """Return a value as text that tells -0.0 from 0.0 and takes NaN for NaN; sets have no order."""
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({sorted(map(text, value))})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{text(key)}: {text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}[{', '.join(map(text, value))}]"
    return repr(value)


def check_alike(folder: Path, snapshot: Snapshot) -> None:
    """Check that the reader made from the document finds a snapshot in a folder."""
    found = format_reader.read(folder)
    trainer = {"progress": snapshot.state, **snapshot.trainer}
    assert text(found["trainer"]) == text(described(trainer))
    assert text(found["optimizer"]) == text(described(snapshot.optimizers))
    assert text(found["rng"]) == text(described(snapshot.rng))
    model = dict(snapshot.model or {})
    assert found["model"].keys() == model.keys()
    for name, value in model.items():
        assert text(found["model"][name]) == text(described(value)), name
    manifest = found["manifest"]
    assert (manifest["step"], manifest["epoch"]) == (snapshot.state["step"], snapshot.state["epoch"])
    assert (manifest["kind"], manifest["topology"]) == (snapshot.kind, {"world_size": snapshot.world_size})
    assert text(manifest["metrics"]) == text(snapshot.metrics)


def test_the_reader_made_from_the_document_reads_every_kind_of_value(tmp_path: Path) -> None:
    check_alike(write_checkpoint(tmp_path / "a", every_kind(), max_shard_bytes=40), every_kind())


@pytest.mark.parametrize("cut", [tiles, spans])
def test_it_reads_a_checkpoint_in_pieces(tmp_path: Path, cut: Cut) -> None:
    check_alike(write_in_pieces(tmp_path / "a", every_kind(), 3, cut), every_kind())


class Saved(RegressionTask):
    def configure_optimizers(self) -> Any:
        self.save_hyperparameters({"width": 8})
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01, amsgrad=True)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


def test_it_reads_the_checkpoint_of_a_training(tmp_path: Path) -> None:
    trainer = quiet_trainer(max_epochs=1, callbacks=[EarlyStopping("train_loss")])
    trainer.fit(Saved(dropout=0.5), regression_loader(8, 2, shuffle=True))
    saved = trainer.save_checkpoint(tmp_path / "saved")
    snapshot = read_checkpoint(saved)
    check_alike(saved, snapshot)
    # Ranks that work on one batch together; a data module; a run that ended within a step; then hyper-parameters in
    # one argument, of enumerations, left out.
    of_some = {"data_ranks", "datamodule_hyper_parameters", "within_step"}
    of_some |= {f"hyper_parameters_{what}" for what in ("name", "enums", "left_out")}
    assert set(snapshot.trainer) | {"progress"} | of_some == set(_column("## trainer.json", 0))


def _column(after: str, number: int) -> list[str]:
    """Return the words in backticks of a column of the first table after some text of the page."""
    lines = PAGE.read_text().partition(after)[2].splitlines()
    table = itertools.takewhile(
        lambda line: line.startswith("|"), itertools.dropwhile(lambda line: not line.startswith("|"), lines)
    )
    return [word for row in list(table)[2:] for word in re.findall(r"`([^`]+)`", row.split("|")[number + 1])]


def test_the_tags_are_those_of_the_code() -> None:
    assert set(_column("<!-- tags", 0)) == set(codec._DECODERS)


def test_the_dtypes_are_those_of_the_code() -> None:
    assert set(_column("<!-- dtypes", 0)) == set(safetensors_io._DTYPE_NAMES.values())
    assert set(_column("the name of its true dtype:", 0)) == set(safetensors_io._SPECIAL)


def test_the_progress_is_that_of_the_code() -> None:
    assert _column("<!-- progress", 0) == list(TrainState().to_dict())
