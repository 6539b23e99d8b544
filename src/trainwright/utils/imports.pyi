from trainwright.core.names.packages import is_aim_available as is_aim_available
from trainwright.core.names.packages import is_bf16_available as is_bf16_available
from trainwright.core.names.packages import is_bnb_available as is_bnb_available
from trainwright.core.names.packages import is_boto3_available as is_boto3_available
from trainwright.core.names.packages import is_clearml_available as is_clearml_available
from trainwright.core.names.packages import is_comet_ml_available as is_comet_ml_available
from trainwright.core.names.packages import is_cuda_available as is_cuda_available
from trainwright.core.names.packages import is_datasets_available as is_datasets_available
from trainwright.core.names.packages import is_deepspeed_available as is_deepspeed_available
from trainwright.core.names.packages import is_dvclive_available as is_dvclive_available
from trainwright.core.names.packages import is_fp8_available as is_fp8_available
from trainwright.core.names.packages import is_fp16_available as is_fp16_available
from trainwright.core.names.packages import is_habana_gaudi1 as is_habana_gaudi1
from trainwright.core.names.packages import is_hpu_available as is_hpu_available
from trainwright.core.names.packages import is_import_timer_available as is_import_timer_available
from trainwright.core.names.packages import is_ipex_available as is_ipex_available
from trainwright.core.names.packages import is_lomo_available as is_lomo_available
from trainwright.core.names.packages import is_matplotlib_available as is_matplotlib_available
from trainwright.core.names.packages import is_megatron_lm_available as is_megatron_lm_available
from trainwright.core.names.packages import is_mlflow_available as is_mlflow_available
from trainwright.core.names.packages import is_mlu_available as is_mlu_available
from trainwright.core.names.packages import is_mps_available as is_mps_available
from trainwright.core.names.packages import is_msamp_available as is_msamp_available
from trainwright.core.names.packages import is_musa_available as is_musa_available
from trainwright.core.names.packages import is_neuron_available as is_neuron_available
from trainwright.core.names.packages import is_npu_available as is_npu_available
from trainwright.core.names.packages import is_pandas_available as is_pandas_available
from trainwright.core.names.packages import is_peft_available as is_peft_available
from trainwright.core.names.packages import is_pippy_available as is_pippy_available
from trainwright.core.names.packages import is_pynvml_available as is_pynvml_available
from trainwright.core.names.packages import is_pytest_available as is_pytest_available
from trainwright.core.names.packages import is_rich_available as is_rich_available
from trainwright.core.names.packages import is_rocm_available as is_rocm_available
from trainwright.core.names.packages import is_sagemaker_available as is_sagemaker_available
from trainwright.core.names.packages import is_schedulefree_available as is_schedulefree_available
from trainwright.core.names.packages import is_sdaa_available as is_sdaa_available
from trainwright.core.names.packages import is_swanlab_available as is_swanlab_available
from trainwright.core.names.packages import is_tensorboard_available as is_tensorboard_available
from trainwright.core.names.packages import is_timm_available as is_timm_available
from trainwright.core.names.packages import is_torch_xla_available as is_torch_xla_available
from trainwright.core.names.packages import is_torchao_available as is_torchao_available
from trainwright.core.names.packages import is_torchdata_available as is_torchdata_available
from trainwright.core.names.packages import (
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
)
from trainwright.core.names.packages import is_torchvision_available as is_torchvision_available
from trainwright.core.names.packages import is_tqdm_available as is_tqdm_available
from trainwright.core.names.packages import is_trackio_available as is_trackio_available
from trainwright.core.names.packages import is_transformer_engine_available as is_transformer_engine_available
from trainwright.core.names.packages import (
    is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available,
)
from trainwright.core.names.packages import is_transformers_available as is_transformers_available
from trainwright.core.names.packages import is_triton_available as is_triton_available
from trainwright.core.names.packages import is_wandb_available as is_wandb_available
from trainwright.core.names.packages import is_xpu_available as is_xpu_available
