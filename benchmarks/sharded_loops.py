"""The same training of a small GPT on two processes, sharded or split by several engines: what `strategies.py` times.

Each loop trains on this rank's batches between the start and the stop of a watch, and returns its last loss.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from ddp import Stopwatch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainwright import Accelerator, DeepSpeedStrategy, FSDPStrategy, TaskModule, TensorParallelStrategy, Trainer

WORLD_SIZE = 2
WIDTH, NUM_LAYERS, NUM_HEADS, VOCABULARY, CONTEXT, BATCH_SIZE = 512, 6, 8, 2048, 64, 2  # 19,996,672 parameters
COLUMNS, ROWS = ("q", "k", "v", "mlp.0"), ("out", "mlp.2")  # of a block, as tensor parallelism splits them
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": BATCH_SIZE,
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 0.0,  # else a bare engine of DeepSpeed clips at a norm of 1
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
Loop = Callable[[list[Tensor], Stopwatch], float]
"""Trains on batches `(2, 65)` of token ids, between the watch's start and stop; returns this rank's last loss."""


class Block(nn.Module):
    """Causal attention and a two-layer perceptron, each after a norm, each added to its input."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.head_size = width // NUM_HEADS
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, tokens, width)` to the same shape."""
        inputs = self.norms[0](x)
        # As many heads as there are in the output, which is a share of them where the layer is split.
        heads = [f(inputs).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        outputs: Tensor = x + self.mlp(self.norms[1](x))
        return outputs


class GPT(nn.Module):
    """A language model; its output layer shares the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss in nats of token ids `(batch, 1 + tokens)`, each predicted from those before it."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.places.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make_net() -> GPT:
    """Return the same network every time."""
    torch.manual_seed(0)
    return GPT()


def make_optimizer(net: nn.Module) -> Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(net.parameters(), lr=1e-4)


def make_batches(num_steps: int, rank: int) -> list[Tensor]:
    """Return this rank's own batches `(2, 65)`."""
    generator = torch.Generator().manual_seed(rank)
    shape = (BATCH_SIZE, 1 + CONTEXT)
    return [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(num_steps)]


def loader_of(batches: list[Tensor]) -> DataLoader[Any]:
    """Return the batches as a loader that hands them out as they are, for those who take no list."""
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list is a data set


def ddp_by_hand(batches: list[Tensor], watch: Stopwatch) -> float:
    """Train with the loop that everyone writes over `DistributedDataParallel`."""
    return _steps_by_hand(DistributedDataParallel(make_net()), batches, watch)


def fsdp_by_hand(batches: list[Tensor], watch: Stopwatch) -> float:
    """Train with the loop that everyone writes over `fully_shard`."""
    net: Any = make_net()
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    return _steps_by_hand(net, batches, watch)


def tp_by_hand(batches: list[Tensor], watch: Stopwatch) -> float:
    """Train with the loop that everyone writes over `parallelize_module`."""
    net: Any = make_net()
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    parallelize_module(net, mesh, split_plan())
    return _steps_by_hand(net, batches, watch)


def sharded_and_split_by_hand(batches: list[Tensor], watch: Stopwatch) -> float:
    """Train with `fully_shard` over `parallelize_module`, on a mesh of 2 × 2 ranks."""
    net: Any = make_net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], split_plan())
    for block in net.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    return _steps_by_hand(net, batches, watch)


def split_plan() -> dict[str, Any]:
    """Return torch's own plan for the blocks."""
    columns = {f"blocks.*.{name}": ColwiseParallel() for name in COLUMNS}
    return columns | {f"blocks.*.{name}": RowwiseParallel() for name in ROWS}


def plan_by_names(prefix: str = "") -> dict[str, Any]:
    """Return the same plan in Trainwright's names of styles."""
    columns = {f"{prefix}blocks.*.{name}": "colwise" for name in COLUMNS}
    return columns | {f"{prefix}blocks.*.{name}": "rowwise" for name in ROWS}


def _steps_by_hand(net: Any, batches: list[Tensor], watch: Stopwatch) -> float:
    optimizer = make_optimizer(net)
    watch.start()
    for batch in batches:
        loss = net(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    watch.stop()
    return float(loss.detach())


def deepspeed_by_hand(batches: list[Tensor], watch: Stopwatch) -> float:
    """Train with a bare engine of DeepSpeed, as its documentation writes it."""
    import deepspeed  # type: ignore[import-untyped]  # it has none

    net = make_net()
    engine, *_ = deepspeed.initialize(model=net, optimizer=make_optimizer(net), config=DEEPSPEED)
    watch.start()
    for batch in batches:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
    watch.stop()
    engine.destroy()
    return float(loss.detach())


def deepspeed_with_accelerate(batches: list[Tensor], watch: Stopwatch) -> float:
    """Train with a hand-written loop over Accelerate's objects, as its documentation writes it."""
    from accelerate import Accelerator, DeepSpeedPlugin  # type: ignore[import-untyped]  # it has none
    from accelerate.state import AcceleratorState, PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=copy.deepcopy(DEEPSPEED)))
    if str(accelerator.distributed_type) != "DistributedType.DEEPSPEED":
        raise RuntimeError(f"Accelerate trains with {accelerator.distributed_type} here")
    net = make_net()
    net, optimizer = accelerator.prepare(net, make_optimizer(net))
    watch.start()
    for batch in batches:
        loss = net(batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    watch.stop()
    net.destroy()
    AcceleratorState._reset_state()
    PartialState._reset_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED")
    return float(loss.detach())


def task_over(base: Any, watch: Stopwatch) -> Any:
    """Return the training as a sub-class of our TaskModule or of the LightningModule."""

    class Task(base):  # type: ignore[misc]  # either base
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()
            self.last: Tensor | None = None

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.net(batch)
            self.last = loss.detach()
            return loss

        def shard_units(self) -> Any:
            return self.net.blocks

        def tensor_parallel_plan(self, mesh: Any) -> Any:
            return plan_by_names("net.")

        def configure_optimizers(self) -> Optimizer:
            return make_optimizer(self)

        def on_train_start(self) -> None:
            watch.start()

        def on_train_end(self) -> None:
            watch.stop()

    return Task()


_BARE: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": WORLD_SIZE,
    "max_epochs": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


def with_trainwright(strategy: Any, batches: list[Tensor], watch: Stopwatch, *, world_size: int = WORLD_SIZE) -> float:
    """Train through the Trainer, in the process group that exists."""
    task = task_over(TaskModule, watch)
    with contextlib.redirect_stdout(io.StringIO()):  # it says where its rank comes from, every time
        made = strategy() if callable(strategy) else strategy
        Trainer(strategy=made, **_BARE | {"devices": world_size}).fit(task, loader_of(batches))
    return float(task.last)


def with_accelerator(strategy: Callable[[], Any], batches: list[Tensor], watch: Stopwatch) -> float:
    """Train with a hand-written loop over our Accelerator, in the process group that exists."""
    accelerator = Accelerator(strategy=strategy())
    net = make_net()
    net, optimizer = accelerator.prepare(net, make_optimizer(net))
    watch.start()
    for batch in batches:
        loss = net(batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    watch.stop()
    accelerator.free_memory()
    return float(loss.detach())


def fsdp_with_lightning(batches: list[Tensor], watch: Stopwatch) -> float:
    """Train with Lightning's strategy over `fully_shard`, the only sharding of its that runs on a CPU."""

    def split(task: Any) -> None:
        mesh = task.device_mesh["data_parallel"]
        for block in task.net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(task.net, mesh=mesh)

    return _with_lightning(split, batches, watch, data_parallel_size=WORLD_SIZE, tensor_parallel_size=1)


def tp_with_lightning(batches: list[Tensor], watch: Stopwatch) -> float:
    """Train with the same strategy over `parallelize_module`."""

    def split(task: Any) -> None:
        parallelize_module(task.net, task.device_mesh["tensor_parallel"], split_plan())

    return _with_lightning(split, batches, watch, data_parallel_size=1, tensor_parallel_size=WORLD_SIZE)


def _with_lightning(split: Callable[[Any], None], batches: list[Tensor], watch: Stopwatch, **sizes: int) -> float:
    from lightning.pytorch import LightningModule
    from lightning.pytorch import Trainer as LightningTrainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    task = task_over(LightningModule, watch)
    task.configure_model = partial(split, task)
    strategy: Any = ModelParallelStrategy(**sizes)  # type: ignore[arg-type]  # numbers, or "auto"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice about workers
        LightningTrainer(strategy=strategy, **_BARE).fit(task, loader_of(batches))
    return float(task.last)


# engine → the loops that are compared; the first one is the base, the second and third are ours
HAND, OURS, OUR_LOOP = "hand-written loop", "Trainwright, Trainer", "Trainwright, Accelerator"
CONTENDERS: dict[str, dict[str, Loop]] = {
    "ddp": {
        HAND: ddp_by_hand,
        OURS: partial(with_trainwright, "ddp"),
        OUR_LOOP: partial(with_accelerator, lambda: "ddp"),
    },
    "fsdp": {
        HAND: fsdp_by_hand,
        OURS: partial(with_trainwright, "fsdp"),
        OUR_LOOP: partial(with_accelerator, partial(FSDPStrategy, auto_wrap_policy=(Block,))),
        "Lightning, ModelParallelStrategy": fsdp_with_lightning,
    },
    "tp": {
        HAND: tp_by_hand,
        # As the others, leaving the weights split when the stage is over.
        OURS: partial(with_trainwright, partial(TensorParallelStrategy, weights_after_stage="none")),
        OUR_LOOP: partial(with_accelerator, partial(TensorParallelStrategy, tensor_parallel_plan=plan_by_names())),
        "Lightning, ModelParallelStrategy": tp_with_lightning,
    },
    "deepspeed": {
        HAND: deepspeed_by_hand,
        OURS: partial(with_trainwright, partial(DeepSpeedStrategy, DEEPSPEED)),
        OUR_LOOP: partial(with_accelerator, partial(DeepSpeedStrategy, DEEPSPEED)),
        "Accelerate": deepspeed_with_accelerate,
    },
}
