"""`trainwright migrate`: what is rewritten, what is unchanged, and that rewritten programs run."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.migrate_programs import PROGRAMS
from trainwright.cli.main import main
from trainwright.cli.migration.rewrite_imports import rewrite
from trainwright.cli.migration.rewrite_launch import rewrite_launch


def rewritten(text: str) -> str:
    found = rewrite(text.encode())
    assert found.unsettled == []
    return found.code.decode()


def left(text: str) -> list[tuple[int, str]]:
    return [(each.line, each.text) for each in rewrite(text.encode()).unsettled]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_rewritten_completely_and_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAMS[name])
    assert main(["migrate", str(path)]) == 0, capsys.readouterr().err
    text = path.read_text()
    imports = [line for line in text.splitlines() if re.match(r"\s*(from|import) ", line)]
    assert not [line for line in imports if re.search(r"lightning|accelerate", line)]
    assert rewritten(text) == text, "a second rewrite changes nothing"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    runpy.run_path(str(path), run_name="program")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import lightning as L  # why\n", "import trainwright as L  # why\n"),
        ("import lightning\nlightning.pytorch.LightningModule\n", "import trainwright\ntrainwright.TaskModule\n"),
        ("import lightning as L\nL.pytorch.callbacks.Timer()\n", "import trainwright as L\nL.callbacks.Timer()\n"),
        (
            "from lightning.pytorch.callbacks import (\n    Timer,  # time\n    EarlyStopping,\n)\n",
            "from trainwright.callbacks import (\n    Timer,  # time\n    EarlyStopping,\n)\n",
        ),
        (
            "from lightning.pytorch import LightningModule\nTaskModule = 1\nclass A(LightningModule): ...\n",
            "from trainwright import TaskModule as LightningModule\nTaskModule = 1\nclass A(LightningModule): ...\n",
        ),
        (
            "try:\n    import lightning as L\nexcept ImportError:\n    import pytorch_lightning as L\n",
            "import trainwright as L\n",
        ),
        (
            "try:\n    import lightning as L\nexcept ImportError:\n    L = None\n",
            "try:\n    import trainwright as L\nexcept ImportError:\n    L = None\n",
        ),
        (
            "from lightning import Callback\nclass A(Callback):\n def on_fit_end(self, trainer, pl_module):\n"
            "  super().on_fit_end(trainer=trainer, pl_module=pl_module)\n  self.show(pl_module=1)\n",
            "from trainwright import Callback\nclass A(Callback):\n def on_fit_end(self, trainer, pl_module):\n"
            "  super().on_fit_end(trainer=trainer, task=pl_module)\n  self.show(pl_module=1)\n",
        ),
        (
            "from lightning.pytorch.utilities.types import STEP_OUTPUT\ndef f() -> STEP_OUTPUT: ...\n",
            "from typing import Any\ndef f() -> Any: ...\n",
        ),
        ("import lightning as L\r\nL.Trainer()\r\n", "import trainwright as L\r\nL.Trainer()\r\n"),
        ("import lightning\nimport accelerate", "import trainwright\n"),
        (
            "from lightning import LightningModule as M\nsuper().on_fit_end(trainer, pl_module=cast(M, m))\n",
            "from trainwright import TaskModule as M\nsuper().on_fit_end(trainer, task=cast(M, m))\n",
        ),
        (
            "from lightning import LightningModule\nsuper().on_fit_end(pl_module=cast(LightningModule, m))\n",
            "from trainwright import TaskModule\nsuper().on_fit_end(task=cast(TaskModule, m))\n",
        ),
        (
            "from lightning import pytorch as pl\ndef f(a: 'pl.LightningModule'): ...\n",
            "import trainwright as pl\ndef f(a: 'pl.TaskModule'): ...\n",
        ),
        (
            "import lightning.pytorch.callbacks as cb\ndef f(a: 'cb.Timer', b: cb.Timer): ...\n",
            "import trainwright.callbacks as cb\ndef f(a: 'cb.Timer', b: cb.Timer): ...\n",
        ),
        (
            "from lightning.pytorch import LightningModule\nmatch x:\n case {**TaskModule}: LightningModule\n",
            "from trainwright import TaskModule as LightningModule\nmatch x:\n case {**TaskModule}: LightningModule\n",
        ),
    ],
)
def test_forms_of_imports(before: str, after: str) -> None:
    assert rewritten(before) == after


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nclass LightningModule: ...\nclass A(LightningModule): ...\n",
        "# import lightning\nx = 'lightning is fast'\n",
        "from .lightning import LightningModule\nfrom mine.lightning import Trainer\n",
        "try:\n    from trainwright import Trainer\nexcept ImportError:\n    from lightning import Trainer\n",
        "def LightningModule(lightning): return lightning.LightningModule\n",
        "",
    ],
)
def test_other_imports_are_unchanged(text: str) -> None:
    assert rewritten(text) == text


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("\nfrom lightning.pytorch.callbacks import Checkpoint\n", 2, "Checkpoint of Lightning is not here: "),
        ("import lightning as L\nL.Fabric()\n", 2, "Fabric of Lightning is not here: use trainwright.Accelerator"),
        ("from lightning.fabric.plugins import X\n", 1, "lightning.fabric.plugins.X has no counterpart here"),
        ("from lightning import *\n", 1, "from lightning import *: name what you use."),
        ("import lightning as L\nL.Trainer(plugin=[3])\n", 2, "trainwright.Trainer has no argument 'plugin'"),
        ("import lightning as L\nL.Trainer(plugins=[3])\n", 2, "trainwright.Trainer takes only plugins=None"),
        ("import lightning as L\nprint(L)\n", 2, "the module L is used as an object"),
        ("x = 'lightning.pytorch.Trainer'\n", 1, "names another library: is trainwright.Trainer here."),
        (
            "import lightning as L\ndef f(x: 'L.Fabric'): ...\n",
            2,
            "annotation in quotes: Fabric of Lightning is not here",
        ),
        ("from accelerate.utils import install_xla\n", 1, "install torch_xla with pip"),
    ],
)
def test_a_manual_change_is_reported_with_its_line(text: str, line: int, says: str) -> None:
    ((found, told),) = left(text)
    assert found == line
    assert says in told


def test_arguments_that_the_trainer_accepts_are_not_reported() -> None:
    text = "import lightning as L\nL.Trainer(plugins=None, model_registry=None, enable_autolog_hparams=False)\n"
    assert left(text) == []


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        ("Accelerator()", 'Accelerator(schedule_steps="per_process")'),
        ("Accelerator(cpu=True)", 'Accelerator(cpu=True, schedule_steps="per_process")'),
        ("Accelerator(\n    cpu=True,  # x\n)", 'Accelerator(\n    cpu=True, schedule_steps="per_process",  # x\n)'),
        ("Accelerator(  # x\n)", 'Accelerator(schedule_steps="per_process"  # x\n)'),
        ("Accelerator((True))", 'Accelerator((True), schedule_steps="per_process")'),
        ("Accelerator(\n ((1) # )\n ), # )\n)", 'Accelerator(\n ((1) # )\n ), schedule_steps="per_process", # )\n)'),
        ("Accelerator(**options)", "Accelerator(**options)"),
    ],
)
def test_schedules_of_accelerate_advance_as_often_as_before(call: str, wanted: str) -> None:
    text = f"from accelerate import Accelerator\noptions = {{}}\na = {call}\nscheduler = a.prepare(None)\n"
    found = rewrite(text.encode())
    assert wanted in found.code.decode()
    assert [each.line for each in found.added] == ([] if "**" in call else [3])
    assert "schedule_steps" not in rewrite(text.replace("scheduler", "model").encode()).code.decode()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("bad.py", "import lightning as L\ndef f(:\n", "is not Python: line 2"),
        ("notes.ipynb", "{}", "is not a Python file"),
        ("gone.py", None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_leaves_all_unchanged(
    tmp_path: Path, name: str, content: str | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.py", tmp_path / name
    good.write_text("import lightning as L\n")
    if content is not None:
        bad.write_text(content)
    assert main(["migrate", str(good), str(bad)]) == 2
    assert says in capsys.readouterr().err
    assert good.read_text() == "import lightning as L\n"


def test_check_names_the_files_and_a_summary_counts_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {
        "old.py": "import lightning as L\n",
        "new.py": "import trainwright\n",
        "hard.py": "from lightning import Fabric\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert main(["migrate", "--check", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert shown.out == f"{tmp_path / 'old.py'}: would be rewritten\n"
    assert shown.err.endswith("trainwright migrate: 1 file of 3 to rewrite, 1 change to make by hand in 1 file.\n")
    assert (tmp_path / "old.py").read_text() == texts["old.py"]
    assert main(["migrate", str(tmp_path / "old.py")]) == 0
    assert main(["migrate", "--check", str(tmp_path / "old.py")]) == 0


def test_attributes_that_a_trainer_does_not_have_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """import torch
import lightning as L
from accelerate import Accelerator
accelerator: Accelerator = Accelerator(log_with="wandb")
trainer = L.Trainer()
accelerator.init_trackers("run")
def main(accelerator):
    accelerator.print(trainer.callback_metrics, trainer.validate_loop)
    accelerator.profile()  # it exists
