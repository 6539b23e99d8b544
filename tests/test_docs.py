"""The documentation is true: its programs run, its links lead somewhere, its tables say what the code says."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.runs import quiet_trainer
from tests.helpers.selection import mostly_exhaustive
from tests.helpers.sources import ROOT
from tests.helpers.tasks import RecordingCallback, RegressionTask, regression_loader
from trainwright import ModelCheckpoint, TaskModule, Trainer
from trainwright.callbacks import CALLBACKS
from trainwright.cli.configs.class_names import own_name
from trainwright.cli.main import COMMANDS
from trainwright.core.names.foreign_names import ANSWERS
from trainwright.loggers import LOGGERS
from trainwright.strategies import STRATEGIES
from trainwright.strategies.precision_names import parse_precision

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]+\]\((?P<target>[^)]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text and the 1-based line on which the text begins."""

    language: str
    text: str
    line: int


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _blocks(path: Path, language: str) -> list[Block]:
    text = _read(path)
    found = [
        Block(match["language"], match["text"], text[: match.start("text")].count("\n") + 1)
        for match in _FENCE.finditer(text)
    ]
    return [block for block in found if block.language == language]


def _prose(path: Path) -> str:
    return _FENCE.sub("", _read(path))


def _page(name: str) -> Path:
    return ROOT / "docs" / f"{name}.md"


def _program(path: Path) -> str:
    """Return the Python blocks of a page as one program, every line where it stands on the page."""
    lines: list[str] = []
    for block in _blocks(path, "python"):
        lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return "\n".join(lines) + "\n"


def _starts_processes(path: Path) -> bool:
    return any(call in _program(path) for call in ("devices=2", "debug_launcher("))


def _after(path: Path, mark: str) -> str:
    """Return what follows the HTML comment that begins with `mark`, up to the next empty line after it."""
    _, found, rest = _read(path).partition(f"<!-- {mark}")
    assert found, f"{path.name} has no comment <!-- {mark} … -->"
    return rest.partition("-->\n")[2].lstrip("\n").partition("\n\n")[0]


def _rows(table: str) -> list[list[str]]:
    """Return the cells of a Markdown table, its head and the line under it left out."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def _table(path: Path, *head: str) -> list[list[str]]:
    """Return the rows of the table whose head begins with these cells."""
    _, found, rest = _read(path).partition("| " + " | ".join(head) + " |")
    assert found, f"{path.name} has no table {head}"
    return _rows("|" + rest.partition("\n\n")[0])


def _code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def _anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", _prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _run(command: list[str], folder: Path, timeout_s: float = 240) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture
def page_module() -> Iterator[types.ModuleType]:
    """A module that a page's program runs in, so that its classes have a home."""
    module = types.ModuleType("docs_page")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


