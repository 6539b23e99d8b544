"""`trainwright plan config.yaml`: print the plan of a fit, without training."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainwright.cli.configs.overrides import CommandLine


def plan(argv: Sequence[str]) -> int:
    """Print the plan of a fit; see `trainwright plan --help`. Call it on every rank. The main process prints.

    Returns:
        The exit code 0.

    Raises:
        ConfigurationError: the command line or a configuration file is not valid.
    """
    from trainwright.cli.configs.overrides import read_command_line
    from trainwright.cli.configs.parsing import build
    from trainwright.cli.fit import LOADING, check_checkpoint, read_settings
    from trainwright.core.errors import visible
    from trainwright.core.process import detect
    from trainwright.core.rng import seed_everything
    from trainwright.trainer.planning.run_plan import PlannedSetting

    wanted, rest = _parser().parse_known_args(argv)
    if wanted.help:
        _print_help()
        return 0
    line = read_command_line(rest)
    with redirect_stdout(sys.stderr if wanted.json else sys.stdout):  # a reader of the JSON gets nothing else
        parser, settings = read_settings("fit", line)
        check_checkpoint(settings.ckpt_path)
        if settings.seed_everything is not None:
            seed_everything(settings.seed_everything)
        built = build(parser, settings)
        loading = {name: settings[name] for name in LOADING}
        run_plan = built.trainer.plan(
            built.task, datamodule=built.data, ckpt_path=settings.ckpt_path, setup_data=wanted.setup_data, **loading
        )
    # The Trainer records "argument" or "default" as the source. Name the file or the command line instead.
    sources = _sources(line)
    planned: dict[str, PlannedSetting] = {}
    for name, setting in run_plan.settings.items():
        if name in sources and setting.source in ("default", "argument"):
            setting = replace(setting, source=sources[name])
        planned[name] = setting
    if planned["seed"].value is None and settings.seed_everything is not None:
        source = sources.get("seed_everything", "the configuration")
        planned["seed"] = PlannedSetting(settings.seed_everything, f"seed_everything of {source}")
    run_plan = replace(run_plan, settings=planned)
    if detect(settings.trainer.get("launcher") or "auto").rank == 0:
        print(json.dumps(run_plan.to_dict(), indent=2) if wanted.json else visible(str(run_plan)))
    return 0


def _sources(line: CommandLine) -> dict[str, str]:
    """Return the source of each configured argument of the Trainer and each section: a file or `"command line"`.

    `plan config.yaml trainer.max_epochs=3` gives `"max_epochs": "command line"`, and `"task": "config.yaml"` for a
    section of the file.
    """
    from trainwright.cli.configs.overrides import read_configs

    sources: dict[str, str] = {}
    for path in line.configs:
        if path.is_file():  # the output of a command can be read only once
            config = read_configs([path])
            sources |= dict.fromkeys((*config, *(config.get("trainer") or {})), str(path))
    for key, _ in line.assignments:
        section, _, name = key.partition(".")
        if section == "trainer" and name:
            section = name.partition(".")[0].rstrip("+")  # `trainer.callbacks+` sets `callbacks`
        sources[section] = "command line"
    return sources


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainwright plan",
        usage="trainwright plan CONFIG [--setup-data] [--json] [KEY=VALUE …]",
        description="Print what `trainwright fit` will do: settings and where they come from, processes, precision, "
        "parameters, memory and steps. Nothing is trained. Nothing is written, except by the data module with "
        "--setup-data.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this help message and exit")
    parser.add_argument(
        "--setup-data",
        action="store_true",
        help="set up the data module, which may download and write files, to count its batches, samples and tokens",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    return parser


def _print_help() -> None:
    from trainwright.cli.fit import build_parser

    options = build_parser("fit")
    options.usage = argparse.SUPPRESS
    options.description = "CONFIG, or --config CONFIG, and all other options are those of `trainwright fit`:"
    print(f"{_parser().format_help()}\n{options.format_help()}", end="")
