from trainwright.trainer.accelerator.accelerator import Accelerator as Accelerator
from trainwright.trainer.trainer import Trainer as Trainer
