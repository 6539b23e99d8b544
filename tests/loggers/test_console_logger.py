from __future__ import annotations

import io
from pathlib import Path

from trainwright.loggers import ConsoleLogger, RunInfo


def test_a_call_is_one_line(tmp_path: Path) -> None:
    out = io.StringIO()
    logger = ConsoleLogger(stream=out)
    logger.start(RunInfo(tmp_path))
    logger.log_hyperparams({"net": {"width": 8}})
    logger.log_metrics({"loss": 0.123456, "lr": 1e-5}, 120)
    logger.log_text("sample\x1b[2J", "hello", 120)
    assert out.getvalue() == (
        "hyper-parameters | net/width 8\nstep 120 | loss 0.1235 | lr 1e-05\nstep 120 | sample\\x1b[2J: hello\n"
    )
