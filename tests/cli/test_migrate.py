"""`trainwright migrate`: what is rewritten, what is left alone, and that the rewritten programs run."""

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
    """Return a program after the rewrite; nothing may be left to do."""
    found = rewrite(text.encode())
    assert found.unsettled == []
    return found.code.decode()


def left(text: str) -> list[tuple[int, str]]:
    """Return what a rewrite leaves to do."""
    return [(each.line, each.text) for each in rewrite(text.encode()).unsettled]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_migrates_without_a_rest_and_runs(
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
        ("import os, lightning.pytorch as pl\n", "import os, trainwright as pl\n"),
        ("from lightning import pytorch as pl\npl.Trainer\n", "import trainwright as pl\npl.Trainer\n"),
        ("import lightning\nlightning.pytorch.LightningModule\n", "import trainwright\ntrainwright.TaskModule\n"),
        ("import lightning as L\nL.pytorch.callbacks.Timer()\n", "import trainwright as L\nL.callbacks.Timer()\n"),
        (
            "import accelerate\naccelerate.utils.set_seed(1)\n",
            "import trainwright\ntrainwright.utils.set_seed(1)\n",
        ),
        (
            "from lightning.pytorch.callbacks.early_stopping import EarlyStopping\n",
            "from trainwright.callbacks import EarlyStopping\n",
        ),
        (
            "from lightning.pytorch.callbacks import (\n    Timer,  # time\n    EarlyStopping,\n)\n",
            "from trainwright.callbacks import (\n    Timer,  # time\n    EarlyStopping,\n)\n",
        ),
        (
            "from lightning.pytorch.utilities import CombinedLoader as Both\n",
            "from trainwright import CombinedLoader as Both\n",
        ),
        (
            "from lightning.pytorch import LightningModule\nTaskModule = 1\nclass A(LightningModule): ...\n",
            "from trainwright import TaskModule as LightningModule\nTaskModule = 1\nclass A(LightningModule): ...\n",
        ),
        (
            "from lightning.pytorch import LightningModule\n__all__ = ['LightningModule']\n",
            "from trainwright import TaskModule as LightningModule\n__all__ = ['LightningModule']\n",
        ),
        (
            "from lightning.pytorch import LightningModule\ndef f(m: 'LightningModule'): ...\n",
            "from trainwright import TaskModule as LightningModule\ndef f(m: 'LightningModule'): ...\n",
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
            "from accelerate import accelerator as A\nA.Accelerator()\n",
            "from trainwright import accelerator as A\nA.Accelerator()\n",
        ),
        (
            "from lightning.pytorch.callbacks import early_stopping as E\nE.EarlyStopping()\n",
            "from trainwright import callbacks as E\nE.EarlyStopping()\n",
        ),
        (
            "import accelerate.accelerator as A\nA.Accelerator()\n",
            "import trainwright.accelerator as A\nA.Accelerator()\n",
        ),
        (
            "from lightning.pytorch.utilities.types import STEP_OUTPUT\ndef f() -> STEP_OUTPUT: ...\n",
            "from typing import Any\ndef f() -> Any: ...\n",
        ),
        ("import lightning as L\r\nL.Trainer()\r\n", "import trainwright as L\r\nL.Trainer()\r\n"),
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
def test_what_is_not_an_import_of_these_libraries_is_left_alone(text: str) -> None:
    assert rewritten(text) == text


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("\nfrom lightning.pytorch.callbacks import ModelPruning\n", 2, "ModelPruning of Lightning is not here: "),
        ("import lightning as L\nL.Fabric()\n", 2, "Fabric of Lightning is not here: use trainwright.Accelerator"),
        ("from lightning.fabric.plugins import X\n", 1, "lightning.fabric.plugins.X has no counterpart here"),
        ("from lightning import *\n", 1, "from lightning import *: name what you use."),
        ("import lightning as L\nL.Trainer(profiler='simple')\n", 2, "trainwright.Trainer takes only profiler=None"),
        ("import lightning as L\nL.Trainer(plugin=[3])\n", 2, "trainwright.Trainer has no argument 'plugin'"),
        ("import lightning as L\nprint(L)\n", 2, "the module L is used as an object"),
        ("import lightning as L\nL.__version__\n", 2, "lightning.__version__ has no counterpart here"),
        ("x = 'lightning.pytorch.Trainer'\n", 1, "names another library: is trainwright.Trainer here."),
        ("import lightning as L\ndef f(x: 'L.LightningModule'): ...\n", 2, "the annotation in quotes names lightning"),
        ("from accelerate.utils import install_xla\n", 1, "no strategy for TPUs yet"),
        (
            "from accelerate import ProfileKwargs\n",
            1,
            "enter torch.profiler.profile around your loop",
        ),
        ("from accelerate.utils import MegatronLMPlugin\n", 1, "MegatronLMPlugin of Accelerate is not here: "),
    ],
)
def test_what_cannot_be_settled_is_told_with_its_line(text: str, line: int, says: str) -> None:
    ((found, told),) = left(text)
    assert found == line
    assert says in told


