"""`trainwright profile config.yaml --apply`: try remedies in trial runs, and write those that save time."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

from trainwright.cli.main import INTERRUPTED
from trainwright.cli.remedies import REMEDIES, Remedy, arguments, change
from trainwright.core.errors import ConfigurationError, TrainwrightError, unknown
from trainwright.core.process import detect, environment
from trainwright.loggers.hyperparams import json_safe

_MARK = "# Written by `trainwright profile --apply`, with every default filled in."
_WIDTHS = "{:<36}{:>11}{:>11}{:>10}{:>9}  {}"


class TrialError(TrainwrightError):
    """A trial run that failed. The message is that of its last exception, or its exit code."""


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
        result: whether the change is kept, or the reason why not, as text.
        kept: the change is part of all later trials and of the written configuration.
        before: milliseconds of a step, or samples per second if the batch size changes, without the change.
        after: the same with the change.
        gain: saved percentage of a step's time, for equal numbers of samples. Negative for a slower step.
        losses: largest relative difference of losses. None if losses are not compared.
        unit: unit of `before` and `after`: `ms` or `/s`.
        proposed: the change saves time, but the user must apply it. `kept` is False.

    A change that is not tried, or whose trials fail, has no times.
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
        return _WIDTHS.format(
            self.remedy,
            "" if self.before is None else f"{self.before:.4g} {self.unit}",
            "" if self.after is None else f"{self.after:.4g} {self.unit}",
            "" if self.gain is None else f"{self.gain:.1f} %",
            "" if self.losses is None else f"{self.losses:.1g}",
            self.result,
        )


def difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest difference of two series of losses, relative to the mean of `one`. NaN if lengths differ."""
    if len(one) != len(other) or not one:
        return float("nan")
    largest = _largest(abs(a - b) for a, b in zip(one, other, strict=True))
    return largest / max(fmean(map(abs, one)), 1e-12)


def _largest(values: Iterable[float]) -> float:
    """Return the maximum, 0 without values, or NaN if any value is NaN."""
    # (True, nan) is greater than each (False, number). Comparisons with NaN itself depend on the order of the values.
    return max(values, default=0.0, key=lambda value: (math.isnan(value), value))


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
    size_before, size_after = sizes
    growth = size_after / size_before
    times_before = [run.step_ms for run in before]
    # A step of 8 samples that takes 12 ms counts as 6 ms if it replaces a step of 4 samples.
    times_after = [run.step_ms / growth for run in after]
    step_before = median(times_before)
    step_after = median(times_after)
    loss_difference = None
    if tolerance is not None:
        loss_difference = _largest(difference(a.losses, b.losses) for a in before for b in after)
    objection = _no_gain(times_before, times_after) or _other_losses(before, loss_difference, tolerance or 0.0)
    startup = median(run.startup_s for run in after) - median(run.startup_s for run in before)
    row = TriedChange(
        remedy,
        result=f"not kept: {objection}" if objection else f"kept; start {startup:+.1f} s",
        kept=not objection,
        before=step_before,
        after=step_after,
        gain=100 * (step_before - step_after) / step_before,
        losses=loss_difference,
    )
    if growth == 1:
        return row
    # Samples per second. Both times are those of `size_before` samples.
    return replace(row, before=1000 * size_before / step_before, after=1000 * size_before / step_after, unit="/s")


def _no_gain(before: Sequence[float], after: Sequence[float]) -> str:
    """Return why a change saves no time, or an empty text if all trials with it are faster than all without it."""
    if min(after) > max(before):
        return "slower"
    if max(after) < min(before):
        return ""
    span_before = f"{min(before):.3g} to {max(before):.3g} ms"
    span_after = f"{min(after):.3g} to {max(after):.3g} ms"
    return f"no gain beyond the noise ({span_before} without, {span_after} with it)"


