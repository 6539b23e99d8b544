from trainwright.bigmodels.dispatch.align import AlignDevicesHook as AlignDevicesHook
from trainwright.bigmodels.dispatch.attach import attach_align_device_hook as attach_align_device_hook
from trainwright.bigmodels.dispatch.attach import (
    attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
)
from trainwright.bigmodels.dispatch.attach import attach_execution_device_hook as attach_execution_device_hook
from trainwright.bigmodels.dispatch.dispatch import cpu_offload as cpu_offload
from trainwright.bigmodels.dispatch.dispatch import cpu_offload_with_hook as cpu_offload_with_hook
from trainwright.bigmodels.dispatch.dispatch import disk_offload as disk_offload
from trainwright.bigmodels.dispatch.dispatch import dispatch_model as dispatch_model
from trainwright.bigmodels.dispatch.layerwise_casting import (
    attach_layerwise_casting_hooks as attach_layerwise_casting_hooks,
)
from trainwright.bigmodels.dispatch.loading import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from trainwright.bigmodels.dispatch.model_hooks import CpuOffload as CpuOffload
from trainwright.bigmodels.dispatch.model_hooks import ModelHook as ModelHook
from trainwright.bigmodels.dispatch.model_hooks import SequentialHook as SequentialHook
from trainwright.bigmodels.dispatch.model_hooks import UserCpuOffloadHook as UserCpuOffloadHook
from trainwright.bigmodels.dispatch.model_hooks import add_hook_to_module as add_hook_to_module
from trainwright.bigmodels.dispatch.model_hooks import remove_hook_from_module as remove_hook_from_module
from trainwright.bigmodels.dispatch.model_hooks import remove_hook_from_submodules as remove_hook_from_submodules
from trainwright.bigmodels.maps.device_map import check_device_map as check_device_map
from trainwright.bigmodels.weights.empty import init_empty_weights as init_empty_weights
from trainwright.bigmodels.weights.empty import init_on_device as init_on_device