def test_what_is_not_here_stays_imported_beside_what_is() -> None:
    text = "from lightning.pytorch.callbacks import ModelPruning, Timer  # both\n"
    code = rewrite(text.encode()).code.decode()
    assert "from trainwright.callbacks import Timer" in code
    assert "from lightning.pytorch.callbacks import ModelPruning" in code
    assert code.count("# both") == 1


def test_the_rest_is_printed_and_the_exit_code_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.py"
    path.write_text("import lightning as L\nL.Fabric()\n")
    path.chmod(0o750)
    assert main(["migrate", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == f"{path}: rewritten\n"
    assert printed.err.startswith(f"{path}:2: Fabric of Lightning is not here: ")
    assert path.stat().st_mode & 0o777 == 0o750
    assert os.listdir(tmp_path) == ["a.py"]


def test_diff_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.py"
    path.write_text("import lightning as L\n")
    assert main(["migrate", "--diff", str(path)]) == 0
    assert path.read_text() == "import lightning as L\n"
    assert "-import lightning as L\n+import trainwright as L\n" in capsys.readouterr().out


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


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.py", tmp_path / "link.py"
    real.write_text("import lightning as L\n")
    link.symlink_to(real)
    assert main(["migrate", str(link)]) == 0
    assert link.is_symlink()
    assert real.read_text() == "import trainwright as L\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("__all__: list = ['LightningModule']\n", "import TaskModule as LightningModule"),
        ("__all__ = []\n__all__ += ['LightningModule']\n", "import TaskModule as LightningModule"),
        ("__all__ = []\n__all__.append('LightningModule')\n", "import TaskModule as LightningModule"),
        ("x = f()  # type: LightningModule\n", "import TaskModule as LightningModule"),
        ("x = f()  # type of LightningModule\n", "import TaskModule\n"),
    ],
)
def test_a_name_that_is_read_where_nothing_is_changed_stays(text: str, line: str) -> None:
    assert line in rewritten(f"from lightning import LightningModule\n{text}")


def test_a_name_that_others_import_or_read_off_a_class_stays() -> None:
    exported = rewritten("from lightning import LightningModule as LightningModule\n")
    assert exported == "from trainwright import TaskModule as LightningModule\n"
    inside = rewritten("class C:\n    from lightning import LightningModule\nC.LightningModule\n")
    assert inside == "class C:\n    from trainwright import TaskModule as LightningModule\nC.LightningModule\n"


def test_one_line_of_several_statements_stays_one() -> None:
    found = rewrite(b"if 1: from lightning import Trainer, nonsense\n")
    assert found.code == b"if 1: from trainwright import Trainer; from lightning import nonsense\n"
    assert len(found.unsettled) == 1


