from trainwright.accelerator.logging import tqdm as tqdm
from trainwright.strategies.megatron.parallelism_config import ParallelismConfig as ParallelismConfig
from trainwright.strategies.steps.te_layers import apply_fp8_autowrap as apply_fp8_autowrap
from trainwright.strategies.steps.te_layers import contextual_fp8_autocast as contextual_fp8_autocast
from trainwright.strategies.steps.te_layers import convert_model as convert_model
from trainwright.strategies.steps.te_layers import has_transformer_engine_layers as has_transformer_engine_layers
from trainwright.utils.bnb import *
from trainwright.utils.constants import *
from trainwright.utils.dataclasses import *
from trainwright.utils.deepspeed import *
from trainwright.utils.environment import *
from trainwright.utils.fsdp_utils import *
from trainwright.utils.imports import *
from trainwright.utils.megatron_lm import *
from trainwright.utils.memory import *
from trainwright.utils.modeling import *
from trainwright.utils.offload import *
from trainwright.utils.operations import *
from trainwright.utils.other import *
from trainwright.utils.random import *
from trainwright.utils.versions import *
