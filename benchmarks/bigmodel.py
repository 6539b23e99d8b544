"""Models larger than the machine: device maps, loading, forwards from the disk, and hooks.

    python benchmarks/bigmodel.py [--rounds 5] [--gib 1] [--tokens 64] [--folder .]

Beside raw safetensors and Accelerate, in the same run. A figure is the median over interleaved rounds, with the
checkpoint in the system's cache unless it says cold: then the cache has been told to forget it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from device_maps import measure_maps
from measuring import Bars, describe_machine, interleave, print_table
from safetensors.torch import load_file, save_file
from torch import nn

from trainwright import attach_execution_device_hook, load_checkpoint_and_dispatch

_WIDTH = 2048  # of a layer: 16 MiB
_SHARDS = 4


def empty(num_layers: int) -> nn.Module:
    """Return a row of layers without values."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_layers)))


def write_checkpoint(folder: Path, num_layers: int) -> None:
    """Write a sharded checkpoint, one shard in memory at a time."""
    names = list(empty(num_layers).state_dict())
    weight_map = {}
    for number in range(_SHARDS):
        part = names[number * len(names) // _SHARDS : (number + 1) * len(names) // _SHARDS]
        file = f"model-{number + 1:05d}-of-{_SHARDS:05d}.safetensors"
        shapes = {name: (_WIDTH, _WIDTH) if name.endswith("weight") else (_WIDTH,) for name in part}
        save_file({name: torch.randn(shape) / _WIDTH**0.5 for name, shape in shapes.items()}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def load_raw(model: nn.Module, folder: Path) -> nn.Module:
    """Load with nothing but safetensors and torch."""
    for path in sorted(folder.glob("*.safetensors")):
        model.load_state_dict(load_file(path), strict=False, assign=True)
    return model


def load_ours(model: nn.Module, folder: Path, place: str) -> nn.Module:
    """Load and dispatch."""
    return load_checkpoint_and_dispatch(model, folder, device_map={"": place})


def load_theirs(model: nn.Module, folder: Path, place: str, offload: Path) -> nn.Module:
    """Load and dispatch with Accelerate, which cannot put everything on the disk: the last layer stays.

    Args:
        model: on the meta device.
        folder: the checkpoint.
        place: for all other layers.
        offload: a folder that it writes the weights into.
    """
    import accelerate  # type: ignore[import-untyped]  # it has none

    names = [name for name, _ in model.named_children()]
    places = dict.fromkeys(names[:-1], place) | {names[-1]: "cpu"}
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        found: nn.Module = accelerate.load_checkpoint_and_dispatch(
            model, str(folder), device_map=places, offload_folder=str(offload)
        )
    return found


def seconds(load: Callable[..., Any], num_layers: int, *args: Any) -> float:
    """Return how long a load takes, without building the model."""
    model = empty(num_layers)
    start = time.perf_counter()
    load(model, *args)
    return time.perf_counter() - start


def forward_seconds(model: nn.Module, inputs: torch.Tensor) -> float:
    """Return how long a forward takes."""
    start = time.perf_counter()
    with torch.no_grad():
        model(inputs)
    return time.perf_counter() - start


def private_bytes() -> int:
    """Return this process's memory that is no file's."""
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in status if line.startswith("RssAnon")).split()[1])


