"""`trainwright profile config.yaml --apply`: try remedies in trial runs, and write those that save time."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch

from trainwright.checkpoint.disk.low_priority_thread import usable_cores
from trainwright.cli.main import INTERRUPTED
from trainwright.core.errors import ConfigurationError, TrainwrightError, unknown
from trainwright.core.process import detect, environment

_MARK = "# Written by `trainwright profile --apply`, with every default filled in."
_EXACT, _ROUNDED = 1e-3, 5e-2  # largest relative differences of losses: the same arithmetic, and fewer digits
_MOST_WORKERS = 32
_WIDTHS = "{:<36}{:>11}{:>11}{:>10}{:>9}  {}"


class TrialError(TrainwrightError):
    """A trial run that failed. The message is the last line of its error."""


def _turned_on(value: object) -> Any:
    return None if value else True


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of one argument of the configuration.

    Attributes:
        section: `trainer`, `task` or `data`; `environment` for a variable, which a configuration cannot set.
        argument: the argument's name. In `task` and `data`, arguments of nested classes are found, too.
        following: function that returns the value to try after the current value, or None if there is none.
        tolerance: largest relative difference of losses. None does not compare losses, and `--apply` must name the
            remedy.
        climbs: after a gain, also try the next value.
        needs: another argument of the section, which must be set.
    """

    section: str
    argument: str
    following: Callable[[Any], Any] = _turned_on
    tolerance: float | None = _EXACT
    climbs: bool = False
    needs: str = ""


REMEDIES = {
    "workers": Remedy("data", "num_workers", lambda n: 2 * (n or 1) if (n or 1) < _MOST_WORKERS else None, climbs=True),
    "prefetch": Remedy("data", "prefetch_factor", lambda n: 2 * (n or 2), climbs=True, needs="num_workers"),
    "persistent": Remedy("data", "persistent_workers", needs="num_workers"),
    "pin_memory": Remedy("data", "pin_memory"),
    "fused": Remedy("task", "fused"),
    "foreach": Remedy("task", "foreach"),
    "channels_last": Remedy("task", "channels_last"),
    "buckets": Remedy("trainer", "strategy.init_args.bucket_cap_mb", lambda mb: 2 * (mb or 25), climbs=True),
    "regional": Remedy("trainer", "compile", lambda value: None if value else "regional"),
    "compile": Remedy("trainer", "compile", lambda value: True if value in (None, False, "regional") else None),
    "bf16": Remedy(
        "trainer", "precision", lambda p: "bf16-mixed" if p in (None, 32, "32", "32-true") else None, _ROUNDED
    ),
    "threads": Remedy("environment", "OMP_NUM_THREADS"),
    "batch_size": Remedy("data", "batch_size", lambda n: 2 * n if n else None, None, climbs=True),
}


@dataclass(frozen=True, slots=True)
class TrialRun:
    """Measurements of one trial run.

    Attributes:
        step_ms: milliseconds of a step.
        losses: losses of all steps.
        startup_s: duration of the run without the measured steps, in seconds.
    """

    step_ms: float
    losses: Sequence[float] = ()
    startup_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TriedChange:
    """One tried change, with its times and gain.

    Attributes:
        remedy: the change, as overrides of the configuration.
        before: milliseconds of a step, or samples per second, without the change.
        after: the same with the change.
        gain: saved percentage of a step's time.
        losses: largest relative difference of losses. None if losses are not compared.
        result: whether the change is kept, or the reason why not, as text.
        proposed: the change saves time, but the user must apply it.
    """

    remedy: str
    result: str
    kept: bool = False
    before: float | None = None
    after: float | None = None
    gain: float | None = None
    losses: float | None = None
    unit: str = "ms"
    proposed: bool = False

    def __str__(self) -> str:
        shown = [f"{value:.4g} {self.unit}" if value is not None else "" for value in (self.before, self.after)]
        gain = "" if self.gain is None else f"{self.gain:.1f} %"
        return _WIDTHS.format(
            self.remedy, *shown, gain, "" if self.losses is None else f"{self.losses:.1g}", self.result
        )


def difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest difference of two series of losses, relative to the mean of `one`. NaN if lengths differ."""
    if len(one) != len(other) or not one:
        return float("nan")
    return _largest(abs(a - b) for a, b in zip(one, other, strict=True)) / max(fmean(map(abs, one)), 1e-12)


def _largest(values: Iterable[float]) -> float:
    """Return the maximum, or NaN if any value is NaN."""
    found = list(values)
    return max(found, default=0.0, key=lambda value: (math.isnan(value), value))


def judge(
    remedy: str,
    before: Sequence[TrialRun],
    after: Sequence[TrialRun],
    tolerance: float | None,
    sizes: tuple[int, int] = (1, 1),
) -> TriedChange:
    """Return the result of a remedy. It is kept if each trial with it is faster than all without it and losses agree.

    A remedy without effect is faster by chance in one of 20 comparisons with three repetitions (one of 6 with two).

    Args:
        remedy: the change, as text.
        before: trials without the change.
        after: trials with the change.
        tolerance: largest relative difference of losses. None does not compare losses.
        sizes: batch sizes without and with the change. Times are compared for the same number of samples.
    """
    growth = sizes[1] / sizes[0]
    olds, news = [each.step_ms for each in before], [each.step_ms / growth for each in after]
    old, new = median(olds), median(news)
    startup = median(each.startup_s for each in after) - median(each.startup_s for each in before)
    own = _largest(difference(a.losses, b.losses) for a, b in pairwise(before))
    changed = None if tolerance is None else _largest(difference(a.losses, b.losses) for a in before for b in after)
    result, kept = f"kept; start {startup:+.1f} s", False
    if min(news) > max(olds):
        result = "not kept: slower"
    elif max(news) >= min(olds):
        spans = [f"{min(times):.3g} to {max(times):.3g} ms" for times in (olds, news)]
        result = f"not kept: no gain beyond the noise ({spans[0]} without, {spans[1]} with it)"
    elif changed is None or changed <= (tolerance or 0.0):
        kept = True
    elif not before[0].losses:
        result = "not kept: the steps return no loss to compare"
    elif own > (tolerance or 0.0):
        result = f"not kept: losses of equal runs differ by {own:.1g}"
    else:
        result = f"not kept: losses differ by more than {tolerance:g}"
    shown, unit = ((old, new), "ms") if growth == 1 else ((1000 * sizes[0] / old, 1000 * sizes[0] / new), "/s")
    return TriedChange(remedy, result, kept, *shown, 100 * (old - new) / old, changed, unit)


def arguments(config: Mapping[str, Any], remedy: Remedy) -> dict[str, Any]:
    """Return the dotted keys and values of a remedy's argument in a configuration with all defaults."""
    nested = remedy.section != "trainer"
    return {
        f"{remedy.section}.{key}": value
        for key, value in _leaves(config.get(remedy.section))
        if key == remedy.argument or (nested and key.endswith(f".{remedy.argument}"))
    }


