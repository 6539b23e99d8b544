"""One group of ranks per strategy runs the whole contract; tests assert on what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.contracts.documented import documented_strategy
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import SaveAtEnd, StepRecorder, quiet_trainer, weights_of
from trainwright.callbacks import Callback
from trainwright.core.task import TaskModule
from trainwright.strategies.fsdp.strategy import FSDPStrategy
from trainwright.strategies.fsdp.tensor_parallel import TensorParallelStrategy
from trainwright.strategies.megatron.strategy import MegatronStrategy
from trainwright.strategies.offload.training import OffloadStrategy


@dataclass(frozen=True)
class Case:
    """A strategy that the contract is run under.

    Attributes:
        strategy: the Trainer's argument, or a function that makes it.
        processes: processes that it takes.
        data_ranks: how many of them see different data; default: None, all.
        is_pipeline: whether it divides the model into stages.
    """

    strategy: str | Callable[[], Any]
    processes: int
    data_ranks: int | None = None
    is_pipeline: bool = False


# A further strategy is one line.
STRATEGIES = {
    "single": Case("single", 1),
    "ddp": Case("ddp", 2),
    "fsdp": Case("fsdp", 2),
    "zero1": Case("deepspeed_stage_1", 2),
    "zero2": Case("deepspeed_stage_2", 2),
    "zero3": Case("deepspeed_stage_3", 2),
    "documented": Case(documented_strategy, 2),
    "offload": Case(lambda: OffloadStrategy("disk", "disk", min_num_params=1, stream=True), 1),
    "tp": Case("tp", 2, data_ranks=1),
    "pp": Case(lambda: MegatronStrategy(pp=2), 2, data_ranks=1, is_pipeline=True),
    "hsdp": Case(lambda: FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 1)), 2),
    "ddp_4": Case("ddp", 4),
    "fsdp_4": Case("fsdp", 4),
    "hsdp_4": Case(lambda: FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)), 4),
    "tp_4": Case(lambda: TensorParallelStrategy(tp=4), 4, data_ranks=1),
    "fsdp_tp_4": Case(lambda: FSDPStrategy(tp=2), 4, data_ranks=2),
    "pp_4": Case(lambda: MegatronStrategy(pp=2, dp_shard=2), 4, data_ranks=2, is_pipeline=True),
    "pp_tp_4": Case(lambda: MegatronStrategy(pp=2, tp=2), 4, data_ranks=1, is_pipeline=True),
    "zero1_4": Case("deepspeed_stage_1", 4),
    "zero2_4": Case("deepspeed_stage_2", 4),
    "zero3_4": Case("deepspeed_stage_3", 4),
}

ITEMS = [3, 1, 2, 4, 1, 3, 2, 2, 4, 1, 1, 3, 2, 4, 3, 1]  # of the 16 micro-batches of an epoch
ACCUMULATE = 4  # micro-batches in one step, over all ranks
EPOCHS = 4
HALF = 2
CLIP = 0.3
NUM_EVALUATED = 11  # samples, in batches of 2: the ranks have unequal numbers, and the last batch is short
NUM_COUNTED = 12  # samples, in three batches of 4: two ranks need a fourth
STOP_AFTER_STEPS = 3  # steps
MOST_EPOCHS_OF_STOP = 3  # epochs: ranks agree upon a stop at the end of an epoch at the latest


def data_ranks_of(name: str) -> int:
    """Return how many of a strategy's processes see different data."""
    case = STRATEGIES[name]
    return case.data_ranks or case.processes


def micro_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return micro-batches with unequal numbers of items, (items, 4) and (items, 1)."""
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(count, 4, generator=generator) for count in ITEMS]
    return [(x, torch.sin(x.sum(dim=1, keepdim=True))) for x in inputs]


def evaluation_data() -> TensorDataset:
    """Return the samples that are evaluated, (NUM_EVALUATED, 4) and (NUM_EVALUATED, 1)."""
    inputs = torch.randn(NUM_EVALUATED, 4, generator=torch.Generator().manual_seed(6))
    return TensorDataset(inputs, torch.cos(inputs.sum(dim=1, keepdim=True)))


class ContractTask(TaskModule):
    """Weighs by items; its optimizer, schedule and buffer all have a state."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.net = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        self.calls += 1
        return functional.mse_loss(self.net(inputs), targets)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        self.log("val_loss", functional.mse_loss(self.net(inputs), targets), batch_size=len(inputs))
        self.log("num_samples", float(len(inputs)), reduce_fx="sum")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def num_items(self, batch: Any) -> int:
        return len(batch[0])

    def tensor_parallel_plan(self, mesh: Any) -> dict[str, Any]:
        return {"net.0": "colwise", "net.2": "rowwise"}

    def configure_optimizers(self) -> Any:
        """Return AdamW with decay on the weights only, and a schedule by steps."""
        weights = [p for p in self.net.parameters() if p.dim() > 1]
        biases = [p for p in self.net.parameters() if p.dim() == 1]
        optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.02)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@dataclass
