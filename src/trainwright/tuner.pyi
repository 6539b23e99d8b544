from trainwright.trainer.search.tuner import Tuner as Tuner
