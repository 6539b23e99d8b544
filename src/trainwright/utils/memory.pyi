from trainwright.core.host.memory import clear_device_cache as clear_device_cache
from trainwright.core.host.memory import find_executable_batch_size as find_executable_batch_size
from trainwright.core.host.memory import release_memory as release_memory
from trainwright.core.host.memory import should_reduce_batch_size as should_reduce_batch_size
