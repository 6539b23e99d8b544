"""REINFORCE: each optimizer step is one batch of whole episodes, which the loader plays with the newest policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import trainwright as L
from trainwright.callbacks import ModelCheckpoint

ARMS, LENGTH = 4, 5


class Episodes(IterableDataset[Any]):
    """Plays `count` episodes with a policy: the observation is the arm that pays next, shown one step before."""

    def __init__(self, policy: nn.Module, count: int) -> None:
        self.policy, self.count = policy, count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.count):
            yield self.play()

    @torch.no_grad()
    def play(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (observations, actions, rewards), each of shape (LENGTH,)."""
        observations = torch.randint(ARMS, (LENGTH,))
        actions = torch.distributions.Categorical(logits=self.policy(observations)).sample()
        return observations, actions, (actions == (observations + 1) % ARMS).float()


class Reinforce(L.TaskModule):
    """A table of preferences, and the returns' mean as baseline."""

    def __init__(self, gamma: float = 0.5, lr: float = 0.1, entropy_beta: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.policy = nn.Embedding(ARMS, ARMS)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss whose gradient is that of the expected return."""
        observations, actions, rewards = batch
        returns = torch.zeros_like(rewards)
        later = torch.zeros(len(rewards), device=self.device)
        for t in reversed(range(LENGTH)):
            later = rewards[:, t] + self.hparams.gamma * later
            returns[:, t] = later
        distribution = torch.distributions.Categorical(logits=self.policy(observations))
        advantage = returns - returns.mean(dim=0)
        entropy = distribution.entropy().mean()
        loss = -(advantage * distribution.log_prob(actions)).mean() - self.hparams.entropy_beta * entropy
        self.log("reward", rewards.mean(), prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"loss": loss, "entropy": entropy})
        return loss

    def train_dataloader(self) -> Any:
        """Return episodes of the present policy."""
        return DataLoader(Episodes(self.policy, 160), batch_size=16)

    def configure_optimizers(self) -> Any:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def train(folder: Path, epochs: int, ckpt_path: str | None = None) -> tuple[L.Trainer, Reinforce]:
    """Train and return trainer and model."""
    L.seed_everything(9)
    model = Reinforce()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, default_root_dir=folder, logger=False, log_every_n_steps=1,
        callbacks=[ModelCheckpoint(monitor="reward_epoch", mode="max", save_last=True)], enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer, model


@pytest.mark.slow
def test_the_policy_finds_the_arm_that_pays(tmp_path: Path) -> None:
    trainer, model = train(tmp_path, 12)
    assert trainer.callback_metrics["reward_epoch"] >= 0.9
    assert model.policy.weight.argmax(dim=1).tolist() == [1, 2, 3, 0]


def test_it_continues_where_it_was_stopped(tmp_path: Path) -> None:
    _, expected = train(tmp_path / "uninterrupted", 4)
    train(tmp_path / "stopped", 2)
    trainer, model = train(tmp_path / "stopped", 4, ckpt_path="last")
    assert trainer.global_step == 40
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
