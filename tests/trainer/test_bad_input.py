from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.helpers.tasks import RegressionTask, StepTask, regression_loader
from tests.trainer.runs import Untouched, quiet_trainer
from trainwright.callbacks.early_stopping import EarlyStopping
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.core.errors import ArgumentTypeError, ConfigurationError, TaskError, TrainwrightWarning
from trainwright.core.task import TaskModule
from trainwright.strategies import DDPStrategy
from trainwright.trainer.recovery.failure import describe, note_missing_weights
from trainwright.trainer.trainer import Trainer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_epoch": 3}, r"Trainer has no argument 'max_epoch'. Did you mean 'max_epochs'"),
        ({"gpus": 2}, r"no argument 'gpus'. Use devices="),
        ({"resume_from_checkpoint": "x"}, r"Use fit\(ckpt_path=…\) instead"),
        ({"max_epochs": 1.5}, r"max_epochs=1.5: write a whole number"),
        ({"strategy": 3}, r"strategy=3: write a name such as 'ddp', or a Strategy"),
        ({"max_time": "3 epochs"}, r"max_time='3 epochs' is in epochs; write a length of time"),
        ({"max_time": {"hour": 1}}, r"max_time={'hour': 1}: .*timedelta's argument names"),
        ({"limit_train_batches": -1}, r"limit_train_batches=-1: write a whole number of batches, or a fraction"),
        ({"overfit_batches": float("nan")}, r"overfit_batches=nan: write"),
        ({"val_check_interval": 2.5}, r"val_check_interval=2.5: a float is a fraction of an epoch"),
        ({"val_check_interval": 0}, r"val_check_interval=0 batches: must be at least 1"),
        ({"val_check_interval": "500"}, r"val_check_interval: '500' is not a length of training. Write a number and"),
        ({"val_check_interval": 0.5, "check_val_every_n_epoch": None}, r"check_val_every_n_epoch=None counts batches"),
        ({"uneven_batches": "padd"}, r"uneven_batches='padd' is unknown. Did you mean 'pad'"),
        ({"barebones": True, "logger": True}, r"barebones=True contradicts logger=True"),
        ({"barebones": True, "num_sanity_val_steps": 1}, r"barebones=True contradicts num_sanity_val_steps=1"),
        ({"barebones": True, "fast_dev_run": True}, r"contradict each other"),
        ({"enable_checkpointing": False, "callbacks": ModelCheckpoint()}, r"callbacks contains a ModelCheckpoint"),
        ({"accelerator": "cpu", "devices": 0}, r"devices=0: write a count of at least 1"),
        ({"accelerator": "cpu", "strategy": "dpp"}, r"'dpp'.*Did you mean 'ddp'"),
        ({"accelerator": "cpu", "strategy": "single", "devices": 2}, r"devices=2.* runs one process"),
        ({"accelerator": "cpu", "num_nodes": 2}, r"num_nodes=2 needs a launcher on every node"),
        ({"strategy": "fsdp", "sync_batchnorm": True}, r"sync_batchnorm=True is not supported by FSDPStrategy"),
        ({"devices": []}, r"devices=\[\] names no device"),
        ({"callbacks": [3]}, r"callbacks contains a int, which is not a trainwright.Callback"),
        ({"callbacks": [EarlyStopping("a"), EarlyStopping("a")]}, r"two callbacks have the state_key"),
        ({"plugins": [object()]}, r"plugins.*Use precision= for number formats"),
        ({"model_registry": "team/model"}, r"model_registry.*ModelCheckpoint"),
        ({"compile": "fastest"}, r"compile='fastest' is not a mode of torch.compile"),
        *(({"gradient_clip_val": value}, "gradient_clip_val=") for value in ("0.5", -1.0, float("nan"))),
        ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norms"}, r"'norms' is unknown. Did you mean 'norm'"),
        *(({"on_nonfinite": policy}, "'raise', 'skip' or 'rollback'") for policy in ("skp", True)),
        *(({"max_skipped": wrong}, "max_skipped") for wrong in (0, 1.5)),
        *(({"on_interrupt": w}, r"on_interrupt=.* Write 'return' or 'raise', or None") for w in ("stop", True)),
        ({"on_save_error": "ignore"}, "on_save_error='ignore' is unknown"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_arguments_that_cannot_be_meant_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Trainer(**arguments)


def _without(name: str) -> TaskModule:
    class Task(Untouched):
        pass

    setattr(Task, name, getattr(TaskModule, name))
    return Task()


def _optimizing(make: Callable[[RegressionTask], Any]) -> Any:
    return type("Task", (RegressionTask,), {"configure_optimizers": make})()


def _with_schedule(task: RegressionTask) -> Any:
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


def _of_another_model(task: RegressionTask) -> Any:
    return torch.optim.SGD([*task.parameters(), *nn.Linear(3, 2).parameters()], lr=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _without("training_step"), r"Task has no training_step. Define training_step\(self"),
        (lambda: _without("configure_optimizers"), r"Task has no configure_optimizers. Define it"),
        (lambda: nn.DataParallel(RegressionTask()), r"received a wrapped task. Pass the task itself; devices="),
        (lambda: RegressionTask, r"received the class RegressionTask. Pass an instance: RegressionTask\(…\)"),
        (
            lambda: type("Task", (Untouched,), {"__init__": lambda self: None})(),
            r"does not call super\(\).__init__\(\)",
        ),
        (lambda: _optimizing(_with_schedule), r"a tuple of SGD, StepLR. Return .*with a list for each"),
        (lambda: _optimizing(_of_another_model), r"SGD with 2 parameter\(s\), the first of shape \(2, 3\)"),
    ],
)
def test_a_task_that_cannot_be_trained_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        quiet_trainer(max_epochs=1).fit(make(), regression_loader(2))


