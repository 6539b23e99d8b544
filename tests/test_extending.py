"""A further callback, logger or strategy is its own file and two lines: one in the stub, one in the registry."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.sources import ROOT

MAX_LINES_IN_FURTHER_FILES = 2
_IGNORED = shutil.ignore_patterns("__pycache__", ".mypy_cache")

CALLBACK = '''"""A made-up callback."""

from trainwright.callbacks.callback import Callback


class MadeUp(Callback):
    """Counts steps."""

    steps = 0

    def on_train_step_end(self, trainer, task, result):
        """Count one."""
        self.steps += 1
'''
LOGGER = '''"""A made-up logger."""

from trainwright.loggers.logger import Logger


class MadeUpLogger(Logger):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def start(self, run):
        """Take note of the run."""
        super().start(run)

    def log_hyperparams(self, params):
        """Keep none."""

    def log_metrics(self, metrics, step):
        """Keep them."""
        self.seen.append(step)

    def flush(self):
        """Write nothing."""

    def finish(self, status):
        """End nothing."""
'''
STRATEGY = '''"""A made-up strategy."""

from trainwright.strategies.engine import Engine
from trainwright.strategies.strategy import SingleDeviceStrategy
from trainwright.strategies.steps.step import AutomaticStep


class CountingStep(AutomaticStep):
    """Counts its runs."""

    def forward_backward(self, group):
        """Count one."""
        self.engine.steps += 1
        return super().forward_backward(group)


class CountingEngine(Engine):
    """Counts its steps."""

    steps = 0

    def make_step(self, parts):
        """Count them."""
        step = CountingStep(parts)
        step.engine = self
        return step


class MadeUpStrategy(SingleDeviceStrategy):
    """Counts the steps of its engine."""

    def engine(self, settings):
        """Return it."""
        return CountingEngine(self, settings)
'''
TASK = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from trainwright import TaskModule

class Task(TaskModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    def on_fit_end(self):
        trainer = self.trainer
        print("ran", trainer.strategy.steps, [c.steps for c in trainer.callbacks if type(c).__name__ == "MadeUp"],
              len(trainer.logger.seen))
"""
PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:]
from trainwright.callbacks import CALLBACKS, MadeUp
from trainwright.loggers import LOGGERS, MadeUpLogger
from trainwright.strategies import STRATEGIES, MadeUpStrategy
assert CALLBACKS.get("made_up") is MadeUp
assert LOGGERS.get("made_up") is MadeUpLogger
assert STRATEGIES.get("made_up") is MadeUpStrategy
from trainwright.cli.main import main
sys.exit(main(["fit", "--config", "config.yaml"]))
"""
CONFIG = """
task:
  class_path: made_up_task.Task
trainer:
  max_steps: 2
  log_every_n_steps: 1
  accelerator: cpu
  strategy: made_up
  logger: made_up
  callbacks: [made_up]
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
"""


class Copy:
    """A copy of the package that is added to; it counts the lines that files of the project gain."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lines = 0
        for part in ("src", "callbacks", "loggers", "strategies", "templates", "trainer"):
            shutil.copytree(ROOT / part, root / part, symlinks=True, ignore=_IGNORED)

    def add(self, package: str, module: str, text: str, name: str, short_name: str) -> int:
        """Add a module, name it in the package's stub and in its registry; return the lines of the latter two."""
        (self.root / package / f"{module}.py").write_text(text)
        path = f"trainwright.{package}.{module}"
        before = self.lines
        self._insert(f"{package}/__init__.pyi", "", f"from {path} import {name} as {name}\n")
        self._insert(f"{package}/registry.py", "    {\n", f'        "{short_name}": "{path}:{name}",\n')
        return self.lines - before

    def _insert(self, file: str, behind: str, line: str) -> None:
        path = self.root / file
        head, found, rest = path.read_text().partition(behind) if behind else ("", "", path.read_text())
        assert found == behind
        path.write_text(head + found + line + rest)
        self.lines += line.count("\n")


@pytest.mark.slow
def test_a_made_up_callback_logger_and_strategy_are_a_file_and_two_lines_each(tmp_path: Path) -> None:
    copy = Copy(tmp_path / "copy")
    added = [
        copy.add("callbacks", "made_up", CALLBACK, "MadeUp", "made_up"),
        copy.add("loggers", "made_up_logger", LOGGER, "MadeUpLogger", "made_up"),
        copy.add("strategies", "made_up", STRATEGY, "MadeUpStrategy", "made_up"),
    ]
    assert max(added) <= MAX_LINES_IN_FURTHER_FILES

    (tmp_path / "made_up_task.py").write_text(TASK)
    (tmp_path / "config.yaml").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(copy.root / "src"), str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ran 2 [2] 2" in done.stdout