def _other_losses(before: Sequence[TrialRun], loss_difference: float | None, tolerance: float) -> str:
    """Return why the losses forbid a change that saves time, or an empty text.

    Args:
        before: trials without the change.
        loss_difference: largest difference of losses without and with the change. None if they are not compared.
        tolerance: largest accepted difference.
    """
    if loss_difference is None or loss_difference <= tolerance:
        return ""
    if not before[0].losses:
        return "the steps return no loss to compare"
    # If equal runs differ, for example by atomic additions on a GPU, a difference says nothing about the change.
    noise = _largest(difference(a.losses, b.losses) for a, b in pairwise(before))
    if noise > tolerance:
        return f"losses of equal runs differ by {noise:.1g}"
    return f"losses differ by more than {tolerance:g}"


class Tuning:
    """Trials of one command.

    Args:
        words: configuration files and overrides, as for `trainwright fit`.
        steps: measured optimizer steps of a trial.
        warmup: optimizer steps before the measured steps.
        repeats: number of trials without and with a change, each.
        show: function that receives each `TriedChange` when its trials are complete.
        minutes: time for all trials. A comparison that would probably end later is not started. Default: no limit.

    Attributes:
        seed: `seed_everything=0` if the configuration sets no seed, so that losses can be compared. An override of
            trials only: it is not written.
        kept: overrides of the kept remedies.
        rows: the rows of the table so far.
    """

    def __init__(
        self,
        words: Sequence[str],
        steps: int,
        warmup: int,
        repeats: int,
        show: Callable[[TriedChange], None],
        minutes: float | None = None,
    ) -> None:
        self.words = list(words)
        self.steps = steps
        self.repeats = repeats
        self.minutes = minutes
        self.seed: list[str] = []
        self.kept: list[str] = []
        self.rows: list[TriedChange] = []
        self._options = ["--steps", str(steps), "--warmup", str(warmup), "--json"]
        self._show = show
        self._began = perf_counter()
        self._longest_trial_s = 0.0

    def add(self, row: TriedChange) -> None:
        """Store a row of the table, and pass it to `show`."""
        self.rows.append(row)
        self._show(row)

    def config(self, overrides: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the configuration with all defaults and `overrides`. Default: the overrides of kept remedies."""
        import yaml

        if overrides is None:
            overrides = self.kept
        settings: dict[str, Any] = yaml.safe_load(_resolved([*self.words, *overrides]))
        return settings

    def trial(self, overrides: Sequence[str] = ()) -> TrialRun:
        """Profile a few steps in a separate process.

        Args:
            overrides: overrides of the configuration. `OMP_NUM_THREADS=4` sets the environment variable of the process.

        Raises:
            TrialError: the process fails.
            KeyboardInterrupt: the process is interrupted.
        """
        variables: dict[str, str] = {}
        settings: list[str] = []
        for word in overrides:
            name, _, value = word.partition("=")
            if name == REMEDIES["threads"].argument:
                variables[name] = value
            else:
                settings.append(word)
        command = [sys.executable, "-m", "trainwright", "profile", *self.words, *self.seed, *settings, *self._options]
        began = perf_counter()
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            env=environment() | variables,
        )
        seconds = perf_counter() - began
        self._longest_trial_s = max(self._longest_trial_s, seconds)
        if done.returncode == INTERRUPTED:
            raise KeyboardInterrupt
        if done.returncode:
            raise TrialError(_last_error(done.stderr) or f"exit code {done.returncode}")
        numbers = json.loads(done.stdout)
        measured_s = self.steps * numbers["step_ms"] / 1000
        return TrialRun(numbers["step_ms"], numbers["losses"], seconds - measured_s)

    def compare(self, old: Sequence[str], new: Sequence[str]) -> tuple[list[TrialRun], list[TrialRun]]:
        """Run trials alternately with two sets of overrides, so that a machine that slows down slows both."""
        trials_old: list[TrialRun] = []
        trials_new: list[TrialRun] = []
        for _ in range(self.repeats):
            trials_old.append(self.trial(old))
            trials_new.append(self.trial(new))
        return trials_old, trials_new

    @property
    def time_is_over(self) -> bool:
        """Whether a further comparison would probably end after `minutes`, judged by the longest trial so far."""
        if self.minutes is None:
            return False
        comparison_s = 2 * self.repeats * self._longest_trial_s
        return perf_counter() - self._began + comparison_s > 60 * self.minutes

    def judged(self, words: Sequence[str], remedy: Remedy, sizes: tuple[int, int] = (1, 1)) -> TriedChange:
        """Compare trials with the kept overrides to trials that also have the overrides `words`.

        A change whose trial fails is not kept, and its result is the error.
        """
        text = " ".join(words).replace(".init_args", "")
        if self.time_is_over:
            return TriedChange(text, f"not tried: it would take longer than --minutes {self.minutes:g}")
        try:
            before, after = self.compare(self.kept, [*self.kept, *words])
        except TrialError as error:
            return TriedChange(text, f"not kept: failed: {error}")
        return judge(text, before, after, remedy.tolerance, sizes)

    def attempt_threads(self, words: Sequence[str]) -> None:
        """Try numbers of threads, and propose each number that saves time.

        It is never kept, because a configuration cannot set an environment variable.
        """
        for word in words:
            row = self.judged([word], REMEDIES["threads"])
            if row.kept:
                number = word.partition("=")[2]
                row = _proposed(row, f"{word} trainwright fit …, or launch --num_cpu_threads_per_process {number}")
            self.add(row)

    def attempt(self, name: str, *, named: bool) -> None:
        """Try the values of a remedy, and keep each that saves time.

        A remedy that changes training is only proposed, unless it is `named` by the user.
        """
        remedy = REMEDIES[name]
        only_propose = remedy.tolerance is None and not named
        gained = False  # an earlier value of this remedy is kept
        while True:
            # `config` contains the kept overrides: after num_workers=2 is kept, the next change is num_workers=4.
            next_change = change(self.config(), name)
            if isinstance(next_change, str):
                # A climb ends when no value follows. The rows of the kept values need no row with that reason.
                if not gained:
                    self.add(TriedChange(name, next_change))
                return
            if name == "threads":
                self.attempt_threads(next_change.words)
                return
            row = self.judged(next_change.words, remedy, next_change.sizes)
            if row.kept and only_propose:
                row = _proposed(row, f"it changes training; --apply {name}")
            self.add(row)
            if not row.kept:
                return
            self.kept += next_change.words
            if not remedy.climbs:
                return
            gained = True

    def total(self) -> TriedChange | None:
        """Return the row for all kept remedies together, or None without kept remedies.

        Several kept remedies are compared to the configuration without any of them, in further trials. One needs none.
        If a trial fails, or no time is left for the trials, the row has no times.
        """
        rows = [row for row in self.rows if row.kept]
        if not rows:
            return None
        if len(rows) == 1:
            return replace(rows[0], remedy="total", result="")
        if self.time_is_over:
            return TriedChange("total", f"not measured: it would take longer than --minutes {self.minutes:g}")
        sizes_before = arguments(self.config([]), REMEDIES["batch_size"])
        sizes_now = arguments(self.config(), REMEDIES["batch_size"])
        sizes = (1, 1)
        # Each remedy has passed its own comparison. Here the difference of losses is only printed.
        tolerance: float | None = float("inf")
        for key, size in sizes_before.items():
            if sizes_now[key] != size:
                sizes = (size, sizes_now[key])
                tolerance = None  # steps of other batches have other losses
                break
        try:
            before, after = self.compare([], self.kept)
        except TrialError as error:
            return TriedChange("total", f"not measured: failed: {error}")
        return replace(judge("total", before, after, tolerance, sizes), result="")


def _proposed(row: TriedChange, advice: str) -> TriedChange:
    return replace(row, kept=False, proposed=True, result=f"proposed: {advice}")


def _last_error(stderr: str) -> str:
    """Return the message of the last line that names an exception, such as `RuntimeError: …`, or an empty text.

    The notes of an exception follow that line. Usually they have no name in front: a note such as `Hint: …` is returned
    instead of the message. A line of `trainwright` itself is `trainwright: error: …`.
    """
    lines = [line for line in stderr.splitlines() if re.match(r"[\w.]+: ", line)]
    return lines[-1].removeprefix("trainwright: error: ") if lines else ""


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
        wanted: options of the command: `steps`, `warmup`, `repeats`, `minutes`, `output` and `json`.

    Returns:
        The exit code 0, also if no remedy is kept. Then no configuration is written.

    Raises:
        ConfigurationError: an option is not valid, the file to write is not one of this command, a launcher has started
            several processes, no remedy can be tried, or the configuration itself cannot be profiled.
    """
    for name in names:
        if name not in REMEDIES:
            raise unknown("--apply", name, REMEDIES)
    if wanted.repeats < 2:
        raise ConfigurationError(f"--repeats {wanted.repeats}: expected at least 2, to measure the noise.")
    if wanted.minutes is not None and not wanted.minutes > 0:
        raise ConfigurationError(f"--minutes {wanted.minutes:g}: expected a positive number.")
    target = _target(words, wanted.output)
    show = _ignore_row if wanted.json else _print_row
    tuning = Tuning(words, wanted.steps, wanted.warmup, wanted.repeats, show, wanted.minutes)
    config = tuning.config()
    if detect(config["trainer"]["launcher"]).world_size > 1:
        raise ConfigurationError(
            "--apply starts its trials itself. Run it without a launcher, and set trainer.devices."
        )
    if config["seed_everything"] is None:
        tuning.seed = ["seed_everything=0"]
    if config["trainer"]["strategy"] == "ddp":
        # Only a class has arguments in the configuration, such as the bucket_cap_mb of the remedy `buckets`.
        tuning.words.append("trainer.strategy={class_path: trainwright.strategies.DDPStrategy}")
    chosen = names or list(REMEDIES)
    _check_any_change(tuning, chosen)
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
        output = {
            "rows": [asdict(row) for row in tuning.rows],
            "total": None if total is None else asdict(total),
            "output": None if total is None else str(target),
        }
        print(json.dumps(json_safe(output), indent=2, allow_nan=False))
    elif total is not None:
        print(f"{total}\nConfiguration: {target}")
    else:
        print("No change is kept, and no configuration is written.")
    return 0


def _print_row(row: TriedChange) -> None:
    print(row, flush=True)


def _ignore_row(row: TriedChange) -> None:
    """Print nothing: with `--json`, all rows are printed at the end."""


def _check_any_change(tuning: Tuning, names: Sequence[str]) -> None:
    """Raise an error with the reasons if none of the remedies can be tried."""
    reasons: list[str] = []
    for name in names:
        first_change = change(tuning.config(), name)
        if not isinstance(first_change, str):
            return
        reasons.append(f"{name}: {first_change}")
    raise ConfigurationError("--apply: " + "; ".join(reasons) + ".")


def _target(words: Sequence[str], output: str | None) -> Path:
    """Return the file to write. Raise an error if it exists and was not written by this command."""
    from trainwright.cli.configs.overrides import read_command_line

    configs = read_command_line(words).configs
    if output:
        target = Path(output)
    else:
        target = (configs[-1] if configs else Path("config.yaml")).with_suffix(".tuned.yaml")
    if any(target.resolve() == each.resolve() for each in configs):
        raise ConfigurationError(f"--output {target} is a file of the configuration. Write another file.")
    if target.exists() and not (target.is_file() and target.read_text().startswith(_MARK)):
        raise ConfigurationError(f"{target} exists and was not written by --apply. Give another file: --output FILE.")
    return target


def _write(target: Path, tuning: Tuning) -> None:
    """Write the configuration, with a comment for each kept or proposed remedy."""
    notes: list[str] = []
    for row in tuning.rows:
        if row.kept:
            notes.append(f"# {row.remedy}: {row.gain:.1f} % of a step's time")
        elif row.proposed:
            notes.append(f"# {row.remedy}: {row.gain:.1f} % of a step's time, {row.result}")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.tmp")
    staging.write_text("\n".join([_MARK, *notes, _resolved([*tuning.words, *tuning.kept])]))
    staging.replace(target)