IN_PROCESS = [path for path in PAGES[1:] if _program(path).strip() and not _starts_processes(path)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    mostly_exhaustive(IN_PROCESS, keep=[path for path in IN_PROCESS if path.stem != "parity"]),
    ids=lambda path: path.stem,
)
def test_the_examples_of_a_page_run(
    path: Path, page_module: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for registry in (CALLBACKS, LOGGERS, STRATEGIES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    exec(compile(_program(path), str(path), "exec"), vars(page_module))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("path", [path for path in PAGES[1:] if _starts_processes(path)], ids=lambda path: path.stem)
@pytest.mark.exhaustive
def test_the_examples_with_several_processes_run_as_a_script_without_a_main_guard(path: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_program(path))
    assert "__main__" not in script.read_text()
    _run([sys.executable, "-W", "error", str(script)], tmp_path)


@pytest.mark.slow
def test_the_readmes_script_trains_tests_and_resumes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_program(README))
    printed = _run([sys.executable, "-W", "error", str(script)], tmp_path).splitlines()
    accuracy = next(line for line in printed if line.startswith("[{'test_acc'"))
    assert ast.literal_eval(accuracy)[0]["test_acc"] > 0.85
    assert printed[-1] == "8 {'width': 128, 'lr': 0.003}"
    assert (tmp_path / "runs" / "checkpoints" / "last" / "manifest.json").is_file()


def _shell(text: str) -> list[str]:
    functions = f'python() {{ "{sys.executable}" "$@"; }}\ntrainwright() {{ python -m trainwright "$@"; }}\n'
    return ["bash", "-e", "-c", functions + text]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    _run(_shell(_strategy_commands()[0]), folder)
    return folder / "words"


STRATEGY_PAGES = ("strategies", "ddp", "fsdp", "deepspeed", "tensor-parallel")


def _strategy_commands() -> list[str]:
    """Return the shell blocks of the pages on strategies. The first one generates the project of the others."""
    return [block.text for name in STRATEGY_PAGES for block in _blocks(_page(name), "sh")]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("number", range(1, len(_strategy_commands())))
@pytest.mark.exhaustive
def test_the_command_lines_of_the_strategies_run(number: int, project: Path) -> None:
    printed = _run(_shell(_strategy_commands()[number]), project)
    assert "train_loss" in printed
    assert number > 1 or "918.7 K trainable parameters" in printed


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(1000)
def test_the_commands_from_texts_to_a_chat_model_run(tmp_path: Path) -> None:
    blocks = [block.text for block in _blocks(_page("language-models"), "sh")]
    printed = _run(_shell("\n".join(blocks)), tmp_path, timeout_s=900)
    test = re.search(r"test loss: +(\d\.\d+) nats per token \(guessing: (\d\.\d+)\)", printed)
    assert test is not None, printed
    assert float(test[1]) < 0.6 * float(test[2])
    assert printed.count("The statement") > 8  # after each epoch, and at the end
    assert (tmp_path / "writer" / "exported" / "model.safetensors").is_file()
    answers = re.search(r"test loss: +(\d\.\d+) nats per token of an answer", printed)
    assert answers is not None, printed
    assert float(answers[1]) < 4


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("path", [README, _page("start")], ids=lambda path: path.stem)
def test_the_first_command_lines_run(path: Path, tmp_path: Path) -> None:
    (block,) = _blocks(path, "sh")
    printed = _run(_shell(block.text), tmp_path)
    assert "test_acc" in printed
    assert (tmp_path / "digits" / "runs" / "config.yaml").is_file()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_three_commands_find_the_nan(tmp_path: Path) -> None:
    page = _page("debugging")
    (tmp_path / "cosine.py").write_text(_blocks(page, "python")[0].text)
    (tmp_path / "config.yaml").write_text(_blocks(page, "yaml")[0].text)
    (commands,) = _blocks(page, "sh")
    printed = " ".join(_run(_shell(f"exec 2>&1\n{commands.text}"), tmp_path).split())
    raised, replayed, operation = (block.text for block in _blocks(page, "text"))
    for shown in (raised.partition(" …")[0], *replayed.splitlines(), *operation.splitlines()[1:]):
        assert " ".join(shown.split()) in printed


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_python_block_is_python(path: Path) -> None:
    for language in ("python", "py-fragment"):
        for block in _blocks(path, language):
            compile("\n" * (block.line - 1) + block.text, str(path), "exec", ast.PyCF_ONLY_AST)


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.stem)
def test_every_link_leads_somewhere(path: Path) -> None:
    broken = []
    for match in _LINK.finditer(_prose(path)):
        target, _, anchor = match["target"].partition("#")
        if target.startswith("http"):
            continue
        file = (path.parent / target).resolve() if target else path
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(match["target"])
    assert broken == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_name_under_trainwright_exists(path: Path) -> None:
    import trainwright

    missing = []
    for text in _code(_prose(path)):
        if re.fullmatch(r"trainwright(\.\w+)+", text):
            found: Any = trainwright
            for name in text.split(".")[1:]:
                found = getattr(found, name, None) if not inspect.ismodule(found) else _member(found, name)
                if found is None:
                    missing.append(text)
                    break
    assert missing == []


