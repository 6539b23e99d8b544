"""Short names of profilers for `Trainer(profiler=…)`, configurations and the command line."""

from __future__ import annotations

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.foreign_names import check_owner
from trainwright.core.registry import Registry
from trainwright.profilers.profiler import PassThroughProfiler, Profiler

PROFILERS: Registry[type[Profiler]] = Registry(
    "profiler",
    {
        "advanced": "trainwright.profilers.advanced:AdvancedProfiler",
        "pytorch": "trainwright.profilers.pytorch:PyTorchProfiler",
        "simple": "trainwright.profilers.simple:SimpleProfiler",
    },
)


def resolve_profiler(value: object) -> Profiler:
    """Return the profiler for an argument: a short name, a Profiler, or None, which records nothing.

    Raises:
        ConfigurationError: The name is unknown, or the object is of another class.
    """
    if value is None:
        return PassThroughProfiler()
    if isinstance(value, Profiler):
        return value
    if isinstance(value, str):
        return PROFILERS.get(value)()
    check_owner(value)
    raise ConfigurationError(
        f"profiler={value!r}: expected 'simple', 'advanced', 'pytorch', a trainwright.profilers.Profiler or None."
    )
