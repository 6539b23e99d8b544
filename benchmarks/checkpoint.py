"""What writing and reading a model with Adam's state costs; `save_cost.py` measures saves beside a training.

    python benchmarks/checkpoint.py [--parameters 100_000_000] [--rounds 3] [--threads N] [--folder .]

All contenders save and load the same live model and optimizer, in this process and on the same disk, in interleaved
rounds; a figure is the median over rounds. Before each measurement the disk has been synced, so that nobody pays for
what another left to be written. Torch has its own number of threads. The memory that an asynchronous save takes is
measured too.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
from measuring import Bars, describe_machine, interleave, print_table
from safetensors.torch import load_file, save_file
from torch import nn

from trainwright.checkpoint import AsyncWriter, Snapshot, named_optimizer_state, read_checkpoint, write_checkpoint

WIDTH = 1024
Timed = Callable[[], float]  # () -> seconds


class State:
    """A model of about `num_parameters` in layers of 1024 × 1024, and Adam after one step.

    Attributes:
        net: the model.
        optimizer: Adam.
        tensors: everything that is to be saved, by name.
    """

    def __init__(self, num_parameters: int) -> None:
        num_layers = max(1, round(num_parameters / (WIDTH * WIDTH + WIDTH)))
        self.net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)])
        self.optimizer = torch.optim.Adam(self.net.parameters())
        for parameter in self.net.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.names = {parameter: name for name, parameter in self.net.named_parameters()}
        self.tensors = {f"model.{name}": tensor for name, tensor in self.net.state_dict().items()}
        for parameter, state in self.optimizer.state.items():
            self.tensors |= {f"optimizer.{self.names[parameter]}.{key}": value for key, value in state.items()}

    @property
    def num_bytes(self) -> int:
        """Size of everything that is saved."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def snapshot(self) -> Snapshot:
        """Return what a Trainer would hand to the writer."""
        return Snapshot(
            state={"step": 1, "epoch": 0},
            model=self.net.state_dict(),
            optimizers=[named_optimizer_state(self.optimizer, self.names)],
            rng=[{"torch": torch.get_rng_state()}],
        )


class Disk:
    """A folder for the contenders' files, and the clock around what they do with them.

    Args:
        folder: made, and emptied by whoever made it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        """Return a path with nothing at it."""
        path = self.folder / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        return path

    @contextmanager
    def timed(self, seconds: list[float]) -> Iterator[None]:
        """Append how long the block took, the disk having nothing left to do when it begins."""
        os.sync()
        started = time.perf_counter()
        yield
        seconds.append(time.perf_counter() - started)


def fsync(path: Path) -> None:
    """Wait until a file is on the disk."""
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def savers(state: State, disk: Disk) -> dict[str, Timed]:
    """Return what saves, without the peers."""
    copies = {name: torch.empty_like(tensor) for name, tensor in state.tensors.items()}
    plain = {"model": state.net.state_dict(), "optimizer": state.optimizer.state_dict()}

    def measure(work: Callable[[Path], Any], name: str) -> Timed:
        def run() -> float:
            path, seconds = disk.path(name), []
            with disk.timed(seconds):
                work(path)
            return seconds[0]

        return run

    def copy(path: Path) -> None:
        for name, tensor in state.tensors.items():
            copies[name].copy_(tensor)

    def save_safetensors(path: Path) -> None:
        save_file(state.tensors, path)
        fsync(path)

    return {
        "memcpy of the state": measure(copy, "none"),
        "Trainwright, sync save": measure(lambda path: write_checkpoint(path, state.snapshot()), "sync"),
        "safetensors save_file + fsync": measure(save_safetensors, "plain.safetensors"),
        "torch.save": measure(lambda path: torch.save(plain, path), "plain.pt"),
    }


def loaders(state: State, disk: Disk) -> dict[str, Timed]:
    """Return what loads into memory of its own, after one save each; without the peers."""
    checkpoint = write_checkpoint(disk.path("to_load"), state.snapshot())
    file = disk.path("to_load.safetensors")
    save_file(state.tensors, file)

    def measure(work: Callable[[], Any]) -> Timed:
        def run() -> float:
            seconds: list[float] = []
            with disk.timed(seconds):
                loaded = work()
            del loaded
            return seconds[0]

        return run

    return {
        "safetensors load_file + copy": measure(lambda: {k: t.clone() for k, t in load_file(file).items()}),
        "Trainwright, load, verified": measure(lambda: read_checkpoint(checkpoint)),
        "Trainwright, load, not verified": measure(lambda: read_checkpoint(checkpoint, verify=False)),
    }


def accelerate_contenders(state: State, disk: Disk) -> tuple[dict[str, Timed], dict[str, Timed]]:
    """Return Accelerate's save_state and load_state, which writes into the live model and optimizer."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(state.net, state.optimizer)

    def save(name: str = "accelerate") -> float:
        path, seconds = disk.path(name), []
        with disk.timed(seconds):
            accelerator.save_state(str(path))
        return seconds[0]

    def load() -> float:
        seconds: list[float] = []
        with disk.timed(seconds):
            accelerator.load_state(str(disk.folder / "accelerate_to_load"))
        return seconds[0]

    save("accelerate_to_load")
    return {"Accelerate save_state": save}, {"Accelerate load_state": load}


