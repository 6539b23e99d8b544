"""`trainwright profile config.yaml`: train a few steps, and print the time of each part of a step."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from trainwright.callbacks import Callback, ModelCheckpoint, ModelSummary, ProgressBar
from trainwright.core.errors import ConfigurationError, nearest
from trainwright.loggers import Logger
from trainwright.loggers.hyperparams import json_safe
from trainwright.profilers.step_parts import OTHER, StepPartsProfiler
from trainwright.strategies.precision_names import parse_precision

if TYPE_CHECKING:
    import torch

    from trainwright.core.state import StepResult

_TRACED_STEPS = 3  # further steps that measure communication, if there are several processes
_NOTABLE = 20.0  # minimum percentage at which a part other than the largest gets advice
_SHORT_MS = 2.0  # shorter steps get advice
_OPTIONS = ("--steps", "--warmup", "--json", "--apply", "--output", "--repeats", "--minutes", "--help")
_SECTIONS = ("--task", "--data", "--trainer")
_DROPPED = (ModelCheckpoint, ModelSummary, ProgressBar)  # they save, or write to the terminal
# Arguments of the Trainer that a profile replaces: it writes nothing, and ends after a number of steps, not earlier.
_REPLACED = {
    "logger": False,
    "barebones": False,
    "fast_dev_run": False,
    "profiler": None,
    "preemption_grace": None,
    "max_time": None,
    "max_samples": None,
    "max_tokens": None,
    "min_epochs": None,
    "min_steps": None,
    "max_epochs": -1,
    "num_sanity_val_steps": 0,
}
_LOADER_FACTS = ("num_workers", "prefetch_factor", "batch_size", "pin_memory")
_REPEATS = 3  # of a trial run
_SHORT_WAIT_MS = 0.5  # about what a worker process itself costs for a batch
# A wait this many times the mean is a slow batch among fast ones: batches that are prepared ahead hide it.
_UNEVEN = 3.0


class _Gather(Callback):
    """Callback that gathers the results of all ranks and the values for the advice at the end of training.

    Attributes:
        losses: losses of this rank, also of warm-up steps.
        ranks: the result of `StepPartsProfiler` for each rank. Empty until training ends.
        facts: settings, on which the advice depends. Empty until training ends.
    """

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.ranks: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}

    def on_train_step_end(self, trainer: object, task: object, result: StepResult) -> None:
        """Store the loss."""
        if result.loss is not None:
            self.losses.append(result.loss)

    def on_train_end(self, trainer: Any, task: object) -> None:
        """Gather the results. Collective."""
        self.ranks = trainer.run.engine.processes.gather_object(trainer.profiler.result())
        arguments = trainer.settings.arguments
        optimizers = list(trainer.optimizers)
        self.facts = {
            "is_cpu": trainer.run.engine.settings.device_type == "cpu",
            "is_32": parse_precision(arguments.precision or "32-true").name == "32-true",
            "accumulate": trainer.settings.accumulate_grad_batches,
            "compile": bool(arguments.compile),
            "parameters": sum(len(group["params"]) for each in optimizers for group in each.param_groups),
            "unfused": None,  # class of an optimizer that can be fused and is not
        }
        for name in _LOADER_FACTS:
            self.facts[name] = getattr(trainer.train_dataloader, name, None)  # None: a loader of another class
        for each in optimizers:
            # Only optimizers that take `fused` have it among their defaults.
            if not each.defaults.get("fused", True) and not each.defaults.get("foreach"):
                self.facts["unfused"] = type(each).__name__


class _NoLogger(Logger):
    """Logger that discards all values, for callbacks that need a logger."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Do nothing."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Do nothing."""


def advice(result: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Return advice for the longest part of a step, other parts of at least 20 %, and a step of less than 2 ms.

    Args:
        result: result of `StepPartsProfiler` for one rank.
        facts: `_Gather.facts`.
    """
    step_ms = result["step_ms"]
    texts: list[str] = []
    ranked = sorted(result["parts"].items(), key=lambda item: item[1], reverse=True)
    for i, (part, ms) in enumerate(ranked):
        percentage = 100 * ms / step_ms
        if i == 0 or percentage >= _NOTABLE:
            texts.append(f"{part} is {percentage:.0f} % of a step{_change(part, result, facts)}")
    if step_ms < _SHORT_MS:
        size = "" if facts["batch_size"] is None else f" with batch_size={facts['batch_size']}"
        compiled = "" if facts["compile"] else ", or trainer.compile=True"
        texts.append(
            f"a step takes {step_ms:.2g} ms{size}, little work for its fixed costs: use a larger batch{compiled}"
        )
    return texts


