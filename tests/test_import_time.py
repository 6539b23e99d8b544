"""What is imported when: the countable half of a fast start (the seconds are measured in benchmarks/)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# What nobody should wait for who only wants to write a task and make a Trainer.
FORBIDDEN = [
    *("accelerate", "datasets", "deepspeed", "lightning", "pytorch_lightning", "torch_xla", "transformers", "wandb"),
    *("google.protobuf", "jinja2", "jsonargparse", "matplotlib", "pandas", "rich", "scipy", "sklearn", "tensorboard"),
    *("torchmetrics", "torchvision", "tqdm", "yaml"),
    *("sympy", "networkx", "torch._dynamo", "torch._inductor", "torch.onnx", "torch.utils.tensorboard"),
    *("cloudpickle", "torch.distributed.algorithms.ddp_comm_hooks", "zoneinfo"),
    *("torch.distributed.checkpoint", "torch.distributed.pipelining", "torch.distributed.tensor"),
    *("torch.distributed._functional_collectives", "trainwright.strategies.context"),
    *("trainwright.processes.hang_detector", "trainwright.processes.ray_actors"),
    *("trainwright.strategies.steps.te_layers", "trainwright.trainer.search.trial"),
]


def _added_modules(statements: str, *, after: str = "pass") -> set[str]:
    """Return the modules that `statements` import in a fresh interpreter which has already run `after`."""
    code = (
        "import json, sys, io, contextlib\n"
        f"{after}\n"
        "before = set(sys.modules)\n"
        f"{statements}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def _of_others(modules: set[str]) -> set[str]:
    roots = {module.partition(".")[0] for module in modules}
    return {root for root in roots if root != "trainwright" and root not in sys.stdlib_module_names}


def _forbidden_among(modules: set[str]) -> list[str]:
    return [name for name in FORBIDDEN if any(f"{module}.".startswith(f"{name}.") for module in modules)]


_HELP = (
    "from trainwright.cli.main import main\n"
    "with contextlib.redirect_stdout(io.StringIO()) as text:\n"
    "    try:\n"
    "        code = main({arguments})\n"
    "    except SystemExit as end:\n"
    "        code = end.code\n"
    "assert not code, code\n"
    "assert {word!r} in text.getvalue(), text.getvalue()\n"
)


def test_importing_the_package_imports_neither_torch_nor_anything_else_of_others() -> None:
    assert _of_others(_added_modules("import trainwright")) == set()


def test_the_help_imports_neither_torch_nor_anything_else_of_others() -> None:
    assert _of_others(_added_modules(_HELP.format(arguments=["--help"], word="fit"))) == set()


def test_the_help_of_new_does_not_import_torch() -> None:
    assert "torch" not in _added_modules(_HELP.format(arguments=["new", "--help"], word="--template"))


def test_errors_can_be_caught_by_name_without_torch() -> None:
    assert _of_others(_added_modules("from trainwright import ConfigurationError, TrainwrightWarning")) == set()


@pytest.mark.slow
def test_making_a_trainer_imports_nothing_heavy_beyond_torch() -> None:
    added = _added_modules(
        "from trainwright import Callback, DataModule, TaskModule, Trainer\n"
        "from trainwright.callbacks import EMAWeightAveraging, StochasticWeightAveraging\n"
        "Trainer(max_steps=1, logger=False, enable_progress_bar=False)",
        after="import torch",
    )
    assert "trainwright.core.task" in added
    assert _forbidden_among(added) == []


@pytest.mark.slow
def test_a_fit_imports_nothing_for_processes_that_it_does_not_have() -> None:
    added = _added_modules(
        "import torch\n"
        "from trainwright import TaskModule, Trainer\n"
        "class Task(TaskModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.net = torch.nn.Linear(2, 1)\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        return self.net(batch).sum()\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), lr=0.1)\n"
        "import tempfile\n"
        "with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):\n"
        "    data = torch.utils.data.DataLoader(torch.ones(4, 2))\n"
        "    Trainer(max_epochs=1, default_root_dir=folder).fit(Task(), data)",
    )
    assert "trainwright.trainer.loop" in added
    assert not any(name.startswith("torch.distributed._tools") for name in added)
    assert "trainwright.strategies.shards" not in added
