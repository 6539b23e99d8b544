from trainwright.accelerator.logging import get_logger as get_logger
from trainwright.accelerator.logging import on_main_process as on_main_process
from trainwright.core.names.constants import LoggerType as LoggerType
