"""The pages of arguments in docs/, from the docstrings.

    python -m docs.site.arguments_page

writes them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import trainwright
from trainwright import Accelerator, TaskModule, Trainer
from trainwright.callbacks import CALLBACKS
from trainwright.core.registry import Registry
from trainwright.loggers import LOGGERS
from trainwright.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from trainwright.strategies import STRATEGIES
from trainwright.utils import ProfileKwargs

FOLDER = Path(__file__).parents[2] / "docs"
_MADE = "The page is made from the docstrings (`python -m docs.site.arguments_page`)."
_ARGUMENTS = f"""# Arguments

The arguments of the classes and methods that every program uses, of profilers, and what a task may define. Pages of
their own list those of [callbacks](callback-arguments.md), [loggers](logger-arguments.md) and
[strategies](strategy-arguments.md). {_MADE}
`help(…)` shows the same for every public name, with the errors that each
raises.
"""
_CALLBACKS = f"""# Arguments of callbacks

Every callback with a short name, and all of its arguments.
{_MADE}

A script creates them: `Trainer(callbacks=[EarlyStopping("val_loss", patience=5)])`. A configuration file names them by
the class or by the short name, and `null` or no `init_args` means the defaults:

```yaml
trainer:
  callbacks:
    - {{class_path: ModelCheckpoint, init_args: {{monitor: val_loss, save_last: link}}}}
    - {{class_path: early_stopping, init_args: {{monitor: val_loss, patience: 5}}}}
    - learning_rate_monitor
```

On the command line, `--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=val_loss` adds one, and
`trainwright fit --trainer.callbacks.help EarlyStopping` lists its arguments. [Callbacks](callbacks.md) explains them,
and how to write one.
"""
_LOGGERS = f"""# Arguments of loggers

Every logger with a short name, and all of its arguments.
{_MADE}

A script creates one or several: `Trainer(logger=["csv", WandbLogger(project="digits")])`. The same in a configuration
file:

```yaml
trainer:
  logger:
    - csv
    - {{class_path: WandbLogger, init_args: {{project: digits}}}}
```

On the command line, `--trainer.logger=csv` chooses one, and `trainwright fit --trainer.logger.help WandbLogger` lists
its arguments. [Logging](logging.md) explains what loggers receive and when, and how to write one.
"""
_STRATEGIES = f"""# Arguments of strategies

Every strategy with a short name, and all of its arguments.
{_MADE}

A script names a strategy with its options, or creates it: `Trainer(strategy="megatron:pp=2:tp=2")`,
`Trainer(strategy=FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"))`. The same in a configuration file:

```yaml
trainer:
  devices: 2
  strategy: {{class_path: FSDPStrategy, init_args: {{sharding_strategy: SHARD_GRAD_OP}}}}
```

On the command line, `--trainer.strategy=fsdp` chooses one, and `trainwright fit --trainer.strategy.help FSDPStrategy`
lists its arguments. [Strategies](strategies.md) says which one to choose.
"""
_WITHOUT_EFFECT = f"""# Arguments without effect

Arguments of Lightning and Accelerate that are accepted, so that programs run unchanged, and that change nothing here.
An argument that would change something, and is not supported, is an error that says what to use instead.
{_MADE}

