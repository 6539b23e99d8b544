"""The benchmark of one GPU runs to its end on a CPU, with tiny sizes, so that an hour with a GPU is not lost to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.slow
def test_every_part_has_figures(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--tiny", "--minutes", "2", "--output", "figures"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], cwd=tmp_path, check=False, timeout=540, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    written = json.loads((tmp_path / "figures" / "figures.json").read_text())
    parts = written["parts"]
    assert list(parts) == [
        "waits", "overhead", "small", "graphs", "saves", "offload", "larger", "fp8", "tuned", "strategies",
    ]  # fmt: skip
    for name, part in parts.items():
        assert part["problem"] is None, (name, part["problem"])
        assert part["figures"], name
        assert part["rows"], name
    waits = parts["waits"]["figures"]
    assert [waits["float32, waits"], waits["bf16-mixed, waits"]] == [0, 0]
    page = (tmp_path / "figures" / "figures.md").read_text()
    assert "## Weights on the host" in page
    assert "| slowest step over the median step, with saves |" in page


def test_a_part_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])
    import gpu

    def fail(part: object, device: object, sizes: object, seconds: float) -> None:
        raise RuntimeError("no kernel")

    def skip(part: object, device: object, sizes: object, seconds: float) -> None:
        raise gpu.Skipped("too old")

    monkeypatch.setattr(gpu, "PARTS", {"one": (fail, 1), "two": (skip, 1), "waits": gpu.PARTS["waits"]})
    found = gpu.run(["one", "two", "waits"], gpu.Device("cpu"), gpu.TINY, minutes=1, output=tmp_path)
    assert found["one"].problem == "failed: RuntimeError: no kernel"
    assert found["two"].problem == "skipped: too old"
    assert found["waits"].problem is None
    assert set(json.loads((tmp_path / "figures.json").read_text())["parts"]) == {"one", "two", "waits"}


def test_without_time_left_a_part_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])
    import gpu

    found = gpu.run(["waits"], gpu.Device("cpu"), gpu.TINY, minutes=0, output=tmp_path)
    assert found["waits"].problem == "skipped: no time is left"
