"""Q-learning on data that the agent makes: hooks fill a replay buffer, which an IterableDataset samples from."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import trainwright as L

LENGTH, LIMIT = 6, 30


class Corridor:
    """Six fields in a row; the right end pays 1, each step costs 0.01. Begins at the left."""

    def reset(self) -> int:
        """Return the first field."""
        self.field, self.steps = 0, 0
        return 0

    def step(self, action: int) -> tuple[int, float, bool]:
        """Go left (0) or right (1); return (field, reward, whether the episode ended)."""
        self.steps += 1
        self.field = min(max(self.field + (1 if action else -1), 0), LENGTH - 1)
        arrived = self.field == LENGTH - 1
        return self.field, 1.0 if arrived else -0.01, arrived or self.steps == LIMIT


class Replay(IterableDataset[Any]):
    """Batches' worth of random transitions; what it holds changes while it is read."""

    def __init__(self, capacity: int, samples: int) -> None:
        self.buffer: deque[tuple[int, int, float, bool, int]] = deque(maxlen=capacity)
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.samples):
            yield random.choice(self.buffer)


class DQN(L.TaskModule):
    """A network, its delayed copy, and an agent that plays between steps."""

    def __init__(self, gamma: float = 0.9, lr: float = 1e-2, sync_rate: int = 10, warm_up: int = 100) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Embedding(LENGTH, 16), nn.ReLU(), nn.Linear(16, 2))
        self.target = nn.Sequential(nn.Embedding(LENGTH, 16), nn.ReLU(), nn.Linear(16, 2)).requires_grad_(False)
        self.replay, self.env = Replay(500, 320), Corridor()
        self.field = self.env.reset()
        self.episode_reward = 0.0
        self.rewards: deque[float] = deque([-0.3], maxlen=5)

    @torch.no_grad()
    def play(self, epsilon: float) -> None:
        """Make one move and keep it."""
        best = self.net(torch.tensor([self.field], device=self.device)).argmax().item()
        action = random.randrange(2) if random.random() < epsilon else int(best)
        field, reward, done = self.env.step(action)
        self.replay.buffer.append((self.field, action, reward, done, field))
        self.episode_reward += reward
        self.field = field
        if done:
            self.rewards.append(self.episode_reward)
            self.episode_reward, self.field = 0.0, self.env.reset()

    def on_fit_start(self) -> None:
        """Fill the buffer with random moves."""
        while len(self.replay.buffer) < self.hparams.warm_up:
            self.play(epsilon=1.0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Play while training."""
        for _ in range(4):
            self.play(epsilon=max(0.05, 1.0 - self.global_step / 50))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the error of what the network expects."""
        fields, actions, rewards, dones, next_fields = batch
        expected = self.net(fields).gather(1, actions.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            later = self.target(next_fields).max(dim=1).values.masked_fill(dones, 0.0)
        loss = F.smooth_l1_loss(expected, rewards.float() + self.hparams.gamma * later)
        self.log_dict({"loss": loss, "total_reward": sum(self.rewards) / len(self.rewards)}, prog_bar=True)
        self.log("episode_steps", float(self.env.steps), on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Copy the network now and then."""
        if self.global_step % self.hparams.sync_rate == 0:
            self.target.load_state_dict(self.net.state_dict())

    def train_dataloader(self) -> Any:
        """Return samples of the buffer."""
        return DataLoader(self.replay, batch_size=16)

    def configure_optimizers(self) -> Any:
        """Return Adam."""
        return torch.optim.Adam(self.net.parameters(), lr=self.hparams.lr)


def trainer_for(folder: Path, **settings: Any) -> L.Trainer:
    """Return one without bars."""
    return L.Trainer(
        accelerator="cpu", devices=1, default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=5, **settings,
    )  # fmt: skip


@pytest.mark.slow
def test_the_agent_learns_to_walk_to_the_end(tmp_path: Path) -> None:
    L.seed_everything(2)
    model = DQN()
    trainer = trainer_for(tmp_path, max_epochs=15)
    trainer.fit(model)
    assert trainer.callback_metrics["total_reward"] >= 0.9  # the shortest way pays 0.96
    values = model.net(torch.arange(LENGTH - 1))
    assert values.argmax(dim=1).tolist() == [1] * (LENGTH - 1)


def test_it_continues_with_the_network_and_a_new_buffer(tmp_path: Path) -> None:
    L.seed_everything(2)
    first = trainer_for(tmp_path, max_epochs=4)
    model = DQN()
    first.fit(model)
    saved = DQN.load_from_checkpoint(first.checkpoint_callback.best_model_path)
    torch.testing.assert_close(saved.state_dict(), model.state_dict(), rtol=0, atol=0)
    again = trainer_for(tmp_path, max_epochs=6)
    resumed = DQN()
    again.fit(resumed, ckpt_path="last")
    assert (again.global_step, again.current_epoch) == (120, 6)
    assert len(resumed.replay.buffer) > resumed.hparams.warm_up
