"""Five models for `tuned.py`: tasks and data whose arguments `trainwright profile --apply` may change.

Sizes are those of a CPU: a step takes some tens of milliseconds on two cores. Samples are made from their index, as if
they were read and augmented, so that worker processes give the same samples as the training process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from real_model import BATCH_SIZE, CLIP, GPT, Text, make_optimizer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from trainwright import DataModule, TaskModule

NUM_SAMPLES = 4096


class Net(TaskModule):
    """A model with a loss, and AdamW.

    Args:
        model: the model.
        fused: passed to AdamW. False lets torch choose.
    """

    def __init__(self, model: nn.Module, fused: bool = False) -> None:
        super().__init__()
        self.model, self.fused = model, fused

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch of inputs and classes."""
        inputs, classes = batch
        return functional.cross_entropy(self.model(inputs), classes)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW with nanoGPT's settings."""
        optimizer = make_optimizer(self)
        for group in optimizer.param_groups:
            group["fused"] = self.fused or None
        return optimizer


class Samples(DataModule):
    """Shuffled batches of a data set."""

    def __init__(self, dataset: Dataset[Any], batch_size: int, num_workers: int) -> None:
        super().__init__()
        self.dataset, self.batch_size, self.num_workers = dataset, batch_size, num_workers

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the loader."""
        return DataLoader(self.dataset, self.batch_size, shuffle=True, num_workers=self.num_workers)


# nanoGPT


class NanoGpt(Net):
    """nanoGPT's model for a CPU."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__(GPT(), fused)

    def loss(self, batch: Any) -> Tensor:
        """Return the loss, which the model computes."""
        loss: Tensor = self.model(batch)
        return loss


class Characters(Samples):
    """Contexts of random characters."""

    def __init__(self, num_workers: int = 0) -> None:
        super().__init__(Text(NUM_SAMPLES), BATCH_SIZE, num_workers)


# ResNet-18


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both paths; (batch, outputs, height / stride, width / stride)."""
        y = functional.relu(self.norm_1(self.first(x)))
        return functional.relu(self.norm_2(self.second(y)) + self.shortcut(x))


class ResNet18(Net):
    """ResNet-18 with the stem that is usual for images of 32 × 32."""

    def __init__(self, fused: bool = False, channels_last: bool = False) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        inputs = 64
        for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            layers += [Residual(inputs, outputs, stride), Residual(outputs, outputs, 1)]
            inputs = outputs
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
        if channels_last:
            model.to(memory_format=torch.channels_last)
        super().__init__(model, fused)


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Images of 32 × 32, each cropped and mirrored as its index says."""

    def __init__(self) -> None:
        self.images = torch.randint(256, (NUM_SAMPLES, 3, 32, 32), dtype=torch.uint8)
        self.classes = torch.randint(10, (NUM_SAMPLES,))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        image = functional.pad(self.images[idx].float() / 255, (4, 4, 4, 4))
        top, left = idx % 9, idx // 9 % 9
        image = image[:, top : top + 32, left : left + 32]
        if idx % 2:
            image = image.flip(2)
        return (image - 0.5) / 0.25, self.classes[idx]


class CifarSizedPictures(Samples):
    """Images in batches of 8."""

    def __init__(self, num_workers: int = 0) -> None:
        super().__init__(Pictures(), 8, num_workers)


# BERT


class Bert(Net):
    """A small BERT of transformers that classifies sequences."""

    def __init__(self, fused: bool = False) -> None:
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=8192, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
            num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        super().__init__(BertForSequenceClassification(config), fused)

    def loss(self, batch: Any) -> Tensor:
        """Return the loss, which the model computes."""
        tokens, labels = batch
        loss: Tensor = self.model(input_ids=tokens, labels=labels).loss
        return loss


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """64 tokens and a label."""

    def __init__(self) -> None:
        self.tokens = torch.randint(8192, (NUM_SAMPLES, 64))
        self.labels = torch.randint(2, (NUM_SAMPLES,))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        return self.tokens[idx], self.labels[idx]


class LabelledSentences(Samples):
    """Sequences in batches of 8."""

    def __init__(self, num_workers: int = 0) -> None:
        super().__init__(Sentences(), 8, num_workers)


# U-Net


def twice(inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions with their norms."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
    )  # fmt: skip


class UNetModel(nn.Module):
    """A U-Net of four levels."""

    def __init__(self, width: int = 16, classes: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([twice(3, width), twice(width, 2 * width), twice(2 * width, 4 * width)])
        self.bottom = twice(4 * width, 8 * width)
        self.up = nn.ModuleList([nn.ConvTranspose2d(2 * size, size, 2, 2) for size in (4 * width, 2 * width, width)])
        self.join = nn.ModuleList([twice(2 * size, size) for size in (4 * width, 2 * width, width)])
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of (batch, classes, height, width)."""
        levels = []
        for level in self.down:
            x = level(x)
            levels.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, join, beside in zip(self.up, self.join, reversed(levels), strict=True):
            x = join(torch.cat([up(x), beside], dim=1))
        scores: Tensor = self.out(x)
        return scores


class UNet(Net):
    """A U-Net that classifies pixels."""

    def __init__(self, fused: bool = False, channels_last: bool = False) -> None:
        model = UNetModel()
        if channels_last:
            model.to(memory_format=torch.channels_last)
        super().__init__(model, fused)


class Masks(Dataset[tuple[Tensor, Tensor]]):
    """Images of 64 × 64 and the class of each pixel."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(idx)
        image = torch.rand(3, 64, 64, generator=generator)
        return image, (image.mean(0) * 4).long()


class Segmentation(Samples):
    """Images in batches of 4."""

    def __init__(self, num_workers: int = 0) -> None:
        super().__init__(Masks(), 4, num_workers)


# LSTM


class LstmModel(nn.Module):
    """Two layers of an LSTM over tokens."""

    def __init__(self, vocabulary: int = 2000, width: int = 256) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(vocabulary, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of (batch, vocabulary, length)."""
        scores: Tensor = self.head(self.lstm(self.embed(tokens))[0])
        return scores.transpose(1, 2)


class Lstm(Net):
    """An LSTM that predicts the next token."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__(LstmModel(), fused)


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """32 tokens, and the same one token later."""

    def __init__(self) -> None:
        self.tokens = torch.randint(2000, (NUM_SAMPLES, 33))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        return self.tokens[idx, :-1], self.tokens[idx, 1:]


class NextTokens(Samples):
    """Sequences in batches of 16."""

    def __init__(self, num_workers: int = 0) -> None:
        super().__init__(Tokens(), 16, num_workers)


@dataclass(frozen=True)
class Work:
    """A task with its data.

    Attributes:
        name: of the model.
        task: a class of this module.
        data: likewise.
    """

    name: str
    task: Callable[..., Net]
    data: Callable[..., Samples]

    def config(self, accelerator: str) -> str:
        """Return the configuration of `trainwright fit`, as YAML."""
        return (
            f"trainer: {{accelerator: {accelerator}, devices: 1, gradient_clip_val: {CLIP}}}\n"
            f"task: tuned_models.{self.task.__name__}\ndata: tuned_models.{self.data.__name__}\n"
        )


WORKS = (
    Work("nanoGPT", NanoGpt, Characters),
    Work("ResNet-18", ResNet18, CifarSizedPictures),
    Work("BERT", Bert, LabelledSentences),
    Work("U-Net", UNet, Segmentation),
    Work("LSTM", Lstm, NextTokens),
)
