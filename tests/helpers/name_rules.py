"""Rules about names and folders: what is called the same, how full a folder is, which folders lean on each other."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable

from tests.helpers.sources import Source


def repeated_classes(sources: Iterable[Source]) -> dict[str, list[str]]:
    """Return each class name that is defined more than once at the top of a module, with the modules."""
    homes = defaultdict(list)
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(source.short)
    return {name: sorted(modules) for name, modules in sorted(homes.items()) if len(modules) > 1}


def repeated_files(sources: Iterable[Source]) -> dict[str, list[str]]:
    """Return each file name that stands in two folders of one part, or in two parts, with the modules."""
    homes = defaultdict(list)
    for source in sources:
        if not source.is_folder:
            homes[source.module.rpartition(".")[2]].append(source.short)
    return {name: sorted(modules) for name, modules in sorted(homes.items()) if len(modules) > 1}


def folder_circles(sources: Iterable[Source]) -> list[tuple[str, str]]:
    """Return each pair of folders whose modules import each other, at whatever level of code.

    A folder and one inside it are no pair: what is inside may use what stands around it, and is used by it. An import
    of a package's face counts as one of that folder.
    """
    found = list(sources)
    folder_of = {source.module: source.folder for source in found}
    leans: set[tuple[str, str]] = set()
    for source in found:
        for imported in source.imports:
            target = imported.target if imported.target in folder_of else imported.target.rpartition(".")[0]
            other = folder_of.get(target)
            if other is not None and not _is_inside(other, source.folder) and not _is_inside(source.folder, other):
                leans.add((source.folder, other))
    short = [tuple(folder.removeprefix("trainwright.") for folder in pair) for pair in leans]
    return sorted((one, other) for one, other in short if one < other and (other, one) in short)


def _is_inside(folder: str, other: str) -> bool:
    return f"{folder}.".startswith(f"{other}.")