state = torch.load(trainer.checkpoint_callback.best_model_path)
class Other:
    save = None
Other().save
"""
    file = tmp_path / "program.py"
    file.write_text(text)
    assert main(["migrate", str(file)]) == 1
    told = [line.partition("program.py:")[2] for line in capsys.readouterr().err.splitlines()]
    assert [line.partition(":")[0] for line in told] == ["8", "10"]
    for line, says in zip(told, ["validate_loop", "a folder here"], strict=True):
        assert says in line


def test_check_reports_changes_to_make_by_hand_after_the_rewrite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """import os, torch
from pathlib import Path
import lightning as L
trainer = L.Trainer()
trainer.validate_loop
path = trainer.checkpoint_callback.best_model_path
torch.load(path)
torch.load(os.path.join("runs", "last.ckpt"))
print("last.ckpt" in os.listdir("runs"), list(Path("runs").glob("*.ckpt")))
class Net(L.LightningModule):
    def training_epoch_end(self, outputs): ...
trainer.save_checkpoint("runs/mine.ckpt")
print("mine.ckpt" in os.listdir("runs"))
torch.load("weights.pt")
trainer.fit(Net(), ckpt_path="last.ckpt")
"""
    file = tmp_path / "program.py"
    file.write_text(text)
    for argument in ([], ["--check"]):
        assert main(["migrate", *argument, str(file)]) == 1
        lines = re.findall(r"program.py:(\d+): (.{14})", capsys.readouterr().err)
        assert lines == [
            ("5", "trainer.valida"),
            ("7", "a checkpoint i"),
            ("9", "the name of a "),
            ("11", "training_epoch"),
        ]


def test_a_configuration_file_of_accelerate_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "default_config.yaml"
    path.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 2\n")
    assert main(["migrate", str(path)]) == 0
    path.write_text("compute_environment: AZURE\n")
    assert main(["migrate", str(path)]) == 1
    assert "compute_environment='AZURE' is not supported" in capsys.readouterr().err


@pytest.mark.distributed
@pytest.mark.slow
def test_a_migrated_script_and_its_command_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys, torch\nfrom accelerate import Accelerator\naccelerator = Accelerator()\n"
        "model, optimizer = torch.nn.Linear(2, 1), None\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model, optimizer = accelerator.prepare(model, optimizer)\n"
        "accelerator.backward(model(torch.ones(1, 2)).sum())\noptimizer.step()\n"
        "accelerator.print(accelerator.num_processes, accelerator.distributed_type.value, sys.argv[1])\n"
        "accelerator.end_training()\n"
    )
    script = tmp_path / "run.sh"
    options = "--cpu --num_processes 2 --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy NO_WRAP"
    script.write_text(f"cd {tmp_path}\naccelerate launch {options} train.py --x\n")
    assert main(["migrate", str(script), str(tmp_path / "train.py")]) == 0
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ended = subprocess.run(
        ["bash", "-e", str(script)], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["2", "FSDP", "--x"]


def test_class_paths_of_hydra_and_lightnings_cli_are_rewritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trainer.yaml"
    path.write_text(
        "trainer:\n"
        "  _target_: lightning.pytorch.trainer.Trainer  # why\n"
        "  callbacks:\n"
        '  - class_path: "pytorch_lightning.callbacks.EarlyStopping"\n'
        "  logger: [{_target_: lightning.pytorch.loggers.CSVLogger}, {_target_: lightning.pytorch.loggers.Mine}]\n"
        "# _target_: lightning.pytorch.Trainer\n"
        "model: {_target_: src.models.Net}\n"
    )
    assert main(["migrate", str(path)]) == 1
    assert path.read_text().split("\n")[1:] == [
        "  _target_: trainwright.Trainer  # why",
        "  callbacks:",
        '  - class_path: "trainwright.callbacks.EarlyStopping"',
        "  logger: [{_target_: trainwright.loggers.CSVLogger}, {_target_: lightning.pytorch.loggers.Mine}]",
        "# _target_: lightning.pytorch.Trainer",
        "model: {_target_: src.models.Net}",
        "",
    ]
    assert "5: lightning.pytorch.loggers.Mine has no counterpart here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("import lightning as L\nL.__version__\nL.__version__\n", 2, "lightning.__version__ has no counterpart here"),
        ("from lightning.pytorch.plugins import X\nX()\nX()\n", 1, "plugins.X has no counterpart"),
        (
            "import pytorch_lightning as pl\nclass A(pl.LightningModule):\n"
            "    def training_step(self, batch, batch_idx, optimizer_idx): ...\n",
            3,
            "optimizer_idx belongs to Lightning 1",
        ),
        (
            "import lightning as L\nclass A(L.LightningModule):\n    def test_epoch_end(self, outputs): ...\n",
            3,
            "removed from Lightning in 2.0",
        ),
        (
            "from accelerate import Accelerator\na = Accelerator()\nif a.is_main_process:\n    a.save_state('x')\n",
            4,
            "save_state on the main process alone",
        ),
        (
            "from accelerate import Accelerator\na = Accelerator()\nif not a.is_main_process:\n    a.save_state('x')\n"
            "else:\n    a.save_state('y')\n",
            6,
            "save_state on the main process alone",
        ),
    ],
)
def test_what_a_rewrite_cannot_change_is_reported_once(text: str, line: int, says: str) -> None:
    ((found, told),) = left(text)
    assert found == line
    assert says in told


def test_a_folder_is_rewritten_without_hidden_folders_and_environments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "from lightning import Trainer\n"
    for name in ("train.py", "nets/net.py", ".git/hook.py", "env/lib/site.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "env/pyvenv.cfg").touch()
    (tmp_path / "run.sh").write_text("accelerate launch train.py\n")
    assert main(["migrate", str(tmp_path)]) == 0
    rewritten = [line.removesuffix(": rewritten") for line in capsys.readouterr().out.splitlines()]
    assert rewritten == [str(tmp_path / name) for name in ("nets/net.py", "run.sh", "train.py")]
    assert (tmp_path / "notes.txt").read_text() == (tmp_path / ".git/hook.py").read_text() == text


def test_other_texts_in_annotations_stay() -> None:
    text = "import lightning.pytorch as pl\nx: Literal['pl.LightningModule']\ny: Annotated[int, 'pl.LightningModule']\n"
    code = rewrite(text.encode()).code.decode()
    assert code.count("'pl.LightningModule'") == 2
    assert left("import lightning as L\nx: 'my.L.LightningModule'\n") == []


def test_a_failing_disk_is_an_error_and_leaves_the_file_unchanged(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.py"
    path.write_text("import lightning as L\n")

    def fail(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    assert main(["migrate", str(path)]) == 2
    assert "No space left" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.py"]
    assert path.read_text() == "import lightning as L\n"


def test_comments_with_words_of_a_list_stay() -> None:
    text = '# cmd ["accelerate", "launch"]\ncommand: ["accelerate", "launch"]\n'
    code = rewrite_launch(text.encode()).code.decode()
    assert code == '# cmd ["accelerate", "launch"]\ncommand: ["trainwright", "launch"]\n'
