from trainwright.optimizers.low_rank import LowRankAdamW as LowRankAdamW
from trainwright.optimizers.table import create_optimizer as create_optimizer
from trainwright.optimizers.table import optimizer_names as optimizer_names