def test_a_comment_that_cannot_be_kept_is_told() -> None:
    text = "from lightning import (\n    Trainer,  # a\n    nonsense,  # b\n)\n"
    assert (3, "the comment '# b' next to it was removed by the rewrite.") in left(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["x = " + "1 + " * 3000 + "1\n", pytest.param("x = a" + ".b()" * 2000 + "\n", marks=pytest.mark.exhaustive)]
)
def test_what_is_nested_too_deeply_is_told_in_one_line(text: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "deep.py"
    path.write_text(f"import lightning\n{text}")
    assert main(["migrate", str(path)]) == 2
    assert "too deeply" in capsys.readouterr().err
    assert path.read_text() == f"import lightning\n{text}"


def test_a_file_that_may_not_be_written_keeps_all_files_as_they_were(tmp_path: Path, capsys: Any) -> None:
    paths = [tmp_path / "a.py", tmp_path / "b.py"]
    for path in paths:
        path.write_text("import lightning as L\n")
    paths[1].chmod(0o444)
    assert main(["migrate", *map(str, paths)]) == 2
    assert "may not be written" in capsys.readouterr().err
    assert [path.read_text() for path in paths] == ["import lightning as L\n"] * 2


def test_a_disk_that_fails_is_told_in_one_line(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.py"
    path.write_text("import lightning as L\n")

    def fail(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    assert main(["migrate", str(path)]) == 2
    assert "No space left" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.py"]
    assert path.read_text() == "import lightning as L\n"


def test_what_the_objects_of_a_program_do_not_have_here_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """import torch
import lightning as L
from accelerate import Accelerator
accelerator: Accelerator = Accelerator(log_with="wandb")
trainer = L.Trainer()
accelerator.init_trackers("run")
def main(accelerator):
    accelerator.print(trainer.callback_metrics, trainer.fit_loop)
    accelerator.profile()
state = torch.load(trainer.checkpoint_callback.best_model_path)
class Other:
    save = None
Other().save
"""
    file = tmp_path / "program.py"
    file.write_text(text)
    assert main(["migrate", str(file)]) == 1
    told = [line.partition("program.py:")[2] for line in capsys.readouterr().err.splitlines()]
    assert [line.partition(":")[0] for line in told] == ["6", "8", "9", "10"]
    for line, says in zip(told, ["Instead: a logger of", "fit_loop", "torch.profiler", "a folder here"], strict=True):
        assert says in line


# `accelerate launch` in other files


def launched(text: str, name: str = "train.sh") -> tuple[str, list[str]]:
    """Return a file after the rewrite, and what is left to do."""
    found = rewrite_launch(text.encode(), Path(name))
    again = rewrite_launch(found.code, Path(name))
    assert again.code == found.code, "a second rewrite changes nothing"
    return found.code.decode(), [each.text for each in found.unsettled]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("accelerate launch --num_processes 2 train.py --lr 1", "torchrun --nproc-per-node 2 train.py --lr 1"),
        ("accelerate launch --num-processes=2 t.py", "torchrun --nproc-per-node=2 t.py"),
        ("accelerate-launch --multi_gpu t.py", "torchrun --nproc-per-node gpu t.py"),
        (
            "python3 -m accelerate.commands.launch --num_processes 2 t.py",
            "python3 -m torch.distributed.run --nproc-per-node 2 t.py",
        ),
        ("accelerate launch --num_processes 1 -m my.train --x", "python -m my.train --x"),
        ("accelerate launch --num_processes 1 --no_python ./run", "./run"),
        ("accelerate launch --num_processes 2 --no_python ./run", "torchrun --nproc-per-node 2 --no-python ./run"),
        ("$BIN/accelerate launch --num_processes 2 t.py", "$BIN/torchrun --nproc-per-node 2 t.py"),
        ("accelerate launch --num_processes $N t.py", "torchrun --nproc-per-node $N t.py"),
        (
            "accelerate launch --num_processes 16 --num_machines 2 --machine_rank $R --main_process_ip h "
            "--main_process_port 1 t.py",
            "torchrun --nproc-per-node 8 --nnodes 2 --node-rank $R --master-addr h --master-port 1 t.py",
        ),
        (
            "accelerate launch --num_processes 4 --num_machines 2 --rdzv_backend c10d --main_process_ip h "
            "--main_process_port 1 t.py",
            "torchrun --nproc-per-node 2 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:1 t.py",
        ),
        (
            "accelerate launch --num_processes $((N * 8)) --num_machines $N t.py",
            "torchrun --nproc-per-node $(($((N * 8)) / $N)) --nnodes $N t.py",
        ),
        (
            "accelerate launch --mixed_precision bf16 --num_processes 2 t.py",
            "ACCELERATE_MIXED_PRECISION=bf16 torchrun --nproc-per-node 2 t.py",
        ),
        ("accelerate launch --mixed_precision no --num_processes 2 t.py", "torchrun --nproc-per-node 2 t.py"),
        (
            "srun -n 2 accelerate launch --cpu --debug --num_processes 2 t.py",
            "srun -n 2 env ACCELERATE_USE_CPU=true TRAINWRIGHT_DEBUG_MODE=true torchrun --nproc-per-node 2 t.py",
        ),
        (
            "A=1 accelerate launch --gpu_ids 0,1 --num_cpu_threads_per_process 4 --num_processes 2 t.py",
            "A=1 OMP_NUM_THREADS=4 CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node 2 t.py",
        ),
        (
            "accelerate launch --use_fsdp --fsdp_offload_params false --fsdp_auto_wrap_policy SIZE_BASED_WRAP "
            "--num_processes 2 t.py",
            "ACCELERATE_USE_FSDP=true FSDP_OFFLOAD_PARAMS=false FSDP_AUTO_WRAP_POLICY=SIZE_BASED_WRAP "
            "torchrun --nproc-per-node 2 t.py",
        ),
        (
            "accelerate launch --use_deepspeed --zero_stage 2 --offload_optimizer_device cpu --num_processes 2 t.py",
            "ACCELERATE_USE_DEEPSPEED=true ACCELERATE_DEEPSPEED_ZERO_STAGE=2 "
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE=cpu torchrun --nproc-per-node 2 t.py",
        ),
        (
            "accelerate launch --dynamo_backend inductor --dynamo_use_fullgraph --num_processes 2 t.py",
            "ACCELERATE_DYNAMO_BACKEND=inductor ACCELERATE_DYNAMO_USE_FULLGRAPH=true torchrun --nproc-per-node 2 t.py",
        ),
        (
            "x && accelerate launch \\\n  --multi_gpu \\\n  --num_processes 2 \\\n  t.py  # why\n",
            "x && torchrun \\\n  --nproc-per-node 2 \\\n  t.py  # why\n",
        ),
        (
            'L="accelerate launch --mixed_precision fp16 --num_processes 2"; $L t.py',
            'L="env ACCELERATE_MIXED_PRECISION=fp16 torchrun --nproc-per-node 2"; $L t.py',
        ),
        ("accelerate env | tee x\r\n", "trainwright env | tee x\r\n"),
        ("# accelerate launch t.py\npip install accelerate\n", "# accelerate launch t.py\npip install accelerate\n"),
    ],
)  # fmt: skip
def test_launch_commands_become_those_of_torchrun(before: str, after: str) -> None:
    assert launched(before) == (after, [])


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        (
            "Makefile",
            "t:\n\t@$(BIN)/accelerate launch --cpu --num_processes $(N) --num_machines $(M) t.py\n",
            "t:\n\t@ACCELERATE_USE_CPU=true $(BIN)/torchrun --nproc-per-node $$(($(N) / $(M))) --nnodes $(M) t.py\n",
        ),
        (
            "ci.yml",
            "- run: accelerate launch --mixed_precision bf16 --num_processes ${{ matrix.n }} t.py\n",
            "- run: ACCELERATE_MIXED_PRECISION=bf16 torchrun --nproc-per-node ${{ matrix.n }} t.py\n",
        ),
        (
            "ci.yml",
            "- run: >-\n    accelerate launch\n    --multi_gpu --num_processes 2\n    t.py\n- run: x\n",
            "- run: >-\n    torchrun --nproc-per-node 2\n    t.py\n- run: x\n",
        ),
        (
            "job.sbatch",
            "#SBATCH -N 2\nsrun accelerate launch --num_processes 4 --num_machines 2 t.py\n",
            "#SBATCH -N 2\nsrun torchrun --nproc-per-node 2 --nnodes 2 t.py\n",
        ),
    ],
)
def test_launch_commands_are_rewritten_in_files_of_several_kinds(name: str, before: str, after: str) -> None:
    assert launched(before, name) == (after, [])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("accelerate launch t.py", "For several write torchrun --nproc-per-node N"),
        ("accelerate launch --num_processes 2 --enable_cpu_affinity t.py", "start the processes under numactl"),
        ("accelerate launch --num_processes 2 --use_megatron_lm t.py", "Accelerator(strategy='tp')"),
        ("accelerate launch --num_processes 2 --megatron_lm_tp_degree 2 t.py", "Accelerator(strategy='tp')"),
        ("accelerate launch --num_processes 2 --mixed_precision fp8 t.py", "use bf16"),
        ("accelerate launch --num_processes 2 --deepspeed_hostfile h t.py", "torchrun on each machine"),
        ("accelerate launch --num_processes 2 --config_file nowhere.yaml t.py", "nowhere.yaml is not found"),
        ("accelerate config default", "delete the command"),
        ('["accelerate", "launch", "t.py"]', "a command as a list"),
        ("command:\n  - accelerate\n  - launch\n", "a command as a list"),
    ],
)
def test_what_a_launch_command_loses_is_reported(text: str, says: str) -> None:
    ((note),) = launched(text)[1]
    assert says in note


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("accelerate launch $ARGS t.py", "$ARGS holds options"),
        ("accelerate launch --num_processes 3 --num_machines 2 t.py", "cannot be divided"),
        ("accelerate launch --no_such_option 2 t.py", "--no_such_option 2 t.py"),
        ("accelerate launch --multi_gpu", "no script follows"),
    ],
)
def test_a_command_that_is_not_understood_is_unchanged(text: str, says: str) -> None:
    code, (note,) = launched(text)
    assert code == text
    assert note.startswith("this command is unchanged: ")
    assert says.split(" 2 ")[0] in note


