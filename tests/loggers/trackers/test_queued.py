"""The queue between a logger and a backend that may be slow, fail or hang."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.loggers.logger import RunInfo
from trainwright.loggers.trackers.queued import QueuedLogger


class Stub(QueuedLogger):
    def __init__(self, *, delay: float = 0.0, fails: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[Any] = []
        self.delay, self.fails = delay, fails
        self.last: dict[str, int] = {}

    def _open(self, run: RunInfo) -> None:
        self._id = self._id or "first"

    def _last_steps(self) -> dict[str, int]:
        return self.last

    def _write_metrics(self, metrics: dict[str, float], step: int, seconds: float) -> None:
        time.sleep(self.delay)
        if self.fails:
            raise OSError("the server is away")
        self.calls.append((step, metrics))

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        self.calls.append(params)

    def _write_checkpoint(self, path: Path, aliases: tuple[str, ...]) -> None:
        self.calls.append((path.name, aliases))

    def _close(self, status: Any) -> None:
        self.calls.append(status)


class Images(Stub):
    """A backend that also has images, texts and tables."""

    def _write_image(self, key: str, pixels: Any, step: int) -> None:
        self.calls.append((key, pixels, step))

    def _write_text(self, key: str, text: str, step: int) -> None:
        self.calls.append((key, text, step))


def _started(logger: Any, folder: Path) -> Any:
    logger.start(RunInfo(folder))
    return logger


def test_calls_are_written_in_order_and_then_the_run_is_closed(tmp_path: Path) -> None:
    logger = _started(Stub(prefix="a"), tmp_path)
    thread = next(thread for thread in threading.enumerate() if thread is logger._worker)
    logger.log_hyperparams({"net": {"sizes": (1, 2)}})
    for step in range(100):
        logger.log_metrics({"loss": torch.tensor(step)}, step)
    logger.flush()
    logger.finish("failed")
    logger.finish("failed")
    assert logger.calls[0] == {"net": {"sizes": [1, 2]}}
    assert logger.calls[1:-1] == [(step, {"a-loss": float(step)}) for step in range(100)]
    assert logger.calls[-1] == "failed"
    assert not thread.is_alive()


def test_values_that_change_after_the_call_are_written_as_they_were(tmp_path: Path) -> None:
    logger = _started(Images(delay=0.2), tmp_path)
    values = {"loss": torch.tensor(1.0)}
    array = np.zeros((2, 2, 3), dtype=np.uint8)
    figure = Figure(figsize=(1, 1))
    axes = figure.subplots()
    logger.log_metrics(values, 0)  # the thread is busy with it
    logger.log_metrics(values, 1)
    logger.log_image("array", array, 1)
    logger.log_figure("figure", figure, 1)
    logger.log_table("table", ["x"], [[1]], step=1)
    values["loss"].fill_(5.0)
    array.fill(9)
    axes.plot([1, 2])
    figure.clear()
    logger.finish("success")
    assert logger.calls[1] == (1, {"loss": 1.0})
    assert logger.calls[2][1].max() == 0
    drawn = logger.calls[3][1]
    assert drawn.shape == (100, 100, 3)
    assert drawn.min() < 100  # the frame of the axes
    assert logger.calls[4] == ("table", "| x |\n| --- |\n| 1 |", 1)


def test_a_full_queue_drops_new_calls_and_the_end_counts_them(tmp_path: Path) -> None:
    logger = _started(Stub(delay=0.3), tmp_path)
    logger.capacity = 2
    logger.log_metrics({"loss": 0.0}, 0)
    time.sleep(0.1)  # the thread has taken it
    for step in (1, 2):
        logger.log_metrics({"loss": 0.0}, step)
    with pytest.warns(TrainwrightWarning, match="2 calls wait for the backend, and further ones are dropped"):
        logger.log_metrics({"loss": 0.0}, 3)
    for step in (4, 5):  # no further warning
        logger.log_metrics({"loss": 0.0}, step)
    logger.delay = 0.0
    with pytest.warns(TrainwrightWarning, match="3 calls are lost: the queue was full for 3, and 0 were not written"):
        logger.finish("success")
    assert [call[0] for call in logger.calls[:-1]] == [0, 1, 2]


class Away(Stub):
    """A backend that answers when the event is set."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.answer = threading.Event()
        self.start_patience = 0.1

    def _open(self, run: RunInfo) -> None:
        assert self.answer.wait(20)
        if self.fails:
            raise OSError("the server is away")
        super()._open(run)


