"""A GPT that is trained on one device by hand, by the Trainer, in own loops, and by Lightning: what `gpu.py` compares.

Every contender sees the same batches (from pinned memory on a GPU) and the same model, uses AdamW, and clips the norm
of the gradients. AdamW is fused, but not in Lightning, which does not clip the gradients of a fused optimizer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright import Accelerator, Callback, MegatronStrategy, TaskModule, Trainer

CLIP = 1.0


class Device:
    """The device to measure, and its clock. A CPU takes part with tiny sizes, to try the script out.

    Attributes:
        device: the device.
        is_cuda: whether it has CUDA's events, allocator and kernels.
    """

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.is_cuda = self.device.type == "cuda"

    def __str__(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.is_cuda else "the CPU"

    def mark(self) -> Any:
        """Mark this place in the device's queue of work, without a wait: an event, or the time on a CPU."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks, after a wait for the second one."""
        if not self.is_cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def forget_peak(self) -> None:
        """Free the allocator's unused memory, and count peaks from here on."""
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_mib(self) -> float:
        """Return the most memory that tensors have taken since `forget_peak`; 0 on a CPU."""
        return torch.cuda.max_memory_allocated() / 2**20 if self.is_cuda else 0.0


@dataclass
class Steps:
    """Marks at the ends of the steps of one run.

    Attributes:
        device: where they are set.
        marks: one for each step.
    """

    device: Device
    marks: list[Any] = field(default_factory=list)

    def end_step(self) -> None:
        """Mark the end of a step."""
        self.marks.append(self.device.mark())

    def per_step_s(self, warm_up: int) -> float:
        """Return the mean seconds of the steps after the first `warm_up` ones."""
        return self.device.seconds(self.marks[warm_up - 1], self.marks[-1]) / (len(self.marks) - warm_up)

    def slowest_over_median(self, warm_up: int) -> float:
        """Return the time of the slowest step over the median one, without the first `warm_up` steps."""
        seconds = [self.device.seconds(start, end) for start, end in pairwise(self.marks[warm_up - 1 :])]
        return max(seconds) / statistics.median(seconds)


