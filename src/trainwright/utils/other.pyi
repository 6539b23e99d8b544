from trainwright.accelerator.functions import extract_model_from_parallel as extract_model_from_parallel
from trainwright.accelerator.functions import load as load
from trainwright.accelerator.functions import save as save
from trainwright.core.host.byte_sizes import convert_file_size_to_int as convert_file_size_to_int
from trainwright.core.names.packages import is_peft_model as is_peft_model
from trainwright.processes.collectives import wait_for_everyone as wait_for_everyone
from trainwright.processes.launcher import clear_environment as clear_environment
from trainwright.processes.launcher import patch_environment as patch_environment
