"""The gradient norm, and the gradients after clipping, are those of the unsharded model on every mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.nn import functional

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.helpers.selection import mostly_exhaustive
from trainwright.core.task import TaskModule
from trainwright.strategies.fsdp.strategy import FSDPStrategy


class Mixed(TaskModule):
    """Split layers and embeddings, a layer between whole ones, and weights that are used twice; one bias is frozen."""

    def __init__(self, algorithm: str) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.gradients: list[dict[str, torch.Tensor]] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
            self.norm = nn.LayerNorm(6)
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.head = nn.Linear(6, 1)
            self.places, self.signs = nn.Embedding(4, 6), nn.Embedding(2, 6)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.places((4 * torch.sigmoid(x[:, 1])).long()) + self.signs((x[:, 0] > 0).long())
        x = self.norm(x + self.down(torch.tanh(self.up(x))))
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return 100 * functional.mse_loss(self(batch), batch.sum(dim=1, keepdim=True))

    def num_items(self, batch: Any) -> int:
        return len(batch)

    def configure_gradient_clipping(self, optimizer: Any, value: Any = None, algorithm: Any = None) -> None:
        strategy: Any = self.trainer.strategy  # type: ignore[attr-defined]  # the Trainer's own
        self.gradients.append({name: g.clone() for name, g in strategy.state.full_gradients().items()})
        self.clip_gradients(optimizer, value, self.algorithm)
        self.gradients.append({name: g.clone() for name, g in strategy.state.full_gradients().items()})

    def tensor_parallel_plan(self, mesh: Any) -> dict[str, Any]:
        """Split the two layers of the residual branch, and the embeddings: by our style and by torch's."""
        signs = RowwiseParallel(input_layouts=Replicate())  # whose gradient is whole on every rank
        return {"up": "colwise", "down": "rowwise", "places": "embedding", "signs": signs}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-4)


def gradients_under(make: Callable[[], Any], processes: int, dp_size: int) -> list[dict[str, torch.Tensor]]:
    """Return the main rank's whole gradients of three steps of 8 rows: before and after clipping, by each algorithm."""
    found = []
    for algorithm in ("norm", "value"):
        task = Mixed(algorithm)
        data = torch.randn(24, 6, generator=torch.Generator().manual_seed(3)).split(4 // dp_size)
        trainer = quiet_trainer(
            devices="auto" if processes > 1 else 1, strategy=make(), max_epochs=1, accumulate_grad_batches=2,
            gradient_clip_val=0.7,
        )  # fmt: skip
        trainer.fit(task, list(data))
        found += task.gradients
    return found


_MESHES: dict[str, tuple[Callable[[], Any], int, int]] = {
    "ddp": (lambda: "ddp", 2, 2),
    "fsdp": (lambda: "fsdp", 2, 2),
    "tp": (lambda: "tp", 2, 1),
    "fsdp x tp": (lambda: FSDPStrategy(tp=2), 4, 2),
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", mostly_exhaustive(_MESHES, keep=["tp"]))
def test_gradients_before_and_after_clipping_are_those_of_the_unsharded_model(name: str) -> None:
    make, processes, dp_size = _MESHES[name]
    alone = gradients_under(lambda: "single", 1, 1)
    by_rank = run_distributed(
        lambda: gradients_under(make, processes, dp_size), processes, init=False, timeout=60.0 * processes
    )
    norms = [float(nn.utils.get_total_norm(list(gradients.values()))) for gradients in alone[:6]]
    assert norms[0] > 10
    assert norms[1] == pytest.approx(0.7, abs=1e-4)
    assert len(by_rank[0]) == len(alone) == 12
    for found, expected in zip(by_rank[0], alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
