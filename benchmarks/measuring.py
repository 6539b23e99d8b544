"""What every benchmark shares: the machine it ran on, interleaved rounds, and tables."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Environment variable with the path of the file to which the bars of all benchmarks are appended, as lines of JSON.
BARS_FILE = "TRAINWRIGHT_BARS_FILE"


def describe_machine(packages: Sequence[str] = ("torch",)) -> str:
    """Return one line: processor, cores, load, Python and the versions of `packages` that are installed."""
    parts = [_cpu_model(), f"{os.cpu_count()} cores", f"load {os.getloadavg()[0]:.1f}"]
    parts.append(f"Python {platform.python_version()}")
    for name in packages:
        try:
            parts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            parts.append(f"no {name}")
    return " · ".join(parts)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def interleave(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call every contender once a round and return what each gave, in the order of the rounds.

    The order within a round turns by one place each time, so that no contender always runs after the same neighbour.
    A round that comes before all others is thrown away: it pays for imports and caches.

    Args:
        contenders: each returns one measurement.
        rounds: how many are kept.
    """
    names = list(contenders)
    found: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        contenders[name]()
    for i in range(rounds):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(contenders[name]())
    return found


def median_difference(values: Iterable[float], baseline: Iterable[float]) -> float:
    """Return the median over rounds of `value - baseline`, each pair measured in the same round."""
    return statistics.median(value - base for value, base in zip(values, baseline, strict=True))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown, its first column to the left and the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return f"| {' | '.join(padded)} |"

    print(line(header))
    print(f"|{'|'.join('-' * (w + 1) + (':' if i else '-') for i, w in enumerate(widths))}|")
    for row in rows:
        print(line(row))
    sys.stdout.flush()


@dataclass(frozen=True)
class Bar:
    """A figure and its limit.

    Attributes:
        what: the figure.
        measured, limit: both in `unit`. The figure must be at most `limit`.
        unit: such as `"s"`, or `"×"` for a ratio.
        at_least: the figure must be at least `limit` instead.
    """

    what: str
    measured: float
    limit: float
    unit: str
    at_least: bool = False

    @property
    def verdict(self) -> str:
        """`"ok"` or `"MISS"`."""
        is_reached = self.measured >= self.limit if self.at_least else self.measured <= self.limit
        return "ok" if is_reached else "MISS"

    @property
    def bound(self) -> str:
        """The limit as text, such as `≤ 1.01`."""
        return f"{'≥' if self.at_least else '≤'} {self.limit:.4g}"


class Bars:
    """The figures that must be reached, and whether they were.

    A benchmark reports and never fails on a missed bar: on a shared machine the clock proves nothing by one run.
    """

    def __init__(self) -> None:
        self._bars: list[Bar] = []

    def __iter__(self) -> Iterator[Bar]:
        return iter(self._bars)

    def add(self, what: str, measured: float, limit: float, unit: str, *, at_least: bool = False) -> None:
        """Compare one measurement, in `unit`, with its upper limit, or with its lower one."""
        self._bars.append(Bar(what, measured, limit, unit, at_least))

    def print(self) -> None:
        """Print one line for each bar, and append the bars to the file of `python -m benchmarks`."""
        print()
        for bar in self._bars:
            print(f"{bar.verdict:4} {bar.what}: {bar.measured:.4g} {bar.unit} ({bar.bound})")
        sys.stdout.flush()
        path = os.environ.get(BARS_FILE)
        if path is not None:
            with open(path, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(bar)) + "\n" for bar in self._bars)
