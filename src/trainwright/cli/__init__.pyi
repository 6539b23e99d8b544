from trainwright.cli.configs.cli_parser import CLIParser as CLIParser
from trainwright.cli.configs.cli_parser import LRSchedulerCallable as LRSchedulerCallable
from trainwright.cli.configs.cli_parser import OptimizerCallable as OptimizerCallable
from trainwright.cli.configs.cli_parser import ReduceLROnPlateau as ReduceLROnPlateau
from trainwright.cli.configs.save_config_callback import SaveConfigCallback as SaveConfigCallback
from trainwright.cli.script import CLI as CLI
