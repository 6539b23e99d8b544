"""The documentation site: complete, without broken links, and searchable without a network."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docs.site import build as site
from docs.site.reference import reference_pages

from tests.helpers.sources import ROOT
from trainwright import Accelerator, DeepSpeedStrategy, Trainer
from trainwright.callbacks import CALLBACKS


def _pages(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for one in entry.values() if isinstance(entry, dict) else entry:
            yield from _pages(one)


def test_every_page_is_in_the_navigation_once() -> None:
    listed = list(_pages(tomllib.loads((ROOT / "docs/site/zensical.toml").read_text())["project"]["nav"]))
    made = ["CHANGELOG.md", "CONTRIBUTING.md", "reference.md", "settings.md", "shown.md"]
    assert sorted(listed) == sorted([*made, *(path.name for path in (ROOT / "docs").glob("*.md"))])


def test_the_reference_shows_signature_arguments_and_members() -> None:
    pages = reference_pages()
    page = pages["trainwright.ModelCheckpoint"]
    assert "\n    save_top_k: int = 1,\n" in page
    assert "- `monitor`: the metric to rank by" in page
    assert "\n## best\\_model\\_path\n\nPath of the best checkpoint" in page
    assert "[Callback](trainwright.Callback.md)" in page
    assert "[ModelCheckpoint](trainwright.ModelCheckpoint.md)" in pages["reference"]
    for name in CALLBACKS:
        assert f"| `{name}` | callback | " in pages["settings"]
    assert "| `patience` | EarlyStopping | `3` | " in pages["settings"]
    for cls in (Trainer, Accelerator, DeepSpeedStrategy):
        settings = re.findall(rf"^\| (`.+?`) \| {cls.__name__} \|", pages["settings"], re.MULTILINE)
        assert set(inspect.signature(cls).parameters) <= set(re.findall(r"\w+", " ".join(settings)))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return site.build(tmp_path_factory.mktemp("build"), pictures=False)


@pytest.mark.engines
def test_the_site_loads_nothing_from_the_network(built: Path) -> None:
    pages = list(built.rglob("*.html"))
    assert len(pages) > 200
    for page in pages:
        loaded = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?((?:https?:)?//[^\" >]*)", page.read_text()
        )
        assert loaded == [], page.name


@pytest.mark.engines
def test_the_search_index_has_the_reference(built: Path) -> None:
    found = {item["title"]: item["location"] for item in json.loads((built / "search.json").read_text())["items"]}
    assert found["ModelCheckpoint"] == "trainwright.ModelCheckpoint.html"
    assert found["All settings"] == "settings.html"


@pytest.mark.engines
@pytest.mark.parametrize("target", ["absent.md", "training.md#absent"])
def test_a_broken_link_is_an_error(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {**dict.fromkeys(("reference", "settings"), "# Page\n"), "broken": f"# Broken\n\n[x]({target})\n"}
    monkeypatch.setattr(site, "reference_pages", lambda: pages)
    with pytest.raises(SystemExit, match=re.escape("broken.md")):
        site.build(tmp_path, pictures=False)


@pytest.mark.engines
@pytest.mark.requires("program:chromium", reason="a real browser")
@pytest.mark.requires("playwright", reason="it drives the browser")
def test_a_browser_searches_the_site_from_the_disk(built: Path) -> None:
    from playwright.sync_api import sync_playwright

    loaded: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        tab = browser.new_page()
        tab.on("request", lambda request: loaded.append(request.url))
        tab.goto((built / "examples" / "fsdp.html").as_uri())
        tab.get_by_role("button", name="Search").first.click()
        tab.get_by_role("combobox").press_sequentially("ModelCheckpoint")
        tab.locator("a", has_text="ModelCheckpoint").first.click()
        tab.wait_for_url("**/trainwright.ModelCheckpoint.html*")
        tab.goto((built / "index.html").as_uri())
        tab.get_by_role("button", name="Search").first.click()
        tab.get_by_role("combobox").press_sequentially("resume")
        tab.locator("a[href*='h=resume']").first.wait_for()
        first = [link.get_attribute("href") or "" for link in tab.locator("a[href*='h=resume']").all()[:3]]
        assert not any("trainwright." in link for link in first)  # guides come before attributes such as check_resume
        tab.goto((built / "settings.html").as_uri())
        tab.locator("input.filter").fill("save_top_k")
        assert [row.split()[:2] for row in tab.locator("tbody tr:visible").all_inner_texts()] == [
            ["save_top_k", "ModelCheckpoint"]
        ]
        browser.close()
    assert {url.partition(":")[0] for url in loaded} <= {"file", "data", "about"}