def bytes_in(folder: Path) -> int:
    """Return the bytes of a folder's own files."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def measure_loading(folder: Path, num_layers: int, rounds: int, bars: Bars) -> None:
    """Measure loading to the CPU and to the disk."""
    contenders: dict[str, Callable[[], float]] = {
        "raw safetensors, CPU": partial(seconds, load_raw, num_layers, folder),
        "ours, CPU": partial(seconds, load_ours, num_layers, folder, "cpu"),
        "ours, disk": partial(seconds, load_ours, num_layers, folder, "disk"),
    }
    if find_spec("accelerate"):
        contenders["Accelerate, disk"] = partial(seconds, load_theirs, num_layers, folder, "disk", folder / "theirs")
    found = interleave(contenders, rounds)
    medians = {name: statistics.median(values) for name, values in found.items()}
    print_table(["loading", "median ms"], [[name, f"{1e3 * value:.1f}"] for name, value in medians.items()])
    size, before, written = bytes_in(folder), private_bytes(), bytes_in(folder)
    model = load_ours(empty(num_layers), folder, "cpu")
    extra = private_bytes() - before
    del model
    load_ours(empty(num_layers), folder, "disk")
    bars.add("load to the CPU", medians["ours, CPU"], 1.5 * medians["raw safetensors, CPU"] + 0.02, "s")
    bars.add("extra memory of a load to the CPU", extra / size, 0.05, "of the model")
    bars.add("load to the disk", medians["ours, disk"], 0.03, "s")
    bars.add("written by a load to the disk", bytes_in(folder) - written, 0, "bytes")


def measure_forward(folder: Path, num_layers: int, rounds: int, tokens: int, bars: Bars) -> None:
    """Measure a forward from memory and from the disk."""
    inputs = torch.randn(tokens, _WIDTH)
    memory = load_raw(empty(num_layers), folder)
    for parameter in memory.parameters():
        parameter.data = parameter.data.clone()
    models: dict[str, nn.Module] = {
        "in memory": memory,
        "mapped by hand": load_raw(empty(num_layers), folder),  # what any forward on weights of a file costs here
        "from the disk": load_ours(empty(num_layers), folder, "disk"),
        "from the disk, no prefetch": load_checkpoint_and_dispatch(
            empty(num_layers), folder, device_map={"": "disk"}, prefetch_bytes=0
        ),
    }
    if find_spec("accelerate"):
        models["Accelerate, from the disk"] = load_theirs(empty(num_layers), folder, "disk", folder / "theirs")
    with torch.no_grad():
        expected = memory(inputs)
        for model in models.values():
            assert torch.equal(model(inputs), expected)
    found = interleave({name: partial(forward_seconds, model, inputs) for name, model in models.items()}, rounds)
    base = found["in memory"]
    ratios = {name: statistics.median(a / b for a, b in zip(v, base, strict=True)) for name, v in found.items()}
    rows = [[name, f"{1e3 * statistics.median(v):.1f}", f"{ratios[name]:.2f}"] for name, v in found.items()]
    print()
    print_table([f"forward, {tokens} tokens", "median ms", "of in memory"], rows)
    bars.add("forward from the disk", ratios["from the disk"], 1.03, "of the one in memory")
    by_hand = statistics.median(a / b for a, b in zip(found["from the disk"], found["mapped by hand"], strict=True))
    bars.add("forward from the disk", by_hand, 1.03, "of the one on weights that are mapped by hand")


def forget(folder: Path) -> None:
    """Have the system's cache drop the files, which nobody may have mapped."""
    for path in folder.glob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def cold_dd(folder: Path) -> float:
    """Return how long `dd` takes to read the files from the disk."""
    forget(folder)
    start = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=8M"], check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def cold_forward(folder: Path, num_layers: int, inputs: torch.Tensor) -> float:
    """Return how long a first forward from the disk takes."""
    model = load_ours(empty(num_layers), folder, "disk")
    forget(folder)
    return forward_seconds(model, inputs)


def measure_cold(folder: Path, num_layers: int, rounds: int, tokens: int, bars: Bars) -> None:
    """Measure a forward of which nothing is in memory."""
    inputs = torch.randn(tokens, _WIDTH)
    contenders = {"dd": partial(cold_dd, folder), "cold": partial(cold_forward, folder, num_layers, inputs)}
    found = interleave(contenders, rounds)
    rates = {name: bytes_in(folder) / statistics.median(values) / 1e9 for name, values in found.items()}
    print()
    rows = [[name, f"{statistics.median(found[name]):.2f}", f"{rate:.2f}"] for name, rate in rates.items()]
    print_table(["cold cache", "median s", "GB/s"], rows)
    share = statistics.median(a / b for a, b in zip(found["cold"], found["dd"], strict=True))
    bars.add("cold forward over what dd takes to read the files", share, 1 / 0.85, "×")


def measure_hooks(rounds: int, bars: Bars) -> None:
    """Measure what a hook costs where nothing moves."""
    plain, hooked = (nn.Sequential(*(nn.Linear(4, 4) for _ in range(200))) for _ in range(2))
    attach_execution_device_hook(hooked, "cpu")
    inputs = torch.ones(1, 4)
    found = interleave(
        {name: partial(forward_seconds, model, inputs) for name, model in (("plain", plain), ("hooked", hooked))},
        20 * rounds,
    )
    cost = (min(found["hooked"]) - min(found["plain"])) / 200
    bars.add("a hook where nothing moves", 1e6 * cost, 15, "µs a call")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Models larger than the machine.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--folder", default=".", help="on the disk to be measured; cleaned up afterwards")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # the peer says which devices this machine lacks
    print(describe_machine(("torch", "safetensors", "accelerate")))
    bars = Bars()
    num_layers = max(_SHARDS, round(arguments.gib * 2**30 / (4 * _WIDTH**2)))
    measure_maps(arguments.rounds, bars)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        write_checkpoint(Path(name), num_layers)
        measure_cold(Path(name), num_layers, arguments.rounds, arguments.tokens, bars)
        measure_loading(Path(name), num_layers, arguments.rounds, bars)
        measure_forward(Path(name), num_layers, arguments.rounds, arguments.tokens, bars)
    measure_hooks(arguments.rounds, bars)
    bars.print()


if __name__ == "__main__":
    torch.set_num_threads(os.cpu_count() or 1)
    main()