def _leaves(node: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted key and value of nested mappings."""
    for key, value in node.items() if isinstance(node, dict) else ():
        yield f"{prefix}{key}", value
        yield from _leaves(value, f"{prefix}{key}.")


def change(config: Mapping[str, Any], name: str) -> tuple[list[str], tuple[int, int]] | str:
    """Return the next overrides of a remedy and the batch sizes before and after, or the reason why there are none.

    For `threads`, each override is an alternative.
    """
    remedy = REMEDIES[name]
    if name == "threads":
        threads, cores = torch.get_num_threads(), usable_cores()
        others = [number for number in (threads // 2, 2 * threads) if 1 <= number <= cores]
        words = [f"{remedy.argument}={number}" for number in others]
        return (words, (1, 1)) if words else f"not tried: {threads} of {cores} cores have no half and no double"
    found = arguments(config, remedy)
    if not found:
        return f"not tried: {remedy.section} has no argument {remedy.argument.rpartition('.')[2]}"
    if name == "pin_memory" and not torch.cuda.is_available():
        return "not tried: this machine has no GPU"
    if remedy.needs and not any(arguments(config, Remedy(remedy.section, remedy.needs)).values()):
        return f"not tried: {remedy.needs} is not set"
    following = {key: remedy.following(value) for key, value in found.items()}
    words = [f"{key}={json.dumps(value).strip(chr(34))}" for key, value in following.items() if value is not None]
    if not words:
        return f"not tried: it is {next(iter(found.values()))} already"
    size = next(iter(found.values())) if name == "batch_size" else 1
    return words, (size, 2 * size if name == "batch_size" else 1)


class Tuning:
    """Trials of one command.

    Args:
        words: configuration files and overrides, as for `trainwright fit`.
        steps: measured optimizer steps of a trial.
        warmup: optimizer steps before the measured steps.
        repeats: number of trials without and with a change, each.
        tell: function that receives each `TriedChange` when its trials are complete.
    """

    def __init__(
        self, words: Sequence[str], steps: int, warmup: int, repeats: int, tell: Callable[[TriedChange], None]
    ) -> None:
        self.words, self.options = list(words), ["--steps", str(steps), "--warmup", str(warmup), "--json"]
        self.repeats, self._tell = repeats, tell
        self.steps = steps
        self.seed: list[str] = []  # for trials only
        self.kept: list[str] = []
        self.rows: list[TriedChange] = []

    def add(self, row: TriedChange) -> TriedChange:
        """Store a row of the table, and pass it to `tell`."""
        self.rows.append(row)
        self._tell(row)
        return row

    def config(self, overrides: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the configuration with all defaults and `overrides`. None: the overrides of kept remedies."""
        import yaml

        found: dict[str, Any] = yaml.safe_load(
            _resolved([*self.words, *(self.kept if overrides is None else overrides)])
        )
        return found

    def trial(self, overrides: Sequence[str] = ()) -> TrialRun:
        """Profile a few steps in a separate process. Raise TrialError if the process fails."""
        pairs = dict(word.split("=", 1) for word in overrides if word.startswith(REMEDIES["threads"].argument))
        changed = [word for word in overrides if word.partition("=")[0] not in pairs]
        command = [sys.executable, "-m", "trainwright", "profile", *self.words, *self.seed, *changed, *self.options]
        began = perf_counter()
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            env=environment() | pairs,
        )
        seconds = perf_counter() - began
        if done.returncode == INTERRUPTED:
            raise KeyboardInterrupt
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if re.match(r"[\w.]+: ", line)]  # without notes
            last = (lines or [f"exit code {done.returncode}"])[-1]
            raise TrialError(last.removeprefix("trainwright: error: "))
        found = json.loads(done.stdout)
        return TrialRun(found["step_ms"], found["losses"], seconds - self.steps * found["step_ms"] / 1000)

    def compare(self, old: Sequence[str], new: Sequence[str]) -> tuple[list[TrialRun], list[TrialRun]]:
        """Run trials alternately with two sets of overrides."""
        pairs = [(self.trial(old), self.trial(new)) for _ in range(self.repeats)]
        return [a for a, _ in pairs], [b for _, b in pairs]

    def judged(self, words: Sequence[str], remedy: Remedy, sizes: tuple[int, int] = (1, 1)) -> TriedChange:
        """Compare trials with the kept overrides to trials that also have the overrides `words`."""
        text = " ".join(words).replace(".init_args", "")
        try:
            return judge(text, *self.compare(self.kept, [*self.kept, *words]), remedy.tolerance, sizes)
        except TrialError as error:
            return TriedChange(text, f"not kept: failed: {error}")

    def attempt_threads(self, words: Sequence[str]) -> None:
        """Try numbers of threads, and propose each number that saves time."""
        for word in words:
            row = self.judged([word], REMEDIES["threads"])
            if row.kept:
                number = word.partition("=")[2]
                told = f"proposed: {word} trainwright fit …, or launch --num_cpu_threads_per_process {number}"
                row = replace(row, kept=False, proposed=True, result=told)
            self.add(row)

    def attempt(self, name: str, *, named: bool) -> None:
        """Try the values of a remedy. Keep each that saves time, but only propose it if it changes training and the
        remedy is not `named` by the user.
        """
        remedy, proposed = REMEDIES[name], REMEDIES[name].tolerance is None and not named
        while True:
            found = change(self.config(), name)
            if isinstance(found, str):
                if not (self.rows and self.rows[-1].kept and remedy.climbs):
                    self.add(TriedChange(name, found))
                return
            words, sizes = found
            if name == "threads":
                self.attempt_threads(words)
                return
            row = self.judged(words, remedy, sizes)
            if row.kept and proposed:
                told = f"proposed: it changes training; --apply {name}"
                row = replace(row, kept=False, proposed=True, result=told)
            if not self.add(row).kept:
                return
            self.kept += words
            if not remedy.climbs:
                return

    def total(self) -> TriedChange | None:
        """Return the row for all kept remedies together, or None without kept remedies."""
        kept = [row for row in self.rows if row.kept]
        if not kept:
            return None
        if len(kept) == 1:
            return replace(kept[0], remedy="total", result="")
        start, now = (arguments(each, REMEDIES["batch_size"]) for each in (self.config([]), self.config()))
        sizes = next(zip(start.values(), now.values(), strict=True)) if start != now else (1, 1)
        tolerance = None if start != now else float("inf")
        return replace(judge("total", *self.compare([], self.kept), tolerance, sizes), result="")


