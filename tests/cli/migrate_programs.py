"""Small programs of Lightning and Accelerate as people write them, for `trainwright migrate`."""

from __future__ import annotations

_MODEL = '''
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

POINTS = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
QUIET = dict(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
             enable_model_summary=False, max_epochs=1)


class Steps:
    """What all of these have in common."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
'''

SETTLED = {
    "pl": """import pytorch_lightning as pl
from pytorch_lightning.callbacks import (
    EarlyStopping,  # ends a run
    ModelCheckpoint,
)

class Net(Steps, pl.LightningModule): ...

trainer = pl.Trainer(**{**QUIET, "enable_checkpointing": True},
                     callbacks=[ModelCheckpoint("kept"), EarlyStopping("train_loss", check_on_train_epoch_end=True)])
trainer.fit(Net(), DataLoader(POINTS))
""",
    "fallback": """try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback
except ImportError:
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import Callback

class Net(Steps, pl.LightningModule): ...

pl.Trainer(callbacks=Callback(), **QUIET).fit(Net(), DataLoader(POINTS))
""",
    "command_line": """import sys
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch import LightningModule, LightningDataModule

class Net(Steps, LightningModule):
    def __init__(self, width: int = 1):
        super().__init__()

class Data(LightningDataModule):
    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(POINTS, batch_size=self.batch_size)

class OwnCLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.batch_size", "model.width")

cli = OwnCLI(Net, Data, trainer_defaults=QUIET, save_config_callback=None, args=["fit", "--data.batch_size=2"])
assert cli.trainer.global_step == 4
assert cli.config.fit.model.width == 2
""",
    "accelerate": """from accelerate import Accelerator
from accelerate.utils import set_seed

set_seed(1)
accelerator = Accelerator(cpu=True)
model = nn.Linear(2, 1)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(POINTS, batch_size=4)
)
for inputs, targets in loader:
    accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
accelerator.print("done")
""",
    "accelerate_by_its_module": """import accelerate

accelerate.utils.set_seed(1)
accelerator = accelerate.Accelerator(cpu=True)
with accelerate.init_empty_weights():
    assert nn.Linear(2, 2).weight.is_meta
assert accelerate.utils.send_to_device([torch.ones(1)], "cpu")[0].item() == 1
""",
}
PROGRAMS = {name: _head + "\n\n" + _text for name, _text in SETTLED.items() for _head in [_MODEL]}
"""Name → a program that migrates without anything left to do, and runs then."""
