"""Detect out-of-memory errors, keep or release freed memory, and retry with a smaller batch."""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainwright.core.errors import BatchSizeError, ConfigurationError
from trainwright.core.process import variables

# Messages of libraries that raise a plain RuntimeError for a failed allocation.
_OUT_OF_MEMORY = (
    "out of memory",  # torch's allocators of accelerators, in several spellings of the device
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",  # the same on Windows
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",  # no workspace could be allocated for any algorithm
)

# Parameters of glibc's `mallopt`, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 2**25  # the largest value that glibc accepts, in bytes


def keep_freed_memory(keep: bool) -> None:
    """Keep freed host memory in this process, or return it to the system.

    By default, glibc returns the free end of the heap to the system if it exceeds twice the largest freed block. The
    system then maps the pages of new gradients again in each step. With `keep`, freed blocks of up to 32 MiB are
    reused. No effect with other C libraries, or if `MALLOC_…` or `GLIBC_TUNABLES` variables configure the allocator.

    Args:
        keep: True keeps freed memory. False returns it now (a few milliseconds per gigabyte) and from now on.
    """
    if os.name != "posix" or variables("MALLOC_") or variables("GLIBC_TUNABLES"):
        return
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return
    # Blocks up to this size are allocated from the heap. Larger ones are mapped, and always returned when freed.
    library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    # -1 never returns the end of the heap. Otherwise use glibc's own ratio of twice the mmap threshold.
    library.mallopt(_M_TRIM_THRESHOLD, -1 if keep else 2 * _LARGEST_MMAP_THRESHOLD)
    if not keep:
        library.malloc_trim(0)


def is_out_of_memory(exception: BaseException) -> bool:
    """Return whether an exception, or one of its causes (`raise … from`), means that memory ran out.

    Memory is that of a device or of the host. Detects `torch.OutOfMemoryError`, `MemoryError`, and the RuntimeErrors of
    torch's allocators, cuBLAS and cuDNN. A process that the operating system kills for its memory raises no error, and
    cannot be detected.
    """
    error: BaseException | None = exception
    seen: set[int] = set()  # causes may form a cycle
    while error is not None and id(error) not in seen:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY):
            return True
        seen.add(id(error))
        error = error.__cause__
    return False


should_reduce_batch_size = is_out_of_memory  # Accelerate's name


def available_host_memory_bytes() -> int:
    """Return the bytes of host memory that this process can still use without swapping.

    On Linux this is the kernel's available memory, or the remainder of the control group (container) if that is less.
    On other systems it is the total memory of the machine.

    Raises:
        ConfigurationError: the system does not report its memory.
    """
    try:
        machine = _available_in_meminfo() or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError) as error:
        raise ConfigurationError("the size of this machine's memory is not known. Pass max_memory.") from error
    group = _left_in_control_group()
    return machine if group is None else min(machine, group)


def _available_in_meminfo() -> int | None:
    """Return the available bytes according to the Linux kernel. None on other systems."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):  # as in "MemAvailable:   12345 kB"
            return int(line.split()[1]) * 1024
    return None


def _left_in_control_group() -> int | None:
    """Return the bytes that the container may still use, by the limit of the root control group in its file system.

    A container sees its own group as the root. Without a limit, version 2 gives None, and version 1 a huge number.
    None without control groups.
    """
    # Files of control groups version 2, then of version 1.
    for folder, limit_name, used_name, cache_name in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = int(Path(folder, limit_name).read_text(encoding="ascii"))
            used = int(Path(folder, used_name).read_text(encoding="ascii"))
            lines = Path(folder, "memory.stat").read_text(encoding="ascii").splitlines()
            statistics = dict(line.split() for line in lines)
        except (OSError, ValueError):  # another version of control groups, or no limit ("max")
            continue
        # Clean file pages count as used, but are released when memory is needed.
        return max(0, limit - used + int(statistics.get(cache_name, 0)))
    return None


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Return cached memory of torch's allocator to the device.

    Args:
        garbage_collection: first collect reference cycles, which may reference tensors. Takes tens of milliseconds.
            Default: False.

    May wait for the device. No effect on device memory without an accelerator.
    """
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        if hasattr(module, "empty_cache"):
            module.empty_cache()


def release_memory(*objects: object) -> list[Any]:
    """Collect reference cycles and clear the device's cache. This frees only objects to which no references are left.
    To release the caller's references, assign the result: `a, b = release_memory(a, b)`.

    Returns:
        A list with None for each object.
    """
    results: list[Any] = [None] * len(objects)
    del objects  # this function's own references
    clear_device_cache(garbage_collection=True)
    return results


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorate a function so that it is retried with a smaller batch size whenever memory runs out.

    The batch size is the first argument of `function`; callers omit it. Create everything that needs memory (model,
    optimizer, loaders) inside the function, so that a failed attempt can be freed. A later call begins with the last
    successful size, or with `starting_batch_size` if no size was small enough. Processes do not communicate: with
    several, use `BatchSizeFinder`.

    Args:
        function: the function to decorate. Default: None, which returns the decorator:
            `@find_executable_batch_size(...)`.
        starting_batch_size: the first size to try, at least 1. Default: 128.
        reduce_batch_size_fn: function without arguments that returns the next size to try. Default: None, which halves
            the size and rounds down.

    Raises:
        TypeError: a call passed the batch size, or `function` has no positional parameter for it.
        BatchSizeError: not even the smallest batch size fits. A RuntimeError, whose cause is the last out-of-memory
            error. Other errors of `function` are raised unchanged.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    tried = function
    batch_size = starting_batch_size  # kept between calls

    @functools.wraps(tried)
    def call(*args: object, **options: object) -> Any:
        nonlocal batch_size
        _refuse_batch_size(tried, args, options)
        failure: Exception | None = None
        while batch_size > 0:
            clear_device_cache(garbage_collection=True)
            try:
                return tried(batch_size, *args, **options)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = _without_frames(error)
            batch_size = batch_size // 2 if reduce_batch_size_fn is None else reduce_batch_size_fn()
        batch_size = starting_batch_size  # for a later call
        name = getattr(tried, "__name__", type(tried).__name__)
        raise BatchSizeError(
            f"no batch size fits: {name} ran out of memory down to the smallest one, starting from "
            f"{starting_batch_size}. Use a smaller model, a lower precision or a larger device."
        ) from failure

    return call


def _without_frames(error: Exception) -> Exception:
    """Remove the tracebacks of an error and of its causes, because their frames keep the failed attempt's tensors
    alive.
    """
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()  # by id, because exceptions may define `==`
    while waiting:
        current = waiting.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            current.__traceback__ = None
            waiting += [current.__cause__, current.__context__]
    return error


def _refuse_batch_size(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise a TypeError if a call passes the batch size, or if `function` has no parameter for it."""
    parameters = list(inspect.signature(function).parameters.values())
    name = getattr(function, "__name__", type(function).__name__)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if not positional and not takes_any:
        raise TypeError(f"{name} takes no batch size. Make it the first argument: def {name}(batch_size, ...).")
    is_passed_by_name = bool(positional) and positional[0].name in options
    has_too_many = not takes_any and len(args) + 1 > len(positional)
    if is_passed_by_name or has_too_many:
        raise TypeError(
            f"{name} was called with a batch size, which find_executable_batch_size passes already. Call it without: "
            f"{name}({', '.join(f'{p.name}=...' for p in positional[1:])})."
        )
