"""Rewrite `accelerate launch …` in shell files, Makefiles, batch scripts and YAML files as torchrun or Python commands.
Options that the Accelerator reads as environment variables are written before the command. Layout is kept. Commands
that cannot be read, and options without a counterpart, are reported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainwright.cli.migration.launch_config import read_config
from trainwright.cli.migration.launch_options import Option, find_option, option_name, variable_value
from trainwright.cli.migration.object_uses import Unsettled
from trainwright.cli.migration.rewrite_imports import Rewritten
from trainwright.cli.migration.shell_words import Word, open_quote, split_words

_LAUNCH = re.compile(
    r"(?<![\w/.-])(?:(?P<python>\S*python[\d.]*|\$[({]?PYTHON[)}]?)[ \t]+-m[ \t]+accelerate\.commands\."
    r"(?:accelerate_cli[ \t]+)?launch\b|(?P<path>(?:[\w.$(){}~-]*/)*)accelerate(?:-launch|[ \t]+launch)\b)"
)
_LISTED = re.compile(r"[\"']?\baccelerate[\"']?(?:,\s*|\s*\n\s*-\s*)[\"']?launch\b")
_OTHER = re.compile(
    r"(?<![\w/.-])accelerate(?:[ \t]+|-)(?P<command>config|env|estimate-memory|merge-weights|test|tpu-config)\b"
)
_SAME = ("env", "estimate-memory")
_ANSWERS = {
    "config": "no configuration file is needed; delete the command. Settings are arguments of the script",
    "merge-weights": "trainwright checkpoint export writes one file of weights; see docs/checkpoint-commands.md",
    "test": "there is no such command; run the script with fewer steps",
    "tpu-config": "TPUs are not supported; delete the command",
}
_STARTS = re.compile(r"(?:^|[;&|({@!`]|\b(?:then|do|else)|(?:^|\s)-|(?:^|\s)[\w-]+:(?:\s*[>|][+-]?)?)\s*$")
_ASSIGNED = re.compile(r"(?:^|[\s@;&|(])\w+=[^\s\"']*\s+$")
_FOLDED = re.compile(r":\s*>[+-]?\s*$")
_SWITCHES = ("true", "false")
_ENDINGS = (".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".sub", ".job", ".mk", ".yaml", ".yml")


class _UnclearError(Exception):
    """A command that is not rewritten; the text says why."""


@dataclass
class _Command:
    """One launch command: its options by name, and what the rewrite makes of it."""

    match: re.Match[str]
    is_makefile: bool
    quote: str
    edits: list[tuple[int, int, str]] = field(default_factory=list)
    options: dict[str, tuple[list[Word], str, int]] = field(
        default_factory=dict
    )  # words, value, end of the word before
    defaults: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)

    def value(self, name: str) -> str | None:
        """Return the value of an option, or else that of the configuration file."""
        return self.options[name][1] if name in self.options else self.defaults.get(name)

    def replace(self, name: str, text: str | None) -> None:
        """Replace an option where it is written, or remove it; add it if it is from the configuration file."""
        if name not in self.options:
            self.added += [] if text is None else [text]
            return
        words, _, before = self.options[name]
        self.edits.append((before if text is None else words[0].start, words[-1].end, text or ""))


def rewrite_launch(code: bytes, path: Path) -> Rewritten:
    """Rewrite the commands of a file."""
    text = code.decode()
    edits: list[tuple[int, int, str]] = []
    unsettled: set[Unsettled] = set()
    for match in _LAUNCH.finditer(text):
        if _is_comment(text, match.start()):
            continue
        command = _Command(
            match, "makefile" in path.name.lower() or path.suffix == ".mk", open_quote(text, match.start())
        )
        try:
            _rewrite(command, text, path)
            edits += command.edits
        except _UnclearError as error:
            command.notes = [f"this command is unchanged: {error}."]
        unsettled |= {Unsettled(_line(text, match.start()), note) for note in command.notes}
    for match in _LISTED.finditer(text):
        note = "a command as a list: write torchrun, --nproc-per-node and the number of processes instead."
        unsettled.add(Unsettled(_line(text, match.start()), note))
    for match in _OTHER.finditer(text):
        name = match["command"]
        if _is_comment(text, match.start()):
            continue
        if name in _SAME:
            edits.append((match.start(), match.end(), f"trainwright {name}"))
        else:
            unsettled.add(Unsettled(_line(text, match.start()), f"accelerate {name}: {_ANSWERS[name]}."))
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return Rewritten(text.encode(), sorted(unsettled))


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _is_comment(text: str, position: int) -> bool:
    return text[text.rfind("\n", 0, position) + 1 : position].lstrip().startswith("#")


def _rewrite(command: _Command, text: str, path: Path) -> None:
    words = split_words(text, command.match.end(), quote=command.quote, folded=_is_folded(text, command.match.start()))
    script = _read_options(command, words)
    if script is None and not command.quote:
        raise _UnclearError("no script follows on the line")
    config = command.value("config_file")
    if config is not None:
        command.defaults = _read_defaults(command, config, path)
    if command.value("mixed_precision") == "fp8":
        command.notes.append("--mixed_precision fp8: training in 8 bits is not supported; use bf16.")
    for name in dict.fromkeys([*command.options, *command.defaults]):
        option = find_option(name)
        if option is not None and option.kind in ("variable", "nothing", "note"):
            _settle(command, name, option)
    _write_head(command, text)


def _is_folded(text: str, position: int) -> bool:
    """Return whether a position is in a folded block of YAML (`run: >`)."""
    lines = text[: text.find("\n", position) if "\n" in text[position:] else len(text)].split("\n")
    indent = len(lines[-1]) - len(lines[-1].lstrip())
    for line in reversed(lines[:-1]):
        if line.strip() and len(line) - len(line.lstrip()) < indent:
            return _FOLDED.search(line) is not None
    return False


def _read_options(command: _Command, words: list[Word]) -> Word | None:
    """Collect the options before the script; return the script's word, None if there is none."""
    i, before = 0, command.match.end()
    while i < len(words):
        word = words[i]
        if not word.text.startswith("-"):
            if (
                "$" in word.text
                and not word.bare.endswith(".py")
                and any(each.bare.endswith(".py") for each in words[i + 1 :])
            ):
                raise _UnclearError(f"{word.text} holds options; rewrite them where they are assigned")
            return word
        name = option_name(word.text)
        option = find_option(name)
        if option is None:
            raise _UnclearError(f"the option {word.text} is unknown")
        used, value = [word], word.text.partition("=")[2]
        follows = words[i + 1] if i + 1 < len(words) else None
        if "=" not in word.text and follows is not None:
            is_switch = follows.bare.lower() in _SWITCHES
            takes_value = option.takes_value and name not in ("module", "no_python")
            if is_switch or (takes_value and name != "fsdp_activation_checkpointing"):
                used, value = [word, follows], follows.text
        command.options[name] = (used, value, before)
        before = used[-1].end
        i += len(used)
    return None


