from trainwright.accelerator.logging import MultiProcessAdapter as MultiProcessAdapter
from trainwright.accelerator.logging import get_logger as get_logger