def _member(module: types.ModuleType, name: str) -> Any:
    from importlib import import_module

    try:
        return getattr(module, name)
    except AttributeError:
        try:
            return import_module(f"{module.__name__}.{name}")
        except ModuleNotFoundError:
            return None


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_file_that_is_named_exists(path: Path) -> None:
    """A path with a folder of the tree in front of it, such as `tests/test_docs.py`, is one of the tree."""
    folders = ("trainer/", "callbacks/", "strategies/", "loggers/", "templates/", "src/", "tests/", "benchmarks/")
    named = [text for text in _code(_prose(path)) if text.startswith(folders) and "<" not in text]
    assert [text for text in named if not (ROOT / text).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_argument_of_the_trainer_that_is_shown_exists(path: Path) -> None:
    known = set(inspect.signature(Trainer).parameters)
    used = {
        keyword.arg
        for node in ast.walk(ast.parse(_program(path)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Trainer"
        for keyword in node.keywords
    }
    in_text = re.findall(r"`Trainer\((\w+)=", _read(path))
    assert ({*used, *in_text} - {None}) <= known


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_command_that_is_shown_exists(path: Path) -> None:
    commands = re.findall(r"^\s*trainwright (\w[\w-]*)", _read(path), re.MULTILINE)
    commands += re.findall(r"`trainwright (\w[\w-]*)", _read(path))
    commands += re.findall(r"-m trainwright (\w[\w-]*)", _read(path))
    assert set(commands) <= set(COMMANDS)


def test_every_name_of_accelerate_that_is_refused_is_listed() -> None:
    listed = {
        name for row in _table(_page("coming-from-accelerate"), "Accelerate", "write instead") for name in _code(row[0])
    }
    assert set(ANSWERS["Accelerate"]) <= listed
    assert not {name for name in listed if own_name(f"accelerate.{name}")}


class _Order(RegressionTask):
    """Notes which of its hooks are called, each once."""

    def __init__(self, names: list[str], seen: list[str]) -> None:
        super().__init__()
        for name in names:
            if hasattr(TaskModule, name):
                object.__setattr__(self, name, self._noting(name, getattr(self, name), seen))

    def _noting(self, name: str, hook: Any, seen: list[str]) -> Any:
        def noted(*args: Any) -> Any:
            if name not in seen and not self._in_sanity_check():
                seen.append(name)
            return hook(*args)

        noted.__signature__ = inspect.signature(hook)  # type: ignore[attr-defined]  # steps are asked what they take
        return noted

    def _in_sanity_check(self) -> bool:
        return self._run is not None and self._run.sanity_checking

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_the_order_of_events_is_the_documented_one(tmp_path: Path) -> None:
    block = _after(_page("training"), "events of a fit")
    documented = re.findall(r"^ *([a-z_]+)(?: {2,}.*)?$", block, re.MULTILINE)
    assert len(documented) == len(set(documented)) > 35

    seen: list[str] = []

    def note(event: str, trainer: Any) -> None:
        # Validation and the moves to the device come in the sanity check first; their place is the later one.
        if event not in seen and (event.startswith("on_sanity") or not trainer.sanity_checking):
            seen.append(event)

    trainer = quiet_trainer(
        max_epochs=1,
        num_sanity_val_steps=1,
        default_root_dir=tmp_path,
        enable_checkpointing=True,
        callbacks=[RecordingCallback(note=note), ModelCheckpoint(save_on_train_epoch_end=True)],
    )
    loader = regression_loader(8, batch_size=4)
    trainer.fit(_Order(documented, seen), loader, loader)
    assert seen == documented


def test_the_table_of_precisions_is_the_codes() -> None:
    rows = _table(_page("training"), "`precision`", "parameters")
    assert [_code(row[0])[0] for row in rows] == [
        "32-true",
        "64-true",
        "16-true",
        "bf16-true",
        "16-mixed",
        "bf16-mixed",
    ]
    for name, parameters, products, inputs, saved, scaled in rows:
        precision = parse_precision(_code(name)[0])
        held = str(precision.param_dtype or torch.float32).removeprefix("torch.")
        assert (parameters, inputs, saved) == (held, held, held)
        assert products == str(precision.autocast_dtype or precision.param_dtype or torch.float32).removeprefix(
            "torch."
        )
        assert scaled == ("yes" if precision.scaled else "no")


def test_the_loggers_that_have_a_name_are_listed() -> None:
    rows = _table(_page("logging"), "name", "class", "writes")
    assert {_code(row[0])[0]: _code(row[1])[0] for row in rows} == {
        name: LOGGERS.get(name).__name__ for name in LOGGERS
    }


def test_the_callbacks_that_have_a_name_are_listed() -> None:
    rows = _table(_page("callbacks"), "name", "class", "does")
    assert {_code(row[0])[0]: _code(row[1])[0] for row in rows} == {
        name: CALLBACKS.get(name).__name__ for name in CALLBACKS
    }
