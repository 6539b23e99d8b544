"""MegatronLMPlugin: pipeline and tensor parallelism with Hugging Face Accelerate's option names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.kwargs_handler import KwargsHandler
from trainwright.strategies.fsdp.options import one_of
from trainwright.strategies.megatron.option_table import MEGATRON_LM
from trainwright.strategies.megatron.stages import layers_of
from trainwright.strategies.megatron.strategy import MegatronStrategy

# Replacements of options of Megatron-LM.
_SAMPLES = "schedules count optimizer steps; use train_iters, lr_decay_iters or lr_warmup_iters"
_GROUPS = "pass the optimizer parameter groups with lr and weight_decay, and remove it"
_MODEL = "prepare() trains the model that it receives; build it in the script, and remove it"
_DATA = "prepare a DataLoader or a MegatronLMDummyDataLoader, and remove it"
_TRACKERS = "pass Accelerator(log_with='tensorboard', project_dir=…), and remove it"
_ENCODER = "encoder-decoder models cannot be divided into pipeline stages; use tp_degree"
_CONSUMED = "load_state restores the position in the data; remove it"
_ITSELF = "Megatron-LM itself does not run; configure position embeddings and attention in the model"


def _refused(refusal: str, *harmless: object) -> dict[str, object]:
    """Return the metadata of a field that accepts only None and the `harmless` values."""
    return {"refusal": refusal, "harmless": harmless}


@dataclass
class MegatronLMPlugin(KwargsHandler):
    """Options of `MegatronStrategy`, with the names of Hugging Face Accelerate.

    A field that is None takes the value of its environment variable (`MEGATRON_LM_TP_DEGREE`, …), or the default if the
    variable is not set. In training, a call of the prepared model runs the forward and backward of all micro-batches.

    Attributes:
        tp_degree: Number of ranks that split layers. Default: 1.
        pp_degree: Number of pipeline stages. Default: 1.
        num_micro_batches: Micro-batches per optimizer step. A batch of a prepared DataLoader has `num_micro_batches *
            batch_size` rows. Default: 1.
        gradient_clipping: Maximum norm of the gradients. 0 disables clipping. Default: 1.
        sequence_parallelism: Shard sequences between split layers, for models that support it (see
            `MegatronStrategy`). Has no effect if `tp_degree` is 1. Default: False.
        recompute_activations: Recompute all operations except matrix products in backward. Default: False.
        recompute_granularity: `"full"` or `"selective"`. Takes precedence over `recompute_activations`.
        use_distributed_optimizer: Shard parameters, gradients and optimizer state over data-parallel ranks. Default:
            False.
        num_layers_per_virtual_pipeline_stage: Number of layers per stage if a rank holds several interleaved stages.
        train_iters, lr_decay_iters, lr_warmup_iters: Number of steps of the training, of the learning rate decay and of
            the warmup. They take precedence over `MegatronLMDummyScheduler`.
        lr_warmup_fraction: Warmup steps as a fraction of the decay steps.
        lr_decay_style: `"linear"`, `"cosine"` or `"constant"`.
        min_lr: Final learning rate.
        weight_decay_incr_style: `"constant"`, `"linear"` or `"cosine"`.
        start_weight_decay, end_weight_decay: Initial and final weight decay.
        return_logits: Return the logits in addition to the loss in evaluation.
        custom_train_step_class: A subclass of `AbstractTrainStep`.
        custom_train_step_kwargs: Arguments of the class.
        custom_get_batch_function, custom_loss_function: Functions that replace those of `GPTTrainStep`, `BertTrainStep`
            or `T5TrainStep`.
        is_train_batch_min, attention_backend, attention_softmax_in_fp32, seq_length, encoder_seq_length,
            decoder_seq_length, eval_iters, eval_interval: Accepted without effect: the loop determines them.

    Other fields are unsupported options of Megatron-LM. A value that has an effect in Megatron-LM raises an error with
    a remedy.
    """

    tp_degree: int | None = MEGATRON_LM.field("tp_degree")
    pp_degree: int | None = MEGATRON_LM.field("pp_degree")
    use_custom_fsdp: bool | None = MEGATRON_LM.field("use_custom_fsdp")
    overlap_cpu_optimizer_d2h_h2d: bool | None = MEGATRON_LM.field("overlap_cpu_optimizer_d2h_h2d")
    no_load_optim: bool | None = MEGATRON_LM.field("no_load_optim")
    eod_mask_loss: bool | None = MEGATRON_LM.field("eod_mask_loss")
    no_save_optim: bool | None = MEGATRON_LM.field("no_save_optim")
    optimizer_cpu_offload: bool | None = MEGATRON_LM.field("optimizer_cpu_offload")
    use_precision_aware_optimizer: bool | None = MEGATRON_LM.field("use_precision_aware_optimizer")
    decoder_last_pipeline_num_layers: int | None = MEGATRON_LM.field("decoder_last_pipeline_num_layers")
    recompute_granularity: str | None = MEGATRON_LM.field("recompute_granularity")
    recompute_method: str | None = MEGATRON_LM.field("recompute_method")
    recompute_num_layers: int | None = MEGATRON_LM.field("recompute_num_layers")
    attention_backend: bool | str | None = MEGATRON_LM.field("attention_backend")
    expert_model_parallel_size: int | None = MEGATRON_LM.field("expert_model_parallel_size")
    context_parallel_size: int | None = MEGATRON_LM.field("context_parallel_size")
    attention_dropout: float | None = MEGATRON_LM.field("attention_dropout")
    hidden_dropout: float | None = MEGATRON_LM.field("hidden_dropout")
    attention_softmax_in_fp32: bool | None = MEGATRON_LM.field("attention_softmax_in_fp32")
    expert_tensor_parallel_size: int | None = MEGATRON_LM.field("expert_tensor_parallel_size")
    calculate_per_token_loss: bool | None = MEGATRON_LM.field("calculate_per_token_loss")
    use_rotary_position_embeddings: bool | None = MEGATRON_LM.field("use_rotary_position_embeddings")
    num_micro_batches: int | None = MEGATRON_LM.field("num_micro_batches")
    gradient_clipping: float | None = MEGATRON_LM.field("gradient_clipping")
    sequence_parallelism: bool | None = MEGATRON_LM.field("sequence_parallelism")
    recompute_activations: bool | None = MEGATRON_LM.field("recompute_activations")
    use_distributed_optimizer: bool | None = MEGATRON_LM.field("use_distributed_optimizer")
    pipeline_model_parallel_split_rank: int | None = field(default=None, metadata=_refused(_ENCODER))
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool | str = True
    train_iters: int | None = None
    train_samples: int | None = field(default=None, metadata=_refused(_SAMPLES))
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = field(default=None, metadata=_refused(_SAMPLES))
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = field(default=None, metadata=_refused(_SAMPLES, 0))
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = field(default=None, metadata=_refused(_CONSUMED, [0, 0, 0]))
    no_wd_decay_cond: Callable[..., Any] | None = field(default=None, metadata=_refused(_GROUPS))
    scale_lr_cond: Callable[..., Any] | None = field(default=None, metadata=_refused(_GROUPS))
    lr_mult: float = field(default=1.0, metadata=_refused(_GROUPS, 1.0))
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = field(default=None, metadata=_refused(_TRACKERS))
    set_all_logging_options: bool = field(default=False, metadata=_refused(_TRACKERS, False))
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = field(default=None, metadata=_refused(_MODEL))
    custom_prepare_model_function: Callable[..., Any] | None = field(default=None, metadata=_refused(_MODEL))
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = field(
        default=None, metadata=_refused(_DATA)
    )
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = field(default=None, metadata=_refused(_ITSELF, {}))

    def __post_init__(self) -> None:
        super().__post_init__()
        # KwargsHandler has set fields from environment variables. None is left where a variable is not set.
        for name in ("tp_degree", "pp_degree", "num_micro_batches", "gradient_clipping"):
            if getattr(self, name) is None:
                setattr(self, name, 1)
        for name in ("sequence_parallelism", "recompute_activations", "use_distributed_optimizer"):
            setattr(self, name, bool(getattr(self, name)))

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Set the attributes `micro_batch_size`, `data_parallel_size` and `global_batch_size`.

        `prepare` calls this method with the first DataLoader's batch size.
        """
        self.micro_batch_size = micro_batch_size
        self.data_parallel_size = dp_degree
        self.global_batch_size = dp_degree * micro_batch_size * (self.num_micro_batches or 1)

    def strategy(self, num_processes: int, model: nn.Module | None = None) -> MegatronStrategy:
        """Return the strategy with the same options.

        Args:
            num_processes: Number of processes of the run.
            model: The trained model, whose layers determine the number of virtual stages. Default: None, which assumes
                two virtual stages if `num_layers_per_virtual_pipeline_stage` is set.

        Raises:
            ConfigurationError: The value of an option is unknown, or the strategy does not support it.
        """
        self._refuse_unsupported()
        if self.recompute_granularity is not None:
            one_of("recompute_granularity", self.recompute_granularity, ("full", "selective"))
        one_of("lr_decay_style", self.lr_decay_style, ("linear", "cosine", "constant"))
        one_of("weight_decay_incr_style", self.weight_decay_incr_style, ("constant", "linear", "cosine"))
        options: dict[str, Any] = {"tp": self.tp_degree, "pp": self.pp_degree}
        if self.pp_degree != 1:
            options["num_micro_batches"] = self.num_micro_batches  # MegatronStrategy refuses it without a pipeline
            virtual_stages = self._virtual_stages(model)
            if virtual_stages > 1:
                options |= {"virtual_stages": virtual_stages, "schedule": "interleaved1f1b"}
        recompute = self.recompute_granularity
        if recompute is None and self.recompute_activations:
            recompute = "selective"
        splits_layers = (self.tp_degree or 1) > 1
        return MegatronStrategy(
            **options,
            recompute=recompute,
            distributed_optimizer=bool(self.use_distributed_optimizer),
            sequence_parallel="auto" if splits_layers and self.sequence_parallelism else False,
        )

    def _refuse_unsupported(self) -> None:
        """Raise an error for an option that has an effect in Megatron-LM and none here."""
        for option in fields(self):
            refusal = option.metadata.get("refusal")
            value = getattr(self, option.name)
            if not refusal:
                continue
            has_no_effect = value is None or value in option.metadata["harmless"]
            if has_no_effect:
                continue
            raise ConfigurationError(f"{option.name}={value!r} of MegatronLMPlugin is not supported: {refusal}.")

    def _virtual_stages(self, model: nn.Module | None) -> int:
        """Return the number of stages per rank.

        8 layers with 2 layers per stage are 4 stages. With pp_degree=2, they are 2 stages per rank.
        """
        layers_per_stage = self.num_layers_per_virtual_pipeline_stage
        if layers_per_stage is None:
            return 1
        if model is None:
            return 2
        pp = self.pp_degree or 1
        num_layers = len(layers_of(model, pp))
        if layers_per_stage < 1 or num_layers % (pp * layers_per_stage):
            problem = f"{num_layers} layers cannot be divided by pp_degree={pp} × {layers_per_stage}"
            raise ConfigurationError(
                f"num_layers_per_virtual_pipeline_stage={layers_per_stage}: {problem}. Use a divisor of "
                f"{num_layers // pp}."
            )
        return num_layers // (pp * layers_per_stage)
