"""A checkpoint that was stored once resumes as it did then: in the middle of an epoch, under every strategy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.pinned.stored import FOLDER, STRATEGIES, continued, processor

_ALONE = [name for name, (_, processes) in STRATEGIES.items() if processes == 1]
_SEVERAL = [
    pytest.param(name, marks=[pytest.mark.distributed] if name == "fsdp" else [pytest.mark.exhaustive])
    for name in STRATEGIES
    if name not in _ALONE
]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*_ALONE, *_SEVERAL])
def test_a_stored_checkpoint_goes_on_as_it_did(name: str, tmp_path: Path) -> None:
    stored = json.loads((FOLDER / name / "next.json").read_text())
    wanted = [float.fromhex(loss) for loss in stored["losses"]]
    found = continued(name, Path(shutil.copytree(FOLDER / name / "checkpoint", tmp_path / "checkpoint")))
    if stored["processor"] == processor():
        assert found == wanted
    else:  # another processor sums in another order
        assert found == pytest.approx(wanted, rel=1e-5)
    assert len({round(loss, 4) for loss in wanted}) == len(wanted)
