from trainwright.bigmodels.dispatch.dispatch import cpu_offload as cpu_offload
from trainwright.bigmodels.dispatch.dispatch import cpu_offload_with_hook as cpu_offload_with_hook
from trainwright.bigmodels.dispatch.dispatch import disk_offload as disk_offload
from trainwright.bigmodels.dispatch.dispatch import dispatch_model as dispatch_model
from trainwright.bigmodels.dispatch.loading import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from trainwright.bigmodels.dispatch.model_hooks import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
from trainwright.bigmodels.maps.device_map import check_device_map as check_device_map
from trainwright.bigmodels.weights.empty import init_empty_weights as init_empty_weights
from trainwright.bigmodels.weights.empty import init_on_device as init_on_device
from trainwright.hooks import *