_CONFIG = """compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config: {}
distributed_type: FSDP
fsdp_config:
  fsdp_offload_params: true
  fsdp_version: 2
gpu_ids: 0,1
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
same_network: true
use_cpu: false
"""


def test_a_configuration_file_of_accelerate_is_explained_key_by_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "default_config.yaml"
    path.write_text(_CONFIG)
    assert main(["migrate", str(path)]) == 1
    assert path.read_text() == _CONFIG
    told = dict(line.split(": ", 1)[1].split(": ", 1) for line in capsys.readouterr().err.splitlines())
    assert {key for key, text in told.items() if text == "is not needed."} == {
        "compute_environment", "debug", "deepspeed_config", "machine_rank", "main_training_function", "num_machines",
        "same_network", "use_cpu",
    }  # fmt: skip
    assert told["distributed_type"] == "Accelerator(strategy='fsdp')."
    assert told["fsdp_offload_params"].startswith("FullyShardedDataParallelPlugin(cpu_offload=True) or ")
    assert told["mixed_precision"] == "Accelerator(mixed_precision='bf16') or ACCELERATE_MIXED_PRECISION=bf16."
    assert told["num_processes"] == "torchrun --nproc-per-node 2 script.py."
    assert told["gpu_ids"] == "CUDA_VISIBLE_DEVICES=0,1."