def _all_dropped() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(3, 4), torch.zeros(3, 1)), batch_size=4, drop_last=True)


@pytest.mark.parametrize("make", [_all_dropped, list])
@pytest.mark.parametrize("stage", ["fit", "fit with validation", "fit with two", "predict"])
def test_an_empty_loader_is_refused(stage: str, make: Callable[[], Any]) -> None:
    first = [regression_loader(2)] if stage == "fit with validation" else []
    loader = {"a": regression_loader(2), "b": make()} if stage == "fit with two" else make()
    run = getattr(quiet_trainer(max_epochs=1), stage.partition(" ")[0])
    with pytest.raises(ConfigurationError, match=r"is empty|an empty"):
        run(Untouched(), *first, loader)


def test_a_loader_that_turns_out_empty_is_refused_too() -> None:
    with pytest.raises(ConfigurationError, match=r"train_dataloader is empty"):
        quiet_trainer(max_epochs=1).fit(RegressionTask(), (batch for batch in []))


def test_a_stage_without_data_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no train data: pass train_dataloaders=…"):
        quiet_trainer(max_epochs=1).fit(Untouched())
    with pytest.raises(ConfigurationError, match="no test data: pass dataloaders=…"):
        quiet_trainer().test(Untouched())


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda task, batch, idx: task(batch[0]), r"a loss of shape \(2, 1\); it must be a scalar"),
        (lambda task, batch, idx: task.loss(batch).detach(), r"a loss without a graph"),
        (lambda task, batch, idx: task.loss(batch).item(), r"returned float"),
        (lambda task, batch, idx: {"los": task.loss(batch)}, r"returned dict without a loss tensor"),
    ],
    ids=["not a scalar", "no graph", "a number", "no key"],
)
def test_a_loss_that_cannot_be_trained_on_is_refused(step: Callable[..., Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        quiet_trainer(max_epochs=1).fit(StepTask(step), regression_loader(4, 2))


@pytest.mark.parametrize("verb", ["fit", "predict"])
def test_a_task_whose_weights_are_elsewhere_is_refused(verb: str) -> None:
    task = RegressionTask()
    task.head = nn.Linear(2, 2, device="meta")
    with pytest.raises(ConfigurationError, match=r"'head\.weight' and 1 others are on the meta device"):
        getattr(quiet_trainer(max_steps=1), verb)(task, regression_loader())


@pytest.mark.parametrize(
    ("verb", "arguments", "message"),
    [
        ("fit", {"train_dataloader": []}, r"fit\(\) has no argument 'train_dataloader'. Use train_dataloaders instead"),
        ("test", {"test_dataloaders": []}, r"test\(\) has no argument 'test_dataloaders'. Use dataloaders instead"),
        ("predict", {"model": RegressionTask, "batches": 1}, r"predict\(\) has no argument 'batches'. It takes: task"),
    ],
)
def test_an_argument_that_a_verb_does_not_have_is_told(verb: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        getattr(quiet_trainer(), verb)(**arguments)


@pytest.mark.parametrize("hook", ["on_validation_end", "on_save_checkpoint", "on_fit_end", "predict_step"])
def test_a_value_that_nobody_would_read_is_not_taken(hook: str, tmp_path: Path) -> None:
    def logs(self: TaskModule, *_: Any) -> None:
        self.log("lost", 1.0)

    task = type("Task", (RegressionTask,), {hook: logs})()
    trainer = quiet_trainer(max_epochs=1, default_root_dir=tmp_path, enable_checkpointing=True)
    run = partial(trainer.predict, task) if hook == "predict_step" else partial(trainer.fit, task, regression_loader())
    where = "a prediction" if hook == "predict_step" else hook
    with pytest.raises(TaskError, match=rf"log\('lost'\) in {where}: values logged there are not aggregated"):
        run(regression_loader())


def test_a_prediction_without_a_task_or_a_forward_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"predict\(\) has no task.* Pass a TaskModule"):
        quiet_trainer().predict()
    task = type("Task", (TaskModule,), {})()
    with pytest.raises(TaskError, match=r"Task has neither predict_step nor forward. Define one of them"):
        quiet_trainer().predict(task, regression_loader())


def test_a_prediction_of_nothing_is_reported() -> None:
    task = type("Task", (RegressionTask,), {"predict_step": lambda self, batch: None})()
    with pytest.warns(TrainwrightWarning, match=r"Task\.predict_step returned None for 2 of 2 batches"):
        assert quiet_trainer().predict(task, regression_loader(2)) == [None, None]
    quiet_trainer().predict(task, regression_loader(2), return_predictions=False)


def test_a_task_without_repeated_blocks_is_refused_before_a_process_is_started() -> None:
    trainer = quiet_trainer(devices=2, strategy="ddp", max_epochs=1, compile="regional")
    with pytest.raises(ConfigurationError, match="Untouched has none"):
        trainer.fit(Untouched(), regression_loader(4))


class _OneCycle(RegressionTask):
    def __init__(self, total_steps: int | None) -> None:
        super().__init__()
        self.total_steps = total_steps

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        total = self.total_steps or int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_a_one_cycle_schedule_has_to_be_as_long_as_estimated_stepping_batches() -> None:
    quiet_trainer(max_epochs=2).fit(_OneCycle(None), regression_loader(4))
    with pytest.raises(ConfigurationError, match=r"OneCycleLR is shorter.*self.trainer.estimated_stepping_batches"):
        quiet_trainer(max_epochs=2).fit(_OneCycle(4), regression_loader(4))


def test_batches_of_any_type_are_described() -> None:
    tensor = torch.zeros(2, 3)
    assert describe({"x": tensor, "y": (1, tensor.long())}) == (
        "{'x': float32[2, 3] on cpu, 'y': (int, int64[2, 3] on cpu)}"
    )
    assert describe([0] * 20).endswith("int, and 12 more]")


def test_errors_of_torch_about_meta_name_weights_that_are_elsewhere() -> None:
    errors = RuntimeError("a tensor on meta"), RuntimeError("a tensor on cpu"), TaskError("a tensor on meta")
    for error in errors:
        note_missing_weights(error, nn.Linear(2, 2, device="meta"))
    assert [hasattr(error, "__notes__") for error in errors] == [True, False, False]


def test_a_data_set_in_the_place_of_a_loader_is_told() -> None:
    data = regression_loader(8, 2).dataset
    with pytest.warns(TrainwrightWarning, match="train_dataloader: a TensorDataset is a data set, not a loader"):
        quiet_trainer(max_steps=1).fit(RegressionTask(), data)


@pytest.mark.parametrize(
    "call",
    [
        lambda: quiet_trainer(no_such_argument=1),
        lambda: quiet_trainer(gradient_clip_val=(1, 2)),
        lambda: DDPStrategy(no_such_argument=1),  # type: ignore[call-arg]  # the test's subject
        lambda: quiet_trainer().fit(torch.nn.Linear(1, 1)),
        lambda: quiet_trainer().fit(),
        lambda: quiet_trainer().test(),
        lambda: quiet_trainer().predict(),
    ],
)
def test_an_unknown_or_missing_argument_is_a_type_error_too(call: Callable[[], Any]) -> None:
    with pytest.raises(ArgumentTypeError):
        call()
    assert issubclass(ArgumentTypeError, TypeError)


def test_the_number_of_steps_is_infinite_for_data_without_a_length() -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            while True:
                yield torch.ones(4), torch.ones(1)

    seen: list[float] = []

    class Task(RegressionTask):
        def configure_optimizers(self) -> Any:
            seen.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    loader = DataLoader(Endless(), batch_size=2)
    quiet_trainer(max_epochs=1, max_samples=4).fit(Task(), loader)
    quiet_trainer(max_epochs=1, max_steps=2).fit(Task(), loader)
    assert seen == [math.inf, 2]


@pytest.mark.parametrize("plugins", [None, [], ()])
def test_no_plugins_are_accepted(plugins: Any) -> None:
    quiet_trainer(plugins=plugins)