class Training:
    """The results of one fit: mean loss, gradient norm and learning rates of each step, and the weights at its end."""

    losses: list[float]
    norms: list[float]
    lrs: list[list[float]]
    weights: dict[str, torch.Tensor]

    def after(self, first: Training) -> Training:
        """Return the training that began with `first` and went on with this one."""
        return Training(first.losses + self.losses, first.norms + self.norms, first.lrs + self.lrs, self.weights)


@dataclass
class Contract:
    """The results of one strategy.

    Attributes:
        whole: the uninterrupted training of all epochs.
        first: its first half, after which the checkpoint is written.
        rest: its second half, from that checkpoint.
        evaluated: the metrics of an evaluation.
        predicted: the predictions of all samples, in their order, (NUM_EVALUATED, 1).
        counted: what metric objects of the task have seen in each epoch; None for pipelines.
        metrics: values of the metric objects that were logged.
        bf16: the mean losses of the steps of an epoch in bf16-mixed.
        stopped_at: steps of a training that the last rank alone asked to stop after `STOP_AFTER_STEPS`.
    """

    whole: Training
    first: Training
    rest: Training
    evaluated: dict[str, float]
    predicted: torch.Tensor
    counted: list[Any] | None
    metrics: dict[str, float]
    bf16: list[float]
    stopped_at: int


def trainer_of(name: str, **arguments: Any) -> Any:
    """Return a quiet Trainer with a strategy, in the processes that were started for it."""
    case = STRATEGIES[name]
    return quiet_trainer(
        devices="auto" if case.processes > 1 else 1,
        strategy=case.strategy if isinstance(case.strategy, str) else case.strategy(),
        **arguments,
    )


def train(
    name: str, epochs: int = EPOCHS, *, ckpt_path: Path | None = None, save_to: Path | None = None, **arguments: Any
) -> tuple[StepRecorder, dict[str, torch.Tensor]]:
    """Train on this process's rank; the losses are this rank's shares."""
    recorder, task = StepRecorder(), ContractTask()
    trainer = trainer_of(
        name,
        max_epochs=epochs,
        accumulate_grad_batches=ACCUMULATE // data_ranks_of(name),
        gradient_clip_val=CLIP,
        callbacks=[recorder] if save_to is None else [recorder, SaveAtEnd(save_to)],
        **arguments,
    )
    trainer.fit(task, micro_batches(), ckpt_path=ckpt_path)
    # Where this rank does not see all gradients there is the engine's word alone.
    if trainer.strategy.capabilities.gradients == "hidden" or STRATEGIES[name].is_pipeline:
        recorder.norms = [float("nan") if norm is None else norm for norm in recorder.reported]
    return recorder, weights_of(task)