| name | arguments | why |
|---|---|---|
"""
_PACKAGES = (
    *("", "accelerator", "bigmodels", "callbacks", "checkpoint", "core", "data", "loggers", "processes"),
    *("strategies", "trainer", "utilities", "utils"),
)
_PHRASE = "Accepted without effect"
_ENTRY = re.compile(r"^ {4}(?P<names>\w+(?:, \w+)*):(?P<text>.*(?:\n {8,}.*)*)", re.MULTILINE)


def _entries(function: Callable[..., Any]) -> dict[str, tuple[list[str], str]]:
    """Return the names and the text of the entry in a docstring that documents each argument."""
    found = {}
    args = re.search(r"^(?:Args|Attributes):\n((?: {4}.*\n?|\n)*)", inspect.getdoc(function) or "", re.MULTILINE)
    for entry in _ENTRY.finditer(args[1] if args else ""):
        names = entry["names"].split(", ")
        text = " ".join(entry["text"].split()).replace("|", "\\|")
        found.update(dict.fromkeys(names, (names, text)))
    return found


def _documented(function: Callable[..., Any]) -> dict[str, tuple[list[str], str]]:
    """Return the entries of all arguments, with those of base classes.

    An entry such as "See `VersionedLogger`. Event files are in `sub_dir`." becomes the entry of the base class, and its
    second sentence is added to the arguments that it names, or to all if it names none.
    """
    bases: list[Any] = list(function.__mro__[1:-1]) if inspect.isclass(function) else []
    reference = re.compile(rf"[Ss]ee `(?:{'|'.join(each.__name__ for each in bases)})`[.;]? ?")
    found: dict[str, tuple[list[str], str]] = {}
    for source in [*reversed(bases), function]:
        for name, (names, text) in _entries(source).items():
            refers = reference.match(text) if bases else None
            if refers is None or name not in found:
                found[name] = (names, text)
                continue
            rest = re.sub(r"^Default: [^.]*\.$", "", text[refers.end() :])  # the base class says it
            named = [each for each in names if f"`{each}`" in rest]
            if rest and (name in named or not named):
                found[name] = ([name], f"{found[name][1]} {rest}")
    return found


def arguments_table(function: Callable[..., Any]) -> Iterator[str]:
    """Yield the heading of a table, and a row for each entry of a docstring, in the order of the signature."""
    documented, shown = _documented(function), set()
    parameters = inspect.signature(function).parameters
    yield "| argument | default | meaning |\n|---|---|---|"
    rest = [name for name in _entries(function) if name not in parameters]
    # The constructor of a dataclass begins with the arguments of its base classes.
    order = [*_entries(function), *parameters] if is_dataclass(function) else [*parameters, *rest]
    for name in order:
        if name not in documented or name in shown:
            continue
        names, text = documented[name]
        names = [one for one in names if one in parameters or one in rest]
        shown.update(names)
        given = [parameters[one].default for one in names if one in parameters]
        defaults = dict.fromkeys("required" if value is inspect.Parameter.empty else f"`{value!r}`" for value in given)
        yield f"| {', '.join(f'`{one}`' for one in names)} | {', '.join(defaults)} | {text} |"


def _methods(cls: type) -> Iterator[str]:
    """Yield a table row for each public method, with the first sentence of its docstring."""
    yield "| method | what it does |\n|---|---|"
    for name, value in sorted(inspect.getmembers(cls, inspect.isfunction)):
        if not name.startswith("_") and value.__module__.startswith("trainwright"):
            first = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
            yield f"| `{name}{_names_of(value)}` | {first} |".replace("\\|", "|")


def _names_of(function: Callable[..., Any]) -> str:
    return f"({', '.join(name for name in inspect.signature(function).parameters if name != 'self')})"


def arguments_page() -> str:
    """Return the text of docs/arguments.md."""
    parts = [_ARGUMENTS]
    for title, function in {
        "Trainer": Trainer,
        "Trainer.fit": Trainer.fit,
        "TaskModule.log": TaskModule.log,
        "Accelerator": Accelerator,
    }.items():
        parts.append(f"## {title}\n\n" + "\n".join(arguments_table(function)) + "\n")
    for cls in (Profiler, SimpleProfiler, AdvancedProfiler, PyTorchProfiler, ProfileKwargs):
        parts.append(f"## {cls.__name__}\n\n" + "\n".join(arguments_table(cls)) + "\n")
    parts.append("## TaskModule\n\n" + "\n".join(_methods(TaskModule)) + "\n")
    return "\n".join(parts)


def _registered_page(introduction: str, registry: Registry[Any]) -> str:
    """Return a page with each class of a registry, its short names, its first paragraph and its arguments."""
    names: dict[type, list[str]] = {}
    for name in registry:
        made = registry.get(name)
        if inspect.isclass(made):
            names.setdefault(made, []).append(name)
    parts = [introduction]
    for cls, short in names.items():
        first = (inspect.getdoc(cls) or "").split("\n\n")[0]
        called = " or ".join(f"`{name}`" for name in short)
        head, *rows = arguments_table(cls)
        table = "\n".join([head, *rows]) if rows else "It has no arguments."
        parts.append(f"## {cls.__name__}\n\n{called}: {first}\n\n{table}\n")
    return "\n".join(parts)


def _public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield each public function, class and method once, with the name by which it is called."""
    seen = set()
    for package in _PACKAGES:
        module = getattr(trainwright, package) if package else trainwright
        for name in sorted(getattr(module, "__all__", ())):
            value = getattr(module, name)
            if not callable(value) or value in seen:
                continue
            seen.add(value)
            yield name, value
            if inspect.isclass(value):
                for method_name, method in inspect.getmembers(value, callable):
                    if not method_name.startswith("_"):
                        yield f"{name}.{method_name}", method


def _without_effect_page() -> str:
    """Return a page of the arguments that are accepted without effect."""
    rows = {}
    for name, function in _public_functions():
        for arguments, text in _entries(function).values():
            if _PHRASE not in text:
                continue
            before, after = text.split(_PHRASE)
            reason = re.sub(r" *Default: [^.]*\.$", "", before + after).strip(" .:")
            defined_in = getattr(function, "__qualname__", name)  # a method is listed once, not for each sub-class
            rows.setdefault(
                (defined_in, *arguments), f"| `{name}` | {_code(arguments)} | {reason[:1].upper()}{reason[1:]}. |"
            )
    return _WITHOUT_EFFECT + "\n".join(sorted(rows.values(), key=str.lower)) + "\n"


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def pages() -> dict[str, str]:
    """Return the text of each page by the name of its file."""
    return {
        "arguments.md": arguments_page(),
        "callback-arguments.md": _registered_page(_CALLBACKS, CALLBACKS),
        "logger-arguments.md": _registered_page(_LOGGERS, LOGGERS),
        "strategy-arguments.md": _registered_page(_STRATEGIES, STRATEGIES),
        "without-effect.md": _without_effect_page(),
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