def _resolved(words: Sequence[str]) -> str:
    """Return the configuration with all defaults as YAML."""
    from trainwright.cli.configs.overrides import read_command_line
    from trainwright.cli.configs.save_config_callback import resolved_yaml
    from trainwright.cli.fit import read_settings

    return resolved_yaml(*read_settings("fit", read_command_line(words)))


def tune(words: list[str], names: Sequence[str], wanted: Any) -> int:
    """Try remedies one after another, print a table, and write the configuration with the kept remedies.

    Args:
        words: configuration and overrides, as for `trainwright fit`.
        names: the remedies to try. Empty tries all, but only proposes remedies that change training.
        wanted: options of the command.
    """
    for name in names:
        if name not in REMEDIES:
            raise unknown("--apply", name, REMEDIES)
    if wanted.repeats < 2:
        raise ConfigurationError(f"--repeats {wanted.repeats}: expected at least 2, to measure the noise.")
    target = _target(words, wanted.output)
    tell = (lambda row: None) if wanted.json else (lambda row: print(row, flush=True))
    tuning = Tuning(words, wanted.steps, wanted.warmup, wanted.repeats, tell)
    start = tuning.config()
    if detect(start["trainer"]["launcher"]).world_size > 1:
        raise ConfigurationError(
            "--apply starts its trials itself. Run it without a launcher, and set trainer.devices."
        )
    if start["seed_everything"] is None:
        tuning.seed = ["seed_everything=0"]
    if start["trainer"]["strategy"] == "ddp":
        tuning.words.append("trainer.strategy={class_path: trainwright.strategies.DDPStrategy}")  # with its arguments
    chosen = names or list(REMEDIES)
    reasons = {name: found for name in chosen if isinstance(found := change(tuning.config(), name), str)}
    if len(reasons) == len(chosen):
        raise ConfigurationError("--apply: " + "; ".join(f"{name}: {why}" for name, why in reasons.items()) + ".")
    try:
        tuning.trial()
    except TrialError as error:
        raise ConfigurationError(f"--apply: a trial run of the configuration failed: {error}") from None
    if not wanted.json:
        print(f"Each row: {wanted.repeats} trial runs of {wanted.steps} steps without and with the change, in turn.")
        print(_WIDTHS.format("change", "before", "after", "gain", "losses", "result"), flush=True)
    for name in chosen:
        tuning.attempt(name, named=bool(names))
    total = tuning.total()
    if total is not None:
        _write(target, tuning)
    if wanted.json:
        rows = [asdict(row) for row in tuning.rows]
        print(json.dumps({"rows": rows, "total": total and asdict(total), "output": total and str(target)}, indent=2))
    elif total is not None:
        print(f"{total}\nConfiguration: {target}")
    else:
        print("No change is kept, and no configuration is written.")
    return 0


def _target(words: Sequence[str], output: str | None) -> Path:
    """Return the file to write. Raise an error if it exists and was not written by this command."""
    from trainwright.cli.configs.overrides import read_command_line

    configs = read_command_line(words).configs
    target = Path(output) if output else (configs[-1] if configs else Path("config.yaml")).with_suffix(".tuned.yaml")
    if any(target.resolve() == each.resolve() for each in configs):
        raise ConfigurationError(f"--output {target} is a file of the configuration. Write another file.")
    if target.exists() and not (target.is_file() and target.read_text().startswith(_MARK)):
        raise ConfigurationError(f"{target} exists and was not written by --apply. Give another file: --output FILE.")
    return target


def _write(target: Path, tuning: Tuning) -> None:
    """Write the configuration, with a comment for each kept or proposed remedy."""
    notes = [
        f"# {row.remedy}: {row.gain:.1f} % of a step's time" + (f", {row.result}" if row.proposed else "")
        for row in tuning.rows
        if row.kept or row.proposed
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.tmp")
    staging.write_text("\n".join([_MARK, *notes, _resolved([*tuning.words, *tuning.kept])]))
    staging.replace(target)