class _Counting(ContractTask):
    """Counts samples with metric objects that are summed, concatenated and in a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.SumMetric()
        self.values = torchmetrics.CatMetric()
        self.group = torchmetrics.MetricCollection([torchmetrics.SumMetric(), torchmetrics.MaxMetric()])
        self.validated = torchmetrics.SumMetric()
        self.found: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.update(float(len(batch[0])))
        self.values.update(batch[1].flatten())
        self.group(batch[1].flatten())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])
        self.validated.update(float(len(batch[0])))
        self.log("validated", self.validated)

    def on_train_epoch_end(self) -> None:
        values = sorted(self.values.compute().tolist())
        group = sorted(map(float, self.group.compute().values()))
        self.found.append((float(self.seen.compute()), values, group))
        for metric in (self.seen, self.values, self.group):
            metric.reset()


class _InBatchEnd(Callback):
    """Counts in a hook with a metric object of its own."""

    def __init__(self) -> None:
        self.seen = torchmetrics.SumMetric()

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.update(float(len(batch[0])))
        task.log("callback", self.seen, on_step=False, on_epoch=True)


class _StopsOnLastRank(Callback):
    """Asks for a stop on the last rank alone."""

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        if trainer.global_step == STOP_AFTER_STEPS and trainer.global_rank == trainer.world_size - 1:
            trainer.should_stop = True


def _run_on_rank(name: str, checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        "whole": train(name),
        "first": train(name, HALF, save_to=checkpoint),
        "rest": train(name, ckpt_path=checkpoint),
    }
    batches = DataLoader(evaluation_data(), batch_size=2)
    evaluator = trainer_of(name)
    found["evaluated"] = evaluator.validate(ContractTask(), batches, verbose=False)[0]
    found["predicted"] = torch.cat(evaluator.predict(ContractTask(), batches))

    numbers = torch.arange(1.0, NUM_COUNTED + 1).unsqueeze(1)
    loader = DataLoader(TensorDataset(numbers.expand(-1, 4) / NUM_COUNTED, numbers), batch_size=4)
    counting, counter = _Counting(), trainer_of(name, max_epochs=2, callbacks=[_InBatchEnd()])
    counter.fit(counting, loader, loader)
    # A pipeline refuses objects of the task in training, see docs/pipelines.md.
    found["counted"] = None if STRATEGIES[name].is_pipeline else counting.found
    found["metrics"] = dict(counter.callback_metrics)

    found["bf16"] = train(name, 1, precision="bf16-mixed")
    stopping = trainer_of(name, max_epochs=MOST_EPOCHS_OF_STOP, callbacks=[_StopsOnLastRank()])
    stopping.fit(ContractTask(), micro_batches())
    found["stopped_at"] = stopping.global_step
    return found


def run_contract(name: str, checkpoint: Path) -> Contract:
    """Run the whole contract under a strategy, in one group of as many processes as it takes."""
    processes = STRATEGIES[name].processes
    if processes == 1:
        by_rank = [_run_on_rank(name, checkpoint)]
    else:
        by_rank = run_distributed(_run_on_rank, processes, name, checkpoint, timeout=240)
    trained = {part: of_ranks([found[part] for found in by_rank]) for part in ("whole", "first", "rest", "bf16")}
    for part in ("evaluated", "counted", "metrics", "stopped_at"):
        assert all(found[part] == by_rank[0][part] for found in by_rank), part
    for found in by_rank:
        torch.testing.assert_close(found["predicted"], by_rank[0]["predicted"], rtol=0, atol=0)
    return Contract(**{**by_rank[0], **trained, "bf16": trained["bf16"].losses})


def continue_others(reader: str, checkpoints: list[Path]) -> list[Training]:
    """Continue each of some checkpoints under a strategy, all in one group of processes."""
    processes = STRATEGIES[reader].processes

    def work() -> list[tuple[StepRecorder, dict[str, torch.Tensor]]]:
        return [train(reader, ckpt_path=path) for path in checkpoints]

    by_rank = [work()] if processes == 1 else run_distributed(work, processes, timeout=240)
    return [of_ranks(list(found)) for found in zip(*by_rank, strict=True)]


def of_ranks(by_rank: list[tuple[StepRecorder, dict[str, torch.Tensor]]]) -> Training:
    """Return the training of all ranks, which must agree on norms and weights to the last bit."""
    recorders = [recorder for recorder, _ in by_rank]
    losses = [sum(shares) / len(by_rank) for shares in zip(*(r.losses for r in recorders), strict=True)]
    first = parameters(by_rank[0][1])
    for recorder, weights in by_rank[1:]:
        assert recorder.norms == recorders[0].norms
        assert recorder.lrs == recorders[0].lrs
        torch.testing.assert_close(parameters(weights), first, rtol=0, atol=0)
    return Training(losses, recorders[0].norms, recorders[0].lrs, by_rank[0][1])


def parameters(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights without the buffer that counts one rank's calls."""
    return {name: tensor for name, tensor in weights.items() if name != "calls"}


def train_by_hand(epochs: int = EPOCHS, *, autocast: bool = False) -> Training:
    """Train in plain PyTorch: each step is the mean over the items of its four micro-batches."""
    task = ContractTask()
    made = task.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    found = Training([], [], [], {})
    for _ in range(epochs):
        for start in range(0, len(ITEMS), ACCUMULATE):
            group = micro_batches()[start : start + ACCUMULATE]
            inputs, targets = (torch.cat(parts) for parts in zip(*group, strict=True))
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = functional.mse_loss(task.net(inputs), targets)
            loss.backward()
            found.losses.append(float(loss.detach()))
            found.norms.append(float(nn.utils.clip_grad_norm_(task.parameters(), CLIP)))
            found.lrs.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            schedule.step()
    found.weights = weights_of(task)
    return found