def test_a_start_does_not_wait_for_a_server_and_nothing_is_lost_if_it_answers(tmp_path: Path) -> None:
    logger = Away()
    begin = time.perf_counter()
    with pytest.warns(TrainwrightWarning, match=r"has not answered within 0\.1 s\. Training continues"):
        _started(logger, tmp_path)
    assert time.perf_counter() - begin < 10  # the answer would come after 20 s
    assert logger.version is None
    with pytest.warns(TrainwrightWarning, match="is not open yet"):
        logger.experiment.anything()
    logger.log_metrics({"loss": 1.0}, 0)
    logger.answer.set()
    logger.finish("success")
    assert logger.calls == [(0, {"loss": 1.0}), "success"]
    assert logger.version == "first"


def test_a_resumed_run_skips_the_steps_that_its_history_contains(tmp_path: Path) -> None:
    first = _started(Stub(), tmp_path)
    state = first.state_dict()
    first.finish("failed")
    second = Stub()
    second.last = {"loss": 3}
    second.load_state_dict(state)
    _started(second, tmp_path)
    for step in range(2, 6):
        second.log_metrics({"loss": 0.0, "new": 1.0}, step)
    second.finish("success")
    _started(second, tmp_path)  # a later stage of the same run
    second.log_metrics({"loss": 2.0}, 3)
    second.finish("success")
    steps = [(step, sorted(values)) for step, values in (call for call in second.calls if isinstance(call, tuple))]
    assert steps == [(2, ["new"]), (3, ["new"]), (4, ["loss", "new"]), (5, ["loss", "new"]), (3, ["loss"])]


def test_checkpoints_are_uploaded_as_requested(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for log_model, expected in ((False, []), (True, ["b"]), ("all", ["a", "b"])):
        logger = _started(Stub(log_model=log_model), tmp_path)
        for name in ("a", "b", "deleted"):
            if name != "deleted" or log_model == "all":
                logger.log_checkpoint(tmp_path / name, aliases=("last",))
        logger.finish("success")
        assert logger.calls[:-1] == [(name, ("last",)) for name in expected]
    with pytest.raises(ConfigurationError, match="expected True, False or 'all'"):
        Stub(log_model="some")  # type: ignore[arg-type]  # it is wrong on purpose


def test_what_a_backend_lacks_is_a_warning(tmp_path: Path) -> None:
    logger = _started(Stub(), tmp_path)
    with pytest.warns(TrainwrightWarning, match="Stub cannot log images"):
        logger.log_image("image", [[0]], 0)
    with pytest.warns(TrainwrightWarning, match="Stub cannot log figures"):
        logger.log_figure("figure", None, 0)
    with pytest.warns(TrainwrightWarning, match="Stub cannot log text"):
        logger.log_text("text", "a", 0)
    logger.finish("success")


def test_an_error_is_raised_by_the_next_call_and_a_start_tries_again(tmp_path: Path) -> None:
    logger = _started(Stub(fails=True), tmp_path)
    logger.log_metrics({"loss": 0.0}, 0)
    time.sleep(0.2)
    for _ in range(2):
        with pytest.raises(OSError, match="the server is away"):
            logger.log_metrics({"loss": 0.0}, 1)
    logger.fails = False
    _started(logger, tmp_path)
    logger.log_metrics({"loss": 0.0}, 2)
    logger.finish("success")
    assert logger.calls == ["interrupted", (2, {"loss": 0.0}), "success"]