@dataclass(frozen=True)
class Size:
    """A model and its batches of `rows` times `length` tokens.

    Attributes:
        warm_up: first steps, which are not measured.
        steps: all steps.
    """

    vocabulary: int
    width: int
    heads: int
    layers: int
    length: int
    rows: int
    warm_up: int
    steps: int


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend and transform; (batch, length, width)."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """A language model that returns its loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each next token."""
        x = self.embed(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


class Task(TaskModule):
    """The model as a task."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss."""
        return self.model(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Only compute."""
        self.model(batch)

    def shard_units(self) -> list[nn.Module]:
        """Return the blocks."""
        return list(self.model.blocks)  # type: ignore[arg-type]  # a ModuleList

    def configure_optimizers(self) -> Any:
        """Return AdamW."""
        return make_optimizer(self)


def make_optimizer(model: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)


class EndOfStep(Callback):
    """Marks the end of each step."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        self.steps.end_step()


@dataclass(frozen=True)
class Setting:
    """What all contenders of a comparison have in common.

    Attributes:
        device: where to train.
        size: of the model and its batches.
        half: mixed precision with bfloat16, or else float32.
        compile: arguments of `torch.compile`. None does not compile.
    """

    device: Device
    size: Size
    half: bool = True
    compile: dict[str, Any] | None = None

    @property
    def precision(self) -> str:
        """The Trainer's name of the precision."""
        return "bf16-mixed" if self.half else "32-true"

    @property
    def trainer_options(self) -> dict[str, Any]:
        """Options of our and Lightning's Trainer: one device, clipped gradients, and nothing beside the training."""
        return {
            "accelerator": self.device.device.type, "devices": 1, "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1, "gradient_clip_val": CLIP,
        }  # fmt: skip

    def model(self) -> Gpt:
        """Return the model on the device."""
        torch.manual_seed(0)
        with self.device.device:
            return Gpt(self.size)

    def loader(self, num_batches: int | None = None) -> Any:
        """Return batches of tokens; default: as many as steps."""
        torch.manual_seed(1)
        shape = (num_batches or self.size.steps, self.size.rows, self.size.length)
        batches: Any = list(torch.randint(self.size.vocabulary, shape))  # a list can be a Dataset
        return torch.utils.data.DataLoader(batches, batch_size=None, pin_memory=self.device.is_cuda)


def by_hand(setting: Setting) -> Steps:
    """Train in a hand-written loop."""
    device = setting.device.device
    model, steps = setting.model(), Steps(setting.device)
    optimizer = make_optimizer(model)
    if setting.compile is not None:
        model.compile(**setting.compile)
    for batch in setting.loader():
        batch = batch.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=setting.half):
            loss = model(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        steps.end_step()
    return steps


def by_trainer(setting: Setting, **options: Any) -> Steps:
    """Train with our Trainer. Further options replace those of the setting."""
    steps = Steps(setting.device)
    task = Task(setting.model())
    common = {"precision": setting.precision, "compile": setting.compile or False, "callbacks": []}
    merged = {**setting.trainer_options, "limit_val_batches": 0, **common, **options}
    merged["callbacks"] = [*merged["callbacks"], EndOfStep(steps)]
    Trainer(**merged).fit(task, setting.loader())
    return steps


def in_own_loop(setting: Setting, accelerator: Any) -> Steps:
    """Train in a loop of the user with our Accelerator or with Accelerate's."""
    model, steps = setting.model(), Steps(setting.device)
    optimizer = make_optimizer(model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, setting.loader())
    for batch in loader:
        accelerator.backward(model(batch))
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        steps.end_step()
    accelerator.free_memory()
    return steps


def by_accelerator(setting: Setting) -> Steps:
    """Train in a loop with our Accelerator."""
    return in_own_loop(setting, Accelerator(mixed_precision="bf16" if setting.half else "no", cpu=_is_cpu(setting)))


def by_accelerate(setting: Setting) -> Steps:
    """Train in a loop with Accelerate."""
    from accelerate import Accelerator as Theirs
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # its precision is that of the first Accelerator of a process
    return in_own_loop(setting, Theirs(mixed_precision="bf16" if setting.half else "no", cpu=_is_cpu(setting)))


def _is_cpu(setting: Setting) -> bool:
    return not setting.device.is_cuda


def by_lightning(setting: Setting) -> Steps:
    """Train with Lightning's Trainer."""
    import lightning as pl

    steps = Steps(setting.device)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = setting.model()
            if setting.compile is not None:
                self.model.compile(**setting.compile)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(batch)

        def configure_optimizers(self) -> Any:
            return make_optimizer(self, fused=False)

        def on_train_batch_end(self, *_: Any) -> None:
            steps.end_step()

    pl.Trainer(**setting.trainer_options, precision=setting.precision).fit(Module(), setting.loader())
    return steps


Contenders = dict[str, Callable[[], Steps]]


def frameworks(setting: Setting) -> Contenders:
    """Return the hand-written loop, both of our front ends, and the peers that are installed."""
    found: Contenders = {
        "hand-written loop": partial(by_hand, setting),
        "Trainer": partial(by_trainer, setting),
    }
    if setting.compile is None:
        found["Accelerator"] = partial(by_accelerator, setting)
    if find_spec("accelerate") and setting.compile is None:
        found["Accelerate"] = partial(by_accelerate, setting)
    if find_spec("lightning"):
        found["Lightning"] = partial(by_lightning, setting)
    return found


def strategies(setting: Setting) -> Contenders:
    """Return the hand-written loop, and our Trainer with each strategy that keeps the weights on one device."""
    found: Contenders = {"hand-written loop": partial(by_hand, setting)}
    names = ["ddp", "fsdp"]
    if find_spec("deepspeed") and setting.device.is_cuda:
        names += ["deepspeed_stage_2", "deepspeed_stage_3"]
    for name in names:
        found[f"Trainer, {name}"] = partial(by_trainer, setting, strategy=name)
    # A strategy object belongs to one Trainer.
    found["Trainer, megatron"] = lambda: by_trainer(setting, strategy=MegatronStrategy())
    return found


def graphs(setting: Setting) -> Contenders:
    """Return loops whose kernels are launched one by one, and in CUDA graphs: `setting.compile` sets their mode."""
    plain = replace(setting, compile=None)
    return {
        "hand-written loop": partial(by_hand, plain),
        "Trainer": partial(by_trainer, plain),
        "hand-written loop, graphs": partial(by_hand, setting),
        "Trainer, graphs": partial(by_trainer, setting),
    }


def fp8(setting: Setting) -> Contenders:
    """Return loops in bfloat16 and in fp8, as they are and compiled with `setting.compile`."""
    plain = replace(setting, compile=None)
    return {
        "hand-written loop, bf16": partial(by_hand, plain),
        "Trainer, bf16": partial(by_trainer, plain),
        "Trainer, fp8": partial(by_trainer, plain, precision="fp8"),
        "hand-written loop, bf16, compiled": partial(by_hand, setting),
        "Trainer, bf16, compiled": partial(by_trainer, setting),
        "Trainer, fp8, compiled": partial(by_trainer, setting, precision="fp8"),
    }
