from trainwright.trainer.trainer import Trainer as Trainer
