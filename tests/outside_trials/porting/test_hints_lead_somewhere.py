"""P19: what an error tells the user to write instead can be written, and the docs promise nothing that is not there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from trainwright import TensorBoardLogger
from trainwright.core.errors import ConfigurationError

_DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("cores", [1, 8, "auto"])
def test_tpu_cores_lead_to_the_accelerator(cores: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        quiet_trainer(tpu_cores=cores)
    assert "accelerator='tpu'" in str(caught.value)
    if importlib.util.find_spec("torch_xla") is None:
        with pytest.raises(ConfigurationError, match=r"pip install torch==\S+ 'torch_xla\[tpu\]=="):
            quiet_trainer(accelerator="tpu")


def test_the_logger_that_own_loops_are_sent_to_logs_without_a_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    logger = TensorBoardLogger()
    logger.log_metrics({"loss": 1.0}, 0)
    logger.finish("success")
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_the_docs_promise_no_disjoint_models() -> None:
    said = " ".join(path.read_text() for path in _DOCS.glob("*.md"))
    assert not re.search(r"disjoint models", said)  # two engines of DeepSpeed side by side have no public way