def test_the_settings_of_a_named_configuration_file_become_those_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(_CONFIG)
    text = "accelerate launch --config_file fsdp.yaml --mixed_precision fp16 t.py"
    code, (note,) = launched(text, str(tmp_path / "train.sh"))
    assert set(code.split()) == {
        "ACCELERATE_USE_FSDP=true", "FSDP_OFFLOAD_PARAMS=true", "FSDP_VERSION=2", "ACCELERATE_MIXED_PRECISION=fp16",
        "CUDA_VISIBLE_DEVICES=0,1", "torchrun", "--nproc-per-node", "2", "t.py",
    }  # fmt: skip
    assert "its settings are in the command now" in note


@pytest.mark.parametrize("backend", ["", "--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy NO_WRAP"])
@pytest.mark.distributed
@pytest.mark.slow
def test_a_migrated_script_and_its_command_run(backend: str, tmp_path: Path) -> None:
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
    script.write_text(f"cd {tmp_path}\naccelerate launch --cpu --num_processes 2 {backend} train.py --x\n")
    assert main(["migrate", str(script), str(tmp_path / "train.py")]) == 0
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        ["bash", "-e", str(script)], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["2", "FSDP" if backend else "MULTI_CPU", "--x"]


def test_an_extensionless_shell_script_is_recognized(tmp_path: Path) -> None:
    path = tmp_path / "start"
    path.write_text("#!/usr/bin/env bash\naccelerate launch --num_processes 2 t.py\n")
    assert main(["migrate", str(path)]) == 0
    assert path.read_text() == "#!/usr/bin/env bash\ntorchrun --nproc-per-node 2 t.py\n"
