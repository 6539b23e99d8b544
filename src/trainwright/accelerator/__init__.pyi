from trainwright.accelerator.accelerator import Accelerator as Accelerator
