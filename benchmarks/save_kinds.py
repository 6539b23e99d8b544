"""Saves of 5,000 small tensors, of a sharded model on two ranks, and to S3, beside torch's `async_save`.

    python benchmarks/save_kinds.py [--rounds 5] [--parameters 20_000_000] [--kinds small sharded s3]

Both save the same live model and AdamW's state: `Accelerator.save_state` with `ProjectConfiguration(async_save=True)`,
and `torch.distributed.checkpoint.async_save` with `get_state_dict`. Two times are measured: how long the call blocks
the loop, and how long it takes until the checkpoint is on the disk or in the bucket. Rounds are interleaved. Our
checkpoints are also hashed and synced with the disk, torch's are not. S3 is the server of moto in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from measuring import Bars, describe_machine, print_table
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from trainwright import Accelerator, FullyShardedDataParallelPlugin, ProjectConfiguration, debug_launcher

OURS, TORCH = "Accelerator.save_state", "torch's async_save"
BUCKET = "s3://saves"
Times = dict[str, list[tuple[float, float]]]  # of each contender and round: seconds blocked, seconds until complete


def small_model(num_parameters: int) -> nn.Module:
    """Return a model of 1,666 tensors of up to 12 × 12, so that weights and AdamW's state are about 5,000 tensors."""
    return nn.Sequential(*[nn.Linear(12, 12) for _ in range(833)])


def large_model(num_parameters: int) -> nn.Module:
    """Return layers of 1024 × 1024."""
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(max(1, num_parameters // 2**20))])


def step(model: nn.Module, optimizer: Any, width: int) -> None:
    """Give AdamW its state."""
    model(torch.ones(2, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(kind: str, num_parameters: int, rounds: int, folder: str) -> Times:
    """Save with both, in the processes of `debug_launcher`.

    Args:
        kind: `small`, `sharded` or `s3`.
        num_parameters: of the models of `sharded` and `s3`.
        rounds: saves of each, one more before them.
        folder: on the disk.
    """
    plugin = FullyShardedDataParallelPlugin() if kind == "sharded" else None
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=plugin, project_config=ProjectConfiguration(folder, async_save=True)
    )
    net = small_model(num_parameters) if kind == "small" else large_model(num_parameters)
    width = 12 if kind == "small" else 1024
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    step(model, optimizer, width)

    def save_ours(place: str) -> tuple[float, float]:
        began = time.perf_counter()
        accelerator.save_state(place)
        blocked = time.perf_counter() - began
        accelerator._checkpoints.wait()  # as the next save and `end_training` do
        return blocked, time.perf_counter() - began

    def save_torchs(place: str) -> tuple[float, float]:
        began = time.perf_counter()
        weights, state = get_state_dict(model, optimizer)
        storage: dict[str, Any] = {"checkpoint_id": place}
        if place.startswith("s3"):
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

            storage = {"storage_writer": FsspecWriter(place)}
        writing = dcp.async_save({"model": weights, "optimizer": state}, **storage)
        blocked = time.perf_counter() - began
        writing.result()  # type: ignore[union-attr]  # a Future, unless the caller wants another kind
        return blocked, time.perf_counter() - began

    contenders: dict[str, Callable[[str], tuple[float, float]]] = {OURS: save_ours, TORCH: save_torchs}
    found: Times = {name: [] for name in contenders}
    for i in range(rounds + 1):
        for name in sorted(contenders, reverse=bool(i % 2)):
            if kind == "s3":
                place = f"{BUCKET}/{name[:5].strip()}-{i}"
            else:
                place = os.path.join(folder, "save")
                if accelerator.is_main_process:
                    shutil.rmtree(place, ignore_errors=True)
                    os.sync()
            accelerator.wait_for_everyone()
            times = contenders[name](place)
            accelerator.wait_for_everyone()
            if i:
                found[name].append(times)
    accelerator.end_training()
    return found


def with_group(kind: str, num_parameters: int, rounds: int, folder: str) -> Times:
    """Run `measure` in one process of a group: torch's `async_save` needs one for its collectives."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file:///tmp/{uuid.uuid4()}")
    return measure(kind, num_parameters, rounds, folder)


@contextmanager
def s3_server() -> Iterator[None]:
    """Start moto's server, make the bucket, and point S3's clients to it."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    # A file: a pipe that nobody reads would fill with the log of requests.
    with tempfile.NamedTemporaryFile("w+") as log, subprocess.Popen(command, stderr=log) as server:
        try:
            line = ""
            while "Running on" not in line:
                time.sleep(0.1)
                line = next((line for line in Path(log.name).read_text().splitlines() if "Running on" in line), "")
            os.environ |= {
                "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_ENDPOINT_URL": line.split("Running on ")[1].split()[0],
            }  # fmt: skip
            import s3fs

            s3fs.S3FileSystem().mkdir(BUCKET.removeprefix("s3://"))
            yield
        finally:
            server.terminate()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Asynchronous saves beside torch's async_save.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parameters", type=int, default=20_000_000, help="of the sharded model and that for S3")
    parser.add_argument("--kinds", nargs="+", default=["small", "sharded", "s3"])
    parser.add_argument("--folder", default=".", help="on the disk to be measured; cleaned up afterwards")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(describe_machine(("torch", "s3fs", "moto")))
    bars = Bars()
    for kind in options.kinds:
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="save-kinds-") as folder:
            arguments = (kind, options.parameters, options.rounds, str(Path(folder).resolve()))
            if kind == "sharded":
                found = debug_launcher(measure, arguments, num_processes=2)
            elif kind == "s3":
                with s3_server():
                    found = with_group(*arguments)
            else:
                found = with_group(*arguments)
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        medians = {
            name: [statistics.median(times) for times in zip(*rounds, strict=True)] for name, rounds in found.items()
        }
        print_table(
            [kind, "loop blocked, ms", "until complete, ms"],
            [[name, *(f"{1000 * each:.1f}" for each in both)] for name, both in medians.items()],
        )
        for i, what in enumerate(("time that the loop is blocked", "time until the save is complete")):
            bars.add(f"{kind}: {what}, of torch's async_save", medians[OURS][i] / medians[TORCH][i], 1.0, "×")
    bars.print()


if __name__ == "__main__":
    main()