def _change(part: str, result: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Return the change that shortens a part of a step, as the end of a sentence."""
    accumulate = facts["accumulate"]
    more = f"trainer.accumulate_grad_batches={2 * accumulate}"
    match part:
        case "data wait":
            return _change_of_loader(result, facts, os.cpu_count() or 1)
        case "host to device":
            if facts["is_cpu"]:
                return ": see transfer_batch_to_device of the task"
            return ": send less data for a batch" if facts["pin_memory"] else ": set pin_memory=True in the loader"
        case "forward" | "backward":
            return _change_of_computation(facts)
        case "communication":
            return f" with accumulate_grad_batches={accumulate}: set {more}, or use a larger batch"
        case "optimizer":
            unfused = facts["unfused"]
            change = f"pass fused=True (or foreach=True) to {unfused}" if unfused else f"set {more}"
            return f" with {facts['parameters']} parameter tensors: {change}"
        case "callbacks":
            return _change_of_callbacks(result["callbacks"])
        case "validation":
            return ": validate less often, with a larger trainer.val_check_interval"
    assert part == OTHER
    return ": it is outside of all other parts. See its Python functions with trainer.profiler=advanced"


def _change_of_computation(facts: Mapping[str, Any]) -> str:
    tries: list[str] = []
    if not facts["compile"]:
        tries.append("trainer.compile=True")
    if facts["is_32"]:
        tries.append("trainer.precision=bf16-mixed")
    if not tries:
        return ", which is computation"
    return f", which is computation: try {' or '.join(tries)}"


def _change_of_callbacks(ms_by_name: Mapping[str, float]) -> str:
    name, ms = max(ms_by_name.items(), key=lambda item: item[1], default=("", 0.0))
    owner, _, hook = name.partition(".")
    if hook:  # only hooks of the task are measured one by one: `Net.on_train_batch_end`
        return f": the task's {hook} takes {ms:.3g} ms of it. Do its work less often"
    return f": {owner} takes {ms:.3g} ms of it. Do its work less often, or remove it"


def _change_of_loader(result: Mapping[str, Any], facts: Mapping[str, Any], cores: int) -> str:
    workers = facts["num_workers"]
    wait = result["parts"]["data wait"]
    if wait < _SHORT_WAIT_MS:
        return f": {wait:.2g} ms, which worker processes do not shorten. Use a larger batch, or do less work per sample"
    if workers is None:
        return ": load the data in worker processes, for example with a DataLoader of num_workers=2"
    if not workers:
        return f" with num_workers=0: set num_workers={min(4, cores)}"
    more = f"set num_workers={min(2 * workers, cores)}, or " if workers < cores else ""
    text = f" with num_workers={workers} on {cores} cores: {more}do less work per sample"
    if result["longest_wait_ms"] < _UNEVEN * wait:
        return text
    ahead = f"set prefetch_factor={2 * (facts['prefetch_factor'] or 2)}"
    return f"{text}. The longest wait is {result['longest_wait_ms']:.3g} ms: {ahead}"


def profile(argv: Sequence[str]) -> int:
    """Train a few steps, and print the time of each part of a step; see `trainwright profile --help`.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        ConfigurationError: an option or the configuration is not valid, or training ends within the warm-up steps.
    """
    from trainwright.cli.configs.overrides import read_command_line
    from trainwright.cli.configs.parsing import build, listed
    from trainwright.cli.fit import read_settings
    from trainwright.cli.main import INTERRUPTED
    from trainwright.cli.tuning import tune
    from trainwright.core.rng import seed_everything

    names, words = _named_remedies(argv)
    wanted, rest = _parser().parse_known_args(words)
    if wanted.steps < 1 or wanted.warmup < 1:
        raise ConfigurationError(f"--steps {wanted.steps} --warmup {wanted.warmup}: expected at least 1 of each.")
    for word in rest:
        _check_option(word)
    if wanted.apply:
        return tune(rest, names, wanted)
    if wanted.output or wanted.repeats != _REPEATS or wanted.minutes is not None:
        raise ConfigurationError("--output, --repeats and --minutes are options of --apply. Add --apply.")
    parser, settings = read_settings("fit", read_command_line(rest))
    for name, value in _REPLACED.items():
        settings.trainer[name] = value
    if settings.seed_everything is not None:
        seed_everything(settings.seed_everything)
    built = build(parser, settings)
    trainer = built.trainer
    task = built.task
    gather = _Gather()
    traced = _TRACED_STEPS if max(trainer.world_size, trainer.num_devices) > 1 else 0
    trainer.settings.profiler = StepPartsProfiler(wanted.steps, wanted.warmup, traced)
    trainer.logger = _NoLogger()
    task_callbacks = task.configure_callbacks
    # An attribute of the instance hides the method of its class.
    vars(task)["configure_callbacks"] = lambda: _profiled(listed(task_callbacks()))
    trainer.callbacks = [*_profiled(trainer.callbacks), gather]
    trainer.max_steps = wanted.warmup + wanted.steps + traced
    path = settings.ckpt_path  # only the weights are loaded, so that the steps are those of a new run
    with redirect_stdout(sys.stderr if wanted.json else sys.stdout):  # a reader of the JSON gets nothing else
        trainer.fit(task, datamodule=built.data, ckpt_path=path, load_weights_only=bool(path))
    if trainer.interrupted:
        return INTERRUPTED
    if trainer.is_global_zero:
        _report(gather, wanted)
    return 0


def _check_option(word: str) -> None:
    """Raise an error for a misspelled option, such as `--step`. Other words belong to the configuration."""
    option = word.partition("=")[0]
    if not option.startswith("--") or option in _SECTIONS or "." in option:
        return
    hint = nearest(option, _OPTIONS)
    if hint:
        raise ConfigurationError(f"unknown option {option}.{hint}")


def _profiled(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks without those that save, or write to the terminal."""
    return [each for each in callbacks if not isinstance(each, _DROPPED)]


def _named_remedies(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of remedies after `--apply`, and the other arguments: `--apply fused bf16 task.lr=0.1`."""
    if "--apply" not in argv:
        return [], list(argv)
    end = list(argv).index("--apply") + 1
    # An override or a file has a `=` or a dot, so that it is not an identifier.
    names = list(takewhile(str.isidentifier, argv[end:]))
    return names, [*argv[:end], *argv[end + len(names) :]]


def _parser() -> argparse.ArgumentParser:
    from trainwright.cli.remedies import REMEDIES

    parser = argparse.ArgumentParser(
        prog="trainwright profile",
        usage="trainwright profile CONFIG [--steps N] [--warmup N] [--json] [--apply [NAME …]] [KEY=VALUE …]",
        description="Train a few steps of a configuration, without saving or logging, and show where their time goes.",
        epilog="CONFIG, or --config CONFIG, is that of `trainwright fit`; overrides: trainer.devices=2 task.lr=0.1",
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to measure (default: 20)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them (default: 3)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    names = ", ".join(REMEDIES)
    parser.add_argument("--apply", action="store_true", help=f"try changes in trial runs: all, or those named: {names}")
    parser.add_argument("--output", help="configuration to write with --apply (default: CONFIG.tuned.yaml)")
    parser.add_argument(
        "--repeats", type=int, default=_REPEATS, help="trial runs of each side of a comparison (default: 3)"
    )
    parser.add_argument(
        "--minutes", type=float, help="with --apply: try nothing that would end later (default: no limit)"
    )
    return parser


def _report(gather: _Gather, wanted: argparse.Namespace) -> None:
    """Print the times of the parts and the advice. With `--json`, print the numbers that `--apply` reads."""
    main = gather.ranks[0]
    if not main["steps"]:
        raise ConfigurationError(f"training ended within {wanted.warmup} warm-up steps: lower --warmup.")
    # All ranks wait for the slowest one within their communication. Without it, their own work remains.
    work = [each["step_ms"] - each["parts"]["communication"] for each in gather.ranks]
    slowest = max(range(len(work)), key=work.__getitem__)
    largest = max(main["parts"], key=main["parts"].__getitem__)
    texts = advice(main, gather.facts)
    if wanted.json:
        numbers = {
            **main,
            "warmup": wanted.warmup,
            "world_size": len(work),
            "largest": largest,
            "advice": texts,
            "losses": [loss.item() for loss in gather.losses],
            "slowest_rank": slowest,
            "slowest": gather.ranks[slowest]["parts"],
        }
        print(json.dumps(json_safe(numbers), indent=2, allow_nan=False))
        return
    _print_parts(gather.ranks, slowest, wanted.warmup)
    print(f"Largest part: {largest}.")
    for text in texts:
        print(f"- {text}.")


def _print_parts(ranks: Sequence[Mapping[str, Any]], slowest: int, warmup: int) -> None:
    """Print the parts of a step of rank 0 and, with several ranks, those of the slowest rank."""
    main = ranks[0]
    several = len(ranks) > 1
    of = f", rank 0 of {len(ranks)}" if several else ""
    head = f"{'part':<14}  {'ms':>10}  {'%':>6}"
    if several:
        head += f"  {f'rank {slowest}, slowest':>18}"
    print(f"Mean of {main['steps']} steps after {warmup} warm-up steps{of}: {main['step_ms']:.3f} ms")
    print(head)
    for part, ms in main["parts"].items():
        if part == "validation" and not ms:
            continue
        line = f"{part:<14}  {ms:>10.3f}  {100 * ms / main['step_ms']:>6.1f}"
        if several:
            line += f"  {ranks[slowest]['parts'][part]:>18.3f}"
        print(line)
