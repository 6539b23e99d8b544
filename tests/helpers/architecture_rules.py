"""The rules of the architecture: layers, cycles, optional packages, the environment, a loop that knows no engine."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator

from tests.helpers.sources import PARTS, Breach, Import, Source

# The command and the templates use the package as a user does; what lies below them names the file.
_MAY_USE_THE_FACE = {"cli", "templates"}
_BELOW_STRATEGIES = {"core", "callbacks", "profilers", "loggers", "data", "checkpoint", "processes"}
_BELOW_TRAINER = _BELOW_STRATEGIES | {"strategies", "bigmodels"}
_MAY_IMPORT = {
    "core": {"core"},
    "callbacks": {"core", "callbacks"},
    "profilers": {"core", "profilers"},
    "loggers": {"core", "loggers"},
    "data": {"core", "data"},
    "checkpoint": {"core", "checkpoint"},
    "processes": {"core", "processes"},
    "optimizers": {"core", "optimizers"},
    "generation": {"core", "generation"},
    "commands": {"cli", "launch"},
    "utilities": {"core", "callbacks", "data", "utilities"},
    "strategies": _BELOW_STRATEGIES | {"strategies"},
    "bigmodels": _BELOW_TRAINER,
    "accelerator": _BELOW_TRAINER | {"accelerator", "generation"},
    "trainer": _BELOW_TRAINER | {"trainer"},
    "utils": _BELOW_TRAINER | {"accelerator", "launch", "utils"},
    "launch": _BELOW_TRAINER | {"accelerator", "trainer", "launch"},
    "cli": _BELOW_TRAINER | {"accelerator", "trainer", "launch", "cli"},
    "templates": set(PARTS),
}

# What may be imported when a module is loaded; anything else is imported in the function that needs it.
_EAGER = {"torch", "numpy", "safetensors", "xxhash", "cloudpickle", "yaml", "trainwright"}
_EAGER_CORE = {"torch", "numpy", "trainwright"}
# Modules of eager packages that are as heavy as a package of their own.
_LAZY_MODULES = ("torch.utils.tensorboard", "torch._dynamo", "torch._inductor", "torch.distributed.checkpoint")
# The dependencies that come with an installation; any other package is optional and has one file of its own.
_INSTALLED = _EAGER | {"jinja2", "jsonargparse", "rich", "tensorboard", "torchmetrics", "tqdm"}

_BACKENDS = {
    "cuda", "nccl", "gloo", "mpi", "hccl", "mps", "xla", "xpu", "hpu", "npu", "tpu", "rocm",
    "ddp", "fsdp", "fsdp2", "deepspeed", "megatron", "zero1", "zero2", "zero3",
}  # fmt: skip
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z0-9]+")

_READER = "trainwright.core.process"
_WRITER = "trainwright.processes.launcher"
_WRITING_METHODS = {"update", "setdefault", "pop", "popitem", "clear"}
_READING_METHODS = {"get", "keys", "items", "values", "copy"}


def layer_breaches(source: Source) -> list[Breach]:
    """Law 1: an import points only downward, in functions and for types too; it is absolute and names its home."""
    found = []
    for entry in source.imports:
        if entry.target.startswith("."):
            found.append(source.breach(entry.line, f"relative import {entry.target!r}; write it from `trainwright.`"))
        elif entry.root in PARTS:
            found.append(
                source.breach(
                    entry.line,
                    f"bare import of {entry.root!r} makes a second copy of its classes; "
                    f"import trainwright.{entry.root}",
                )
            )
        elif entry.root == "trainwright" and source.part:
            pieces = entry.target.split(".")
            part = pieces[1] if len(pieces) > 1 else ""
            if part not in PARTS:
                if source.part in _MAY_USE_THE_FACE:
                    continue
                found.append(
                    source.breach(
                        entry.line,
                        f"import of {entry.target!r} from the package's public face; "
                        "import it from the file where it lives",
                    )
                )
            elif part not in _MAY_IMPORT[source.part]:
                found.append(source.breach(entry.line, f"{source.part} must not import {part} ({entry.target})"))
    return found


def bare_import_breaches(source: Source) -> list[Breach]:
    """Tests and benchmarks too import `trainwright.callbacks`, never `callbacks`."""
    return [
        source.breach(entry.line, f"bare import of {entry.root!r}; import trainwright.{entry.root}")
        for entry in source.imports
        if entry.root in PARTS or entry.target.startswith("src.")
    ]


def import_cycles(sources: Iterable[Source]) -> list[str]:
    """Law 1: the imports at module level (for types too) have no cycle; returns each as `a -> b -> a`."""
    by_name = {source.module: source for source in sources}
    edges = {
        name: sorted(
            {
                home
                for entry in source.imports
                if not entry.nested and (home := _home(entry, by_name)) != name and home is not None
            }
        )
        for name, source in by_name.items()
    }
    cycles: list[str] = []
    state: dict[str, str] = {}

    def visit(name: str, path: list[str]) -> None:
        state[name] = "open"
        for target in edges[name]:
            if state.get(target) == "open":
                cycle = [*path[path.index(target) :], target]
                cycles.append(" -> ".join(cycle))
            elif target not in state:
                visit(target, [*path, target])
        state[name] = "done"

    for name in sorted(edges):
        if name not in state and name != "trainwright":  # the public face names everything, lazily
            visit(name, [name])
    return cycles


def _home(entry: Import, by_name: dict[str, Source]) -> str | None:
    """Return the module of ours that an import statement loads, if any."""
    if entry.target in by_name:
        return entry.target
    parent = entry.target.rpartition(".")[0]
    return parent if parent in by_name and parent != "trainwright" else None


def eager_import_breaches(source: Source) -> list[Breach]:
    """Law 12: only torch and a few light packages are imported when a module is loaded."""
    allowed = _EAGER_CORE if source.part == "core" else _EAGER
    found = []
    for entry in source.imports:
        if entry.nested or entry.type_only or entry.target.startswith("."):
            continue
        heavy = next((name for name in _LAZY_MODULES if f"{entry.target}.".startswith(f"{name}.")), None)
        if heavy or (
            entry.root not in allowed and entry.root not in sys.stdlib_module_names and entry.root not in PARTS
        ):
            found.append(
                source.breach(
                    entry.line,
                    f"{heavy or entry.root} is imported when the module is loaded; import it in "
                    "the function that needs it",
                )
            )
    return found


def scattered_packages(sources: Iterable[Source]) -> list[str]:
    """Law 12: an optional package is imported in one file only; returns `package: files` for those in several."""
    users: dict[str, set[str]] = {}
    for source in sources:
        for root in {entry.root for entry in source.imports} | set(_imported_by_call(source)):
            if root and root not in _INSTALLED and root not in sys.stdlib_module_names and root not in PARTS:
                users.setdefault(root, set()).add(source.module)
    return [f"{root}: {', '.join(sorted(files))}" for root, files in sorted(users.items()) if len(files) > 1]


def _imported_by_call(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        argument = node.args[0]
        if name in ("require_package", "import_module", "__import__") and isinstance(argument, ast.Constant):
            yield str(argument.value).partition(".")[0]


def environment_breaches(source: Source) -> list[Breach]:
    """Law 11: core/process.py alone reads the environment, src/trainwright/processes/launcher.py alone writes it."""
    found = [
        source.breach(entry.line, f"import of {entry.target}; write os.{entry.target[3:]} where it is allowed")
        for entry in source.imports
        if entry.target in ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv")
    ]
    for node, use in _environment_uses(source.tree):
        if source.module == _READER and use != "write":
            continue
        if source.module == _WRITER and use != "read":
            continue
        found.append(
            source.breach(
                node, f"{use}s the environment: only core/process.py reads it, only processes/launcher.py writes it"
            )
        )
    return found


def _environment_uses(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield each use of the environment as "read", "write" or "use" (handed on whole)."""
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"):
            continue
        if node.attr == "getenv":
            yield node, "read"
        elif node.attr in ("putenv", "unsetenv"):
            yield node, "write"
        elif node.attr in ("environ", "environb"):
            yield node, _use_of_environ(node, parents.get(node))


