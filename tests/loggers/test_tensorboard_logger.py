from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from tests.helpers.tasks import RegressionTask
from trainwright.loggers import RunInfo, TensorBoardLogger

pytest.importorskip("tensorboard")


def started(folder: Path, **options: Any) -> TensorBoardLogger:
    logger = TensorBoardLogger(folder, version=0, **options)
    logger.start(RunInfo(folder))
    return logger


def events_of(logger: TensorBoardLogger) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger.finish("success")
    return EventAccumulator(logger.log_dir).Reload()


def test_images_figures_and_texts_are_read_back(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot
    from PIL import Image

    image = torch.zeros(3, 4, 5)
    image[0] = 1.0

    figure, axes = pyplot.subplots(figsize=(2, 1), dpi=50)
    axes.plot([1, 2])
    logger = started(tmp_path, prefix="p")
    logger.log_image("im", image, 3)
    logger.log_figure("fig", figure, 2)
    logger.log_text("note", "hello", 1)
    assert pyplot.fignum_exists(figure.number)
    pyplot.close(figure)
    events = events_of(logger)
    (event,) = events.Images("p-im")
    assert event.step == 3
    found = np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))
    assert found.shape == (4, 5, 3)
    assert (found == [255, 0, 0]).all()
    (event,) = events.Images("p-fig")
    assert (event.step, event.width, event.height) == (2, 100, 50)
    (event,) = events.Tensors("p-note/text_summary")
    assert event.tensor_proto.string_val[0] == b"hello"


def test_the_graph_is_read_back_and_the_task_is_left_as_it_was(tmp_path: Path) -> None:
    task = RegressionTask(dropout=0.5)
    task.net.insert(1, nn.BatchNorm1d(8).eval())
    task.example_input_array = torch.randn(4, 4)
    modes = [module.training for module in task.modules()]
    state = {name: value.clone() for name, value in task.state_dict().items()}
    rng = torch.get_rng_state()
    logger = started(tmp_path, log_graph=True)
    assert logger.wants_graph
    logger.log_graph(task)
    assert [module.training for module in task.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in task.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert any("Linear" in node.name for node in events_of(logger).Graph().node)


def hparams_of(events: Any) -> dict[str, Any]:
    from tensorboard.plugins.hparams import plugin_data_pb2

    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    info = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in info.hparams.items()}


def test_hyperparameters_are_a_flat_table_and_nested_yaml(tmp_path: Path) -> None:
    logger = started(tmp_path)
    logger.log_hyperparams({"lr": 0.5, "net": {"act": "relu", "sizes": [1, 2]}, "bias": True, "none": None})
    events = events_of(logger)
    expected = {"lr": 0.5, "net/act": "relu", "net/sizes": "[1, 2]", "bias": True, "none": "None"}
    assert hparams_of(events) == expected
    assert [(event.step, event.value) for event in events.Scalars("hp_metric")] == [(0, -1.0)]
    assert logger.log_dir is not None
    text = Path(logger.log_dir, "hparams.yaml").read_text()
    assert yaml.safe_load(text)["net"] == {"act": "relu", "sizes": [1, 2]}
