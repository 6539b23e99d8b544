from trainwright.accelerator.logging import get_logger as get_logger
from trainwright.accelerator.logging import on_main_process as on_main_process
from trainwright.accelerator.trackers import GeneralTracker as GeneralTracker
from trainwright.accelerator.trackers import TensorBoardTracker as TensorBoardTracker
from trainwright.accelerator.trackers import WandBTracker as WandBTracker
from trainwright.core.names.constants import LoggerType as LoggerType