def _use_of_environ(node: ast.Attribute, parent: ast.AST | None) -> str:
    if isinstance(parent, ast.Subscript) and parent.value is node:
        return "read" if isinstance(parent.ctx, ast.Load) else "write"
    if isinstance(parent, ast.Attribute) and parent.attr in _WRITING_METHODS:
        return "write"
    if isinstance(parent, ast.Attribute) and parent.attr in _READING_METHODS:
        return "read"
    if isinstance(parent, (ast.Compare, ast.Call, ast.Dict)):
        return "read"
    if isinstance(parent, (ast.AugAssign, ast.Assign)) and node in ast.walk(_target(parent)):
        return "write"
    return "use"


def _target(statement: ast.AugAssign | ast.Assign) -> ast.AST:
    return statement.target if isinstance(statement, ast.AugAssign) else statement.targets[0]


def blind_loop_breaches(source: Source) -> list[Breach]:
    """Law 3: trainer/ and callbacks/ ask a strategy for what differs; they know no engine and no kind of device."""
    if source.part not in ("trainer", "callbacks"):
        return []
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and _called_name(node) in ("isinstance", "issubclass") and len(node.args) > 1:
            asked = [name for child in ast.walk(node.args[1]) for name in _identifiers(child)]
            found += [source.breach(node, f"asks for the type {name}") for name in asked if name.endswith("Strategy")]
        for name in _identifiers(node):
            found += [source.breach(node, f"the name {name!r} is a backend's") for _ in _backends_in(name)]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in source.docstrings:
            found += [
                source.breach(node, f"the string names the backend {word!r}") for word in _backends_in(node.value)
            ]
    return found


def _called_name(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _identifiers(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.arg, ast.keyword)):
        yield node.arg or ""
    elif isinstance(node, ast.alias):
        yield from node.name.split(".")


def _backends_in(text: str) -> list[str]:
    words = {word.lower() for word in _WORD.findall(text)} | set(re.split(r"[^a-z0-9]+", text.lower()))
    return sorted(words & _BACKENDS)
