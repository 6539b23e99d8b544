"""The rules of the architecture, read from the source: each holds in the whole tree and catches an offender."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers import architecture_rules as rules
from tests.helpers.sources import PARTS, ROOT, Breach, Source, package_sources, stub_sources

SOURCES = package_sources()

# Backends that trainer/ or callbacks/ may name.
NAMED_BACKENDS = {
    # says where the argument tpu_cores= of another trainer has gone
    ("trainer.configuration.argument_checks", "the string names the backend 'tpu'")
}


def _expect_none(breaches: list[Breach]) -> None:
    if breaches:
        pytest.fail("\n".join(map(str, breaches)), pytrace=False)


def _blind_loop_breaches(source: Source) -> list[Breach]:
    found = rules.blind_loop_breaches(source)
    return [breach for breach in found if (source.short, breach.what) not in NAMED_BACKENDS]


def test_every_part_is_a_folder_or_a_link_in_the_import_package() -> None:
    shown = {path.name for path in (ROOT / "src/trainwright").iterdir() if path.is_dir()} - {"__pycache__"}
    assert shown == set(PARTS)
    assert {source.part for source in SOURCES} == {"", *PARTS}


def test_imports_point_only_downward() -> None:
    _expect_none([breach for source in [*SOURCES, *stub_sources()] for breach in rules.layer_breaches(source)])


def test_there_is_no_import_cycle() -> None:
    assert rules.import_cycles(SOURCES) == []


@pytest.mark.parametrize(
    "text",
    [
        "from trainwright.core.b import f",
        "def g():\n    from trainwright.core.b import f",
        "if TYPE_CHECKING:\n    import trainwright.core.b",
    ],
)
def test_an_import_cycle_is_caught_wherever_the_import_is(text: str) -> None:
    sources = [Source("trainwright.core.a", text), Source("trainwright.core.b", "import trainwright.core.a")]
    assert rules.import_cycles(sources) == ["trainwright.core.a -> trainwright.core.b -> trainwright.core.a"]


def test_the_loop_knows_no_engine_and_no_device() -> None:
    _expect_none([breach for source in SOURCES for breach in _blind_loop_breaches(source)])


@pytest.mark.parametrize(
    ("rule", "module", "text", "complaint"),
    [
        (rules.layer_breaches, "core.x", "import trainwright.data.order", "core must not import data"),
        (rules.layer_breaches, "loggers.x", "def f():\n    from trainwright.trainer import trainer", "must not import"),
        (rules.layer_breaches, "trainer.x", "from trainwright import Trainer", "public face"),
        (rules.layer_breaches, "core.x", "from trainer.trainer import Trainer", "bare import"),
        (_blind_loop_breaches, "trainer.x", "isinstance(strategy, DDPStrategy)", "asks for the type DDPStrategy"),
        (_blind_loop_breaches, "callbacks.x", "if device.type == 'cuda': pass", "'cuda'"),
    ],
)
def test_an_offender_is_caught(rule: Callable[[Source], list[Breach]], module: str, text: str, complaint: str) -> None:
    found = rule(Source(f"trainwright.{module}", text))
    assert complaint in "\n".join(map(str, found))
