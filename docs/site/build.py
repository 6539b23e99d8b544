"""The documentation site, from the pages of docs/ and the docstrings.

    python -m docs.site.build [--output build] [--no-pictures]

writes OUTPUT/site. Nothing is loaded from the network, neither here nor by the pages. A broken link is an error.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from docs.site.pictures import shown_page
from docs.site.reference import reference_pages

SITE = Path(__file__).parent
DOCS = SITE.parent
ROOT = DOCS.parent
# The theme loads this script on pages that are opened from the disk.
_WORKER = re.compile(r'https://unpkg\.com/iframe-worker/shim"')


def write_pages(folder: Path) -> None:
    """Write the Markdown of every page but that of the pictures."""
    (folder / "examples").mkdir(parents=True)
    pages = [*DOCS.glob("*.md"), ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    titles = {path.name: path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for path in pages}
    for path in pages:
        text = path.read_text(encoding="utf-8").replace("](../", "](").replace("](docs/", "](")
        text = re.sub(r"(\]\(examples/\w+)\.py\)", r"\1.md)", text).replace("```py-fragment", "```python")
        text = re.sub(r"\[(?:docs/)?([\w-]+\.md)\](?=\(\1)", lambda match: f"[{titles[match[1]]}]", text)
        (folder / path.name).write_text(text, encoding="utf-8")
    for path in (DOCS / "examples").glob("*.py"):
        text = f"# {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
        (folder / "examples" / f"{path.stem}.md").write_text(text, encoding="utf-8")
    for name, text in reference_pages().items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
    for name in ("site.css", "worker.js"):
        shutil.copy(SITE / name, folder)


def build(output: Path, *, pictures: bool = True) -> Path:
    """Build the site.

    Args:
        output: folder for the pages and the site.
        pictures: whether to train small models and show their curves and reports.

    Returns:
        The folder of the site.

    Raises:
        SystemExit: if the build fails or warns.
    """
    for name in ("pages", "site", ".cache"):
        shutil.rmtree(output / name, ignore_errors=True)
    write_pages(output / "pages")
    (output / "pages" / "shown.md").write_text(shown_page(output / "pages", pictures=pictures), encoding="utf-8")
    shutil.copy(SITE / "zensical.toml", output)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(output / "zensical.toml")]
    done = subprocess.run(command, cwd=output, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    for page in (output / "site").rglob("*.html"):
        up = "../" * (len(page.relative_to(output / "site").parts) - 1)
        page.write_text(_WORKER.sub(f'{up}worker.js"', page.read_text(encoding="utf-8")), encoding="utf-8")
    return output / "site"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("--output", type=Path, default=ROOT / "build", help="folder to write (default: build)")
    parser.add_argument("--no-pictures", dest="pictures", action="store_false", help="train no model for pictures")
    options = parser.parse_args()
    print(build(options.output.resolve(), pictures=options.pictures) / "index.html")
