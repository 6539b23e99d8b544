"""The documentation site, from the pages of docs/ and the docstrings.

    python -m docs.site.build [--output build] [--no-pictures]

replaces OUTPUT/pages, OUTPUT/site and OUTPUT/.cache. Nothing is loaded from the network, neither here nor by the pages.
A broken link is an error.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from docs.site.pictures import shown_page
from docs.site.reference import reference_pages

SITE = Path(__file__).parent
DOCS = SITE.parent
ROOT = DOCS.parent
# Zensical's theme loads this script on pages that are opened from the disk. `build` replaces it by worker.js.
_WORKER = re.compile(r'https://unpkg\.com/iframe-worker/shim"')


def write_pages(folder: Path) -> list[str]:
    """Write all pages except shown.md, and copy the files that they use. Return the names of the API's pages."""
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
    reference = reference_pages()
    for name, text in reference.items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
    for name in ("site.css", "worker.js"):
        shutil.copy(SITE / name, folder)
    shutil.copytree(DOCS / "pictures", folder / "pictures")
    return [name for name in reference if name.startswith("trainwright.")]


def _with_api(configuration: str, names: list[str]) -> str:
    """Return the configuration with the pages of the public names in its navigation, by package."""
    packages: dict[str, list[str]] = {}
    for name in names:
        package, _, short = name.rpartition(".")
        packages.setdefault(package, []).append(f'{{ "{short}" = "{name}.md" }}')
    sections = [f'{{ "{package}" = [{", ".join(pages)}] }}' for package, pages in packages.items()]
    return configuration.replace('"API" = ["reference.md"]', f'"API" = ["reference.md", {", ".join(sections)}]')


def _order(item: dict[str, Any]) -> int:
    """Return the place of a page among results that match equally well: guides, examples, classes, changes."""
    location = item["location"]
    if location.startswith("examples/"):
        return 1
    if location.startswith("trainwright."):
        return 2
    if location.startswith("CHANGELOG"):
        return 3
    return 0


def rank_search(site: Path) -> None:
    """Rewrite the index of the search so that guides come before attributes.

    Each member of a class has an item of its own in Zensical's index, whose title outranks the text of every guide: a
    search for "resume" would list `check_resume` of three classes first. The text of members becomes a part of the item
    of their class. Among equal matches the search keeps the order of the index.
    """
    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    items: list[dict[str, Any]] = []
    classes: dict[str, dict[str, Any]] = {}
    for item in index["items"]:
        page, _, member = item["location"].partition("#")
        if page.startswith("trainwright.") and member:
            # The item of a page comes before those of its headings.
            classes[page]["text"] += f" {item['title']} {item['text']}"
            continue
        if page.startswith("trainwright."):
            classes[page] = item
        items.append(item)
    index["items"] = sorted(items, key=_order)
    text = json.dumps(index)
    (site / "search.json").write_text(text, encoding="utf-8")
    (site / "search.js").write_text(f"var __index = {text};", encoding="utf-8")  # for pages opened from the disk


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
    names = write_pages(output / "pages")
    (output / "pages" / "shown.md").write_text(shown_page(output / "pages", pictures=pictures), encoding="utf-8")
    configuration = (SITE / "zensical.toml").read_text(encoding="utf-8")
    (output / "zensical.toml").write_text(_with_api(configuration, names), encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(output / "zensical.toml")]
    done = subprocess.run(command, cwd=output, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    rank_search(output / "site")
    for page in (output / "site").rglob("*.html"):
        up = "../" * (len(page.relative_to(output / "site").parts) - 1)
        page.write_text(_WORKER.sub(f'{up}worker.js"', page.read_text(encoding="utf-8")), encoding="utf-8")
    return output / "site"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "build",
        help="folder to write (default: build); its pages, site and .cache are deleted",
    )
    parser.add_argument("--no-pictures", dest="pictures", action="store_false", help="train no model for pictures")
    options = parser.parse_args()
    print(build(options.output.resolve(), pictures=options.pictures) / "index.html")
