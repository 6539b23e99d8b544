"""What is called how, and where it lies: one name for one thing, folders that a reader can take in, no circles."""

from __future__ import annotations

from tests.helpers import name_rules
from tests.helpers.sources import Source, package_sources

SOURCES = package_sources()

# File names that mean the same wherever they stand, each with what.
LIKE_FILES = {
    "registry": "the short names of a kind of plug-in, over core's Registry",
    "strategy": "the Strategy contract, and an engine's own in its folder",
    "plugin": "an engine's options by Accelerate's names, in its folder",
    "constants": "file names and choices, and Accelerate's path to them",
    "memory": "the memory of the host, and Accelerate's path to it",
    "launch": "the command, and Accelerate's path to it",
    "config": "an engine's configuration, and Accelerate's path to the command",
    "env": "the command, and Accelerate's path to it",
    "estimate": "the command, and Accelerate's path to it",
    "model_summary": "the callback's summary, and Lightning's path to it",
    "settings": "what the arguments of a Trainer, of an Accelerator, say",
    "options": "what a user may set of the folder's thing",
    "step": "a step, and an engine's own in its folder",
    "state": "what is saved: of training, of a model, of an engine's",
    "run": "what a callback may see of a run, and the run itself",
    "checks": "what is refused before anything is touched",
    "traces": "what an engine leaves on modules, to be taken off",
    "non_finite": "whether a step is finite, and what becomes of one that is not",
}


def test_a_class_name_stands_for_one_class() -> None:
    found = name_rules.repeated_classes(SOURCES)
    assert found == {}


def test_a_file_name_stands_for_one_kind_of_thing() -> None:
    found = name_rules.repeated_files(SOURCES)
    assert {name: homes for name, homes in found.items() if name not in LIKE_FILES} == {}


def test_folders_do_not_lean_on_each_other() -> None:
    assert name_rules.folder_circles(SOURCES) == []


def test_repeated_names_are_caught() -> None:
    sources = [
        Source("trainwright.core.a", "class A: pass\nclass B: pass"),
        Source("trainwright.data.a", "class A: pass\ndef B(): pass"),
        Source("trainwright.data.b", "class C:\n    class A: pass"),
    ]
    assert name_rules.repeated_classes(sources) == {"A": ["core.a", "data.a"]}
    assert name_rules.repeated_files(sources) == {"a": ["core.a", "data.a"]}


def test_a_circle_of_folders_is_caught() -> None:
    sources = [
        Source("trainwright.trainer.one.a", "def f():\n    from trainwright.trainer.two.b import B"),
        Source("trainwright.trainer.two.b", "from trainwright.trainer.one import a"),
        Source("trainwright.trainer.two", "from trainwright.trainer.two.b import B", is_folder=True),
        Source("trainwright.trainer.c", "from trainwright.trainer.one.a import A"),
        Source("trainwright.trainer.one.d", "from trainwright.trainer.c import C"),  # what stands around it
    ]
    assert name_rules.folder_circles(sources) == [("trainer.one", "trainer.two")]
