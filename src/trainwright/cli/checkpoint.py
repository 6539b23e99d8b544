"""`trainwright checkpoint ls|show|verify|diff|merge|export|convert` and `trainwright merge-weights`.

Exit codes: 0 for success, 1 if `verify` finds damage or `diff` finds a difference, 2 for errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trainwright.cli.main import check_subcommand, table_lines
from trainwright.core.errors import CheckpointError, ConfigurationError, visible
from trainwright.core.host.folders import is_url

if TYPE_CHECKING:
    from trainwright.checkpoint.interop.diff import CheckpointDifference
    from trainwright.checkpoint.interop.export import Exported

_COMMANDS = ("ls", "show", "verify", "diff", "merge", "export", "convert")
_FOUND = 1  # exit code: `verify` has found damage, or `diff` a difference
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SHARD_SIZE = "5GB"  # default of `export`
_MAX_LINES = 20  # of each kind of difference


def checkpoint(argv: Sequence[str]) -> int:
    """Run `trainwright checkpoint`; see `trainwright checkpoint --help`.

    Returns:
        The exit code: 0, or 1 if `verify` finds damage or `diff` finds a difference.

    Raises:
        CheckpointError: a checkpoint is missing, damaged or not supported, or a file cannot be read or written.
        ConfigurationError: an option is not valid.
    """
    parser = _parser()
    check_subcommand("checkpoint", argv, _COMMANDS)
    wanted = parser.parse_args(argv)
    command: Callable[[argparse.Namespace], int] = wanted.command
    try:
        return command(wanted)
    except BrokenPipeError:  # an OSError, which `main` handles: the reader of the output, such as `head`, has closed it
        raise
    except OSError as error:  # missing, no permission to read or write, or no space
        raise CheckpointError(str(error)) from error


def _print(text: object, file: TextIO | None = None) -> None:
    """Print text that may come from a file of another person, with control characters escaped."""
    print(visible(str(text)), file=file)


def _print_json(facts: object) -> None:
    _print(json.dumps(_plain(facts), indent=2))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainwright checkpoint",
        description="Inspect checkpoints, and convert and export weights.",
        epilog="exit codes: 0; 1 if verify finds damage or diff a difference; 2 for errors",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str, *, as_json: bool) -> Any:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(command=run)
        if as_json:
            command.add_argument("--json", action="store_true", help="print JSON")
        return command

    one = add("ls", _ls, "list a run's checkpoints, with damaged ones marked", as_json=True)
    one.add_argument("folder", help="the run's folder, or that of its checkpoints; or a URL, as s3://bucket/run")
    one.add_argument("--verify", action="store_true", help="compare every file's hash, not its size only")
    one = add("show", _show, "print what a resume from a checkpoint restores", as_json=True)
    one.add_argument("path", type=Path, help="a checkpoint")
    one = add("verify", _verify, "compare checkpoints with their manifests, hashes included", as_json=True)
    one.add_argument("paths", type=Path, nargs="+", help="checkpoints, or folders with checkpoints at any depth")
    one = add("diff", _diff, "compare two checkpoints, bit by bit", as_json=True)
    one.add_argument("left", type=Path)
    one.add_argument("right", type=Path)
    one = add("merge", _merge, "merge the shards of a model into one safetensors file", as_json=False)
    one.add_argument("source", type=Path, help="a checkpoint, or a folder of Hugging Face shards")
    one.add_argument("target", type=Path, help="the file to write")
    _add_export(add("export", _export, "write the weights alone, for other programs", as_json=False))
    _add_convert(add("convert", _convert, "convert a checkpoint of another program", as_json=False))
    return parser


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a checkpoint, or a folder of Hugging Face safetensors")
    parser.add_argument("target", type=Path, help="the file to write; with --sharded the folder")
    parser.add_argument("--sharded", action="store_true", help="shards with an index, in Hugging Face's layout")
    parser.add_argument(
        "--max-shard-size", default=_SHARD_SIZE, help=f"of one shard: 5GB, 500MB, 2GiB, ... (default: {_SHARD_SIZE})"
    )
    parser.add_argument("--dtype", choices=["fp32", "fp16", "bf16"], help="convert floating-point tensors to this")
    parser.add_argument("--expand-tied", action="store_true", help="write tied weights under each of their names")
    layout = (
        "tp=2,pp=2: write a Megatron folder for these parallel sizes; vocab=N pads the vocabulary; impl=local uses the "
        "names of Megatron's local layers"
    )
    parser.add_argument("--megatron", metavar="LAYOUT", help=layout)
    parser.add_argument(
        "--config", type=Path, help="with --megatron: the model's transformers config.json, or its folder"
    )


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Convert a Lightning .ckpt, a folder of Accelerate's save_state, of torch.distributed.checkpoint or of "
        "DeepSpeed, or a state dict (.pt, .pth, .bin, .safetensors). A Megatron folder becomes a transformers folder. "
        "Pickles are parsed, never executed, unless --trust-pickle is given."
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, help="the checkpoint folder to write")
    parser.add_argument("--config", type=Path, help="of a Megatron model: transformers' config.json, or its folder")
    parser.add_argument(
        "--drop-unknown", action="store_true", help="skip values that are not plain data; nothing is executed"
    )
    parser.add_argument(
        "--trust-pickle", action="store_true", help="unpickle: runs ANY code in the file; only for trusted files"
    )
    help_names = "names of an optimizer's parameters in its order, one per line; once per optimizer"
    parser.add_argument("--param-names", type=Path, action="append", default=[], metavar="FILE", help=help_names)
    parser.add_argument(
        "--optimizer-class", action="append", default=[], metavar="NAME", help="such as AdamW; once per optimizer"
    )
    parser.add_argument("--step", type=int, help="completed optimizer steps, if not in the file")
    parser.add_argument("--epoch", type=int, help="finished epochs, if not in the file")


# Inspection


def _ls(wanted: argparse.Namespace) -> int:
    from trainwright.cli.checkpoint_facts import list_folder, list_remote

    if is_url(wanted.folder):
        if wanted.verify:
            raise ConfigurationError(f"--verify reads every file, and {wanted.folder} is remote. Download it first.")
        rows = list_remote(wanted.folder)
    else:
        rows = list_folder(Path(wanted.folder), hashes=wanted.verify)
    if wanted.json:
        _print_json([dataclasses.asdict(row) for row in rows])
        return 0
    if not rows:
        _print(f"no checkpoints in {wanted.folder}")
        return 0
    table = [["NAME", "STEP", "EPOCH", "KIND", "SIZE", "AGE", "METRICS"]]
    for row in rows:
        if row.step is None:  # the manifest cannot be read
            table.append([row.name, "", "", "", "", "", "DAMAGED"])
            continue
        metrics = " ".join(f"{name}={value:.6g}" for name, value in row.metrics.items())
        state = "DAMAGED" if row.problems else metrics
        table.append(
            [row.name, str(row.step), str(row.epoch), row.kind or "", _size(row.bytes), _age(row.age_s), state]
        )
    for line in table_lines(table):
        _print(line)
    for row in rows:
        for problem in row.problems:
            _print(f"{row.name}: {problem}")
    return 0


def _show(wanted: argparse.Namespace) -> int:
    from trainwright.cli.checkpoint_facts import describe

    facts = describe(wanted.path)
    if wanted.json:
        _print_json(facts)
    else:
        _print_tree(facts, "")
    return 0


def _verify(wanted: argparse.Namespace) -> int:
    from trainwright.checkpoint import verify
    from trainwright.cli.checkpoint_facts import checkpoints_at

    # A pattern such as `runs/checkpoints/*` also matches the index and other files beside the checkpoints.
    folders = [path for path in wanted.paths if not path.is_file()]
    problems_of: dict[str, list[str]] = {}  # checkpoint → problems; an empty list if it is intact
    if not folders:
        folders = wanted.paths  # files only: `checkpoints_at` raises the error
    for folder in folders:
        for path in checkpoints_at(folder):
            problems_of[str(path)] = verify(path)
    for path in wanted.paths:
        if path not in folders:
            _print(f"note: {path} is a file, not a checkpoint, and is skipped", file=sys.stderr)
    damaged = any(problems_of.values())
    if wanted.json:
        _print_json({"damaged": damaged, "checkpoints": problems_of})
    else:
        for name, problems in problems_of.items():
            _print(f"{name}: {'damaged' if problems else 'intact'}")
            for problem in problems:
                _print(f"  {problem}")
    return _FOUND if damaged else 0


def _diff(wanted: argparse.Namespace) -> int:
    from trainwright.checkpoint.interop.diff import diff_checkpoints

    difference = diff_checkpoints(wanted.left, wanted.right)  # false if nothing differs
    if wanted.json:
        largest = difference.largest()
        facts = dataclasses.asdict(difference)
        facts["largest"] = None if largest is None else dataclasses.asdict(largest)
        _print_json({"same": not difference, **facts})
    else:
        _print_difference(difference, wanted.left, wanted.right)
    return _FOUND if difference else 0


def _print_difference(difference: CheckpointDifference, left: Path, right: Path) -> None:
    if not difference:
        _print("identical, by the hashes in their manifests; verify compares the files with these")
        return
    _print_some(f"only in {left}:", difference.only_left)
    _print_some(f"only in {right}:", difference.only_right)
    _print_some("values that differ:", [f"{item.path}: {item.left} -> {item.right}" for item in difference.values])
    if not difference.tensors:
        return
    first = difference.tensors[0]
    largest = difference.largest()
    most = "" if largest is None else f"; largest difference {largest.max_abs:.6g} in {largest.path}"
    count = f"{len(difference.tensors)} of {difference.num_tensors}"
    _print(f"{count} compared tensors differ, the first is {first.path}{most}")
    lines: list[str] = []
    for item in difference.tensors:
        # Tensors with other shapes or dtypes have no difference as a number.
        what = f"{item.left} -> {item.right}" if item.max_abs is None else f"{item.max_abs:.6g}"
        lines.append(f"{item.path}: {what}")
    _print_some("tensors that differ, by max |left - right|:", lines)


def _print_some(title: str, lines: Sequence[str]) -> None:
    """Print a title and the first lines below it. Print nothing without lines."""
    if not lines:
        return
    _print(title)
    for line in lines[:_MAX_LINES]:
        _print(f"  {line}")
    if len(lines) > _MAX_LINES:
        _print(f"  ... and {len(lines) - _MAX_LINES} more (all of them with --json)")


# Merge, export and conversion


def _merge(wanted: argparse.Namespace) -> int:
    from trainwright.checkpoint.interop.export import export_weights

    _print_exported(export_weights(wanted.source, wanted.target))
    return 0


def merge_weights(argv: Sequence[str]) -> int:
    """Run `trainwright merge-weights`, which is `accelerate merge-weights` with an option `--max_shard_size`."""
    from trainwright.checkpoint.interop.sharded_folder import merge_weights as merge

    parser = argparse.ArgumentParser(
        prog="trainwright merge-weights",
        description="Merge the weights that FSDP (SHARDED_STATE_DICT) or DeepSpeed saved in shards into one model.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "checkpoint_directory", type=Path, help="a checkpoint, pytorch_model_fsdp_0, or a folder of DeepSpeed"
    )
    parser.add_argument("output_path", type=Path, help="the folder to write model.safetensors into")
    parser.add_argument(
        "--safe_serialization", action=argparse.BooleanOptionalAction, default=True, help="write safetensors"
    )
    parser.add_argument(
        "--unsafe_serialization", dest="safe_serialization", action="store_false", help="write pytorch_model.bin"
    )
    parser.add_argument("--remove_checkpoint_dir", action="store_true", help="delete the shards afterwards")
    parser.add_argument("--max_shard_size", default="10GB", help="of one file: 5GB, 500MB, ... (default: 10GB)")
    wanted = parser.parse_args(argv)
    try:
        files = merge(
            wanted.checkpoint_directory,
            wanted.output_path,
            safe=wanted.safe_serialization,
            max_shard_bytes=_parse_size("--max_shard_size", wanted.max_shard_size),
            remove_source=wanted.remove_checkpoint_dir,
        )
    except OSError as error:  # missing, no permission to read or write, or no space
        raise CheckpointError(str(error)) from error
    for file in files:
        _print(file)
    return 0


def _export(wanted: argparse.Namespace) -> int:
    from trainwright.checkpoint.interop.export import export_weights

    if wanted.megatron is not None:
        return _export_megatron(wanted)
    if wanted.config is not None:
        raise ConfigurationError("--config is used with --megatron only. Remove --config, or add --megatron.")
    _print_exported(
        export_weights(
            wanted.source,
            wanted.target,
            layout="sharded" if wanted.sharded else "single",
            dtype=wanted.dtype,
            max_shard_bytes=_parse_size("--max-shard-size", wanted.max_shard_size),
            expand_tied=wanted.expand_tied,
        )
    )
    return 0


def _export_megatron(wanted: argparse.Namespace) -> int:
    from trainwright.checkpoint.interop.megatron_folder import MegatronLayout, export_megatron

    if wanted.sharded or wanted.expand_tied or wanted.max_shard_size != _SHARD_SIZE:
        raise ConfigurationError("--megatron excludes --sharded, --expand-tied and --max-shard-size. Remove them.")
    fields: dict[str, Any] = {}  # of `MegatronLayout`: "tp=2,impl=local" is {"tp": 2, "impl": "local"}
    for part in wanted.megatron.split(","):
        name, _, value = part.strip().partition("=")
        if name in ("tp", "pp", "vocab") and value.isdecimal() and int(value) > 0:
            fields[name] = int(value)
        elif name == "impl" and value in ("local", "transformer_engine"):
            fields[name] = value
        else:
            raise ConfigurationError(
                f"--megatron={wanted.megatron!r}: {part!r} is not known. Use tp=N, pp=N, vocab=N with positive "
                "integers, and impl=local or impl=transformer_engine, separated by commas."
            )
    layout = MegatronLayout(**fields)
    for file in export_megatron(wanted.source, wanted.target, layout, config=wanted.config, dtype=wanted.dtype):
        _print(file)
    return 0


def _print_exported(exported: Exported) -> None:
    for file in exported.files:
        _print(file)
    _print(f"{exported.num_tensors} tensors, {_size(exported.num_bytes)}")
    for name, first in exported.tied.items():
        _print(f"note: {name} is the same weight as {first} and is written under that name only", file=sys.stderr)
    if exported.left_out:
        _print("note: entries of the state dict that are not tensors are skipped", file=sys.stderr)


def _convert(wanted: argparse.Namespace) -> int:
    from trainwright.checkpoint.interop.convert import ConvertOptions, convert_checkpoint
    from trainwright.checkpoint.interop.megatron_folder import convert_megatron, megatron_folder

    if megatron_folder(wanted.source) is not None:
        for name in ("drop_unknown", "trust_pickle", "param_names", "optimizer_class", "step", "epoch"):
            value = getattr(wanted, name)
            is_passed = value is not None and value is not False and value != []  # 0 is passed, too
            if is_passed:
                raise ConfigurationError(f"--{name.replace('_', '-')} has no effect for Megatron. Remove it.")
        count = convert_megatron(wanted.source, wanted.target, wanted.config)
        _print(f"{wanted.target}: a transformers model, {count} tensors")
        return 0
    if wanted.config is not None:
        raise ConfigurationError(
            f"--config is used for checkpoints of Megatron only, and {wanted.source} is not one. Remove --config."
        )
    for name in ("step", "epoch"):
        value = getattr(wanted, name)
        if value is not None and value < 0:
            raise ConfigurationError(f"--{name}={value} is negative. Write at least 0.")
    options = ConvertOptions(
        trust_pickle=wanted.trust_pickle,
        drop_unknown=wanted.drop_unknown,
        param_names=[_read_names_file(path) for path in wanted.param_names],
        optimizer_classes=wanted.optimizer_class,
        step=wanted.step,
        epoch=wanted.epoch,
    )
    converted = convert_checkpoint(wanted.source, wanted.target, options)
    what = "a full checkpoint" if converted.kind == "full" else "weights only"
    _print(
        f"{converted.path}: {what} from {converted.source}, {converted.num_tensors} tensors, step {converted.step}, "
        f"epoch {converted.epoch}"
    )
    for note in converted.notes:
        _print(f"note: {note}", file=sys.stderr)
    return 0


def _read_names_file(path: Path) -> list[str]:
    from trainwright.checkpoint.interop.convert import read_names

    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--param-names {path} is not UTF-8: {error}. Convert it to UTF-8.") from error
    return read_names(text.splitlines())


# Facts, sizes and ages as text


def _print_tree(value: Mapping[str, object], indent: str) -> None:
    """Print nested facts: `optimizers: [{class: …}, …]` is printed as `optimizer 0:` with indented facts below it."""
    for name, item in value.items():
        if isinstance(item, dict) and item:
            _print(f"{indent}{name}:")
            _print_tree(item, indent + "  ")
        elif isinstance(item, list) and item and isinstance(item[0], dict):
            for number, one in enumerate(item):
                _print(f"{indent}{name.removesuffix('s')} {number}:")
                _print_tree(one, indent + "  ")
        else:
            _print(f"{indent}{name}: {_text(item)}")


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if value is None or value == {}:
        return "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _plain(value: object) -> Any:
    """Return `value` for JSON. NaN and infinities, which JSON lacks, and other objects become text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if round(value, 1) < 1000:  # 999,960 bytes are 1.0 MB, not 1000.0 kB
            return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"  # rounded down: 59.9 minutes are not 60
    return f"{int(max(seconds, 0))} s"  # negative if the clock of the machine that saved is ahead


def _parse_size(option: str, text: str) -> int:
    """Return the bytes of a size such as `2GiB`, the value of `option`."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    num_bytes = 0
    if match is not None and match[2].lower() in _UNITS:
        num_bytes = int(float(match[1]) * _UNITS[match[2].lower()])
    if num_bytes == 0:  # also for 0.1B
        raise ConfigurationError(f"{option}={text!r}, expected a size such as 5GB, 500MB or 2GiB.")
    return num_bytes