def lightning_contenders(state: State, disk: Disk) -> dict[str, Timed]:
    """Return Lightning's save_checkpoint, called in a Trainer that has done one step with the same model."""
    from lightning.pytorch import LightningModule
    from lightning.pytorch import Trainer as LightningTrainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = state.net

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net[0].bias.sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return state.optimizer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = LightningTrainer(
        accelerator="cpu", devices=1, max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=disk.folder,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader([0]))
    state.optimizer.zero_grad()

    def save() -> float:
        path, seconds = disk.path("lightning.ckpt"), []
        with disk.timed(seconds):
            trainer.save_checkpoint(path)
        return seconds[0]

    return {"Lightning save_checkpoint": save}


def extra_memory(state: State, disk: Disk) -> float:
    """Return the host memory that an asynchronous save takes over the state's own size."""
    process = psutil.Process()
    before = process.memory_info().rss
    writer = AsyncWriter()
    writer.submit(disk.path("first"), state.snapshot())
    most = process.memory_info().rss
    while writer.is_writing:
        most = max(most, process.memory_info().rss)
        time.sleep(0.005)
    writer.close()
    return (most - before) / state.num_bytes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time of saving and loading a model with Adam's state.")
    parser.add_argument("--parameters", type=int, default=100_000_000, help="size of the model")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender")
    parser.add_argument("--threads", type=int, help="of torch; default: its own number")
    parser.add_argument("--folder", default=".", help="on the disk to be measured; cleaned up afterwards")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # peers' advice about workers
    if options.threads:
        torch.set_num_threads(options.threads)
    state = State(options.parameters)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoint-benchmark-") as folder:
        disk = Disk(Path(folder))
        memory = extra_memory(state, disk)
        shutil.rmtree(disk.folder / "first")
        saving, loading = savers(state, disk), {}
        if find_spec("lightning"):
            saving |= lightning_contenders(state, disk)
        if find_spec("accelerate"):
            peers, loading = accelerate_contenders(state, disk)
            saving |= peers
        saved = interleave(saving, options.rounds)
        loaded = interleave(loaders(state, disk) | loading, options.rounds)
    _print(state, options.rounds, saved, loaded)
    _bars(saved, loaded, memory).print()


def _print(state: State, rounds: int, saved: dict[str, list[float]], loaded: dict[str, list[float]]) -> None:
    size = state.num_bytes
    print(f"\n{describe_machine(('torch', 'safetensors', 'lightning', 'accelerate'))}")
    print(
        f"{size / 1e9:.2f} GB in {len(state.tensors)} tensors, {rounds} interleaved rounds, "
        f"{torch.get_num_threads()} thread(s) in torch\n"
    )
    rows = [
        [name, f"{middle:.3f}", f"{min(found):.3f}", f"{size / middle / 1e9:.2f}"]
        for name, found in {**saved, **loaded}.items()
        for middle in [statistics.median(found)]
    ]
    print_table(["", "median s", "least s", "GB/s"], rows)


def _bars(saved: dict[str, list[float]], loaded: dict[str, list[float]], memory: float) -> Bars:
    def ratio(found: dict[str, list[float]], name: str, base: str) -> float:
        return statistics.median(a / b for a, b in zip(found[name], found[base], strict=True))

    sync, base = "Trainwright, sync save", "safetensors load_file + copy"
    bars = Bars()
    bars.add("sync save over safetensors + fsync", ratio(saved, sync, "safetensors save_file + fsync"), 1.1, "×")
    bars.add("verified load over load_file + copy", ratio(loaded, "Trainwright, load, verified", base), 3, "×")
    bars.add("load over load_file + copy", ratio(loaded, "Trainwright, load, not verified", base), 1.2, "×")
    bars.add("host memory while saving over the state (5 % for what else the process does)", memory, 1.05, "×")
    return bars


if __name__ == "__main__":
    main()
