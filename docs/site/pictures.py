"""What the tools print and draw, made by running them on small projects: a page of the site, and docs/pictures.

    python -m docs.site.pictures

writes the pictures of README.md and of the start page into docs/pictures. It needs chromium.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

_LLAMA_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
_FIND_RATE = """
import sys; sys.path.insert(0, "src")
import matplotlib; matplotlib.use("agg")
from digits.data import DigitsData
from digits.task import DigitsClassifier
from trainwright import Trainer, Tuner, seed_everything
seed_everything(0)
tuner = Tuner(Trainer(max_epochs=1, enable_progress_bar=False))
found = tuner.lr_find(DigitsClassifier(width=8), datamodule=DigitsData())
found.plot(suggest=True).savefig("lr_find.png", dpi=120)
"""
_CHROMIUM = shutil.which("chromium")


def _run(project: Path, *arguments: str, fails: bool = False) -> str:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=project, env=environment, capture_output=True, text=True)
    if bool(done.returncode) != fails:
        sys.exit(f"{' '.join(arguments)}\n{done.stdout}{done.stderr}")
    return done.stdout


def _shown(project: Path, *words: str, fails: bool = False) -> str:
    """Run a command of trainwright and return it with its output, as Markdown."""
    printed = _run(project, "-m", "trainwright", *words, fails=fails).replace(str(project), project.name)
    return f"```sh\ntrainwright {' '.join(words)}\n```\n\n```text\n{printed}```\n\n"


def _screenshots(report: Path, folder: Path) -> str:
    """Take pictures of a report in a browser, light and dark, and return the Markdown that shows them."""
    from playwright.sync_api import sync_playwright

    text = ""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            tab = browser.new_page(color_scheme=scheme, viewport={"width": 1200, "height": 1000})
            tab.goto(report.as_uri())
            tab.wait_for_selector(".uplot")
            tab.screenshot(path=folder / f"report-{scheme}.png")
            text += f"![A report with curves and events](report-{scheme}.png#only-{scheme})\n"
        browser.close()
    return text


def shown_page(folder: Path, *, pictures: bool) -> str:
    """Return the page, and write its pictures into `folder`. A report is only shown where chromium is installed."""
    text = "# What it looks like\n\n"
    if not pictures:
        return text + "This site was built without pictures. `make docs` makes them.\n"
    with tempfile.TemporaryDirectory() as made:
        _run(Path(made), "-m", "trainwright", "new", "digits")
        _run(Path(made), "-m", "trainwright", "new", "language", "--template", "language-model")
        digits, project = Path(made).resolve() / "digits", Path(made).resolve() / "language"
        text += "The language model that `trainwright new language --template language-model` writes.\n\n"
        text += "## The plan of a run\n\n" + _shown(project, "plan", "config.yaml")
        text += "## Where a step's time goes\n\n" + _shown(project, "profile", "config.yaml", "--steps", "10")
        text += "## The report of a run\n\n"
        fit = ("-m", "trainwright", "fit", "--config", "config.yaml")
        _run(project, *fit, "trainer.max_epochs=1")
        shutil.copytree((project / "runs/checkpoints/last").resolve(), project / "runs/checkpoints/first")
        _run(project, *fit, "trainer.max_epochs=2", "--ckpt_path", "last")
        report = project / _run(project, "-m", "trainwright", "report", "runs").strip()
        note = "The report is shown where chromium is installed.\n"
        text += _screenshots(report, folder) if _CHROMIUM else note
        text += "\n## The difference of two runs\n\n"
        _run(project, *fit, "trainer.max_epochs=1", "trainer.default_root_dir=other", "task.lr=0.01")
        text += _shown(project, "diff", "runs/csv/version_0", "runs/csv/version_1", fails=True)
        replayed = ("runs/checkpoints/first", "--step", "80", "--config", "runs/config.yaml")
        text += "## A step again\n\n" + _shown(project, "replay", *replayed)
        text += "## A forecast of memory\n\nA language model with 8 billion parameters. Nothing is allocated.\n\n"
        (project / "model.json").write_text(json.dumps(_LLAMA_8B))
        sizes = ("--batch-size", "1", "--sequence-length", "2048", "--devices", "8", "--device-memory", "80GB")
        text += _shown(project, "estimate", "model.json", *sizes)
        _run(digits, "-c", _FIND_RATE)
        shutil.copy(digits / "lr_find.png", folder)
        return text + "## The search for a learning rate\n\n![The loss over the learning rate](lr_find.png)\n"


def _in_terminal(project: Path, script: str) -> str:
    """Run a script in a terminal of 100 columns, and return what it has printed, with the last state of each bar."""
    from rich.text import Text

    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (40, 100))
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "COLUMNS": "100", "TERM": "xterm-256color"}
    running = subprocess.Popen([sys.executable, script], cwd=project, env=environment, stdout=child, stderr=child)
    os.close(child)
    printed = b""
    while True:
        try:
            printed += os.read(parent, 65536)
        except OSError:  # the script has ended, and the terminal with it
            break
    if running.wait():
        sys.exit(printed.decode())
    lines: list[str] = []
    for line in printed.decode().replace("\r\n", "\n").split("\n"):
        states = [state for state in line.split("\r") if Text.from_ansi(state).plain.strip()]
        shown = Text.from_ansi(states[-1]).plain if states else ""
        if lines and lines[-1].startswith("Epoch") and shown.startswith(("Epoch", "Validation")):
            lines.pop()  # the terminal overwrites the bar
        if not shown.startswith("Validation"):
            lines.append(shown)
    return re.sub(r"\n\n+", "\n", "\n".join(lines))


def readme_pictures(folder: Path) -> None:
    """Write a terminal and a report of the classifier that `trainwright new` writes, as pictures."""
    from rich.console import Console
    from rich.text import Text

    with tempfile.TemporaryDirectory() as made:
        _run(Path(made), "-m", "trainwright", "new", "digits")
        project = Path(made).resolve() / "digits"
        screen = _in_terminal(project, "train.py").replace(f"{project}/", "")
        console = Console(record=True, width=100, file=io.StringIO())
        console.print(Text.from_ansi(screen))
        drawn = console.export_svg(title="python train.py")
        drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # these fonts would come from the network
        (folder / "terminal.svg").write_text(drawn, encoding="utf-8")
        report = project / _run(project, "-m", "trainwright", "report", "runs").strip()
        _screenshot(report, folder / "report.png", wait_for=".uplot")


def _screenshot(page: Path, picture: Path, *, wait_for: str) -> None:
    """Take a picture of the top of a page, once an element is on it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 820})
        tab.goto(page.as_uri())
        tab.wait_for_selector(wait_for)
        tab.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    from docs.site.build import build

    pictures = Path(__file__).parents[1] / "pictures"
    readme_pictures(pictures)
    with tempfile.TemporaryDirectory() as made:  # the site shows the two pictures that were just made
        site = build(Path(made), pictures=False)
        _screenshot(site / "index.html", pictures / "start-page.png", wait_for="h1")