def _read_defaults(command: _Command, config: str, path: Path) -> Mapping[str, str]:
    name = Word(config, 0, 0).bare
    for file in (Path(name), path.parent / name):
        if file.is_file():
            command.notes.append(f"--config_file {name}: its settings are in the command now; compare them.")
            return read_config(file.read_text(encoding="utf-8"))
    command.notes.append(f"--config_file {config} is not found: run trainwright migrate on it, and write its settings.")
    return {}


def _settle(command: _Command, name: str, option: Option) -> None:
    value = command.value(name) or ""
    command.replace(name, None)
    if option.kind == "note":
        command.notes.append(f"--{name} was removed: {option.text}.")
    elif option.kind == "variable" and not (value.lower() == "false" and not option.takes_value):
        given = variable_value(name, value)
        if given is not None and given != "fp8":
            command.variables[option.text] = given


def _write_head(command: _Command, text: str) -> None:
    """Replace `accelerate launch` and the options that torchrun has too."""
    gpus = command.value("gpu_ids")
    if gpus is not None:
        command.replace("gpu_ids", None)
        if gpus != "all":
            command.variables["CUDA_VISIBLE_DEVICES"] = gpus
    if "config_file" in command.options:
        command.replace("config_file", None)
    machines = command.value("num_machines") or "1"
    processes = command.value("num_processes")
    several = {"multi_gpu", "use_fsdp", "use_deepspeed"} & {*command.options, *command.defaults}
    if processes is None and (several or machines != "1"):
        command.added.append("--nproc-per-node gpu")
    elif processes is None:
        command.notes.append(
            "no --num_processes: the command starts one process now. For several write torchrun --nproc-per-node N."
        )
    is_single = machines == "1" and (processes == "1" or (processes is None and not several))
    _write_processes(command, processes, machines, is_single=is_single)
    _write_torchrun_options(command, is_single=is_single)
    python, folder = command.match["python"], command.match["path"] or ""
    if is_single:
        program = "" if "no_python" in command.options else python or f"{folder}python"
        if "no_python" in command.options:
            command.replace("no_python", None)
    else:
        program = f"{python} -m torch.distributed.run" if python else f"{folder}torchrun"
        if "no_python" in command.options:
            command.replace("no_python", "--no-python")
    if "module" in command.options:
        command.replace("module", "-m")
    variables = " ".join(f"{name}={value}" for name, value in command.variables.items())
    needs_env = variables and not _starts_command(text, command)
    new = " ".join(filter(None, ["env" if needs_env else "", variables, program, *command.added]))
    end = command.match.end()
    if not new:  # --no_python: the program itself begins the command
        end += len(text[end:]) - len(text[end:].lstrip(" \t"))
    command.edits.append((command.match.start(), end, new))


def _write_processes(command: _Command, processes: str | None, machines: str, *, is_single: bool) -> None:
    if processes is not None:
        text = None
        if not is_single:
            separator = (
                "=" if "num_processes" in command.options and len(command.options["num_processes"][0]) == 1 else " "
            )
            text = f"--nproc-per-node{separator}{_processes_of_a_machine(command, processes, machines)}"
        command.replace("num_processes", text)
    if "num_machines" in command.options or machines != "1":
        command.replace("num_machines", None if machines == "1" else f"--nnodes {machines}")


def _processes_of_a_machine(command: _Command, processes: str, machines: str) -> str:
    if machines == "1":
        return processes
    if processes.isdecimal() and machines.isdecimal():
        if int(processes) % int(machines):
            raise _UnclearError(f"{processes} processes cannot be divided among {machines} machines")
        return str(int(processes) // int(machines))
    one, other = (value.strip("\"'") for value in (processes, machines))
    return f"{'$$' if command.is_makefile else '$'}(({one} / {other}))"


def _write_torchrun_options(command: _Command, *, is_single: bool) -> None:
    backend = command.value("rdzv_backend") or "static"
    endpoint = backend != "static" and command.value("main_process_ip") is not None
    for name in dict.fromkeys([*command.options, *command.defaults]):
        option = find_option(name)
        if option is None or option.kind != "torchrun":
            continue
        value = command.value(name)
        text: str | None = f"{option.text} {value}"
        if is_single or (name == "rdzv_backend" and backend == "static"):
            text = None
        elif endpoint and name == "main_process_ip":
            port = command.value("main_process_port")
            text = f"--rdzv-endpoint {value}" + (f":{port}" if port else "")
        elif endpoint and name == "main_process_port":
            text = None
        command.replace(name, text)


def _starts_command(text: str, command: _Command) -> bool:
    """Return whether variables may be assigned there: at the start of a command, not as an argument of another one."""
    line = text.rfind("\n", 0, command.match.start())
    before = text[line + 1 : command.match.start()]
    if command.quote or (not before.strip() and text[: max(line, 0)].rstrip("\r").endswith("\\")):
        return False
    return bool(_STARTS.search(before) or _ASSIGNED.search(before))


def is_command_file(path: Path, code: bytes) -> bool:
    """Return whether a file holds commands: by its name, or by the first line of a shell script."""
    name = path.name.lower()
    if path.suffix in _ENDINGS or name in ("makefile", "gnumakefile") or name.startswith("dockerfile"):
        return True
    return not path.suffix and re.match(rb"#!.*\b(?:ba|z|k|da)?sh\b", code) is not None
